"""50,000 draws against their recorded probabilities, under several filters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import kept_set

DRAWS, V = 50_000, 60
FILTERS = {
  'none': (0, 1.0, 1.0, 0.0, 1),
  'top_p': (32, 1.0, 0.9, 0.0, 32),
  'top_k': (32, 1.0, 1.0, 0.0, 7),
  'min_p': (32, 1.0, 1.0, 0.05, 32),
  'all, hot': (32, 1.7, 0.95, 0.02, 20),
  'all, cold': (32, 0.6, 0.8, 0.01, 12),
}


@pytest.mark.parametrize('name', FILTERS)
def test_draws_are_a_sample_of_the_recorded_probabilities(name):
  K, temperature, top_p, min_p, top_k = FILTERS[name]
  logits_V = 2 * np.random.default_rng(0).normal(size=V).astype(np.float32)

  @functools.partial(jax.jit, static_argnames='n')
  def draw(seed, *, n):
    one_B = jnp.ones(n)
    return kept_set.draw(
      jax.random.split(jax.random.key(seed), n),
      jnp.broadcast_to(logits_V, (n, V)),
      temperature * one_B,
      top_p * one_B,
      min_p * one_B,
      jnp.full(n, top_k, jnp.int32),
      K,
    )

  found = [jax.device_get(draw(seed, n=10_000)) for seed in range(DRAWS // 10_000)]
  token = np.concatenate([d.token_B for d in found])
  logp = np.concatenate([d.logp_B for d in found])
  count_V = np.bincount(token, minlength=V)
  prob_V = np.zeros(V)
  prob_V[token] = np.exp(np.float64(logp))
  kept = found[0].kept_ids_BK[0]
  want = set(kept[kept >= 0].tolist()) if K else set(range(V))
  assert set(token.tolist()) <= want
  # Ids that were never drawn have no recorded probability: they share what is left.
  rest = max(1 - prob_V.sum(), 0.0) * DRAWS
  assert rest < 10
  often = prob_V * DRAWS >= 5
  expect = np.append(prob_V[often], 1 - prob_V[often].sum()) * DRAWS
  seen = np.append(count_V[often], count_V[~often].sum())
  used = expect > 1e-2
  chi2 = ((seen - expect)[used] ** 2 / expect[used]).sum()
  freedom = used.sum() - 1
  assert freedom >= 3
  # P(chi-square of k degrees of freedom > x) = Q(k / 2, x / 2)
  assert float(jax.scipy.special.gammaincc(freedom / 2, chi2 / 2)) > 1e-4
