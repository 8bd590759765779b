"""Copies of packages that lie about on this machine, and how a sandbox hides them.

Tools of the system bring packages of their own, in places that no Python looks in: an
agent that repairs one of these need only search the disk. Two walls: whole folders of
installed packages and of programs that hold Python code (`installed`), and every
package or module of a given name that a sandbox would show (`find`), but for the
library's own.
"""

from collections.abc import Collection, Iterable, Mapping
import functools
import os
import pathlib
import re
import sys
import sysconfig

_SYSTEM = '/usr'
_LIBRARY = re.compile(r'python3\.\d+')  # the folder of a Python's own library


def hide(names: Collection[str]) -> list[str]:
  """bwrap options that cover packages and modules of these names."""
  return covering(find(names))


def covering(paths: Iterable[pathlib.Path]) -> list[str]:
  """bwrap options: folders are empty there, and files cannot be opened."""
  options: list[str] = []
  for path in paths:
    if path.is_dir():
      options += ['--perms', '0755', '--tmpfs', str(path)]
    elif path.exists():
      options += ['--ro-bind', '/dev/null', str(path)]
  return options


@functools.cache
def installed() -> tuple[pathlib.Path, ...]:
  """Folders of the system that hold installed packages, or archives of some."""
  library = pathlib.Path(sysconfig.get_path('stdlib'))
  found = [library / 'site-packages', library / 'ensurepip', library / 'test']
  for prefix in dict.fromkeys((sys.base_prefix, '/usr', '/usr/local')):
    found += pathlib.Path(prefix, 'lib').glob('python3*/*-packages')
  return tuple(dict.fromkeys([*found, *programs()]))


@functools.cache
def programs() -> tuple[pathlib.Path, ...]:
  """Folders of /usr that hold Python code beside this Python's own library.

  Programs of the system bring copies of packages along, wherever they like. Walks all
  of it once, which takes a moment.
  """
  own = sysconfig.get_path('stdlib')
  found: dict[pathlib.Path, None] = {}
  for at, folders, files in os.walk('/usr'):
    if at == own or os.path.basename(at) in ('bin', 'sbin'):
      folders.clear()  # scripts are no packages, and commands are needed
    elif any(file.endswith(('.py', '.pyc', '.whl', '.egg')) for file in files):
      place = pathlib.Path(at)
      # The program's whole folder, unless libraries of the system are in there too.
      top = next((p for p in (*place.parents, place) if _of_a_program(p)), place)
      found[top if not own.startswith(f'{top}/') else place] = None
      folders.clear()
  tops = [path for path in found if not any(p in found for p in path.parents)]
  return tuple(tops)


def _of_a_program(path: pathlib.Path) -> bool:
  """Whether a folder is one of /usr/lib, /usr/share and so on, of a single program."""
  shared = path.parent.name in ('lib', 'share', 'libexec') and path.parts[1] == 'usr'
  return shared and not path.name.endswith(('-linux-gnu', '-linux-musl'))


def find(names: Collection[str]) -> list[pathlib.Path]:
  """Where they are. The first call of a process takes seconds: it looks everywhere."""
  known = _everything()
  wanted = sorted(set(names) - sys.stdlib_module_names)
  return [path for name in wanted for path in known.get(name, ())]


@functools.cache
def _everything() -> Mapping[str, tuple[pathlib.Path, ...]]:
  """Name -> packages and modules that a sandbox would show, but for libraries' own."""
  found: dict[str, list[pathlib.Path]] = {}
  for place in dict.fromkeys((_SYSTEM, os.path.realpath(sys.base_prefix))):
    for at, folders, files in os.walk(place):
      if _LIBRARY.fullmatch(os.path.basename(at)):
        folders[:] = [name for name in folders if name.endswith('-packages')]
        continue
      here = pathlib.Path(at)
      if '__init__.py' in files:
        found.setdefault(here.name, []).append(here)
      for name in files:
        if name.endswith('.py') and name != '__init__.py':
          found.setdefault(name[:-3], []).append(here / name)
  return {name: tuple(dict.fromkeys(paths)) for name, paths in found.items()}
