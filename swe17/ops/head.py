"""Scores of drawn tokens from hidden states: `logprob.score` without [T, V].

Three ways, chosen by two static flags, each a composition of the two heads:

  replay             kept head
  replay and whole   kept head; tokens without a set by the vocabulary head
  no replay          vocabulary head; the kept head for diagnostics, without gradient

The mass that the learner puts on the kept set needs the whole vocabulary's normaliser:

  log S = log p(a) - log q(a | S)

Without replay it comes for free; with it, it is measured at a random share of places
(DESIGN.md 3).
"""

import dataclasses

import jax
import jax.numpy as jnp

from swe17.ops import head_sharding, kept_head, logprob, vocab_head


@dataclasses.dataclass(frozen=True)
class Plan:
  """Static choices. Only the two of the mass change what is returned."""

  kept: kept_head.Plan = kept_head.Plan()
  vocab: vocab_head.Plan = vocab_head.Plan()
  shard: head_sharding.Shard | None = None
  mass_share: int = 32  # the mass is measured at 1 place in so many; 0: at none
  mass_seed: int = 0


def score(
  hidden_BTD: jax.Array,
  embed_VD: jax.Array,
  token_BT: jax.Array,
  kept_ids_BTK: jax.Array,
  temperature_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  replay: bool,
  whole: bool,
  plan: Plan,
) -> logprob.Scores:
  """Scores drawn tokens from the hidden states that drew them.

  Where `mask_BT` is False every field is 0 and the slot may hold anything, also NaN.

  Args:
    hidden_BTD: float32 final hidden states.
    embed_VD: unembedding, float32 or bfloat16.
    token_BT: int32 drawn tokens.
    kept_ids_BTK: int32 padded kept sets of distinct ids, negative = none.
    temperature_BT: float32 > 0, the sampler's own for each token; no gradient.
    mask_BT: bool, True where a token was sampled.
    replay: renormalise over the kept set; False normalises over the vocabulary.
    whole: under replay, whether tokens without a set may occur (top_p = 1 somewhere);
      they are normalised over the vocabulary. If False, such a token gives NaN in value
      and gradient.
    plan: how the work is cut and split, and where the mass is measured.
  """
  shape = token_BT.shape
  h_XD = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
  token_X, temperature_X = token_BT.reshape(-1), temperature_BT.reshape(-1)
  ids_XK = kept_ids_BTK.reshape(-1, kept_ids_BTK.shape[-1])
  mask_X = mask_BT.reshape(-1)
  free_X = mask_X & jnp.all(ids_XK < 0, axis=1)  # nothing was filtered

  def full(
    h_XD: jax.Array, w_VD: jax.Array, at_X: jax.Array, cut: vocab_head.Plan
  ) -> tuple:
    args = (h_XD, w_VD, token_X, temperature_X, at_X)
    return vocab_head.log_prob(*args, plan=cut, shard=plan.shard)

  def kept(h_XD: jax.Array, w_VD: jax.Array, at_X: jax.Array) -> tuple:
    args = (h_XD, w_VD, token_X, ids_XK, temperature_X, at_X)
    return kept_head.log_prob(*args, plan=plan.kept, shard=plan.shard)

  fixed = jax.lax.stop_gradient((h_XD, embed_VD))
  if replay:
    set_X = mask_X & ~free_X if whole else mask_X
    logp_X, entropy_X = kept(h_XD, embed_VD, set_X)
    measured_X, ratio_X = jnp.zeros_like(mask_X), logp_X
    if plan.mass_share:
      measured_X = set_X & _places(plan, token_X, mask_X)
      # One chunk, no wider than the places.
      lanes = min(plan.vocab.tokens, -(-token_X.shape[0] // plan.mass_share))
      cut = dataclasses.replace(plan.vocab, tokens=lanes)
      ratio_X = full(*fixed, measured_X, cut)[0] - logp_X
    if whole:  # what one head leaves out is 0 there
      free_logp_X, free_entropy_X = full(h_XD, embed_VD, free_X, plan.vocab)
      logp_X, entropy_X = logp_X + free_logp_X, entropy_X + free_entropy_X
      measured_X |= free_X
  else:
    logp_X, full_entropy_X = full(h_XD, embed_VD, mask_X, plan.vocab)
    kept_X, kept_entropy_X = kept(*fixed, mask_X & ~free_X)
    entropy_X = jnp.where(free_X, full_entropy_X, kept_entropy_X)
    ratio_X, measured_X = logp_X - kept_X, mask_X
  mass_X = jnp.where(free_X, 1.0, jnp.exp(jnp.where(measured_X, ratio_X, 0.0)))
  mass_X = jax.lax.stop_gradient(jnp.where(measured_X, mass_X, 0.0))
  fields = (logp_X, entropy_X, mass_X, measured_X)
  return logprob.Scores(*(x.reshape(shape) for x in fields))


def _places(plan: Plan, token_X: jax.Array, mask_X: jax.Array) -> jax.Array:
  """Where the mass is measured: one random place of every `mass_share` in a row.

  The seed and a sum over the micro-batch's tokens make the key, so that a batch is
  measured alike when it is repeated and no place is always left out.
  """
  X = token_X.shape[0]
  at_X = jnp.arange(X, dtype=jnp.uint32)
  seen_X = jnp.where(mask_X, token_X, 0).astype(jnp.uint32)
  key = jax.random.key(plan.mass_seed)
  key = jax.random.fold_in(key, jnp.sum(seen_X * (2 * at_X + 1)))
  place_G = jax.random.randint(key, (-(-X // plan.mass_share),), 0, plan.mass_share)
  return place_G[at_X // plan.mass_share] == at_X % plan.mass_share
