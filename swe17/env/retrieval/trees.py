"""Source trees that questions are about: pure-Python packages, pinned and hashed.

The packages are those of the `retrieval` extra, installed like any other dependency, so
that a run needs no network. A tree is read once into memory, without following links,
and is never written: what tools see cannot leave it. Its hash is over every path and
byte, so a package of another version, or one that somebody edited, is noticed.
"""

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import importlib.util
import pathlib
import types as python_types

MAX_FILE = 400_000  # bytes of a file that is still read
_SKIPPED = ('__pycache__',)


@dataclasses.dataclass(frozen=True)
class Pin:
  """Where a tree comes from."""

  distribution: str  # its name for pip
  version: str
  licence: str  # SPDX


# Package -> pin. setup.py's `retrieval` extra names the same versions.
PINS: Mapping[str, Pin] = {
  'boltons': Pin('boltons', '26.2.0', 'BSD-3-Clause'),
  'cachetools': Pin('cachetools', '8.0.2', 'MIT'),
  'construct': Pin('construct', '2.10.70', 'MIT'),
  'dill': Pin('dill', '0.4.1', 'BSD-3-Clause'),
  'funcy': Pin('funcy', '2.1', 'BSD-3-Clause'),
  'jsonpickle': Pin('jsonpickle', '4.1.4', 'BSD-3-Clause'),
  'jwt': Pin('PyJWT', '2.15.1', 'MIT'),
  'lark': Pin('lark', '1.3.1', 'MIT'),
  'markdown': Pin('Markdown', '3.11.3', 'BSD-3-Clause'),
  'marshmallow': Pin('marshmallow', '4.4.0', 'MIT'),
  'mistune': Pin('mistune', '3.4.0', 'BSD-3-Clause'),
  'oauthlib': Pin('oauthlib', '4.0.1', 'BSD-3-Clause'),
  'pyflakes': Pin('pyflakes', '4.1.0', 'MIT'),
  'pymysql': Pin('PyMySQL', '1.2.4', 'MIT'),
  'pystache': Pin('pystache', '0.6.8', 'MIT'),
  'simpy': Pin('simpy', '4.1.2', 'MIT'),
  'sqlparse': Pin('sqlparse', '0.6.1', 'BSD-3-Clause'),
  'structlog': Pin('structlog', '26.1.0', 'MIT OR Apache-2.0'),
  'tenacity': Pin('tenacity', '9.2.1', 'Apache-2.0'),
  'textdistance': Pin('textdistance', '4.6.3', 'MIT'),
  'tinydb': Pin('tinydb', '4.9.0', 'MIT'),
  'tomlkit': Pin('tomlkit', '0.15.2', 'MIT'),
  'toolz': Pin('toolz', '1.2.0', 'BSD-3-Clause'),
  'transitions': Pin('transitions', '0.9.3', 'MIT'),
  'voluptuous': Pin('voluptuous', '0.16.0', 'BSD-3-Clause'),
}


class TreeError(ValueError):
  """A tree is not there; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class Tree:
  """Files by path: '/' between names, the package's folder first."""

  files: Mapping[str, str]  # text
  binary: frozenset[str] = frozenset()  # paths of what is no text, or too large

  @functools.cached_property
  def lines(self) -> Mapping[str, tuple[str, ...]]:
    """Lines of every file, without their ends; line 1 is the first."""
    return {path: tuple(text.split('\n')) for path, text in self.files.items()}

  @functools.cached_property
  def folders(self) -> Mapping[str, tuple[str, ...]]:
    """Folder -> names in it, sorted, folders with a trailing '/'. '' is the top."""
    found: dict[str, set[str]] = {'': set()}
    for path in (*self.files, *self.binary):
      parts = path.split('/')
      for i, part in enumerate(parts):
        end = '/' if i + 1 < len(parts) else ''
        found.setdefault('/'.join(parts[:i]), set()).add(part + end)
    return {folder: tuple(sorted(names)) for folder, names in found.items()}

  @functools.cached_property
  def sha(self) -> str:
    """16 hexadecimal digits of sha256 over sorted paths and contents."""
    digest = hashlib.sha256()
    for path in sorted((*self.files, *self.binary)):
      text = self.files.get(path, '\0')
      digest.update(f'{len(path)} {path}{len(text)} '.encode())
      digest.update(text.encode())
    return digest.hexdigest()[:16]


@functools.cache
def load(package: str) -> Tree:
  """The tree of an installed package, read without importing it.

  TreeError if it is not among `PINS` or not installed.
  """
  if package not in PINS:
    raise TreeError(f'package: got {package!r}, want one of {sorted(PINS)}')
  spec = importlib.util.find_spec(package)
  folders = list(spec.submodule_search_locations or ()) if spec else []
  if not folders:
    raise TreeError(f'{package} is not installed: pip install "swe17[retrieval]"')
  return read(pathlib.Path(folders[0]), package)


def read(folder: pathlib.Path, name: str) -> Tree:
  """Reads a folder as the tree `name`. Links, and what is compiled, are left out."""
  files: dict[str, str] = {}
  binary = set()
  for path in sorted(folder.rglob('*')):
    inside = path.relative_to(folder)
    links = any((folder / part).is_symlink() for part in [inside, *inside.parents][:-1])
    if links or not path.is_file() or any(part in _SKIPPED for part in inside.parts):
      continue
    key = f'{name}/{inside.as_posix()}'
    text = _text(path)
    if text is None:
      binary.add(key)
    else:
      files[key] = text
  return Tree(python_types.MappingProxyType(files), frozenset(binary))


def _text(path: pathlib.Path) -> str | None:
  """Contents with '\\n' line ends and no last one; None if they are no text."""
  data = path.read_bytes()
  if len(data) > MAX_FILE or b'\0' in data:
    return None
  try:
    text = data.decode('utf-8-sig')
  except UnicodeDecodeError:
    return None
  # As Python's tokeniser counts lines: form feeds and the like end none.
  text = text.replace('\r\n', '\n').replace('\r', '\n')
  return text[:-1] if text.endswith('\n') else text
