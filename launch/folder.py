"""The run folder: who may use it, and what it holds from the first second.

config.json   every setting: value, origin, meaning
run.json      the command line, when it started, how long it ran
logs/         one file a role          status/   what each role is doing now
metrics.jsonl, events.jsonl, evals/, episodes/, store/, report.html   as they come
"""

from collections.abc import Mapping, Sequence
import fcntl
import json
import os
import pathlib
import shlex
import shutil
import time
from typing import Any

from swe17.metrics import lines

_FREE_MIB = 256


def claim(run_dir: str, *, resume: bool) -> int:
  """Makes the folder and takes its lock: a file descriptor, held until it is closed.

  ValueError if the folder is in use, holds a run (without `resume`), holds none (with
  it), cannot be written, or its disk is nearly full.
  """
  folder = pathlib.Path(run_dir)
  has_run = (folder / 'config.json').exists()
  if resume and not has_run:
    raise ValueError(f'nothing to resume in {folder}: it has no config.json')
  try:
    folder.mkdir(parents=True, exist_ok=True)
    # Not inherited by children: the lock ends with the process that holds it.
    lock = os.open(folder / '.lock', os.O_RDWR | os.O_CREAT, 0o644)
  except OSError as e:
    raise ValueError(f'cannot write to run folder {folder}: {e.strerror}') from e
  try:
    _lock(lock, folder)
    _check(folder, resume, has_run)
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
  except (OSError, ValueError):
    os.close(lock)
    raise
  return lock


def _lock(lock: int, folder: pathlib.Path) -> None:
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    holder = os.read(lock, 32).decode() or 'unknown'
    raise ValueError(f'run folder {folder} is in use by process {holder}') from e


def _check(folder: pathlib.Path, resume: bool, has_run: bool) -> None:
  if has_run and not resume:
    raise ValueError(
      f'run folder {folder} already holds a run: add --resume to go on with it, or '
      'choose another --run_dir'
    )
  free = shutil.disk_usage(folder).free >> 20
  if free < _FREE_MIB:
    raise ValueError(
      f'the disk of run folder {folder} is full: {free} MiB free, want >= {_FREE_MIB}'
    )


def fill(run_dir: str, document: Mapping[str, Any], command: Sequence[str]) -> None:
  """Writes config.json and run.json, and clears what the last start left behind."""
  folder = pathlib.Path(run_dir)
  for name in ('logs', 'status'):
    (folder / name).mkdir(exist_ok=True)
  for old in (folder / 'status').glob('*.json'):
    old.unlink()
  _write(folder / 'config.json', document)
  run = _run(folder)
  started = run.get('started') or time.time()
  _write(
    folder / 'run.json', {**run, 'command': shlex.join(command), 'started': started}
  )


def add_seconds(run_dir: str, seconds: float) -> None:
  """Adds the time of one start to run.json, which keeps the sum over all starts."""
  folder = pathlib.Path(run_dir)
  run = _run(folder)
  _write(
    folder / 'run.json',
    {**run, 'seconds': round((run.get('seconds') or 0) + seconds, 1)},
  )


def _run(folder: pathlib.Path) -> dict[str, Any]:
  path = folder / 'run.json'
  return (lines.parse(path.read_bytes()) or {}) if path.exists() else {}


def _write(path: pathlib.Path, document: Mapping[str, Any]) -> None:
  lines.replace(str(path), (json.dumps(document, indent=1) + '\n').encode())


def last_line(path: pathlib.Path, prefix: str = '') -> str:
  """The last line of a log that is not empty (and starts with `prefix`), or ''."""
  if not path.exists():
    return ''
  with open(path, 'rb') as f:
    f.seek(max(0, path.stat().st_size - (1 << 14)))
    text = f.read().decode(errors='replace').splitlines()
  found = [line.strip() for line in text if line.strip() and line.startswith(prefix)]
  return found[-1] if found else ''
