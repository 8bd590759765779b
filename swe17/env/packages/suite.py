"""A package's own tests, run in a sandbox, with a result for each that can be believed.

  tree (the clean one, with an agent's source) + ids of tests -> Report

The tree is written by the keeper and then read-only for what runs in it, nothing else
of the machine is there but Python's library and pytest, which are read-only too.
Results are structured records of our own plugin (inside.py, plugin.py), never what a
program prints; a test without one has not passed. Canaries tell whether somebody has
bent pytest: `Report.forged`.
"""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import secrets
import shutil
import stat
import tempfile
import time
from typing import Any

from swe17 import config
from swe17.env import base, copies, pool, sandbox
from swe17.env.packages import sources

CANARIES = 2
SECONDS = 60.0  # of a whole run
_PARTS = ('_pytest', 'pytest', 'pluggy', 'iniconfig', 'packaging', 'pygments', 'py')
_PROCESSES = 64
_MEMORY_MIB = 1024
_OUTPUT_KIB = 16 << 10
_MARGIN_SECONDS = 20.0
_FILES = 256  # open files of the suite
_TREE, _PLACE = '/tree', '/parts'
_PROGRAM = 'packages.inside'


class SuiteError(base.InfrastructureError):
  """The sandbox failed. Says nothing about the code."""


@dataclasses.dataclass(frozen=True)
class Report:
  """What became of the tests. Absent is not passed.

  Attributes:
    results: id -> passed | failed | error | skipped | timeout. A file that could not be
      collected is an 'error' under its own name.
    complete: whether the run came to its end; `reason` says why not.
    forged: how the results were tampered with; '' if no sign of it was seen.
    texts: id -> what its failure said, in a few lines.
    durations: id -> wall seconds.
    touched: id -> 'path:line' of functions that it ran, if asked for; '' -> those that
      imports ran.
    unsteady: ids that came out otherwise in some repetition.
    cpu_seconds: of everything in the sandbox, all repetitions together.
  """

  results: Mapping[str, str]
  seconds: float
  complete: bool
  reason: str
  forged: str
  texts: Mapping[str, str] = dataclasses.field(default_factory=dict)
  durations: Mapping[str, float] = dataclasses.field(default_factory=dict)
  touched: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  unsteady: frozenset[str] = frozenset()
  cpu_seconds: float = 0.0

  def passed(self, tests: Sequence[str]) -> bool:
    """Whether all of `tests` have passed and nothing is wrong with the report."""
    sound = self.complete and not self.forged
    return sound and all(self.results.get(test) == 'passed' for test in tests)


async def run(
  cfg: config.Sandbox,
  backend: str,
  tree: sources.Tree,
  tests: Sequence[str] | None,
  seconds_a_test: float,
  *,
  seconds: float = SECONDS,
  explain: bool = False,
  trace: bool = False,
  repeats: int = 1,
  ready: pool.Pool | None = None,
) -> Report:
  """Runs some tests of a tree (None: all), in a sandbox of its own.

  `explain` gives assertions' texts their values, without the guard against objects that
  equal everything: for reading, not for judging. `trace` fills `Report.touched`. With
  `repeats` every repetition has processes of its own, and the report is that of the
  first bad one, else of the first; the last one explains. Tests run in the suite's
  order. `ready` is a pool (`waiting`, of the same settings) whose sandboxes are quicker
  to be had. SuiteError if the sandbox fails.
  """
  spec = _spec(cfg, backend, tree, tests, seconds_a_test, seconds)
  spec |= {'explain': explain, 'trace': trace, 'repeats': repeats}
  cfg = dataclasses.replace(
    cfg,
    wall_seconds=repeats * seconds + _MARGIN_SECONDS,
    output_kib=max(cfg.output_kib, _OUTPUT_KIB),
  )
  start = time.monotonic()
  with contextlib.ExitStack() as stack:
    spec |= {'tree': _TREE, 'parts': _PLACE}
    if backend == 'process':
      if reason := _unreadable():
        raise SuiteError(f'{tree.name}: {reason}')
      scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix='suite-'))
      places = await asyncio.to_thread(_beside, scratch)
      spec |= places
      ready = pool.Pool(backend, _PROGRAM, places['parts'], work=places['work'])
    ready = ready or waiting(cfg, backend, 0)
    try:
      done = await ready.run(cfg, await asyncio.to_thread(_told_all, spec, tree))
    except OSError as e:
      raise SuiteError(f'{tree.name}: the sandbox failed: {e}') from e
  return _report(tree.name, done, time.monotonic() - start)


def waiting(cfg: config.Sandbox, backend: str, size: int) -> pool.Pool:
  """A pool of what `run` can be given as `ready`, by whoever has the same settings.

  They have imported pytest, and hide installed packages. The tree, and what is hidden
  for it alone, they are told.
  """
  size_mib = max(cfg.memory_mib, _MEMORY_MIB)
  options = sandbox.work_options(dataclasses.replace(cfg, memory_mib=size_mib))
  options += ['--perms', '0755', '--tmpfs', _TREE, '--perms', '0755', '--dir', _PLACE]
  for name, place in pytest_parts().items():
    options += ['--ro-bind', place, f'{_PLACE}/{name}']
  options += copies.covering(copies.installed())
  return pool.Pool(backend, _PROGRAM, _PLACE, options=options, size=size)


def _told_all(spec: Mapping[str, Any], tree: sources.Tree) -> bytes:
  """What the keeper is told: a line of JSON, then the files one after another."""
  files = {path: len(data) for path, data in tree.files.items()}
  hidden: list[str] = []
  if spec['isolated']:
    names = [pathlib.PurePath(root).stem for root in tree.roots]
    hidden = [str(path) for path in copies.find(names)]
  head = json.dumps({**spec, 'tree_files': files, 'hidden': hidden}).encode()
  return b''.join((head, b'\n', *tree.files.values()))


def _report(name: str, done: sandbox.Completed, seconds: float) -> Report:
  if done.timed_out or done.returncode != 0 or done.truncated:
    lines = done.stderr.decode(errors='replace').strip().splitlines()
    why = 'it took too long' if done.timed_out else (lines or ['without a word'])[-1]
    raise SuiteError(f'{name}: the suite ended with {done.returncode}: {why}')
  told = json.loads(done.stdout)
  runs = [_told(run, seconds) for run in told['runs']]
  first = next((run for run in runs if not run.complete), runs[0])
  ids = {test for run in runs for test in run.results}
  unsteady = {test for test in ids if len({run.results.get(test) for run in runs}) > 1}
  slowest = {
    test: max(run.durations.get(test, 0.0) for run in runs) for test in first.durations
  }
  return dataclasses.replace(
    first,
    texts=runs[-1].texts,
    touched=runs[0].touched,
    durations=slowest,
    unsteady=frozenset(unsteady),
    cpu_seconds=told['cpu'],
  )


def _told(told: Mapping[str, Any], seconds: float) -> Report:
  results = told['results']
  return Report(
    results={test: value[0] for test, value in results.items()},
    seconds=seconds,
    complete=not told['reason'] and not told['forged'],
    reason=told['reason'] or told['forged'],
    forged=told['forged'],
    texts={test: value[2] for test, value in results.items() if value[2]},
    durations={test: value[1] for test, value in results.items()},
    touched={test: tuple(places) for test, places in told['touched'].items()},
  )


def _spec(
  cfg: config.Sandbox,
  backend: str,
  tree: sources.Tree,
  tests: Sequence[str] | None,
  seconds_a_test: float,
  seconds: float,
) -> dict[str, Any]:
  files = sorted({test.partition('::')[0] for test in tests or ()})
  if tests is None:
    files = [p for p in tree.tests if any(sources.within(f, [p]) for f in tree.files)]
  memory = max(cfg.memory_mib, _MEMORY_MIB) << 20
  return {
    'isolated': backend == 'bubblewrap',
    'path': list(tree.path),
    'files': [file for file in files if _exists(tree, file)],
    'guarded': [p for p in tree.rest if p.endswith('.py')],
    'wanted': None if tests is None else sorted(set(tests)),
    'seconds_a_test': seconds_a_test,
    'seconds': seconds,
    'seed': secrets.randbits(63),
    'canaries': CANARIES,
    'limits': {
      'cpu_seconds': seconds,
      'memory_bytes': memory,
      'processes': max(cfg.processes, _PROCESSES),
      'files': _FILES,
      'file_bytes': memory,
    },
  }


def _exists(tree: sources.Tree, place: str) -> bool:
  return any(sources.within(path, [place]) for path in tree.files)


def _unreadable() -> str:
  """Why suites cannot run without isolation; '' if they can.

  Who runs them has become nobody, and imports of Python's library when it likes.
  """
  if os.getuid() != 0:
    return ''
  place = pathlib.Path(os.__file__)
  closed = [p for p in place.parents if not p.stat().st_mode & stat.S_IXOTH]
  if not closed:
    return ''
  return (
    f"nobody but root can read Python's library: {closed[0]} is closed to others. Use "
    'sandbox.backend=bubblewrap, or a Python that others can read'
  )


def _beside(scratch: str) -> dict[str, str]:
  """Where things are for who runs where there is no isolation."""
  found = {name: str(pathlib.Path(scratch, name)) for name in ('tree', 'parts', 'work')}
  for place in found.values():
    os.mkdir(place)
  for name, place in pytest_parts().items():
    pathlib.Path(found['parts'], name).symlink_to(place)
  os.chmod(scratch, 0o755)
  if os.getuid() == 0:
    shutil.chown(found['work'], 65534, 65534)
  return found


@functools.cache
def pytest_parts() -> dict[str, str]:
  """File or folder name -> place, of pytest and what it imports."""
  found = {}
  for name in _PARTS:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
      continue  # `py` is a file of pytest's own, or gone
    origin = pathlib.Path(spec.origin)
    place = origin.parent if origin.name == '__init__.py' else origin
    found[place.name] = str(place)
  if 'pytest' not in found:
    raise SuiteError('pytest is not installed: pip install pytest')
  return found
