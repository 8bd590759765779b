"""Log-probability of drawn tokens within their recorded kept sets, from full logits.

  log q(a | S) = z_a / T - logsumexp_{j in S} z_j / T

S is data, recorded by the sampler and never recomputed. The gradient with respect to
the logits is (1[i = a] - q_i) / T inside S and 0 outside; a set of one gives exactly 0
(SWE-1.7 post, Cognition, 2026-07). A token without a set is normalised over the
whole vocabulary.

This is the dense form, which builds [B, T, V]: right for small vocabularies, and the
reference for `head.score`, which computes the same from hidden states without it.
"""

from flax import struct
import jax
import jax.numpy as jnp

from swe17.ops import kept_set


@struct.dataclass
class Scores:
  """Per token, [B, T], float32 but for the last; only the first carries a gradient.

  Attributes:
    logp_BT: within the kept set.
    kept_entropy_BT: nats, of the learner's distribution renormalised on the set.
    kept_mass_BT: the mass that the learner's full distribution puts on the set.
    measured_BT: bool, where `kept_mass_BT` was measured; it is 0 elsewhere.
  """

  logp_BT: jax.Array
  kept_entropy_BT: jax.Array
  kept_mass_BT: jax.Array
  measured_BT: jax.Array


def score(
  logits_BTV: jax.Array,
  token_BT: jax.Array,
  kept_ids_BTK: jax.Array,
  temperature_BT: jax.Array,
  *,
  replay: bool,
) -> Scores:
  """Scores drawn tokens from full logits (the dense form).

  Args:
    logits_BTV: float32 raw logits for the position that drew each token.
    token_BT: int32 drawn tokens.
    kept_ids_BTK: int32 padded kept sets, -1 = none.
    temperature_BT: float32 > 0, the sampler's own for each token.
    replay: renormalise over the kept set; False normalises over the vocabulary (the
      ablation), while the two diagnostics still speak of the set.
  """
  z_BTV = logits_BTV / temperature_BT[:, :, None]
  member_BTV = kept_set.member(kept_ids_BTK, logits_BTV.shape[-1])
  inside_BTV = jnp.where(member_BTV, z_BTV, -jnp.inf)
  full_BT = jax.nn.logsumexp(z_BTV, axis=-1)
  kept_BT = jax.nn.logsumexp(inside_BTV, axis=-1)
  # A one-hot product instead of a gather: its gradient needs no scatter.
  chosen_BTV = jnp.arange(logits_BTV.shape[-1])[None, None, :] == token_BT[:, :, None]
  z_BT = jnp.sum(jnp.where(chosen_BTV, z_BTV, 0.0), axis=-1)
  logp_BT = z_BT - (kept_BT if replay else full_BT)
  stop = jax.lax.stop_gradient
  return Scores(
    logp_BT=logp_BT,
    kept_entropy_BT=stop(
      kept_set.entropy(inside_BTV.reshape(-1, inside_BTV.shape[-1])).reshape(z_BT.shape)
    ),
    kept_mass_BT=stop(jnp.exp(kept_BT - full_BT)),
    measured_BT=jnp.ones(z_BT.shape, bool),
  )
