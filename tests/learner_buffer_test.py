"""The buffer's door, its order, its age bound and its cursor."""

import dataclasses
import random

import numpy as np
import pytest

from swe17 import types
from swe17.learner import buffer
from swe17.store import groups as group_store
from swe17.store import kv
from tests import fixtures

NEWEST, TOP_K = 5, 4


def refuse(episode: types.Episode, truncates: bool = True) -> str | None:
  return buffer.refuse(
    episode, newest=NEWEST, vocab=fixtures.VOCAB, truncates=truncates, top_k=TOP_K
  )


def episode(**arrays) -> types.Episode:
  """A sound episode but for the given arrays of its segment."""
  s = fixtures.segment(np.random.default_rng(0), (4, 6), width=3, version=2)
  return fixtures.episode(dataclasses.replace(s, **arrays))


def altered(name: str, value: float, at: int = 7) -> types.Episode:
  array = getattr(episode().segments[0], name).copy()
  array[at] = value
  return episode(**{name: array})


def make(max_staleness: int = 3) -> tuple[kv.Store, buffer.Buffer]:
  store = kv.open('memory://')
  return store, buffer.Buffer(
    store,
    max_staleness=max_staleness,
    vocab=fixtures.VOCAB,
    truncates=True,
    top_k=TOP_K,
  )


def starts(taken: buffer.Taken | None) -> list[int]:
  assert taken is not None
  return [group.start for group in taken.groups]


# The door.


def test_a_sound_episode_is_taken_and_an_invalid_one_needs_nothing():
  assert refuse(episode()) is None
  assert refuse(fixtures.episode((), None)) is None


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf, 0.01])
def test_a_log_probability_that_is_missing_infinite_or_positive_is_refused(value):
  assert 'log-probability' in str(refuse(altered('mu_logp_T', value)))


def test_rounding_above_zero_is_no_positive_log_probability():
  assert refuse(altered('mu_logp_T', 5e-7)) is None


@pytest.mark.parametrize(
  'name, value, reason',
  [
    ('entropy_T', np.nan, 'entropy'),
    ('entropy_T', -0.5, 'entropy'),
    ('entropy_T', np.inf, 'entropy'),
    ('token_T', fixtures.VOCAB, 'vocabulary'),
    ('token_T', -1, 'vocabulary'),
    ('temperature_T', 0.0, 'temperature'),
    ('temperature_T', np.nan, 'temperature'),
    ('version_T', NEWEST + 1, 'version outside 0..5'),
    ('version_T', -1, 'version outside 0..5'),
    ('turn_T', -1, 'of no turn'),
  ],
)
def test_values_that_no_sampler_may_send_are_refused(name, value, reason):
  assert reason in str(refuse(altered(name, value)))


@pytest.mark.parametrize('value', [None, np.nan, np.inf])
def test_a_valid_episode_needs_a_finite_outcome(value):
  bad = dataclasses.replace(episode(), outcome=types.Outcome(value))
  assert 'outcome' in str(refuse(bad))


def test_scores_of_turns_are_finite_and_of_every_turn_that_was_sampled():
  made = altered('turn_T', 2)  # turns 0 and 2
  for scores in (None, (0.0, 0.3, 1.0), (0.0, 0.3, 1.0, 0.0)):
    assert refuse(dataclasses.replace(made, turn_scores=scores)) is None
  few = dataclasses.replace(made, turn_scores=(0.0, 0.3))
  assert refuse(few) == 'a turn has no score'
  for value in (np.nan, np.inf):
    bad = dataclasses.replace(made, turn_scores=(0.0, value, 1.0))
    assert refuse(bad) == 'the score of a turn is not finite'


def test_an_unknown_status_is_refused():
  assert 'status' in str(refuse(dataclasses.replace(episode(), status='good')))


@pytest.mark.parametrize(
  'name', ['mask_T', 'mu_logp_T', 'entropy_T', 'temperature_T', 'version_T', 'turn_T']
)
def test_arrays_of_different_lengths_are_refused(name):
  short = getattr(episode().segments[0], name)[:-1]
  assert 'length' in str(refuse(episode(**{name: short})))


def sets(*ids: list[int]) -> types.KeptSets:
  sizes = [0] * 4 + [len(x) for x in ids]
  return types.KeptSets(
    np.append(0, np.cumsum(sizes)).astype(np.int32),
    np.concatenate(ids).astype(np.int32),
  )


def test_a_token_without_its_set_is_refused():
  token = episode().segments[0].token_T.tolist()
  good = [[t] for t in token[4:]]
  assert refuse(episode(kept=sets(*good))) is None
  assert 'lacks its kept set' in str(refuse(episode(kept=sets(*good[:-1], []))))


def test_a_token_outside_its_set_is_refused():
  good = [[t] for t in episode().segments[0].token_T.tolist()[4:]]
  good[2] = [(good[2][0] + 1) % fixtures.VOCAB]
  assert 'outside its kept set' in str(refuse(episode(kept=sets(*good))))


def test_a_set_wider_than_top_k_is_refused_by_name():
  good = [[t] for t in episode().segments[0].token_T.tolist()[4:]]
  others = [i for i in range(fixtures.VOCAB) if i != good[2][0]]
  good[2] = sorted(good[2] + others[: TOP_K - 1])
  assert refuse(episode(kept=sets(*good))) is None
  good[2] = sorted({*good[2], others[TOP_K]})
  reason = str(refuse(episode(kept=sets(*good))))
  assert reason == 'a kept set holds 5 ids, sampler.top_k is 4'


def test_a_set_with_an_id_outside_the_vocabulary_is_refused():
  good = [[t] for t in episode().segments[0].token_T.tolist()[4:]]
  good[0] = [good[0][0], fixtures.VOCAB]
  assert 'vocabulary' in str(refuse(episode(kept=sets(*good))))


def test_a_set_on_a_token_that_nobody_sampled_is_refused():
  s = episode().segments[0]
  moved = types.KeptSets(np.roll(s.kept.offset_T1, -1), s.kept.ids)
  assert refuse(episode(kept=dataclasses.replace(moved))) is not None


def test_a_set_that_nobody_asked_for_is_refused():
  assert 'unasked' in str(refuse(episode(), truncates=False))
  none = types.KeptSets(np.zeros(11, np.int32), np.zeros(0, np.int32))
  assert refuse(episode(kept=none), truncates=False) is None


@pytest.mark.parametrize('value', [np.nan, np.inf, 0.5])
def test_only_the_bad_rollout_is_refused_by_name_and_counted_once(value):
  store, buf = make()
  group = fixtures.group(0, (1.0, 0.0, 0.0))
  bad = group.episodes[1].segments[0]
  logp_T = np.where(bad.mask_T, np.float32(value), 0).astype(np.float32)
  bad = dataclasses.replace(
    group.episodes[1], segments=(dataclasses.replace(bad, mu_logp_T=logp_T),)
  )
  group_store.append(
    store,
    dataclasses.replace(group, episodes=(group.episodes[0], bad, group.episodes[2])),
  )
  buf.poll(0)
  taken = buf.take(1, step=0, step_of={0: 0})
  assert taken is not None
  got = taken.groups[0].episodes
  assert [e.status for e in got] == ['valid', 'invalid', 'valid']
  assert got[1].outcome.value is None
  assert got[1].outcome.reason.startswith('0-a.1: a log-probability')
  assert sum(buf.dropped.values()) == 1


def test_a_corrupt_record_is_set_aside_and_the_rest_goes_on():
  store, buf = make()
  store.write(group_store.key_of(0), b'garbage')
  group_store.append(store, fixtures.group(1))
  assert buf.poll(0) == 1
  assert buf.dropped == {'corrupt group record': 1}
  assert store.read('quarantine/groups/00000000') == b'garbage'
  assert buf.poll(0) == 1  # and is not counted again
  assert sum(buf.dropped.values()) == 1


def test_the_start_of_a_corrupt_record_is_used_up_and_reported_with_the_next_batch():
  """Else it would count as outstanding with the rollouts, for ever."""
  store, buf = make()
  store.write(group_store.key_of(0), b'garbage')
  group_store.append(store, fixtures.group(1))
  buf.poll(0)
  assert buf.consumed == {0}
  taken = buf.take(1, step=0, step_of={0: 0})
  assert starts(taken) == [1]
  assert taken is not None
  assert [(g.start, why) for g, why in taken.dropped] == [(0, 'corrupt group record')]
  assert buffer.cursor(buf.consumed) == (2, [])
  # A late attempt at the same start does not train.
  group_store.append(store, fixtures.group(0))
  assert make_again(store, buf).poll(0) == 0


def make_again(store: kv.Store, before: buffer.Buffer) -> buffer.Buffer:
  """The buffer of a process that took over from another."""
  _, buf = make()
  buf._store, buf.consumed = store, set(before.consumed)
  return buf


def test_a_record_that_rots_after_its_start_was_used_up_is_no_second_drop():
  store, buf = make()
  buf.consumed = {0}
  store.write(group_store.key_of(0), b'garbage')
  group_store.append(store, fixtures.group(1))
  buf.poll(0)
  taken = buf.take(1, step=0, step_of={0: 0})
  assert taken is not None and taken.dropped == []


# Order and age.


def test_groups_are_taken_in_the_order_they_started_not_finished():
  store, buf = make()
  order = list(range(8))
  random.Random(0).shuffle(order)
  for start in order:
    group_store.append(store, fixtures.group(start))
    buf.poll(0)
  assert starts(buf.take(3, step=0, step_of={0: 0})) == [0, 1, 2]
  assert starts(buf.take(5, step=0, step_of={0: 0})) == [3, 4, 5, 6, 7]


def test_too_few_groups_make_no_batch_and_stay():
  store, buf = make()
  group_store.append(store, fixtures.group(0))
  buf.poll(0)
  assert buf.take(2, step=0, step_of={0: 0}) is None
  group_store.append(store, fixtures.group(1))
  buf.poll(0)
  assert starts(buf.take(2, step=0, step_of={0: 0})) == [0, 1]


@pytest.mark.parametrize('bound', [0, 1, 4])
def test_a_group_is_kept_at_the_bound_and_dropped_one_step_beyond(bound):
  for step in range(7):
    store, buf = make(bound)
    group_store.append(store, fixtures.group(0, version=1))
    group_store.append(store, fixtures.group(1, version=6))
    buf.poll(6)
    # Version 1 is of step 0; version 6 of the present step.
    taken = buf.take(1, step=step, step_of={0: 0, 1: 0, 6: step})
    kept = step <= bound
    assert starts(taken) == ([0] if kept else [1])
    if kept:
      assert taken is not None and taken.staleness == [step]
      assert not taken.dropped
    else:
      assert taken is not None
      assert [(g.start, why) for g, why in taken.dropped] == [(0, f'{step} steps old')]
      assert buf.dropped['over the staleness bound'] == 1
      assert buf.dropped_tasks == {'task/0': 1}


def test_the_oldest_token_of_the_group_gives_its_age():
  s = episode().segments[0]
  version_T = np.where(s.mask_T, 5, 0).astype(np.int32)
  version_T[-1] = 3
  old = fixtures.episode(dataclasses.replace(s, version_T=version_T))
  new = fixtures.episode(dataclasses.replace(s, version_T=np.full_like(version_T, 4)))
  group = types.Group('0-a', 0, 't', 'u', (new, old))
  assert buffer.oldest_version(group) == 3  # and not 0, of the prompt
  assert buffer.oldest_version(types.Group('0-a', 0, 't', 'u', ())) is None


def test_age_is_in_optimiser_steps_not_in_versions():
  store, buf = make()
  group_store.append(store, fixtures.group(0, version=2))
  buf.poll(3)
  taken = buf.take(1, step=9, step_of={0: 0, 1: 3, 2: 6, 3: 9})
  assert taken is not None and taken.staleness == [3]


def test_what_was_dropped_while_waiting_is_reported_with_the_next_batch():
  store, buf = make(max_staleness=0)
  group_store.append(store, fixtures.group(0, version=0))
  buf.poll(1)
  assert buf.take(1, step=1, step_of={0: 0, 1: 1}) is None
  group_store.append(store, fixtures.group(1, version=1))
  buf.poll(1)
  taken = buf.take(1, step=1, step_of={0: 0, 1: 1})
  assert taken is not None and [g.start for g, _ in taken.dropped] == [0]
  assert buf.consumed == {0, 1}


# Once each, and the cursor.


def test_duplicate_and_late_deliveries_train_the_issued_set_once_each():
  store, buf = make()
  deliveries = [(start, a) for start in range(6) for a in 'abc']
  random.Random(1).shuffle(deliveries)
  trained = []
  for start, attempt in deliveries:
    group_store.append(store, fixtures.group(start, attempt=attempt))
    buf.poll(0)
    taken = buf.take(1, step=0, step_of={0: 0})
    if taken:
      trained += starts(taken)
  assert sorted(trained) == list(range(6))


def test_a_consumed_group_that_is_delivered_again_is_refused_and_counted():
  store, buf = make()
  group_store.append(store, fixtures.group(0))
  buf.consumed = buffer.uncursor(1, [3])  # as after a restart
  group_store.append(store, fixtures.group(1))
  group_store.append(store, fixtures.group(3))
  assert buf.poll(0) == 1
  assert buf.dropped == {'duplicate of a group already taken': 2}
  assert starts(buf.take(1, step=0, step_of={0: 0})) == [1]


def test_the_cursor_holds_what_is_consumed_with_its_holes():
  assert buffer.cursor(set()) == (0, [])
  assert buffer.cursor({0, 1, 2}) == (3, [])
  assert buffer.cursor({0, 1, 4, 7}) == (2, [4, 7])
  rng = np.random.default_rng(0)
  for _ in range(30):
    consumed = set(rng.integers(0, 20, rng.integers(0, 20)).tolist())
    assert buffer.uncursor(*buffer.cursor(consumed)) == consumed
