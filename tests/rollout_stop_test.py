"""Time limits of groups and turns, and how a rollout process stops."""

import asyncio
import dataclasses

import pytest

from swe17 import config
from swe17.rollout import admission, manager
from tests import rollout_fixtures as rig
from tests import rollout_samplers
from tests.rollout_samplers import ask


@pytest.fixture
def make(tmp_path):
  with rig.maker(tmp_path) as made:
    yield made


def hold(state) -> asyncio.Event:
  gate, run = asyncio.Event(), state.world.episode

  async def episode(*args, **limits):
    await gate.wait()
    return await run(*args, **limits)

  state.world.episode = episode
  return gate


async def running(state, seconds: float) -> asyncio.Future:
  """Groups that have begun, under what ends them."""
  main = asyncio.ensure_future(manager._groups(state))
  over = asyncio.ensure_future(manager.ended(main, state.stop, seconds))
  while not state.issued:
    await asyncio.sleep(0.01)
  return asyncio.gather(over, main, return_exceptions=True)


async def test_a_process_that_is_told_to_stop_ends_its_groups_and_begins_none(make):
  state = make()
  gate = hold(state)
  end = await running(state, 30.0)
  issued = set(state.issued)
  state.stop.asked.set()
  await asyncio.sleep(0.3)
  assert not end.done()
  gate.set()
  await asyncio.wait_for(end, 25)
  assert (await end)[1] is None
  assert state.issued == issued
  assert len(state.store.list('groups/')) == len(issued)
  assert not admission.done(state.planned, state.cfg)


async def test_groups_that_do_not_end_in_time_are_cut_and_nothing_of_them_is_stored(
  make,
):
  state = make()
  hold(state)
  end = await running(state, 0.2)
  state.stop.asked.set()
  await asyncio.wait_for(end, 25)
  assert isinstance((await end)[1], asyncio.CancelledError)
  assert state.store.list('groups/') == []
  assert state.world.ran == []


async def test_a_spoiled_group_is_not_tried_again_by_a_process_that_stops(make):
  state = make()
  for task in rig.TASKS:
    state.world.spoiled[task.id] = 100
  gate = hold(state)
  end = await running(state, 30.0)
  state.stop.asked.set()
  gate.set()
  await asyncio.wait_for(end, 25)
  assert state.store.list('groups/') == []
  assert {group_id[-2:] for _, group_id, _ in state.world.ran} == {'.0'}


async def test_what_is_no_group_is_cut_at_once(make):
  state = make()
  hold(state)
  main = asyncio.ensure_future(manager._evaluate(state, 'before'))
  over = asyncio.ensure_future(manager.ended(main, state.stop, 60.0))
  await asyncio.sleep(0.05)
  state.stop.asked.set()
  await asyncio.wait_for(over, 50)
  assert main.cancelled()


async def test_the_attempts_at_a_group_share_its_seconds(make):
  limits = config.Rollout(group_size=4, group_seconds=0.3, retries=50, keep_episodes=0)
  state = make(rollout=limits)
  state.world.seconds = 0.1
  for task in rig.TASKS:
    state.world.spoiled[task.id] = 10**6
  group = await rig.group(state, 0)
  assert 1 <= int(group.id.rsplit('.', 1)[1]) < 50
  assert 0.2 < state.world.allowed[0] <= 0.3
  assert sorted(state.world.allowed, reverse=True) == pytest.approx(
    state.world.allowed, abs=0.01
  )


async def test_a_turn_that_takes_too_long_is_infrastructure(tmp_path):
  async with rollout_samplers.rigged(tmp_path) as (_, sampler, opened):
    only = await sampler(0)
    only.hold = asyncio.Event()
    route = await opened(turn_seconds=0.2)
    with pytest.raises(TimeoutError, match=r'a turn took over 0\.2 s'):
      await route(ask('a'))
    only.hold.set()
    quick = dataclasses.replace(ask('b'), max_new=1)
    assert (await route(quick)).token_T.size == 1
