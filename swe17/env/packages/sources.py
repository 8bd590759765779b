"""Trees of packages, from source distributions that pip's index holds.

  source distribution (hash-checked, kept in the cache) -> Tree, files in memory

Nothing of a distribution is run to get at its files. Once in the cache, no network is
needed. A tree holds source, tests and what those read: no documents, change logs,
build metadata or compiled files, and no links, so that nothing in it can lead out.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request

from swe17.env.packages import catalogue

Source = catalogue.Source
SOURCES: Mapping[str, Source] = catalogue.SOURCES

MAX_BYTES = 32 << 20  # of a distribution, unpacked
_SECONDS = 60.0  # of one answer of the index
_SKIPPED = ('__pycache__', '.git', '.hg', '.svn')
_MODULE = re.compile(r'[A-Za-z_]\w*\.py', re.ASCII)
_FOLDER = re.compile(r'[A-Za-z_]\w*', re.ASCII)
_NOT_SOURCE = re.compile(
  r'conftest\.py|test_.*|.*_test\.py|tests?\.py|(site|user)customize\.py'
)
# Asks pip itself, so that its settings hold: environment, files, all of it.
_ASK_PIP = (
  'import json; from pip._internal.commands import create_command; '
  'o, _ = create_command("download").parse_args([]); '
  'print(json.dumps([o.index_url, *o.extra_index_urls]))'
)


class SourceError(ValueError):
  """A tree is not to be had; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class Tree:
  """A package in memory. Paths have '/' between names; roots and tests as in Source."""

  name: str
  files: Mapping[str, bytes]
  roots: tuple[str, ...]
  tests: tuple[str, ...]
  path: tuple[str, ...] = ('',)

  def is_source(self, path: str) -> bool:
    """Whether a path is the package's code: what an agent may write."""
    *folders, name = path.split('/')
    if not _MODULE.fullmatch(name) or _NOT_SOURCE.fullmatch(name):
      return False
    if not all(map(_FOLDER.fullmatch, folders)) or within(path, self.tests):
      return False
    return within(path, self.roots)

  @functools.cached_property
  def source(self) -> Mapping[str, bytes]:
    return {p: data for p, data in self.files.items() if self.is_source(p)}

  @functools.cached_property
  def rest(self) -> Mapping[str, bytes]:
    """Tests, their settings, data: what no agent may change."""
    return {p: data for p, data in self.files.items() if not self.is_source(p)}

  @functools.cached_property
  def sha(self) -> str:
    """16 hexadecimal digits of sha256 over sorted paths and contents."""
    return digest(self.files)

  def with_source(self, files: Mapping[str, bytes]) -> 'Tree':
    """This tree with an agent's source: what in `files` is no source is left out.

    A module that `files` lacks is gone, except an `__init__.py`: without it pytest
    would take the package's folder for a place to import from.
    """
    source = {p: data for p, data in files.items() if self.is_source(p)}
    inits = {p: d for p, d in self.source.items() if p.endswith('/__init__.py')}
    # The rest is written last: nothing of an agent's stands in its place.
    return dataclasses.replace(self, files={**inits, **source, **self.rest})


def within(path: str, places: Sequence[str]) -> bool:
  """Whether a path is one of some files, or in one of some folders."""
  return any(path == place or path.startswith(f'{place}/') for place in places)


def digest(files: Mapping[str, bytes]) -> str:
  """16 hexadecimal digits that name a set of files."""
  made = hashlib.sha256()
  for path in sorted(files):
    made.update(f'{len(path)} {path}{len(files[path])} '.encode())
    made.update(files[path])
  return made.hexdigest()[:16]


@functools.cache
def fetch(name: str, cache: str = '') -> Tree:
  """The tree of a package of the catalogue. SourceError if it is not to be had.

  `cache` is the setting tasks.cache: a folder, '' for the user's own.
  """
  if name not in SOURCES:
    raise SourceError(f'package: got {name!r}, want one of {", ".join(SOURCES)}')
  return tree(name, SOURCES[name], cache)


def tree(name: str, source: Source, cache: str = '') -> Tree:
  """The tree of any source distribution, as `source` describes it."""
  files = unpack(distribution(source, cache))
  kept = {p: data for p, data in files.items() if within(p, source.kept)}
  if not any(within(p, source.roots) for p in kept):
    raise SourceError(f'{source.distribution} {source.version}: no {source.roots}')
  return Tree(name, kept, source.roots, source.tests, source.path)


def folder(cache: str = '') -> pathlib.Path:
  """Where source distributions are kept."""
  if cache:
    return pathlib.Path(cache).expanduser()
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(home, 'swe17')


def distribution(source: Source, cache: str = '') -> bytes:
  """A source distribution, of the right hash; downloaded if it is not in the cache."""
  name = f'{source.distribution}-{source.version}-{source.sha256[:16]}.tar.gz'
  file = folder(cache) / 'sdist' / name
  if file.is_file():
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() == source.sha256:
      return data
  data = _download(source)
  if hashlib.sha256(data).hexdigest() != source.sha256:
    raise SourceError(
      f'{source.distribution} {source.version}: what the index gave has another hash '
      'than the catalogue says'
    )
  file.parent.mkdir(parents=True, exist_ok=True)
  part = file.with_name(f'{name}.{os.getpid()}')
  part.write_bytes(data)
  part.replace(file)
  return data


def unpack(data: bytes) -> dict[str, bytes]:
  """Plain files of a source distribution, without its top folder and what is compiled.

  SourceError if it is no archive, or too large.
  """
  files: dict[str, bytes] = {}
  total = 0
  try:
    with tarfile.open(fileobj=io.BytesIO(data), mode='r:*') as tar:
      for member in tar:
        parts = pathlib.PurePosixPath(member.name).parts[1:]
        if not member.isreg() or not parts or not _plain(parts):
          continue
        total += member.size
        if total > MAX_BYTES:
          raise SourceError(f'a source distribution: over {MAX_BYTES} bytes unpacked')
        file = tar.extractfile(member)
        assert file is not None
        files['/'.join(parts)] = file.read()
  except tarfile.TarError as e:
    raise SourceError(f'a source distribution cannot be read: {e}') from e
  return files


def _plain(parts: Sequence[str]) -> bool:
  skipped = any(p in _SKIPPED or p == '..' or p.endswith('.egg-info') for p in parts)
  return not skipped and not parts[-1].endswith(('.pyc', '.pyo', '.so', '.pyd'))


def _download(source: Source) -> bytes:
  for release in releases(source.distribution):
    if release.sha256 == source.sha256:
      return _get(release.url, 'application/octet-stream')
  raise SourceError(
    f'{source.distribution}: the index has no source distribution of version '
    f'{source.version} with the hash of the catalogue'
  )


@dataclasses.dataclass(frozen=True)
class Release:
  """A source distribution that the index offers."""

  version: str
  sha256: str
  url: str
  uploaded: str  # ISO 8601; '' if the index does not say


@functools.cache
def releases(name: str) -> tuple[Release, ...]:
  """Source distributions (.tar.gz, not yanked) of a package, the oldest first."""
  found: dict[str, Release] = {}
  for index in _indices():
    if not index.startswith('http'):
      continue  # a folder of wheels
    wanted = re.sub(r'[-_.]+', '-', name).lower()
    url = f'{index.rstrip("/")}/{wanted}/'
    answer = json.loads(_get(url, 'application/vnd.pypi.simple.v1+json'))
    for file in answer['files']:
      version = _version(file['filename'])
      if version and not file.get('yanked') and 'sha256' in file.get('hashes', {}):
        found.setdefault(
          version,
          Release(
            version,
            file['hashes']['sha256'],
            urllib.parse.urljoin(url, file['url']),
            file.get('upload-time') or '',
          ),
        )
  return tuple(sorted(found.values(), key=lambda release: release.uploaded))


def _version(filename: str) -> str:
  found = re.fullmatch(r'.+-(\d[^-]*)\.tar\.gz', filename)
  return found[1] if found else ''


@functools.cache
def _indices() -> tuple[str, ...]:
  done = subprocess.run(
    [sys.executable, '-c', _ASK_PIP],
    check=False,
    capture_output=True,
    text=True,
  )
  if done.returncode != 0:
    why = (done.stderr.strip().splitlines() or ['it said nothing'])[-1]
    raise SourceError(f'pip does not say which index it is set to use: {why}')
  return tuple(json.loads(done.stdout))


def _get(url: str, accept: str) -> bytes:
  request = urllib.request.Request(url, headers={'Accept': accept})
  try:
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
      return answer.read()
  except (urllib.error.URLError, TimeoutError) as e:
    raise SourceError(
      f'the package index cannot be read ({e}); put the source distribution into the '
      'cache folder (tasks.cache) by hand, or try again'
    ) from e
