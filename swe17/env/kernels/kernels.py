"""The family `kernels`: make this function faster (Kevin, arXiv:2507.11948).

The agent is shown a slow function and hands in whole candidates, several one after
another; each is answered with its class (parse, run, wrong, correct) and, if it is
right, with how much faster it is. A candidate scores .3 + its speedup, at most
`tasks.speedup_cap`; bench.py says how that is measured, rules.py what scores nothing.

What an agent writes for its reasoning is not kept between turns with
`agent.thoughts=strip`; the `summary` of each call is, with the code and the feedback.

The committed table names unit and variant only: sources are read from units_*.py and
checked by hash, inputs are drawn anew for every call.
"""

import asyncio
from collections.abc import Iterable, Mapping
import dataclasses
import hashlib
import pathlib
from typing import Any

import numpy as np

from swe17 import config, types
from swe17.env import base, table
from swe17.env.kernels import (
  bench,
  judge,
  units,
  units_counts,
  units_series,
  units_tables,
)

FAMILY = 'kernels'
TABLE = pathlib.Path(__file__).parent / f'{FAMILY}.jsonl'
UNITS: Mapping[str, units.Unit] = {
  unit.name: unit
  for unit in (*units_series.UNITS, *units_tables.UNITS, *units_counts.UNITS)
}
SOLVED = 0.6  # share of what the gold gains, capped, that solves a task
MAX_CHARACTERS = 20_000  # of a candidate
MAX_SUMMARY = 1000
_PROMPT = """Make `{name}` faster. It must return what it returns now, for any arguments
of the same kinds, and leave its arguments as it does now.

```python
{source}```

Call `attempt` with a whole module that defines `{name}` and a sentence that sums up
what you changed and why: your reasoning is not kept, the sentence is. You may import
numpy and modules of the standard library that compute. You have {attempts} attempts and
are told of each whether it parses, runs and is right, and how much faster it is; the
best counts."""


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table."""

  id: str  # 'unit/variant'
  unit: str
  variant: str
  split: str
  gain: float  # the gold's speedup when the table was built
  sha: str  # `sha` of reference and gold


def sha(unit: units.Unit, variant: str) -> str:
  """16 hexadecimal digits over the sources of a task."""
  parts = (units.source(f, unit.name) for f in (unit.slow[variant], unit.fast))
  return hashlib.sha256('\0'.join(parts).encode()).hexdigest()[:16]


def read_table(path: pathlib.Path) -> list[Row]:
  """All rows of a table file. ValueError names the line that is not a row."""
  return table.read(path, Row)


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """The tasks that `cfg` asks for: (tasks, set-aside id -> reason).

  ValueError if there are fewer than asked for, or kinds that are no names of units.
  """
  path = pathlib.Path(cfg.table) if cfg.table else TABLE
  kinds = table.kinds(cfg, tuple(UNITS))

  def make(row: Row) -> types.Task | str:
    unit = UNITS[row.unit]
    if row.variant not in unit.slow or sha(unit, row.variant) != row.sha:
      return 'another unit than when the table was built'
    return task_of(row, cfg)

  return table.choose(
    cfg, path, (row for row in read_table(path) if row.unit in kinds), make
  )


def solving(gain: float, share: float, cap: float) -> float:
  """The score from which on a task is solved: a share of what its gold gains.

  Not all of it: a gain is less on a machine that is busy with other things.
  """
  return 0.3 + 1.0 + share * (min(gain, cap) - 1.0)


def task_of(row: Row, cfg: config.Tasks) -> types.Task:
  """A row as a task; its gold hands in the fast version."""
  unit = UNITS[row.unit]
  source = units.source(unit.slow[row.variant], unit.name)
  gold = {'code': units.source(unit.fast, unit.name), 'summary': 'The fast version.'}
  payload = {
    'unit': row.unit,
    'variant': row.variant,
    'source': source,
    'attempts': cfg.attempts,
    'cap': cfg.speedup_cap,
    'gold': [['attempt', gold], ['submit', {}]][: cfg.attempts],
  }
  solved_at = solving(row.gain, SOLVED, cfg.speedup_cap)
  text = _PROMPT.format(name=unit.name, source=source, attempts=cfg.attempts)
  return types.Task(row.id, FAMILY, row.split, unit.name, text, payload, solved_at)


def problem(unit: units.Unit, variant: str) -> bench.Problem:
  """What the bench asks of a candidate."""

  def inputs(rng: np.random.Generator, small: bool) -> tuple[Any, ...]:
    size = int(rng.choice(unit.small)) if small else unit.size_of(variant)
    return unit.inputs(rng, size)

  return bench.Problem(
    f'{unit.name}/{variant}',
    unit.name,
    units.source(unit.slow[variant], unit.name),
    inputs,
    rtol=unit.rtol,
  )


TOOLS = (
  base.Tool(
    'attempt',
    'Hand in a whole module, and a sentence on what you changed.',
    {'code': 'str', 'summary': 'str'},
    writes=True,
  ),
  base.Tool('submit', 'End: the best attempt counts.', {}, writes=True),
)


class KernelsEnv:
  """One episode."""

  tools: tuple[base.Tool, ...] = TOOLS

  def __init__(self, task: types.Task, by: judge.Judging, asked: bench.Problem):
    self._task, self._judge, self._problem = task, by, asked
    self._account = self._fresh()
    self.done = False

  def _fresh(self) -> judge.Account:
    return judge.Account(self._task.payload['attempts'], self._task.payload['cap'])

  @property
  def flags(self) -> tuple[str, ...]:
    """Names of the rules that were broken."""
    return self._account.flags

  @property
  def given(self) -> str:
    """The source that the task is about."""
    return self._task.payload['source']

  @property
  def figures(self) -> Mapping[str, float]:
    return self._account.figures

  async def reset(self) -> str:
    self._account, self.done = self._fresh(), False
    return self._task.prompt

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one well-formed call. GraderError: the infrastructure failed."""
    if self.done:
      return 'already submitted'
    if name == 'submit':
      self.done = True
      return 'submitted'
    if name != 'attempt':
      raise ValueError(f'tool: got {name!r}, want one of {[t.name for t in TOOLS]}')
    code, summary = arguments['code'], arguments['summary']
    if len(code) > MAX_CHARACTERS or len(summary) > MAX_SUMMARY:
      return (
        f'too long: want {MAX_CHARACTERS} characters of code, {MAX_SUMMARY} of summary'
      )
    verdict = await self._judge.judge(self._problem, code)
    self._account.add(verdict)
    self.done = self._account.left == 0
    return judge.words(verdict)

  async def turn_score(self) -> float:
    """The raw score of the turn that just ended."""
    return self._account.turn_score()

  async def verify(self) -> types.Outcome:
    """The best score of all attempts; 0 for who cheated once."""
    return self._account.outcome()


def _problem(task: types.Task) -> bench.Problem:
  return problem(UNITS[task.payload['unit']], task.payload['variant'])


class Host:
  """The bench of a process, and its verdicts."""

  def __init__(self, on: bench.Bench):
    self._bench = on
    self.judge = judge.Judge(on)

  async def verify(
    self, tasks: Iterable[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Runs every gold once: (sound tasks, set-aside id -> reason)."""
    tasks = list(tasks)
    reasons = await asyncio.gather(*(self._unsound(task) for task in tasks))
    bad = {t.id: why for t, why in zip(tasks, reasons, strict=True) if why}
    return [task for task in tasks if task.id not in bad], bad

  async def _unsound(self, task: types.Task) -> str:
    try:
      verdict = await self.judge.judge(*self.gold(task))
    except base.InfrastructureError as e:
      return f'the verifier failed: {e}'
    return '' if self.sound(task, verdict) else f'its gold: {judge.words(verdict)}'

  def gold(self, task: types.Task) -> tuple[bench.Problem, str]:
    """A task's problem and its gold's source."""
    return _problem(task), task.payload['gold'][0][1]['code']

  def sound(self, task: types.Task, verdict: bench.Verdict) -> bool:
    """Whether that verdict on its gold makes it a task."""
    return bench.score(verdict, task.payload['cap']) >= task.solved_at

  def env(self, task: types.Task) -> base.Env:
    return KernelsEnv(task, self.judge, _problem(task))

  async def close(self) -> None:
    await self._bench.close()


async def open_host(cfg: config.Sandbox) -> Host:
  """Starts a bench. ValueError if the sandbox that `cfg` asks for cannot run."""
  on = bench.Bench(cfg)
  await on.start()
  return Host(on)
