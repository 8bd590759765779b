"""Builds the table of tasks of a family, and says what it rejected and why.

  python -m experiments.build_tasks --family=repair_functions
  python -m experiments.build_tasks --family=retrieval          (or retrieval_small)

takes about a minute on 2 cores and writes the table that ships with the family. The
last line of the output is the report as JSON. Same seed, same library, same installed
packages (`pip install "swe17[retrieval]"`): same table.
"""

import asyncio
from collections.abc import Sequence
import dataclasses
import json
import pathlib

from absl import app, flags

from experiments import program
from swe17 import config
from swe17.env import families
from swe17.env.repair import build, grader, repair
from swe17.env.retrieval import build as build_retrieval
from swe17.env.retrieval import retrieval

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_FAMILY = flags.DEFINE_enum(
  'family', repair.FAMILY, list(families.FAMILIES), 'task family', flag_values=FLAGS
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


Rows = Sequence[repair.Row | retrieval.Row]


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


def _build() -> tuple[Rows, build.Report | build_retrieval.Report]:
  """Builds the family and says what came of it."""
  if _FAMILY.value == repair.FAMILY:
    rows, report = asyncio.run(_repair())
    _show_repair(report)
    return rows, report
  found, said = build_retrieval.build(
    _FAMILY.value,
    per_kind=_PER_KIND.value,
    heldout=_HELDOUT.value,
    seed=_SEED.value,
  )
  _show_retrieval(said)
  return found, said


def main(argv: Sequence[str]) -> None:
  """Builds, writes, reports."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  rows, report = _build()
  tables = {repair.FAMILY: repair.TABLE, **retrieval.TABLES}
  out = pathlib.Path(_OUT.value or tables[_FAMILY.value])
  out.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(dataclasses.asdict(row)) + '\n' for row in rows]
  out.write_text(''.join(lines), encoding='utf-8')
  print(json.dumps({'table': out.name, **dataclasses.asdict(report)}))


if __name__ == '__main__':
  program.run(main, FLAGS)
