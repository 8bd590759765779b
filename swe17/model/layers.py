"""The pieces of a transformer layer, as functions of arrays."""

import jax
import jax.numpy as jnp


def project(x_BTI: jax.Array, w_IO: jax.Array) -> jax.Array:
  """x @ w over the last axis, as one plain matrix product.

  Flattened by hand: XLA on CPU runs the gradient of a product that contracts two batch
  axes 1.6 times slower than that of the flat one.
  """
  out = x_BTI.reshape(-1, w_IO.shape[0]) @ w_IO
  return out.reshape(*x_BTI.shape[:-1], w_IO.shape[1])


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * scale (Zhang & Sennrich, arXiv:1910.07467)."""
  var_BT1 = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
  return x_BTD * jax.lax.rsqrt(var_BT1 + eps) * scale_D[None, None, :]


def rotate(
  x_BTQH: jax.Array, position_BT: jax.Array, theta: float, dims: int
) -> jax.Array:
  """Rotary position embedding of the first `dims` of H, half-split layout.

  Su et al., arXiv:2104.09864. What does not rotate compares contents at any distance.
  """
  half = dims // 2
  freq_h = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle_BT1h = position_BT[:, :, None, None] * freq_h[None, None, None, :]
  sin, cos = jnp.sin(angle_BT1h), jnp.cos(angle_BT1h)
  a, b, still = x_BTQH[..., :half], x_BTQH[..., half:dims], x_BTQH[..., dims:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=-1)


def mlp(
  x_BTD: jax.Array, wg_DF: jax.Array, wu_DF: jax.Array, wd_FD: jax.Array
) -> jax.Array:
  """SwiGLU (Shazeer, arXiv:2002.05202)."""
  gate_BTF = jax.nn.silu(project(x_BTD, wg_DF))
  return project(gate_BTF * project(x_BTD, wu_DF), wd_FD)


def embed(table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  """Rows of the embedding; its gradient is a one-hot matmul, not a scatter-add.

  Scatter-add with repeated ids is slow on CPU and unordered on GPU (FACTS.md 6).
  """
  return _embed(table_VD, token_BT)


@jax.custom_vjp
def _embed(table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  return table_VD[token_BT]


def _embed_fwd(
  table_VD: jax.Array, token_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, int]]:
  return table_VD[token_BT], (token_BT, table_VD.shape[0])


def _embed_bwd(
  saved: tuple[jax.Array, int], grad_BTD: jax.Array
) -> tuple[jax.Array, None]:
  token_BT, V = saved
  onehot_XV = jax.nn.one_hot(token_BT.reshape(-1), V, dtype=grad_BTD.dtype)
  return onehot_XV.T @ grad_BTD.reshape(-1, grad_BTD.shape[-1]), None


_embed.defvjp(_embed_fwd, _embed_bwd)
