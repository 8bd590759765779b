"""Samplers that die in mid-answer, are full, stop, or work for others."""

import asyncio
import json
import struct

import numpy as np
import pytest

from swe17 import types, wire
from tests import rollout_samplers
from tests.rollout_samplers import ask, drawn, frame, Sampler, whole


@pytest.fixture
async def rig(tmp_path):
  """(store, start a sampler, open a router); all of it is closed at the end."""
  async with rollout_samplers.rigged(tmp_path) as made:
    yield made


# --- in mid-answer ----------------------------------------------------------------


async def died_in_mid_answer(rig, hurt):
  """(joined answer, home, other) of a request whose home is hurt after a part."""
  _, sampler, opened = rig
  both = [await sampler(0), await sampler(1)]
  for version, one in enumerate(both):
    one.stall, one.version = asyncio.Event(), version
  route = await opened()
  parts = []
  async for part in route.stream(ask('a')):
    parts.append(part)
    if len(parts) == 1:
      home = next(s for s in both if s.asked)
      other = next(s for s in both if s is not home)
      other.stall.set()
      await hurt(home)
  assert route.rerouted == route.resumed == 1
  return types.join(parts), home, other


async def end_in_error(home: Sampler) -> None:
  error = json.dumps({'error': 'the engine stopped'}).encode()
  home.after = frame(b'') + frame(error)
  home.stall.set()


async def end_early(home: Sampler) -> None:
  home.after = b''
  home.stall.set()


async def end_in_a_frame(home: Sampler) -> None:
  home.after = struct.pack('<I', 1000) + b'S17'
  home.stall.set()


@pytest.mark.parametrize(
  'hurt',
  [Sampler.die, end_in_error, end_early, end_in_a_frame],
  ids=lambda hurt: hurt.__name__,
)
async def test_tokens_that_arrived_are_kept_and_the_rest_is_drawn_elsewhere(rig, hurt):
  result, home, other = await died_in_mid_answer(rig, hurt)
  np.testing.assert_array_equal(result.token_T, whole(ask('a')))
  assert result.version_T.tolist() == [home.version] + [other.version] * 2
  assert (result.finish, result.kept.offset_T1.tolist()) == ('length', [0, 1, 2, 3])
  (rest,) = other.asked
  np.testing.assert_array_equal(rest.token_T, [*range(5), result.token_T[0]])
  assert (rest.max_new, rest.key, rest.routes_from) == (2, (1, 2), 0)


async def test_a_stream_that_is_closed_takes_its_request_back(rig):
  _, sampler, opened = rig
  only = await sampler(0)
  only.stall = asyncio.Event()
  route = await opened()
  parts = route.stream(ask('a'))
  await anext(parts)
  await parts.aclose()
  await asyncio.sleep(0.1)  # it has to hear of that before it writes on
  only.stall.set()
  for _ in range(100):
    if only.gone:
      break
    await asyncio.sleep(0.02)
  assert only.gone == 1
  assert route.rerouted == 0


async def test_a_part_with_more_than_was_asked_for_is_damage(rig):
  _, sampler, opened = rig
  bad, good = await sampler(0), await sampler(1)
  many = ask('a')
  bad.body = frame(wire.result_to_bytes(types.join([*drawn(many), *drawn(many)])))
  route = await opened()
  result = await route(ask('a'))
  np.testing.assert_array_equal(result.token_T, whole(ask('a')))
  assert good.asked


# --- full, stopping, busy -----------------------------------------------------------


async def test_a_full_sampler_is_waited_for_and_no_failure(rig):
  _, sampler, opened = rig
  only = await sampler(0)
  only.status, only.headers = 429, {'Retry-After': '0.2'}
  route = await opened(patience=0.1)
  waiting = asyncio.ensure_future(route(ask('a')))
  while len(only.asked) < 3:
    await asyncio.sleep(0.01)
  only.status = 200
  assert (await waiting).token_T.size == 3
  assert route.rerouted == 0
  assert route.waited >= 0.4


async def test_a_new_session_goes_round_a_full_sampler_and_a_cached_one_waits(rig):
  _, sampler, opened = rig
  both = [await sampler(0), await sampler(1)]
  route = await opened()
  await route(ask('old'))
  full, free = sorted(both, key=lambda one: not one.asked)
  full.asked.clear()
  full.status, full.headers = 429, {'Retry-After': '0.3'}
  waiting = asyncio.ensure_future(route(ask('old', 9)))
  while not full.asked:
    await asyncio.sleep(0.01)
  await asyncio.gather(*(route(ask(f'new {s}')) for s in range(3)))
  assert len(free.asked) == 3
  full.status = 200
  await waiting
  assert {r.session for r in full.asked} == {'old'}
  assert 'old' not in {r.session for r in free.asked}


async def test_a_sampler_that_stops_gets_no_new_session_and_keeps_its_own(rig):
  _, sampler, opened = rig
  both = [await sampler(0), await sampler(1)]
  route = await opened()
  await route(ask('old'))
  leaving, staying = sorted(both, key=lambda one: not one.asked)
  leaving.says = {'stopping': True}
  await route.discover()
  await asyncio.gather(*(route(ask(f'new {s}')) for s in range(3)))
  await route(ask('old', 9))
  assert {r.session for r in leaving.asked} == {'old'}
  assert len(staying.asked) == 3


async def test_the_members_of_a_group_go_to_one_sampler_while_there_is_room(rig):
  _, sampler, opened = rig
  both = [await sampler(0, slots=16), await sampler(1, slots=16)]
  route = await opened()
  for group in 'ab':
    await asyncio.gather(*(route(ask(f'{group}-x.{m}.0')) for m in range(4)))
  at = [{r.session[0] for r in one.asked} for one in both]
  assert sorted(map(sorted, at)) == [['a'], ['b']]
  # A large group does not fill one and leave the other idle.
  await asyncio.gather(*(route(ask(f'c-x.{m}.0')) for m in range(16)))
  counts = [sum(r.session[0] == 'c' for r in one.asked) for one in both]
  assert min(counts) >= 6
  for group in 'abc':
    for m in range(16):
      route.forget(f'{group}-x.{m}.0')
  assert all(not s.groups and not s.sessions for s in route._samplers._known.values())


async def test_work_for_others_counts_as_load(rig):
  _, sampler, opened = rig
  busy, idle = await sampler(0), await sampler(1)
  busy.says, idle.says = {'busy': 6}, {'busy': 0}
  route = await opened()
  await route.discover()
  await asyncio.gather(*(route(ask(str(s))) for s in range(4)))
  assert (len(busy.asked), len(idle.asked)) == (0, 4)
