"""Policy-gradient objectives: one function each, composed from small pieces.

`reinforce_tis`, the default:

  L = -1/Z sum_j A_j sum_t sg[min(w_jt, C)] log q(y_jt | S_jt)
  w = exp(logp - mu_logp)

with one denominator Z for the whole optimiser batch: T_max times the number of valid
episodes of the groups that train (SWE-grep post, Cognition: constant T_max as in Dr.
GRPO, arXiv:2503.20783; token-level truncated importance sampling with C = 2). Weights
multiply the log-probability under stop_gradient. Inputs are masked before any
non-linear function, so a value in a masked slot, NaN included, cannot reach loss or
gradient.
"""

import jax
import jax.numpy as jnp


def masked(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """x where the mask is set, else 0: what every non-linear function is given."""
  return jnp.where(mask_BT, x_BT, 0.0)


def ratio(logp_BT: jax.Array, mu_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Importance ratio exp(logp - mu_logp), 1 where masked, no gradient."""
  d_BT = masked(logp_BT, mask_BT) - masked(mu_logp_BT, mask_BT)
  return jnp.exp(jax.lax.stop_gradient(d_BT))


def reinforce_tis(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  cap: float,
) -> jax.Array:
  """Sum over tokens of the truncated-importance-weighted REINFORCE loss.

  Args:
    logp_BT: learner's log-probability, carries the gradient.
    mu_logp_BT: sampler's log-probability at the token's own version.
    adv_BT: advantage of the token's episode.
    mask_BT: bool, True where the token is trained.
    cap: C, the largest weight.

  Returns:
    float32 scalar, not yet divided by the batch's denominator.
  """
  weight_BT = jnp.minimum(ratio(logp_BT, mu_logp_BT, mask_BT), cap)
  return -jnp.sum(weight_BT * masked(adv_BT, mask_BT) * masked(logp_BT, mask_BT))
