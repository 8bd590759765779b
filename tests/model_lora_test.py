"""Adapters in the forward pass: nothing at first, then low-rank changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config, config_model
from swe17.model import cache as kv
from swe17.model import lora, sharding, transformer
from swe17.model import params as p
from tests import fixtures

V, T = 61, 24
_SMALL = {
  'layers': 2, 'width': 32, 'ffn': 48, 'heads': 4, 'head_dim': 12, 'rotary_dim': 8,
  'kv_heads': 2, 'ngram': 1, 'tied': False, 'unroll': False, 'attention_chunk': 16,
}  # fmt: skip
_MOE = config_model.Moe(
  experts=4, ffn=20, shared=1, first_dense=1, router='sigmoid', capacity=4.0
)
_ROUTED = dataclasses.replace(_MOE, first_dense=0)
_LATENT = config_model.Mla(q_rank=14, kv_rank=10, v_dim=6)
LORA = config_model.Lora(rank=3, alpha=6.0)
# Together they have every matrix there is, but for `q` of MLA (model_lora_export_test).
FAMILIES = {
  'gqa': config.Model(**_SMALL, bias=True, qk_norm=True, moe=_MOE),
  'mla': config.Model(
    **{**_SMALL, 'kv_heads': 4}, attention='mla', mla=_LATENT, moe=_ROUTED
  ),
}
QUICK = {'xla_backend_optimization_level': 0}


@pytest.fixture(params=list(FAMILIES))
def cfg(request) -> config.Model:
  return FAMILIES[request.param]


def adapted(cfg: config.Model) -> config.Model:
  return dataclasses.replace(cfg, lora=LORA)


@functools.cache
def weights(cfg: config.Model, zero: bool = False) -> p.Params:
  """Random values, the base's the same with adapters; `zero`: of B, as at the start."""

  def value(path: tuple, leaf: p.Leaf) -> jax.Array:
    name = jax.tree_util.keystr(path)
    rng = np.random.default_rng([ord(c) for c in name])
    x = rng.normal(leaf.mean, leaf.scale or 0.1, leaf.shape)
    return jnp.asarray(np.float32(0 * x if zero and name.endswith('.b_NrO') else x))

  return jax.tree_util.tree_map_with_path(value, p.abstract(cfg, V))


@functools.cache
def tokens() -> np.ndarray:
  return np.random.default_rng(1).integers(0, V, (2, T)).astype(np.int32)


@functools.partial(jax.jit, static_argnames='cfg', compiler_options=QUICK)
def scored(params: p.Params, trained: p.Tree, cfg: config.Model):
  """Logits, and the gradient of one loss by `trained`."""
  token_BT = tokens()
  position_BT = jnp.tile(jnp.arange(T, dtype=jnp.int32), (2, 1))

  def loss(trained):
    params_ = lora.moved(params, trained)
    h = transformer.apply(
      params_, token_BT, position_BT, jnp.ones_like(token_BT), cfg=cfg
    )
    logits_BTV = transformer.logits(params_, h)
    logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    picked = jnp.take_along_axis(logp_BTV, token_BT[:, 1:, None], axis=2)
    return -jnp.mean(picked), logits_BTV

  gradient, logits_BTV = jax.grad(loss, has_aux=True)(trained)
  return logits_BTV, gradient


def parts(cfg: config.Model, adapters: dict[str, lora.Adapter], leaf: str):
  """(A, B, of the leaf's axes: experts) of the adapter beside a leaf, in float64.

  Written from the layout of DeepSeek's files, apart from `lora.beside`.
  """
  layer, _, name = leaf.rpartition('/')
  H, r, U, Q = cfg.head_dim, cfg.rotary_dim, cfg.mla.v_dim, cfg.heads
  at = {
    'wq_NDQH': 'q', 'wk_NDCH': 'k', 'wv_NDCH': 'v', 'wo_NQHD': 'o', 'wo_NQUD': 'o',
    'wq_down_NDA': 'q_a', 'wq_NAQH': 'q_b' if cfg.mla.q_rank else 'q',
    'wkv_down_NDL': 'kv_a', 'wk_rope_NDr': 'kv_a', 'wk_NLQP': 'kv_b', 'wv_NLQU': 'kv_b',
    'wg_NDF': 'gate', 'wu_NDF': 'up', 'wd_NFD': 'down', 'wg_NEDF': 'expert_gate',
    'wu_NEDF': 'expert_up', 'wd_NEFD': 'expert_down',
  }  # fmt: skip
  if name not in at:
    return None
  adapter = adapters[f'{layer}/lora/{at[name]}']
  a, b = np.float64(adapter.a_NIr), np.float64(adapter.b_NrO)
  columns = np.arange(b.shape[-1])
  if at[name] == 'kv_a':
    columns = columns[:-r] if name == 'wkv_down_NDL' else columns[-r:]
  if at[name] == 'kv_b':
    each = columns.reshape(Q, H - r + U)
    columns = (each[:, : H - r] if name == 'wk_NLQP' else each[:, H - r :]).ravel()
  return at[name], a, b, columns


def merged(params: p.Params, cfg: config.Model) -> p.Params:
  """A tree without adapters: W + (alpha / r) A B, by NumPy in float64."""
  adapters, scale = lora.by_path(params), LORA.alpha / LORA.rank

  def value(path: tuple, w: jax.Array) -> jax.Array:
    leaf = jax.tree_util.keystr(path, simple=True, separator='/')
    found = parts(cfg, adapters, leaf)
    if found is None:
      return w
    _, a, b, columns = found
    high = scale * (a @ b)[..., columns]
    return jnp.asarray(np.float32(np.float64(w) + high.reshape(w.shape)))

  tree = jax.tree.structure(p.abstract(cfg, V))
  bare = jax.tree.unflatten(tree, jax.tree.leaves(lora.base(params)))
  return jax.tree_util.tree_map_with_path(value, bare)


def test_at_the_start_logits_are_those_of_the_base_bit_for_bit(cfg):
  base, both = weights(cfg), weights(adapted(cfg), zero=True)
  assert fixtures.same_bits(lora.base(both), base)
  assert len(lora.by_path(both)) > 5
  got, _ = scored(both, lora.trained(both), adapted(cfg))
  assert fixtures.same_bits(got, scored(base, base, cfg)[0])


def test_logits_and_gradients_are_those_of_the_merged_matrices(cfg):
  both = weights(adapted(cfg))
  plain = merged(both, cfg)
  logits, gradient = scored(both, lora.trained(both), adapted(cfg))
  want, dense = scored(plain, plain, cfg)
  assert np.abs(want - scored(weights(cfg), weights(cfg), cfg)[0]).max() > 0.1
  np.testing.assert_allclose(logits, want, rtol=0, atol=2e-5)

  # dA = s dW B^T, dB = s A^T dW, of every layer and expert; summed where shared.
  adapters, scale, sums = lora.by_path(both), LORA.alpha / LORA.rank, {}
  for path, dw in jax.tree_util.tree_leaves_with_path(dense):
    leaf = jax.tree_util.keystr(path, simple=True, separator='/')
    found = parts(cfg, adapters, leaf)
    if found is None:
      continue
    target, a, b, columns = found
    dw = np.float64(dw).reshape(*a.shape[:-1], -1)
    key = f'{leaf.rsplit("/", 1)[0]}/lora/{target}'
    da, db = sums.setdefault(key, (np.zeros(a.shape), np.zeros(b.shape)))
    da += scale * dw @ np.swapaxes(b[..., columns], -1, -2)
    db[..., columns] += scale * np.swapaxes(a, -1, -2) @ dw
  got = lora.by_path(gradient)
  assert got.keys() == sums.keys() == adapters.keys()
  for key, pair in sums.items():
    for x, y in zip(jax.tree.leaves(got[key]), pair, strict=True):
      assert np.abs(y).max() > 0, key
      assert np.abs(x - y).max() <= 1e-4 * np.abs(y).max(), key


def test_two_chunks_through_the_cache_score_as_the_whole(cfg):
  cfg, params = adapted(cfg), weights(adapted(cfg))
  step = jax.jit(
    transformer.apply_cached, static_argnames='cfg', compiler_options=QUICK
  )
  cache, found = kv.init(cfg, 2, T), []
  for start, end in ((0, T // 2), (T // 2, T)):  # one shape to compile
    position = np.tile(np.arange(start, end, dtype=np.int32), (2, 1))
    h, cache, _ = step(params, tokens()[:, start:end], position, cache, None, cfg=cfg)
    found.append(transformer.logits(params, h))
  want, _ = scored(params, lora.trained(params), cfg)
  np.testing.assert_allclose(np.concatenate(found, 1), want, rtol=0, atol=2e-5)


def test_the_base_is_drawn_as_without_adapters_and_b_is_zero():
  small = config.Model(layers=1, width=8, ffn=8, heads=2, kv_heads=1, head_dim=4,
                       rotary_dim=4, ngram=2)  # fmt: skip

  def born(cfg: config.Model) -> p.Params:
    init = jax.jit(lambda key: p.init(p.abstract(cfg, V), key), compiler_options=QUICK)
    return init(jax.random.key(0, impl='unsafe_rbg'))  # quick to compile

  some = dataclasses.replace(LORA, targets='q,k')
  made = born(dataclasses.replace(small, lora=some))
  assert fixtures.same_bits(lora.base(made), born(small))
  for name, adapter in lora.by_path(made).items():
    assert not adapter.b_NrO.any() and adapter.scale == 2.0, name
    deviation = np.std(adapter.a_NIr) * np.sqrt(adapter.a_NIr.shape[1])
    assert 0.5 < deviation < 1.6, name
  a_q, a_k = (made.dense.attn.lora[name].a_NIr for name in 'qk')
  assert not np.array_equal(a_q, a_k)


def test_only_the_targets_have_adapters_and_no_other_leaf_is_there():
  some = config_model.Lora(rank=2, targets='q, expert_down')
  tree = p.abstract(dataclasses.replace(FAMILIES['gqa'], lora=some), V)
  want = ['dense/attn/lora/q', 'moe/attn/lora/q', 'moe/mlp/lora/expert_down']
  found = lora.by_path(tree)
  assert sorted(found) == want
  assert found['moe/mlp/lora/expert_down'].a_NIr.shape == (1, 4, 20, 2)
  plain = p.abstract(FAMILIES['gqa'], V)
  assert p.count(tree) - p.count(plain) == sum(p.count(x) for x in found.values())
  assert not lora.present(plain) and lora.trained(plain) is plain


def test_adapters_are_split_as_their_matrices_and_ranks_stay_whole():
  tree = p.abstract(adapted(FAMILIES['gqa']), V)
  sizes = {'fsdp': 2, 'expert': 2, 'tensor': 2}

  def of(leaf: p.Leaf) -> jax.P:
    return sharding.spec(leaf.axes, leaf.shape, sizes)

  found = lora.by_path(jax.tree.map(of, tree))
  assert jax.tree.leaves(found['moe/attn/lora/q']) == [
    jax.P(None, ('fsdp', 'expert'), None),
    jax.P(None, None, 'tensor'),
  ]
  assert jax.tree.leaves(found['moe/mlp/lora/expert_down']) == [
    jax.P(None, 'expert', 'tensor', None),
    jax.P(None, 'expert', None, 'fsdp'),
  ]


@pytest.mark.parametrize(
  ('settings', 'says'),
  [
    ({'rank': -1}, 'model.lora.rank: got -1'),
    ({'alpha': 0.0}, 'model.lora.alpha: got 0.0'),
    ({'targets': 'q,kqv'}, "model.lora.targets: got 'kqv', want one of all, q, k"),
    ({'targets': ''}, "model.lora.targets: got ''"),
    ({'targets': 'q,q'}, "model.lora.targets: got 'q,q', want each once"),
    ({'targets': 'q,kv_a'}, "model.lora.targets: got 'kv_a', want one of all, q, k, v"),
    ({'targets': 'expert_up'}, "model.lora.targets: got 'expert_up'"),
  ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, says):
  with pytest.raises(ValueError, match=says):
    config.Model(lora=config_model.Lora(**{'rank': 4, **settings}))


def test_a_bias_that_moves_beside_a_frozen_base_is_refused():
  moe = dataclasses.replace(_MOE, bias_speed=0.1)
  with pytest.raises(ValueError, match=r'model\.moe\.bias_speed: got 0\.1, want 0'):
    dataclasses.replace(FAMILIES['gqa'], moe=moe, lora=LORA)


def test_adapters_without_a_model_to_adapt_are_refused():
  with pytest.raises(ValueError, match=r'model\.lora\.rank=3 without model\.source'):
    config.Config(model=config.Model(lora=LORA))
