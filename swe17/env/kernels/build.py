"""Builds the table of the family `kernels`: every unit and variant, measured.

A task is taken if its gold is right and worth at least `LEAST` times the reference's
speed, and if the reference, handed in as a candidate, scores nothing. Units go to one
split as a whole.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import pathlib

from swe17 import config
from swe17.env.kernels import bench, judge, kernels, units

LEAST = 2.0  # speedup of a gold
HELDOUT = 0.2  # of the units
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


def write(rows: Sequence[kernels.Row], path: pathlib.Path = kernels.TABLE) -> None:
  """Writes a table, a JSON line a row."""
  lines = [json.dumps(dataclasses.asdict(row)) + '\n' for row in rows]
  path.write_text(''.join(lines), encoding='utf-8')
