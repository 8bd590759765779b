"""Builds the table of tasks of a family, and says what it rejected and why.

  python -m experiments.build_tasks --family=repair_functions

takes about a minute on 2 cores and writes the table that ships with the family. The
last line of the output is the report as JSON. Same seed, same library: same table.
"""

import asyncio
from collections.abc import Sequence
import dataclasses
import json
import pathlib

from absl import app, flags

from experiments import program
from swe17 import config
from swe17.env import build, grader, repair

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_FAMILY = flags.DEFINE_enum(
  'family', repair.FAMILY, [repair.FAMILY], 'task family', flag_values=FLAGS
)
_OUT = flags.DEFINE_string(
  'out', str(repair.TABLE), 'table file to write', flag_values=FLAGS
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'seeds cases, choice of faults and split', flag_values=FLAGS
)
_PER_FUNCTION = flags.DEFINE_integer(
  'per_function', 4, 'tasks of one function, at most', flag_values=FLAGS
)
_HELDOUT = flags.DEFINE_float(
  'heldout', 0.3, 'share of functions held out', flag_values=FLAGS
)
_WORKERS = flags.DEFINE_integer('workers', 2, 'graders', flag_values=FLAGS)


async def _build() -> tuple[list[repair.Row], build.Report]:
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


def main(argv: Sequence[str]) -> None:
  """Builds, writes, reports."""
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments: {argv[1:]}')
  rows, report = asyncio.run(_build())
  out = pathlib.Path(_OUT.value)
  out.parent.mkdir(parents=True, exist_ok=True)
  lines = [json.dumps(dataclasses.asdict(row)) + '\n' for row in rows]
  out.write_text(''.join(lines), encoding='utf-8')
  for title in ('rejected_functions', 'rejected_faults'):
    print(title.replace('_', ' '))
    for reason, count in getattr(report, title).items():
      print(f'  {count:5d}  {reason}')
  for split, kinds in report.kinds.items():
    print(f'{split}: {sum(kinds.values())} tasks, {report.units[split]} functions')
    for kind, count in kinds.items():
      print(f'  {count:5d}  {kind}')
  print(json.dumps({'table': out.name, **dataclasses.asdict(report)}))


if __name__ == '__main__':
  program.run(main, FLAGS)
