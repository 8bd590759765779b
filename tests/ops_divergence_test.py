"""Divergence of learner and sampler: sums that add up, and their means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import divergence
from tests import fixtures

_sums = jax.jit(functools.partial(divergence.sums, cap=2.0))
B, T = 2, 8


def example(seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  logp_BT = -rng.uniform(0, 3, (B, T)).astype(np.float32)
  return {
    'logp_BT': logp_BT,
    'mu_logp_BT': logp_BT - rng.normal(size=(B, T)).astype(np.float32),
    'mask_BT': rng.random((B, T)) < 0.7,
    'signal_BT': rng.random((B, T)) < 0.5,
  }


def finish(**arrays) -> dict[str, float]:
  return {k: float(v) for k, v in divergence.finish(_sums(**arrays)).items()}


def row(d, mask, signal) -> dict[str, np.ndarray]:
  """Given log ratios in the first row, everything else masked."""
  arrays = [np.zeros((B, T), np.float32) for _ in range(3)]
  for array, values in zip(arrays, (d, mask, signal), strict=True):
    array[0, : len(values)] = values
  names = ('logp_BT', 'mask_BT', 'signal_BT')
  types = (np.float32, bool, bool)
  cast = {n: a.astype(t) for n, a, t in zip(names, arrays, types, strict=True)}
  return cast | {'mu_logp_BT': np.zeros((B, T), np.float32)}


def test_by_hand():
  got = finish(**row(np.log([2.0, 0.5, 4.0, 1.0]), [1, 1, 1, 0], [1, 0, 0, 0]))
  k3 = [2 - 1 - np.log(2), 0.5 - 1 + np.log(2), 4 - 1 - np.log(4)]
  want = {
    'k1': -(np.log(2) - np.log(2) + np.log(4)) / 3,
    'k2': (2 * np.log(2) ** 2 + np.log(4) ** 2) / 6,
    'k3': sum(k3) / 3,
    'k3_max': k3[2],
    'k1_signal': -np.log(2),
    'k2_signal': np.log(2) ** 2 / 2,
    'k3_signal': k3[0],
    'signal_count': 1,
    'ratio_mean': 6.5 / 3,
    'ratio_max': 4,
    'ratio_outside': 1,
    'ratio_outside_signal': 1,
    'tis_capped_share': 1 / 3,  # above the cap, not at it
    'ess': 6.5**2 / (3 * 20.25),
  }
  assert got == pytest.approx(want, rel=1e-5)


def test_equal_to_float64():
  x = example()
  d = (np.float64(x['logp_BT']) - x['mu_logp_BT'])[x['mask_BT']]
  signal = x['signal_BT'][x['mask_BT']]
  k3, w = np.expm1(d) - d, np.exp(d)
  want = {
    'k1': -d.mean(),
    'k2': (d**2).mean() / 2,
    'k3': k3.mean(),
    'k3_max': k3.max(),
    'k1_signal': -d[signal].mean(),
    'k2_signal': (d[signal] ** 2).mean() / 2,
    'k3_signal': k3[signal].mean(),
    'signal_count': signal.sum(),
    'ratio_mean': w.mean(),
    'ratio_max': w.max(),
    'ratio_outside': ((w < 0.9) | (w > 1.1)).mean(),
    'ratio_outside_signal': ((w < 0.9) | (w > 1.1))[signal].mean(),
    'tis_capped_share': (w > 2).mean(),
    'ess': w.sum() ** 2 / (len(w) * (w**2).sum()),
  }
  assert finish(**x) == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_equal_policies_have_no_divergence():
  got = finish(**row([0.0] * 5, [1] * 5, [1] * 5))
  assert (got['k1'], got['k3'], got['k3_signal']) == (0, 0, 0)
  assert (got['ratio_mean'], got['ess'], got['ratio_outside']) == (1, 1, 0)


@pytest.mark.parametrize('d', [1e-3, -1e-3, 1e-5])
def test_k3_is_exact_near_zero(d):
  # e^d - 1 - d in float32 would be rounding noise of 1e-7.
  got = finish(**row([d], [1], [1]))['k3']
  assert got == pytest.approx(np.expm1(d) - d, rel=0.05, abs=1e-11)
  assert got >= 0


def test_parts_add_up_to_the_whole():
  x = example(1)
  left = {**x, 'mask_BT': x['mask_BT'] & (np.arange(T) < 3)}
  right = {**x, 'mask_BT': x['mask_BT'] & (np.arange(T) >= 3)}
  total = divergence.add(_sums(**left), _sums(**right))
  for a, b in zip(fixtures.leaves(total), fixtures.leaves(_sums(**x)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_zero_is_the_identity_of_addition():
  s = _sums(**example(2))
  assert fixtures.same_bits(divergence.add(divergence.zero(), s), s)


def test_a_mean_over_nothing_is_not_a_number_and_never_zero():
  got = finish(**row([1.0], [0], [1]))
  assert got.pop('signal_count') == 0
  assert all(np.isnan(v) for v in got.values())
  only_lone = finish(**row([1.0], [1], [0]))
  assert np.isnan(only_lone['k3_signal'])
  assert np.isfinite(only_lone['k3'])


@pytest.mark.parametrize('value', [1e4, -1e4, -np.inf, np.inf, np.nan])
def test_nothing_in_a_masked_slot_reaches_a_sum(value):
  clean = example(3)
  dirty = dict(clean)
  for name in ('logp_BT', 'mu_logp_BT'):
    dirty[name] = np.where(clean['mask_BT'], clean[name], np.float32(value))
  dirty['signal_BT'] = clean['signal_BT'] | ~clean['mask_BT']
  assert fixtures.same_bits(_sums(**clean), _sums(**dirty))


def test_nothing_carries_a_gradient():
  x = jax.tree.map(jnp.asarray, example(4))

  def total(logp_BT):
    return sum(jax.tree.leaves(_sums(**{**x, 'logp_BT': logp_BT})))

  assert not np.asarray(jax.grad(total)(x['logp_BT'])).any()


def test_jit_computes_the_same():
  x = jax.tree.map(jnp.asarray, example(5))
  plain = divergence.sums(**x, cap=2.0)
  for a, b in zip(fixtures.leaves(plain), fixtures.leaves(_sums(**x)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)


# By episode.

P, J = 3, 5
SEGMENT_BT = np.array([[1, 1, 1, 2, 2, 2, 3, 0], [1, 1, 1, 1, 2, 2, 0, 0]])
EPISODE_BT = np.array([[0, 0, 0, 1, 1, 1, 2, 0], [1, 1, 1, 1, 3, 3, 0, 0]])


@jax.jit
def _episodes(logp_BT, mu_logp_BT, mask_BT):
  return divergence.episodes(
    logp_BT, mu_logp_BT, mask_BT, SEGMENT_BT, EPISODE_BT, P=P, J=J
  )


_finish = jax.jit(divergence.finish_episodes)


def by_episode(x: dict[str, np.ndarray]) -> dict[str, float]:
  found = _finish(_episodes(x['logp_BT'], x['mu_logp_BT'], x['mask_BT']))
  return {k: float(v) for k, v in found.items()}


def test_episodes_equal_float64():
  x = example(7)
  x['mask_BT'] &= SEGMENT_BT > 0
  x['mask_BT'][1, 4:] = False  # episode 3 has no sampled token
  d = np.float64(x['logp_BT']) - x['mu_logp_BT']
  own = [(j == EPISODE_BT) & x['mask_BT'] for j in range(4)]
  total = np.array([d[o].sum() for o in own if o.any()])
  mean = np.array([d[o].mean() for o in own if o.any()])
  assert total.size == 3
  w = np.exp(total)
  want = {
    'episode_count': 3,
    'episode_k1': -total.mean(),
    'episode_k2': (total**2).mean() / 2,
    'episode_k3': (np.expm1(total) - total).mean(),
    'episode_ess': w.sum() ** 2 / (3 * (w**2).sum()),
    'episode_outside': (np.abs(np.exp(mean) - 1) > 0.1).mean(),
    'episode_distance_max': np.abs(mean).max(),
  }
  assert by_episode(x) == pytest.approx(want, rel=1e-4)


def test_an_episode_in_two_micro_batches_is_one_episode():
  x = example(8)
  x['mask_BT'] &= SEGMENT_BT > 0
  parts = [
    _episodes(
      x['logp_BT'], x['mu_logp_BT'], x['mask_BT'] & (np.arange(B) == b)[:, None]
    )
    for b in range(B)
  ]
  total = _finish(jax.tree.map(jnp.add, *parts))
  assert {k: float(v) for k, v in total.items()} == pytest.approx(
    by_episode(x), rel=1e-5
  )


def test_no_episode_has_no_mean():
  got = by_episode(example() | {'mask_BT': np.zeros((B, T), bool)})
  assert got.pop('episode_count') == 0
  assert all(np.isnan(v) for v in got.values())


def test_the_ess_of_episodes_is_finite_where_their_ratios_overflow():
  x = row([60.0] * 7, [1] * 7, [1] * 7)
  got = by_episode(x)  # D = 180, 180, 60
  assert got['episode_ess'] == pytest.approx(2 / 3, rel=1e-5)
  assert np.isinf(got['episode_k3'])


@pytest.mark.parametrize('value', [1e4, -1e4, -np.inf, np.inf, np.nan])
def test_nothing_in_a_masked_slot_reaches_an_episode(value):
  x = example(9)
  x['mask_BT'] &= SEGMENT_BT > 0
  dirty = [
    np.where(x['mask_BT'], x[k], np.float32(value)) for k in ('logp_BT', 'mu_logp_BT')
  ]
  clean = _episodes(x['logp_BT'], x['mu_logp_BT'], x['mask_BT'])
  assert fixtures.same_bits(clean, _episodes(*dirty, x['mask_BT']))


def test_a_ratio_that_is_no_number_is_outside_and_stays_with_its_episode():
  # CASES 1.10: comparisons with NaN are false, so 'outside' may not be one.
  x = row([np.nan, 0.0, 0.05, 1.0], [1, 1, 1, 0], [1, 1, 1, 1])
  got = _sums(**x)
  assert float(got.outside) == float(got.outside_signal) == 1
  segment_BT, episode_BT = np.zeros((2, B, T), np.int32)
  segment_BT[0, :4], episode_BT[0, :4] = [1, 2, 3, 3], [0, 1, 2, 2]
  each = jax.jit(functools.partial(divergence.episodes, P=3, J=4))(
    x['logp_BT'], x['mu_logp_BT'], x['mask_BT'], segment_BT, episode_BT
  )
  np.testing.assert_allclose(each.log_ratio_J, [np.nan, 0, 0.05, 0], atol=1e-7)
  found = divergence.finish_episodes(each)
  assert float(found['episode_outside']) == pytest.approx(1 / 3)
