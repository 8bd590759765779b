"""Publisher: versions without a gap, each whole, each once, on the right base."""

import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.store import faults, kv
from swe17.sync import apply, codec, follower, manifest, pieces, publisher
from tests import sync_publisher_main as program
from tests import sync_world as world

no_waiting, store = world.no_waiting, world.store


def test_publisher_that_does_not_know_the_base_begins_with_a_full_snapshot(
  store: kv.Store,
):
  record = world.Record(follower.Follower(store))
  pub = world.publisher(store)
  for version in range(7):
    if version == 2:
      pub = world.publisher(store, 'b')
    record.add(version)
    done = world.publish(pub, version)
    assert done.full == (version in (0, 2))
    assert (done.full_bytes is not None) == (version in (0, 2, 6))
    assert record.poll().version == version
  assert record.follow.faults.total() == 0


def test_restarted_publisher_goes_on_from_what_was_published_last(store: kv.Store):
  """Full snapshots stay `full_every` apart, whoever makes them, beside deltas."""
  record = world.Record(follower.Follower(store))
  pub = world.publisher(store)
  for version in range(12):
    if version in (2, 3, 7):
      pub = world.publisher(store, f'b{version}')
      assert pub.restore(60) == version - 1
    record.add(version)
    done = world.publish(pub, version)
    assert done.full == (version == 0)
    assert (done.full_bytes is not None) == (version in (0, 4, 8))
    assert record.poll().version == version
    late = world.Record(follower.Follower(store))
    late.digests = record.digests
    assert late.poll().version == version
  assert record.follow.faults.total() == 0


def test_restored_base_is_what_was_published_not_what_was_computed(store: kv.Store):
  """A restart from a checkpoint two steps older: the delta is large, and right."""
  record = world.Record(follower.Follower(store))
  pub = world.publisher(store)
  for version in range(3):
    record.add(version)
    world.publish(pub, version)
  record.poll()
  pub = world.publisher(store, 'b')
  assert pub.restore(60) == 2
  record.add(3, world.weights(1))
  assert not pub.publish(3, world.weights(1), step=1, plan={}).full
  assert record.poll().version == 3


@pytest.mark.parametrize('harm', ['data', 'manifest', 'none', 'slow', 'cut'])
def test_base_that_is_not_restored_costs_a_full_snapshot_and_is_logged(
  store: kv.Store, harm: str, caplog: pytest.LogCaptureFixture
):
  client = faults.FaultStore(store)
  done = threading.Event()
  if harm != 'none':
    pub = world.publisher(store)
    for version in range(2):
      world.publish(pub, version)
  if harm in ('data', 'manifest'):
    key = manifest.key_of(1)
    if harm == 'data':
      key = manifest.read(store, 1).objects[0].key
    store.write(key, store.read(key)[:-3])
  if harm == 'slow':
    client.rule = lambda o: done.wait(60) and None
  if harm == 'cut':
    client.rule = lambda o: faults.Fault('drop_before')
  pub = world.publisher(client, 'b')
  assert pub.restore(0.01 if harm == 'slow' else 60) is None
  done.set()
  client.rule = faults.never
  if harm != 'none':
    assert 'next' in caplog.text and 'full' in caplog.text
  assert world.publish(pub, 0 if harm == 'none' else 2).full


def test_failed_publish_is_called_again_and_keeps_its_base():
  client = faults.FaultStore(kv.open('memory://'))
  pub, record = world.publisher(client), world.Record(follower.Follower(client._inner))
  for version in range(12):
    record.add(version)
    if version % 4 == 2:
      # The request is lost, or everything went well but for the replies.
      kind = 'drop_before' if version < 6 else 'drop_after'
      client.rule = lambda o, kind=kind: faults.Fault(kind)
      for _ in range(2):
        with pytest.raises(kv.StoreError):
          world.publish(pub, version)
      client.rule = faults.never
    done = world.publish(pub, version)
    assert done.full == (version == 0)
    assert (done.full_bytes is not None) == (version % 4 == 0)
    assert record.poll().version == version
  assert record.follow.faults.total() == 0


def test_manifest_that_was_created_late_by_an_earlier_call_is_the_version():
  """A create that was given up on arrives after all, before its repetition."""
  client = faults.FaultStore(kv.open('memory://'))
  pub = world.publisher(client)
  world.publish(pub, 0)
  late: list[tuple[str, bytes]] = []

  def lose(operation: faults.Operation) -> faults.Fault | None:
    return faults.Fault('drop_before') if operation.kind == 'create' else None

  inner_create = client._inner.create
  client.rule = lose
  real = client.create
  client.create = lambda key, data: late.append((key, data)) or real(key, data)
  with pytest.raises(kv.StoreError):
    world.publish(pub, 1)
  client.rule = faults.never
  arrived = iter([True])

  def create(key: str, data: bytes) -> bool:
    if next(arrived, False):
      assert inner_create(*late[0])
    return real(key, data)

  client.create = create
  done = world.publish(pub, 1)
  assert done.digest == codec.digest(world.weights(1), 64)
  assert world.publish(pub, 2).full is False


def test_version_lies_in_several_objects(store: kv.Store):
  cfg = dataclasses.replace(world.CFG, object_bytes=100)
  pub, record = world.publisher(store, cfg=cfg), world.Record(follower.Follower(store))
  for version in range(6):
    record.add(version)
    done = world.publish(pub, version)
    made = manifest.read(store, version)
    assert sum(entry.size for entry in made.objects) == done.bytes
    assert record.poll().version == version
    if done.full:
      assert len(made.objects) > 2
      assert [e.key.rsplit('-', 1)[0] for e in made.objects] == [
        f'weights/data/{version:08d}-a'
      ] * len(made.objects)


def test_sharded_tensors_are_published_in_pieces(store: kv.Store):
  grid = {'embed': ((0, 3), (1, 2)), 'layer/w': ((0, 5),)}
  pub = publisher.Publisher(store, world.CFG, attempt='a', grid=grid)
  follow = follower.Follower(store)
  for version in range(6):
    world.publish(pub, version)
    follow.commit(follow.poll())
    assert len(follow.tensors) == 6 + 5 + 3
    whole = pieces.join(follow.tensors)
    for name, array in world.weights(version).items():
      assert whole[name].tobytes() == array.tobytes()
      assert whole[name].shape == array.shape
  assert follow.faults.total() == 0


def test_plan_with_a_wrong_type_is_refused_before_anything_is_stored(store: kv.Store):
  pub = world.publisher(store)
  for plan, want in (({'step': '3'}, r'plan\.step'), ({'done': 1}, r'plan\.done')):
    with pytest.raises(ValueError, match=want):
      pub.publish(0, world.weights(0), step=0, plan=plan)
  assert store.list('') == []


def test_asked_for_or_reshaped_weights_are_published_in_full(store: kv.Store):
  pub, record = world.publisher(store), world.Record(follower.Follower(store))
  world.publish(pub, 0)
  assert world.publish(pub, 1, full=True).full
  grown = {**world.weights(1), 'extra': np.ones(3, world.BF16)}
  record.add(2, grown)
  assert pub.publish(2, grown, step=2, plan={}).full  # on another base than it has
  assert not pub.publish(3, grown, step=3, plan={}).full
  record.add(3, grown)
  assert record.poll().version == 3


def test_weights_that_are_not_finite_are_never_published(store: kv.Store):
  pub = world.publisher(store)
  world.publish(pub, 0)
  for bits in (0x7FC0, 0x7F80, 0xFF80, 0x7F81):
    bad = world.weights(1)
    bad['layer/w'].view(np.uint16)[7] = bits
    with pytest.raises(ValueError, match="'layer/w' has 1 of 50 values"):
      pub.publish(1, bad, step=1, plan={})
  with pytest.raises(ValueError, match='not finite'):
    pub.publish(1, {'w': np.array([np.inf], np.float32)}, step=1, plan={})
  assert publisher.latest(store) == 0
  assert len(store.list(manifest.DATA)) == 1
  assert not world.publish(pub, 1).full


def test_versions_leave_no_gap(store: kv.Store):
  pub = world.publisher(store)
  with pytest.raises(ValueError, match='got 1, want 0'):
    world.publish(pub, 1)
  world.publish(pub, 0)
  with pytest.raises(ValueError, match='got 2, want 1'):
    world.publish(pub, 2)
  assert publisher.latest(store) == 0


def test_published_version_is_not_published_again(store: kv.Store):
  pub = world.publisher(store)
  world.publish(pub, 0)
  before = {key: store.read(key) for key in store.list('')}
  with pytest.raises(publisher.PublishConflict, match="attempt 'a'"):
    world.publish(world.publisher(store, 'b'), 0)
  with pytest.raises(publisher.PublishConflict):
    pub.publish(0, world.weights(5), step=5, plan={})
  # The same call once more, after a lost reply say, is no conflict.
  assert world.publish(pub, 0).digest == codec.digest(world.weights(0), 64)
  assert {key: store.read(key) for key in store.list('')} == before
  assert not world.publish(pub, 1).full


def test_version_that_was_collected_is_not_published_again(store: kv.Store):
  pub = world.publisher(store, cfg=dataclasses.replace(world.CFG, full_every=1))
  for version in range(5):
    world.publish(pub, version)
  assert manifest.versions(store) == [3, 4]
  with pytest.raises(publisher.PublishConflict, match='older than the newest, 4'):
    world.publish(world.publisher(store, 'b'), 0)


def test_weights_written_to_after_publishing_are_noticed(store: kv.Store):
  pub, tensors = world.publisher(store), world.weights(0)
  pub.publish(0, tensors, step=0, plan={})
  tensors['embed'][0, 0] = 7
  with pytest.raises(ValueError, match="'embed' was written to"):
    world.publish(pub, 1)
  assert world.publish(pub, 1).full


def test_no_key_is_written_twice():
  """A bucket takes about one write a second and key: every name is fresh."""
  store = faults.FaultStore(kv.open('memory://'), faults.paced(1.0, clock=lambda: 0.0))
  pub = world.publisher(store)
  for version in range(60):
    world.publish(pub, version)
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
  world.publish(world.publisher(store), 0)
  assert len(writes) == len(set(writes)) == 3
  record = world.Record(follower.Follower(store))
  record.add(0)
  assert record.poll() is not None


def test_of_two_publishers_one_wins_each_version(store: kv.Store):
  """Racing learners: each version is one attempt's, whole, and nobody overwrites."""
  gate = threading.Barrier(2)

  def race(attempt: str) -> dict[int, str]:
    won = {}
    pub = world.publisher(store, attempt)
    for version in range(8):
      gate.wait(timeout=60)
      tensors = world.weights(version)
      tensors['scale'] = np.array(2.0 if attempt == 'a' else 3.0, world.BF16)
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


def test_publisher_in_the_background_is_safe_from_donated_training_steps():
  """CASES 3.5: three steps donate the weights while the store holds publishing up."""
  gate = threading.Event()
  inner = kv.open('memory://')

  def hold(operation: faults.Operation) -> None:
    assert gate.wait(timeout=60)

  pub = world.publisher(faults.FaultStore(inner, hold))
  step = jax.jit(lambda p: jax.tree.map(lambda x: x * 1.5 + 1, p), donate_argnums=0)
  state, want = world.params(jnp.float32), {}
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


def test_of_two_learner_processes_on_one_run_exactly_one_goes_on(tmp_path):
  """Twenty versions over a folder; the other process ends, and says why."""
  url, go = f'file://{tmp_path}/store', tmp_path / 'go'
  command = [sys.executable, program.__file__, url, str(go), '20']
  env = {**os.environ, 'PYTHONPATH': str(pathlib.Path(__file__).parent.parent)}
  racing = [
    subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True, env=env)
    for name in 'ab'
  ]
  try:
    while len(list(tmp_path.glob('ready-*'))) < 2:
      assert all(process.poll() is None for process in racing)
      time.sleep(0.01)
    go.touch()
    said = [process.communicate(timeout=120)[1] for process in racing]
  finally:
    for process in racing:
      process.kill()
  codes = [process.returncode for process in racing]
  assert sorted(codes) == [0, 2], said
  # Warnings may stand before it: the winner collects what the loser just wrote.
  *_, loser = lines = said[codes.index(2)].strip().splitlines()
  assert loser.startswith('error: version ')
  assert 'another learner' in loser or 'two learners on one run' in loser
  assert sum(line.startswith('error: ') for line in lines) == 1
  reading = kv.open(url)
  winner = 'ab'[codes.index(0)]
  assert manifest.latest(reading) == 19
  follow = follower.Follower(reading)
  follow.commit(follow.poll())
  assert follow.version == 19 and follow.faults.total() == 0
  assert follow.manifest.digest == codec.digest(program.weights(19, winner), 64)
  assert follow.manifest.attempt == winner
