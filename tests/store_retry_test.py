"""Retries, over a store whose faults are chosen and a clock that is moved by hand."""

import pytest

from swe17.store import faults, kv, retry


class Clock:
  """Time passes only while somebody sleeps."""

  def __init__(self):
    self.now, self.slept = 0.0, []

  def sleep(self, seconds: float) -> None:
    self.slept.append(seconds)
    self.now += seconds

  def __call__(self) -> float:
    return self.now


def made(
  rule: faults.Rule, deadline: float = 30.0
) -> tuple[retry.RetryStore, faults.FaultStore, Clock]:
  """(with retries, the same without faults, the clock)."""
  clock = Clock()
  inner = faults.FaultStore(kv.open('memory://'), rule)
  policy = retry.Policy(deadline=deadline)
  store = retry.RetryStore(inner, policy, sleep=clock.sleep, clock=clock)
  return store, inner.beside(), clock


def plan(*kinds: str) -> faults.Rule:
  """The i-th operation meets the i-th fault; '' is none."""
  return faults.at({i: faults.Fault(kind) for i, kind in enumerate(kinds) if kind})


@pytest.mark.parametrize('kind', ['drop_before', 'drop_after', 'busy', 'unavailable'])
def test_each_operation_outlasts_three_transient_faults(kind: str):
  for call, want in (
    (lambda store: store.read('a'), b'1'),
    (lambda store: store.list(''), ['a']),
    (lambda store: store.write('b', b'2'), None),
    (lambda store: store.create('b', b'2'), True),
    (lambda store: store.delete('a'), None),
  ):
    store, plain, clock = made(plan(*[kind] * 3))
    plain.write('a', b'1')
    assert call(store) == want
    assert len(clock.slept) == 3


def test_a_full_disk_is_said_at_once():
  store, _, clock = made(plan('full'))
  with pytest.raises(kv.StoreError, match='the disk is full'):
    store.write('a', b'1')
  assert clock.slept == []


def test_pauses_double_are_jittered_and_bounded():
  store, _, clock = made(lambda operation: faults.Fault('unavailable'), deadline=60)
  with pytest.raises(kv.StoreError):
    store.read('a')
  want = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2] + [5.0] * 20
  bounds = list(zip(clock.slept, want, strict=False))
  assert all(0.5 * full <= slept <= full for slept, full in bounds)
  assert len({slept / full for slept, full in bounds}) > 5


def test_deadline_ends_it_and_the_error_says_how_it_went():
  store, _, clock = made(lambda operation: faults.Fault('busy'), deadline=7)
  with pytest.raises(kv.StoreError, match=r'429.*gave up after \d+ tries') as e:
    store.write('a', b'1')
  assert e.value.transient and e.value.key == 'a'
  assert 2 < clock.now <= 7


def test_create_whose_reply_was_lost_is_known_as_our_own():
  store, plain, _ = made(plan('drop_after'))
  assert store.create('a', b'mine') is True
  assert plain.read('a') == b'mine'


def test_create_lost_to_another_after_a_lost_request_is_lost():
  plain = None

  def rule(operation: faults.Operation) -> faults.Fault | None:
    if operation.index > 0:
      return None
    plain.create('a', b'theirs')  # between our first try and our second
    return faults.Fault('drop_before')

  store, plain, _ = made(rule)
  assert store.create('a', b'mine') is False
  assert plain.read('a') == b'theirs'


def test_create_that_finds_another_at_once_does_not_look_twice():
  store, plain, clock = made(plan())
  plain.write('a', b'mine')  # the same bytes: an earlier create of ours, or another's
  assert store.create('a', b'mine') is False
  assert clock.slept == []


def test_look_that_fails_is_repeated_too():
  store, _, clock = made(plan('drop_after', '', 'unavailable', 'busy', '', ''))
  assert store.create('a', b'mine') is True
  assert len(clock.slept) == 3


def test_create_without_an_answer_stays_unknown():
  store, plain, _ = made(lambda operation: faults.Fault('drop_after'))
  with pytest.raises(kv.StoreError, match='the reply was lost'):
    store.create('a', b'mine')
  assert plain.read('a') == b'mine'  # it did take place, and nobody could know


def test_object_deleted_before_the_look_is_created_anew():
  plain = None

  def rule(operation: faults.Operation) -> faults.Fault | None:
    if operation.index == 2:  # the look
      plain.delete('a')
    return faults.Fault('drop_after') if operation.index == 0 else None

  store, plain, _ = made(rule)
  assert store.create('a', b'mine') is True
  assert plain.read('a') == b'mine'


def test_one_write_a_second_to_a_key_is_kept_to():
  """CASES 4.5: quick writes to one key wait their turn and the last one stands."""
  clock = Clock()
  inner = faults.FaultStore(kv.open('memory://'), faults.paced(1.0, clock))
  store = retry.RetryStore(inner, sleep=clock.sleep, clock=clock)
  for i in range(10):
    store.write('pointer', b'%d' % i)
  assert store.read('pointer') == b'9'
  assert 9 <= clock.now < 25
  assert len(inner.log) < 70  # no storm of requests


def test_ours_decides_who_made_it():
  clock = Clock()
  inner = faults.FaultStore(kv.open('memory://'), plan('drop_after'))
  store = retry.RetryStore(
    inner, ours=lambda key, data: False, sleep=clock.sleep, clock=clock
  )
  assert store.create('a', b'same bytes') is False
