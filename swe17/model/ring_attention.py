"""Attention to rows that one device cannot hold: split over `context`, keys in a ring.

Every shard keeps its own queries. Keys and values go round from shard to shard
(`ppermute`); what has been seen is carried as running maximum m, sum l and output o of
an online softmax, so the result is that of one softmax over the whole row:

  m' = max(m, s)   l' = e^(m - m') l + sum e^(s - m')   o' = e^(m - m') o + e^(s - m') v

In the backward pass the gradients of keys and values travel with them and are home
after one round. Both go through a shard in blocks of `chunk` queries by `chunk` keys:
memory is linear in the row (Ring Attention, arXiv:2310.01889). Blocks that lie after
their queries are not computed; shards at the end of a row thus have more to do than
those at its start.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from swe17.model import attention, sharding

AXIS = 'context'
_NEVER = -1e30  # the score of a key that a query may not see; exp of it is 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def packed(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  chunk: int,
  prefix_BT: jax.Array | None = None,
) -> jax.Array:
  """`attention.packed` on the mesh that is set, T split over `context`.

  Blocks are of the largest size up to `chunk` that divides a shard's part of T.

  Raises:
    ValueError: `context` does not divide T.
  """
  return _forward(q_BTQH, k_BTCH, v_BTCU, segment_BT, chunk, prefix_BT)[0]


def _forward(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  chunk: int,
  prefix_BT: jax.Array | None = None,
) -> tuple[jax.Array, tuple]:
  if prefix_BT is None:
    prefix_BT = jnp.zeros_like(segment_BT)
  args = (q_BTQH, k_BTCH, v_BTCU, segment_BT, prefix_BT)
  local = _spread(_forward_local, chunk, args, 'QQQSS', 'QQ')
  out_BTQU, norm_BTQ = local(*args)
  return out_BTQU, (*args, out_BTQU, norm_BTQ)


def _backward(chunk: int, saved: tuple, dout_BTQU: jax.Array) -> tuple:
  local = _spread(_backward_local, chunk, saved, 'QQQSSQQQ', 'QQQ')
  return (*local(*saved, dout_BTQU), None, None)


packed.defvjp(_forward, _backward)


def _spread(
  fn: Callable[..., Any], chunk: int, args: tuple, ins: str, outs: str
) -> Callable[..., Any]:
  """`fn` of one shard's arrays: rows, positions and (if they divide) heads split."""
  (B, T, Q, _), C, sizes = args[0].shape, args[1].shape[2], sharding.current()
  if T % sizes[AXIS]:
    raise ValueError(
      f'mesh.context={sizes[AXIS]} with rows of {T} tokens: got a remainder, want '
      'batch.row_length divisible by it'
    )
  size = T // sizes[AXIS]
  block = max(n for n in range(1, min(chunk, size) + 1) if size % n == 0)
  split = Q % sizes['tensor'] == 0 and C % sizes['tensor'] == 0
  rows, time = sharding.spec(('batch', 'time'), (B, T), sizes)
  spec = {'Q': jax.P(rows, time, 'tensor' if split else None), 'S': jax.P(rows, time)}
  return jax.shard_map(
    functools.partial(fn, block=block, shards=sizes[AXIS]),
    in_specs=tuple(spec[letter] for letter in ins),
    out_specs=tuple(spec[letter] for letter in outs),
    check_vma=False,
  )


def _grouped(x_BTQH: jax.Array, C: int) -> jax.Array:
  """[B, T, Q, H] -> [B, C, G, T, H]: the G queries of each key head."""
  B, T, Q, H = x_BTQH.shape
  return jnp.moveaxis(x_BTQH.reshape(B, T, C, Q // C, H), 1, 3)


def _ungrouped(x_BCGTH: jax.Array) -> jax.Array:
  B, C, G, T, H = x_BCGTH.shape
  return jnp.moveaxis(x_BCGTH, 3, 1).reshape(B, T, C * G, H)


def _part(x: jax.Array, i: jax.Array, block: int, axis: int = -2) -> jax.Array:
  """Block i of the positions."""
  return jax.lax.dynamic_slice_in_dim(x, i * block, block, axis % x.ndim)


def _put(x: jax.Array, new: jax.Array, i: jax.Array, axis: int = -2) -> jax.Array:
  at = i * new.shape[axis]
  return jax.lax.dynamic_update_slice_in_dim(x, new, at, axis % x.ndim)


def _passed(tree: Any, shards: int) -> Any:
  """Everything one shard further round the ring."""
  pairs = [(i, (i + 1) % shards) for i in range(shards)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, pairs), tree)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """A product summed and given in float32, whatever the operands' dtype."""
  return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)


def _scores(
  q_BCGtH: jax.Array,
  k_BCsH: jax.Array,
  segments: tuple[jax.Array, ...],
  first: tuple[jax.Array, jax.Array],
) -> jax.Array:
  """Masked scores of a block.

  `segments` of queries, of their prefixes, of keys; `first` positions of queries, keys.
  """
  query_Bt, prefix_Bt, key_Bs = segments
  t, s = query_Bt.shape[1], key_Bs.shape[1]
  causal_ts = (first[0] + jnp.arange(t))[:, None] >= (first[1] + jnp.arange(s))[None]
  mask_Bts = attention.visible(query_Bt, key_Bs, prefix_Bt) & causal_ts[None]
  score_BCGts = _dot('BCGtH,BCsH->BCGts', q_BCGtH, k_BCsH)
  return jnp.where(mask_Bts[:, None, None], score_BCGts, _NEVER)


def _seen(i: jax.Array, me: jax.Array, owner: jax.Array, blocks: int) -> jax.Array:
  """How many of the owner's blocks of keys this shard's block i of queries may see."""
  return jnp.clip((me - owner) * blocks + i + 1, 0, blocks)


def _forward_local(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  prefix_BT: jax.Array,
  *,
  block: int,
  shards: int,
) -> tuple[jax.Array, jax.Array]:
  """One shard's output [B, T, Q, U] and log-normalisers [B, T, Q]."""
  (B, T, _, H), (C, U), dtype = q_BTQH.shape, v_BTCU.shape[2:], q_BTQH.dtype
  q_BCGTH = _grouped(q_BTQH * _scale(H, dtype), C)
  me, blocks = jax.lax.axis_index(AXIS), T // block
  G = q_BCGTH.shape[2]

  def turn(step: jax.Array, carry: tuple) -> tuple:
    (k_BCTH, v_BCTU, key_BT), state = carry
    owner = (me - step) % shards

    def queries(i: jax.Array, state: tuple) -> tuple:
      q_BCGtH = _part(q_BCGTH, i, block)
      query = tuple(_part(x, i, block, -1) for x in (segment_BT, prefix_BT))

      def keys(j: jax.Array, mine: tuple) -> tuple:
        m, l, o = mine
        score = _scores(
          q_BCGtH,
          _part(k_BCTH, j, block),
          (*query, _part(key_BT, j, block, -1)),
          (me * T + i * block, owner * T + j * block),
        )
        top = jnp.maximum(m, jnp.max(score, axis=-1, keepdims=True))
        old, weight = jnp.exp(m - top), jnp.exp(score - top)
        l = old * l + jnp.sum(weight, axis=-1, keepdims=True)
        part = _dot('BCGts,BCsU->BCGtU', weight.astype(dtype), _part(v_BCTU, j, block))
        return top, l, old * o + part

      mine = tuple(_part(x, i, block) for x in state)
      mine = jax.lax.fori_loop(0, _seen(i, me, owner, blocks), keys, mine)
      return tuple(_put(x, new, i) for x, new in zip(state, mine, strict=True))

    state = jax.lax.fori_loop(0, blocks, queries, state)
    return _passed((k_BCTH, v_BCTU, key_BT), shards), state

  # A query's own key comes in the first turn: no maximum stays at the start's.
  held = (jnp.swapaxes(k_BTCH, 1, 2), jnp.swapaxes(v_BTCU, 1, 2), segment_BT)
  one = jnp.zeros((B, C, G, T, 1))
  state = (one + _NEVER, one, jnp.zeros((B, C, G, T, U)))
  _, (m, l, o_BCGTU) = jax.lax.fori_loop(0, shards, turn, (held, state))
  norm_BTQ = _ungrouped(m + jnp.log(l))[..., 0]
  return _ungrouped((o_BCGTU / l).astype(dtype)), norm_BTQ


def _backward_local(
  q_BTQH: jax.Array,
  k_BTCH: jax.Array,
  v_BTCU: jax.Array,
  segment_BT: jax.Array,
  prefix_BT: jax.Array,
  out_BTQU: jax.Array,
  norm_BTQ: jax.Array,
  dout_BTQU: jax.Array,
  *,
  block: int,
  shards: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One shard's gradients of queries, keys and values."""
  (_, T, _, H), C, dtype = q_BTQH.shape, k_BTCH.shape[2], q_BTQH.dtype
  scale = _scale(H, dtype)
  dot_BTQU = dout_BTQU.astype(jnp.float32) * out_BTQU.astype(jnp.float32)
  mean_BTQ = jnp.sum(dot_BTQU, axis=-1, keepdims=True)
  # What a block of queries brings along.
  mine = tuple(
    _grouped(x, C) for x in (q_BTQH * scale, dout_BTQU, norm_BTQ[..., None], mean_BTQ)
  )
  me, blocks = jax.lax.axis_index(AXIS), T // block

  def turn(step: jax.Array, carry: tuple) -> tuple:
    (k_BCTH, v_BCTU, key_BT, dk, dv), dq = carry
    owner = (me - step) % shards

    def queries(i: jax.Array, grads: tuple) -> tuple:
      q, dout, norm, mean = (_part(x, i, block) for x in mine)
      query = tuple(_part(x, i, block, -1) for x in (segment_BT, prefix_BT))

      def keys(j: jax.Array, grads: tuple) -> tuple:
        dq, dk, dv = grads
        k, v = _part(k_BCTH, j, block), _part(v_BCTU, j, block)
        first = (me * T + i * block, owner * T + j * block)
        score = _scores(q, k, (*query, _part(key_BT, j, block, -1)), first)
        prob = jnp.exp(score - norm)
        dprob = _dot('BCGtU,BCsU->BCGts', dout, v)
        dscore = (prob * (dprob - mean)).astype(dtype)
        dq += _dot('BCGts,BCsH->BCGtH', dscore, k)
        dk_s = _dot('BCGts,BCGtH->BCsH', dscore, q)
        dv_s = _dot('BCGts,BCGtU->BCsU', prob.astype(dtype), dout)
        dk = _put(dk, _part(dk, j, block) + dk_s, j)
        return dq, dk, _put(dv, _part(dv, j, block) + dv_s, j)

      dq, dk, dv = grads
      own = (_part(dq, i, block), dk, dv)
      seen = _seen(i, me, owner, blocks)
      own, dk, dv = jax.lax.fori_loop(0, seen, keys, own)
      return _put(dq, own, i), dk, dv

    dq, dk, dv = jax.lax.fori_loop(0, blocks, queries, (dq, dk, dv))
    return _passed((k_BCTH, v_BCTU, key_BT, dk, dv), shards), dq

  k_BCTH, v_BCTU = jnp.swapaxes(k_BTCH, 1, 2), jnp.swapaxes(v_BTCU, 1, 2)
  zeros = (jnp.zeros(x.shape, jnp.float32) for x in (k_BCTH, v_BCTU))
  held = (k_BCTH, v_BCTU, segment_BT, *zeros)
  dq_BCGTH = jnp.zeros(mine[0].shape, jnp.float32)
  held, dq_BCGTH = jax.lax.fori_loop(0, shards, turn, (held, dq_BCGTH))
  dk_BTCH, dv_BTCU = (jnp.swapaxes(x, 1, 2).astype(dtype) for x in held[3:])
  return _ungrouped((dq_BCGTH * scale).astype(dtype)), dk_BTCH, dv_BTCU


def _scale(H: int, dtype: Any) -> jax.Array:
  return (1 / jnp.sqrt(jnp.float32(H))).astype(dtype)
