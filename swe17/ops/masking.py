"""Sums over turns and episodes of packed rows, and the masks that are made of them.

A row holds segments of several episodes; an episode may have segments in several rows.
With d_t = logp_t - mu_logp_t on the n_j sampled tokens of episode j, its geometric
ratio is exp(1/n_j sum_t d_t), the length-normalised ratio of GSPO (arXiv:2507.18071);
that of a turn is the same over its own tokens (ST-PPO, arXiv:2511.20718).
The plain product explodes with length (1.1^100 = 13,780), so it is never a weight here.

Letters used here: J episodes of a batch, P places of segments in a row. No scatter:
sums are over masks, so they are the same in any run, and a value that is no number
stays with its own episode (a product with a one-hot matrix would hand it to all).
"""

import jax
import jax.numpy as jnp


def masked(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """x where the mask is set, else 0: what every non-linear function is given."""
  return jnp.where(mask_BT, x_BT, 0.0)


def log_ratio(
  logp_BT: jax.Array, mu_logp_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """d = logp - mu_logp, 0 where masked, no gradient."""
  d_BT = masked(logp_BT, mask_BT) - masked(mu_logp_BT, mask_BT)
  return jax.lax.stop_gradient(d_BT)


def episode_totals(
  x_BT: jax.Array,
  segment_BT: jax.Array,
  episode_BT: jax.Array,
  *,
  P: int,
  J: int,
) -> jax.Array:
  """Sums of x by episode over all rows given, float32 [J].

  Args:
    x_BT: values, 0 where a token does not count.
    segment_BT: int32 place of the token's segment in its row, 1 .. P; 0 = padding.
    episode_BT: int32 episode in 0 .. J - 1, one for the whole of a segment.
    P: static bound of segments in a row.
    J: static bound of episodes.
  """
  place_BTP = segment_BT[:, :, None] == jnp.arange(1, P + 1)[None, None, :]
  x_BP = jnp.sum(jnp.where(place_BTP, x_BT[:, :, None], 0.0), axis=1)
  of_BP = jnp.max(jnp.where(place_BTP, episode_BT[:, :, None], -1), axis=1)
  own_PJ = of_BP.reshape(-1)[:, None] == jnp.arange(J)[None, :]
  return jnp.sum(jnp.where(own_PJ, x_BP.reshape(-1)[:, None], 0.0), axis=0)


def turn_totals(x_BT: jax.Array, turn_BT: jax.Array) -> jax.Array:
  """The sum of x over each token's own turn, float32 [B, T].

  `turn_BT` numbers the turns of a row; the tokens of a turn lie side by side. Computed
  as (sum up to t) + (sum from t on) - x_t by two scans that restart at every turn.
  """
  change_BT = turn_BT[:, 1:] != turn_BT[:, :-1]
  edge_B1 = jnp.ones_like(change_BT[:, :1])

  def restart(a: tuple, b: tuple) -> tuple:
    (a_new, a_sum), (b_new, b_sum) = a, b
    return a_new | b_new, jnp.where(b_new, b_sum, a_sum + b_sum)

  first_BT = jnp.concatenate([edge_B1, change_BT], axis=1)
  last_BT = jnp.concatenate([change_BT, edge_B1], axis=1)
  scan = jax.lax.associative_scan
  upto_BT = scan(restart, (first_BT, x_BT), axis=1)[1]
  from_BT = scan(restart, (last_BT, x_BT), axis=1, reverse=True)[1]
  return upto_BT + from_BT - x_BT


def average(total: jax.Array, count: jax.Array) -> jax.Array:
  """total / count, and 0 where there is nothing to count."""
  return total / jnp.maximum(count, 1.0)


def geometric(episode_log_ratio_BT: jax.Array, *, low: float, high: float) -> jax.Array:
  """Keeps an episode if its geometric ratio is inside [low, high]; bool [B, T].

  SWE-grep's stabiliser "mask extreme ratios" (post, Cognition), by geometric mean.
  Written as 'keep if inside', so that NaN is not kept.
  """
  mean_BT = episode_log_ratio_BT
  return (mean_BT >= jnp.log(low)) & (mean_BT <= jnp.log(high))


def off_policy(
  episode_log_ratio_BT: jax.Array, adv_BT: jax.Array, *, delta: float
) -> jax.Array:
  """Off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556, section 3.1).

  Drops an episode with a negative advantage if 1/n sum_t (mu_logp_t - logp_t) > delta:
  what the policy no longer does need not be pushed down. bool [B, T].
  """
  return (adv_BT >= 0) | (-episode_log_ratio_BT <= delta)
