"""The family `repair_packages`: repair a whole package so that its own suite passes.

The agent sees a package with a fault and its tests, less those that are hidden; it can
look around, edit the source, run what tests it sees. What counts is whether all of the
task's fail-to-pass and pass-to-pass tests pass on the agent's source, in the clean tree
and with the clean tests (suite.py): nothing else that an agent writes is taken.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import logging
import pathlib
import time
from typing import Any

from swe17 import config, types
from swe17.env import base, sandbox, table
from swe17.env.packages import desk, rows, sources, suite
from swe17.env.retrieval import search

FAMILY = 'repair_packages'
TABLE = pathlib.Path(__file__).parent / f'{FAMILY}.jsonl'
SECONDS_A_TEST = 5.0
SECONDS = 180.0  # of a verification; the machine may be busy
_KEPT = 2000  # reports
_MESSAGES = 5  # of failing tests that an answer shows
_MESSAGE = 300  # characters
_SUBMITTED = 'already submitted'


def statement(row: rows.Row, problem: rows.Problem) -> str:
  """The first user message: what fails and how, never where the fault is."""
  told = '\n'.join(
    f'- {test}\n    {_indented(said)}' for test, said in row.shown.items()
  )
  hidden = len(row.fail_to_pass) - len(row.shown)
  more = f'\nand {hidden} more' if hidden > 0 else ''
  places = ', '.join(problem.clean.roots)
  return (
    f'{row.package} {row.version} does not behave as its tests say. These fail:\n'
    f'{told}{more}\n'
    f'Repair the source ({places}). The tests decide, those you see and hidden ones; '
    'only source can be changed. Submit when you are done.'
  )


def _indented(text: str) -> str:
  lines = text[:_MESSAGE].splitlines()
  said = [line for line in lines if line.strip() and 'Use -v' not in line]
  return '\n    '.join(said)


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """The tasks that `cfg` asks for: (tasks, set-aside id -> reason).

  Set aside is a row whose source distribution is not to be had, or another one than
  when the table was built; the next rows of the split take its place. ValueError if
  fewer are left than asked for.
  """
  path = pathlib.Path(cfg.table) if cfg.table else TABLE
  kinds = table.kinds(cfg, rows.KINDS)

  def make(row: rows.Row) -> types.Task | str:
    try:
      return task_of(row, cfg.cache, cfg.verify)
    except ValueError as e:
      return str(e)

  return table.choose(cfg, path, (r for r in rows.read(path) if r.kind in kinds), make)


def task_of(row: rows.Row, cache: str = '', verify: bool = True) -> types.Task:
  """A row as a task. ValueError if its trees are not to be had."""
  problem = rows.problem(row, cache)
  payload = {
    'package': row.package,
    'kind': row.kind,
    'row': rows.to_json(row),
    'cache': cache,
    'verify': verify,
    'gold': [*desk.gold(problem.source, problem.clean.source), ['submit', {}]],
  }
  text = statement(row, problem)
  return types.Task(row.id, FAMILY, row.split, row.package, text, payload)


def problem_of(task: types.Task) -> rows.Problem:
  """The trees of a task."""
  return rows.problem(rows.from_json(task.payload['row']), task.payload['cache'])


TOOLS = (
  search.LIST,
  search.GREP,
  search.READ,
  base.Tool(
    'edit',
    'Replace a text that occurs once in a source file.',
    {'path': 'str', 'old': 'str', 'new': 'str'},
    writes=True,
  ),
  base.Tool(
    'create',
    'Write a source file, over what is there.',
    {'path': 'str', 'text': 'str'},
    writes=True,
  ),
  base.Tool(
    'test',
    "Run a test file, or one test by its id; '' runs those that failed, and others.",
    {'tests': 'str'},
    writes=False,
  ),
  base.Tool('submit', 'Hand in the source as it is.', {}, writes=True),
)


class Runner:
  """Runs suites, a few at a time, and keeps their reports: shared by all episodes.

  The same tests on the same tree give the same report, so it is kept, unless the run
  did not come to its end.
  """

  def __init__(self, cfg: config.Sandbox, backend: str):
    self._cfg, self._backend = cfg, backend
    self._gate = asyncio.Semaphore(cfg.workers)
    self._ready = suite.waiting(cfg, backend, cfg.workers)
    self._kept: OrderedDict[tuple[Any, ...], suite.Report] = OrderedDict()

  async def run(
    self, tree: sources.Tree, tests: Sequence[str], *, explain: bool = False
  ) -> suite.Report:
    """`suite.SuiteError` if the sandbox fails."""
    key = (tree.sha, tuple(tests), explain)
    if key in self._kept:
      self._kept.move_to_end(key)
      return self._kept[key]
    async with self._gate:
      report = await suite.run(
        self._cfg,
        self._backend,
        tree,
        tests,
        SECONDS_A_TEST,
        seconds=SECONDS,
        explain=explain,
        ready=self._ready,
      )
    if report.complete and 'timeout' not in report.results.values():
      self._kept[key] = report
      while len(self._kept) > _KEPT:
        self._kept.popitem(last=False)
    return report

  async def close(self) -> None:
    await self._ready.close()


class PackageEnv:
  """One episode.

  Attributes:
    done: whether the agent has submitted.
    flags: signs that the tests were tampered with, after `verify`.
    figures: seconds of the verification, after `verify`.
    given: the package's own source by file, the gold among it.
  """

  tools: tuple[base.Tool, ...] = TOOLS

  def __init__(self, task: types.Task, problem: rows.Problem, runner: Runner):
    self._task, self._problem, self._runner = task, problem, runner
    self._desk = desk.Desk(problem.clean, problem.source, problem.rest)
    self.done = False
    self.flags: tuple[str, ...] = ()
    self.figures: dict[str, float] = {}

  @property
  def given(self) -> dict[str, str]:
    source = self._problem.clean.source
    return {path: data.decode(errors='replace') for path, data in source.items()}

  @property
  def source(self) -> dict[str, bytes]:
    """The agent's present source."""
    return dict(self._desk.source)

  async def reset(self) -> str:
    self._desk = desk.Desk(
      self._problem.clean, self._problem.source, self._problem.rest
    )
    self.done, self.flags, self.figures = False, (), {}
    return self._task.prompt

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one call. `suite.SuiteError`: the infrastructure failed in a test."""
    if self.done:
      return _SUBMITTED
    match name:
      case 'edit':
        return self._desk.edit(arguments['path'], arguments['old'], arguments['new'])
      case 'create':
        return self._desk.create(arguments['path'], arguments['text'])
      case 'test':
        return await self._test(arguments['tests'])
      case 'submit':
        self.done = True
        return 'submitted'
      case 'list' | 'grep' | 'read':
        return await asyncio.to_thread(self._desk.look, name, arguments)
    raise ValueError(f'tool: got {name!r}, want one of {[t.name for t in TOOLS]}')

  async def verify(self) -> types.Outcome:
    """1.0 if all tests of the task pass on the agent's source, else 0.0."""
    start = time.monotonic()
    try:
      tree = self._problem.given(self._desk.source)
      report = await self._runner.run(tree, self._problem.row.tests)
    except suite.SuiteError as e:
      return types.Outcome(None, f'the verifier failed: {e}')
    self.figures = {'verify_seconds': time.monotonic() - start}
    if report.forged:
      self.flags = (f'bends the tests ({report.forged})',)
      return types.Outcome(0.0, f'cheating: {self.flags[0]}')
    return types.Outcome(1.0 if report.passed(self._problem.row.tests) else 0.0)

  async def _test(self, asked: str) -> str:
    wanted = self._visible(asked.strip())
    if not wanted:
      return f'no such test: {asked[:80]!r}'
    tree = dataclasses.replace(
      self._problem.clean,
      files={**self._problem.rest, **self._problem.given(self._desk.source).source},
    )
    report = await self._runner.run(tree, wanted, explain=True)
    return _told(report, wanted)

  def _visible(self, asked: str) -> list[str]:
    """Ids that a word means; a file that the task has no ids of runs as a whole."""
    row = self._problem.row
    hidden = {rows.base(t) for t in row.fail_to_pass} - set(map(rows.base, row.shown))
    known = [test for test in row.tests if rows.base(test) not in hidden]
    if self._problem.row.release:  # what decides is not in the agent's tree
      known = [test for test in row.pass_to_pass if self._has(test)]
    if not asked:
      return known
    found = [t for t in known if t == asked or rows.base(t) == asked]
    found = found or [t for t in known if t.startswith(f'{asked}::')]
    return found or ([asked] if '::' in asked and self._has(asked) else [])

  def _has(self, test: str) -> bool:
    return test.partition('::')[0] in self._problem.rest


def _told(report: suite.Report, wanted: Sequence[str]) -> str:
  """What an agent is told of a run."""
  if not report.complete:
    return f'the tests did not come to their end: {report.reason}'
  bad = [
    test for test in wanted if report.results.get(test) not in ('passed', 'skipped')
  ]
  lines = [f'passed {len(wanted) - len(bad)} of {len(wanted)}']
  broken = [name for name in report.results if '::' not in name]
  if broken:  # then its tests did not run
    bad = [test for test in bad if test in report.results]
  for test in [*broken, *bad][:_MESSAGES]:
    result = report.results.get(test, 'not run')
    lines.append(f'{result} {test}\n    {_indented(report.texts.get(test, ""))}')
  left = len(broken) + len(bad) - _MESSAGES
  return '\n'.join([*lines, f'... {left} more'] if left > 0 else lines)


class Host:
  """Environments of this process, and what they share."""

  def __init__(self, runner: Runner):
    self.runner = runner

  async def verify(
    self, tasks: Iterable[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """(sound tasks, set-aside id -> reason): gold passes, the fault is caught.

    With tasks.verify=False only what needs no run is looked at.
    """
    tasks = list(tasks)
    found = await asyncio.gather(*(self._unsound(task) for task in tasks))
    bad = {t.id: reason for t, reason in zip(tasks, found, strict=True) if reason}
    return [task for task in tasks if task.id not in bad], bad

  async def _unsound(self, task: types.Task) -> str:
    if not task.payload['verify']:
      return ''
    problem = problem_of(task)
    row = problem.row
    try:
      gold = await self.runner.run(problem.clean, row.tests)
      if not gold.passed(row.tests):
        return f'its gold does not pass {gold.reason}'.strip()
      faulty = await self.runner.run(problem.given(problem.source), row.tests)
    except suite.SuiteError as e:
      return f'the verifier failed: {e}'
    caught = [t for t in row.fail_to_pass if faulty.results.get(t) != 'passed']
    return '' if len(caught) == len(row.fail_to_pass) else 'its tests do not catch it'

  def env(self, task: types.Task) -> PackageEnv:
    return PackageEnv(task, problem_of(task), self.runner)

  async def close(self) -> None:
    await self.runner.close()


def load(cfg: config.Tasks) -> tuple[types.Task, ...]:
  """`read`, with what was set aside in the log."""
  tasks, set_aside = read(cfg)
  if set_aside:
    some = ', '.join(f'{k}: {v}' for k, v in list(set_aside.items())[:3])
    logging.warning('%d tasks set aside (%s, ...)', len(set_aside), some)
  return tasks


async def open_host(cfg: config.Sandbox) -> Host:
  """Chooses a backend. ValueError as `sandbox.choose_backend`."""
  backend = await asyncio.to_thread(sandbox.choose_backend, cfg)
  return Host(Runner(cfg, backend))
