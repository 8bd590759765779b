"""The device holds what was published, checked before it is served."""

import dataclasses
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config
from swe17.store import kv
from swe17.sync import apply, codec, follower, publisher
from tests import sync_world as world

no_waiting, store = world.no_waiting, world.store


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float32])
def test_device_holds_what_was_published(dtype):
  """CASES 4.10: one full snapshot sets every leaf, each delta exactly its own."""
  store = kv.open('memory://')
  pub = world.publisher(store, cfg=dataclasses.replace(world.CFG, full_every=99))
  follow = follower.Follower(store)
  learner = world.params(jnp.float32)
  device = jax.tree.map(lambda x: (x * 0 + 5).astype(x.dtype), world.params(dtype))
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
      lambda x: x.dtype, world.params(dtype)
    )


def test_update_reuses_the_buffers_and_leaves_the_host_copy_alone():
  store = kv.open('memory://')
  pub, follow = world.publisher(store), follower.Follower(store)
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
  params = world.params(jnp.float32)
  host = apply.to_host(params)
  for block_bytes in (16, 64, 1 << 20):
    sums = apply.device_checksum(params, block_bytes)
    assert sums.keys() == host.keys()
    for name, array in host.items():
      np.testing.assert_array_equal(sums[name], codec.checksum(array, block_bytes))


def test_device_that_does_not_hold_the_staged_bytes_is_noticed():
  store = kv.open('memory://')
  follow = follower.Follower(store)
  params = world.params()
  world.publisher(store).publish(0, apply.to_host(params), step=0, plan={})
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
  world.publisher(store).publish(0, apply.to_host(world.params()), step=0, plan={})
  staged = follow.poll()
  params = world.params()
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


def test_a_swap_after_warming_compiles_nothing_and_says_so_by_its_count():
  store = kv.open('memory://')
  pub, follow = world.publisher(store), follower.Follower(store)
  learner = world.params(jnp.float32)
  pub.publish(0, apply.to_host(learner), step=0, plan={})
  staged = follow.poll()
  device = apply.from_host(staged.tensors, learner)
  before = apply.to_host(device)
  device = apply.warm(device, staged)
  follow.commit(staged)
  for name, array in apply.to_host(device).items():
    assert array.tobytes() == before[name].tobytes()
  compiled = [f._cache_size() for f in (apply._overwrite, apply._checksums)]
  for version in range(1, 6):  # deltas and a full snapshot
    learner = jax.tree.map(lambda x: x * 2, learner)
    pub.publish(version, apply.to_host(learner), step=version, plan={})
    staged = follow.poll()
    device = apply.apply(device, staged)
    follow.commit(staged)
  assert compiled == [f._cache_size() for f in (apply._overwrite, apply._checksums)]


def test_warming_notices_a_device_that_was_loaded_wrongly():
  store = kv.open('memory://')
  world.publisher(store).publish(0, apply.to_host(world.params()), step=0, plan={})
  staged = follower.Follower(store).poll()
  bad = {**staged.checksums, 'embed': staged.checksums['embed'] + 1}
  staged = dataclasses.replace(staged, checksums=bad)
  with pytest.raises(RuntimeError, match=r"does not hold .* \['embed'\]"):
    apply.warm(apply.from_host(staged.tensors, world.params()), staged)


FACTORS = {
  'codec': ('ulp', 'xor'),
  'full_every': (1, 2, 99),
  'block_bytes': (16, 1 << 20),
  'object_bytes': (32, 1 << 20),
  'threads': (1, 3),
  'keep_fulls': (2, 3),
  'dtype': ('bfloat16', 'float32'),
  'cut': ({}, {'layer/w': ((0, 3),), 'embed': ((1, 2),)}),
  'restart': (False, True),
}


def covering(strength: int) -> list[dict]:
  """Rows in which every choice of values for any `strength` factors occurs: greedy."""
  rng, names = random.Random(0), list(FACTORS)
  open_ = {
    tuple(zip(chosen, values, strict=True))
    for chosen in itertools.combinations(range(len(names)), strength)
    for values in itertools.product(*(range(len(FACTORS[names[i]])) for i in chosen))
  }
  rows = []
  while open_:
    best: tuple[int, ...] = ()
    gain = 0
    for _ in range(60):
      seed = dict(rng.choice(sorted(open_)))
      row = tuple(
        seed.get(i, rng.randrange(len(FACTORS[name]))) for i, name in enumerate(names)
      )
      new = sum(all(row[i] == v for i, v in entry) for entry in open_)
      if new > gain:
        best, gain = row, new
    open_ = {e for e in open_ if not all(best[i] == v for i, v in e)}
    rows.append({n: FACTORS[n][v] for n, v in zip(names, best, strict=True)})
  return rows


def test_after_each_publish_the_device_is_the_learners_cast_under_any_settings():
  """CASES 4.9: every choice of values for any three settings, three steps each."""
  rows = covering(3)
  assert len(rows) < 60
  for row in rows:
    dtype, cut, restart = row.pop('dtype'), row.pop('cut'), row.pop('restart')
    cfg, store = config.Sync(**row), kv.open('memory://')
    pub = publisher.Publisher(store, cfg, attempt='a', grid=cut)
    follow = follower.Follower(store, threads=cfg.threads)
    learner, device, hashes = world.params(jnp.float32), None, []
    for version in range(4):
      if restart and version == 2:
        pub = publisher.Publisher(store, cfg, attempt='b', grid=cut)
        assert pub.restore(60) == 1
      host = apply.to_host(learner)
      pub.publish(version, host, step=version, plan={})
      staged = follow.poll()
      assert staged is not None and staged.version == version
      if device is None:
        device = apply.from_host(staged.tensors, world.params(dtype), cut)
        device = apply.warm(device, staged, cut)
      else:
        device = apply.apply(device, staged, cut)
      follow.commit(staged)
      hashes.append(apply.device_digest(device, cfg.block_bytes))
      assert hashes[-1] == codec.digest(host, cfg.block_bytes), row
      learner = jax.tree.map(lambda x: x * 2 + 1, learner)
    assert len(set(hashes)) == 4, row
