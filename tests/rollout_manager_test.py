"""What the rollout process issues, retries and evaluates; episodes are stand-ins."""

import asyncio
import contextlib
import dataclasses
import json
import random

import numpy as np
import pytest

from swe17 import config, types
from swe17.learner import buffer
from swe17.metrics import records, status
from swe17.rollout import manager
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import manifest, publisher

TASKS = [
  types.Task(f'f{i}/0', 'repair_functions', 'train', f'f{i}', 'Repair.', {})
  for i in range(6)
]
HELDOUT = [dataclasses.replace(t, id=f'h{i}/0') for i, t in enumerate(TASKS[:3])]
WEIGHTS = {'w': np.arange(4, dtype=np.float32)}


class World:
  """Runs stand-in episodes; `spoiled` says at which tasks infrastructure fails."""

  def __init__(self):
    self.train, self.heldout = list(TASKS), list(HELDOUT)
    self.ran: list[tuple[str, str, int]] = []
    self.spoiled: dict[str, int] = {}  # task id -> attempts at it yet to be spoiled
    self.seconds = 0.0
    self.began: dict[str, int] = {}
    self.version = lambda: 0
    self.fmt = None

  async def episode(self, task, generate, group_id, member, sampling) -> types.Episode:
    del sampling
    self.began.setdefault(group_id, self.version())
    self.ran.append((task.id, group_id, member))
    if self.seconds:
      await asyncio.sleep(self.seconds * random.random())
    spoiled = self.spoiled.get(task.id, 0) > 0
    if spoiled and member == 3:
      self.spoiled[task.id] -= 1
    value = None if spoiled else float(member == 0)
    return types.Episode(
      id=f'{group_id}.{member}',
      task_id=task.id,
      unit=task.unit,
      group_id=group_id,
      member=member,
      status='invalid' if spoiled else 'valid',
      outcome=types.Outcome(value, 'the grader is gone' if spoiled else ''),
      solved_at=1.0,
      segments=(),
      turns=1,
      calls=1,
      malformed=0,
      tests=0,
      submitted=True,
      sampled_tokens=1,
      thinking_tokens=0,
      tool_seconds=0.0,
      seconds=0.0,
    )


class Router:
  """Nobody asks it for tokens: the stand-in episodes need none."""

  def __init__(self, found=(2,)):
    self.found, self.forgotten, self.asked = list(found), [], []

  async def discover(self) -> int:
    return self.found.pop(0) if len(self.found) > 1 else self.found[0]

  def forget(self, session: str) -> None:
    self.forgotten.append(session)

  async def __call__(self, request):
    self.asked.append(request)


class Learner:
  """Publishes plans and consumes groups in the order of their starts."""

  def __init__(self, store: kv.Store, cfg: config.Config):
    self.store, self.cfg = store, cfg
    self.publisher = publisher.Publisher(store, cfg.sync, attempt='test')
    self.version, self.step, self.consumed = -1, 0, set()
    self.trained: list[types.Group] = []

  def publish(self) -> None:
    below, rest = buffer.cursor(self.consumed)
    self.version += 1
    plan = {
      'step': self.step,
      'consumed_below': below,
      'consumed_rest': rest,
      'done': self.step >= self.cfg.steps,
    }
    self.publisher.publish(self.version, WEIGHTS, step=self.step, plan=plan)

  def take(self, n: int) -> bool:
    """Trains on the oldest `n` groups in the store, if there are as many."""
    seen = {group_store.key_of(s) for s in self.consumed}
    keys = group_store.list_new(self.store, seen)[:n]
    if len(keys) < n:
      return False
    groups = [group_store.load(self.store, key) for key in keys]
    self.trained += groups
    self.consumed |= {g.start for g in groups}
    self.step += 1
    return True


def settings(tmp_path, **changes) -> config.Config:
  cfg = config.Config(
    run_dir=str(tmp_path),
    store=f'file://{tmp_path}/store',
    steps=6,
    rollout=config.Rollout(group_size=4, ahead=2, eval_samples=2, keep_episodes=0),
    batch=config.Batch(groups=2),
    sampler=config.Sampler(slots=8),
  )
  return dataclasses.replace(cfg, **changes)


@pytest.fixture
def make(tmp_path):
  """Makes a rollout's state as a fresh process has it, with a learner's first plan."""
  with contextlib.ExitStack() as stack:

    def made(attempt: str = 'a0', plan: bool = True, **changes) -> manager.Rollout:
      cfg = settings(tmp_path, **changes)
      store = kv.open(cfg.store)
      events = records.EventLog(str(tmp_path / 'events.jsonl'))
      stack.callback(events.close)
      says = status.Status(cfg.run_dir, 'rollout')
      state = manager.Rollout(cfg, store, World(), Router(), says, events, attempt)
      if plan and manifest.latest(store) is None:
        Learner(store, cfg).publish()
      newest = manifest.latest(store)
      state.plan = None if newest is None else manifest.read(store, newest)
      return state

    yield made


def plan(state: manager.Rollout, below: int = 0, rest=(), step: int = 0, done=False):
  values = {
    'step': step,
    'consumed_below': below,
    'consumed_rest': list(rest),
    'done': done,
  }
  state.plan = dataclasses.replace(state.plan, plan=values)


def drain(state: manager.Rollout) -> list[int]:
  """Issues all that is due now."""
  issued = []
  while (start := manager._due(state)) is not None:
    state.issued.add(start)
    issued.append(start)
  return issued


def events(state: manager.Rollout, kind: str) -> list[dict]:
  found = records.read_events(f'{state.cfg.run_dir}/events.jsonl')
  return [e for e in found if e['kind'] == kind]


# --- order and cursor -----------------------------------------------------------


def test_an_epoch_is_a_permutation_of_all_tasks_and_epochs_differ():
  epochs = [
    [manager._task(TASKS, 3, s).id for s in range(6 * e, 6 * e + 6)] for e in range(5)
  ]
  assert all(sorted(epoch) == sorted(t.id for t in TASKS) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 1
  again = [manager._task(TASKS, 3, s).id for s in range(6)]
  assert again == epochs[0]
  other = [[manager._task(TASKS, s, i).id for i in range(6)] for s in range(5)]
  assert len({tuple(epoch) for epoch in other}) > 1


def test_no_more_is_issued_than_ahead_allows(make):
  state = make()
  assert drain(state) == [0, 1, 2, 3]  # 2 batches of 2 groups
  plan(state, below=1)
  assert drain(state) == [4]
  plan(state, below=1, rest=[2, 4])
  assert drain(state) == [5, 6]
  plan(state, below=7)
  assert drain(state) == [7, 8, 9, 10]


def test_after_a_restart_only_what_was_in_flight_is_issued_again(make):
  """Finished groups wait in the store, consumed ones are in the plan (CASES 5.10)."""
  state = make('a1')
  plan(state, below=3, rest=[5])
  state.issued |= {2, 4, 6}  # in the store; 2 is consumed and not yet discarded
  # Outstanding: 4 and 6. In flight were 3 and 7, whatever was issued of them.
  assert drain(state) == [3, 7]
  plan(state, below=8)
  assert drain(state) == [8, 9, 10, 11]


def test_a_learner_that_falls_back_to_its_checkpoint_finds_its_groups(make):
  state = make()
  drain(state)
  plan(state, below=4)
  assert drain(state) == [4, 5, 6, 7]
  plan(state, below=2)  # 2 and 3 are in the store: never discarded before the commit
  assert drain(state) == []


@pytest.mark.parametrize('seed', range(10))
def test_kills_at_random_lose_no_start_and_train_none_twice(make, seed):
  rng = random.Random(seed)
  learner, state = None, make('p0')
  learner = Learner(state.store, state.cfg)
  learner.version = 0
  process, flight = 0, []
  while len(learner.trained) < 2 * len(TASKS):
    flight += drain(state)
    rng.shuffle(flight)
    for _ in range(rng.randint(0, len(flight))):
      start = flight.pop()
      task = manager._task(TASKS, 0, start)
      made = types.Group(f'{start}-{state.attempt}', start, task.id, task.unit, ())
      assert group_store.append(state.store, made)
    if learner.take(2) and rng.random() < 0.7:
      learner.publish()
      asyncio.run(manager._next_plan(state))
    if rng.random() < 0.3:  # kill -9: what was in flight is gone, and so is memory
      process, flight = process + 1, []
      learner.publish()
      state = make(f'p{process}')
      keys = state.store.list('groups/')
      state.issued |= {int(key.rsplit('/', 1)[1]) for key in keys}
  starts = [g.start for g in learner.trained]
  assert len(set(starts)) == len(starts)
  below, rest = buffer.cursor(learner.consumed)
  # What is missing below the newest is in the store or still to come, never skipped.
  gaps = set(range(max(starts))) - set(starts)
  assert gaps == set(range(below, max(starts))) - set(rest)
  assert len(gaps) <= 4


# --- groups ---------------------------------------------------------------------


async def test_a_group_holds_all_its_members_under_one_id(make):
  state = make()
  state.lag = 0.25
  await manager._group(state, 3)
  group = group_store.load(state.store, group_store.key_of(3))
  assert group.id == '00000003-a0.0'
  assert [e.id for e in group.episodes] == [f'00000003-a0.0.{m}' for m in range(4)]
  assert group.task_id == manager._task(TASKS, 0, 3).id
  assert (group.loop_lag, state.lag) == (0.25, 0.0)
  assert state.router.forgotten == [f'00000003-a0.0.{m}.0' for m in range(4)]


async def test_a_spoiled_group_is_tried_again_under_another_id(make):
  state = make()
  task = manager._task(TASKS, 0, 0)
  state.world.spoiled[task.id] = 1
  await manager._group(state, 0)
  group = group_store.load(state.store, group_store.key_of(0))
  assert group.id == '00000000-a0.1'
  assert [e.status for e in group.episodes] == ['valid'] * 4
  assert state.spoiled == {}
  (warning,) = events(state, 'warning')
  assert '00000000-a0.0' in warning['text']
  assert 'the grader is gone' in warning['text']


async def test_a_task_that_keeps_spoiling_its_groups_is_set_aside(make):
  """The learner still gets the group, without outcomes: its start is not lost."""
  state = make()
  bad = manager._task(TASKS, 0, 0)
  state.world.spoiled[bad.id] = 10**6
  starts = [s for s in range(60) if manager._task(TASKS, 0, s).id == bad.id][:2]
  for start in starts:
    await manager._group(state, start)
    group = group_store.load(state.store, group_store.key_of(start))
    assert group.id.endswith('.2')  # the first and rollout.retries=2 more
    assert all(e.outcome.value is None for e in group.episodes)
  assert state.spoiled == {bad.id: 2}
  state.world.ran.clear()
  for start in range(100, 130):
    await manager._group(state, start)
  assert bad.id not in {task_id for task_id, _, _ in state.world.ran}


async def test_a_late_result_of_an_earlier_process_changes_nothing(make):
  """Two attempts at one start: the first that arrives is the group (CASES 5.7)."""
  old, new = make('old'), make('new')
  await manager._group(new, 0)
  await manager._group(old, 0)
  assert old.store.list('groups/') == ['groups/00000000']
  assert group_store.load(old.store, 'groups/00000000').id == '00000000-new.0'


async def test_groups_run_ahead_by_no_more_than_the_bound_until_training_is_done(make):
  state = make()
  state.world.seconds = 0.02
  state.world.version = lambda: state.plan.version
  learner = Learner(state.store, state.cfg)
  learner.version = 0
  most, ages = 0, []

  async def learn() -> None:
    nonlocal most
    while learner.step < state.cfg.steps:
      most = max(most, len(state.issued - learner.consumed))
      known = len(learner.trained)
      if learner.take(state.cfg.batch.groups):
        for group in learner.trained[known:]:
          ages.append(learner.step - 1 - state.world.began[group.id])
        learner.publish()
      await asyncio.sleep(0.005)

  await asyncio.wait_for(asyncio.gather(manager._groups(state), learn()), 60)
  assert most <= state.cfg.rollout.ahead * state.cfg.batch.groups
  assert len(learner.trained) == 12
  assert min(ages) >= 0
  assert max(ages) <= state.cfg.rollout.ahead
  assert manager._done(state)


async def test_groups_that_a_dead_process_finished_are_not_run_again(make):
  first = make('a0')
  for start in (0, 2):
    await manager._group(first, start)
  state = make('a1', steps=2)
  learner = Learner(state.store, state.cfg)
  learner.version = 0

  async def learn() -> None:
    while learner.step < 2:
      if learner.take(2):
        learner.publish()
      await asyncio.sleep(0.005)

  await asyncio.wait_for(asyncio.gather(manager._groups(state), learn()), 60)
  began = {int(group_id[:8]) for _, group_id, _ in state.world.ran}
  assert not began & {0, 2}
  assert {1, 3} <= began


async def test_a_bug_in_a_group_ends_the_process(make):
  state = make()

  async def episode(*_) -> types.Episode:
    raise ZeroDivisionError('a bug')

  state.world.episode = episode
  with pytest.raises(ZeroDivisionError):
    await asyncio.wait_for(manager._groups(state), 60)


def test_a_run_resumed_for_more_steps_is_not_done_by_its_old_plan(make):
  state = make(steps=6)
  plan(state, below=12, step=6, done=True)
  assert manager._done(state)
  state = make(steps=9)
  plan(state, below=12, step=6, done=True)
  assert not manager._done(state)


# --- the plan -------------------------------------------------------------------


async def test_the_next_plan_is_taken_up_and_its_absence_changes_nothing(make):
  state = make()
  learner = Learner(state.store, state.cfg)
  learner.version = 0
  for _ in range(3):
    await manager._next_plan(state)
  assert state.plan.version == 0
  learner.consumed = {0, 1, 3}
  learner.publish()
  await manager._next_plan(state)
  assert state.plan.version == 1
  assert state.plan.plan['consumed_below'] == 2
  assert state.plan.plan['consumed_rest'] == [3]


@pytest.mark.parametrize('damage', ['cut', 'gone'])
async def test_a_lost_manifest_is_passed_over_once_a_newer_one_is_there(make, damage):
  state = make()
  learner = Learner(state.store, state.cfg)
  learner.version = 0
  learner.publish()
  key = manifest.key_of(1)
  if damage == 'cut':
    state.store.write(key, state.store.read(key)[:-20])
  else:
    state.store.delete(key)
  for _ in range(2 * manager._LIST_AFTER):
    await manager._next_plan(state)
  assert state.plan.version == 0  # it stays, and nothing is raised
  learner.consumed = {0}
  learner.publish()
  for _ in range(manager._LIST_AFTER):
    await manager._next_plan(state)
  assert state.plan.version == 2
  assert state.plan.plan['consumed_below'] == 1


async def test_the_start_waits_for_a_plan_and_for_every_sampler(make):
  state = make(plan=False)
  assert state.plan is None
  state.router.found = [0, 1, 2]
  waiting = asyncio.ensure_future(manager._first_plan(state))
  await asyncio.sleep(0.05)
  assert not waiting.done()
  Learner(state.store, state.cfg).publish()
  await asyncio.wait_for(waiting, 60)
  assert state.plan.version == 0
  assert state.router.found == [2]


# --- evaluation -----------------------------------------------------------------


def read(state: manager.Rollout, label: str) -> dict:
  with open(f'{state.cfg.run_dir}/evals/{label}.json') as f:
    return json.load(f)


async def test_an_evaluation_asks_for_the_plans_version_and_names_the_samples(make):
  state = make()
  learner = Learner(state.store, state.cfg)
  learner.version = 0
  learner.publish()
  await manager._next_plan(state)
  requests = []

  async def episode(task, generate, group_id, member, sampling) -> types.Episode:
    request = types.GenerateRequest('s', np.ones(1, np.int32), 1, (), sampling, (0, 0))
    await generate(request)
    requests.append((group_id, member))
    return await World().episode(task, generate, group_id, member, sampling)

  state.world.episode = episode
  await manager._evaluate(state, 'before')
  assert {r.min_version for r in state.router.asked} == {1}
  assert {r.sampling for r in state.router.asked} == {state.cfg.sampler.sampling}
  assert sorted(set(requests)) == sorted(
    (f'eval-heldout-{t.id}', m) for t in HELDOUT for m in range(2)
  )
  found = read(state, 'before')
  assert (found['version'], found['pass_at_1'], found['missing']) == (1, 0.5, 0)
  (event,) = events(state, 'evaluation')
  assert event['pass_at_1'] == 0.5


async def test_an_evaluation_that_is_on_record_is_not_run_again(make):
  state = make()
  for label in ('before', 'after'):
    await manager._evaluate(state, label)
  state.world.ran.clear()
  for label in ('before', 'after'):
    await manager._evaluate(state, label)
  assert state.world.ran == []
  # Resumed for more steps: `before` stands, `after` was of an earlier version.
  state.plan = dataclasses.replace(state.plan, version=4)
  for label in ('before', 'after'):
    await manager._evaluate(state, label)
  assert len(state.world.ran) == 6
  assert (read(state, 'before')['version'], read(state, 'after')['version']) == (0, 4)


PRACTICE = [
  types.Task(f'practice/{i}', 'practice', 'train', f'p{i}', 'Practise.', {})
  for i in range(4)
]


@pytest.fixture
def practice(monkeypatch):
  """Stands in for the library's functions; what was to be kept apart of them."""
  asked = []
  monkeypatch.setattr(
    manager.library, 'practice', lambda held: asked.append(held) or list(PRACTICE)
  )
  return asked


def warm_start(state: manager.Rollout) -> list[types.Episode]:
  store = kv.open(state.cfg.store + '/imitation')
  groups = [group_store.load(store, key) for key in store.list('groups/')]
  return [episode for group in groups for episode in group.episodes]


async def test_scripted_episodes_that_are_missing_are_written_once(make, practice):
  state = make(imitation=config.Imitation(episodes=10))
  await manager._scripted(state)
  store = kv.open(state.cfg.store + '/imitation')
  assert len(store.list('groups/')) == 3  # 10 episodes, 4 a record
  assert [member for _, _, member in state.world.ran] == list(range(12))
  first = list(state.world.ran)
  store.delete('groups/00000001')
  state.world.ran.clear()
  await manager._scripted(state)
  assert state.world.ran == first[4:8]  # on the same tasks
  assert len(store.list('groups/')) == 3
  assert state.store.list('groups/') == []
  state.world.ran.clear()
  await manager._scripted(state)
  assert state.world.ran == []
  assert practice == [HELDOUT, HELDOUT]  # nothing missing, nothing asked


@pytest.mark.parametrize('share', [0.0, 0.25, 1.0])
async def test_a_share_of_the_scripted_episodes_practises(make, practice, share):
  imitation = config.Imitation(episodes=200, practice=share)
  state = make(imitation=imitation)
  styles = {}

  async def episode(task, agent, group_id, member, sampling) -> types.Episode:
    styles[member] = agent._style
    return await World().episode(task, agent, group_id, member, sampling)

  state.world.episode = episode
  await manager._scripted(state)
  done = warm_start(state)
  practised = [e for e in done if e.task_id.startswith('practice/')]
  assert abs(len(practised) - 200 * share) <= (20 if 0 < share < 1 else 0)
  for e in done:
    own = manager.scripted.PRACTICE if e in practised else manager.scripted.CLUMSY
    assert styles[e.member] == own
  # Their stand-ins had outcomes: nothing says whether practice was good.
  assert all(e.outcome.value is None and e.status == 'invalid' for e in practised)
  assert all(e.outcome.value is not None for e in done if e not in practised)
  assert len({e.id for e in done}) == 200
  held = {t.id for t in HELDOUT}
  assert not held & {e.task_id for e in done}
