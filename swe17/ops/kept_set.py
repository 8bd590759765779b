"""The kept set: which tokens a draw may come from, and the draw itself.

Filters run on float32 logits in this order: temperature, min-p (keep p >= min_p p_max),
top-k, then top-p on the probabilities renormalised over the survivors. Top-p keeps
the smallest prefix, in descending order, whose mass reaches top_p: a token stays
while the mass *before* it is below top_p. Ties break by token id. The set the draw
comes from is the set that is recorded (SWE-1.7 post, Cognition, 2026-07; DESIGN.md
12.1).

The vocabulary is never sorted: `top_k` bounds the set first.
"""

from flax import struct
import jax
import jax.numpy as jnp

_NEVER = -1e30  # a logit so far below another one has no probability
_BLOCK = 128  # ids whose largest logit stands for them in `top_k`


@struct.dataclass
class Draw:
  """One draw per row.

  Attributes:
    token_B: int32.
    logp_B: float32, log-probability within the kept set, exactly 0 for a set of one.
    entropy_B: float32 nats, of softmax(logits / T) over the whole vocabulary.
    kept_ids_BK: int32, -1 beyond the set; one column where no filter was on.
    topk_bound_B: bool, the set would be larger without top-k.
  """

  token_B: jax.Array
  logp_B: jax.Array
  entropy_B: jax.Array
  kept_ids_BK: jax.Array
  topk_bound_B: jax.Array


def filter(
  logits_BV: jax.Array,
  top_p_B: jax.Array,
  min_p_B: jax.Array,
  top_k_B: jax.Array,
  K: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The kept set of tempered logits, at most `K` wide.

  Args:
    logits_BV: float32, already divided by the temperature.
    top_p_B: float32 in (0, 1].
    min_p_B: float32 in [0, 1).
    top_k_B: int32 in [1, K].
    K: static bound of every set.

  Returns:
    (ids_BK, logits_BK, keep_BK): candidates in descending order of logit, ties by id,
    and which of them are kept. At least the first always is.
  """
  # The barrier keeps XLA on CPU from moving slices into the top-k, which it would then
  # run as a full sort of the vocabulary: 4.5 ms instead of .2 at [32, 1024].
  z_BK, ids_BK = jax.lax.optimization_barrier(top_k(logits_BV, K))
  above_BK = z_BK - z_BK[:, :1]  # log(p / p_max)
  survive_BK = above_BK >= jnp.log(min_p_B)[:, None]  # log 0 = -inf keeps all
  survive_BK &= jnp.arange(K)[None, :] < top_k_B[:, None]
  prob_BK = jax.nn.softmax(jnp.where(survive_BK, z_BK, -jnp.inf), axis=-1)
  # Mass before each candidate. A product with a triangle: XLA's cumsum on CPU takes
  # 30 times as long at this size.
  before_BK = jnp.matmul(prob_BK, jnp.triu(jnp.ones((K, K)), k=1), precision='highest')
  keep_BK = survive_BK & ((before_BK < top_p_B[:, None]) | (top_p_B >= 1.0)[:, None])
  return ids_BK, z_BK, keep_BK.at[:, 0].set(True)


def top_k(logits_BV: jax.Array, K: int) -> tuple[jax.Array, jax.Array]:
  """`lax.top_k`: the K largest and their ids, in descending order, ties by id.

  A large vocabulary is cut into blocks. All K lie in the K blocks with the largest
  maxima, ties by block: each block that comes before another one holds an element that
  comes before all of the other's. A quarter of the time for [32, 49,152] and K = 64.
  """
  V = logits_BV.shape[-1]
  blocks = -(-V // _BLOCK)
  if blocks < 4 * K:
    return jax.lax.top_k(logits_BV, K)
  pad = ((0, 0), (0, blocks * _BLOCK - V))
  z_BXv = jnp.pad(logits_BV, pad, constant_values=-jnp.inf)
  z_BXv = z_BXv.reshape(-1, blocks, _BLOCK)
  first_BK = jnp.sort(jax.lax.top_k(jnp.max(z_BXv, axis=-1), K)[1], axis=-1)
  some_BKv = jnp.take_along_axis(z_BXv, first_BK[:, :, None], axis=1)
  z_BK, at_BK = jax.lax.top_k(some_BKv.reshape(-1, K * _BLOCK), K)
  block_BK = jnp.take_along_axis(first_BK, at_BK // _BLOCK, axis=-1)
  return z_BK, (block_BK * _BLOCK + at_BK % _BLOCK).astype(jnp.int32)


def topk_bound(
  logits_BV: jax.Array,
  z_BK: jax.Array,
  keep_BK: jax.Array,
  top_p_B: jax.Array,
  min_p_B: jax.Array,
  top_k_B: jax.Array,
) -> jax.Array:
  """Where top-k decided: without it the set would be larger. bool [B].

  Top-p asks for a share of what top-k left, so a set that top-k decided is often
  smaller than top_k: of 1,000 equal logits, top_k = 32 and top_p = .95 keep 31. What
  tells is the mass among the survivors of min-p alone: below top_p, or for top_p = 1,
  not all of them.

  Args:
    logits_BV: what was filtered.
    z_BK, keep_BK: as `filter` returned them.
    top_p_B, min_p_B, top_k_B: as `filter` took them.
  """
  top_B1 = z_BK[:, :1]
  above_BV = logits_BV - top_B1
  survive_BV = above_BV >= jnp.log(min_p_B)[:, None]
  total_B = jnp.sum(jnp.where(survive_BV, jnp.exp(above_BV), 0.0), axis=-1)
  kept_B = jnp.sum(jnp.where(keep_BK, jnp.exp(z_BK - top_B1), 0.0), axis=-1)
  cut_B = jnp.sum(survive_BV, axis=-1) > top_k_B
  return cut_B & ((kept_B < top_p_B * total_B) | (top_p_B >= 1.0))


def entropy(logits_BV: jax.Array) -> jax.Array:
  """Entropy of softmax(logits) in nats, float32 [B]."""
  top_B1 = jax.lax.stop_gradient(jnp.max(logits_BV, axis=-1, keepdims=True))
  # With e = exp(z - max): log(sum e) - sum(e (z - max)) / sum e, two passes over V. An
  # e of 0, also that of a logit of -inf, adds nothing. Bounded rather than chosen by
  # `where`: half the time on CPU.
  above_BV = jnp.maximum(logits_BV - top_B1, _NEVER)
  e_BV = jnp.exp(above_BV)
  sum_B = jnp.sum(e_BV, axis=-1)
  return jnp.log(sum_B) - jnp.sum(e_BV * above_BV, axis=-1) / sum_B


def draw(
  key_B: jax.Array,
  logits_BV: jax.Array,
  temperature_B: jax.Array,
  top_p_B: jax.Array,
  min_p_B: jax.Array,
  top_k_B: jax.Array,
  K: int,
) -> Draw:
  """Draws one token a row from its kept set and records the set.

  `K` = 0 means that no filter is on: the draw is from the whole vocabulary and no
  set is recorded. Temperature 0 keeps the argmax alone, a set of one for any `K`. Keys
  are consumed.
  """
  greedy_B = temperature_B <= 0
  z_BV = logits_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
  h_B = jnp.where(greedy_B, 0.0, entropy(z_BV))
  if K == 0:
    logp_BV = jax.nn.log_softmax(z_BV, axis=-1)
    noise_BV = jax.vmap(lambda k: jax.random.gumbel(k, z_BV.shape[1:]))(key_B)
    sampled_B = jnp.argmax(z_BV + noise_BV, axis=-1)
    token_B = jnp.where(greedy_B, jnp.argmax(z_BV, axis=-1), sampled_B)
    token_B = token_B.astype(jnp.int32)
    logp_B = jnp.take_along_axis(logp_BV, token_B[:, None], axis=-1)[:, 0]
    logp_B = jnp.where(greedy_B, 0.0, logp_B)
    set_B1 = jnp.where(greedy_B, token_B, -1)[:, None]
    free_B = jnp.zeros(z_BV.shape[:1], bool)
    return Draw(token_B, logp_B, h_B, set_B1, free_B)
  top_k_B = jnp.where(greedy_B, 1, top_k_B)
  ids_BK, z_BK, keep_BK = filter(z_BV, top_p_B, min_p_B, top_k_B, K)
  bound_B = topk_bound(z_BV, z_BK, keep_BK, top_p_B, min_p_B, top_k_B) & ~greedy_B
  z_BK = jnp.where(keep_BK, z_BK, -jnp.inf)
  noise_BK = jax.vmap(lambda k: jax.random.gumbel(k, (K,)))(key_B)
  at_B1 = jnp.argmax(z_BK + noise_BK, axis=-1)[:, None]
  token_B = jnp.take_along_axis(ids_BK, at_B1, axis=-1)[:, 0]
  logp_B = jnp.take_along_axis(z_BK, at_B1, axis=-1)[:, 0]
  logp_B = logp_B - jax.nn.logsumexp(z_BK, axis=-1)
  return Draw(token_B, logp_B, h_B, jnp.where(keep_BK, ids_BK, -1), bound_B)


def member(kept_ids_BTK: jax.Array, V: int) -> jax.Array:
  """Membership of every vocabulary id in each padded set, bool [B, T, V].

  A token without a set (all -1) is a member everywhere: nothing was filtered.
  """
  B, T, _ = kept_ids_BTK.shape
  b, t = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
  ids_BTK = jnp.where(kept_ids_BTK < 0, V, kept_ids_BTK)  # V is out of range: dropped
  empty_BTV = jnp.zeros((B, T, V), bool)
  in_set_BTV = empty_BTV.at[b, t, ids_BTK].set(True, mode='drop')
  return in_set_BTV | jnp.all(kept_ids_BTK < 0, axis=-1, keepdims=True)
