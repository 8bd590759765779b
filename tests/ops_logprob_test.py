"""The log-probability of drawn tokens within their recorded sets, and its gradient."""

import functools

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import logprob
from tests import fixtures

B, T, K, V = 2, 3, 5, 7  # every axis has its own length


def example(seed: int = 0) -> dict[str, np.ndarray]:
  """Random logits; sets of 1, 2, 3, 5 ids and two absent ones; tokens inside."""
  rng = np.random.default_rng(seed)
  kept = np.full((B, T, K), -1)
  token = rng.integers(0, V, (B, T))
  for (b, t), size in zip(np.ndindex(B, T), (1, 2, 3, 5, 0, 0), strict=True):
    others = np.delete(np.arange(V), token[b, t])
    chosen = rng.choice(others, max(size - 1, 0), replace=False)
    kept[b, t, :size] = np.sort(np.append(chosen, token[b, t]))[:size]
  return {
    'logits_BTV': np.float32(2 * rng.normal(size=(B, T, V))),
    'token_BT': np.int32(token),
    'kept_ids_BTK': np.int32(kept),
    'temperature_BT': np.float32(rng.choice([0.5, 0.7, 1.0, 1.3], (B, T))),
  }


_score = jax.jit(logprob.score, static_argnames='replay')


def score(replay: bool = True, **arrays) -> logprob.Scores:
  return _score(**arrays, replay=replay)


def one(logits, token, ids, temperature=1.0, replay=True) -> logprob.Scores:
  """Scores of a single token, as Python-sized arrays."""
  return score(
    replay,
    logits_BTV=np.float32(logits)[None, None],
    token_BT=np.int32([[token]]),
    kept_ids_BTK=np.int32([[ids]]),
    temperature_BT=np.float32([[temperature]]),
  )


def by_loops(x: dict[str, np.ndarray], replay: bool) -> dict[str, np.ndarray]:
  """log q, kept entropy and kept mass, one token at a time in float64."""
  out = {k: np.zeros((B, T)) for k in ('logp', 'entropy', 'mass')}
  for b, t in np.ndindex(B, T):
    z = np.float64(x['logits_BTV'][b, t]) / np.float64(x['temperature_BT'][b, t])
    ids = [i for i in x['kept_ids_BTK'][b, t] if i >= 0] or list(range(V))
    inside, full = fixtures.logsumexp64(z[ids]), fixtures.logsumexp64(z)
    q = np.exp(z[ids] - inside)
    out['logp'][b, t] = z[x['token_BT'][b, t]] - (inside if replay else full)
    out['entropy'][b, t] = -(q * np.log(q)).sum()
    out['mass'][b, t] = np.exp(inside - full)
  return out


def test_by_hand():
  # e^z = 4, 2, 1, 1 and the set {0, 1}: q = 2/3, 1/3; mass 6/8.
  got = one(np.log([4.0, 2.0, 1.0, 1.0]), 1, [0, 1, -1])
  assert float(got.logp_BT[0, 0]) == pytest.approx(np.log(1 / 3), abs=1e-6)
  assert float(got.kept_mass_BT[0, 0]) == pytest.approx(0.75, abs=1e-6)
  entropy = -(2 / 3 * np.log(2 / 3) + 1 / 3 * np.log(1 / 3))
  assert float(got.kept_entropy_BT[0, 0]) == pytest.approx(entropy, abs=1e-6)


def test_temperature_divides_logits_not_log_probabilities():
  z = np.array([3.0, 1.0, -2.0])
  want = z / 0.6 - fixtures.logsumexp64(z / 0.6)
  divided = (z - fixtures.logsumexp64(z)) / 0.6
  got = float(one(z, 2, [-1], 0.6).logp_BT[0, 0])
  assert got == pytest.approx(want[2], abs=1e-5)
  assert abs(got - divided[2]) > 0.1


@pytest.mark.parametrize('replay', [True, False])
@pytest.mark.parametrize('seed', range(3))
def test_equal_to_the_triple_loop_with_mixed_temperatures_and_sets(seed, replay):
  x = example(seed)
  got, want = score(replay, **x), by_loops(x, replay)
  np.testing.assert_allclose(got.logp_BT, want['logp'], atol=1e-5)
  np.testing.assert_allclose(got.kept_entropy_BT, want['entropy'], atol=1e-5)
  np.testing.assert_allclose(got.kept_mass_BT, want['mass'], atol=1e-5)


def test_without_a_set_it_is_the_log_softmax():
  x = example()
  x['kept_ids_BTK'] = np.full_like(x['kept_ids_BTK'], -1)
  z_BTV = x['logits_BTV'] / x['temperature_BT'][..., None]
  want = np.take_along_axis(
    np.asarray(jax.nn.log_softmax(z_BTV)), x['token_BT'][..., None], -1
  )[..., 0]
  got = score(**x)
  np.testing.assert_allclose(got.logp_BT, want, atol=1e-6)
  np.testing.assert_array_equal(got.kept_mass_BT, 1.0)


def test_the_order_of_a_set_does_not_matter():
  x = example()
  y = {**x, 'kept_ids_BTK': x['kept_ids_BTK'][..., ::-1]}
  assert fixtures.same_bits(score(**x), score(**y))


def test_a_set_of_one_gives_exactly_zero_and_no_gradient():
  z = np.float32([37.25, -3.1, 0.7])

  def logp(z_V):
    x = (z_V[None, None], np.int32([[1]]), np.int32([[[1, -1]]]), np.float32([[0.37]]))
    return _score(*x, replay=True).logp_BT[0, 0]

  value, grad = jax.value_and_grad(logp)(jnp.asarray(z))
  assert float(value) == 0.0
  assert not np.asarray(grad).any()


def test_gradient_is_indicator_minus_q_over_temperature_inside_and_zero_outside():
  z = np.float64([1.0, 0.5, -1.0, 2.0])
  ids, temperature = [0, 1, 2], 0.8

  def logp(z_V):
    x = (z_V[None, None], np.int32([[1]]), np.int32([[ids]]), np.float32([[0.8]]))
    return _score(*x, replay=True).logp_BT[0, 0]

  q = np.exp(z[ids] / temperature - fixtures.logsumexp64(z[ids] / temperature))
  want = np.zeros(4)
  want[ids] = (np.eye(3)[1] - q) / temperature
  got = np.asarray(jax.grad(logp)(jnp.float32(z)))
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert got[3] == 0.0


@pytest.mark.parametrize('replay', [True, False])
def test_gradients_equal_finite_differences(replay):
  x = jax.tree.map(jnp.asarray, example(4))
  weight_BT = jax.random.normal(jax.random.key(0), (B, T))

  def total(logits_BTV):
    scores = _score(**{**x, 'logits_BTV': logits_BTV}, replay=replay)
    return jnp.sum(weight_BT * scores.logp_BT)

  test_util.check_grads(total, (x['logits_BTV'],), 1, ['rev'], 1e-2, 1e-2)


def test_the_diagnostics_carry_no_gradient():
  x = jax.tree.map(jnp.asarray, example())

  def total(logits_BTV):
    scores = _score(**{**x, 'logits_BTV': logits_BTV}, replay=True)
    return jnp.sum(scores.kept_entropy_BT) + jnp.sum(scores.kept_mass_BT)

  assert not np.asarray(jax.grad(total)(x['logits_BTV'])).any()


def test_without_replay_every_ratio_is_the_kept_mass():
  # 1,000 random logits, top_p .9: whichever token is drawn, ratio = S.
  z = np.float32(np.random.default_rng(0).normal(size=1000))
  prob = np.exp(np.float64(z) - fixtures.logsumexp64(z))
  ids = fixtures.kept64(prob, top_p=0.9)
  S = prob[ids].sum()
  assert 0.9 <= S < 0.902
  for token in (ids[0], ids[len(ids) // 2], ids[-1]):
    mu = np.log(prob[token] / S)  # the sampler's, within the set
    with_set = one(z, token, sorted(ids))
    without = one(z, token, sorted(ids), replay=False)
    assert float(with_set.logp_BT[0, 0]) == pytest.approx(mu, abs=1e-4)
    assert np.exp(float(without.logp_BT[0, 0]) - mu) == pytest.approx(S, abs=1e-4)
    assert float(without.kept_mass_BT[0, 0]) == pytest.approx(S, abs=1e-5)


def test_a_token_outside_of_the_set_cannot_widen_the_gap_inside():
  # FACTS.md 1: with x1 > x2 >> x3, pushing down token 3 sharpens p1 against p2 when
  # the whole vocabulary is normalised over; logits outside a set get no gradient.
  z = jnp.float32([2.0, 1.0, -6.0])

  def logp(z_V, ids):
    x = (z_V[None, None], np.int32([[1]]), np.int32([[ids]]), np.float32([[1.0]]))
    return _score(*x, replay=True).logp_BT[0, 0]

  inside, whole = (np.asarray(jax.grad(logp)(z, ids)) for ids in ([0, 1], [-1, -1]))
  assert inside[2] == 0.0
  assert whole[2] < 0.0


def test_logits_of_minus_infinity_outside_of_the_set_are_harmless():
  x = (jnp.int32([[0]]), jnp.int32([[[0, 1]]]), jnp.float32([[1.0]]))
  z = jnp.float32([0.0, 0.0, -jnp.inf])
  scores = _score(z[None, None], *x, replay=True)
  grad = jax.grad(lambda z: _score(z[None, None], *x, replay=True).logp_BT[0, 0])(z)
  assert all(np.isfinite(np.asarray(v)).all() for v in (*vars(scores).values(), grad))


@pytest.mark.parametrize('replay', [True, False])
def test_jit_scores_the_same(replay):
  x = jax.tree.map(jnp.asarray, example(2))
  fn = functools.partial(logprob.score, replay=replay)
  for a, b in zip(
    fixtures.leaves(fn(**x)), fixtures.leaves(jax.jit(fn)(**x)), strict=True
  ):
    np.testing.assert_allclose(a, b, atol=1e-6)
