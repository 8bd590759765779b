"""The heads without [T, V] against the dense form, and against float64 loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import head, kept_head, logprob, vocab_head
from tests import fixtures

B, T, D, K, V = 3, 23, 16, 11, 101  # no chunk, block or bucket divides them
PLAN = head.Plan(
  kept=kept_head.Plan(narrow=3, rows=35, pairs=8),
  vocab=vocab_head.Plan(tokens=10, ids=24),
  mass_share=0,
)
MEASURED = head.Plan(PLAN.kept, PLAN.vocab, mass_share=4, mass_seed=1)
# name: sizes that sets are drawn from; 0 = no set at all.
MIXES = {
  'all kinds': (1, 1, 2, 3, 4, 7, 11, 0),
  'sets only': (1, 1, 1, 2, 2, 3, 5, 11),
  'all singletons': (1,),
  'no sets': (0,),
  'all as wide as K': (11,),
  'all narrow': (2, 3),
}


def example(seed: int = 0, sizes=MIXES['all kinds'], K: int = K) -> dict:
  """Hidden states, embedding, tokens in their sets, mixed temperatures, a mask."""
  rng = np.random.default_rng(seed)
  kept = np.full((B, T, K), -1, np.int32)
  token = rng.integers(0, V, (B, T)).astype(np.int32)
  for at in np.ndindex(B, T):
    size = rng.choice(sizes)
    if size:
      others = rng.choice(np.delete(np.arange(V), token[at]), size - 1, replace=False)
      kept[at][:size] = np.sort(np.append(others, token[at]))
  return {
    'hidden_BTD': rng.normal(size=(B, T, D)).astype(np.float32),
    'embed_VD': (rng.normal(size=(V, D)) / np.sqrt(D)).astype(np.float32),
    'token_BT': token,
    'kept_ids_BTK': kept,
    'temperature_BT': rng.choice([0.6, 1.0, 1.3], (B, T)).astype(np.float32),
    'mask_BT': rng.random((B, T)) < 0.8,
  }


@functools.partial(jax.jit, static_argnames=('replay', 'whole', 'plan'))
def both(x, weight_BT, *, replay=True, whole=True, plan=PLAN):
  """Scores, and gradients of the weighted log-probabilities."""

  def total(hidden_BTD, embed_VD):
    scores = head.score(
      **{**x, 'hidden_BTD': hidden_BTD, 'embed_VD': embed_VD},
      replay=replay,
      whole=whole,
      plan=plan,
    )
    term_BT = jnp.where(x['mask_BT'], weight_BT * scores.logp_BT, 0.0)
    # Diagnostics are added to show that they carry no gradient.
    return jnp.sum(term_BT + scores.kept_entropy_BT + scores.kept_mass_BT), scores

  grad = jax.grad(total, argnums=(0, 1), has_aux=True)
  grads, scores = grad(x['hidden_BTD'], x['embed_VD'])
  return scores, grads


@functools.partial(jax.jit, static_argnames='replay')
def dense(x, weight_BT, *, replay=True):
  def total(hidden_BTD, embed_VD):
    scores = logprob.score(
      hidden_BTD @ embed_VD.T,
      *(x[name] for name in ('token_BT', 'kept_ids_BTK', 'temperature_BT')),
      replay=replay,
    )
    return jnp.sum(jnp.where(x['mask_BT'], weight_BT * scores.logp_BT, 0.0)), scores

  grad = jax.grad(total, argnums=(0, 1), has_aux=True)
  grads, scores = grad(x['hidden_BTD'], x['embed_VD'])
  return scores, grads


def weights(seed: int = 0) -> np.ndarray:
  return np.random.default_rng([9, seed]).normal(size=(B, T)).astype(np.float32)


def by_loops(x: dict, weight_BT: np.ndarray, replay: bool) -> tuple[dict, list]:
  """Values and gradients in float64, one token at a time, from the formulas."""
  h, w = np.float64(x['hidden_BTD']), np.float64(x['embed_VD'])
  out = {name: np.zeros((B, T)) for name in ('logp', 'entropy', 'mass')}
  dh, dw = np.zeros_like(h), np.zeros_like(w)
  for at in np.argwhere(x['mask_BT']):
    at = tuple(at)
    temperature, a = float(x['temperature_BT'][at]), x['token_BT'][at]
    z = w @ h[at] / temperature
    ids = [i for i in x['kept_ids_BTK'][at] if i >= 0] or list(range(V))
    inside, full = fixtures.logsumexp64(z[ids]), fixtures.logsumexp64(z)
    q = np.exp(z[ids] - inside)
    out['entropy'][at] = -(q * np.log(q)).sum()
    out['mass'][at] = np.exp(inside - full)
    norm = ids if replay else list(range(V))
    out['logp'][at] = z[a] - (inside if replay else full)
    slope = -np.exp(z[norm] - fixtures.logsumexp64(z[norm])) / temperature
    for i, g in zip([*norm, a], [*slope, 1 / temperature], strict=True):
      dh[at] += weight_BT[at] * g * w[i]
      dw[i] += weight_BT[at] * g * h[at]
  return out, [dh, dw]


def close_gradients(got, want) -> None:
  for a, b in zip(got, want, strict=True):
    a, b = np.float64(a), np.float64(b)
    assert np.abs(a - b).max() <= 1e-6 * max(np.abs(b).max(), 1e-30)


@pytest.mark.parametrize('replay', [True, False])
@pytest.mark.parametrize('mix', MIXES)
def test_equal_to_the_dense_form_and_to_float64(mix, replay):
  x, weight_BT = example(1, MIXES[mix]), weights()
  scores, grads = both(x, weight_BT, replay=replay)
  want, want_grads = by_loops(x, weight_BT, replay)
  ref, ref_grads = dense(x, weight_BT, replay=replay)
  mask = x['mask_BT']
  pairs = (
    (scores.logp_BT, want['logp'], ref.logp_BT),
    (scores.kept_entropy_BT, want['entropy'], ref.kept_entropy_BT),
  )
  for got, exact, other in pairs:
    np.testing.assert_allclose(got, exact, atol=1e-6)
    np.testing.assert_allclose(got, np.where(mask, other, 0), atol=1e-6)
  mass = np.where(scores.measured_BT, want['mass'], 0)
  np.testing.assert_allclose(scores.kept_mass_BT, mass, atol=1e-6)
  if mix == 'all singletons' and replay:
    assert not any(np.asarray(g).any() for g in (scores.logp_BT, *grads))
    return
  close_gradients(grads, want_grads)
  close_gradients(grads, ref_grads)


def test_sets_of_one_give_exactly_zero_and_no_gradient():
  x = example(2)
  alone = x['mask_BT'] & ((x['kept_ids_BTK'] >= 0).sum(-1) == 1)
  assert alone.any()
  scores, (dh_BTD, _) = both(x, weights())
  assert not np.asarray(scores.logp_BT)[alone].any()
  assert not np.asarray(dh_BTD)[alone].any()


@pytest.mark.parametrize('replay', [True, False])
def test_what_a_masked_slot_holds_changes_no_bit(replay):
  x, weight_BT = example(3), weights()
  clean = both(x, weight_BT, replay=replay)
  rng, off = np.random.default_rng(0), ~x['mask_BT']
  n = off.sum()
  dirty = {name: np.array(value) for name, value in x.items()}
  dirty['hidden_BTD'][off] = rng.choice([np.nan, np.inf, -np.inf, 1e30], (n, D))
  dirty['token_BT'][off] = rng.choice([-7, V, 2**31 - 1, -(2**31)], n)
  dirty['kept_ids_BTK'][off] = rng.choice([-9, V, 2**31 - 1, -(2**31), 0, 1], (n, K))
  dirty['temperature_BT'][off] = rng.choice([np.nan, 0.0, -1.0, np.inf], n)
  weight_BT[off] = np.nan
  assert fixtures.same_bits(clean, both(dirty, weight_BT, replay=replay))
  assert all(np.isfinite(leaf).all() for leaf in fixtures.leaves(clean))


def test_two_runs_give_the_same_bits():
  x = example(4)
  assert fixtures.same_bits(both(x, weights()), both(x, weights()))


def test_a_set_of_width_one_column():
  x, weight_BT = example(5, (0, 1), K=1), weights()
  scores, grads = both(x, weight_BT)
  want, want_grads = by_loops(x, weight_BT, True)
  np.testing.assert_allclose(scores.logp_BT, want['logp'], atol=1e-6)
  close_gradients(grads, want_grads)


def test_holes_and_order_in_a_padded_set_do_not_matter():
  x, weight_BT = example(6), weights()
  moved = np.random.default_rng(0).permuted(x['kept_ids_BTK'], axis=-1)
  got = both({**x, 'kept_ids_BTK': moved}, weight_BT)
  want, want_grads = by_loops(x, weight_BT, True)
  np.testing.assert_allclose(got[0].logp_BT, want['logp'], atol=1e-6)
  close_gradients(got[1], want_grads)


def test_packed_rows_score_as_each_rollout_alone():
  # CASES 1.12: three settings in one row, each token with its own set and temperature.
  x, weight_BT = example(7), weights()
  for column, temperature in ((0, 0.7), (8, 1.0), (16, 1.3)):
    x['temperature_BT'][:, column:] = temperature
  x['kept_ids_BTK'][:, 8:16] = -1
  packed, (dh_BTD, dw_VD) = both(x, weight_BT)
  total = np.zeros((V, D))
  for columns in (slice(0, 8), slice(8, 16), slice(16, T)):
    only = np.zeros((B, T), bool)
    only[:, columns] = True
    alone, (one_BTD, one_VD) = both({**x, 'mask_BT': x['mask_BT'] & only}, weight_BT)
    np.testing.assert_allclose(
      np.asarray(packed.logp_BT)[only], np.asarray(alone.logp_BT)[only], atol=1e-6
    )
    np.testing.assert_allclose(
      np.asarray(dh_BTD)[only], np.asarray(one_BTD)[only], atol=1e-6
    )
    total += np.asarray(one_VD)
  np.testing.assert_allclose(dw_VD, total, atol=1e-5)


@pytest.mark.parametrize('fault', ['outside of its set', 'no set', 'singleton'])
def test_a_token_that_its_set_cannot_have_given_makes_the_step_not_finite(fault):
  x = example(8, MIXES['sets only'])
  x['mask_BT'][1, 5] = True
  x['kept_ids_BTK'][1, 5] = -1
  token = x['token_BT'][1, 5]
  if fault != 'no set':
    size = 1 if fault == 'singleton' else 4
    x['kept_ids_BTK'][1, 5, :size] = np.delete(np.arange(V), token)[:size]
  scores, (dh_BTD, _) = both(x, weights(), whole=False, plan=MEASURED)
  assert np.isnan(np.asarray(scores.logp_BT)).sum() == 1
  assert np.isnan(scores.logp_BT[1, 5])
  assert np.isnan(np.asarray(dh_BTD)[1, 5]).all()


def test_without_the_flag_that_sets_may_be_missing_the_rest_is_the_same():
  x = example(9, MIXES['sets only'])
  with_flag = both(x, weights())
  without = both(x, weights(), whole=False, plan=MEASURED)
  close_gradients(without[1], with_flag[1])
  np.testing.assert_array_equal(without[0].logp_BT, with_flag[0].logp_BT)


def test_the_embedding_may_be_bfloat16_and_its_gradient_is_too():
  x = example(10)
  x['embed_VD'] = jnp.asarray(x['embed_VD'], jnp.bfloat16)
  rounded = {**x, 'embed_VD': x['embed_VD'].astype(jnp.float32)}
  got, got_grads = both(x, weights())
  want, want_grads = both(rounded, weights())
  assert got_grads[1].dtype == jnp.bfloat16
  np.testing.assert_allclose(got.logp_BT, want.logp_BT, atol=1e-6)
  np.testing.assert_allclose(got_grads[0], want_grads[0], atol=1e-6)
  # Each head rounds its own part.
  want_VD = np.asarray(want_grads[1])
  np.testing.assert_allclose(
    np.float32(got_grads[1]), want_VD, atol=2**-8 * np.abs(want_VD).max()
  )


def test_the_kept_mass_is_measured_on_a_seeded_share_without_gradient():
  x = example(11, MIXES['sets only'])
  scores, grads = both(x, weights(), whole=False, plan=MEASURED)
  want, _ = by_loops(x, weights(), True)
  measured = np.asarray(scores.measured_BT)
  assert 5 < measured.sum() <= 18
  assert not measured[~x['mask_BT']].any()
  assert np.add.reduceat(measured.reshape(-1), np.arange(0, B * T, 4)).max() == 1
  mass = np.where(measured, want['mass'], 0)
  np.testing.assert_allclose(scores.kept_mass_BT, mass, atol=1e-6)
  close_gradients(grads, both(x, weights())[1])
  other = {**x, 'token_BT': np.where(x['mask_BT'], x['token_BT'], 5)}
  again = both(other, weights(), whole=False, plan=MEASURED)[0]
  np.testing.assert_array_equal(again.measured_BT, measured)


def test_no_array_as_large_as_tokens_times_vocabulary_is_made():
  # A large V beside small blocks: every temporary together stays below one [T, V].
  X, wide = 64, 20_000
  plan = head.Plan(
    kept_head.Plan(rows=32), vocab_head.Plan(tokens=8, ids=256), mass_share=32
  )
  shapes = {
    'hidden_BTD': jax.ShapeDtypeStruct((1, X, D), jnp.float32),
    'embed_VD': jax.ShapeDtypeStruct((wide, D), jnp.float32),
    'token_BT': jax.ShapeDtypeStruct((1, X), jnp.int32),
    'kept_ids_BTK': jax.ShapeDtypeStruct((1, X, K), jnp.int32),
    'temperature_BT': jax.ShapeDtypeStruct((1, X), jnp.float32),
    'mask_BT': jax.ShapeDtypeStruct((1, X), bool),
  }
  weight_BT = jax.ShapeDtypeStruct((1, X), jnp.float32)
  memory = both.lower(shapes, weight_BT, plan=plan).compile().memory_analysis()
  assert 0 < memory.temp_size_in_bytes < X * wide * 4
