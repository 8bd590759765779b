"""A learner with adapters: they alone train, are held for, and go over the wire."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from swe17 import config, config_model, types
from swe17.learner import batching, checkpoint, optimizer, update
from swe17.learner import state as st
from swe17.model import lora
from swe17.model import params as p
from swe17.store import kv
from swe17.sync import apply, codec, follower, publisher
from tests import fixtures

FULL = dataclasses.replace(fixtures.MODEL, ngram=1)
LORA = dataclasses.replace(FULL, lora=config_model.Lora(rank=2, alpha=2.0))
ROWS, LENGTH, K = 4, 48, 8
SYNC = config.Sync(block_bytes=1 << 12)
QUICK = {'xla_backend_optimization_level': 0}
TX = optimizer.make(fixtures.OPTIM, optimizer.schedule(fixtures.OPTIM))


def params(cfg: config.Model) -> p.Params:
  """Random values of the base; A random and B zero as they are born."""
  made = fixtures.params(cfg=cfg, sharp=2.0)
  rng = np.random.default_rng(0)

  def born(adapter: lora.Adapter) -> lora.Adapter:
    a = np.float32(rng.normal(size=adapter.a_NIr.shape)) / np.sqrt(FULL.width)
    return dataclasses.replace(adapter, a_NIr=jnp.asarray(a), b_NrO=0 * adapter.b_NrO)

  def is_adapter(x) -> bool:
    return isinstance(x, lora.Adapter)

  return jax.tree.map(
    lambda x: born(x) if is_adapter(x) else x, made, is_leaf=is_adapter
  )


def fill(segments: list[types.Segment], version: int = -1) -> st.Batch:
  items = [batching.Item(s, (1.0, -0.5)[i % 2]) for i, s in enumerate(segments)]
  cfg = config.Batch(row_length=LENGTH, micro_rows=ROWS)
  return batching.fill(items, micro=1, cfg=cfg, K=K, denominator=100.0, version=version)


@functools.cache
def scripted() -> st.Batch:
  rng = np.random.default_rng(0)
  return fill([fixtures.segment(rng, (9, 20), (3, 8)) for _ in range(4)])


@functools.cache
def compiled(cfg: config.Model):
  """The update, by the exact sum."""
  loss = config.Loss()
  step = functools.partial(update.update, model=cfg, loss=loss, tx=TX, exact=True)
  jitted = jax.jit(step, donate_argnums=0, compiler_options=QUICK)
  return jitted.lower(st.init(params(cfg), TX), scripted()).compile()


@functools.cache
def stepped(cfg: config.Model, steps: int) -> st.State:
  if steps == 0:
    return st.init(params(cfg), TX)
  before = jax.tree.map(jnp.copy, stepped(cfg, steps - 1))
  state, metrics = compiled(cfg)(before, scripted())
  assert int(metrics['skipped_steps']) == 0 and float(metrics['update_rms']) > 0
  return state


def test_only_adapters_move_and_all_of_them_do():
  begin, end = stepped(LORA, 0).params, stepped(LORA, 2).params
  assert fixtures.same_bits(lora.base(begin), lora.base(end))
  before, after = lora.by_path(begin), lora.by_path(end)
  assert len(before) == 7
  for name, adapter in after.items():
    for x, y in zip(
      jax.tree.leaves(before[name]), jax.tree.leaves(adapter), strict=True
    ):
      assert not np.array_equal(x, y), name
  # B is zero at first, so nothing reaches A in the first step.
  first = lora.by_path(stepped(LORA, 1).params)
  for name, adapter in first.items():
    assert np.array_equal(adapter.a_NIr, before[name].a_NIr), name
    assert adapter.b_NrO.any(), name


def test_the_optimiser_holds_nothing_for_the_base():
  state = stepped(LORA, 0)
  held = sum(x.nbytes for x in jax.tree.leaves(state.opt))
  trained = sum(x.nbytes for x in jax.tree.leaves(lora.adapters(state.params)))
  counts = sum(x.nbytes for x in jax.tree.leaves(state.opt) if x.ndim == 0)
  assert held == 2 * trained + counts  # AdamW's two moments
  assert counts <= 16
  assert trained < 0.1 * sum(x.nbytes for x in jax.tree.leaves(state.params))


def test_the_gradient_of_the_base_is_not_computed():
  """By the compiler's own count: what the weights' gradients cost is gone."""

  def flops(cfg: config.Model) -> float:
    return compiled(cfg).cost_analysis()['flops']

  # A loop over layers is counted once.
  layer = p.count(p.abstract(FULL, fixtures.VOCAB).dense) / FULL.layers
  weights_gradient = 2 * layer * ROWS * LENGTH
  assert flops(FULL) - flops(LORA) > 0.9 * weights_gradient
  assert flops(LORA) < 0.75 * flops(FULL)


def published(pub: publisher.Publisher, cfg: config.Model, version: int):
  """(tensors, what publishing them came to)."""
  host = apply.to_host(stepped(cfg, version).params)
  return host, pub.publish(version, host, step=version, plan={})


def test_a_delta_holds_the_adapters_alone_and_the_sampler_has_the_learners_bytes():
  store = kv.open('memory://')
  pub = publisher.Publisher(store, SYNC, attempt='a')
  follow, device, sent = follower.Follower(store), None, 0
  for version in range(3):
    host, done = published(pub, LORA, version)
    staged = follow.poll()
    if version == 0:
      device = apply.from_host(staged.tensors, stepped(LORA, 0).params)
    else:
      device, sent = apply.apply(device, staged), done.bytes
      moved = {name for name in host if '/lora/' in name}
      moved = {n for n in moved if version == 2 or n.endswith('b_NrO')}
      assert staged.changed == moved and len(moved) == 7 * version
      for row in staged.manifest.tensors:
        for block in row.blocks:
          # What did not change has no bytes in any object.
          assert (block.coding == 'same') == (row.name not in moved), row.name
          assert (block.start == block.stop) == (row.name not in moved), row.name
    follow.commit(staged)
    digest = apply.device_digest(device, SYNC.block_bytes)
    assert digest == done.digest == codec.digest(host, SYNC.block_bytes)
  assert fixtures.same_bits(device, p.rounded(stepped(LORA, 2).params))

  pub = publisher.Publisher(kv.open('memory://'), SYNC, attempt='b')
  full = [published(pub, FULL, version)[1].bytes for version in range(3)][-1]
  print(f'bytes of a delta: {sent} with adapters, {full} in full')
  adapters = p.count(lora.adapters(stepped(LORA, 0).params))
  assert sent < 1.1 * 2 * adapters  # of a step that changes nearly all of them
  assert sent < 0.2 * full


def test_what_a_sampler_draws_the_learner_scores_at_the_numeric_floor():
  """Sampler: through the cache, from published bytes. Learner: from its masters."""
  state = stepped(LORA, 2)
  served = apply.from_host(apply.to_host(state.params), state.params)
  prompt_BT = np.random.default_rng(0).integers(0, fixtures.VOCAB, (ROWS, 8))
  sampling = types.Sampling(top_k=K)
  drawn = functools.partial(fixtures.sample, steps=16, sampling=sampling)
  batch = fill(drawn(served, prompt_BT.astype(np.int32)), version=0)
  _, metrics = compiled(LORA)(jax.tree.map(jnp.copy, state), batch)
  assert int(metrics['fresh_count']) == ROWS * 16
  assert abs(float(metrics['k3_same_version'])) < 1e-9
  # The base alone is another policy.
  other = dataclasses.replace(state, params=params(LORA))
  _, metrics = compiled(LORA)(jax.tree.map(jnp.copy, other), batch)
  assert float(metrics['k3_same_version']) > 1e-5


def test_imitation_and_a_penalty_to_a_reference_are_steps_of_adapters_too():
  """Traced only: they are the same sum and the same optimiser, of other losses."""
  begin = stepped(LORA, 0)
  loss = config.Loss(kl_weight=0.1)
  imitate = functools.partial(update.imitate, model=LORA, tx=TX)
  referred = functools.partial(update.update, model=LORA, tx=TX, loss=loss)
  reference = jax.tree.map(jnp.bfloat16, begin.params)
  for step, given in ((imitate, ()), (referred, (reference,))):
    end, metrics = jax.eval_shape(step, begin, scripted(), *given)
    assert jax.tree.structure(end) == jax.tree.structure(begin)
    assert {'loss', 'grad_norm'} <= metrics.keys()


def test_a_resumed_learner_has_base_adapters_and_moments_bit_for_bit(tmp_path):
  state = stepped(LORA, 2)
  writer = checkpoint.Checkpoints(str(tmp_path), config.Checkpoint())
  writer.save(2, state, {})
  writer.close()
  reader = checkpoint.Checkpoints(str(tmp_path), config.Checkpoint())
  found, _ = reader.restore(stepped(LORA, 0))
  reader.close()
  assert fixtures.same_bits(found, state)
  assert jax.tree.structure(found) == jax.tree.structure(state)
