"""Four followers of a sharded model on four virtual CPU devices, one a device.

Run by its test in a process of its own, since JAX fixes the number of devices when it
starts. The last line is JSON: of each version's bytes, the share that each one read.
"""

import json
import os

os.environ['XLA_FLAGS'] = (
  os.environ.get('XLA_FLAGS', '') + ' --xla_force_host_platform_device_count=4'
)

import jax
import jax.numpy as jnp
import numpy as np

from swe17 import config
from swe17.store import kv
from swe17.sync import apply, codec, follower, manifest, publisher, ranges

CFG = config.Sync(full_every=3, block_bytes=4096, object_bytes=50_000, keep_fulls=2)


class Counting:
  """A store that counts the bytes of data that were read."""

  def __init__(self, inner: kv.Store):
    self.url, self.inner, self.bytes = inner.url, inner, 0

  def __getattr__(self, name: str):
    return getattr(self.inner, name)

  def read(self, key: str, start: int | None = None, stop: int | None = None):
    data = self.inner.read(key, start, stop)
    self.bytes += len(data or b'') if key.startswith(manifest.DATA) else 0
    return data


def abstract(dtype: str) -> dict:
  """A model over a mesh: rows, columns, experts and both axes; one leaf on each."""
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ('fsdp', 'tensor'), axis_types=auto)

  def leaf(shape: tuple[int, ...], *axes) -> jax.ShapeDtypeStruct:
    sharding = jax.NamedSharding(mesh, jax.P(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  return {
    'rows': leaf((400, 200), ('fsdp', 'tensor')),
    'columns': leaf((200, 400), None, ('fsdp', 'tensor')),
    'both': leaf((200, 400), 'fsdp', 'tensor'),
    'experts': leaf((8, 50, 100), ('fsdp', 'tensor')),
    'scale': leaf((8,)),
  }


def grid_of(shapes: dict) -> dict:
  """As the mesh asks, and each expert a tensor of its own: two lie in each shard."""
  grid = dict(apply.grid(shapes))
  assert grid == {
    'rows': ((0, 4),),
    'columns': ((1, 4),),
    'both': ((0, 2), (1, 2)),
    'experts': ((0, 4),),
  }
  return {**grid, 'experts': ((0, 8),)}


ranges._GAP = 1 << 10  # these tensors are small


def run(dtype: str) -> list[list[float]]:
  shapes = abstract(dtype)
  grid = grid_of(shapes)
  store = kv.open('memory://')
  made = publisher.Publisher(store, CFG, attempt='a', grid=grid)
  readers = [Counting(store) for _ in jax.devices()]
  followers = [
    follower.Follower(reader, names=apply.needed(shapes, grid, [device]))
    for reader, device in zip(readers, jax.devices(), strict=True)
  ]
  rng = np.random.default_rng(0)
  learner = {
    name: rng.normal(size=leaf.shape).astype(np.float32)
    for name, leaf in shapes.items()
  }
  params, shares, whole = None, [], follower.Follower(store)
  for version in range(5):
    if version == 2:  # only one expert, and one row
      learner['experts'][5] += 1
      learner['rows'][0] += 1
    else:
      learner = {n: a * (1 + 1e-3 * rng.random(a.shape)) for n, a in learner.items()}
    learner = {n: a.astype(np.float32) for n, a in learner.items()}
    host = apply.to_host(jax.tree.map(jnp.asarray, learner))
    done = made.publish(version, host, step=version, plan={})
    for reader in readers:
      reader.bytes = 0
    staged = [f.poll() for f in followers]
    shares.append([reader.bytes / done.bytes for reader in readers])
    merged = merge(staged)
    if params is None:
      params = apply.from_host(merged.tensors, shapes, grid)
      params = apply.warm(params, merged, grid)
    else:
      if version == 2:
        assert merged.changed == {'experts@0:5/8', 'rows@0:0/4'}
      where = buffers(params['rows'])
      params = apply.apply(params, merged, grid)
      assert where == buffers(params['rows'])  # in place, on each device
    for f, s in zip(followers, staged, strict=True):
      f.commit(s)
    check(params, shapes, host)
    whole.commit(whole.poll())
    assert codec.digest(whole.tensors, CFG.block_bytes) == done.digest
  notice_damage(params, merged, grid)
  assert sum(f.faults.total() for f in followers) == 0
  return shares


def buffers(leaf: jax.Array) -> list[int]:
  return [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards]


def merge(staged: list[follower.Staged]) -> follower.Staged:
  """What four processes hold, as one: this test has all devices in one."""
  tensors, changed, sums = {}, set(), {}
  for s in staged:
    tensors |= s.tensors
    changed |= s.changed
    sums |= s.checksums
  first = staged[0]
  return follower.Staged(
    version=first.version,
    base=first.base,
    manifest=first.manifest,
    tensors=tensors,
    changed=frozenset(changed),
    checksums=sums,
    bytes=sum(s.bytes for s in staged),
  )


def check(params: dict, shapes: dict, host: dict[str, np.ndarray]) -> None:
  """The assembled arrays are the publisher's, bit for bit, and lie as they should."""
  for name, leaf in params.items():
    assert leaf.sharding.is_equivalent_to(shapes[name].sharding, leaf.ndim)
    assert leaf.dtype == shapes[name].dtype
    got = np.asarray(leaf).astype(host[name].dtype)
    assert got.tobytes() == host[name].tobytes(), name


def notice_damage(params: dict, staged: follower.Staged, grid: dict) -> None:
  """One element of one shard off: the piece is named."""
  params = {**params, 'experts': params['experts'].at[6, 3, 4].add(1)}
  quiet = follower.Staged(**{**vars(staged), 'changed': frozenset()})
  try:
    apply.apply(params, quiet, grid)
  except RuntimeError as e:
    assert 'experts@0:6/8' in str(e) and '@0:5/8' not in str(e)
  else:
    raise AssertionError('damage on a device was not noticed')


if __name__ == '__main__':
  print(json.dumps({dtype: run(dtype) for dtype in ('float32', 'bfloat16')}))
