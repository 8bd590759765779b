"""Builds the tables of `kernels` and `kernels_small`: every task, measured.

A task is taken if its gold is right and worth at least `LEAST` times the reference's
speed, and if the reference, handed in as a candidate, scores nothing. A unit (a
function; for small ones a set of kinds of waste) goes to one split as a whole.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib

from swe17 import config
from swe17.env.kernels import bench, judge, kernels, kernels_small, small, units

LEAST = 2.0  # speedup of a gold
HELDOUT = 0.2  # of the units
_SMALL_CALLS = 7  # timed calls of a small function
_SHARE = 1.1  # times that each edit of a small gold makes it faster at least
_LARGEST = 100.0  # gains above are written so: they vary from machine to machine


def split(unit: str) -> str:
  """'train' or 'heldout', by a hash of the unit's name."""
  digest = hashlib.sha256(f'kernels/{unit}'.encode()).digest()
  return 'heldout' if digest[0] < 256 * HELDOUT else 'train'


async def build(
  cfg: config.Sandbox, names: Sequence[str] = ()
) -> tuple[list[kernels.Row], dict[str, str]]:
  """(rows, rejected id -> reason) of the units named, all if none are."""
  on = bench.Bench(cfg)
  await on.start()
  rows, rejected = [], {}
  try:
    for unit in kernels.UNITS.values():
      for variant in unit.slow if not names or unit.name in names else ():
        row = await _examine(on, unit, variant)
        if isinstance(row, str):
          rejected[f'{unit.name}/{variant}'] = row
        else:
          rows.append(row)
  finally:
    await on.close()
  return rows, rejected


async def _examine(
  on: bench.Bench, unit: units.Unit, variant: str
) -> kernels.Row | str:
  problem = kernels.problem(unit, variant)
  same = await on.measure(problem, problem.reference)
  if same.flag != 'copies_reference':
    return f'its reference as a candidate: {judge.words(same)}'
  gold = await on.measure(problem, units.source(unit.fast, unit.name))
  if gold.kind != 'correct' or gold.speedup < LEAST:
    return f'its gold: {judge.words(gold)}'
  gain = round(min(gold.speedup, _LARGEST), 1)
  return kernels.Row(
    problem.name, unit.name, variant, split(unit.name), gain, kernels.sha(unit, variant)
  )


async def build_small(
  cfg: config.Sandbox, seeds: Sequence[int]
) -> tuple[list[kernels_small.Row], dict[str, str]]:
  """(rows, rejected id -> reason) of small functions, by seed."""
  on = bench.Bench(cfg)
  await on.start()
  rows, rejected = [], {}
  try:
    for seed in seeds:
      row = await _examine_small(on, seed)
      if isinstance(row, str):
        rejected[str(seed)] = row
      else:
        rows.append(row)
  finally:
    await on.close()
  return rows, rejected


async def _examine_small(on: bench.Bench, seed: int) -> kernels_small.Row | str:
  function = small.make(seed)
  unit = kernels_small.unit(function)
  row = kernels_small.Row(
    f'{unit}/{seed}', seed, unit, split(unit), 0.0, kernels_small.sha(function)
  )
  task = kernels_small.task_of(row, function, config.Tasks(attempts=1))
  problem = dataclasses.replace(kernels_small.problem(task), calls=_SMALL_CALLS)
  same = await on.measure(problem, problem.reference)
  if same.flag != 'copies_reference':
    return f'its reference as a candidate: {judge.words(same)}'
  # Every edit helps, alone and beside the others.
  gold = small.source(small.edited(function, function.gold))
  whole = await on.measure(problem, gold)
  if whole.kind != 'correct' or whole.speedup < LEAST:
    return f'its gold: {judge.words(whole)}'
  for place in function.gold:
    others = {p: text for p, text in function.gold.items() if p != place}
    less = await on.measure(problem, small.source(small.edited(function, others)))
    if less.kind != 'correct' or less.speedup * _SHARE > whole.speedup:
      return f'its gold without place {place}: {judge.words(less)}'
  return dataclasses.replace(row, gain=round(whole.speedup, 1))


def write(
  rows: Sequence[kernels.Row] | Sequence[kernels_small.Row], path: pathlib.Path
) -> None:
  """Writes a table, a JSON line a row."""
  lines = [json.dumps(dataclasses.asdict(row)) + '\n' for row in rows]
  path.write_text(''.join(lines), encoding='utf-8')
