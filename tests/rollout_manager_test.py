"""What a rollout process runs, stores, retries and evaluates."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from swe17 import config, types
from swe17.rollout import admission, manager, process
from swe17.store import groups as group_store
from swe17.sync import manifest
from tests import rollout_fixtures as rig


@pytest.fixture
def make(tmp_path):
  with rig.maker(tmp_path) as made:
    yield made


# --- groups ---------------------------------------------------------------------


async def test_a_group_holds_all_its_members_under_one_id(make):
  state = make()
  state.lag = 0.25
  group = await rig.group(state, 3)
  assert group.id == '00000003-a0.0'
  assert [e.id for e in group.episodes] == [f'00000003-a0.0.{m}' for m in range(4)]
  assert group.task_id == admission.task(rig.TASKS, 0, 3).id
  assert (group.loop_lag, state.lag) == (0.25, 0.0)
  assert state.router.forgotten == [f'00000003-a0.0.{m}.0' for m in range(4)]


async def test_a_spoiled_group_is_tried_again_under_another_id(make):
  state = make()
  task = admission.task(rig.TASKS, 0, 0)
  state.world.spoiled[task.id] = 1
  group = await rig.group(state, 0)
  assert group.id == '00000000-a0.1'
  assert [e.status for e in group.episodes] == ['valid'] * 4
  assert state.spoiled == {}
  (warning,) = rig.events(state, 'warning')
  assert '00000000-a0.0' in warning['text']
  assert 'the grader is gone' in warning['text']


async def test_a_task_that_keeps_spoiling_its_groups_is_set_aside(make):
  """The learner still gets the group, without outcomes: its start is not lost."""
  state = make()
  bad = admission.task(rig.TASKS, 0, 0)
  state.world.spoiled[bad.id] = 10**6
  starts = [s for s in range(60) if admission.task(rig.TASKS, 0, s).id == bad.id][:2]
  for start in starts:
    group = await rig.group(state, start)
    assert group.id.endswith('.2')  # the first and rollout.retries=2 more
    assert all(e.outcome.value is None for e in group.episodes)
  assert state.spoiled == {bad.id: 2}
  state.world.ran.clear()
  for start in range(100, 130):
    await rig.group(state, start)
  assert bad.id not in {task_id for task_id, _, _ in state.world.ran}


async def test_a_late_result_of_an_earlier_process_changes_nothing(make):
  """Two attempts at one start: the first that arrives is the group (CASES 5.7)."""
  old, new = make('old'), make('new')
  await rig.group(new, 0)
  await rig.group(old, 0)
  assert old.store.list('groups/') == ['groups/00000000']
  assert group_store.load(old.store, 'groups/00000000').id == '00000000-new.0'


async def test_groups_run_ahead_by_no_more_than_the_bound_until_training_is_done(make):
  state = make()
  state.world.seconds = 0.02
  state.world.version = lambda: state.plan.version
  learner = rig.Learner(state.store, state.cfg)
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
  assert admission.done(state.plan.plan, state.cfg)


async def test_groups_that_a_dead_process_finished_are_not_run_again(make):
  first = make('a0')
  for start in (0, 2):
    await rig.group(first, start)
  state = make('a1', steps=2)
  learner = rig.Learner(state.store, state.cfg)
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

  async def episode(*_, **limits) -> types.Episode:
    raise ZeroDivisionError('a bug')

  state.world.episode = episode
  with pytest.raises(ZeroDivisionError):
    await asyncio.wait_for(manager._groups(state), 60)


async def test_a_world_in_which_every_task_fails_ends_the_run_with_the_reasons(make):
  """CASES 5.5: not one dead group after another for hours."""
  limits = config.Rollout(
    group_size=4, ahead=2, retries=1, dead_groups=5, keep_episodes=0
  )
  state = make(rollout=limits)
  for task in rig.TASKS:
    state.world.spoiled[task.id] = 10**6
  with pytest.raises(ValueError, match=r'5 groups in a row .* the grader is gone'):
    for start in range(20):
      await manager._group(state, start)
  assert {int(group_id[:8]) for _, group_id, _ in state.world.ran} == set(range(5))
  await state.outbox.flush()
  assert len(state.store.list('groups/')) == 4


async def test_one_task_that_fails_among_others_ends_nothing(make):
  limits = config.Rollout(
    group_size=4, ahead=2, retries=0, dead_groups=2, keep_episodes=0
  )
  state = make(rollout=limits)
  state.world.spoiled[rig.TASKS[0].id] = 10**6
  for start in range(12):
    await manager._group(state, start)
  assert state.spoiled[rig.TASKS[0].id] == 2


# --- the plan -------------------------------------------------------------------


async def test_the_next_plan_is_taken_up_and_its_absence_changes_nothing(make):
  state = make()
  learner = rig.Learner(state.store, state.cfg)
  learner.version = 0
  for _ in range(3):
    await process.next_plan(state)
  assert state.plan.version == 0
  learner.consumed = {0, 1, 3}
  learner.publish()
  await process.next_plan(state)
  assert state.plan.version == 1
  assert state.plan.plan['consumed_below'] == 2
  assert state.plan.plan['consumed_rest'] == [3]


@pytest.mark.parametrize('damage', ['cut', 'gone'])
async def test_a_lost_manifest_is_passed_over_once_a_newer_one_is_there(make, damage):
  state = make()
  learner = rig.Learner(state.store, state.cfg)
  learner.version = 0
  learner.publish()
  key = manifest.key_of(1)
  if damage == 'cut':
    state.store.write(key, state.store.read(key)[:-20])
  else:
    state.store.delete(key)
  for _ in range(2 * process._LIST_AFTER):
    await process.next_plan(state)
  assert state.plan.version == 0  # it stays, and nothing is raised
  learner.consumed = {0}
  learner.publish()
  for _ in range(process._LIST_AFTER):
    await process.next_plan(state)
  assert state.plan.version == 2
  assert state.plan.plan['consumed_below'] == 1


async def test_the_start_waits_for_a_plan_and_for_every_sampler(make):
  state = make(plan=False)
  assert state.plan is None
  state.router.found = [0, 1, 2]
  waiting = asyncio.ensure_future(process.first_plan(state))
  await asyncio.sleep(0.05)
  assert not waiting.done()
  rig.Learner(state.store, state.cfg).publish()
  await asyncio.wait_for(waiting, 60)
  assert state.plan.version == 0
  assert state.router.found == [2]


# --- evaluation -----------------------------------------------------------------


def read(state: process.Rollout, label: str) -> dict:
  with open(f'{state.cfg.run_dir}/evals/{label}.json') as f:
    return json.load(f)


async def test_an_evaluation_asks_for_the_plans_version_and_names_the_samples(make):
  state = make()
  learner = rig.Learner(state.store, state.cfg)
  learner.version = 0
  learner.publish()
  await process.next_plan(state)
  requests = []

  async def episode(
    task, generate, group_id, member, sampling, *, min_version
  ) -> types.Episode:
    assert min_version == 1  # what a harness asks of its own samplers
    request = types.GenerateRequest('s', np.ones(1, np.int32), 1, (), sampling, (0, 0))
    await generate(request)
    requests.append((group_id, member))
    return await rig.World().episode(task, generate, group_id, member, sampling)

  state.world.episode = episode
  await manager._evaluate(state, 'before')
  assert {r.min_version for r in state.router.asked} == {1}
  assert {r.sampling for r in state.router.asked} == {state.cfg.sampler.sampling}
  assert sorted(set(requests)) == sorted(
    (f'eval-heldout-{t.id}', m) for t in rig.HELDOUT for m in range(2)
  )
  found = read(state, 'before')
  assert (found['version'], found['pass_at_1'], found['missing']) == (1, 0.5, 0)
  (event,) = rig.events(state, 'evaluation')
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
