"""Unified diffs, applied by git to files in memory.

Only the files that a diff names are written out, into a folder of their own; git itself
refuses paths that lead out of it, and applies binary changes, renames and modes too.
"""

from collections.abc import Mapping
import os
import pathlib
import re
import subprocess
import tempfile

_SECONDS = 60.0
# Lines that name a file. `diff --git` alone where it is empty, binary or only a mode.
_NAMES = re.compile(
  rb'^(?:--- |\+\+\+ |rename from |rename to |copy from |copy to )(?P<path>[^\n]+)$'
  rb'|^diff --git (?P<pair>[^\n]+)$',
  re.MULTILINE,
)


class PatchError(ValueError):
  """A diff does not apply; the text is git's."""


def named(diff: str) -> set[str]:
  """Paths that the lines of a diff may name: never too few, but for quoted ones."""
  found: set[str] = set()
  for match in _NAMES.finditer(diff.encode()):
    if match['pair']:
      words = os.fsdecode(match['pair'])
      # 'a/x y b/x y': both names are the same, and of the same length.
      half = len(words) // 2
      found |= {_stripped(words[:half]), _stripped(words[half + 1 :])}
    else:
      path = os.fsdecode(match['path']).split('\t')[0].rstrip('\r')
      found |= {path, _stripped(path)}
  return found - {'', 'dev/null', '/dev/null', 'null'}


def _stripped(path: str) -> str:
  return path.partition('/')[2] if path.startswith(('a/', 'b/')) else path


def apply(diff: str, files: Mapping[str, bytes]) -> dict[str, bytes | None]:
  """What a diff makes of `files`: path -> new content, None where it deletes.

  Only what changes is in the result. PatchError if it does not apply as a whole.
  """
  if not diff.strip():
    return {}
  given = {name: files[name] for name in named(diff) if name in files}
  with tempfile.TemporaryDirectory(prefix='patch-') as scratch:
    root = pathlib.Path(scratch)
    for name, data in given.items():
      file = root / name
      if '..' in pathlib.PurePosixPath(name).parts:
        raise PatchError(f'a path leads out of the tree: {name!r}')
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_bytes(data)
    _git_apply(diff, scratch)
    after = {
      file.relative_to(root).as_posix(): file.read_bytes()
      for file in sorted(root.rglob('*'))
      if file.is_file() and not file.is_symlink()
    }
  changed: dict[str, bytes | None] = {
    name: data for name, data in after.items() if given.get(name) != data
  }
  return changed | {name: None for name in given if name not in after}


def _git_apply(diff: str, folder: str) -> None:
  # No repository around the folder is to be found, no settings to be read.
  env = {'PATH': os.environ.get('PATH', os.defpath), 'LC_ALL': 'C.UTF-8'}
  env |= {'GIT_CEILING_DIRECTORIES': os.path.dirname(folder), 'HOME': folder}
  env |= {'GIT_CONFIG_NOSYSTEM': '1', 'GIT_CONFIG_GLOBAL': os.devnull}
  text = diff if diff.endswith('\n') else diff + '\n'
  try:
    done = subprocess.run(
      ['git', 'apply', '--whitespace=nowarn', '-'],
      check=False,
      input=text.encode(),
      capture_output=True,
      cwd=folder,
      env=env,
      timeout=_SECONDS,
    )
  except FileNotFoundError as e:
    raise PatchError('git is not installed: diffs cannot be applied') from e
  except subprocess.TimeoutExpired as e:
    raise PatchError(f'git apply took over {_SECONDS:g} s') from e
  if done.returncode != 0:
    lines = done.stderr.decode(errors='replace').strip().splitlines()
    raise PatchError('; '.join(lines[:2]) or 'git apply failed without a word')


def over(
  files: Mapping[str, bytes], changes: Mapping[str, bytes | None]
) -> dict[str, bytes]:
  """`files` with the changes that `apply` gave."""
  merged: dict[str, bytes | None] = {**files, **changes}
  return {name: data for name, data in merged.items() if data is not None}
