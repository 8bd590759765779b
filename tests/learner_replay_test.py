"""Routes as they are replayed: packed rows, the loss, its metrics, balanced load."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swe17 import config, config_model, types
from swe17.learner import batching, objectives, update
from swe17.learner import state as st
from swe17.model import params as p
from swe17.model import transformer
from tests import fixtures, routed
from tests.routed import hashed, hashing, MODEL, N, serving, Talk, V

compiled_once = routed.compiled_once


def fill(
  segments: list[types.Segment], adv: tuple[float, ...], micro: int, model: config.Model
) -> st.Batch:
  items = [batching.Item(s, adv[i % len(adv)], f'e{i}') for i, s in enumerate(segments)]
  cfg = config.Batch(row_length=40, micro_rows=3)
  return batching.fill(
    items,
    micro=micro,
    cfg=cfg,
    K=1,
    denominator=50.0,
    version=0,
    routes=model.routes,
  )


@pytest.fixture(scope='module')
def packed() -> st.Batch:
  """Three segments in three rows: two episodes, one of them compacted."""
  talks = {
    'a': ((7, 5), (3, 4), (2, 6)),  # turns that each find their prefix cached
    'a.1': ((9, 8),),  # the same episode after its compaction
    'bb': ((12, 1),),
  }
  with serving() as made:
    segments = [Talk(made, name).turns(*sizes) for name, sizes in talks.items()]
  return fill(segments, (1.0,), 1, MODEL)


def test_packed_routes_are_those_of_the_inputs_beside_them(packed):
  used = np.asarray(packed.segment_MBT) > 0
  want = np.where(used[..., None, None], hashed(packed.token_MBT), -1)
  assert packed.routes_MBTNK is not None
  np.testing.assert_array_equal(packed.routes_MBTNK, want)
  assert packed.micro == 1 == packed.token_MBT.shape[0]
  assert packed.mask_MBT.any() and used[np.asarray(packed.mask_MBT)].all()
  assert packed.routes_MBTNK.dtype == np.int16


def test_the_learners_routers_choose_what_the_samplers_did(packed):
  micro = jax.tree.map(lambda x: jnp.asarray(x[0]), vars_of(packed))
  place = micro['token_MBT'], micro['position_MBT'], micro['segment_MBT']
  _, own = transformer.apply_routed(hashing(), *place, None, cfg=MODEL)
  used = np.asarray(micro['segment_MBT']) > 0
  np.testing.assert_array_equal(
    np.asarray(own)[used], np.asarray(micro['routes_MBTNK'])[used]
  )


def vars_of(batch: st.Batch) -> dict:
  return {k: v for k, v in vars(batch).items() if v is not None and np.ndim(v)}


@pytest.mark.parametrize('shift', [1, -1])
def test_routes_off_by_one_are_seen_as_a_mismatch(packed, shift):
  assert packed.routes_MBTNK is not None
  _, right = lose(hashing(), packed, MODEL)
  rolled = np.roll(packed.routes_MBTNK, shift, axis=2)
  _, wrong = lose(hashing(), dataclasses.replace(packed, routes_MBTNK=rolled), MODEL)
  assert right.routing is not None and wrong.routing is not None
  assert float(right.routing.differ) == 0
  used = np.asarray(packed.segment_MBT) > 0
  assert float(right.routing.recorded) == N * used.sum()
  # All that is beside a token of another class is seen; padding is routed as token 0.
  own, beside = np.sort(hashed(packed.token_MBT)), np.sort(rolled)
  want = ((rolled >= 0).all(axis=-1) & (own != beside).any(axis=-1)).sum()
  assert float(wrong.routing.differ) == want > 0.3 * N * used.sum()


@functools.partial(jax.jit, static_argnums=2)
def _lose(params, micro, model):
  return update.policy_loss_fn(params, micro, model=model, cfg=config.Loss())


def lose(params: p.Params, batch: st.Batch, model: config.Model = MODEL):
  """(loss, pieces) of the first micro-batch."""
  micro = jax.tree.map(lambda x: jnp.asarray(x[0] if np.ndim(x) else x), batch)
  return _lose(params, micro, model)


# A model of which every part does something, and what it drew.

RANDOM = dataclasses.replace(
  MODEL, moe=dataclasses.replace(MODEL.moe, router='sigmoid', experts=8, shared=1)
)


def perturbed(params: p.Params, size: float, seed: int = 3) -> p.Params:
  assert params.moe is not None and isinstance(params.moe.mlp, p.Moe)
  mlp = params.moe.mlp
  noise = np.random.default_rng(seed).normal(size=mlp.router_NDE.shape)
  router = mlp.router_NDE + jnp.asarray(np.float32(size * noise))
  mlp = dataclasses.replace(mlp, router_NDE=router)
  return dataclasses.replace(params, moe=dataclasses.replace(params.moe, mlp=mlp))


@pytest.fixture(scope='module')
def drawn() -> tuple[p.Params, st.Batch]:
  params = fixtures.params(1, cfg=RANDOM)
  # Experts that weigh more than at the start, so that a wrong one is a wrong token.
  loud = jax.tree_util.tree_map_with_path(
    lambda path, w: 4 * w if 'wd_NEFD' in jax.tree_util.keystr(path) else w, params
  )
  with serving(loud, model=RANDOM) as made:
    segments = [Talk(made, 'x' * (i + 1)).turns((5, 6), (3, 20)) for i in range(6)]
  batch = fill(segments, (1.0, -0.5), 2, RANDOM)
  return loud, batch


def k3(params: p.Params, batch: st.Batch) -> tuple[float, float]:
  """(k3 of a trained token, share of routes that differ)."""
  pieces = lose(params, batch, RANDOM)[1]
  assert pieces.routing is not None
  differ = float(pieces.routing.differ) / max(float(pieces.routing.recorded), 1.0)
  return float(pieces.divergence.k3 / pieces.divergence.tokens), differ


def test_at_equal_weights_replay_changes_no_log_probability(drawn):
  params, batch = drawn
  off = dataclasses.replace(batch, routes_MBTNK=None)
  (with_, differ), (without, _) = k3(params, batch), k3(params, off)
  assert differ < 0.005  # near ties, which two programs may round to either side
  assert with_ < 1e-9 and without < 1e-9
  assert float(lose(params, batch, RANDOM)[0]) == pytest.approx(
    float(lose(params, off, RANDOM)[0]), rel=1e-5
  )


def test_replay_brings_the_divergence_of_a_moved_router_down(drawn):
  params, batch = drawn
  moved = perturbed(params, 0.1)
  off = dataclasses.replace(batch, routes_MBTNK=None)
  (with_, differ), (without, _) = k3(moved, batch), k3(moved, off)
  print(
    f'k3 {without:.2e} without replay, {with_:.2e} with; {differ:.1%} routes differ'
  )
  assert differ > 0.05
  assert 1e-9 < with_ < without / 3


def test_the_router_is_trained_through_replayed_routes(drawn):
  """The loss's slope along a direction of the routers is their gradient's."""
  params, batch = drawn
  micro = jax.tree.map(lambda x: jnp.asarray(x[0] if np.ndim(x) else x), batch)

  moved = perturbed(params, 1.0)

  def at(size: jax.Array) -> p.Params:
    return jax.tree.map(lambda w, v: w + size * (v - w), params, moved)

  def loss(size: jax.Array) -> jax.Array:
    made = update.policy_loss_fn(at(size), micro, model=RANDOM, cfg=config.Loss())
    return made[0]

  def plain(size: jax.Array) -> jax.Array:
    """The same with importance weights of 1, which the gradient leaves out."""
    logp_BT = update._logp(at(size), micro, model=RANDOM, cfg=config.Loss())
    return -jnp.sum(jnp.where(micro.mask_MBT, micro.adv_MBT * logp_BT, 0.0))

  slope, h = float(jax.jit(jax.grad(loss))(0.0)), 1e-2
  value = jax.jit(plain)
  want = (float(value(h)) - float(value(-h))) / (2 * h)
  assert abs(want) > 1e-3
  assert slope == pytest.approx(want, rel=2e-2)


# --- balanced load ----------------------------------------------------------------

ONE = dataclasses.replace(
  RANDOM, layers=1, moe=dataclasses.replace(RANDOM.moe, first_dense=0, shared=0)
)
TX = optax.adamw(1e-3, weight_decay=0.5)


@pytest.fixture(scope='module')
def one_layer() -> tuple[p.Params, st.Batch]:
  """Weights with biases, and segments with any routes."""
  rng = np.random.default_rng(0)
  params = fixtures.params(2, cfg=ONE)
  bias = rng.normal(size=(1, 8)).astype(np.float32) / 64
  segments = []
  for sizes in ((5, 20), (9, 8), (12, 4), (3, 30)):
    made = fixtures.segment(rng, sizes, width=0, vocab=V)
    ids = rng.random((made.token_T.size - 1, 1, 8)).argsort(axis=-1)[..., :2]
    segments.append(dataclasses.replace(made, routes_RNK=ids.astype(np.uint8)))
  return with_bias(params, bias), fill(segments, (1.0, -0.5), 2, ONE)


def with_bias(params: p.Params, bias: np.ndarray) -> p.Params:
  assert params.moe is not None and isinstance(params.moe.mlp, p.Moe)
  mlp = dataclasses.replace(params.moe.mlp, bias_NE=jnp.asarray(bias))
  return dataclasses.replace(params, moe=dataclasses.replace(params.moe, mlp=mlp))


def bias_of(params: p.Params) -> np.ndarray:
  assert params.moe is not None and isinstance(params.moe.mlp, p.Moe)
  return np.asarray(params.moe.mlp.bias_NE)


@functools.cache
def _stepping(speed: float):
  model = dataclasses.replace(ONE, moe=dataclasses.replace(ONE.moe, bias_speed=speed))
  return jax.jit(
    functools.partial(update.update, model=model, loss=config.Loss(), tx=TX)
  )


def test_biases_move_towards_equal_load_by_their_speed_and_nothing_else(one_layer):
  params, batch = one_layer
  state, metrics = _stepping(0.125)(st.init(params, TX), batch)
  load_E, differ = np.zeros(8), 0
  for m in range(int(batch.micro)):
    real = np.asarray(batch.segment_MBT[m]) > 0
    _, own = transformer.apply_routed(
      p.rounded(params),
      jnp.asarray(batch.token_MBT[m]),
      jnp.asarray(batch.position_MBT[m]),
      jnp.asarray(batch.segment_MBT[m]),
      None,
      cfg=ONE,
    )
    ids_XK = np.asarray(own)[real][:, 0]
    load_E += np.bincount(ids_XK.reshape(-1), minlength=8)
    assert batch.routes_MBTNK is not None
    for chosen, known in zip(ids_XK, batch.routes_MBTNK[m][real][:, 0], strict=True):
      differ += set(chosen.tolist()) != set(known.tolist())
  want_E = bias_of(params)[0] + 0.125 * np.sign(load_E.mean() - load_E)
  np.testing.assert_allclose(bias_of(state.params)[0], want_E, rtol=1e-6)
  assert load_E.max() > 1.2 * load_E.mean() > 0  # there was something to balance
  assert metrics['expert_load_max'] == pytest.approx(load_E.max() / load_E.mean())
  count = (np.asarray(batch.segment_MBT) > 0).sum()
  assert metrics['route_mismatch_count'] == count
  assert metrics['route_mismatch'] == pytest.approx(differ / count)


def test_a_step_without_a_gradient_moves_no_bias(one_layer):
  params, batch = one_layer
  still = dataclasses.replace(batch, adv_MBT=np.zeros_like(batch.adv_MBT))
  state, metrics = _stepping(0.125)(st.init(params, TX), still)
  assert metrics['skipped_steps'] == 1
  np.testing.assert_array_equal(bias_of(state.params), bias_of(params))


def test_biases_stay_without_a_speed_whatever_the_optimiser_decays(one_layer):
  params, _ = one_layer
  grad = jax.tree.map(jnp.ones_like, params)
  state, metrics = update.apply_gradient(st.init(params, TX), grad, TX)
  assert metrics['skipped_steps'] == 0
  np.testing.assert_array_equal(bias_of(state.params), bias_of(params))
  assert (np.asarray(state.params.norm_D) != np.asarray(params.norm_D)).all()


def test_what_is_measured_before_the_step_is_measured_with_replay(one_layer):
  """Decoupled PPO's log-probabilities are those of the loss itself."""
  params, batch = one_layer
  moved = perturbed(params, 0.5)
  logp_of = functools.partial(update._logp, moved, model=ONE, cfg=config.Loss())
  got = jax.jit(functools.partial(objectives.measured, logp_of))(batch).prox_logp_MBT
  bare = dataclasses.replace(batch, routes_MBTNK=None)
  without = jax.jit(functools.partial(objectives.measured, logp_of))(bare)
  mask = np.asarray(batch.mask_MBT)
  micro = jax.tree.map(lambda x: jnp.asarray(x[0] if np.ndim(x) else x), batch)
  want = np.asarray(logp_of(micro))
  np.testing.assert_allclose(np.asarray(got)[0][mask[0]], want[mask[0]], atol=1e-6)
  assert np.abs(np.asarray(without.prox_logp_MBT) - np.asarray(got))[mask].max() > 1e-4


def test_a_bias_needs_the_router_that_has_one():
  with pytest.raises(ValueError, match=r'model\.moe\.router'):
    config_model.Moe(experts=4, bias_speed=0.001)
