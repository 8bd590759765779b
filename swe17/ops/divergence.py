"""How far the learner's policy is from the one that sampled: sums, ready to be added.

On sampled tokens, with d = logp - mu_logp (Schulman, "Approximating KL divergence"):
k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. Everything here returns sums and maxima, so
that micro-batches add up to exact batch statistics; `finish` turns them into means.
"""

from flax import struct
import jax
import jax.numpy as jnp

from swe17.ops import policy_loss


@struct.dataclass
class Sums:
  """Additive pieces, float32 scalars (`ratio_max` and `k3_max` combine by max)."""

  tokens: jax.Array
  signal: jax.Array  # tokens whose kept set is larger than one
  k1: jax.Array
  k3: jax.Array
  k3_signal: jax.Array
  ratio: jax.Array
  ratio_squared: jax.Array
  outside: jax.Array  # ratio outside [.9, 1.1]
  capped: jax.Array  # ratio above the cap
  ratio_max: jax.Array
  k3_max: jax.Array


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
  d_BT = policy_loss.masked(logp_BT, mask_BT) - policy_loss.masked(mu_logp_BT, mask_BT)
  d_BT = jax.lax.stop_gradient(d_BT)
  ratio_BT = jnp.exp(d_BT)
  # expm1 keeps k3 exact near 0, where e^d - 1 - d would be rounding noise.
  k3_BT = jnp.maximum(jnp.expm1(d_BT) - d_BT, 0.0)
  outside_BT = (ratio_BT < 0.9) | (ratio_BT > 1.1)
  return Sums(
    tokens=mask.sum(),
    signal=signal.sum(),
    k1=-jnp.sum(d_BT * mask),
    k3=jnp.sum(k3_BT * mask),
    k3_signal=jnp.sum(k3_BT * signal),
    ratio=jnp.sum(ratio_BT * mask),
    ratio_squared=jnp.sum(ratio_BT**2 * mask),
    outside=jnp.sum(outside_BT * mask),
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
  return {
    'k1': s.k1 / n,
    'k3': s.k3 / n,
    'k3_signal': s.k3_signal / s.signal,
    'signal_count': s.signal,
    'ratio_mean': s.ratio / n,
    'ratio_max': s.ratio_max,
    'ratio_outside': s.outside / n,
    'tis_capped_share': s.capped / n,
    'ess': s.ratio**2 / (n * s.ratio_squared),
  }
