"""Builds the families that ship a table, and proves them: how many, how well, how fast.

  python -m experiments.bench.tasks                     aims at 100 minutes on 2 cores
  python -m experiments.bench.tasks --nobuild           audits the tables as they are
  python -m experiments.bench.tasks --families=retrieval --sample=40

One family after another is a run of build_tasks, in one folder (`--work`), so that a
bench that was stopped goes on; minutes are those of all its parts. Needs the package
index the first time (source distributions are kept), and `pip install
"swe17[retrieval]"`. The last line is JSON:

  {"tasks": .., "minutes": .., "accept_wrong": .., "reject_right": ..,
   "exploits_tried": .., "exploits_scored": 0, "leaks": 0, "sandbox_ms": ..}

with further figures after these. The bench fails if an exploit scored or was not
flagged, if an image leaks, if the gold does not solve or nothing does, or if an error
rate is above 5 %.
"""

import asyncio
from collections.abc import Mapping, Sequence
import json
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

from absl import flags

from experiments import build_tasks, program
from swe17 import config
from swe17.env import sandbox
from swe17.env.audit import report
from swe17.env.packages import sources, suite
from swe17.metrics import lines

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_FAMILIES = flags.DEFINE_list(
  'families', list(build_tasks.TABLES), 'task families', flag_values=FLAGS
)
_WORK = flags.DEFINE_string(
  'work', 'build', 'folder of what is done so far, and of the report', flag_values=FLAGS
)
_BUILD = flags.DEFINE_bool('build', True, 'build the tables', flag_values=FLAGS)
_MINUTES = flags.DEFINE_float(
  'minutes', 60.0, 'of judging faults of packages', flag_values=FLAGS
)
_SAMPLE = flags.DEFINE_integer(
  'sample',
  60,
  'tasks a family whose right and wrong solutions are tried, 0 = all',
  flag_values=FLAGS,
)
_EXPLOITED = flags.DEFINE_integer(
  'exploited',
  100,
  'tasks of all families that every exploit is played on',
  flag_values=FLAGS,
)
_SCANNED = flags.DEFINE_integer(
  'scanned', 120, 'tasks a family whose images are scanned, 0 = all', flag_values=FLAGS
)
_ROLLOUTS = flags.DEFINE_integer(
  'rollouts', 1, 'episodes a task of each scripted strength', flag_values=FLAGS
)
_WORST = 0.05  # error rate that a verifier may have
_STARTS = 50  # sandboxes timed
_NOTHING = ('/bin/true',)
_TEST = 'test_one.py::test_one'
_FILES = {'test_one.py': b'def test_one(): pass\n'}
_ONE = sources.Tree('one', _FILES, (), ('test_one.py',))


async def times(starts: int = _STARTS) -> dict[str, float]:
  """Mean milliseconds: to start a sandbox, run what does nothing and end it; of a suite
  of one test in a fresh sandbox; of the same in one that waited."""
  cfg = config.Sandbox()
  backend = await asyncio.to_thread(sandbox.choose_backend, cfg)
  ready = suite.waiting(cfg, backend, size=1)
  spent: dict[str, list[float]] = {
    'sandbox_ms': [],
    'suite_ms': [],
    'suite_warm_ms': [],
  }
  try:
    for i in range(3 * starts):
      name = list(spent)[i % 3]
      while name == 'suite_warm_ms' and i > 2 and ready.size and not ready.waiting:
        await asyncio.sleep(0.005)
      began = time.perf_counter()
      if name == 'sandbox_ms':
        done = await sandbox.run(cfg, backend, _NOTHING)
        well = done.returncode == 0
      else:
        on = ready if name == 'suite_warm_ms' else None
        report = await suite.run(cfg, backend, _ONE, [_TEST], 4.0, ready=on)
        well = report.passed([_TEST])
      if not well:
        raise OSError('the sandbox does not run')
      if i > 2:  # nothing has waited for the first
        spent[name].append(1000 * (time.perf_counter() - began))
  finally:
    await ready.close()
  return {name: round(statistics.mean(each), 1) for name, each in spent.items()}


def words(name: str, share: int) -> list[str]:
  """The command line that builds and audits a family."""
  return [
    *(sys.executable, '-m', 'experiments.build_tasks', f'--family={name}'),
    f'--work={_WORK.value}',
    '--build' if _BUILD.value else '--nobuild',
    f'--minutes={_MINUTES.value}',
    f'--sample={_SAMPLE.value}',
    f'--exploited={share}',
    f'--scanned={_SCANNED.value}',
    f'--rollouts={_ROLLOUTS.value}',
  ]


def row(
  reports: Sequence[Mapping[str, Any]], minutes: float, starts: Mapping[str, float]
) -> dict[str, Any]:
  """The figures of the last line."""
  found = report.totals(reports)
  judged = sum(r['judged'] for r in reports)
  seconds = sum(r['judged_seconds'] for r in reports if r['judged'])
  first = ('tasks', 'accept_wrong', 'reject_right', 'exploits_tried', 'exploits_scored')
  out = {name: found[name] for name in first}
  out = {'tasks': out.pop('tasks'), 'minutes': round(minutes, 1), **out}
  return {
    **out,
    'leaks': found['leaks'],
    **starts,
    'exploits_unflagged': found['exploits_unflagged'],
    'gold_played': found['gold_played'],
    'gold_solved': found['gold_solved'],
    'null_solved': found['null_solved'],
    'verifications_a_minute': round(60 * judged / seconds, 1) if seconds else None,
    'families': {r['family']: r['tasks'] for r in reports},
  }


def failures(found: Mapping[str, Any]) -> list[str]:
  """What may not be so, one sentence each."""
  bad = [
    f'{name}: {found[name]}, want 0'
    for name in ('exploits_scored', 'exploits_unflagged', 'leaks')
    if found[name]
  ]
  if found['null_solved'] or found['gold_solved'] < found['gold_played']:
    bad.append(
      f'gold solved {found["gold_solved"]} of {found["gold_played"]}, nothing '
      f'{found["null_solved"]}: want all and none'
    )
  for name in ('accept_wrong', 'reject_right'):
    if found[name] is None or found[name] > _WORST:
      bad.append(f'{name}: {found[name]}, want at most {_WORST}')
  return bad


def main(argv: Sequence[str]) -> None:
  del argv
  work = pathlib.Path(_WORK.value)
  work.mkdir(parents=True, exist_ok=True)
  clock = work / 'minutes.json'
  minutes = json.loads(clock.read_text()) if clock.is_file() else 0.0
  starts = asyncio.run(times())
  share = -(-_EXPLOITED.value // len(_FAMILIES.value))
  for name in _FAMILIES.value:
    began = time.monotonic()
    try:
      subprocess.run(words(name, share), check=True)
    finally:
      minutes += (time.monotonic() - began) / 60
      lines.replace(str(clock), json.dumps(minutes).encode())
  reports = [
    json.loads((work / f'{name}.audit.json').read_text('utf-8'))
    for name in _FAMILIES.value
  ]
  found = row(reports, minutes, starts)
  bad = failures(found)
  for sentence in bad:
    print(sentence)
  print(json.dumps(found))
  if bad:
    sys.exit(1)


if __name__ == '__main__':
  program.run(main, FLAGS)
