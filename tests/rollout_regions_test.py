"""Rollout processes in several regions: what a cut line to the store does, and not."""

import asyncio
import dataclasses
import threading

import pytest

from swe17 import config
from swe17.rollout import manager, outbox, process
from swe17.store import faults, kv
from swe17.store import groups as group_store
from swe17.sync import follower
from tests import rollout_fixtures as rig

R = 3
SPREAD = {
  'regions': R,
  'rollout': config.Rollout(processes=R, group_size=4, ahead=2, keep_episodes=0),
  'sampler': config.Sampler(processes=R, slots=8),
}


@pytest.fixture
def make(tmp_path, monkeypatch):
  monkeypatch.setattr(outbox, '_PAUSE', 0.01)
  monkeypatch.setattr(outbox, '_LONGEST', 0.02)
  with rig.maker(tmp_path) as made:
    yield made


def line(state_of: dict, tmp_path) -> faults.FaultStore:
  """A process's own way to the store, cut while `state_of['cut']` is true."""
  inner = kv.open(f'file://{tmp_path}/store')
  away = kv.StoreError(inner.url, '', 'no answer', transient=True)

  def rule(_: faults.Operation) -> faults.Fault | None:
    return faults.Fault('drop_before', error=away) if state_of['cut'] else None

  return faults.FaultStore(inner, rule)


async def learn(learner: rig.Learner, until: int) -> None:
  while learner.step < until:
    if learner.take(learner.cfg.batch.groups):
      learner.publish()
    await asyncio.sleep(0.005)


def hold(state: process.Rollout) -> asyncio.Event:
  """Keeps episodes from ending until the event is set."""
  gate, run = asyncio.Event(), state.world.episode

  async def episode(*args, **limits):
    await gate.wait()
    return await run(*args, **limits)

  state.world.episode = episode
  return gate


def stages(state: process.Rollout) -> dict[str, set[int]]:
  name = f'rollout-{state.index}'
  kinds = ('started', 'finished', 'stored')
  return {k: {e['start'] for e in rig.events(state, k, name)} for k in kinds}


async def test_a_region_that_is_cut_off_stalls_nobody_and_loses_nothing(make, tmp_path):
  lines = [{'cut': False} for _ in range(R)]
  states = [
    make(f'p{r}', index=r, store=line(lines[r], tmp_path), steps=30, **SPREAD)
    for r in range(R)
  ]
  for state in states:
    state.world.seconds = 0.01
  learner = rig.Learner(kv.open(states[0].cfg.store), states[0].cfg)
  learner.version = 0
  running = [asyncio.ensure_future(manager._groups(state)) for state in states]
  await asyncio.wait_for(learn(learner, 3), 60)
  gate = hold(states[2])
  await asyncio.wait_for(learn(learner, 5), 60)
  while not stages(states[2])['started'] - stages(states[2])['finished']:
    await asyncio.sleep(0.01)
  lines[2]['cut'] = True
  known = states[2].plan.version
  gate.set()
  await asyncio.wait_for(learn(learner, 9), 60)  # the others carry on alone
  while not states[2].outbox.waiting:
    await asyncio.sleep(0.01)
  assert not running[2].done()
  assert states[2].plan.version <= known + 1
  waited = set(states[2].issued)
  lines[2]['cut'] = False
  await asyncio.wait_for(asyncio.gather(*running, learn(learner, 30)), 60)
  trained = [group.start for group in learner.trained]
  assert len(set(trained)) == len(trained)
  in_store = {group_store.start_of(k) for k in learner.store.list('groups/')}
  for r, state in enumerate(states):
    seen = stages(state)
    assert seen['finished'] == seen['stored'] <= in_store
    assert all(start % R == r for start in seen['started'])
  back = {start for start in trained if start % R == 2} - waited
  assert back  # it takes part again


async def test_while_the_store_hangs_groups_are_issued_run_and_kept(make, tmp_path):
  """A cut line may answer nothing at all for minutes: no call returns."""
  held, hang = threading.Event(), {'on': False}

  def rule(_: faults.Operation) -> faults.Fault | None:
    return faults.Fault('delay', seconds=60.0) if hang['on'] else None

  store = faults.FaultStore(
    kv.open(f'file://{tmp_path}/store'), rule, sleep=lambda _: held.wait(60)
  )
  state = make(store=store, steps=1)
  running = asyncio.ensure_future(manager._groups(state))
  while len(state.issued) < 1:
    await asyncio.sleep(0.005)
  hang['on'] = True
  try:
    while state.outbox.waiting + len(stages_stored(state)) < 4:  # all that is due
      await asyncio.sleep(0.01)
    assert len(state.issued) == 4
  finally:
    hang['on'] = False
    held.set()
  learner = rig.Learner(kv.open(state.cfg.store), state.cfg)
  learner.version = 0
  await asyncio.wait_for(asyncio.gather(running, learn(learner, 1)), 60)


def stages_stored(state: process.Rollout) -> set[int]:
  return stages(state)['stored']


async def test_starts_that_wait_in_files_are_not_run_again(make, tmp_path):
  cut = {'cut': True}
  first = make('a0', store=line(cut, tmp_path), steps=1)
  await manager._group(first, 1)
  await asyncio.sleep(0.05)
  await first.outbox.close()
  state = make('a1', steps=2)
  learner = rig.Learner(state.store, state.cfg)
  learner.version = 0
  await asyncio.wait_for(asyncio.gather(manager._groups(state), learn(learner, 2)), 60)
  assert 1 not in {int(group_id[:8]) for _, group_id, _ in state.world.ran}
  (kept,) = [g for g in learner.trained if g.start == 1]
  assert kept.id == '00000001-a0.0'


async def test_a_region_runs_as_much_at_once_as_its_own_samplers_hold(make):
  wide = dataclasses.replace(SPREAD['rollout'], processes=4)
  changes = {**SPREAD, 'rollout': wide, 'regions': 2, 'batch': config.Batch(groups=30)}
  for index in range(4):  # 3 samplers: 2 in region 0, 1 in region 1; 2 processes each
    state = make(f'p{index}', index=index, steps=1, **changes)
    most, now = 0, 0

    async def episode(*_, state=state, **limits):
      nonlocal most, now
      now += 1
      most = max(most, now)
      await asyncio.sleep(0.005)
      now -= 1
      return await rig.World().episode(state.world.train[0], None, 'g', 0, None)

    state.world.episode = episode
    running = asyncio.ensure_future(manager._groups(state))
    while len(stages(state)['finished']) < 3:
      await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert most == (8 if index % 2 == 0 else 4)


async def test_only_the_first_process_waits_for_nobody(make):
  """The others begin once version 0 is evaluated: nothing may train on it before."""
  state = make('p1', index=1, **SPREAD)
  waiting = asyncio.ensure_future(manager._until_begun(state))
  await asyncio.sleep(0.1)
  assert not waiting.done()
  first = make('p0', **{**SPREAD, 'steps': 0})
  first.router.found = [1]
  await asyncio.wait_for(process.first_plan(first), 60)
  learner = rig.Learner(first.store, first.cfg)  # says that all steps are done
  learner.version = 0
  learner.publish()
  await asyncio.wait_for(manager._whole(first), 60)
  await asyncio.wait_for(waiting, 60)
  assert follower.read_plan(state.store).plan['done']
  assert [e['kind'] for e in rig.events(first, 'tasks')] == ['tasks']


async def test_the_start_outlasts_a_cut(make, tmp_path):
  cut = {'cut': True}
  state = make(plan=False, store=line(cut, tmp_path))
  rig.Learner(kv.open(state.cfg.store), state.cfg).publish()
  waiting = asyncio.ensure_future(process.first_plan(state))
  await asyncio.sleep(0.1)
  assert not waiting.done()
  cut['cut'] = False
  await asyncio.wait_for(waiting, 60)
  assert state.plan.version == 0
