"""Builds the table of tasks of a family, and proves the tasks sound before they count.

  python -m experiments.build_tasks --family=repair_packages     whole packages
  python -m experiments.build_tasks --family=repair_functions
  python -m experiments.build_tasks --family=retrieval           (or retrieval_small)
  python -m experiments.build_tasks --family=kernels             (or kernels_small)
  python -m experiments.build_tasks --family=repair_text --nobuild
  python -m experiments.build_tasks --family=swe_bench --nobuild \
    tasks.table=rows.jsonl tasks.root=repositories tasks.place=local
  python -m experiments.build_tasks --family=module:factory --nobuild

First the family's own builder writes the table that ships with it. Then every task goes
through the pipeline of env/audit: gold passes, nothing fails, wrong solutions fail and
right ones pass, the standing list of exploits scores 0, no image leaks, no held-out
task resembles a training one. The tables of functions and questions are built within a
minute; proving takes longer, and `--sample` and `--exploited` bound it. `--work` keeps
one line an answer, so that what was stopped goes on where it was; report.html there
shows counts, reasons and examples. The last line of the output is the result as JSON.
Same seed, same library, same packages (`pip install "swe17[retrieval]"`; source
distributions as pip finds them): same table.

`--nobuild` audits the tasks as they are, `--noaudit` builds only. Families without a
table of their own have no builder: `tasks.name=value` says where their tasks are, and
`sandbox.name=value` what they run in, as for check_env. What a source sets aside, and a
task that nothing is known to solve, is in the report by its name.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
import dataclasses
import json
import pathlib
from typing import Any

from absl import app, flags

from experiments import check_env, program, task_audit
from swe17 import config
from swe17.env.audit import pipeline, subjects
from swe17.env.kernels import build as build_kernels
from swe17.env.kernels import kernels, kernels_small
from swe17.env.packages import build as build_packages
from swe17.env.packages import packages, pairs, rows
from swe17.env.repair import build, grader, repair
from swe17.env.retrieval import build as build_retrieval
from swe17.env.retrieval import retrieval

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_FAMILY = flags.DEFINE_string(
  'family',
  repair.FAMILY,
  f'task family: {", ".join(subjects.SUBJECTS)} or module:factory',
  flag_values=FLAGS,
)
_OUT = flags.DEFINE_string(
  'out', '', "table file to write; empty: the family's own", flag_values=FLAGS
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'seeds cases, choice of faults and split', flag_values=FLAGS
)
_PER_FUNCTION = flags.DEFINE_integer(
  'per_function', 4, 'tasks of one function, at most', flag_values=FLAGS
)
_PER_KIND = flags.DEFINE_integer(
  'per_kind',
  0,
  'retrieval: tasks of a kind from one package, 0 = as usual',
  flag_values=FLAGS,
)
_HELDOUT = flags.DEFINE_float(
  'heldout', 0.3, 'share of functions (packages) held out', flag_values=FLAGS
)
_WORKERS = flags.DEFINE_integer('workers', 2, 'graders', flag_values=FLAGS)
_WORK = flags.DEFINE_string(
  'work', 'build', 'folder of what is done so far, and of the report', flag_values=FLAGS
)
_TASKS = flags.DEFINE_integer(
  'tasks', 1500, 'repair_packages: faults wanted', flag_values=FLAGS
)
_PAIRS = flags.DEFINE_integer(
  'pairs', 60, 'repair_packages: release pairs wanted', flag_values=FLAGS
)
_MINUTES = flags.DEFINE_float(
  'minutes', 90.0, 'repair_packages: of building; it goes on later', flag_values=FLAGS
)
_CACHE = flags.DEFINE_string(
  'cache', '', 'folder of source distributions, as tasks.cache', flag_values=FLAGS
)
_KERNELS = flags.DEFINE_integer(
  'small', 700, 'kernels_small: functions tried', flag_values=FLAGS
)
_BUILD = flags.DEFINE_bool('build', True, 'build the table', flag_values=FLAGS)
_AUDIT = flags.DEFINE_bool('audit', True, 'prove the tasks sound', flag_values=FLAGS)
_SAMPLE = flags.DEFINE_integer(
  'sample',
  0,
  'tasks whose right and wrong solutions are tried, 0 = all',
  flag_values=FLAGS,
)
_EXPLOITED = flags.DEFINE_integer(
  'exploited', 25, 'tasks that every exploit is played on', flag_values=FLAGS
)
_SCANNED = flags.DEFINE_integer(
  'scanned', 0, 'tasks whose images are scanned for leaks, 0 = all', flag_values=FLAGS
)
_ROLLOUTS = flags.DEFINE_integer(
  'rollouts',
  0,
  'episodes a task of each scripted strength, for difficulty',
  flag_values=FLAGS,
)
# Those that ship with a family, whose builder is here too.
TABLES = {
  repair.FAMILY: repair.TABLE,
  packages.FAMILY: packages.TABLE,
  kernels.FAMILY: kernels.TABLE,
  kernels_small.FAMILY: kernels_small.TABLE,
  **retrieval.TABLES,
}


async def _repair() -> tuple[list[repair.Row], build.Report]:
  graders = grader.Graders(config.Sandbox(workers=_WORKERS.value))
  await graders.start()
  try:
    return await build.build(
      graders,
      per_function=_PER_FUNCTION.value,
      heldout=_HELDOUT.value,
      seed=_SEED.value,
    )
  finally:
    await graders.close()


def _show_repair(report: build.Report) -> None:
  for title in ('rejected_functions', 'rejected_faults'):
    print(title.replace('_', ' '))
    for reason, count in getattr(report, title).items():
      print(f'  {count:5d}  {reason}')
  for split, kinds in report.kinds.items():
    print(f'{split}: {sum(kinds.values())} tasks, {report.units[split]} functions')
    for kind, count in kinds.items():
      print(f'  {count:5d}  {kind}')


def _show_retrieval(report: build_retrieval.Report) -> None:
  print('rejected questions')
  for reason, count in report.rejected.items():
    print(f'  {count:5d}  {reason}')
  for split, kinds in report.tasks.items():
    print(f'{split}: {sum(kinds.values())} tasks, {report.packages[split]} packages')
    for kind, count in kinds.items():
      print(f'  {count:5d}  {kind}')
  print(
    f'mean score of what should not pay: best single grep {report.one_grep_mean}, '
    f'plain grep {report.one_grep_plain}, every line {report.everything_mean}, wrong '
    f'definitions {report.shuffled_mean}'
  )


async def _packages(out: pathlib.Path) -> dict[str, int]:
  """Faults of packages and pairs of releases; candidate reasons -> how many."""
  work = pathlib.Path(_WORK.value)
  cfg = config.Sandbox(workers=_WORKERS.value)
  made = build_packages.Build(
    cfg, work / 'packages', seed=_SEED.value, cache=_CACHE.value, say=print
  )
  await made.run(_TASKS.value, 60 * _MINUTES.value)
  faults, report = made.result()
  found = await pairs.build(
    cfg, work / 'pairs.jsonl', wanted=_PAIRS.value, cache=_CACHE.value, say=print
  )
  rows.write(out, build_packages.table([*faults, *found.rows], _SEED.value))
  print(json.dumps(dataclasses.asdict(report)))
  return {**report.rejected, **{f'pair: {k}': v for k, v in found.rejected.items()}}


def _write(out: pathlib.Path, rows_: Sequence[Any]) -> None:
  lines = [json.dumps(dataclasses.asdict(row)) + '\n' for row in rows_]
  out.write_text(''.join(lines), encoding='utf-8')


def _build(out: pathlib.Path) -> dict[str, int]:
  """Writes the family's table and says what came of it; reason -> candidates."""
  match _FAMILY.value:
    case repair.FAMILY:
      made, report = asyncio.run(_repair())
      _show_repair(report)
      _write(out, made)
      return {**report.rejected_functions, **report.rejected_faults}
    case packages.FAMILY:
      return asyncio.run(_packages(out))
    case kernels.FAMILY | kernels_small.FAMILY:
      cfg = config.Sandbox(workers=_WORKERS.value)
      if _FAMILY.value == kernels.FAMILY:
        some, bad = asyncio.run(build_kernels.build(cfg))
      else:
        seeds = range(_SEED.value, _SEED.value + _KERNELS.value)
        some, bad = asyncio.run(build_kernels.build_small(cfg, seeds))
      build_kernels.write(some, out)
      return dict(Counter(reason.split(':')[0] for reason in bad.values()))
  found, said = build_retrieval.build(
    _FAMILY.value,
    per_kind=_PER_KIND.value,
    heldout=_HELDOUT.value,
    seed=_SEED.value,
  )
  _show_retrieval(said)
  _write(out, found)
  return dict(said.rejected)


def _settings(words: Sequence[str]) -> tuple[config.Tasks, config.Sandbox]:
  """Where the tasks are and what they run in, by the words of the command line.

  UsageError where they say nothing of the family, or ask for what it has not.
  """
  name = _FAMILY.value
  try:
    subjects.get(name)
    tasks, box = check_env.settings([f'sandbox.workers={_WORKERS.value}', *words])
  except ValueError as e:
    raise app.UsageError(str(e)) from e
  if _BUILD.value and name not in TABLES:
    raise app.UsageError(
      f'{name} has no builder: its tasks are read from where tasks.* says they are; '
      'give --nobuild'
    )
  table = _OUT.value or tasks.table or str(TABLES.get(name, ''))
  cache = _CACHE.value or tasks.cache
  return dataclasses.replace(tasks, table=table, cache=cache), box


def main(argv: Sequence[str]) -> None:
  """Builds, proves, reports."""
  tasks, box = _settings(argv[1:])
  out, work = pathlib.Path(tasks.table), pathlib.Path(_WORK.value)
  for folder in (out.parent, work):
    folder.mkdir(parents=True, exist_ok=True)
  rejected = _build(out) if _BUILD.value else {}
  result = {'table': out.name, 'rejected': sum(rejected.values())}
  if _AUDIT.value:
    plan = pipeline.Plan(
      seed=_SEED.value,
      sample=_SAMPLE.value,
      exploited=_EXPLOITED.value,
      scanned=_SCANNED.value,
      repeats=1 if _FAMILY.value == packages.FAMILY else 5,  # its builder made 5
      at_once=2 * _WORKERS.value,
    )
    audit = task_audit.family(
      _FAMILY.value,
      work,
      plan,
      sandbox=box,
      tasks=tasks,
      rollouts=_ROLLOUTS.value,
      rejected=rejected,
    )
    try:
      asyncio.run(audit)
    except ValueError as e:  # no table, no folder, no device
      raise app.UsageError(str(e)) from e
    command = f'python -m experiments.build_tasks --family={_FAMILY.value}'
    command = ' '.join([command, *argv[1:]])
    result |= task_audit.write(work, command)
  print(json.dumps(result))


if __name__ == '__main__':
  program.run(main, FLAGS)
