"""Publisher, follower and device: equal version means equal bytes, whatever fails.

The tests keep their own record of what was published as what; a follower may only ever
serve a version with the digest on record.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import pathlib
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swe17 import config
from swe17.store import faults, kv
from swe17.sync import apply, codec, follower, manifest, publisher

_CFG = config.Sync(full_every=4, block_bytes=64, keep_fulls=2)
_BF16 = np.dtype(ml_dtypes.bfloat16)


class Killed(BaseException):
  """A process that ends without a word."""


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(publisher, '_BACKOFF', 0.0)


@pytest.fixture(params=['file', 'memory'])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> kv.Store:
  return kv.open('memory://' if request.param == 'memory' else f'file://{tmp_path}/s')


def _weights(version: int) -> dict[str, np.ndarray]:
  """Weights of a version: some leaves change, one never does, one is empty."""
  return {name: array.copy() for name, array in _made(version).items()}


@functools.cache
def _made(version: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  tensors = {
    'embed': rng.normal(size=(9, 8)).astype(_BF16),
    'layer/w': rng.normal(size=(50,)).astype(_BF16),
    'layer/fixed': rng.normal(size=(4, 4)).astype(_BF16),
    'scale': np.array(1.5, _BF16),
    'empty': np.zeros((0, 3), _BF16),
  }
  for name in ('embed', 'layer/w'):
    bits = tensors[name].view(np.uint16).reshape(-1)
    for v in range(1, version + 1):
      bits[np.random.default_rng(v).integers(0, bits.size, 5)] ^= v & 7
  return tensors


def _publisher(store: kv.Store, attempt: str = 'a', cfg=_CFG) -> publisher.Publisher:
  return publisher.Publisher(store, cfg, attempt=attempt)


def _publish(pub: publisher.Publisher, version: int, **kw) -> publisher.Published:
  return pub.publish(
    version, _weights(version), step=version, plan={'v': version}, **kw
  )


class Record:
  """What was published as which version, and the check that a follower obeys it."""

  def __init__(self, follow: follower.Follower):
    self.follow = follow
    self.digests: dict[int, set[str]] = collections.defaultdict(set)

  def add(self, version: int, tensors: dict[str, np.ndarray] | None = None) -> None:
    tensors = _weights(version) if tensors is None else tensors
    self.digests[version].add(codec.digest(tensors, _CFG.block_bytes))

  def poll(self) -> follower.Staged | None:
    """Polls, checks that staging changed nothing, commits, checks what is served."""
    held = self.follow.version
    before = codec.digest(self.follow.tensors, _CFG.block_bytes)
    staged = self.follow.poll()
    assert self.follow.version == held
    assert codec.digest(self.follow.tensors, _CFG.block_bytes) == before
    if staged is None:
      return None
    assert held is None or staged.version > held
    self.follow.commit(staged)
    assert self.follow.version == staged.version
    digest = codec.digest(self.follow.tensors, _CFG.block_bytes)
    assert digest in self.digests[staged.version]
    assert self.follow.manifest is not None
    assert digest == self.follow.manifest.digest
    return staged

  def settle(self, version: int) -> None:
    """Polls until the follower holds `version`, at most as often as its pauses ask."""
    for _ in range(3 * follower._MAX_PAUSE + follower._LIST_AFTER):
      if self.follow.version == version:
        return
      self.poll()
    assert self.follow.version == version, self.follow.faults


def test_follower_holds_each_version_byte_for_byte(store: kv.Store):
  pub, record = _publisher(store), Record(follower.Follower(store))
  assert record.poll() is None
  for version in range(12):
    record.add(version)
    done = _publish(pub, version)
    staged = record.poll()
    assert staged is not None and staged.version == version
    assert staged.manifest.step == version
    assert record.follow.manifest.plan == {'v': version}
    assert done.full == (version % 4 == 0) == (staged.manifest.base is None)
    assert done.digest == staged.manifest.digest
    assert done.raw_bytes == sum(a.nbytes for a in _weights(0).values())
    assert done.bytes == staged.bytes
    assert done.changed_share == 1.0 if done.full else 0 < done.changed_share < 0.1
    if not done.full:
      assert staged.changed == {'embed', 'layer/w'}
    assert record.poll() is None
  assert record.follow.faults.total() == 0
  assert publisher.latest(store) == 11


def test_follower_that_joins_late_starts_at_the_newest(store: kv.Store):
  pub = _publisher(store)
  for version in range(11):
    _publish(pub, version)
    record = Record(follower.Follower(store))
    record.add(version)
    staged = record.poll()
    assert staged is not None
    assert (staged.base, staged.version) == (None, version)


def test_follower_behind_jumps_the_chain_in_one_staging(store: kv.Store):
  pub, record = _publisher(store), Record(follower.Follower(store))
  for version, polls in ((0, True), (1, False), (2, False), (3, True)):
    record.add(version)
    _publish(pub, version)
    if polls:
      staged = record.poll()
      assert staged is not None and staged.version == version
  assert (staged.base, staged.version) == (0, 3)
  assert staged.changed == {'embed', 'layer/w'}


def test_follower_behind_starts_from_the_last_full_snapshot_on_its_way():
  store = faults.FaultStore(kv.open('memory://'))
  pub, record = _publisher(store), Record(follower.Follower(store.beside()))
  for version in range(7):
    record.add(version)
    _publish(pub, version)
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
  _publish(_publisher(store), 0)
  follow = follower.Follower(store.beside())
  follow.commit(follow.poll())
  client = follow._store
  client.log.clear()
  for _ in range(32):
    assert follow.poll() is None
  kinds = collections.Counter(operation.kind for operation, _ in client.log)
  assert kinds == {'read': 32, 'list': 32 // follower._LIST_AFTER}


def test_commit_of_a_version_staged_from_another_is_refused(store: kv.Store):
  pub, follow = _publisher(store), follower.Follower(store)
  _publish(pub, 0)
  old = follow.poll()
  _publish(pub, 1)
  follow.commit(follow.poll())
  with pytest.raises(ValueError, match='poll again'):
    follow.commit(old)
  assert follow.version == 1


def test_publisher_after_a_restart_begins_with_a_full_snapshot(store: kv.Store):
  record = Record(follower.Follower(store))
  pub = _publisher(store)
  for version in range(7):
    if version == 2:
      pub = _publisher(store, 'b')
    record.add(version)
    done = _publish(pub, version)
    assert done.full == (version in (0, 2, 6))
    assert record.poll().version == version
  assert record.follow.faults.total() == 0


def test_asked_for_or_reshaped_weights_are_published_in_full(store: kv.Store):
  pub, record = _publisher(store), Record(follower.Follower(store))
  _publish(pub, 0)
  assert _publish(pub, 1, full=True).full
  grown = {**_weights(1), 'extra': np.ones(3, _BF16)}
  record.add(2, grown)
  assert pub.publish(2, grown, step=2, plan={}).full
  assert not pub.publish(3, grown, step=3, plan={}).full
  record.add(3, grown)
  assert record.poll().version == 3


def test_weights_that_are_not_finite_are_never_published(store: kv.Store):
  pub = _publisher(store)
  _publish(pub, 0)
  for bits in (0x7FC0, 0x7F80, 0xFF80, 0x7F81):
    bad = _weights(1)
    bad['layer/w'].view(np.uint16)[7] = bits
    with pytest.raises(ValueError, match="'layer/w' has 1 of 50 values"):
      pub.publish(1, bad, step=1, plan={})
  with pytest.raises(ValueError, match='not finite'):
    pub.publish(1, {'w': np.array([np.inf], np.float32)}, step=1, plan={})
  assert publisher.latest(store) == 0
  assert len(store.list(manifest.DATA)) == 1
  assert not _publish(pub, 1).full


def test_versions_leave_no_gap(store: kv.Store):
  pub = _publisher(store)
  with pytest.raises(ValueError, match='got 1, want 0'):
    _publish(pub, 1)
  _publish(pub, 0)
  with pytest.raises(ValueError, match='got 2, want 1'):
    _publish(pub, 2)
  assert publisher.latest(store) == 0


def test_published_version_is_not_published_again(store: kv.Store):
  pub = _publisher(store)
  _publish(pub, 0)
  before = {key: store.read(key) for key in store.list('')}
  with pytest.raises(publisher.PublishConflict, match="attempt 'a'"):
    _publish(_publisher(store, 'b'), 0)
  with pytest.raises(publisher.PublishConflict):
    pub.publish(0, _weights(5), step=5, plan={})
  # The same call once more, after a lost reply say, is no conflict.
  assert _publish(pub, 0).digest == codec.digest(_weights(0), 64)
  assert {key: store.read(key) for key in store.list('')} == before
  assert not _publish(pub, 1).full


def test_version_that_was_collected_is_not_published_again(store: kv.Store):
  pub = _publisher(store, cfg=dataclasses.replace(_CFG, full_every=1))
  for version in range(5):
    _publish(pub, version)
  assert manifest.versions(store) == [3, 4]
  with pytest.raises(publisher.PublishConflict, match='older than the newest, 4'):
    _publish(_publisher(store, 'b'), 0)


def test_weights_written_to_after_publishing_are_noticed(store: kv.Store):
  pub, tensors = _publisher(store), _weights(0)
  pub.publish(0, tensors, step=0, plan={})
  tensors['embed'][0, 0] = 7
  with pytest.raises(ValueError, match="'embed' was written to"):
    _publish(pub, 1)
  assert _publish(pub, 1).full


def test_old_versions_are_collected_manifests_first():
  store = faults.FaultStore(kv.open('memory://'))
  pub = _publisher(store)
  store.write('weights/data/00000001-killed-1.bin', b'left by an attempt that died')
  for version in range(13):
    _publish(pub, version)
    if version < 8:
      assert manifest.versions(store) == list(range(version + 1))
  assert manifest.versions(store) == list(range(8, 13))
  kept = {manifest.data_version(key) for key in store.list(manifest.DATA)}
  assert kept == set(range(8, 13))
  first = [o.key for o, _ in store.log if o.kind == 'delete'][:9]
  assert first[:4] == [manifest.key_of(v) for v in range(4)]
  assert all(key.startswith(manifest.DATA) for key in first[4:])
  assert 'weights/data/00000001-killed-1.bin' in first[4:]


def test_restarted_publisher_keeps_the_snapshots_of_the_one_before(store: kv.Store):
  pub = _publisher(store)
  for version in range(6):
    _publish(pub, version)
  _publish(_publisher(store, 'b'), 6)
  # Full: 0, 4 and 6. Two are kept, and all that followers of them need.
  assert manifest.versions(store) == [4, 5, 6]


def test_no_key_is_written_twice():
  """A bucket takes about one write a second and key: every name is fresh."""
  store = faults.FaultStore(kv.open('memory://'), faults.paced(1.0, clock=lambda: 0.0))
  pub = _publisher(store)
  for version in range(60):
    _publish(pub, version)
  assert not any(fault for _, fault in store.log)


def test_second_try_at_the_data_takes_a_fresh_name():
  lost = faults.at({0: faults.Fault('drop_after'), 1: faults.Fault('flip')})
  writes = []

  def rule(operation: faults.Operation) -> faults.Fault | None:
    if operation.kind != 'write':
      return None
    writes.append(operation.key)
    return lost(dataclasses.replace(operation, index=len(writes) - 1))

  store = faults.FaultStore(kv.open('memory://'), rule)
  _publish(_publisher(store), 0)
  assert len(writes) == len(set(writes)) == 3
  record = Record(follower.Follower(store))
  record.add(0)
  assert record.poll() is not None


def test_slow_reader_ends_on_the_newest(store: kv.Store):
  """CASES 4.7: ten versions come, and old ones go, between manifest and payload."""
  pub = _publisher(store)
  record = Record(follower.Follower(store))
  for version in range(2):
    record.add(version)
    _publish(pub, version)
    if version == 0:
      record.poll()
  slow, publishing = faults.FaultStore(store), iter(range(2, 14))

  def pause(operation: faults.Operation) -> None:
    if operation.key.startswith(manifest.DATA):
      for version in publishing:
        record.add(version)
        _publish(pub, version)

  slow.rule = pause
  record.follow._store = slow
  record.settle(13)
  assert record.follow.faults['missing'] > 0


def test_missing_object_heals_from_the_newest_full_snapshot(store: kv.Store):
  pub, record = _publisher(store), Record(follower.Follower(store))
  for version in range(7):
    record.add(version)
    _publish(pub, version)
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


@pytest.mark.parametrize('reason', ['base', 'attempt', 'manifest', 'sha256', 'gap'])
def test_bad_delta_is_counted_and_healed_by_the_next_snapshot(
  store: kv.Store, reason: str
):
  pub, record = _publisher(store), Record(follower.Follower(store))
  for version in range(7):
    record.add(version)
    _publish(pub, version)
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
  elif reason == 'attempt':
    made = dataclasses.replace(made, attempt='b')
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
  pub, record = _publisher(store), Record(follower.Follower(store))
  for version in range(13):
    record.add(version)
    _publish(pub, version)
    if version == 1:
      record.poll()
  record.settle(12)
  assert record.follow.faults == {'gap': 1}


def test_follower_never_goes_back(store: kv.Store):
  pub, record = _publisher(store), Record(follower.Follower(store))
  for version in range(3):
    record.add(version)
    _publish(pub, version)
  record.poll()
  for key in store.list(''):
    store.delete(key)
  _publish(_publisher(store, 'b'), 0)
  for _ in range(40):
    assert record.poll() is None
  assert record.follow.version == 2
  assert record.follow.faults['older'] > 0


def test_repeated_faults_slow_the_polling_down():
  store = faults.FaultStore(kv.open('memory://'))
  _publish(_publisher(store), 0)
  client = store.beside(lambda operation: faults.Fault('drop_before'))
  follow = follower.Follower(client)
  for _ in range(40):
    assert follow.poll() is None
  assert len(client.log) < 10
  assert follow.faults == {'store': len(client.log)}


def test_plan_is_read_without_weights():
  store = faults.FaultStore(kv.open('memory://'))
  assert follower.read_plan(store) is None
  pub = _publisher(store)
  for version in range(3):
    _publish(pub, version)
  store.log.clear()
  assert follower.read_plan(store).plan == {'v': 2}
  assert follower.read_plan(store, 1).plan == {'v': 1}
  assert follower.read_plan(store, 3) is None
  assert not any(o.key.startswith(manifest.DATA) for o, _ in store.log)
  store.write(manifest.key_of(2), b'{}')
  assert follower.read_plan(store).version == 1
  with pytest.raises(ValueError, match='schema'):
    follower.read_plan(store, 2)


def _next_version(store: faults.FaultStore) -> int:
  newest = publisher.latest(store.beside())
  return 0 if newest is None else newest + 1


def _run(
  client: faults.FaultStore, reader: faults.FaultStore, versions: int = 12
) -> Record:
  """Publishes `versions` versions; the reader polls after each, and at the end."""
  pub, record = _publisher(client), Record(follower.Follower(reader))
  for version in range(versions):
    # One tensor that changes, in two blocks, and one that does not: runs are many.
    tensors = {name: _weights(version)[name] for name in ('layer/w', 'scale')}
    record.add(version, tensors)
    pub.publish(version, tensors, step=version, plan={})
    record.poll()
  record.settle(versions - 1)
  return record


# Faults that differ for each operation: `full` is `drop_before`, a lost reply to a read
# is a lost request, and an object that was created once has no older bytes to splice.
_DISTINCT = {
  'read': ('drop_before', 'truncate', 'flip', 'stale'),
  'write': ('drop_before', 'drop_after', 'truncate', 'flip'),
  'create': ('drop_before', 'drop_after', 'truncate', 'flip'),
  'list': ('drop_before', 'stale'),
  'delete': ('drop_before', 'drop_after'),
}


@pytest.mark.parametrize('side', ['publisher', 'follower'])
def test_every_fault_at_every_operation_of_a_run(side: str):
  clean = faults.FaultStore(kv.open('memory://'))
  reader = clean.beside()
  assert _run(clean, reader).follow.faults.total() == 0
  asked = [o.kind for o, _ in (clean if side == 'publisher' else reader).log]
  want = {'read', 'list'} if side == 'follower' else set(_DISTINCT)
  assert set(asked) == want
  for index, operation in enumerate(asked):
    for kind in _DISTINCT[operation]:
      bad = faults.at({index: faults.Fault(kind)})
      client = faults.FaultStore(kv.open('memory://'))
      reader = client.beside()
      (client if side == 'publisher' else reader).rule = bad
      # One fault is nothing to a publisher: no call fails, every version comes out,
      # and the follower, at most some polls later, holds the last one.
      _run(client, reader)


@pytest.mark.parametrize('seed', range(6))
def test_storm_of_faults_on_both_sides(seed: int):
  client = faults.FaultStore(kv.open('memory://'), faults.seeded(seed, 0.25))
  reader = client.beside(faults.seeded(seed + 100, 0.25))
  record = Record(follower.Follower(reader))
  attempt, version = 0, 0
  pub = _publisher(client, 'a0')
  while version < 14:
    if version == 10:
      client.rule = reader.rule = faults.never
    record.add(version)
    try:
      _publish(pub, version)
      version += 1
    except kv.StoreError:
      pass  # the learner calls again
    except (publisher.PublishConflict, ValueError):
      # What it can't make sense of stops the learner; the next one goes on.
      attempt += 1
      pub = _publisher(client, f'a{attempt}')
      version = _next_version(client)
    record.poll()
  record.settle(13)


def test_of_two_publishers_one_wins_each_version(store: kv.Store):
  """Racing learners: each version is one attempt's, whole, and nobody overwrites."""
  gate = threading.Barrier(2)

  def race(attempt: str) -> dict[int, str]:
    won = {}
    pub = _publisher(store, attempt)
    for version in range(8):
      gate.wait(timeout=60)
      tensors = _weights(version)
      tensors['scale'] = np.array(2.0 if attempt == 'a' else 3.0, _BF16)
      with contextlib.suppress(publisher.PublishConflict):
        won[version] = pub.publish(version, tensors, step=version, plan={}).digest
      gate.wait(timeout=60)
    return won

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    a, b = pool.map(race, 'ab')
  assert not a.keys() & b.keys()
  assert a.keys() | b.keys() == set(range(8))
  follow = follower.Follower(store)
  follow.commit(follow.poll())
  assert follow.version == 7
  for version in manifest.versions(store):
    made = manifest.read(store, version)
    assert made.digest == (a | b)[version]
    assert made.attempt == ('a' if version in a else 'b')


_KILL_CFG = dataclasses.replace(_CFG, full_every=2)


def _killed_run(point: int, after: bool) -> bool:
  """Kills a publisher at its `point`-th change of the store; another takes over.

  A reader polls at every operation of both. False if there was no such point.
  """
  store = faults.FaultStore(kv.open('memory://'))
  record = Record(follower.Follower(store.beside()))
  changes = 0

  def rule(operation: faults.Operation) -> faults.Fault | None:
    nonlocal changes
    record.poll()
    if operation.kind not in ('write', 'create', 'delete'):
      return None
    changes += 1
    if changes != point + 1:
      return None
    if after:
      return faults.Fault('drop_after', error=Killed())
    raise Killed

  def run(pub: publisher.Publisher, versions: range, scale: float) -> None:
    for version in versions:
      tensors = {**_weights(version), 'scale': np.array(scale, _BF16)}
      record.add(version, tensors)
      pub.publish(version, tensors, step=version, plan={})
      record.poll()

  store.rule = rule
  try:
    run(_publisher(store, 'a', _KILL_CFG), range(6), 2.0)
    return False
  except Killed:
    pass
  first = _next_version(store)
  run(_publisher(store, 'b', _KILL_CFG), range(first, first + 4), 3.0)
  record.settle(first + 3)
  assert not set(record.follow.faults) - {'missing', 'gap'}
  return True


@pytest.mark.parametrize('after', [False, True])
def test_publisher_killed_at_each_change_leaves_only_whole_versions(after: bool):
  """CASES 4.8: every boundary of every write, creation and deletion."""
  points = 0
  while _killed_run(points, after):
    points += 1
  assert points > 15


# Device side.


def _params(dtype=jnp.bfloat16) -> dict:
  keys = iter(jax.random.split(jax.random.key(0), 4))

  def leaf(*shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape).astype(jnp.bfloat16).astype(dtype)

  return {
    'embed': leaf(9, 8),
    'layer': {'w': leaf(3, 8, 8), 'scale': leaf(8)},
    'count': jnp.arange(3),
    'bias': leaf(),
  }


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_device_holds_what_was_published(dtype):
  """CASES 4.10: one full snapshot sets every leaf, each delta exactly its own."""
  store = kv.open('memory://')
  pub = _publisher(store, cfg=dataclasses.replace(_CFG, full_every=99))
  follow = follower.Follower(store)
  learner = _params(jnp.float32)
  device = jax.tree.map(lambda x: (x * 0 + 5).astype(x.dtype), _params(dtype))
  for i, name in enumerate(['', *apply.name_tree(learner)]):
    learner = apply.unname(
      {n: x * 3 + 1 if n == name else x for n, x in apply.name_tree(learner).items()},
      learner,
    )
    host = apply.to_host(learner)
    done = pub.publish(i, host, step=i, plan={})
    staged = follow.poll()
    before = apply.to_host(device)
    device = apply.apply(device, staged)
    follow.commit(staged)
    assert staged.changed == ({name} if name else set(host))
    for n, array in apply.to_host(device).items():
      assert array.tobytes() == host[n].tobytes()
      assert (array.tobytes() != before[n].tobytes()) == (n in staged.changed)
    assert apply.device_digest(device, 64) == done.digest
    assert jax.tree.map(lambda x: x.dtype, device) == jax.tree.map(
      lambda x: x.dtype, _params(dtype)
    )


def test_update_reuses_the_buffers_and_leaves_the_host_copy_alone():
  store = kv.open('memory://')
  pub, follow = _publisher(store), follower.Follower(store)
  params = {'w': jnp.ones((256, 256), jnp.bfloat16), 's': jnp.ones((), jnp.bfloat16)}
  pub.publish(0, apply.to_host(params), step=0, plan={})
  follow.commit(follow.poll())
  device = apply.from_host(follow.tensors, params)
  where = device['w'].unsafe_buffer_pointer()
  for version in (1, 2, 3):
    params = jax.tree.map(lambda x: x * 2, params)
    pub.publish(version, apply.to_host(params), step=version, plan={})
    staged, old = follow.poll(), device
    device = apply.apply(device, staged)
    assert old['w'].is_deleted()
    assert device['w'].unsafe_buffer_pointer() == where
    follow.commit(staged)
    digest = codec.digest(follow.tensors, 64)
    assert digest == follow.manifest.digest == apply.device_digest(device, 64)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_host_copy_neither_hinders_donation_nor_changes_with_it(dtype):
  params = {'w': jnp.ones((256, 256), dtype)}
  host = apply.to_host(params)
  where = params['w'].unsafe_buffer_pointer()
  params = jax.jit(lambda p: {'w': p['w'] * 2}, donate_argnums=0)(params)
  assert params['w'].unsafe_buffer_pointer() == where
  assert (host['w'] == 1).all()


def test_device_checksum_equals_the_host_checksum():
  params = _params(jnp.float32)
  host = apply.to_host(params)
  for block_bytes in (16, 64, 1 << 20):
    sums = apply.device_checksum(params, block_bytes)
    assert sums.keys() == host.keys()
    for name, array in host.items():
      np.testing.assert_array_equal(sums[name], codec.checksum(array, block_bytes))


def test_device_that_does_not_hold_the_staged_bytes_is_noticed():
  store = kv.open('memory://')
  follow = follower.Follower(store)
  params = _params()
  _publisher(store).publish(0, apply.to_host(params), step=0, plan={})
  staged = follow.poll()
  # A delta that leaves 'embed' alone, on a device whose 'embed' is another version's.
  staged = dataclasses.replace(staged, changed=staged.changed - {'embed'})
  params['embed'] = params['embed'].at[2, 3].add(1)
  with pytest.raises(RuntimeError, match=r"does not hold .* \['embed'\]"):
    apply.apply(params, staged)


@pytest.mark.parametrize(
  'edit,want',
  [
    (lambda p: p.pop('embed'), r"unknown=\['embed'\]"),
    (lambda p: p.update(head=jnp.ones(2)), r"missing=\['head'\]"),
    (lambda p: p.update(embed=jnp.ones((8, 9))), r'shape \(9, 8\), want \(8, 9\)'),
    (lambda p: p.update(count=jnp.ones(3)), 'got dtype int32'),
    (lambda p: p.update(bias=jnp.float16(1)), 'got dtype bfloat16'),
    (lambda p: p.update(head=p['embed']), 'hold tied weights once'),
  ],
)
def test_names_shapes_and_dtypes_must_match_before_anything_changes(edit, want: str):
  store = kv.open('memory://')
  follow = follower.Follower(store)
  _publisher(store).publish(0, apply.to_host(_params()), step=0, plan={})
  staged = follow.poll()
  params = _params()
  edit(params)
  with pytest.raises(ValueError, match=want):
    apply.apply(params, staged)
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
  with pytest.raises(ValueError, match=want):
    apply.from_host(staged.tensors, params)


def test_values_that_bfloat16_does_not_hold_are_no_published_weights():
  with pytest.raises(ValueError, match="'w' holds values"):
    apply.device_digest({'w': jnp.float32(1.001)}, 64)


def test_names_are_paths_and_come_back():
  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class Layer:
    w: jax.Array
    parts: tuple

  tree = {'b': Layer(jnp.ones(1), (jnp.ones(2), {'x': jnp.ones(3)})), 'a': jnp.ones(4)}
  named = apply.name_tree(tree)
  assert {n: x.size for n, x in named.items()} == {
    'a': 4,
    'b/w': 1,
    'b/parts/0': 2,
    'b/parts/1/x': 3,
  }
  assert jax.tree.structure(apply.unname(named, tree)) == jax.tree.structure(tree)
  with pytest.raises(ValueError, match="two leaves are named 'a/b'"):
    apply.name_tree({'a/b': 1, 'a': {'b': 2}})
  with pytest.raises(ValueError, match=r"missing=\['b/w'\]"):
    apply.unname({n: x for n, x in named.items() if n != 'b/w'}, tree)


def test_publisher_in_the_background_is_safe_from_donated_training_steps():
  """CASES 3.5: three steps donate the weights while the store holds publishing up."""
  gate = threading.Event()
  inner = kv.open('memory://')

  def hold(operation: faults.Operation) -> None:
    assert gate.wait(timeout=60)

  pub = _publisher(faults.FaultStore(inner, hold))
  step = jax.jit(lambda p: jax.tree.map(lambda x: x * 1.5 + 1, p), donate_argnums=0)
  state, want = _params(jnp.float32), {}
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    jobs = []
    for version in range(3):
      host = apply.to_host(state)
      want[version] = codec.digest(host, 64)
      jobs.append(pool.submit(pub.publish, version, host, step=version, plan={}))
      before = jax.tree.leaves(state)
      state = step(state)
      assert all(leaf.is_deleted() for leaf in before)  # donation did take place
    gate.set()
    assert [job.result(timeout=60).digest for job in jobs] == list(want.values())
  follow = follower.Follower(inner)
  for version in range(3):
    assert manifest.read(inner, version).digest == want[version]
  follow.commit(follow.poll())
  assert codec.digest(follow.tensors, 64) == want[2]
