"""The router, against stand-in samplers: who is asked, and what that costs."""

import asyncio
import threading

import numpy as np
import pytest

from swe17 import wire
from swe17.rollout import router, samplers
from swe17.store import faults
from tests import rollout_samplers
from tests.rollout_samplers import ask, drawn, frame, whole


@pytest.fixture
async def rig(tmp_path):
  """(store, start a sampler, open a router); all of it is closed at the end."""
  async with rollout_samplers.rigged(tmp_path) as made:
    yield made


async def test_a_session_stays_with_its_sampler_and_sessions_spread_by_slots(rig):
  _, sampler, opened = rig
  big, small = await sampler(0, slots=6), await sampler(1, slots=3)
  route = await opened()
  assert await route.discover() == 2
  for turn in range(3):
    await asyncio.gather(*(route(ask(str(s), 5 + turn)) for s in range(9)))
  homes = [{r.session for r in one.asked} for one in (big, small)]
  assert not homes[0] & homes[1]
  assert [len(h) for h in homes] == [6, 3]
  assert route.rerouted == 0


async def test_a_session_that_ended_makes_room_for_another(rig):
  _, sampler, opened = rig
  first, second = await sampler(0), await sampler(1)
  route = await opened()
  for s in range(8):
    await route(ask(str(s)))
    route.forget(str(s))
  # Nobody is left anywhere, so each time the first of equals is taken.
  assert sorted([len(first.asked), len(second.asked)]) == [0, 8]
  route.forget('never seen')


async def test_a_dead_sampler_costs_a_prefill_and_not_the_tokens(rig):
  _, sampler, opened = rig
  samplers = [await sampler(0), await sampler(1)]
  route = await opened()
  first = await route(ask('a', 5))
  home = next(s for s in samplers if s.asked)
  other = next(s for s in samplers if s is not home)
  await home.die()
  second = await route(ask('a', 9))
  np.testing.assert_array_equal(second.token_T, whole(ask('a', 9)))
  np.testing.assert_array_equal(other.asked[0].token_T, np.arange(9))
  assert other.asked[0].key == (1, 2)
  assert route.rerouted == 1
  await route(ask('a', 12))
  assert len(other.asked) == 2
  assert first.token_T.size == 3


async def test_a_request_that_breaks_in_mid_turn_is_asked_elsewhere(rig):
  _, sampler, opened = rig
  samplers = [await sampler(0), await sampler(1)]
  for one in samplers:
    one.hold = asyncio.Event()
  route = await opened()
  waiting = asyncio.ensure_future(route(ask('a')))
  while not any(s.asked for s in samplers):
    await asyncio.sleep(0.01)
  home = next(s for s in samplers if s.asked)
  other = next(s for s in samplers if s is not home)
  other.hold.set()
  await home.die()
  np.testing.assert_array_equal((await waiting).token_T, whole(ask('a')))
  assert len(other.asked) == 1


async def test_a_slow_sampler_is_given_up_after_its_seconds(rig):
  _, sampler, opened = rig
  slow = await sampler(0)
  slow.hold = asyncio.Event()
  route = await opened(seconds=0.2)
  waiting = asyncio.ensure_future(route(ask('a')))
  while not slow.asked:
    await asyncio.sleep(0.01)
  await sampler(1)
  np.testing.assert_array_equal((await waiting).token_T, whole(ask('a')))
  slow.hold.set()


async def test_with_all_dead_patience_ends_in_a_connection_error(rig):
  _, sampler, opened = rig
  for one in [await sampler(0), await sampler(1)]:
    await one.die()
  route = await opened(patience=0.3)
  with pytest.raises(ConnectionError, match='no sampler answered'):
    await route(ask('a'))
  assert route.rerouted == 2


async def test_with_none_registered_patience_ends_in_a_connection_error(rig):
  _, _, opened = rig
  route = await opened(patience=0.0)
  with pytest.raises(ConnectionError, match='no sampler answered'):
    await route(ask('a'))


async def test_a_sampler_that_comes_late_serves_who_waited(rig):
  _, sampler, opened = rig
  route = await opened()
  waiting = asyncio.ensure_future(route(ask('a')))
  await asyncio.sleep(0.05)
  assert not waiting.done()
  late = await sampler(0)
  assert (await waiting).token_T.size == 3
  assert len(late.asked) == 1


async def test_a_sampler_that_was_started_again_is_found_while_another_serves(rig):
  _, sampler, opened = rig
  old, other = await sampler(0), await sampler(1)
  route = await opened()
  await asyncio.gather(*(route(ask(str(s))) for s in range(4)))
  await old.die()
  await asyncio.gather(*(route(ask(str(s), 7)) for s in range(4)))
  again = await sampler(0)
  assert await route.discover() == 2
  served = len(other.asked)
  await asyncio.gather(*(route(ask(f'new {s}')) for s in range(3)))
  assert len(again.asked) == 3  # it is empty, so it takes all of them
  assert len(other.asked) == served


async def test_a_sampler_that_failed_once_and_is_well_is_asked_again(rig):
  _, sampler, opened = rig
  only = await sampler(0)
  only.status = 500
  route = await opened()
  waiting = asyncio.ensure_future(route(ask('a')))
  while not only.asked:
    await asyncio.sleep(0.01)
  only.status = 200
  assert (await waiting).token_T.size == 3


async def test_a_sampler_that_is_well_but_never_answers_uses_up_the_patience(rig):
  _, sampler, opened = rig
  only = await sampler(0)
  only.status = 500
  route = await opened(patience=0.5)
  with pytest.raises(ConnectionError, match='no sampler answered'):
    await route(ask('a'))
  assert len(only.asked) < 5  # no tight loop


async def test_a_damaged_answer_is_infrastructure_and_asked_elsewhere(rig):
  _, sampler, opened = rig
  bad, good = await sampler(0), await sampler(1)
  route = await opened()
  await route.discover()
  bad.body, bad.well = frame(wire.result_to_bytes(drawn(ask('x'))[0])[:-3]), False
  results = await asyncio.gather(*(route(ask(str(s))) for s in range(4)))
  assert [r.token_T.size for r in results] == [3] * 4
  assert len(bad.asked) >= 1
  assert len(good.asked) == 4


async def test_samplers_that_all_give_text_only_end_the_process_by_name(rig):
  """CASES 1.11: a server that gives no token ids must not freeze the training."""
  _, sampler, opened = rig
  a, b = await sampler(0), await sampler(1)
  a.body = b.body = frame(b'{"choices": [{"text": "hello"}]}')
  route = await opened()
  await route.discover()
  with pytest.raises(router.Unusable, match='no sampler gives tokens') as e:
    await route(ask('s'))
  assert a.url in str(e.value) and b.url in str(e.value)
  assert len(a.asked) + len(b.asked) <= 6


async def test_one_sampler_with_damaged_answers_ends_nothing(rig):
  _, sampler, opened = rig
  a, b = await sampler(0), await sampler(1)
  a.body = frame(b'text')
  route = await opened()
  await route.discover()
  for i in range(12):
    assert (await route(ask(f's{i}'))).token_T.size == 3
  assert a.asked and b.asked


async def test_a_refused_request_is_a_value_error_with_the_reason(rig):
  _, sampler, opened = rig
  only = await sampler(0)
  only.status, only.body = 400, b'{"error": "top_k: got 99"}'
  route = await opened()
  with pytest.raises(ValueError, match='top_k: got 99'):
    await route(ask('a'))


async def test_a_store_that_does_not_answer_leaves_what_was_known(rig):
  store, sampler, opened = rig
  await sampler(0)
  broken = []

  def rule(_: faults.Operation) -> faults.Fault | None:
    return faults.Fault('drop_before') if broken else None

  route = await opened(store=faults.FaultStore(store, rule))
  assert await route.discover() == 1
  broken.append(True)
  assert await route.discover() == 1
  assert (await route(ask('a'))).token_T.size == 3


async def test_a_region_asks_its_own_samplers_only(rig):
  store, sampler, opened = rig
  here, there = await sampler(0), await sampler(1, region=1)
  log = faults.FaultStore(store)
  route = await opened(store=log, region=1)
  for _ in range(3):
    assert await route.discover() == 1
  await asyncio.gather(*(route(ask(str(s))) for s in range(5)))
  assert (len(here.asked), len(there.asked)) == (0, 5)
  # Those of other regions are not read again and again over a long line.
  reads = [op.key for op, _ in log.log if op.kind == 'read']
  assert reads.count('samplers/0.json') == 1
  assert reads.count('samplers/1.json') == 3


async def test_a_region_without_samplers_of_its_own_borrows_none(rig):
  _, sampler, opened = rig
  await sampler(0)
  route = await opened(region=1, patience=0.0)
  assert await route.discover() == 0
  with pytest.raises(ConnectionError, match='no sampler answered'):
    await route(ask('a'))


async def test_while_the_store_hangs_requests_go_on(rig, monkeypatch):
  store, sampler, opened = rig
  monkeypatch.setattr(samplers, '_LOOK', 0.05)
  first, second = await sampler(0), await sampler(1)
  hang, held, looks = [], threading.Event(), []

  def rule(operation: faults.Operation) -> faults.Fault | None:
    looks.append(operation.kind)
    return faults.Fault('delay', seconds=60.0) if hang else None

  route = await opened(store=faults.FaultStore(store, rule, lambda _: held.wait(60)))
  assert await route.discover() == 2
  hang.append(True)
  before = len(looks)
  try:
    for _ in range(5):
      assert await route.discover() == 2
    assert len(looks) == before + 1  # one look hangs, no thread more
    await second.die()
    results = await asyncio.gather(*(route(ask(str(s))) for s in range(4)))
    assert [r.token_T.size for r in results] == [3] * 4
    assert len(first.asked) == 4
  finally:
    hang.clear()
    held.set()


@pytest.mark.parametrize(
  'data', [b'{"url": "http', b'[]', b'{}', b'{"url": 7, "slots": 2}', b'\xff', b'']
)
async def test_a_damaged_registration_is_passed_over(rig, data):
  store, sampler, opened = rig
  await sampler(0)
  store.write('samplers/1.json', data)
  route = await opened(region=0)
  assert await route.discover() == 1
