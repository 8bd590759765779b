"""The pieces of a transformer layer, as functions of arrays."""

import jax
import jax.numpy as jnp

from swe17.model import lora


def project(
  x_BTI: jax.Array, w_IO: jax.Array, adapter: lora.Adapter | None = None
) -> jax.Array:
  """x @ w over the last axis, as one plain matrix product, and what an adapter adds.

  Flattened by hand: XLA on CPU runs the gradient of a product that contracts two batch
  axes 1.6 times slower than that of the flat one.
  """
  out = x_BTI.reshape(-1, w_IO.shape[0]) @ w_IO
  out_BTO = out.reshape(*x_BTI.shape[:-1], w_IO.shape[1])
  if adapter is None:
    return out_BTO
  return out_BTO + project(lora.down(x_BTI, adapter), adapter.b_NrO)


def heads(
  x_BTD: jax.Array,
  w_DQH: jax.Array,
  b_QH: jax.Array | None,
  adapter: lora.Adapter | None = None,
) -> jax.Array:
  """x @ w + b as [B, T, Q, H]."""
  D, Q, H = w_DQH.shape
  y_BTO = project(x_BTD, w_DQH.reshape(D, Q * H), adapter)
  y_BTQH = y_BTO.reshape(*x_BTD.shape[:2], Q, H)
  return y_BTQH if b_QH is None else y_BTQH + b_QH[None, None]


def from_heads(
  o_BTQH: jax.Array, w_QHD: jax.Array, adapter: lora.Adapter | None = None
) -> jax.Array:
  """Heads side by side, projected to [B, T, D]."""
  o_BTO = o_BTQH.reshape(*o_BTQH.shape[:2], -1)
  return project(o_BTO, w_QHD.reshape(-1, w_QHD.shape[-1]), adapter)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * scale over the last axis, in float32 (arXiv:1910.07467)."""
  x = x_BTD.astype(jnp.float32)
  var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  scale = scale_D.reshape((1,) * (x.ndim - 1) + scale_D.shape)
  return (x * jax.lax.rsqrt(var + eps)).astype(x_BTD.dtype) * scale


def mlp(
  x_BTD: jax.Array,
  wg_DF: jax.Array,
  wu_DF: jax.Array,
  wd_FD: jax.Array,
  adapters: lora.Adapters | None = None,
) -> jax.Array:
  """SwiGLU (Shazeer, arXiv:2002.05202)."""
  of = (adapters or {}).get
  gate_BTF = jax.nn.silu(project(x_BTD, wg_DF, of('gate')))
  return project(gate_BTF * project(x_BTD, wu_DF, of('up')), wd_FD, of('down'))
