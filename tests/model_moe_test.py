"""A layer of experts against loops in float64: values, gradients, replay, NVFP4."""

import dataclasses
import functools

import jax
from jax.extend import core
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import pytest

from swe17 import config_model
from swe17.model import moe
from swe17.model import params as p
from tests import ops_quantize_test as nvfp4
from tests import ops_routing_test as loops

B, T, D, F, E, K = 2, 3, 32, 16, 12, 3
SOFTMAX = config_model.Moe(experts=E, active=K, ffn=F)
SIGMOID = dataclasses.replace(
  SOFTMAX, router='sigmoid', groups=4, best_groups=2, scale=2.5, shared=2
)
MIX = jax.jit(moe.mix, static_argnums=2)
FAMILIES = {
  'softmax': SOFTMAX,
  'whole softmax': dataclasses.replace(SOFTMAX, renormalise=False),
  'sigmoid': SIGMOID,
  'plain sigmoid': dataclasses.replace(SIGMOID, renormalise=False, shared=1),
  'no groups': dataclasses.replace(SIGMOID, groups=1, best_groups=1, shared=0),
}


def leaves(cfg: config_model.Moe, seed: int = 0) -> p.Moe:
  rng = np.random.default_rng(seed)

  def w(*shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.float32(rng.normal(size=shape) * scale / np.sqrt(shape[-2])))

  shared = None
  if cfg.shared:
    S = cfg.shared * F
    shared = p.Dense(wg_NDF=w(D, S), wu_NDF=w(D, S), wd_NFD=w(S, D))
  return p.Moe(
    router_NDE=w(D, E, scale=2.0),
    wg_NEDF=w(E, D, F),
    wu_NEDF=w(E, D, F),
    wd_NEFD=w(E, F, D),
    # The biased scores are those that the loop of the router's test adds.
    bias_NE=jnp.asarray(loops.BIAS) if cfg.router == 'sigmoid' else None,
    shared=shared,
  )


def tokens(seed: int = 1) -> jax.Array:
  return jnp.asarray(np.float32(np.random.default_rng(seed).normal(size=(B, T, D))))


def swiglu64(x, wg, wu, wd) -> np.ndarray:
  gate = x @ wg
  return (gate / (1 + np.exp(-gate)) * (x @ wu)) @ wd


def mix64(x_BTD, layer: p.Moe, cfg: config_model.Moe, recorded=None):
  """(y, ids) one token and one expert at a time."""
  w = jax.tree.map(lambda a: np.asarray(a, np.float64), layer)
  x_XD = np.asarray(x_BTD, np.float64).reshape(-1, D)
  y, chosen = np.zeros_like(x_XD), []
  for t, x in enumerate(x_XD):
    s_E, given = x @ w.router_NDE, None
    if recorded is not None and (recorded[t] >= 0).all():
      given = recorded[t].tolist()
    if cfg.router == 'softmax':
      ids, g = loops.softmax64(s_E, cfg.renormalise, given)
    else:
      about = (cfg.groups, cfg.best_groups, cfg.renormalise, cfg.scale)
      ids, g = loops.sigmoid64(s_E, *about, given)
    chosen.append(ids)
    for e, weight in zip(ids, g, strict=True):
      y[t] += weight * swiglu64(x, w.wg_NEDF[e], w.wu_NEDF[e], w.wd_NEFD[e])
    if w.shared is not None:
      y[t] += swiglu64(x, w.shared.wg_NDF, w.shared.wu_NDF, w.shared.wd_NFD)
  return y.reshape(x_BTD.shape), np.reshape(chosen, (*x_BTD.shape[:2], K))


def any_routes(seed: int = 3) -> np.ndarray:
  """[B T, K] recorded ids of which the second token has none."""
  rng = np.random.default_rng(seed)
  ids = np.array([rng.permutation(E)[:K] for _ in range(B * T)], np.int32)
  ids[1] = -1
  return ids


@pytest.mark.parametrize('replay', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_layer_of_experts_equals_the_loop(family, replay):
  cfg = FAMILIES[family]
  x_BTD, layer = tokens(), leaves(cfg)
  recorded = any_routes() if replay else None
  given = None if recorded is None else jnp.asarray(recorded.reshape(B, T, K))
  y_BTD, ids_BTK = MIX(x_BTD, layer, cfg, given)
  want_BTD, _ = mix64(x_BTD, layer, cfg, recorded)
  np.testing.assert_allclose(y_BTD, want_BTD, atol=3e-6)
  # Beside: what the router chooses by itself, whatever was replayed.
  np.testing.assert_array_equal(ids_BTK, mix64(x_BTD, layer, cfg)[1])


@pytest.mark.parametrize('replay', [False, True])
@pytest.mark.parametrize('family', FAMILIES)
def test_gradients_equal_the_slopes_of_the_loop(family, replay):
  """Along a random direction of each leaf and of the tokens, in float64."""
  cfg, h = FAMILIES[family], 1e-6
  x_BTD, layer = tokens(), leaves(cfg)
  recorded = any_routes() if replay else None
  given = None if recorded is None else jnp.asarray(recorded.reshape(B, T, K))
  rng = np.random.default_rng(5)
  dy_BTD = np.float32(rng.normal(size=x_BTD.shape))

  def loss(both: dict) -> jax.Array:
    return jnp.sum(MIX(both['x'], both['layer'], cfg, given)[0] * dy_BTD)

  def loss64(both: dict) -> float:
    return float((mix64(both['x'], both['layer'], cfg, recorded)[0] * dy_BTD).sum())

  both = {'x': x_BTD, 'layer': layer}
  grad, tree = jax.tree.flatten(jax.grad(loss)(both))
  values = [np.asarray(v, np.float64) for v in jax.tree.leaves(both)]
  for i, leaf in enumerate(grad):
    way = rng.normal(size=leaf.shape)
    ends = []
    for sign in (1, -1):
      moved = [v + sign * h * way if j == i else v for j, v in enumerate(values)]
      ends.append(loss64(jax.tree.unflatten(tree, moved)))
    slope, got = (ends[0] - ends[1]) / (2 * h), float((np.asarray(leaf) * way).sum())
    assert abs(got - slope) <= 3e-5 * (1 + abs(slope)), jax.tree.unflatten(
      tree, range(len(grad))
    )


def test_jax_finds_the_same_gradient_by_its_own_differences():
  given = jnp.asarray(any_routes().reshape(B, T, K))
  x_BTD, layer = tokens(), leaves(SIGMOID)
  # With the selection given nothing jumps.
  fixed = jnp.where(given >= 0, given, jnp.arange(K)[None, None, :])

  def fn(x, router, wg):
    moved = dataclasses.replace(layer, router_NDE=router, wg_NEDF=wg)
    return moe.mix(x, moved, SIGMOID, fixed)[0]

  args = (x_BTD, layer.router_NDE, layer.wg_NEDF)
  check_grads(fn, args, order=1, modes=['rev'], atol=1e-2, rtol=1e-2, eps=1e-2)


def test_the_router_keeps_its_gradient_under_replay_and_the_bias_has_none():
  given = jnp.asarray(any_routes().reshape(B, T, K))
  x_BTD, layer = tokens(), leaves(SIGMOID)

  def loss(layer: p.Moe) -> jax.Array:
    return jnp.sum(jnp.square(moe.mix(x_BTD, layer, SIGMOID, given)[0]))

  grad = jax.grad(loss)(layer)
  used = np.unique(any_routes()[any_routes()[:, 0] >= 0])
  size_E = np.abs(np.asarray(grad.router_NDE)).max(axis=0)
  assert (size_E[used] > 1e-4).all()
  assert grad.bias_NE is not None and not np.asarray(grad.bias_NE).any()


def primitives(jaxpr) -> set[str]:
  """Names of all primitives of a jaxpr and of what is nested in it."""
  found: set[str] = set()
  for eqn in jaxpr.eqns:
    found.add(eqn.primitive.name)
    for inner in core.jaxprs_in_params(eqn.params):
      found |= primitives(inner)
  return found


@pytest.mark.parametrize('family', FAMILIES)
def test_the_way_back_scatters_nothing(family):
  cfg = FAMILIES[family]
  layer, given = leaves(cfg), jnp.asarray(any_routes().reshape(B, T, K))

  def loss(layer: p.Moe, x_BTD: jax.Array) -> jax.Array:
    return jnp.sum(moe.mix(x_BTD, layer, cfg, given)[0])

  made = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(layer, tokens())
  names = primitives(made.jaxpr)
  assert not [name for name in names if 'scatter' in name]
  assert any('ragged_dot' in name for name in names) and 'gather' in names


def test_the_look_for_scatters_would_find_one():
  made = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(x[jnp.array([0, 0])] ** 2)))
  assert 'scatter-add' in primitives(made(jnp.ones(3)).jaxpr)


@pytest.mark.parametrize('to', [0, 7, E - 1])
def test_no_row_is_dropped_when_all_go_to_the_same_experts(to):
  layer, x_BTD = leaves(SOFTMAX), tokens()
  ids = np.array([(to + i) % E for i in range(K)], np.int32)
  recorded = np.broadcast_to(ids, (B * T, K))
  got, _ = moe.mix(x_BTD, layer, SOFTMAX, jnp.asarray(recorded.reshape(B, T, K)))
  want, _ = mix64(x_BTD, layer, SOFTMAX, recorded)
  np.testing.assert_allclose(got, want, atol=3e-6)
  assert np.abs(want).max(axis=-1).min() > 0.1


def test_a_batch_of_tokens_is_its_tokens_one_by_one():
  layer, x_BTD = leaves(SIGMOID), tokens()
  mix = jax.jit(functools.partial(moe.mix, cfg=SIGMOID))
  whole, _ = mix(x_BTD, layer)
  for b in range(B):
    for t in range(T):
      alone, _ = mix(x_BTD[b : b + 1, t : t + 1], layer)
      np.testing.assert_allclose(alone[0, 0], whole[b, t], atol=3e-6)


@pytest.mark.parametrize('which', ['weights', 'both'])
def test_quantised_experts_multiply_the_loops_nvfp4_values(which):
  """Weights by one scale a matrix, tokens by one each; router and shared layer not."""
  cfg = dataclasses.replace(SIGMOID, quantise=which)
  layer, x_BTD = leaves(cfg), tokens()
  x_XD = np.asarray(x_BTD).reshape(-1, D)

  @functools.cache
  def matrix(name: str, e: int) -> np.ndarray:
    w_IO = np.asarray(getattr(layer, name)[e])
    a = np.abs(w_IO).max()
    return np.stack([nvfp4.token64(column, a) for column in w_IO.T], axis=1)

  def rows(x: np.ndarray) -> np.ndarray:
    return nvfp4.token64(x.astype(np.float32)) if which == 'both' else x

  plain = dataclasses.replace(cfg, quantise='none')
  _, ids_BTK = mix64(x_BTD, layer, plain)
  weights_XK = np.asarray(moe.route(jnp.asarray(x_XD), layer, plain, None).weight_TK)
  shared = layer.shared
  assert shared is not None
  want = np.zeros((B * T, D))
  for t, x in enumerate(x_XD):
    for e, g in zip(ids_BTK.reshape(-1, K)[t], weights_XK[t], strict=True):
      into = np.float64(rows(x))
      gate = into @ matrix('wg_NEDF', e)
      h = gate / (1 + np.exp(-gate)) * (into @ matrix('wu_NEDF', e))
      want[t] += g * (np.float64(rows(h)) @ matrix('wd_NEFD', e))
    ws = (np.float64(w) for w in (shared.wg_NDF, shared.wu_NDF, shared.wd_NFD))
    want[t] += swiglu64(np.float64(x), *ws)
  got, _ = moe.mix(x_BTD, layer, cfg)
  off = np.abs(np.asarray(got).reshape(-1, D) - want).max(axis=-1)
  # h is rounded to 4 bits in 'both': an element on the edge of two codes may go to
  # either, and moves its token by a step of the format.
  assert (off < 1e-5).mean() >= (0.5 if which == 'both' else 1.0)
  assert off.max() < 0.05
  plain_off = np.abs(np.asarray(moe.mix(x_BTD, layer, plain)[0]) - got).max()
  assert plain_off > 0.05  # the quantisation is there


@pytest.mark.parametrize('which', ['weights', 'both'])
def test_the_gradient_of_quantised_experts_is_that_of_bfloat16_operands(which):
  cfg = dataclasses.replace(SOFTMAX, quantise=which)
  layer, x_BTD = leaves(SOFTMAX), tokens()
  dy_BTD = np.float32(np.random.default_rng(4).normal(size=x_BTD.shape))

  def grad(cfg: config_model.Moe) -> p.Moe:
    return jax.grad(lambda w: jnp.sum(moe.mix(x_BTD, w, cfg)[0] * dy_BTD))(layer)

  got, want = grad(cfg), grad(SOFTMAX)
  for name in ('wg_NEDF', 'wu_NEDF', 'wd_NEFD'):
    a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
    cosine = (a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum())
    assert 0.97 < cosine < 1.0, name
