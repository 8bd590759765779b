"""The pieces of a transformer layer, as functions of arrays."""

from flax import struct
import jax
import jax.numpy as jnp

from swe17.model import lora

_FEW = range(4, 129)  # rows for which a turned matrix goes first in the product


@struct.dataclass
class Turned:
  """A matrix that is kept with its outputs before its inputs, [*outputs, inputs].

  For decoding on CPU: the larger operand of a product is read as it lies if it comes
  first, and packed anew, at every product, if it comes second. With 32 rows the first
  takes three quarters of the time.
  """

  w: jax.Array


def project(
  x_BTI: jax.Array, w_IO: jax.Array | Turned, adapter: lora.Adapter | None = None
) -> jax.Array:
  """x @ w over the last axis, as one plain matrix product, and what an adapter adds.

  Flattened by hand: XLA on CPU runs the gradient of a product that contracts two batch
  axes 1.6 times slower than that of the flat one.
  """
  x_XI = x_BTI.reshape(-1, x_BTI.shape[-1])
  out_XO = _turned(x_XI, w_IO.w) if isinstance(w_IO, Turned) else x_XI @ w_IO
  out_BTO = out_XO.reshape(*x_BTI.shape[:-1], -1)
  if adapter is None:
    return out_BTO
  return out_BTO + project(lora.down(x_BTI, adapter), adapter.b_NrO)


def _turned(x_XI: jax.Array, w_OI: jax.Array) -> jax.Array:
  w_OI = w_OI.reshape(-1, w_OI.shape[-1])
  if x_XI.shape[0] not in _FEW:
    return x_XI @ w_OI.T
  out_OX = jax.lax.dot_general(w_OI, x_XI, (((1,), (1,)), ((), ())))
  # Without the barrier XLA turns the product round again, to be rid of the transpose.
  return jax.lax.optimization_barrier(out_OX).T


def heads(
  x_BTD: jax.Array,
  w_DQH: jax.Array | Turned,
  b_QH: jax.Array | None,
  adapter: lora.Adapter | None = None,
) -> jax.Array:
  """x @ w + b as [B, T, Q, H]."""
  if isinstance(w_DQH, Turned):
    y_BTO, out = project(x_BTD, w_DQH, adapter), w_DQH.w.shape[:-1]
  else:
    flat_DO = w_DQH.reshape(w_DQH.shape[0], -1)
    y_BTO, out = project(x_BTD, flat_DO, adapter), w_DQH.shape[1:]
  y_BTQH = y_BTO.reshape(*x_BTD.shape[:2], *out)
  return y_BTQH if b_QH is None else y_BTQH + b_QH[None, None]


def from_heads(
  o_BTQH: jax.Array, w_QHD: jax.Array | Turned, adapter: lora.Adapter | None = None
) -> jax.Array:
  """Heads side by side, projected to [B, T, D]."""
  o_BTO = o_BTQH.reshape(*o_BTQH.shape[:2], -1)
  if isinstance(w_QHD, Turned):
    return project(o_BTO, w_QHD, adapter)
  return project(o_BTO, w_QHD.reshape(-1, w_QHD.shape[-1]), adapter)


def rms_norm(x_BTD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * scale over the last axis, in float32 (arXiv:1910.07467)."""
  x = x_BTD.astype(jnp.float32)
  var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  scale = scale_D.reshape((1,) * (x.ndim - 1) + scale_D.shape)
  return (x * jax.lax.rsqrt(var + eps)).astype(x_BTD.dtype) * scale


def mlp(
  x_BTD: jax.Array,
  wg_DF: jax.Array | Turned,
  wu_DF: jax.Array | Turned,
  wd_FD: jax.Array | Turned,
  adapters: lora.Adapters | None = None,
) -> jax.Array:
  """SwiGLU (Shazeer, arXiv:2002.05202)."""
  of = (adapters or {}).get
  gate_BTF = jax.nn.silu(project(x_BTD, wg_DF, of('gate')))
  return project(gate_BTF * project(x_BTD, wu_DF, of('up')), wd_FD, of('down'))
