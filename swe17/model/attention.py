"""Grouped-query attention: over packed rows for training, over a cache for serving.

Both compute softmax(q k^T / sqrt(H)) v. The packed form goes through the queries chunk
by chunk and keeps only the output and its log-normaliser for the backward pass, which
computes the probabilities again: memory is linear in T, and on CPU the gradient takes
half the time of the one that JAX derives (FlashAttention, arXiv:2205.14135).
"""

import functools

import jax
import jax.numpy as jnp

_NEVER = -1e30  # the score of a key that a query may not see; exp of it is 0


def cached(
  q_BTQH: jax.Array,
  k_PCHS: jax.Array,
  v_PCSU: jax.Array | None,
  table_BJ: jax.Array,
  position_BT: jax.Array,
  latent: int = 0,
) -> jax.Array:
  """Attention to a cache in pages: row b has the positions of `table_BJ[b]`'s pages.

  A query at position i sees positions up to i; one beyond the table (padding) sees
  whatever is there, and gets no NaN. Values may have other dimensions (U) than queries
  and keys; without any, they are the first `latent` dimensions of the keys.

  Goes page by page, as far as the longest row in use needs it, with a running maximum
  and sum in float32, so the cache is never gathered as a whole. A page that a row does
  not reach changes none of its bits: all its weights are exactly 0.
  """
  B, T, Q, H = q_BTQH.shape
  C, S = k_PCHS.shape[1], k_PCHS.shape[3]
  q_BCXH = _grouped(q_BTQH, C) / jnp.sqrt(jnp.float32(H)).astype(q_BTQH.dtype)
  real_BT = position_BT < table_BJ.shape[1] * S
  longest = jnp.max(jnp.where(real_BT, position_BT, 0))

  def page(j: jax.Array, carry: tuple) -> tuple:
    out_BCXU, top_BCX1, sum_BCX1 = carry
    at_B = jax.lax.dynamic_index_in_dim(table_BJ, j, axis=1, keepdims=False)
    k_BCHS = k_PCHS.at[at_B].get(mode='clip')
    score_BCXS = _float32('BCXH,BCHS->BCXS', q_BCXH, k_BCHS)
    seen_BTS = (j * S + jnp.arange(S))[None, None] <= position_BT[:, :, None]
    seen_BXS = jnp.tile(seen_BTS, (1, Q // C, 1))
    score_BCXS = jnp.where(seen_BXS[:, None], score_BCXS, _NEVER)
    most_BCX1 = jnp.maximum(top_BCX1, jnp.max(score_BCXS, axis=-1, keepdims=True))
    fade_BCX1 = jnp.exp(top_BCX1 - most_BCX1)
    weight_BCXS = jnp.exp(score_BCXS - most_BCX1)
    sum_BCX1 = sum_BCX1 * fade_BCX1 + jnp.sum(weight_BCXS, axis=-1, keepdims=True)
    weight_BCXS = weight_BCXS.astype(k_PCHS.dtype)
    if v_PCSU is None:
      more_BCXU = _float32('BCXS,BCUS->BCXU', weight_BCXS, k_BCHS[:, :, :latent])
    else:
      v_BCSU = v_PCSU.at[at_B].get(mode='clip')
      more_BCXU = _float32('BCXS,BCSU->BCXU', weight_BCXS, v_BCSU)
    return out_BCXU * fade_BCX1 + more_BCXU, most_BCX1, sum_BCX1

  X, U = q_BCXH.shape[2], latent if v_PCSU is None else v_PCSU.shape[3]
  none = (
    jnp.zeros((B, C, X, U)),
    jnp.full((B, C, X, 1), _NEVER),
    jnp.zeros((B, C, X, 1)),
  )
  out_BCXU, _, sum_BCX1 = jax.lax.fori_loop(0, longest // S + 1, page, none)
  return _ungrouped((out_BCXU / sum_BCX1).astype(k_PCHS.dtype), T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  chunk: int,
  prefix_BT: jax.Array | None = None,
) -> jax.Array:
  """Causal attention within segments of packed rows, `chunk` queries at a time.

  Values may have other dimensions (U) than queries and keys. A query also sees the
  segment `prefix_BT` of its row, which lies before its own; 0: none.

  A chunk looks only at keys up to its own end, so what lies above the diagonal is
  mostly not computed.
  """
  return _forward(q_BTQH, k_BTCH, v_BTCU, segment_BT, chunk, prefix_BT)[0]


def visible(
  query_Bt: jax.Array, key_Bs: jax.Array, prefix_Bt: jax.Array | None
) -> jax.Array:
  """Whether a query's segment, or the prefix it continues, is a key's; bool [B, t, s].

  Of keys that come before the query; padding (segment 0) is nobody's prefix.
  """
  see_Bts = query_Bt[:, :, None] == key_Bs[:, None, :]
  if prefix_Bt is None:
    return see_Bts
  prefix_Bt = jnp.where(prefix_Bt > 0, prefix_Bt, -1)
  return see_Bts | (prefix_Bt[:, :, None] == key_Bs[:, None, :])


def _float32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """A product summed and given in float32, if the operands' dtype is not wider."""
  wide = jnp.promote_types(a.dtype, jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=wide)


def _grouped(x_BTQH: jax.Array, C: int) -> jax.Array:
  """[B, T, Q, H] -> [B, C, X, H]: the queries of a key head, G heads by T positions."""
  B, T, Q, H = x_BTQH.shape
  return jnp.moveaxis(x_BTQH.reshape(B, T, C, Q // C, H), 1, 3).reshape(B, C, -1, H)


def _ungrouped(x_BCXH: jax.Array, T: int) -> jax.Array:
  """The inverse of `_grouped`."""
  B, C, X, H = x_BCXH.shape
  x_BCGTH = x_BCXH.reshape(B, C, X // T, T, H)
  return jnp.moveaxis(x_BCGTH, 3, 1).reshape(B, T, C * (X // T), H)


def _scores(
  q_BCXH: jax.Array,
  k_BCSH: jax.Array,
  segment_BT: jax.Array,
  prefix_BT: jax.Array | None,
  start: int,
  end: int,
) -> jax.Array:
  """Masked scores of the queries [start, end) against the keys [0, end)."""
  B, C, X, _ = q_BCXH.shape
  causal_TS = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None, :]
  prefix_Bt = None if prefix_BT is None else prefix_BT[:, start:end]
  see_BTS = visible(segment_BT[:, start:end], segment_BT[:, :end], prefix_Bt)
  mask_BTS = see_BTS & causal_TS[None]
  score_BCXS = _float32('BCXH,BCSH->BCXS', q_BCXH, k_BCSH)
  score_BCGTS = score_BCXS.reshape(B, C, -1, end - start, end)
  score_BCGTS = jnp.where(mask_BTS[:, None, None], score_BCGTS, _NEVER)
  return score_BCGTS.reshape(B, C, X, end)


def _forward(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  chunk: int,
  prefix_BT: jax.Array | None = None,
) -> tuple[jax.Array, tuple]:
  T, C = k_BTCH.shape[1:3]
  scale = (1 / jnp.sqrt(jnp.float32(q_BTQH.shape[-1]))).astype(q_BTQH.dtype)
  k_BCTH, v_BCTU = jnp.swapaxes(k_BTCH, 1, 2), jnp.swapaxes(v_BTCU, 1, 2)
  outs, norms = [], []
  for start in range(0, T, chunk):
    end = min(start + chunk, T)
    q_BCXH = _grouped(q_BTQH[:, start:end], C) * scale
    k_BCSH = k_BCTH[:, :, :end]
    score_BCXS = _scores(q_BCXH, k_BCSH, segment_BT, prefix_BT, start, end)
    top_BCX1 = jnp.max(score_BCXS, axis=-1, keepdims=True)
    weight_BCXS = jnp.exp(score_BCXS - top_BCX1)
    sum_BCX1 = jnp.sum(weight_BCXS, axis=-1, keepdims=True)
    weight_BCXS = weight_BCXS.astype(v_BCTU.dtype)
    out_BCXU = _float32('BCXS,BCSU->BCXU', weight_BCXS, v_BCTU[:, :, :end])
    out_BCXU = (out_BCXU / sum_BCX1).astype(q_BTQH.dtype)
    outs.append(_ungrouped(out_BCXU, end - start))
    norms.append(top_BCX1 + jnp.log(sum_BCX1))
  out_BTQU = jnp.concatenate(outs, axis=1)
  return out_BTQU, (q_BTQH, k_BCTH, v_BCTU, segment_BT, prefix_BT, out_BTQU, norms)


def _backward(chunk: int, saved: tuple, dout_BTQU: jax.Array) -> tuple:
  q_BTQH, k_BCTH, v_BCTU, segment_BT, prefix_BT, out_BTQU, norms = saved
  C, T = k_BCTH.shape[1:3]
  dtype = q_BTQH.dtype
  scale = (1 / jnp.sqrt(jnp.float32(q_BTQH.shape[-1]))).astype(dtype)
  # Transposed: XLA on CPU takes twice as long where the large operand of a product
  # (the probabilities) is the one to be turned round.
  dk_BCHT = jnp.zeros_like(jnp.swapaxes(k_BCTH, 2, 3), jnp.float32)
  dv_BCUT = jnp.zeros_like(jnp.swapaxes(v_BCTU, 2, 3), jnp.float32)
  dqs = []
  for norm_BCX1, start in zip(norms, range(0, T, chunk), strict=True):
    end = min(start + chunk, T)
    q_BCXH = _grouped(q_BTQH[:, start:end], C) * scale
    k_BCSH, v_BCSU = k_BCTH[:, :, :end], v_BCTU[:, :, :end]
    score_BCXS = _scores(q_BCXH, k_BCSH, segment_BT, prefix_BT, start, end)
    prob_BCXS = jnp.exp(score_BCXS - norm_BCX1)
    dout_BCXU = _grouped(dout_BTQU[:, start:end], C)
    out_BCXU = _grouped(out_BTQU[:, start:end], C)
    dprob_BCXS = _float32('BCXU,BCSU->BCXS', dout_BCXU, v_BCSU)
    dot_BCXU = dout_BCXU.astype(jnp.float32) * out_BCXU.astype(jnp.float32)
    mean_BCX1 = jnp.sum(dot_BCXU, axis=-1, keepdims=True)
    dscore_BCXS = (prob_BCXS * (dprob_BCXS - mean_BCX1)).astype(dtype)
    dq_BCXH = _float32('BCXS,BCSH->BCXH', dscore_BCXS, k_BCSH) * scale
    dqs.append(_ungrouped(dq_BCXH, end - start))
    dk_BCHS = _float32('BCXH,BCXS->BCHS', q_BCXH, dscore_BCXS)
    dv_BCUS = _float32('BCXU,BCXS->BCUS', dout_BCXU, prob_BCXS.astype(dtype))
    dk_BCHT = dk_BCHT.at[..., :end].add(dk_BCHS)
    dv_BCUT = dv_BCUT.at[..., :end].add(dv_BCUS)
  return (
    jnp.concatenate(dqs, axis=1).astype(dtype),
    jnp.moveaxis(dk_BCHT, 3, 1).astype(k_BCTH.dtype),
    jnp.moveaxis(dv_BCUT, 3, 1).astype(v_BCTU.dtype),
    None,
    None,
  )


packed.defvjp(_forward, _backward)
