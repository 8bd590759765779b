"""Log-probability within kept sets straight from hidden states, without [T, V].

  log q(a | S) = z_a - logsumexp_{j in S} z_j,   z_j = h . w_j / T

It depends on the rows of the unembedding that S names and on no other (DESIGN.md 3; the
kept set is replayed as in the SWE-1.7 post, Cognition, 2026-07). A set of one gives
exactly 0 with no gradient, so those tokens drop out, as masked ones do. The others go
into two buckets by the width of their sets, and each bucket through a loop of chunks
whose trip count follows the data: any number of tokens fits, none is dropped. Only one
chunk's rows exist at a time. With g_j = (1[j = a] - q_j) / T inside S,

  d logp / d h = sum_j g_j w_j      d logp / d w_j = g_j h

The first is summed while the rows are at hand and kept for the backward pass; the
second is left to `row_gradient`. Neither adds twice to one place in an order that
could change: same inputs, same bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from swe17.ops import head_sharding as hs
from swe17.ops import row_gradient


@dataclasses.dataclass(frozen=True)
class Plan:
  """How the work is cut. None of it changes a value beyond rounding."""

  narrow: int = 8  # widest set of the first bucket
  rows: int = 1024  # unembedding rows gathered at once
  pairs: int = 64  # (token, id) pairs summed at once in the backward pass


def log_prob(
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  ids_XK: jax.Array,
  temperature_X: jax.Array,
  mask_X: jax.Array,
  *,
  plan: Plan,
  shard: hs.Shard | None,
) -> tuple[jax.Array, jax.Array]:
  """log q of drawn tokens within their sets, and the sets' entropy without gradient.

  Where `mask_X` is False both are exactly 0 and nothing in the slot is looked at. A
  token without a set, or outside of its own, has no such log-probability: NaN in value
  and gradient, so that the step is refused rather than wrong.

  Args:
    h_XD: float32 hidden states that drew each token.
    embed_VD: unembedding, float32 or bfloat16; its gradient is dense, of its dtype.
    token_X: int32 drawn tokens.
    ids_XK: int32 padded sets of distinct ids, negative = none.
    temperature_X: float32 > 0; carries no gradient.
    mask_X: bool.
    plan: how the work is cut.
    shard: how it is split over a mesh; None: not at all.

  Returns:
    (logp_X, entropy_X), float32, entropy in nats.
  """
  V = embed_VD.shape[0]
  inside_XK = mask_X[:, None] & (ids_XK >= 0) & (ids_XK < V)
  ids_XK = jnp.where(inside_XK, ids_XK, -1)
  found_X = jnp.any(inside_XK & (ids_XK == token_X[:, None]), axis=1)
  alone_X = found_X & (jnp.sum(inside_XK, axis=1) == 1)
  active_X = mask_X & ~alone_X
  temperature_X = jnp.where(active_X, temperature_X, 1.0)
  logp_X, entropy_X = _kept(
    hs.Static(plan, shard), h_XD, embed_VD, token_X, ids_XK, temperature_X, active_X
  )
  return logp_X, jax.lax.stop_gradient(entropy_X)


def _buckets(
  ids_XK: jax.Array, active_X: jax.Array, narrow: int
) -> tuple[jax.Array, list[tuple[int, jax.Array, jax.Array]]]:
  """Tokens in bucket order, and (width, first, end) of each bucket in it."""
  K = ids_XK.shape[1]
  # One past the last used slot, so that sets with holes land where they fit.
  width_X = jnp.max(jnp.where(ids_XK >= 0, jnp.arange(1, K + 1)[None, :], 0), axis=1)
  widths = [narrow, K] if narrow < K else [K]
  bucket_X = (width_X > widths[0]).astype(jnp.int32)
  bucket_X = jnp.where(active_X, bucket_X, len(widths))
  first, buckets = jnp.zeros((), jnp.int32), []
  for i, k in enumerate(widths):
    end = jnp.sum(bucket_X <= i)
    buckets.append((k, first, end))
    first = end
  return jnp.argsort(bucket_X, stable=True), buckets


def _coefficients(
  z_XK: jax.Array, chosen_XK: jax.Array, temperature_X: jax.Array
) -> jax.Array:
  """g = (1[j = a] - q_j) / T from tempered logits, -inf outside of the set."""
  q_XK = jax.nn.softmax(z_XK, axis=-1)
  return (chosen_XK.astype(z_XK.dtype) - q_XK) / temperature_X[:, None]


def _gather(
  static: hs.Static[Plan],
  slope: bool,
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  ids_XK: jax.Array,
  temperature_X: jax.Array,
  active_X: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Tempered logits [X, K] of active sets, -inf elsewhere, and d logp / d h [X, D].

  Without `slope` the second is [X, 0].
  """
  (X, K), V, shard = ids_XK.shape, embed_VD.shape[0], static.shard
  order_X, buckets = _buckets(ids_XK, active_X, static.plan.narrow)
  begin = hs.offset(shard, V)
  out = (jnp.full((X, K), -jnp.inf), jnp.zeros(h_XD.shape if slope else (X, 0)))

  def chunk(k: int, first: jax.Array, C: int, end: jax.Array, carry: tuple) -> tuple:
    z_XK, slope_XD = carry
    x_C, _, to_C = hs.lanes(order_X, first, C, end)
    ids_Ck, temperature_C = ids_XK[x_C, :k], temperature_X[x_C]
    own_Ck = (ids_Ck >= begin) & (ids_Ck < begin + V)
    w_CkD = embed_VD[jnp.where(own_Ck, ids_Ck - begin, 0)].astype(jnp.float32)
    z_Ck = jnp.where(own_Ck, jnp.einsum('CKD,CD->CK', w_CkD, h_XD[x_C]), 0.0)
    z_Ck = hs.sum_vocab(z_Ck, shard) / temperature_C[:, None]
    z_Ck = jnp.where(ids_Ck >= 0, z_Ck, -jnp.inf)
    z_XK = z_XK.at[to_C, :k].set(z_Ck, mode='drop', unique_indices=True)
    if slope:
      chosen_Ck = ids_Ck == token_X[x_C][:, None]
      g_Ck = jnp.where(own_Ck, _coefficients(z_Ck, chosen_Ck, temperature_C), 0.0)
      slope_CD = jnp.einsum('CK,CKD->CD', g_Ck, w_CkD)
      slope_XD = slope_XD.at[to_C].set(slope_CD, mode='drop', unique_indices=True)
    return z_XK, slope_XD

  for k, first, end in buckets:
    C = min(X, max(1, static.plan.rows // k))

    def body(i: jax.Array, carry: tuple, k=k, C=C, first=first, end=end) -> tuple:
      return chunk(k, first + i * C, C, end, carry)

    out = jax.lax.fori_loop(0, (end - first + C - 1) // C, body, out)
  return out[0], hs.sum_vocab(out[1], shard)


def _finish(
  z_XK: jax.Array, chosen_XK: jax.Array, active_X: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """log q and entropy; exactly 0 for tokens that are not active."""
  z_XK = jnp.where(active_X[:, None], z_XK, 0.0)
  logq_XK = jax.nn.log_softmax(z_XK, axis=-1)
  logp_X = jnp.sum(jnp.where(chosen_XK, logq_XK, 0.0), axis=-1)
  logp_X = jnp.where(jnp.any(chosen_XK, axis=-1), logp_X, jnp.nan)
  # q log q -> 0 as q -> 0: -inf outside of the set.
  term_XK = jnp.where(jnp.isneginf(logq_XK), 0.0, jnp.exp(logq_XK) * logq_XK)
  entropy_X = -jnp.sum(term_XK, axis=-1)
  return jnp.where(active_X, logp_X, 0.0), jnp.where(active_X, entropy_X, 0.0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kept(
  static: hs.Static[Plan],
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  ids_XK: jax.Array,
  temperature_X: jax.Array,
  active_X: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  gather = functools.partial(_gather, static, False)
  z_XK, _ = hs.spread(gather, static.shard, 'XVXXXX', 'XX')(
    h_XD, embed_VD, token_X, ids_XK, temperature_X, active_X
  )
  return _finish(z_XK, ids_XK == token_X[:, None], active_X)


def _kept_fwd(
  static: hs.Static[Plan],
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  ids_XK: jax.Array,
  temperature_X: jax.Array,
  active_X: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
  gather = functools.partial(_gather, static, True)
  z_XK, slope_XD = hs.spread(gather, static.shard, 'XVXXXX', 'XX')(
    h_XD, embed_VD, token_X, ids_XK, temperature_X, active_X
  )
  chosen_XK = ids_XK == token_X[:, None]
  found_X = jnp.any(chosen_XK, axis=-1)
  g_XK = _coefficients(z_XK, chosen_XK, temperature_X)
  out = _finish(z_XK, chosen_XK, active_X)
  # The unembedding goes along for its shape and dtype alone.
  return out, (h_XD, embed_VD, slope_XD, g_XK, ids_XK, active_X, found_X)


def _kept_bwd(static: hs.Static[Plan], saved: tuple, ct: tuple) -> tuple:
  h_XD, embed_VD, slope_XD, g_XK, ids_XK, active_X, found_X = saved
  ct_X1 = jnp.where(active_X, jnp.where(found_X, ct[0], jnp.nan), 0.0)[:, None]
  dh_XD = jnp.where(active_X[:, None], ct_X1 * slope_XD, 0.0)
  ids_XK = jnp.where(active_X[:, None], ids_XK, -1)

  def embed_gradient(
    ids_XK: jax.Array, g_XK: jax.Array, h_XD: jax.Array, embed_VD: jax.Array
  ) -> tuple[jax.Array]:
    V, K = embed_VD.shape[0], ids_XK.shape[1]
    dw_VD = row_gradient.row_sums(
      jnp.where(ids_XK < 0, -1, ids_XK - hs.offset(static.shard, V)).reshape(-1),
      g_XK.reshape(-1),
      jnp.arange(ids_XK.size) // K,
      h_XD,
      V,
      block=static.plan.pairs,
    )
    return (hs.sum_rows(dw_VD, static.shard).astype(embed_VD.dtype),)

  (dw_VD,) = hs.spread(embed_gradient, static.shard, 'XXXV', 'V')(
    ids_XK, ct_X1 * g_XK, h_XD, embed_VD
  )
  return dh_XD, dw_VD, None, None, None, None


_kept.defvjp(_kept_fwd, _kept_bwd)
