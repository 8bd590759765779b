"""The family `repair_functions`: tasks, their verification, one episode's environment.

A task is a function of the standard library with one fault in it (faults.py). The
agent sees the code, with anchors to edit at (anchors.py), and how many of 6 visible
cases fail; what counts is whether 32 other cases give what the original gives. The
committed table names function, fault and seed only: code is taken from this Python's
library and checked by its hash, cases come from the seed, expected results from the
original run in the grader.

Whoever edits, counts and compares is this trusted code; only the agent's version of
the function runs in the grader, and nothing expected goes in there.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import logging
import pathlib
from typing import Any

from swe17 import config, types
from swe17.env import base, memo, table
from swe17.env.repair import anchors, faults, functions, grader

FAMILY = 'repair_functions'
TABLE = pathlib.Path(__file__).parent / f'{FAMILY}.jsonl'
MAX_CHARACTERS = 4 * functions.CHARACTERS  # of an edited source
_FINAL = ('ok ', 'raise ')  # verdicts that the same program always gives
_AT_ONCE = 16  # checks waiting for a grader


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of the table."""

  id: str  # 'module.function/n'
  python: str  # versions the source was seen in, comma-separated
  module: str
  function: str
  source_sha: str  # functions.sha of the canonical source
  line: int
  old: str
  new: str
  kind: str
  split: str
  seed: int  # of the cases


def prompt(function: str) -> str:
  """The first user message."""
  return f'Repair {function}: its tests fail.'


def read_table(path: pathlib.Path) -> list[Row]:
  """All rows of a table file. ValueError names the line that is not a row."""
  return table.read(path, Row)


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """Regenerates the tasks that `cfg` asks for: (tasks, set-aside id -> reason).

  Set aside is a row whose function this Python lacks or has with another source; the
  next rows of the split take its place. Longer functions than `cfg.lines` are left out.
  ValueError if fewer are left than asked for.
  """
  if cfg.family != FAMILY:
    raise ValueError(f'tasks.family: got {cfg.family!r}, want {FAMILY!r}')
  path = pathlib.Path(cfg.table) if cfg.table else TABLE
  kinds = table.kinds(cfg, faults.KINDS)
  catalogue = functions.catalogue()

  def make(row: Row) -> types.Task | str | None:
    reason = _unusable(row, catalogue)
    if reason:
      return reason
    task = _task(row, catalogue)
    lines = task.payload['original'].count('\n') + 1
    return task if lines <= (cfg.lines or lines) else None

  return table.choose(
    cfg, path, (row for row in read_table(path) if row.kind in kinds), make
  )


def load(cfg: config.Tasks) -> tuple[types.Task, ...]:
  """`read`, with what was set aside in the log."""
  tasks, set_aside = read(cfg)
  if set_aside:
    some = ', '.join(f'{k}: {v}' for k, v in list(set_aside.items())[:3])
    logging.warning('%d tasks set aside (%s, ...)', len(set_aside), some)
  return tasks


def _unusable(row: Row, catalogue: Mapping[str, Any]) -> str:
  if f'{row.module}.{row.function}' not in catalogue:
    return 'not in the catalogue'
  source = functions.source_of(row.module, row.function)
  if source is None:
    return 'no such function in this Python'
  if functions.sha(source) != row.source_sha:
    return 'another source in this Python'
  return ''


def _task(row: Row, catalogue: Mapping[str, Any]) -> types.Task:
  name = f'{row.module}.{row.function}'
  original = functions.source_of(row.module, row.function)
  assert original is not None
  visible, hidden = functions.cases(catalogue[name], row.seed)
  payload = {
    'module': row.module,
    'function': row.function,
    'kind': row.kind,
    'original': original,
    'source': faults.apply(original, row.line, row.old, row.new),
    'visible': list(visible),
    'hidden': list(hidden),
  }
  return types.Task(row.id, FAMILY, row.split, name, prompt(row.function), payload)


async def verify(
  tasks: Iterable[types.Task], graders: grader.Graders
) -> tuple[list[types.Task], dict[str, str]]:
  """Runs every original and every fault once: (sound tasks, set-aside id -> reason).

  Sound tasks carry `expected_visible` and `expected_hidden` in their payload, computed
  once per function. A task is set aside if its original does not run to the end, its
  fault is not caught by both sets of cases, or the grader fails on it.
  """
  gate = asyncio.Semaphore(_AT_ONCE)
  originals: dict[tuple[str, ...], asyncio.Task[tuple[str, ...]]] = {}

  async def run(task: types.Task, source: str) -> tuple[str, ...]:
    async with gate:
      return await graders.run(_check(task, source, _all_cases(task)))

  async def examine(task: types.Task) -> types.Task | str:
    original = task.payload['original']
    key = (task.unit, original, *_all_cases(task))
    if key not in originals:
      originals[key] = asyncio.create_task(run(task, original))
    try:
      expected = await originals[key]
      got = await run(task, task.payload['source'])
    except grader.GraderError as e:
      return f'the verifier failed: {e}'
    reason = unsound(expected, got, len(task.payload['visible']))
    return reason or _with_expected(task, expected)

  tasks = list(tasks)
  found = await asyncio.gather(*(examine(task) for task in tasks))
  sound = [f for f in found if isinstance(f, types.Task)]
  set_aside = {
    task.id: reason
    for task, reason in zip(tasks, found, strict=True)
    if isinstance(reason, str)
  }
  return sound, set_aside


def unsound(expected: Sequence[str], got: Sequence[str], visible: int) -> str:
  """Why verdicts on visible, then hidden cases make no task; '' if they do."""
  if not (all(map(final, expected)) and any(e.startswith('ok ') for e in expected)):
    return 'the original does not run'
  if not all(map(final, got)):
    return next(verdict for verdict in got if not final(verdict))
  if expected[:visible] == got[:visible]:
    return 'visible cases do not catch it'
  if expected[visible:] == got[visible:]:
    return 'hidden cases do not catch it'
  return ''


def final(verdict: str) -> bool:
  """Whether a verdict is of the program itself: not a time-out, not a death."""
  return verdict.startswith(_FINAL)


def _all_cases(task: types.Task) -> tuple[str, ...]:
  return (*task.payload['visible'], *task.payload['hidden'])


def _check(task: types.Task, source: str, cases: tuple[str, ...]) -> grader.Check:
  return grader.Check(task.payload['module'], task.payload['function'], source, cases)


def _with_expected(task: types.Task, expected: Sequence[str]) -> types.Task:
  visible = len(task.payload['visible'])
  payload = {
    **task.payload,
    'expected_visible': list(expected[:visible]),
    'expected_hidden': list(expected[visible:]),
  }
  return dataclasses.replace(task, payload=payload)


class Verifier(memo.Memo[tuple[str, ...]]):
  """Graders, and what they said: shared by all episodes of a process.

  A deterministic program has one verdict on the same inputs, so verdicts are kept.
  Time-outs, deaths and failures of the grader are not.
  """

  def __init__(self, graders: grader.Graders, capacity: int = 20_000):
    super().__init__(_lasting, capacity)
    self._graders = graders

  async def run(self, check: grader.Check) -> tuple[str, ...]:
    """One verdict a case. GraderError if the infrastructure fails."""
    text = json.dumps(dataclasses.astuple(check))
    return await self.get(text, lambda: self._graders.run(check))


def _lasting(verdicts: Sequence[str]) -> bool:
  return all(final(v) or v == 'unserialisable' for v in verdicts)


TOOLS = (
  base.Tool('view', 'Show the code with its anchors, «1» and so on.', {}, writes=False),
  base.Tool(
    'edit',
    'Replace what stands behind an anchor.',
    {'at': 'str', 'new': 'str'},
    writes=True,
  ),
  base.Tool('undo', 'Take back the last edit.', {}, writes=True),
  base.Tool('test', 'Run the visible tests.', {}, writes=False),
  base.Tool('submit', 'Hand in the code as it is.', {}, writes=True),
)


class RepairEnv:
  """One episode on one task that `verify` found sound."""

  tools: tuple[base.Tool, ...] = TOOLS

  def __init__(self, task: types.Task, verifier: Verifier):
    if 'expected_hidden' not in task.payload:
      raise ValueError(f'task {task.id}: no expected results; pass it to verify first')
    self._task = task
    self._verifier = verifier
    self._pieces = anchors.split(task.payload['source'])
    self._anchors = anchors.names(self._pieces)
    self._edits: list[tuple[int, str]] = []  # what `undo` puts back: (index, text)
    self.done = False

  async def reset(self) -> str:
    self._pieces = anchors.split(self._task.payload['source'])
    self._edits, self.done = [], False
    return self._task.prompt

  @property
  def source(self) -> str:
    """The agent's present version of the function."""
    return ''.join(self._pieces)

  @property
  def given(self) -> str:
    """The function as the library has it and as the task gives it."""
    return f'{self._task.payload.get("original", "")}\n{self._task.payload["source"]}'

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one well-formed call. GraderError: the infrastructure failed in a test."""
    if self.done:
      return 'already submitted'
    match name:
      case 'view':
        return anchors.view(self._pieces, self._anchors)
      case 'edit':
        return self._edit(arguments['at'], arguments['new'])
      case 'undo':
        return self._undo()
      case 'test':
        return await self._test()
      case 'submit':
        self.done = True
        return 'submitted'
    raise ValueError(f'tool: got {name!r}, want one of {[t.name for t in TOOLS]}')

  async def verify(self) -> types.Outcome:
    """1.0 if all hidden cases give what the original gives, else 0.0."""
    if not self._task.payload['hidden']:
      return types.Outcome(None, 'no cases: a function to practise on')
    try:
      failed = await self._failures('hidden')
    except grader.GraderError as e:
      return types.Outcome(None, f'the verifier failed: {e}')
    return types.Outcome(0.0 if failed else 1.0)

  async def _failures(self, which: str) -> int:
    payload = self._task.payload
    check = _check(self._task, self.source, tuple(payload[which]))
    got = await self._verifier.run(check)
    return sum(g != e for g, e in zip(got, payload[f'expected_{which}'], strict=True))

  async def _test(self) -> str:
    total = len(self._task.payload['visible'])
    if not total:
      return 'no tests'
    failed = await self._failures('visible')
    return f'failed {failed} of {total}' if failed else f'passed {total} of {total}'

  def _edit(self, at: str, new: str) -> str:
    index = self._anchors.get(at.strip('«»'))
    if index is None:
      return f'no anchor {at[:8]}'
    old, new = self._pieces[index], new.strip(' ')
    if new == old:
      return 'nothing changed'
    if '\n' in new or '\r' in new:
      return 'new must be one line'
    if len(self.source) - len(old) + len(new) > MAX_CHARACTERS:
      return 'the code would be too long'
    self._edits.append((index, old))
    self._pieces[index] = new
    return 'edited'

  def _undo(self) -> str:
    if not self._edits:
      return 'nothing to undo'
    index, old = self._edits.pop()
    self._pieces[index] = old
    return 'undone'


class Host:
  """The graders of a process, and what all its episodes know of their verdicts."""

  def __init__(self, graders: grader.Graders):
    self.graders = graders
    self.verifier = Verifier(graders)

  async def verify(
    self, tasks: Iterable[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    return await verify(tasks, self.graders)

  def env(self, task: types.Task) -> RepairEnv:
    return RepairEnv(task, self.verifier)

  async def close(self) -> None:
    await self.graders.close()


async def open_host(cfg: config.Sandbox) -> Host:
  """Starts graders. GraderError if the sandbox does not start."""
  graders = grader.Graders(cfg)
  await graders.start()
  return Host(graders)
