"""How far the learner's policy is from the one that sampled: sums, ready to be added.

On sampled tokens, with d = logp - mu_logp (Schulman, "Approximating KL divergence"):
k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. Of a whole episode the same with D = sum_t d_t,
and its geometric ratio is exp(D / n). Everything here returns sums and maxima, so that
micro-batches add up to exact batch statistics; `finish` and `finish_episodes` turn them
into means.
"""

from flax import struct
import jax
import jax.numpy as jnp

from swe17.ops import masking


@struct.dataclass
class Sums:
  """Additive pieces, float32 scalars (`ratio_max` and `k3_max` combine by max)."""

  tokens: jax.Array
  signal: jax.Array  # tokens whose kept set is larger than one
  k1: jax.Array
  k2: jax.Array
  k3: jax.Array
  k1_signal: jax.Array
  k2_signal: jax.Array
  k3_signal: jax.Array
  ratio: jax.Array
  ratio_squared: jax.Array
  outside: jax.Array  # ratio outside [.9, 1.1]
  outside_signal: jax.Array
  capped: jax.Array  # ratio above the cap
  ratio_max: jax.Array
  k3_max: jax.Array


def _outside(ratio: jax.Array) -> jax.Array:
  """Not inside [.9, 1.1]; said so that NaN is outside."""
  return ~((ratio >= 0.9) & (ratio <= 1.1))


def sums(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  mask_BT: jax.Array,
  signal_BT: jax.Array,
  *,
  cap: float,
) -> Sums:
  """Divergence sums over sampled tokens; `signal_BT` marks kept sets larger than 1."""
  mask, signal = mask_BT.astype(jnp.float32), (mask_BT & signal_BT).astype(jnp.float32)
  d_BT = masking.log_ratio(logp_BT, mu_logp_BT, mask_BT)
  ratio_BT = jnp.exp(d_BT)
  k2_BT = jnp.square(d_BT) / 2
  # expm1 keeps k3 exact near 0, where e^d - 1 - d would be rounding noise.
  k3_BT = jnp.maximum(jnp.expm1(d_BT) - d_BT, 0.0)
  outside_BT = _outside(ratio_BT)
  return Sums(
    tokens=mask.sum(),
    signal=signal.sum(),
    k1=-jnp.sum(d_BT * mask),
    k2=jnp.sum(k2_BT * mask),
    k3=jnp.sum(k3_BT * mask),
    k1_signal=-jnp.sum(d_BT * signal),
    k2_signal=jnp.sum(k2_BT * signal),
    k3_signal=jnp.sum(k3_BT * signal),
    ratio=jnp.sum(ratio_BT * mask),
    ratio_squared=jnp.sum(ratio_BT**2 * mask),
    outside=jnp.sum(outside_BT * mask),
    outside_signal=jnp.sum(outside_BT * signal),
    capped=jnp.sum((ratio_BT > cap) * mask),
    ratio_max=jnp.max(jnp.where(mask_BT, ratio_BT, 0.0)),
    k3_max=jnp.max(jnp.where(mask_BT, k3_BT, 0.0)),
  )


def add(a: Sums, b: Sums) -> Sums:
  """Combines two disjoint sets of tokens."""
  total = jax.tree.map(jnp.add, a, b)
  return total.replace(
    ratio_max=jnp.maximum(a.ratio_max, b.ratio_max),
    k3_max=jnp.maximum(a.k3_max, b.k3_max),
  )


def zero() -> Sums:
  """The sums of no tokens."""
  return Sums(*(jnp.zeros(()) for _ in range(len(Sums.__dataclass_fields__))))


def finish(s: Sums) -> dict[str, jax.Array]:
  """Means over tokens. ESS is (sum w)^2 / (n sum w^2), 1 when all ratios are equal.

  With no token (or no signal token) the mean does not exist: it comes out NaN, which
  the host writes as null, never as 0.
  """
  n = s.tokens
  some = n > 0
  return {
    'k1': s.k1 / n,
    'k2': s.k2 / n,
    'k3': s.k3 / n,
    'k3_max': jnp.where(some, s.k3_max, jnp.nan),
    'k1_signal': s.k1_signal / s.signal,
    'k2_signal': s.k2_signal / s.signal,
    'k3_signal': s.k3_signal / s.signal,
    'signal_count': s.signal,
    'ratio_mean': s.ratio / n,
    'ratio_max': jnp.where(some, s.ratio_max, jnp.nan),
    'ratio_outside': s.outside / n,
    'ratio_outside_signal': s.outside_signal / s.signal,
    'tis_capped_share': s.capped / n,
    'ess': s.ratio**2 / (n * s.ratio_squared),
  }


@struct.dataclass
class Episodes:
  """Additive pieces by episode, float32 [J]; its rows may lie in any micro-batch."""

  tokens_J: jax.Array
  log_ratio_J: jax.Array  # D, the sum of d


def episodes(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  mask_BT: jax.Array,
  segment_BT: jax.Array,
  episode_BT: jax.Array,
  *,
  P: int,
  J: int,
) -> Episodes:
  """Sums over sampled tokens by episode. `P` and `J` as `masking.episode_totals`."""
  d_BT = masking.log_ratio(logp_BT, mu_logp_BT, mask_BT)
  one_BT = mask_BT.astype(jnp.float32)
  total = [
    masking.episode_totals(x_BT, segment_BT, episode_BT, P=P, J=J)
    for x_BT in (one_BT, d_BT)
  ]
  return Episodes(*total)


def finish_episodes(e: Episodes) -> dict[str, jax.Array]:
  """Means over episodes that have a sampled token; NaN where there is none.

  `episode_k1` is the mean of -D: an estimate of KL(mu || pi) of whole episodes in nats.
  `episode_k3` is infinite where e^D overflows. `episode_ess` is by logarithms and
  always finite. Shares and the maximum are of the geometric ratio exp(D / n).
  """
  some_J = e.tokens_J > 0
  n = some_J.sum().astype(jnp.float32)
  D_J = jnp.where(some_J, e.log_ratio_J, 0.0)
  mean_J = masking.average(D_J, e.tokens_J)
  geometric_J = jnp.exp(mean_J)
  outside_J = some_J & _outside(geometric_J)
  log_w_J = jnp.where(some_J, D_J, -jnp.inf)
  # logsumexp of nothing is -inf, and -inf - -inf is NaN, as wanted.
  log_sum = jax.nn.logsumexp(log_w_J)
  log_square = jax.nn.logsumexp(2 * log_w_J)
  distance_J = jnp.abs(mean_J)
  return {
    'episode_count': n,
    'episode_k1': -D_J.sum() / n,
    'episode_k2': jnp.square(D_J).sum() / 2 / n,
    'episode_k3': jnp.maximum(jnp.expm1(D_J) - D_J, 0.0).sum() / n,
    'episode_ess': jnp.exp(2 * log_sum - log_square) / n,
    'episode_outside': outside_J.sum() / n,
    'episode_distance_max': jnp.where(n > 0, distance_J.max(initial=0.0), jnp.nan),
  }
