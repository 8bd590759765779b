"""The policy-gradient objective: weights, masks and gradients."""

import functools

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import policy_loss
from tests import fixtures

_loss = jax.jit(policy_loss.reinforce_tis, static_argnames='cap')
_with_grad = jax.jit(
  jax.value_and_grad(policy_loss.reinforce_tis), static_argnames='cap'
)
B, T = 2, 6


def _grad(
  logp_BT: np.ndarray, cap: float, **rest: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """The loss, and its gradient with respect to `logp_BT`."""
  return _with_grad(logp_BT, **rest, cap=cap)


def example(seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {
    'logp_BT': -rng.uniform(0, 3, (B, T)).astype(np.float32),
    'mu_logp_BT': -rng.uniform(0, 3, (B, T)).astype(np.float32),
    'adv_BT': rng.normal(size=(B, T)).astype(np.float32),
    'mask_BT': rng.random((B, T)) < 0.6,
  }


def row(logp, mu, adv, mask) -> dict[str, np.ndarray]:
  """One row of the shape of `example`, masked beyond what is given."""
  given = (logp, mu, adv, mask)
  arrays = [np.zeros((B, T), np.float32) for _ in given]
  for array, values in zip(arrays, given, strict=True):
    array[0, : len(values)] = values
  names = ('logp_BT', 'mu_logp_BT', 'adv_BT')
  return dict(zip(names, arrays, strict=False)) | {'mask_BT': arrays[3].astype(bool)}


def test_by_hand():
  # w = 1, e^.5, e^3 -> capped at 2; A = 1, -2, 1.
  x = row([-1.0, -0.5, -1.0], [-1.0, -1.0, -4.0], [1.0, -2.0, 1.0], [1, 1, 1])
  want = -(1 * 1 * -1.0 + np.exp(0.5) * -2 * -0.5 + 2 * 1 * -1.0)
  assert float(_loss(**x, cap=2.0)) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize('cap', [1.0, 2.0, 1e9])
def test_equal_to_the_sum_in_float64(cap):
  x = example()
  loss, grad = _grad(**x, cap=cap)
  w = np.minimum(np.exp(np.float64(x['logp_BT']) - x['mu_logp_BT']), cap)
  weight = np.where(x['mask_BT'], w * x['adv_BT'], 0)
  assert float(loss) == pytest.approx(-(weight * x['logp_BT']).sum(), rel=1e-5)
  np.testing.assert_allclose(grad, -weight, rtol=1e-5)


def test_on_policy_it_is_reinforce():
  x = example()
  x['mu_logp_BT'] = x['logp_BT']
  loss, grad = _grad(**x, cap=2.0)
  adv_BT = np.where(x['mask_BT'], x['adv_BT'], 0)
  np.testing.assert_array_equal(grad, -adv_BT)
  assert float(loss) == pytest.approx(-(adv_BT * x['logp_BT']).sum(), rel=1e-5)


@pytest.mark.parametrize('adv', [1.0, -1.0])
def test_the_cap_bounds_the_weight_for_either_sign_of_the_advantage(adv):
  x = row([-0.1], [-5.0], [adv], [1])
  assert float(_grad(**x, cap=2.0)[1][0, 0]) == -2.0 * adv


def test_small_ratios_are_not_raised():
  x = row([-5.0], [-0.1], [1.0], [1])
  assert float(_grad(**x, cap=2.0)[1][0, 0]) == pytest.approx(-np.exp(-4.9), rel=1e-5)


def test_weights_carry_no_gradient():
  x = row([-1.0], [-1.5], [3.0], [1])
  # With a gradient through the weight it would be -A w (1 + log p) = 0.
  assert float(_grad(**x, cap=2.0)[1][0, 0]) == pytest.approx(
    -3 * np.exp(0.5), rel=1e-6
  )


def test_gradients_equal_finite_differences_where_the_weight_is_constant():
  x = example(3)
  x['mu_logp_BT'] = x['logp_BT'] - 5  # far above the cap: w = C around here
  rest = {k: jnp.asarray(v) for k, v in x.items() if k != 'logp_BT'}
  fn = functools.partial(policy_loss.reinforce_tis, cap=2.0, **rest)
  test_util.check_grads(
    jax.jit(fn), (jnp.asarray(x['logp_BT']),), 1, ['rev'], 1e-2, 1e-2
  )


def test_an_excluded_position_cannot_overflow():
  x = row([-1.0, -1.0, 0.0], [-1.0, -1.1, -200.0], [1.0, 1.0, 1.0], [1, 1, 0])
  loss, grad = _grad(**x, cap=1e9)
  assert float(loss) == pytest.approx(1 + np.exp(0.1), rel=1e-6)
  assert np.isfinite(np.asarray(grad)).all()


@pytest.mark.parametrize('value', [1e4, -1e4, -np.inf, np.inf, np.nan])
def test_nothing_in_a_masked_slot_reaches_loss_or_gradient(value):
  clean = example(1)
  dirty = {
    k: v if k == 'mask_BT' else np.where(clean['mask_BT'], v, np.float32(value))
    for k, v in clean.items()
  }
  assert fixtures.same_bits(_grad(**clean, cap=2.0), _grad(**dirty, cap=2.0))


def test_the_ratio_is_one_where_masked():
  x = example(2)
  got = np.asarray(policy_loss.ratio(x['logp_BT'], x['mu_logp_BT'], x['mask_BT']))
  assert (got[~x['mask_BT']] == 1).all()
  want = np.exp(np.float64(x['logp_BT']) - x['mu_logp_BT'])
  np.testing.assert_allclose(got[x['mask_BT']], want[x['mask_BT']], rtol=1e-5)


def test_jit_computes_the_same():
  x = jax.tree.map(jnp.asarray, example(4))
  plain = policy_loss.reinforce_tis(**x, cap=2.0)
  assert float(plain) == pytest.approx(float(_loss(**x, cap=2.0)), rel=1e-6)
