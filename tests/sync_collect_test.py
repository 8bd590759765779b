"""Collection: what anybody may need stays, the rest goes, manifests first."""

import dataclasses
import time

import hypothesis
from hypothesis import strategies as st
import pytest

from swe17 import config
from swe17.store import faults, kv
from swe17.sync import collect, follower, manifest, publisher
from tests import sync_world as world

no_waiting, store = world.no_waiting, world.store


def test_old_versions_are_collected_manifests_first():
  store = faults.FaultStore(kv.open('memory://'))
  pub = world.publisher(store)
  store.write('weights/data/00000001-killed-1.bin', b'left by an attempt that died')
  for version in range(13):
    world.publish(pub, version)
    if version < 8:
      assert manifest.versions(store) == list(range(version + 1))
  assert manifest.versions(store) == list(range(8, 13))
  kept = {manifest.data_version(key) for key in store.list(manifest.DATA)}
  assert kept == set(range(8, 13))
  gone = [o.key for o, _ in store.log if o.kind == 'delete']
  # The orphan went as soon as it was seen that version 1 is another's.
  assert gone[0] == 'weights/data/00000001-killed-1.bin'
  assert gone[1:5] == [manifest.key_of(v) for v in range(4)]
  assert all(key.startswith(manifest.DATA) for key in gone[5:9])


def test_restarted_publisher_keeps_the_snapshots_of_the_one_before(store: kv.Store):
  pub = world.publisher(store)
  for version in range(6):
    world.publish(pub, version)
  world.publish(world.publisher(store, 'b'), 6)
  # Full: 0, 4 and 6. Two are kept, and all that followers of them need.
  assert manifest.versions(store) == [4, 5, 6]


@pytest.mark.parametrize('acked,oldest', [(3, 0), (4, 4), (7, 4), (8, 8), (23, 20)])
def test_what_a_live_follower_needs_is_kept(store: kv.Store, acked: int, oldest: int):
  pub = world.publisher(store)
  for version in range(25):
    world.publish(pub, version)
    if version >= acked:
      collect.acknowledge(store, 'slow', acked)
    collect.acknowledge(store, 'quick', version)
  assert manifest.versions(store) == list(range(oldest, 25))


def test_follower_that_acknowledged_catches_up_without_a_gap(store: kv.Store):
  """Thirty versions behind: every step of its chain is there."""
  pub = world.publisher(store)
  follow = follower.Follower(store, ack='slow')
  record = world.Record(follow)
  for version in range(34):
    record.add(version)
    world.publish(pub, version)
    if version < 2:
      record.poll()
      follow._acked = None  # as if the time to the next one were over
      follow.poll()
  assert manifest.versions(store)[0] == 0
  assert record.poll().version == 33
  assert follow.faults.total() == 0


def test_follower_not_heard_of_holds_nothing_up(store: kv.Store, monkeypatch):
  pub = world.publisher(store)
  for version in range(9):
    world.publish(pub, version)
    if version == 1:
      collect.acknowledge(store, 'dead', 1)
  assert manifest.versions(store)[0] == 0
  now = time.time()
  monkeypatch.setattr(collect.time, 'time', lambda: now + 601)
  for version in range(9, 13):
    world.publish(pub, version)
  assert manifest.versions(store) == list(range(8, 13))
  assert store.list(collect.ACKS) == ['weights/ack/dead.json']
  monkeypatch.setattr(collect.time, 'time', lambda: now + 6001)
  for version in range(13, 17):
    world.publish(pub, version)
  assert store.list(collect.ACKS) == []  # so many names do not pile up


def test_follower_that_is_stuck_cannot_fill_the_store(store: kv.Store):
  cfg = dataclasses.replace(world.CFG, keep_most=10)
  pub = world.publisher(store, cfg=cfg)
  record = world.Record(follower.Follower(store, ack='stuck'))
  for version in range(40):
    record.add(version)
    world.publish(pub, version)
    collect.acknowledge(store, 'stuck', 0)  # alive, and never gets on
    if version == 0:
      record.poll()
    # Ten, and what has come since the last collection.
    assert len(manifest.versions(store)) <= 10 + 4
  record.settle(39)
  assert record.follow.faults == {'gap': 1}


def test_damaged_acknowledgement_is_none(store: kv.Store):
  for name, data in {
    'a': b'',
    'b': b'[]',
    'c': b'{"version": "x", "time": 1}',
    'd': b'{"version": 3}',
    'e': b'{"version": 3, "time": null}',
    'f': b'\xff',
  }.items():
    store.write(collect.ack_key(name), data)
  collect.acknowledge(store, 'g', 5)
  assert collect.live(store, 600, time.time()) == {'weights/ack/g.json': 5}


def test_data_of_dead_attempts_goes_and_of_a_publish_in_flight_stays(store: kv.Store):
  pub = world.publisher(store)
  store.write('weights/data/00000002-dead-1.bin', b'killed before its manifest')
  for version in range(3):
    world.publish(pub, version)
  store.write('weights/data/00000005-alive-1.bin', b'its manifest comes next')
  for version in range(3, 5):
    world.publish(pub, version)
  data = store.list(manifest.DATA)
  assert 'weights/data/00000002-dead-1.bin' not in data
  assert 'weights/data/00000005-alive-1.bin' in data
  world.publish(pub, 5)
  assert 'weights/data/00000005-alive-1.bin' in store.list(manifest.DATA)
  for version in range(6, 9):
    world.publish(pub, version)
  assert 'weights/data/00000005-alive-1.bin' not in store.list(manifest.DATA)


def test_learner_that_slept_through_a_collection_stops(store: kv.Store):
  """The key of its next version is free again: what is newer than it tells."""
  cfg = dataclasses.replace(world.CFG, full_every=2)
  old = world.publisher(store, cfg=cfg)
  world.publish(old, 0)
  new = world.publisher(store, 'b', cfg)
  assert new.restore(60) == 0
  for version in range(1, 12):
    world.publish(new, version)
  assert manifest.versions(store)[0] > 1
  with pytest.raises(publisher.PublishConflict, match='another learner is ahead'):
    for version in range(1, 12):
      world.publish(old, version)
  follow = follower.Follower(store)
  assert follow.poll().manifest.attempt == 'b'


def test_own_versions_are_not_read_again_to_collect():
  """Manifests of many blocks are large: only those of earlier attempts are read."""
  store = faults.FaultStore(kv.open('memory://'))
  pub = world.publisher(store)
  for version in range(6):
    world.publish(pub, version)
  pub = world.publisher(store, 'b')
  pub.restore(60)
  for version in range(6, 24):
    store.log.clear()
    world.publish(pub, version)
    read = [o.key for o, _ in store.log if o.kind == 'read']
    manifests = [key for key in read if key.startswith(manifest.MANIFESTS)]
    assert len(manifests) == (7 if version == 8 else 1)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  fulls=st.sets(st.integers(0, 40), min_size=1),
  extra=st.integers(0, 5),
  acked=st.lists(st.integers(0, 45), max_size=4),
  keep_fulls=st.integers(2, 4),
  keep_most=st.integers(1, 50),
)
def test_cutoff_keeps_what_it_promises(fulls, extra, acked, keep_fulls, keep_most):
  cfg = config.Sync(keep_fulls=keep_fulls, keep_most=keep_most)
  ordered = sorted(fulls)
  newest = ordered[-1] + extra
  first = collect.cutoff(ordered, newest, acked, cfg)
  kept = [v for v in ordered if v >= first]
  assert len(kept) >= min(keep_fulls, len(ordered))
  if len(kept) > keep_fulls:  # more only for a follower, and in the bounds
    assert newest - first < keep_most or first == 0
  if first > 0:
    assert first in fulls
  for version in acked:
    inside = newest - version < keep_most
    whole = [v for v in ordered if newest - keep_most < v <= version]
    if inside and whole:
      assert first <= max(whole)
