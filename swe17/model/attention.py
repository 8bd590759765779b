"""Grouped-query attention: over packed rows for training, over a cache for serving.

Both compute softmax(q k^T / sqrt(H)) v. The packed form goes through blocks of queries
and, for each, the blocks of keys that it may see, with an online softmax; only the
output and its log-normaliser are kept for the backward pass, which computes the
probabilities again (FlashAttention, arXiv:2205.14135). Memory is linear in T, and work
is that of the segments and prefixes of a row, not of the row.
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
  one = (longest >= 0).astype(k_PCHS.dtype)

  def page(j: jax.Array, carry: tuple) -> tuple:
    out_BCXU, top_BCX1, sum_BCX1 = carry
    at_B = jax.lax.dynamic_index_in_dim(table_BJ, j, axis=1, keepdims=False)
    k_BCHS = _pages(k_PCHS, at_B, one)
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
      v_BCSU = _pages(v_PCSU, at_B, one)
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


def _pages(pool: jax.Array, at_B: jax.Array, one: jax.Array) -> jax.Array:
  """The pages at `at_B`, [B, ..].

  Times a one that XLA can't see through: on CPU it gathers on one core, but runs a
  product, with the gather fused into it, on all. Flat, because indices are then cheap.
  """
  flat = pool.reshape(pool.shape[0], -1).at[at_B].get(mode='clip') * one
  return flat.reshape(-1, *pool.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  chunk: int,
  prefix_BT: jax.Array | None = None,
) -> jax.Array:
  """Causal attention within segments of packed rows, in blocks of `chunk` positions.

  Values may have other dimensions (U) than queries and keys. A query also sees the
  segment `prefix_BT` of its row, which lies before its own; 0: none.
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


def needed(
  segment_nBt: jax.Array, prefix_nBt: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Blocks of keys that each of n blocks of queries may see, in their order.

  Found from the least and the largest segment of a block: none is left out that
  `visible` would see, whatever the order of segments; where they lie in order, few are
  too many.

  Returns:
    (key_nn, count_n), int32: the first count_n[i] of key_nn[i] are the blocks of i.
  """
  n, far = segment_nBt.shape[0], jnp.iinfo(jnp.int32).max
  # Padding lies at the end, beyond every segment.
  own_nBt = jnp.where(segment_nBt > 0, segment_nBt, far)
  low_nB, high_nB = jnp.min(own_nBt, axis=-1), jnp.max(own_nBt, axis=-1)

  def meet(first_nB: jax.Array, last_nB: jax.Array) -> jax.Array:
    over_nnB = (first_nB[:, None] <= high_nB[None]) & (low_nB[None] <= last_nB[:, None])
    return jnp.any(over_nnB, axis=-1)

  see_nn = meet(low_nB, high_nB)
  if prefix_nBt is not None:
    first_nB = jnp.min(jnp.where(prefix_nBt > 0, prefix_nBt, far), axis=-1)
    see_nn |= meet(first_nB, jnp.max(prefix_nBt, axis=-1))
  see_nn &= jnp.arange(n)[:, None] >= jnp.arange(n)[None, :]
  key_nn = jnp.argsort(~see_nn, axis=1, stable=True)
  return key_nn.astype(jnp.int32), jnp.sum(see_nn, axis=1, dtype=jnp.int32)


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


def _cut(x: jax.Array, block: int) -> jax.Array:
  """[B, T, ..] -> [n, B, block, ..], zeros after the end."""
  B, T = x.shape[:2]
  x = jnp.pad(x, ((0, 0), (0, -T % block), *((0, 0),) * (x.ndim - 2)))
  return jnp.moveaxis(x.reshape(B, -1, block, *x.shape[2:]), 1, 0)


def _joined(x: jax.Array, T: int) -> jax.Array:
  """The inverse of `_cut`."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


def _queries(x_BTQH: jax.Array, C: int, block: int) -> jax.Array:
  """Blocks of `_grouped` queries, [n, B, C, X, H]."""
  return jax.vmap(functools.partial(_grouped, C=C))(_cut(x_BTQH, block))


def _keys(x_BTCH: jax.Array, block: int) -> jax.Array:
  """Blocks of keys or values with heads before positions, [n, B, C, S, H]."""
  return jnp.swapaxes(_cut(x_BTCH, block), 2, 3)


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, new: jax.Array, i: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), i, 0)


def _scores(
  q_BCXH: jax.Array,
  k_BCSH: jax.Array,
  places: tuple[jax.Array, jax.Array | None],
  i: jax.Array,
  j: jax.Array,
) -> jax.Array:
  """Masked scores of the queries of block i against the keys of block j."""
  segment_nBt, prefix_nBt = places
  B, C, X, _ = q_BCXH.shape
  size = segment_nBt.shape[-1]
  at = jnp.arange(size)
  causal_ts = (i * size + at)[:, None] >= (j * size + at)[None, :]
  prefix_Bt = None if prefix_nBt is None else _at(prefix_nBt, i)
  see_Bts = visible(_at(segment_nBt, i), _at(segment_nBt, j), prefix_Bt)
  see_Bts &= causal_ts[None]
  score_BCXS = _float32('BCXH,BCSH->BCXS', q_BCXH, k_BCSH)
  score_BCGts = score_BCXS.reshape(B, C, X // size, size, size)
  return jnp.where(see_Bts[:, None, None], score_BCGts, _NEVER).reshape(B, C, X, size)


def _forward(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  chunk: int,
  prefix_BT: jax.Array | None = None,
) -> tuple[jax.Array, tuple]:
  (T, _, H), (C, U), dtype = q_BTQH.shape[1:], v_BTCU.shape[2:], q_BTQH.dtype
  block = min(chunk, T)
  q_nBCXH = _queries(q_BTQH * _scale(H, dtype), C, block)
  k_nBCSH, v_nBCSU = _keys(k_BTCH, block), _keys(v_BTCU, block)
  places = _cut(segment_BT, block), _cut_prefix(prefix_BT, block)
  key_nn, count_n = needed(*places)
  one_BCX1 = jnp.zeros_like(q_nBCXH[0, ..., :1], jnp.promote_types(dtype, jnp.float32))
  zero_BCXU = jnp.broadcast_to(one_BCX1, (*one_BCX1.shape[:-1], U))

  def queries(i: jax.Array, done: tuple) -> tuple:
    q_BCXH = _at(q_nBCXH, i)

    def keys(p: jax.Array, carry: tuple) -> tuple:
      top_BCX1, sum_BCX1, out_BCXU = carry
      j = key_nn[i, p]
      score_BCXS = _scores(q_BCXH, _at(k_nBCSH, j), places, i, j)
      new_BCX1 = jnp.maximum(top_BCX1, jnp.max(score_BCXS, axis=-1, keepdims=True))
      weight_BCXS = jnp.exp(score_BCXS - new_BCX1)
      old_BCX1 = jnp.exp(top_BCX1 - new_BCX1)
      sum_BCX1 = old_BCX1 * sum_BCX1 + jnp.sum(weight_BCXS, axis=-1, keepdims=True)
      part = _float32('BCXS,BCSU->BCXU', weight_BCXS.astype(dtype), _at(v_nBCSU, j))
      return new_BCX1, sum_BCX1, old_BCX1 * out_BCXU + part

    # A query sees its own key, in the last of its blocks: no maximum stays at that.
    carry = one_BCX1 + _NEVER, one_BCX1, zero_BCXU
    top_BCX1, sum_BCX1, out_BCXU = jax.lax.fori_loop(0, count_n[i], keys, carry)
    outs, norms = done
    norms = _put(norms, top_BCX1 + jnp.log(sum_BCX1), i)
    return _put(outs, _ungrouped(out_BCXU / sum_BCX1, block), i), norms

  n = len(key_nn)
  outs = jnp.zeros((n, q_BTQH.shape[0], block, q_BTQH.shape[2], U), dtype)
  norms = jnp.zeros((n, *one_BCX1.shape), one_BCX1.dtype)
  outs, norms = jax.lax.fori_loop(0, n, queries, (outs, norms))
  out_BTQU = _joined(outs, T)
  return out_BTQU, (q_BTQH, k_BTCH, v_BTCU, segment_BT, prefix_BT, out_BTQU, norms)


def _backward(chunk: int, saved: tuple, dout_BTQU: jax.Array) -> tuple:
  q_BTQH, k_BTCH, v_BTCU, segment_BT, prefix_BT, out_BTQU, norms = saved
  (T, _, H), C, dtype = q_BTQH.shape[1:], k_BTCH.shape[2], q_BTQH.dtype
  block, scale, wide = min(chunk, T), _scale(H, dtype), norms.dtype
  mean_BTQ1 = jnp.sum(
    dout_BTQU.astype(wide) * out_BTQU.astype(wide), axis=-1, keepdims=True
  )
  of_queries = tuple(
    _queries(x, C, block) for x in (q_BTQH * scale, dout_BTQU, mean_BTQ1)
  )
  k_nBCSH, v_nBCSU = _keys(k_BTCH, block), _keys(v_BTCU, block)
  places = _cut(segment_BT, block), _cut_prefix(prefix_BT, block)
  key_nn, count_n = needed(*places)

  def queries(i: jax.Array, grads: tuple) -> tuple:
    dq_nBtQH, *of_keys = grads
    q_BCXH, dout_BCXU, mean_BCX1 = (_at(x, i) for x in of_queries)
    norm_BCX1 = _at(norms, i)

    def keys(p: jax.Array, grads: tuple) -> tuple:
      dq_BCXH, dk_nBCHS, dv_nBCUS = grads
      j = key_nn[i, p]
      k_BCSH = _at(k_nBCSH, j)
      prob_BCXS = jnp.exp(_scores(q_BCXH, k_BCSH, places, i, j) - norm_BCX1)
      dprob_BCXS = _float32('BCXU,BCSU->BCXS', dout_BCXU, _at(v_nBCSU, j))
      dscore_BCXS = (prob_BCXS * (dprob_BCXS - mean_BCX1)).astype(dtype)
      dq_BCXH += _float32('BCXS,BCSH->BCXH', dscore_BCXS, k_BCSH)
      # Transposed: XLA on CPU takes twice as long where the large operand of a product
      # (the probabilities) is the one to be turned round.
      dk_BCHS = _float32('BCXH,BCXS->BCHS', q_BCXH, dscore_BCXS)
      dv_BCUS = _float32('BCXU,BCXS->BCUS', dout_BCXU, prob_BCXS.astype(dtype))
      dk_nBCHS = _put(dk_nBCHS, _at(dk_nBCHS, j) + dk_BCHS, j)
      return dq_BCXH, dk_nBCHS, _put(dv_nBCUS, _at(dv_nBCUS, j) + dv_BCUS, j)

    carry = jnp.zeros(q_BCXH.shape, wide), *of_keys
    dq_BCXH, *of_keys = jax.lax.fori_loop(0, count_n[i], keys, carry)
    return _put(dq_nBtQH, _ungrouped(dq_BCXH * scale, block), i), *of_keys

  dq_nBtQH = jnp.zeros_like(_cut(q_BTQH, block))
  of_keys = (jnp.zeros_like(jnp.swapaxes(x, 3, 4), wide) for x in (k_nBCSH, v_nBCSU))
  grads = jax.lax.fori_loop(0, len(key_nn), queries, (dq_nBtQH, *of_keys))
  dk_BTCH, dv_BTCU = (
    _joined(jnp.moveaxis(x, 4, 2), T).astype(dtype) for x in grads[1:]
  )
  return _joined(grads[0], T), dk_BTCH, dv_BTCU, None, None


packed.defvjp(_forward, _backward)


def _scale(H: int, dtype: jnp.dtype) -> jax.Array:
  return (1 / jnp.sqrt(jnp.float32(H))).astype(dtype)


def _cut_prefix(prefix_BT: jax.Array | None, block: int) -> jax.Array | None:
  return None if prefix_BT is None else _cut(prefix_BT, block)
