"""A follower of some tensors: it reads their bytes, and next to none of the others'."""

import dataclasses

import numpy as np
import pytest

from swe17.store import kv
from swe17.sync import follower, manifest
from tests import sync_world as world


class Counting:
  """A store that counts the bytes that were read of data, and how often."""

  def __init__(self, inner: kv.Store):
    self.url, self.inner = inner.url, inner
    self.bytes, self.reads = 0, 0

  def __getattr__(self, name: str):
    return getattr(self.inner, name)

  def read(self, key: str, start: int | None = None, stop: int | None = None):
    data = self.inner.read(key, start, stop)
    if key.startswith(manifest.DATA):
      self.bytes, self.reads = self.bytes + len(data or b''), self.reads + 1
    return data


@pytest.mark.parametrize('object_bytes', [300, 1 << 20])
def test_follower_of_some_tensors_reads_their_ranges_only(object_bytes: int):
  cfg = dataclasses.replace(
    world.CFG, full_every=3, block_bytes=256, object_bytes=object_bytes
  )
  inner = kv.open('memory://')
  pub, store = world.publisher(inner, cfg=cfg), Counting(inner)
  follow = follower.Follower(store, names=['b', 'd'])
  rng = np.random.default_rng(0)
  tensors = {n: rng.integers(0, 2**16, 60_000, np.uint16) for n in 'abcd'}
  tensors['b'] = tensors['b'][:1000]
  for version in range(7):
    tensors = {n: a ^ (rng.random(a.size) < 0.01) for n, a in tensors.items()}
    done = pub.publish(version, tensors, step=version, plan={})
    if version == 4:
      continue  # the next poll takes two steps
    store.bytes = 0
    staged = follow.poll()
    assert staged is not None and staged.version == version
    follow.commit(staged)
    assert follow.tensors.keys() == {'b', 'd'} == staged.changed
    for name in 'bd':
      assert follow.tensors[name].tobytes() == tensors[name].tobytes()
    assert store.bytes == staged.bytes
    # Of a delta in one object, what lies between is less than another request costs.
    if version != 5 and (done.full or object_bytes == 300):
      assert staged.bytes < 0.45 * done.bytes  # 0.34 of the elements, and some gaps
  assert follow.faults.total() == 0


def test_damage_outside_the_ranges_of_a_sharded_follower_does_not_concern_it():
  store = kv.open('memory://')
  cfg = dataclasses.replace(world.CFG, object_bytes=64)
  world.publish(world.publisher(store, cfg=cfg), 0)
  made = manifest.read(store, 0)
  rows = {row.name: row for row in made.tensors}
  touched = made.objects[rows['embed'].blocks[0].object].key
  store.write(touched, b'x' * len(store.read(touched)))
  whole = follower.Follower(store)
  part = follower.Follower(store, names={'scale', 'empty'})
  assert whole.poll() is None and whole.faults['sha256'] > 0
  assert part.poll().tensors.keys() == {'scale', 'empty'}
  absent = follower.Follower(store, names={'scale', 'nonsense'})
  assert absent.poll() is None and absent.faults['names'] > 0
