"""The family `kernels_small`: functions of small.py for models of short contexts.

The first message holds the code, its wasteful-looking places between marks. `edit`
writes another text at a place, `undo` goes back to the fastest right version so far,
`test` hands the present one in as a candidate: an episode ends with the last of its
`tasks.attempts`. Scores are those of `kernels`, timed the same way (CPU time of both
processes, in turns) with fewer and shorter calls; a text's verdict is kept.

The committed table names seeds only; units are sets of kinds of waste, so that no set
is on both sides. Kinds, names and texts are shared by both.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import pathlib
from typing import Any

from swe17 import config, types
from swe17.env import base, table
from swe17.env.kernels import bench, judge, kernels, small

FAMILY = 'kernels_small'
TABLE = pathlib.Path(__file__).parent / f'{FAMILY}.jsonl'
MAX_NEW = 60  # characters of an edit
# Share of what the gold gains, capped, that solves a task. Calls are short, so that a
# machine which does other things takes up to half of a gain away.
SOLVED = 0.25
CALLS = 3  # timed calls of a candidate
_PROMPT = 'Make it faster.\n'


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table."""

  id: str  # 'unit/seed'
  seed: int
  unit: str  # kinds of its wasteful places
  split: str
  gain: float  # the gold's speedup when the table was built
  sha: str  # `sha` of the function and its gold


def unit(function: small.Function) -> str:
  return '+'.join(function.wasteful)


def sha(function: small.Function) -> str:
  """16 hexadecimal digits over the sources of a task."""
  gold = small.edited(function, function.gold)
  text = '\0'.join((small.source(function.pieces), small.source(gold)))
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_table(path: pathlib.Path) -> list[Row]:
  """All rows of a table file. ValueError names the line that is not a row."""
  return table.read(path, Row)


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """The tasks that `cfg` asks for: (tasks, set-aside id -> reason).

  `cfg.kinds` leaves functions out that have other kinds of waste. ValueError if there
  are fewer than asked for.
  """
  path = pathlib.Path(cfg.table) if cfg.table else TABLE
  kinds = table.kinds(cfg, tuple(small.WASTES))

  def make(row: Row) -> types.Task | str:
    function = small.make(row.seed)
    if sha(function) != row.sha:
      return 'another function than when the table was built'
    return task_of(row, function, cfg)

  rows = (r for r in read_table(path) if kinds.issuperset(r.unit.split('+')))
  return table.choose(cfg, path, rows, make)


def task_of(row: Row, function: small.Function, cfg: config.Tasks) -> types.Task:
  """A row as a task; its gold makes every edit and tests."""
  edits = [
    ['edit', {'at': f'«{place}»', 'new': text}] for place, text in function.gold.items()
  ]
  payload = {
    'function': function.name,
    'pieces': list(function.pieces),
    'attempts': cfg.attempts,
    'cap': cfg.speedup_cap,
    'gold': [*edits, *[['test', {}]] * cfg.attempts],
  }
  solved_at = kernels.solving(row.gain, SOLVED, cfg.speedup_cap)
  text = _PROMPT + small.view(function.pieces)
  return types.Task(row.id, FAMILY, row.split, row.unit, text, payload, solved_at)


def problem(task: types.Task) -> bench.Problem:
  """What the bench asks of a candidate."""
  reference = small.source(task.payload['pieces'])
  return bench.Problem(
    task.id,
    task.payload['function'],
    reference,
    small.inputs,
    checks=1,
    calls=CALLS,
    noise=FAMILY,
  )


TOOLS = (
  base.Tool(
    'edit',
    'Write another text at a place.',
    {'at': 'str', 'new': 'str'},
    writes=True,
  ),
  base.Tool('undo', 'Go back to the fastest right version so far.', {}, writes=True),
  base.Tool('test', 'Hand in the code as it is.', {}, writes=True),
)


class SmallEnv:
  """One episode."""

  tools: tuple[base.Tool, ...] = TOOLS

  def __init__(self, task: types.Task, by: judge.Judging):
    self._task, self._judge, self._problem = task, by, problem(task)
    self._begin()

  def _begin(self) -> None:
    payload = self._task.payload
    self._account = judge.Account(payload['attempts'], payload['cap'])
    self._pieces = list(payload['pieces'])
    self._best = list(payload['pieces'])
    self.done = False

  @property
  def flags(self) -> tuple[str, ...]:
    """Names of the rules that were broken."""
    return self._account.flags

  @property
  def figures(self) -> Mapping[str, float]:
    return self._account.figures

  @property
  def given(self) -> str:
    """The source that the task is about."""
    return self._problem.reference

  async def reset(self) -> str:
    self._begin()
    return self._task.prompt

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one well-formed call. GraderError: the infrastructure failed."""
    if self.done:
      return 'already submitted'
    match name:
      case 'edit':
        return self._edit(arguments['at'], arguments['new'])
      case 'undo':
        self._pieces = list(self._best)
        return 'undone'
      case 'test':
        return await self._test()
    raise ValueError(f'tool: got {name!r}, want one of {[t.name for t in TOOLS]}')

  async def turn_score(self) -> float:
    """The raw score of the turn that just ended."""
    return self._account.turn_score()

  async def verify(self) -> types.Outcome:
    """The best score of all attempts; 0 for who cheated once."""
    return self._account.outcome()

  def _edit(self, at: str, new: str) -> str:
    number, new = at.strip('«»'), new.strip(' ')
    places = len(self._pieces) // 2
    if not (number.isascii() and number.isdigit() and len(number) < 4):
      return f'no place {at[:8]}'
    index = 2 * int(number) - 1
    if not 1 <= int(number) <= places:
      return f'no place {at[:8]}'
    if len(new) > MAX_NEW or '\n' in new or '\r' in new:
      return f'new must be one line of at most {MAX_NEW} characters'
    if self._pieces[index] == new:
      return 'nothing changed'
    self._pieces[index] = new
    return 'edited'

  async def _test(self) -> str:
    best = self._account.best
    verdict = await self._judge.judge(self._problem, small.source(self._pieces))
    value = self._account.add(verdict)
    if value > best:
      self._best = list(self._pieces)
    self.done = self._account.left == 0
    # Short: the words of an error, or a second decimal, would help nobody here.
    right = verdict.kind == 'correct'
    return f'correct {min(verdict.speedup, 9.9):.1f}' if right else verdict.kind


class Host(kernels.Host):
  """The bench of a process, and its verdicts."""

  def gold(self, task: types.Task) -> tuple[bench.Problem, str]:
    pieces = list(task.payload['pieces'])
    for name, arguments in task.payload['gold']:
      if name == 'edit':
        pieces[2 * int(arguments['at'].strip('«»')) - 1] = arguments['new']
    return problem(task), small.source(pieces)

  def sound(self, task: types.Task, verdict: bench.Verdict) -> bool:
    # Not whether it solves: two timings differ, and a task is no worse for that.
    return verdict.kind == 'correct' and verdict.speedup > 1

  def env(self, task: types.Task) -> base.Env:
    return SmallEnv(task, self.judge)


async def open_host(cfg: config.Sandbox) -> Host:
  """Starts a bench. ValueError if the sandbox that `cfg` asks for cannot run."""
  on = bench.Bench(cfg)
  await on.start()
  return Host(on)
