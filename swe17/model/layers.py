"""The pieces of a transformer layer, as functions of arrays."""

import jax
import jax.numpy as jnp


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * scale (Zhang & Sennrich, arXiv:1910.07467)."""
  var_BT1 = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
  return x_BTD * jax.lax.rsqrt(var_BT1 + eps) * scale_D[None, None, :]


def rotate(x_BTQH: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
  """Rotary position embedding, half-split layout (Su et al., arXiv:2104.09864)."""
  half = x_BTQH.shape[-1] // 2
  freq_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_BT1h = position_BT[:, :, None, None] * freq_h[None, None, None, :]
  sin, cos = jnp.sin(angle_BT1h), jnp.cos(angle_BT1h)
  a, b = x_BTQH[..., :half], x_BTQH[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
  q_BTQH: jax.Array, k_BSCH: jax.Array, v_BSCH: jax.Array, mask_BTS: jax.Array
) -> jax.Array:
  """Grouped-query attention; `mask_BTS` is True where a query may look.

  A query that may look nowhere (padding) gets the mean of all values, never NaN.
  """
  B, T, Q, H = q_BTQH.shape
  C = k_BSCH.shape[2]
  q_BTCGH = q_BTQH.reshape(B, T, C, Q // C, H) / jnp.sqrt(jnp.float32(H))
  score_BCGTS = jnp.einsum('BTCGH,BSCH->BCGTS', q_BTCGH, k_BSCH)
  score_BCGTS = jnp.where(mask_BTS[:, None, None], score_BCGTS, -1e30)
  prob_BCGTS = jax.nn.softmax(score_BCGTS, axis=-1)
  out_BTCGH = jnp.einsum('BCGTS,BSCH->BTCGH', prob_BCGTS, v_BSCH)
  return out_BTCGH.reshape(B, T, Q, H)


def mlp(
  x_BTD: jax.Array, wg_DF: jax.Array, wu_DF: jax.Array, wd_FD: jax.Array
) -> jax.Array:
  """SwiGLU (Shazeer, arXiv:2002.05202)."""
  return (jax.nn.silu(x_BTD @ wg_DF) * (x_BTD @ wu_DF)) @ wd_FD


def embed(table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  """Rows of the embedding; its gradient is a one-hot matmul, not a scatter-add.

  Scatter-add with repeated ids is slow on CPU and unordered on GPU (FACTS.md 6).
  """
  return _embed(table_VD, token_BT)


@jax.custom_vjp
def _embed(table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  return table_VD[token_BT]


def _embed_fwd(table_VD: jax.Array, token_BT: jax.Array):
  return table_VD[token_BT], (token_BT, table_VD.shape[0])


def _embed_bwd(saved, grad_BTD: jax.Array):
  token_BT, V = saved
  onehot_BTV = jax.nn.one_hot(token_BT, V, dtype=grad_BTD.dtype)
  return jnp.einsum('BTV,BTD->VD', onehot_BTV, grad_BTD), None


_embed.defvjp(_embed_fwd, _embed_bwd)
