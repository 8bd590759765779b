"""Full snapshots beside deltas: who keeps up reads deltas only, who joins the full."""

import collections
import dataclasses
import hashlib
import json

import numpy as np
import pytest

from swe17.store import faults, kv
from swe17.sync import codec, collect, follower, manifest, publisher
from tests import sync_fixtures as fixtures
from tests import sync_world as world

no_waiting, store = world.no_waiting, world.store
Tensors = dict[str, np.ndarray]


def moving(version: int, share: float, held: Tensors | None = None) -> Tensors:
  """Weights of which a share moves by a last bit each version, or all are new."""
  rng = np.random.default_rng(version)
  if held is None or share >= 1:
    return {n: rng.normal(size=30_000).astype(world.BF16) for n in 'ab'}
  moved = {}
  for name, array in held.items():
    bits = array.view(np.uint16).copy()
    bits += rng.random(bits.size) < share
    moved[name] = bits.view(world.BF16)
  return moved


def run(store: kv.Store, versions: int, share: float = 0.01, **changes) -> list:
  """Publishes versions of moving weights; (what it came to, the weights) of each."""
  cfg = dataclasses.replace(world.CFG, block_bytes=16 << 10, **changes)
  pub, tensors, done = world.publisher(store, cfg=cfg), None, []
  for version in range(versions):
    tensors = moving(version, share, tensors)
    done.append((pub.publish(version, tensors, step=version, plan={}), tensors))
  return done


def data_read(client: faults.FaultStore) -> list[int]:
  """Versions whose data a client read, in order."""
  keys = [o.key for o, _ in client.log if o.kind == 'read']
  return [v for v in map(manifest.data_version, keys) if v is not None]


def test_follower_that_keeps_up_reads_one_full_snapshot_in_a_hundred_versions():
  """At 1 % changes; four more fulls, as before, would be most of what it reads."""
  store = faults.FaultStore(kv.open('memory://'))
  cfg = dataclasses.replace(world.CFG, block_bytes=16 << 10, full_every=20)
  pub, follow = world.publisher(store, cfg=cfg), follower.Follower(store.beside())
  tensors, read, made = None, [], []
  for version in range(100):
    tensors = moving(version, 0.01, tensors)
    made.append(pub.publish(version, tensors, step=version, plan={}))
    staged = follow.poll()
    assert staged is not None and staged.version == version
    follow.commit(staged)
    read.append(staged.bytes)
    for name, array in tensors.items():
      assert follow.tensors[name].tobytes() == array.tobytes()
  assert follow.faults.total() == 0
  keys = {o.key for o, _ in follow._store.log}
  assert not any(key.startswith(manifest.FULLS) for key in keys)
  full = made[0].full_bytes
  assert read[0] == full and max(read[1:]) < 0.03 * full
  assert [v for v in range(100) if made[v].full_bytes] == [0, 20, 40, 60, 80]
  # With a full snapshot in place of the delta, each of those would have been read.
  before = sum(done.full_bytes or done.bytes for done in made)
  assert sum(read) < 0.45 * before
  assert sum(read[1:]) < 0.35 * (before - full)


@pytest.mark.parametrize('versions', [5, 7, 8])
def test_follower_that_joins_reads_the_newest_full_snapshot_and_deltas(versions: int):
  store = faults.FaultStore(kv.open('memory://'))
  done = run(store, versions)
  late = follower.Follower(store.beside())
  staged = late.poll()
  assert staged is not None and staged.version == versions - 1
  assert staged.bytes == done[4][0].full_bytes + sum(d.bytes for d, _ in done[5:])
  assert data_read(late._store) == list(range(4, versions))
  late.commit(staged)
  for name, array in done[-1][1].items():
    assert late.tensors[name].tobytes() == array.tobytes()
  assert late.faults.total() == 0


@pytest.mark.parametrize('share,way', [(0.01, [1, 2, 3, 4, 5]), (1.0, [4, 5])])
def test_follower_behind_takes_the_way_of_fewer_bytes(share: float, way: list[int]):
  store = faults.FaultStore(kv.open('memory://'))
  source = kv.open('memory://')
  run(source, 1, share)
  follow = follower.Follower(source)
  follow.commit(follow.poll())
  done = run(store, 6, share)
  follow._store = store.beside()
  staged = follow.poll()
  assert staged is not None and (staged.base, staged.version) == (0, 5)
  assert data_read(follow._store) == way
  ways = [sum(d.bytes for d, _ in done[1:]), done[4][0].full_bytes + done[5][0].bytes]
  assert staged.bytes == min(ways)
  follow.commit(staged)
  assert codec.digest(follow.tensors, 16 << 10) == done[5][0].digest
  assert follow.faults.total() == 0


def test_damaged_delta_heals_from_the_full_snapshot_beside_it(store: kv.Store):
  record = world.Record(follower.Follower(store))
  pub = world.publisher(store)
  for version in range(5):
    record.add(version)
    world.publish(pub, version)
    if version < 4:
      record.poll()
  key = manifest.read(store, 4).objects[0].key
  store.write(key, store.read(key)[:-1])
  assert record.poll().version == 4
  assert record.follow.faults == {'truncated': 2}


@pytest.mark.parametrize('harm', ['gone', 'cut', 'another'])
def test_full_snapshot_that_is_not_the_one_named_is_never_used(
  store: kv.Store, harm: str
):
  """Who begins takes the one before it, with the deltas that follow."""
  record = world.Record(follower.Follower(store))
  pub = world.publisher(store)
  for version in range(6):
    record.add(version)
    world.publish(pub, version)
  named = manifest.read(store, 4).full
  if harm == 'gone':
    store.delete(named.key)
  if harm == 'cut':
    store.write(named.key, store.read(named.key)[:-1])
  if harm == 'another':  # as sound as the right one, by another learner
    other = kv.open('memory://')
    theirs = world.publisher(other, 'b')
    for version in range(5):
      tensors = {**world.weights(version), 'scale': np.array(7.0, world.BF16)}
      theirs.publish(version, tensors, step=version, plan={})
    store.write(named.key, other.read(manifest.read(other, 4).full.key))
  staged = record.poll()
  assert staged is not None and staged.version == 5
  want = {'gone': {'missing': 1}, 'cut': {'manifest': 2}, 'another': {'manifest': 2}}
  assert record.follow.faults == want[harm]


def test_full_snapshot_with_the_right_hash_of_other_weights_is_refused():
  store = kv.open('memory://')
  made = run(store, 5)[4][0]
  version = manifest.read(store, 4)
  full = manifest.read_full(store, version)
  assert full.digest == version.digest == made.digest and full.base is None
  assert full.plan == version.plan and full.step == version.step
  for other in (
    dataclasses.replace(manifest.read(store, 0), version=4, objects=full.objects),
    dataclasses.replace(version, full=None),
    manifest.read(store, 0),
  ):
    data = manifest.to_bytes(other)
    sha256 = hashlib.sha256(data).hexdigest()
    named = dataclasses.replace(version.full, sha256=sha256)
    with pytest.raises(ValueError, match='full snapshot of version 4'):
      manifest.parse_full(data, dataclasses.replace(version, full=named))
  same = manifest.to_bytes(dataclasses.replace(full, attempt='b'))
  with pytest.raises(ValueError, match='do not match their sha256'):
    manifest.parse_full(same, version)


def test_manifests_from_before_full_snapshots_stood_beside_deltas_still_parse():
  store = kv.open('memory://')
  run(store, 2)
  for version in range(2):
    body = json.loads(store.read(manifest.key_of(version)))
    del body['full'], body['checksum']
    old = json.dumps({**body, 'checksum': manifest._checksum(body)}).encode()
    assert manifest.parse(old) == manifest.read(store, version)
  with pytest.raises(ValueError, match=r"missing=\['step'\]"):
    del body['step']
    manifest.parse(json.dumps({**body, 'checksum': manifest._checksum(body)}).encode())


@pytest.mark.parametrize(
  'changes',
  [
    {'key': 'weights/full/00000002-a-1.json'},
    {'key': 'weights/data/00000001-a-1.bin'},
    {'key': '../full/00000001-a-1.json'},
    {'size': -1},
    {'sha256': ''},
    {'data_bytes': -1},
  ],
)
def test_unsound_name_of_a_full_snapshot_is_refused(changes: dict):
  tensors = world.weights(0)
  rows, objects, _ = fixtures.packed(tensors)
  base = fixtures.manifest_of(rows, objects)
  new_rows, new_objects, _ = fixtures.packed(world.weights(1), tensors, rows)
  beside = manifest.Beside('weights/full/00000001-a-1.json', 9, 'ab' * 32, 99)
  delta = fixtures.manifest_of(new_rows, new_objects, base, full=beside)
  assert manifest.parse(manifest.to_bytes(delta)).full == beside
  bad = dataclasses.replace(delta, full=dataclasses.replace(beside, **changes))
  with pytest.raises(ValueError, match=r'manifest 1|store key'):
    manifest.parse(manifest.to_bytes(bad))
  alone = dataclasses.replace(
    base, full=dataclasses.replace(beside, key='weights/full/00000000-a-1.json')
  )
  with pytest.raises(ValueError, match='beside base None'):
    manifest.parse(manifest.to_bytes(alone))


@pytest.mark.parametrize('kind', ['drop_before', 'drop_after'])
@pytest.mark.parametrize('fails', ['data', 'full', 'manifest'])
def test_retried_version_with_a_full_snapshot_is_published_whole(kind: str, fails: str):
  """Whichever of its objects fails: the first call's version stands, or the next's."""
  client = faults.FaultStore(kv.open('memory://'))
  pub = world.publisher(client)
  for version in range(4):
    world.publish(pub, version)
  record = world.Record(follower.Follower(client.beside()))
  record.add(3)
  record.poll()
  record.add(4)

  def rule(operation: faults.Operation) -> faults.Fault | None:
    hit = operation.key.startswith(f'weights/{fails}/00000004')
    return faults.Fault(kind) if hit and operation.kind != 'read' else None

  client.rule = rule
  with pytest.raises(kv.StoreError):
    world.publish(pub, 4)
  client.rule = faults.never
  done = world.publish(pub, 4)
  assert not done.full and done.full_bytes
  late = world.Record(follower.Follower(client.beside()))
  late.digests = record.digests
  for each in (record, late):
    assert each.poll().version == 4 and each.follow.faults.total() == 0
  assert data_read(late.follow._store) == [4]
  # What tries left behind goes with the next collection; the rest is all in use.
  for version in range(5, 9):
    world.publish(pub, version)
  assert unused(client) == set()


def test_earlier_call_whose_manifest_arrives_late_keeps_its_data():
  """The version is that call's; what collects right after knows it by its names."""
  client = faults.FaultStore(kv.open('memory://'))
  pub = world.publisher(client)
  for version in range(4):
    world.publish(pub, version)
  late: list[tuple[str, bytes]] = []
  inner, create = client._inner, client._inner.create

  def lose(key: str, data: bytes) -> bool:
    late.append((key, data))
    raise kv.StoreError('memory://', key, 'lost')

  inner.create = lose
  with pytest.raises(kv.StoreError):
    world.publish(pub, 4)

  def arrive(key: str, data: bytes) -> bool:
    inner.create = create
    assert create(*late[0])
    return create(key, data)

  inner.create = arrive
  assert world.publish(pub, 4).full_bytes
  assert client.read(manifest.key_of(4)) == late[0][1]
  record = world.Record(follower.Follower(client))
  for version in range(4, 7):
    if version > 4:
      world.publish(pub, version)
    record.add(version)
    assert record.poll().version == version
  assert record.follow.faults.total() == 0
  assert unused(client) == set()


def unused(store: kv.Store) -> set[str]:
  """Keys of data and full snapshots that no manifest leads to."""
  found = {*store.list(manifest.DATA), *store.list(manifest.FULLS)}
  for version in manifest.versions(store):
    made = manifest.read(store, version)
    found -= collect.entry(made, manifest.read_full(store, made)).keys
  return found


def test_restarted_publisher_counts_from_the_full_snapshot_beside_a_delta(
  store: kv.Store,
):
  pub = world.publisher(store)
  for version in range(6):
    world.publish(pub, version)
  pub = world.publisher(store, 'b')
  assert pub.restore(60) == 5
  fulls = [world.publish(pub, version).full_bytes for version in range(6, 13)]
  assert [v for v, size in enumerate(fulls, 6) if size] == [8, 12]


def test_full_snapshots_are_collected_with_their_versions(store: kv.Store):
  pub = world.publisher(store)
  store.write('weights/full/00000002-dead-1.json', b'of an attempt that died')
  store.write('weights/full/00000099-alive-1.json', b'its manifest comes next')
  for version in range(18):
    world.publish(pub, version)
  assert manifest.versions(store) == list(range(12, 18))
  left = collections.Counter(map(manifest.full_version, store.list(manifest.FULLS)))
  assert left == {12: 1, 16: 1, 99: 1}
  assert unused(store) == {'weights/full/00000099-alive-1.json'}
  record = world.Record(follower.Follower(store))
  record.add(17)
  assert record.poll().version == 17 and record.follow.faults.total() == 0


def test_data_of_a_full_snapshot_that_cannot_be_read_is_not_taken_for_an_orphan():
  """Damaged on the way, or just not listed yet: deleting would make it so for good."""
  store = faults.FaultStore(kv.open('memory://'))
  pub = world.publisher(store)
  for version in range(6):
    world.publish(pub, version)
  named = manifest.read(store, 4)
  client = store.beside()
  lost = {'stale': 2, 'flip': 2}

  def rule(operation: faults.Operation) -> faults.Fault | None:
    if operation.kind == 'read' and operation.key == named.full.key:
      kind = next((kind for kind, left in lost.items() if left), None)
      if kind is not None:
        lost[kind] -= 1
        return faults.Fault(kind)
    return None

  client.rule = rule
  other = world.publisher(client, 'b')
  assert world.publish(other, 6).full  # collects, and knows nothing of the others
  assert lost['stale'] < 2
  assert named.full.key in store.list(manifest.FULLS)
  full = manifest.read_full(store, named)
  assert {o.key for o in full.objects} <= set(store.list(manifest.DATA))


def test_conflict_at_a_full_snapshot_changes_nothing_of_the_winner(store: kv.Store):
  """The loser had stored both, and finds the manifest there."""
  a, b = world.publisher(store), world.publisher(store, 'b')
  for version in range(4):
    world.publish(a, version)
  assert b.restore(60) == 3
  theirs = {**world.weights(4), 'scale': np.array(9.0, world.BF16)}
  won = world.publish(a, 4)
  with pytest.raises(publisher.PublishConflict, match='another learner published'):
    b.publish(4, theirs, step=4, plan={})
  made = manifest.read(store, 4)
  assert (made.attempt, made.digest) == ('a', won.digest)
  assert manifest.read_full(store, made).attempt == 'a'
  for version in range(5, 9):
    world.publish(a, version)
  assert unused(store) == set()


def test_weights_written_to_between_delta_and_full_snapshot_are_noticed():
  """The two would be different weights under one version."""
  store = faults.FaultStore(kv.open('memory://'))
  pub = world.publisher(store)
  for version in range(4):
    world.publish(pub, version)
  tensors = world.weights(4)

  def rule(operation: faults.Operation) -> None:
    if operation.kind == 'write':
      tensors['embed'][0, 0] = 7

  store.rule = rule
  with pytest.raises(ValueError, match='written to while'):
    pub.publish(4, tensors, step=4, plan={})
  assert manifest.latest(store) == 3
