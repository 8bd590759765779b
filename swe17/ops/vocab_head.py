"""Log-probability over the whole vocabulary from hidden states, without [T, V].

  log p(a) = z_a - m - log s,   s = sum_v e^(z_v - m),   m = max_v z_v,   z = h . w / T
  H = log s - u / s,            u = sum_v e^(z_v - m) (z_v - m)

m, s and u are carried over blocks of V and rescaled when the maximum rises (online
softmax: Milakov and Gimelshein, arXiv:1805.02867); for u that is e^d (u + d s), where
d is the old maximum less the new. Tokens that are asked for are taken together, in
chunks whose number follows the data. The backward pass computes each block of logits
again: d logp / d z_v = (1[v = a] - p_v) / T. Loops run in a fixed order, no place is
added to in two orders: same inputs, same bits.

It serves scoring without replay, sampling without a filter (top_p = 1), KL to a
reference model, and the measurement of the kept mass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from swe17.ops import head_sharding as hs

_LOW = -1e37  # below any logit, and finite: differences of it stay numbers


@dataclasses.dataclass(frozen=True)
class Plan:
  """How the work is cut. None of it changes a value beyond rounding."""

  tokens: int = 256  # tokens of a block of logits
  ids: int = 4096  # ids of a block of logits


def log_prob(
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  temperature_X: jax.Array,
  mask_X: jax.Array,
  *,
  plan: Plan,
  shard: hs.Shard | None,
) -> tuple[jax.Array, jax.Array]:
  """log p of drawn tokens and the entropy of p, which carries no gradient.

  Where `mask_X` is False both are exactly 0 and nothing in the slot is looked at. A
  token outside of the vocabulary gives NaN in value and gradient.

  Args:
    h_XD: float32 hidden states that drew each token.
    embed_VD: unembedding, float32 or bfloat16; its gradient is of its dtype.
    token_X: int32 drawn tokens.
    temperature_X: float32 > 0; carries no gradient.
    mask_X: bool.
    plan: how the work is cut.
    shard: how it is split over a mesh; None: not at all.

  Returns:
    (logp_X, entropy_X), float32, entropy in nats.
  """
  temperature_X = jnp.where(mask_X, temperature_X, 1.0)
  logp_X, entropy_X = _full(
    hs.Static(plan, shard), h_XD, embed_VD, token_X, temperature_X, mask_X
  )
  return logp_X, jax.lax.stop_gradient(entropy_X)


def _block(
  embed_VD: jax.Array, j: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rows of block j, the first's index, and which of them no earlier block held."""
  start = jnp.minimum(j * size, embed_VD.shape[0] - size)
  w_bD = jax.lax.dynamic_slice_in_dim(embed_VD, start, size).astype(jnp.float32)
  return w_bD, start, start + jnp.arange(size) >= j * size


def _forward(
  static: hs.Static[Plan],
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  temperature_X: jax.Array,
  active_X: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(log p, log normaliser, entropy) of active tokens, 0 elsewhere."""
  X, V, shard = h_XD.shape[0], embed_VD.shape[0], static.shard
  C, size = min(X, static.plan.tokens), min(V, static.plan.ids)
  order_X, count = jnp.argsort(~active_X, stable=True), jnp.sum(active_X)
  begin = hs.offset(shard, V)

  def chunk(i: jax.Array, out_4X: jax.Array) -> jax.Array:
    x_C, _, to_C = hs.lanes(order_X, i * C, C, count)
    h_CD, token_C, temperature_C = h_XD[x_C], token_X[x_C], temperature_X[x_C]

    def step(j: jax.Array, carry: tuple) -> tuple:
      m_C, s_C, u_C, za_C = carry
      w_bD, start, fresh_b = _block(embed_VD, j, size)
      z_Cb = (h_CD @ w_bD.T) / temperature_C[:, None]
      chosen_Cb = (begin + start + jnp.arange(size))[None, :] == token_C[:, None]
      za_C += jnp.sum(jnp.where(chosen_Cb & fresh_b[None, :], z_Cb, 0.0), axis=1)
      z_Cb = jnp.where(fresh_b[None, :], z_Cb, _LOW)
      top_C = jnp.maximum(m_C, jnp.max(z_Cb, axis=1))
      above_Cb, d_C = z_Cb - top_C[:, None], m_C - top_C
      e_Cb = jnp.exp(above_Cb)
      u_C = jnp.exp(d_C) * (u_C + d_C * s_C) + jnp.sum(e_Cb * above_Cb, axis=1)
      s_C = jnp.exp(d_C) * s_C + jnp.sum(e_Cb, axis=1)
      return top_C, s_C, u_C, za_C

    zero_C = jnp.zeros(C)
    start = (jnp.full(C, _LOW), zero_C, zero_C, zero_C)
    new = jax.lax.fori_loop(0, -(-V // size), step, start)
    return out_4X.at[:, to_C].set(jnp.stack(new), mode='drop', unique_indices=True)

  # Tokens that are not active: one id of logit 0, so that all is finite.
  empty_4X = jnp.zeros((4, X)).at[1].set(1.0)
  m_X, s_X, u_X, za_X = jax.lax.fori_loop(0, (count + C - 1) // C, chunk, empty_4X)
  top_X = hs.max_vocab(m_X, shard)
  d_X = m_X - top_X
  s_X, u_X, za_X = hs.sum_vocab(
    jnp.stack([jnp.exp(d_X) * s_X, jnp.exp(d_X) * (u_X + d_X * s_X), za_X]), shard
  )
  full_X = top_X + jnp.log(s_X)
  out_3X = jnp.stack([za_X - full_X, full_X, jnp.log(s_X) - u_X / s_X])
  logp_X, full_X, entropy_X = jnp.where(active_X[None, :], out_3X, 0.0)
  return logp_X, full_X, entropy_X


def _backward(
  static: hs.Static[Plan],
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  temperature_X: jax.Array,
  active_X: jax.Array,
  full_X: jax.Array,
  ct_X: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Gradients of hidden states and unembedding."""
  X, V, shard = h_XD.shape[0], embed_VD.shape[0], static.shard
  C, size = min(X, static.plan.tokens), min(V, static.plan.ids)
  order_X, count = jnp.argsort(~active_X, stable=True), jnp.sum(active_X)
  begin = hs.offset(shard, V)

  def chunk(i: jax.Array, carry: tuple) -> tuple:
    dh_XD, dw_VD = carry
    x_C, valid_C, to_C = hs.lanes(order_X, i * C, C, count)
    # A lane past the end may hold NaN, which a coefficient of 0 would not remove.
    h_CD = jnp.where(valid_C[:, None], h_XD[x_C], 0.0)
    token_C, temperature_C, full_C = token_X[x_C], temperature_X[x_C], full_X[x_C]
    ct_C = jnp.where(valid_C, ct_X[x_C], 0.0) / temperature_C

    def step(j: jax.Array, carry: tuple) -> tuple:
      dh_CD, dw_VD = carry
      w_bD, start, fresh_b = _block(embed_VD, j, size)
      z_Cb = (h_CD @ w_bD.T) / temperature_C[:, None]
      chosen_Cb = (begin + start + jnp.arange(size))[None, :] == token_C[:, None]
      g_Cb = chosen_Cb.astype(jnp.float32) - jnp.exp(z_Cb - full_C[:, None])
      g_Cb = jnp.where(fresh_b[None, :] & valid_C[:, None], g_Cb, 0.0) * ct_C[:, None]
      old_bD = jax.lax.dynamic_slice_in_dim(dw_VD, start, size)
      new_bD = old_bD + g_Cb.T @ h_CD
      dw_VD = jax.lax.dynamic_update_slice_in_dim(dw_VD, new_bD, start, 0)
      return dh_CD + g_Cb @ w_bD, dw_VD

    zero = (jnp.zeros_like(h_CD), dw_VD)
    dh_CD, dw_VD = jax.lax.fori_loop(0, -(-V // size), step, zero)
    return dh_XD.at[to_C].set(dh_CD, mode='drop', unique_indices=True), dw_VD

  zero = (jnp.zeros(h_XD.shape), jnp.zeros(embed_VD.shape))
  dh_XD, dw_VD = jax.lax.fori_loop(0, (count + C - 1) // C, chunk, zero)
  dw_VD = hs.sum_rows(dw_VD, shard).astype(embed_VD.dtype)
  return hs.sum_vocab(dh_XD, shard), dw_VD


def _known(embed_VD: jax.Array, token_X: jax.Array) -> jax.Array:
  return (token_X >= 0) & (token_X < embed_VD.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _full(
  static: hs.Static[Plan],
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  temperature_X: jax.Array,
  active_X: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  args = (static, h_XD, embed_VD, token_X, temperature_X, active_X)
  return _full_fwd(*args)[0]


def _full_fwd(
  static: hs.Static[Plan],
  h_XD: jax.Array,
  embed_VD: jax.Array,
  token_X: jax.Array,
  temperature_X: jax.Array,
  active_X: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple]:
  args = (h_XD, embed_VD, token_X, temperature_X, active_X)
  forward = functools.partial(_forward, static)
  logp_X, full_X, entropy_X = hs.spread(forward, static.shard, 'XVXXX', 'XXX')(*args)
  unknown_X = active_X & ~_known(embed_VD, token_X)
  return (jnp.where(unknown_X, jnp.nan, logp_X), entropy_X), (*args, full_X)


def _full_bwd(static: hs.Static[Plan], saved: tuple, ct: tuple) -> tuple:
  _, embed_VD, token_X, _, _, _ = saved
  ct_X = jnp.where(_known(embed_VD, token_X), ct[0], jnp.nan)
  backward = functools.partial(_backward, static)
  dh_XD, dw_VD = hs.spread(backward, static.shard, 'XVXXXXX', 'XV')(*saved, ct_X)
  return dh_XD, dw_VD, None, None, None


_full.defvjp(_full_fwd, _full_bwd)
