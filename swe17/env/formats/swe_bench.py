"""The family `swe_bench`: rows of SWE-bench tables, with a repository or an image each.

  tasks.table   the rows (rows.py)
  tasks.place   local: files at base_commit of a repository below tasks.root, without
                history, with this machine's Python and nothing installed;
                container: /testbed of the row's image

A task is sound if the gold patch passes all of its tests, and the base passes all of
PASS_TO_PASS but none of FAIL_TO_PASS. How files are graded is in swe_trees.py; results
are structured records, of packages/suite.py or swe_boxed.py, never a log.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import pathlib
import weakref

from swe17 import config, types
from swe17.env import base, copies, pool, sandbox, shell
from swe17.env.audit import cheating
from swe17.env.formats import repositories, rows, swe_boxed, swe_trees, workspace
from swe17.env.packages import suite

FAMILY = 'swe_bench'
PROMPT = """The files of {repo} are in the present folder.

{statement}

Change the source so that this is right. Every command is run in a shell of its own: \
only files stay. Leave tests and their settings as they are: yours do not count. \
Submit when it is done."""
_TEST_SECONDS, _SUITE_SECONDS = 60.0, 900.0
_HELDOUT = 0.2  # share of units, by hash
_KEPT = 8  # trees of images
_FULL = 0.75  # of what a shell's folder may hold, at the start


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """The tasks of `cfg.table`, and set-aside id -> reason.

  ValueError if there is no table, no folder of repositories where one is needed, or
  fewer are left than asked for.
  """
  if not cfg.table:
    raise ValueError('tasks.table: got none, want a .jsonl, .json or .parquet file')
  if cfg.place == 'local' and not pathlib.Path(cfg.root or '/none').is_dir():
    raise ValueError(f'tasks.root: got {cfg.root!r}, want a folder of repositories')
  instances, aside = rows.read(pathlib.Path(cfg.table))
  held = heldout(cfg.units, [made.repo for made in instances])
  found = []
  for made in instances:
    task = _task(cfg, made, 'heldout' if made.repo in held else 'train')
    if isinstance(task, types.Task):
      found.append(task)
    else:
      aside[made.id] = task
  return chosen(cfg, found, aside), aside


def chosen(
  cfg: config.Tasks, tasks: Sequence[types.Task], aside: Mapping[str, str]
) -> tuple[types.Task, ...]:
  """As many of each split as `cfg` asks for. ValueError if there are fewer."""
  taken: list[types.Task] = []
  for split, asked in (('train', cfg.train), ('heldout', cfg.heldout)):
    found = [task for task in tasks if task.split == split]
    if len(found) < asked:
      some = ''.join(f'; {name}: {why}' for name, why in [*aside.items()][:3])
      raise ValueError(
        f'tasks.{split}: got {len(found)} usable, want {asked}; {len(aside)} were set '
        f'aside{some}'
      )
    taken += found[: asked or len(found)]
  return tuple(taken)


def heldout(named: str, units: Sequence[str]) -> frozenset[str]:
  """The units that are held out: those named, else a fifth of them by hash.

  ValueError on a name that is no unit.
  """
  found = {name.strip() for name in named.split(',')} - {''}
  if unknown := found - set(units):
    some = ', '.join(sorted(set(units))[:5])
    raise ValueError(f'tasks.units: got {min(unknown)!r}, want some of {some}, ...')
  if found:
    return frozenset(found)
  order = sorted(set(units), key=lambda u: hashlib.sha256(u.encode()).digest())
  return frozenset(order[: round(_HELDOUT * len(order))])


async def examined(
  tasks: Sequence[types.Task],
  examine: Callable[[types.Task], Awaitable[types.Task | str]],
) -> tuple[list[types.Task], dict[str, str]]:
  """`examine` of every task, which gives a sound one or a reason: both, as a host's
  `verify`."""
  found = await asyncio.gather(*(examine(task) for task in tasks))
  pairs = list(zip(tasks, found, strict=True))
  sound = [made for made in found if isinstance(made, types.Task)]
  return sound, {task.id: why for task, why in pairs if isinstance(why, str)}


def _task(cfg: config.Tasks, made: rows.Instance, split: str) -> types.Task | str:
  """The task of a row, or why it is set aside."""
  if reason := rows.not_pytest(made):
    return reason
  place = ''
  if cfg.place == 'local':
    found = repositories.find(pathlib.Path(cfg.root), made.repo, made.id)
    if found is None:
      return f'no repository of {made.repo} below {cfg.root}'
    place = str(found.resolve())
  elif not made.image:
    return 'the row names no image (tasks.place=local works on a repository)'
  payload = {
    'place': cfg.place,
    'repository': place,
    'commit': made.commit,
    'image': made.image,
    'patch': made.patch,
    'test_patch': made.test_patch,
    'fail_to_pass': list(made.fail_to_pass),
    'pass_to_pass': list(made.pass_to_pass),
  }
  prompt = PROMPT.format(repo=made.repo, statement=made.statement.strip())
  return types.Task(made.id, FAMILY, split, made.repo, prompt, payload)


class Place:
  """Where tasks run: opens workspaces, gives their files, runs their tests."""

  def __init__(self, cfg: config.Sandbox):
    self.cfg = cfg
    self._backend = ''
    self._ready: pool.Pool | None = None
    self._boxed: OrderedDict[str, swe_trees.Problem] = OrderedDict()

  async def _local(self) -> str:
    """The backend of tasks with a repository. ValueError as `choose_backend`."""
    if not self._backend:
      if self.cfg.backend == 'container':
        raise ValueError("tasks.place='local' with sandbox.backend='container'")
      self._backend = await asyncio.to_thread(sandbox.choose_backend, self.cfg)
    return self._backend

  async def problem(self, task: types.Task) -> swe_trees.Problem:
    """The task with its files. ValueError if there is none, OSError of an engine."""
    if task.payload['place'] == 'local':
      return await asyncio.to_thread(swe_trees.local, task)
    if task.id not in self._boxed:
      self._boxed[task.id] = await swe_boxed.problem(self.cfg, task)
      if len(self._boxed) > _KEPT:
        self._boxed.popitem(last=False)
    return self._boxed[task.id]

  async def open(self, task: types.Task) -> workspace.Workspace:
    """A fresh workspace. OSError of the infrastructure."""
    if task.payload['place'] == 'local':
      made = await self.problem(task)
      backend = await self._local()
      hidden = await asyncio.to_thread(copies.hide, made.names())
      return workspace.Local(self.cfg, backend, made.base.tar, options=hidden)
    return await swe_boxed.open_workspace(self.cfg, task)

  async def report(
    self,
    task: types.Task,
    files: Mapping[str, bytes],
    tests: Sequence[str] | None,
  ) -> suite.Report:
    """What becomes of some tests with an agent's files. SuiteError, OSError.

    None: all tests, which only a task with a repository can be asked for.
    """
    made = await self.problem(task)
    tree = await asyncio.to_thread(made.graded, files)
    if task.payload['place'] == 'local':
      backend = await self._local()
      if self._ready is None:
        self._ready = suite.waiting(self.cfg, backend, self.cfg.workers)
      return await suite.run(
        self.cfg,
        backend,
        tree,
        tests,
        _TEST_SECONDS,
        seconds=_SUITE_SECONDS,
        ready=self._ready,
      )
    if tests is None:
      raise ValueError(f'{task.id}: an image is asked for tests by name')
    was = made.base.files
    return await swe_boxed.report(self.cfg, task, was, tree, tests, _SUITE_SECONDS)

  async def close(self) -> None:
    if self._ready is not None:
      await self._ready.close()


class SweEnv(workspace.BashEnv):
  """One episode on one task that `verify` found sound."""

  rules: base.Rules = 'repository'

  def __init__(self, task: types.Task, place: Place):
    super().__init__(task.prompt, lambda: place.open(task))
    self._task, self._place = task, place
    self._given: Mapping[str, str] = {}

  @property
  def given(self) -> Mapping[str, str]:
    """The task's words; the text of its modules, in the base and in the fix."""
    return self._given

  async def reset(self) -> str:
    prompt = await super().reset()
    self._given = _Given(self._task, await self._place.problem(self._task))
    return prompt

  async def _grade(self, work: workspace.Workspace) -> types.Outcome:
    """1.0 if all of FAIL_TO_PASS and PASS_TO_PASS pass, else 0.0."""
    payload = self._task.payload
    tests = [*payload['fail_to_pass'], *payload['pass_to_pass']]
    try:
      files = await work.files()
      report = await self._place.report(self._task, files, tests)
      made = await self._place.problem(self._task)
    except (suite.SuiteError, OSError, ValueError) as e:
      return types.Outcome(None, f'the verifier failed: {e}')
    was, tree = made.base.files, made.tree
    changed = [n for n in {*files, *was} if files.get(n) != was.get(n)]
    source = [n for n in changed if n in files and tree.is_source(n)]
    changes = [cheating.Change(n, _text(was, n), _text(files, n)) for n in source]
    self.flags = cheating.found((), changes, given=self.given, rules=self.rules)
    failed = [t for t in tests if report.results.get(t) != 'passed']
    self.figures = {'files_changed': len(changed), 'tests_failed': len(failed)}
    if report.forged:
      self.flags = (*self.flags, 'forged_report')
      return types.Outcome(0.0, f'cheating: {report.forged}')
    if report.passed(tests):
      return types.Outcome(1.0)
    return types.Outcome(0.0, report.reason)


class _Given(Mapping[str, str]):
  """'' -> words, and names of the fix; path -> text of a module, in base and in fix.

  Decoded where it is asked for: a repository may have thousands of modules.
  """

  def __init__(self, task: types.Task, made: swe_trees.Problem):
    self._words = '\n'.join((task.prompt, *made.gold))
    self._both: tuple[Mapping[str, bytes | None], ...] = (made.base.files, made.gold)
    self._paths = {p for files in self._both for p in files if p.endswith('.py')}

  def __getitem__(self, path: str) -> str:
    if not path:
      return self._words
    if path not in self._paths:
      raise KeyError(path)
    texts = (files.get(path) or b'' for files in self._both)
    return '\n'.join(text.decode(errors='replace') for text in texts)

  def __iter__(self) -> Iterator[str]:
    yield ''
    yield from self._paths

  def __len__(self) -> int:
    return 1 + len(self._paths)


def _text(files: Mapping[str, bytes], path: str) -> str | None:
  return files[path].decode(errors='replace') if path in files else None


class Host:
  """What the episodes of a process share."""

  def __init__(self, cfg: config.Sandbox):
    self.place = Place(cfg)
    self._gate = asyncio.Semaphore(cfg.workers)
    self._made = weakref.WeakSet[SweEnv]()

  async def verify(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Grades every gold patch and every base once: (sound tasks, set-aside -> why)."""
    return await examined(tasks, self._examine)

  async def _examine(self, task: types.Task) -> types.Task | str:
    payload = task.payload
    fail, keep = payload['fail_to_pass'], payload['pass_to_pass']
    async with self._gate:
      try:
        made = await self.place.problem(task)
        size = len(made.base.tar)
        if payload['place'] == 'local' and size > _FULL * shell.FOLDER_BYTES:
          return f'{size >> 20} MiB of files: too many for tasks.place=local'
        good = await self.place.report(task, made.solved(), [*fail, *keep])
        null = await self.place.report(task, made.base.files, [*fail, *keep])
      except ValueError as e:
        return str(e)
      except (suite.SuiteError, OSError) as e:
        return f'the verifier failed: {e}'
    reason = unsound(good, null, fail, keep)
    payload = {**payload, 'gold': workspace.writing(made.gold)}
    return reason or dataclasses.replace(task, payload=payload)

  def env(self, task: types.Task) -> SweEnv:
    made = SweEnv(task, self.place)
    self._made.add(made)
    return made

  async def close(self) -> None:
    for env in list(self._made):
      await env.close()
    await self.place.close()


def unsound(
  good: suite.Report, null: suite.Report, fail: Sequence[str], keep: Sequence[str]
) -> str:
  """Why reports of the gold patch and of the base make no task; '' if they do."""
  for name, report in (('gold patch', good), ('base', null)):
    if report.forged or not report.complete:
      return f'with the {name} the suite did not end: {report.reason}'
  for test in (*fail, *keep):
    if good.results.get(test) != 'passed':
      why = good.texts.get(test, '').splitlines()
      said = good.results.get(test, 'absent') + (f' ({why[0]})' if why else '')
      return f'with the gold patch {test} is {said}'
  for test in fail:
    if null.results.get(test) == 'passed':
      return f'without the gold patch {test} passes already'
  for test in keep:
    if null.results.get(test) != 'passed':
      return f'without the gold patch {test} does not pass'
  return ''


async def open_host(cfg: config.Sandbox) -> Host:
  """A host; sandboxes are started when tasks need them."""
  return Host(cfg)
