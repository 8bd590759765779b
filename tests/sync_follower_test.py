"""Follower: the newest version, byte for byte, by whatever way leads to it."""

import collections
import dataclasses
import json

import numpy as np
import pytest

from swe17.store import faults, kv
from swe17.sync import codec, follower, manifest, publisher
from tests import sync_world as world

no_waiting, store = world.no_waiting, world.store


def test_follower_holds_each_version_byte_for_byte(store: kv.Store):
  pub, record = world.publisher(store), world.Record(follower.Follower(store))
  assert record.poll() is None
  for version in range(12):
    record.add(version)
    done = world.publish(pub, version)
    staged = record.poll()
    assert staged is not None and staged.version == version
    assert staged.manifest.step == version
    assert record.follow.manifest.plan == {'v': version}
    assert done.full == (version == 0) == (staged.manifest.base is None)
    assert (staged.manifest.full_bytes is not None) == (version % 4 == 0)
    assert done.digest == staged.manifest.digest
    assert done.raw_bytes == sum(a.nbytes for a in world.weights(0).values())
    assert done.bytes == staged.bytes
    share, moves = done.changed_share, version != 8  # there nothing does
    assert share == 1.0 if done.full else (0 < share < 0.1) == moves
    if not done.full:
      assert staged.changed == ({'embed', 'layer/w'} if moves else set())
    assert record.poll() is None
  assert record.follow.faults.total() == 0
  assert publisher.latest(store) == 11


def test_follower_that_joins_late_starts_at_the_newest(store: kv.Store):
  pub = world.publisher(store)
  for version in range(11):
    world.publish(pub, version)
    record = world.Record(follower.Follower(store))
    record.add(version)
    staged = record.poll()
    assert staged is not None
    assert (staged.base, staged.version) == (None, version)


def test_follower_behind_jumps_the_chain_in_one_staging(store: kv.Store):
  pub, record = world.publisher(store), world.Record(follower.Follower(store))
  for version, polls in ((0, True), (1, False), (2, False), (3, True)):
    record.add(version)
    world.publish(pub, version)
    if polls:
      staged = record.poll()
      assert staged is not None and staged.version == version
  assert (staged.base, staged.version) == (0, 3)
  assert staged.changed == {'embed', 'layer/w'}


def test_follower_behind_starts_from_the_last_full_snapshot_on_its_way():
  store = faults.FaultStore(kv.open('memory://'))
  pub, record = world.publisher(store), world.Record(follower.Follower(store.beside()))
  for version in range(7):
    record.add(version)
    world.publish(pub, version)
    if version == 1:
      record.poll()
  client = record.follow._store
  client.log.clear()
  staged = record.poll()
  assert (staged.base, staged.version) == (1, 6)
  read = [o.key[13:21] for o, _ in client.log if o.key.startswith(manifest.DATA)]
  assert read == ['00000004', '00000005', '00000006']


def test_waiting_costs_one_read_and_now_and_then_a_listing():
  store = faults.FaultStore(kv.open('memory://'))
  world.publish(world.publisher(store), 0)
  follow = follower.Follower(store.beside())
  follow.commit(follow.poll())
  client = follow._store
  client.log.clear()
  for _ in range(32):
    assert follow.poll() is None
  kinds = collections.Counter(operation.kind for operation, _ in client.log)
  assert kinds == {'read': 32, 'list': 32 // follower._LIST_AFTER}


def test_commit_of_a_version_staged_from_another_is_refused(store: kv.Store):
  pub, follow = world.publisher(store), follower.Follower(store)
  world.publish(pub, 0)
  old = follow.poll()
  world.publish(pub, 1)
  follow.commit(follow.poll())
  with pytest.raises(ValueError, match='poll again'):
    follow.commit(old)
  assert follow.version == 1


def test_slow_reader_ends_on_the_newest(store: kv.Store):
  """CASES 4.7: ten versions come, and old ones go, between manifest and payload."""
  pub = world.publisher(store)
  record = world.Record(follower.Follower(store))
  for version in range(2):
    record.add(version)
    world.publish(pub, version)
    if version == 0:
      record.poll()
  slow, publishing = faults.FaultStore(store), iter(range(2, 14))

  def pause(operation: faults.Operation) -> None:
    if operation.key.startswith(manifest.DATA):
      for version in publishing:
        record.add(version)
        world.publish(pub, version)

  slow.rule = pause
  record.follow._store = slow
  record.settle(13)
  assert record.follow.faults['missing'] > 0


def test_missing_object_heals_from_the_newest_full_snapshot(store: kv.Store):
  pub, record = world.publisher(store), world.Record(follower.Follower(store))
  for version in range(7):
    record.add(version)
    world.publish(pub, version)
    if version == 0:
      record.poll()
    if version == 2:
      (key,) = manifest.read(store, 2).objects
      store.delete(key.key)
      assert record.poll().version == 1
    if version == 3:
      record.poll()
      assert record.follow.version == 1
  record.settle(6)
  assert record.follow.faults['missing'] >= 2


@pytest.mark.parametrize('reason', ['base', 'manifest', 'sha256', 'gap'])
def test_bad_delta_is_counted_and_healed_by_the_next_snapshot(
  store: kv.Store, reason: str
):
  pub, record = world.publisher(store), world.Record(follower.Follower(store))
  for version in range(7):
    record.add(version)
    world.publish(pub, version)
    if version == 1:
      record.poll()
    if version == 2:
      _spoil(store, reason)
    if version in (2, 3):
      for _ in range(3):
        assert record.poll() is None
      assert record.follow.version == 1
  record.settle(6)
  if reason != 'gap':
    assert record.follow.faults[reason] > 0


def _spoil(store: kv.Store, reason: str) -> None:
  """Makes version 2 unfit for a follower at version 1."""
  made = manifest.read(store, 2)
  if reason == 'base':
    made = dataclasses.replace(made, base_digest='0' * 32)
  data = manifest.to_bytes(made)
  if reason == 'manifest':
    data = data.replace(b'"step"', b'"stop"')
  if reason == 'gap':
    store.delete(manifest.key_of(2))
  else:
    store.write(manifest.key_of(2), data)
  if reason == 'sha256':
    key = made.objects[0].key
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    store.write(key, bytes(data))


def test_collected_chain_shows_as_a_gap_and_heals(store: kv.Store):
  pub, record = world.publisher(store), world.Record(follower.Follower(store))
  for version in range(13):
    record.add(version)
    world.publish(pub, version)
    if version == 1:
      record.poll()
  record.settle(12)
  assert record.follow.faults == {'gap': 1}


def test_follower_never_goes_back(store: kv.Store):
  pub, record = world.publisher(store), world.Record(follower.Follower(store))
  for version in range(3):
    record.add(version)
    world.publish(pub, version)
  record.poll()
  for key in store.list(''):
    store.delete(key)
  world.publish(world.publisher(store, 'b'), 0)
  for _ in range(40):
    assert record.poll() is None
  assert record.follow.version == 2
  assert record.follow.faults['older'] > 0


def test_repeated_faults_slow_the_polling_down():
  store = faults.FaultStore(kv.open('memory://'))
  world.publish(world.publisher(store), 0)
  client = store.beside(lambda operation: faults.Fault('drop_before'))
  follow = follower.Follower(client)
  for _ in range(40):
    assert follow.poll() is None
  assert len(client.log) < 10
  assert follow.faults == {'store': len(client.log)}


def test_plan_is_read_without_weights():
  store = faults.FaultStore(kv.open('memory://'))
  assert follower.read_plan(store) is None
  pub = world.publisher(store)
  for version in range(3):
    world.publish(pub, version)
  store.log.clear()
  assert follower.read_plan(store).plan == {'v': 2}
  assert follower.read_plan(store, 1).plan == {'v': 1}
  assert follower.read_plan(store, 3) is None
  assert not any(o.key.startswith(manifest.DATA) for o, _ in store.log)
  store.write(manifest.key_of(2), b'{}')
  assert follower.read_plan(store).version == 1
  with pytest.raises(ValueError, match='schema'):
    follower.read_plan(store, 2)


def test_delta_of_another_attempt_is_followed_if_its_base_is_the_one_held(
  store: kv.Store,
):
  """What holds a chain together is the base's digest, not who made it."""
  record = world.Record(follower.Follower(store))
  pub = world.publisher(store)
  for version in range(3):
    if version == 2:
      pub = world.publisher(store, 'b')
      assert pub.restore(60) == 1
    record.add(version)
    assert world.publish(pub, version).full == (version == 0)
    assert record.poll().version == version
  assert record.follow.manifest.attempt == 'b'
  assert record.follow.faults.total() == 0


def test_delta_on_other_weights_of_the_same_number_is_refused(store: kv.Store):
  """The follower holds version 1 of a run; the store is another run's from there on."""
  held, record = kv.open('memory://'), None
  pub = world.publisher(held)
  record = world.Record(follower.Follower(held))
  for version in range(2):
    record.add(version)
    world.publish(pub, version)
  record.poll()
  other = world.publisher(store, 'b')
  for version in range(4):
    tensors = {**world.weights(version), 'scale': np.array(7.0, world.BF16)}
    other.publish(version, tensors, step=version, plan={})
  record.follow._store = store
  for _ in range(20):
    assert record.poll() is None
  assert record.follow.version == 1
  assert record.follow.faults['base'] > 0


def test_threads_read_and_decode_to_the_same_bytes(store: kv.Store):
  cfg = dataclasses.replace(world.CFG, object_bytes=64, threads=3)
  pub = world.publisher(store, cfg=cfg)
  record = world.Record(follower.Follower(store, threads=3))
  for version in range(6):
    record.add(version)
    world.publish(pub, version)
    assert record.poll().version == version
  made = manifest.read(store, 4)
  assert len(made.objects) > 1 and len(manifest.read_full(store, made).objects) > 2
  late = world.Record(follower.Follower(store, threads=3))
  late.digests = record.digests
  assert late.poll().version == 5


def test_full_snapshot_on_the_way_changes_what_differs_and_no_more(store: kv.Store):
  pub, follow = world.publisher(store), follower.Follower(store)
  for version in range(5):
    world.publish(pub, version, full=version == 4)
    staged = follow.poll()
    follow.commit(staged)
  assert staged.manifest.base is None
  assert staged.changed == {'embed', 'layer/w'}


def test_sums_are_of_the_blocks_of_the_version_held(store: kv.Store):
  """A learner restarted with another block size cuts and sums tensors anew."""
  follow = follower.Follower(store)
  world.publish(world.publisher(store), 0)
  follow.commit(follow.poll())
  cfg = dataclasses.replace(world.CFG, block_bytes=32)
  pub = world.publisher(store, 'b', cfg)
  assert pub.restore(60) == 0
  assert world.publish(pub, 1).full
  staged = follow.poll()
  for name, array in world.weights(1).items():
    np.testing.assert_array_equal(staged.checksums[name], codec.checksum(array, 32))


def test_follower_acknowledges_what_it_holds_now_and_then():
  inner = kv.open('memory://')
  store = faults.FaultStore(inner)
  pub, now = world.publisher(inner), [0.0]
  follow = follower.Follower(store, ack='f', ack_seconds=400, clock=lambda: now[0])

  def acks() -> list[int]:
    writes = [o for o, _ in store.log if o.kind == 'write']
    assert {o.key for o in writes} <= {'weights/ack/f.json'}
    held = inner.read('weights/ack/f.json')
    return [len(writes), json.loads(held)['version'] if held else -1]

  for version in range(6):
    world.publish(pub, version)
  assert follow.poll().version == 5
  assert acks() == [1, 4]  # where the chain that it reads begins
  follow.commit(follow.poll())
  follow.poll()
  assert acks() == [1, 4]  # not at once again
  now[0] += 6
  follow.poll()
  assert acks() == [2, 5]
  for _ in range(9):
    now[0] += 10
    follow.poll()
  assert acks() == [2, 5]
  now[0] += 10
  follow.poll()
  assert acks() == [3, 5]  # a quarter of the time after which it is gone
  now[0] += 100
  store.rule = lambda o: faults.Fault('drop_before') if o.kind == 'write' else None
  follow.poll()
  assert follow.faults == {'ack': 1}
  store.rule = faults.never
  follow.close()
  assert inner.list('weights/ack/') == []
