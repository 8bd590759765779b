"""The fault store itself: each fault is real. Without faults: conformance test."""

import pytest

from swe17.store import faults, kv


def _store(*plan: str) -> faults.FaultStore:
  """A store whose i-th operation meets the i-th fault; '' is none."""
  rule = faults.at({i: faults.Fault(kind) for i, kind in enumerate(plan) if kind})
  return faults.FaultStore(kv.open('memory://'), rule)


@pytest.mark.parametrize('kind', ['drop_before', 'full', 'busy', 'unavailable'])
def test_lost_write_has_no_effect(kind: str):
  store = _store('', kind, kind)
  store.write('a', b'old')
  with pytest.raises(kv.StoreError):
    store.write('a', b'new')
  with pytest.raises(kv.StoreError):
    store.create('b', b'new')
  assert store.read('a') == b'old'
  assert store.read('b') is None


def test_lost_reply_has_its_effect():
  store = _store('drop_after', 'drop_after', 'drop_after')
  with pytest.raises(kv.StoreError):
    store.write('a', b'1')
  with pytest.raises(kv.StoreError):
    store.create('b', b'2')
  with pytest.raises(kv.StoreError):
    store.delete('a')
  assert store.list('') == ['b']
  assert store.read('b') == b'2'


def test_create_keeps_its_precondition_under_every_fault():
  for kind in faults.KINDS:
    inner = kv.open('memory://')
    inner.write('a', b'first')
    store = faults.FaultStore(inner, faults.at({0: faults.Fault(kind)}))
    try:
      assert store.create('a', b'second') is False
    except kv.StoreError:
      assert kind in ('drop_before', 'drop_after', 'busy', 'unavailable', 'full')
    assert inner.read('a') == b'first', kind


def test_full_disk_stops_writes_only():
  store = _store('', 'full', 'full', 'full')
  store.write('a', b'1')
  assert store.read('a') == b'1'
  assert store.list('') == ['a']
  store.delete('a')


@pytest.mark.parametrize(
  'kind,want', [('truncate', b'abcd'), ('flip', b'abcdufgh'), ('delay', b'abcdefgh')]
)
def test_damage_on_the_way_out_leaves_the_object_whole(kind: str, want: bytes):
  store = _store('', kind)
  store.write('a', b'abcdefgh')
  assert store.read('a') == want
  assert store.read('a') == b'abcdefgh'


@pytest.mark.parametrize('kind,want', [('truncate', b'abcd'), ('flip', b'abcdufgh')])
def test_damage_on_the_way_in_stays(kind: str, want: bytes):
  store = _store(kind, kind)
  store.write('a', b'abcdefgh')
  assert store.create('b', b'abcdefgh') is True
  assert [store.read('a'), store.read('a'), store.read('b')] == [want] * 3


def test_stale_read_is_what_was_there_before():
  store = _store('', 'stale', '', 'stale')
  store.write('a', b'1')
  assert store.read('a') is None
  store.write('a', b'2')
  assert store.read('a') == b'1'
  assert store.read('a') == b'2'


def test_stale_list_lacks_the_last_write():
  store = _store('', '', 'stale')
  store.write('a', b'1')
  store.write('b', b'1')
  assert store.list('') == ['a']
  assert store.list('') == ['a', 'b']


def test_spliced_read_is_half_new_half_old():
  store = _store('', '', 'splice')
  store.write('a', b'aaaa')
  store.write('a', b'bbbb')
  assert store.read('a') == b'bbaa'


def test_range_is_cut_from_the_stale_object():
  store = _store('', '', 'stale')
  store.write('a', b'abcd')
  store.write('a', b'efgh')
  assert store.read('a', 1, 3) == b'bc'


def test_delay_sleeps_for_its_time():
  slept = []
  rule = faults.at({0: faults.Fault('delay', seconds=70)})
  store = faults.FaultStore(kv.open('memory://'), rule, slept.append)
  store.write('a', b'1')
  assert slept == [70]
  assert store.read('a') == b'1'


def test_a_second_client_fails_by_itself_and_shares_the_past():
  store = _store('', '')
  other = store.beside(faults.at({0: faults.Fault('stale')}))
  store.write('a', b'1')
  store.write('a', b'2')
  assert other.read('a') == b'1'
  assert store.read('a') == b'2'
  assert [operation.index for operation, _ in other.log] == [0]


def test_log_holds_every_operation_and_its_fault():
  store = _store('', 'flip')
  store.write('a', b'1')
  store.read('a')
  store.list('a')
  assert [(o.index, o.kind, o.key, f and f.kind) for o, f in store.log] == [
    (0, 'write', 'a', None),
    (1, 'read', 'a', 'flip'),
    (2, 'list', 'a', None),
  ]


def test_kill_points_lie_before_and_after_the_effect():
  class Killed(BaseException):
    pass

  def before(operation: faults.Operation) -> faults.Fault | None:
    raise Killed

  store = faults.FaultStore(kv.open('memory://'), before)
  with pytest.raises(Killed):
    store.write('a', b'1')
  after = store.beside(faults.at({0: faults.Fault('drop_after', error=Killed())}))
  assert after.beside().read('a') is None
  with pytest.raises(Killed):
    after.write('a', b'1')
  assert after.read('a') == b'1'


def test_seeded_faults_repeat_and_stop():
  rule = faults.seeded(3, 0.5, until=200)
  again = faults.seeded(3, 0.5, until=200)
  operations = [faults.Operation(i, 'read', 'a') for i in range(300)]
  drawn = [rule(operation) for operation in operations]
  assert drawn == [again(operation) for operation in reversed(operations)][::-1]
  assert 60 < sum(fault is not None for fault in drawn[:200]) < 140
  assert {fault.kind for fault in drawn if fault} == set(faults.KINDS)
  assert not any(drawn[200:])


def test_paced_store_refuses_a_second_write_within_a_second():
  now = [0.0]
  rule = faults.paced(1.0, clock=lambda: now[0])
  store = faults.FaultStore(kv.open('memory://'), rule)
  store.write('a', b'1')
  store.write('b', b'1')
  now[0] = 0.5
  with pytest.raises(kv.StoreError):
    store.write('a', b'2')
  now[0] = 1.0
  store.write('a', b'3')
  assert store.read('a') == b'3'


def test_unknown_fault_is_refused():
  with pytest.raises(ValueError, match='fault'):
    faults.Fault('gremlin')


@pytest.mark.parametrize('kind', ['drop_before', 'drop_after', 'busy', 'unavailable'])
def test_what_may_pass_is_transient_and_a_full_disk_is_not(kind: str):
  store = _store(kind, 'full')
  with pytest.raises(kv.StoreError) as e:
    store.write('a', b'1')
  assert e.value.transient
  with pytest.raises(kv.StoreError, match='the disk is full') as e:
    store.write('a', b'1')
  assert not e.value.transient


def test_refusals_carry_their_status():
  store = _store('busy', 'unavailable')
  with pytest.raises(kv.StoreError, match='429'):
    store.read('a')
  with pytest.raises(kv.StoreError, match='503'):
    store.list('')


def test_disk_fills_up_after_so_many_bytes():
  store = faults.FaultStore(kv.open('memory://'), faults.fills_up(10))
  store.write('a', b'12345')
  assert store.create('b', b'1234') is True
  with pytest.raises(kv.StoreError, match='the disk is full'):
    store.create('c', b'12')
  assert store.read('c') is None
  store.write('d', b'1')
  with pytest.raises(kv.StoreError, match='the disk is full'):
    store.write('a', b'1')
  assert store.read('a') == b'12345'
  assert store.list('') == ['a', 'b', 'd']
