"""Copies of a package that lie about on this machine, and how a sandbox hides them.

Tools of the system bring packages of their own, in places that no Python looks in: an
agent that repairs one of these need only search the disk. So where a sandbox shows /usr
and Python's library, every package and module of the same name in them is covered, but
for the library's own.
"""

from collections.abc import Collection, Iterable, Mapping
import functools
import os
import pathlib
import re
import sys

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
    else:
      options += ['--ro-bind', '/dev/null', str(path)]
  return options


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
