"""Groups in the store: one a start index, none lost, none trained twice."""

import concurrent.futures
import dataclasses
import pathlib

import numpy as np
import pytest

from swe17 import types, wire
from swe17.store import faults, groups, kv


def _group(start: int, attempt: str = 'a', tokens: int = 9) -> types.Group:
  rng = np.random.default_rng([start, len(attempt)])
  mask_T = rng.random(tokens) < 0.5
  size_T = np.where(mask_T, 2, 0)
  token_T = rng.integers(0, 97, tokens).astype(np.int32)
  ids = np.stack([token_T[mask_T], token_T[mask_T] + 1], 1).reshape(-1)
  segment = types.Segment(
    token_T=token_T,
    mask_T=mask_T,
    mu_logp_T=rng.normal(size=tokens).astype(np.float32),
    entropy_T=rng.random(tokens).astype(np.float32),
    temperature_T=np.ones(tokens, np.float32),
    version_T=np.full(tokens, 3, np.int32),
    turn_T=np.zeros(tokens, np.int32),
    kept=types.KeptSets(
      np.concatenate([[0], np.cumsum(size_T)]).astype(np.int32), ids.astype(np.int32)
    ),
  )
  group_id = f'{start}-{attempt}'
  episode = types.Episode(
    id=f'{group_id}.0',
    task_id='t',
    unit='u',
    group_id=group_id,
    member=0,
    status='valid',
    outcome=types.Outcome(0.25),
    solved_at=1.0,
    segments=(segment,),
    turns=1,
    calls=1,
    malformed=0,
    tests=1,
    submitted=True,
    sampled_tokens=int(mask_T.sum()),
    thinking_tokens=0,
    tool_seconds=0.5,
    seconds=1.0,
  )
  return types.Group(group_id, start, 't', 'u', (episode,))


def _same(a: types.Group, b: types.Group) -> bool:
  return wire.group_to_bytes(a) == wire.group_to_bytes(b)


@pytest.fixture(params=['file', 'memory'])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> kv.Store:
  return kv.open('memory://' if request.param == 'memory' else f'file://{tmp_path}/s')


def test_group_comes_back_as_it_was_appended(store: kv.Store):
  assert groups.append(store, _group(4)) is True
  (key,) = groups.list_new(store, set())
  assert _same(groups.load(store, key), _group(4))


def test_groups_are_listed_in_the_order_they_started(store: kv.Store):
  for start in (11, 2, 100, 9):
    groups.append(store, _group(start))
  store.write('groups/readme', b'not a group')
  keys = groups.list_new(store, set())
  assert [groups.load(store, key).start for key in keys] == [2, 9, 11, 100]
  assert groups.list_new(store, {keys[0], keys[2]}) == [keys[1], keys[3]]


def test_second_attempt_at_a_start_is_refused(store: kv.Store):
  assert groups.append(store, _group(4, 'first')) is True
  assert groups.append(store, _group(4, 'second')) is False
  assert groups.append(store, _group(4, 'first')) is False
  (key,) = groups.list_new(store, set())
  assert groups.load(store, key).id == '4-first'


def test_of_racing_attempts_one_is_stored(store: kv.Store):
  def race(attempt: int) -> list[int]:
    made = (_group(start, f'a{attempt}') for start in range(20))
    return [group.start for group in made if groups.append(store, group)]

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    won = list(pool.map(race, range(4)))
  assert sorted(start for starts in won for start in starts) == list(range(20))
  for attempt, starts in enumerate(won):
    for start in starts:
      assert groups.load(store, groups.key_of(start)).id == f'{start}-a{attempt}'


def test_consumed_group_that_was_discarded_stays_consumed(store: kv.Store):
  groups.append(store, _group(4, 'first'))
  seen = set(groups.list_new(store, set()))
  groups.discard(store, seen)
  assert store.list('groups/') == []
  groups.discard(store, seen)  # a crash in the middle: done again after the restart
  # A rollout that starts over delivers the same start once more.
  assert groups.append(store, _group(4, 'again')) is True
  assert groups.list_new(store, seen) == []


@pytest.mark.parametrize(
  'damage', ['cut', 'flip', 'empty', 'other start', 'other kind']
)
def test_damaged_group_is_an_error_and_is_set_aside(store: kv.Store, damage: str):
  whole = wire.group_to_bytes(_group(4))
  data = {
    'cut': whole[:-5],
    'flip': whole[:40] + bytes([whole[40] ^ 1]) + whole[41:],
    'empty': b'',
    'other start': wire.group_to_bytes(_group(5)),
    'other kind': wire.encode({'finish': 'stop'}, {}),
  }[damage]
  key = groups.key_of(4)
  store.write(key, data)
  groups.append(store, _group(6))
  with pytest.raises(ValueError):
    groups.load(store, key)
  assert store.read(groups.quarantine(store, key)) == data
  assert groups.list_new(store, set()) == [groups.key_of(6)]
  groups.quarantine(store, key)  # once more changes nothing
  assert store.read('quarantine/' + key) == data
  assert groups.quarantined(store) == {groups.start_of(key)}


def test_nothing_is_set_aside_in_a_sound_store(store: kv.Store):
  groups.append(store, _group(4))
  assert groups.quarantined(store) == set()


def test_group_damaged_on_the_way_is_read_again():
  rule = faults.at({1: faults.Fault('flip')})
  store = faults.FaultStore(kv.open('memory://'), rule)
  groups.append(store, _group(4))
  assert _same(groups.load(store, groups.key_of(4)), _group(4))


def test_group_that_is_gone_is_a_store_error(store: kv.Store):
  with pytest.raises(kv.StoreError, match='no longer there'):
    groups.load(store, groups.key_of(4))


@pytest.mark.parametrize('kind', ['drop_before', 'drop_after', 'full'])
def test_append_survives_one_lost_request_or_reply(kind: str):
  # Operations: create, then (after a fault) create again, and a look at what is there.
  for plan in ([0], [0, 1], [0, 2]):
    inner = kv.open('memory://')
    rule = faults.at({index: faults.Fault(kind) for index in plan})
    assert groups.append(faults.FaultStore(inner, rule), _group(4)) is True
    assert _same(groups.load(inner, groups.key_of(4)), _group(4))


def test_append_to_a_full_disk_says_so():
  store = faults.FaultStore(kv.open('memory://'), lambda _: faults.Fault('full'))
  with pytest.raises(kv.StoreError, match='disk is full'):
    groups.append(store, _group(4))


def test_lost_reply_does_not_hide_that_another_attempt_won():
  store = faults.FaultStore(
    kv.open('memory://'), faults.at({1: faults.Fault('drop_after')})
  )
  assert groups.append(store, _group(4, 'first')) is True
  assert groups.append(store, _group(4, 'second')) is False


@pytest.mark.parametrize('key', ['groups/4', 'quarantine/groups/00000004', 'weights/x'])
def test_other_keys_are_not_groups(store: kv.Store, key: str):
  with pytest.raises(ValueError, match='group key'):
    groups.load(store, key)
  with pytest.raises(ValueError, match='group key'):
    groups.discard(store, [key])
  with pytest.raises(ValueError, match='group key'):
    groups.start_of(key)


def test_start_index_out_of_range_is_refused(store: kv.Store):
  for start in (-1, 10**8):
    with pytest.raises(ValueError, match='start index'):
      groups.append(store, dataclasses.replace(_group(4), start=start))
