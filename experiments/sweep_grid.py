"""The cells of a sweep: every combination of swept values, every seed, all checked.

A cell is one run of `experiments.swe17` in a folder of its own,
`<folder>/<combination>/seed-<n>`. What it has already done is read off that folder, so
the same command goes on where the last one stopped.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import itertools
import json
import pathlib
import re
from typing import Any, Literal

from absl import flags

from experiments import options
from swe17 import config, settings
from swe17.metrics import lines

State = Literal['new', 'begun', 'finished']

_OWN = {
  'seed': 'the seeds are --seeds=<how many>',
  'run_dir': 'every cell gets a folder of its own inside --dir',
  'store': 'every cell keeps its store in its own folder',
}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run: `values` are the swept settings as the command line spells them."""

  values: Mapping[str, str]
  seed: int
  argv: Sequence[str]  # of experiments.swe17, without --resume
  run_dir: pathlib.Path
  cfg: config.Config

  @property
  def name(self) -> str:
    return f'{combination(self.values)} seed {self.seed}'

  @property
  def log(self) -> pathlib.Path:
    return self.run_dir.with_name(f'{self.run_dir.name}.log')


def combination(values: Mapping[str, str]) -> str:
  """'optim.lr=1e-4,sampler.top_p=.9', or 'as configured' where nothing is swept."""
  return ','.join(f'{k}={v}' for k, v in values.items()) or 'as configured'


def parse(sweeps: Sequence[str]) -> dict[str, list[str]]:
  """{'optim.lr': ['1e-4', '3e-4']} of ['optim.lr=1e-4,3e-4'].

  Values that hold commas themselves are separated by semicolons. ValueError names the
  setting that is unknown, a section, swept twice, or has no, empty or equal values.
  """
  grid: dict[str, list[str]] = {}
  leaves = settings.leaves()
  for text in sweeps:
    name, equals, given = text.partition('=')
    name = name.strip().removeprefix('config.')
    values = [v.strip() for v in given.split(';' if ';' in given else ',')]
    if not equals or not all(values):
      raise ValueError(f'--sweep={text}: want setting=value,value, none of them empty')
    if name in _OWN:
      raise ValueError(f'--sweep={text}: {name} cannot be swept: {_OWN[name]}')
    if name not in leaves:
      inside = [leaf for leaf in leaves if leaf.startswith(f'{name}.')]
      said = f'a section; sweep one of its settings, e.g. {inside[0]}' if inside else ''
      said = said or f'an unknown setting; the nearest is {settings.nearest(name)}'
      raise ValueError(f'--sweep={text}: {name} is {said}')
    if name in grid:
      raise ValueError(
        f'--sweep={text}: {name} is swept twice: give all values at once'
      )
    grid[name] = values
  return grid


def cells(
  spec: str,
  more: Sequence[str],
  grid: Mapping[str, Sequence[str]],
  seeds: int,
  folder: pathlib.Path,
) -> list[Cell]:
  """Every cell, seeds innermost, each with its checked settings.

  spec: the config file. more: flags `--config.name=value` given to all cells.
  ValueError names what is wrong: a setting, a value, two equal cells, a folder with
  another run.
  """
  for arg in more:
    name = re.match(r'--?(?:no)?config\.([^=]*)', arg)
    if name and (name[1] in grid or name[1] in _OWN):
      why = _OWN.get(name[1], 'it is swept')
      raise ValueError(f'{arg}: {name[1]} cannot be set for all cells: {why}')
  found: list[Cell] = []
  for values in itertools.product(*grid.values()):
    chosen = dict(zip(grid, values, strict=True))
    for seed in range(seeds):
      found.append(_cell(spec, more, chosen, seed, folder))
  _refuse_equal(found)
  for cell in found:
    _refuse_another(cell)
  return found


def _cell(
  spec: str,
  more: Sequence[str],
  values: Mapping[str, str],
  seed: int,
  folder: pathlib.Path,
) -> Cell:
  run_dir = folder / _folder_name(values) / f'seed-{seed}'
  argv = [f'--config={spec}', f'--run_dir={run_dir}', *more]
  argv += [f'--config.{name}={value}' for name, value in values.items()]
  argv += [f'--config.seed={seed}']
  try:
    cfg = options.parse(argv).cfg
  except flags.Error as e:
    raise ValueError(f'{combination(values)}: {" ".join(str(e).split())}') from e
  return Cell(values, seed, tuple(argv), run_dir, cfg)


def _folder_name(values: Mapping[str, str]) -> str:
  """A folder for a combination: readable, and never the same for two of them."""
  text = combination(values).replace(' ', '-')
  name = re.sub(r'[^\w.=,+-]', '_', text)
  if name == text and len(name) <= 120:
    return name
  return f'{name[:120]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'


def _comparable(cfg: config.Config) -> dict[str, Any]:
  """Settings without those that say where things lie."""
  flat = settings.flatten(cfg)
  return {k: v for k, v in flat.items() if k not in ('run_dir', 'store')}


def _refuse_equal(found: Sequence[Cell]) -> None:
  """ValueError if two cells spell the same settings: 1e-4 and .0001."""
  seen: dict[str, Cell] = {}
  for cell in found:
    key = json.dumps(_comparable(cell.cfg))
    if key in seen:
      raise ValueError(
        f'--sweep: {combination(seen[key].values)} and {combination(cell.values)} are '
        'the same settings: leave one out'
      )
    seen[key] = cell


def _refuse_another(cell: Cell) -> None:
  """ValueError if the cell's folder holds a run under other settings."""
  if state(cell) == 'new':
    return
  then, now = _comparable(settings.load(str(cell.run_dir))), _comparable(cell.cfg)
  changed = [
    f'{name}={value!r} (the run has {then[name]!r})'
    for name, value in now.items()
    if value != then[name]
  ]
  if changed:
    raise ValueError(
      f'{cell.run_dir} holds a run with other settings: {", ".join(changed)}; choose '
      'another --dir'
    )


def state(cell: Cell) -> State:
  """How far a cell is, by its folder. A damaged record does not count as finished."""
  if record(cell, 'after') is not None:
    return 'finished'
  return 'begun' if (cell.run_dir / 'config.json').exists() else 'new'


def record(cell: Cell, name: str) -> dict[str, Any] | None:
  """The evaluation `evals/<name>.json` of a cell, None if it is missing or damaged."""
  path = cell.run_dir / 'evals' / f'{name}.json'
  found = lines.parse(path.read_bytes()) if path.exists() else None
  rate = found and found.get('pass_at_1')
  return found if isinstance(rate, int | float) else None
