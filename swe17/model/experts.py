"""Products of rows with the matrix of their expert, and what sorts them by expert.

Rows are sorted by expert, so that each expert's are neighbours and three grouped
products (`jax.lax.ragged_dot`) do the work; the inverse permutation puts back what
comes out. Gradients go the same ways backwards: nothing is scattered.

An expert's adapter is two more grouped products; it is never quantised.
"""

import functools

import jax
import jax.numpy as jnp

from swe17 import config_model
from swe17.model import lora
from swe17.model import params as p
from swe17.ops import quantize


def here(
  x_XD: jax.Array, ids_XK: jax.Array, moe: p.Moe, cfg: config_model.Moe
) -> jax.Array:
  """Each row through each of its K experts, all of them here, [X, K, D]."""
  (X, K), E = ids_XK.shape, moe.wg_NEDF.shape[0]
  flat_R = ids_XK.reshape(-1)  # R = X K rows
  order_R = jnp.argsort(flat_R, stable=True)
  back_R = jnp.argsort(order_R, stable=True)
  sizes_E = jnp.sum(flat_R[:, None] == jnp.arange(E)[None, :], axis=0, dtype=jnp.int32)
  rows_RD = permuted(jnp.repeat(x_XD, K, axis=0), order_R, back_R)
  out_RD = permuted(swiglu(rows_RD, moe, sizes_E, cfg), back_R, order_R)
  return out_RD.reshape(X, K, -1)


def swiglu(
  x_RD: jax.Array, moe: p.Moe, sizes_E: jax.Array, cfg: config_model.Moe
) -> jax.Array:
  """SwiGLU of rows that are sorted by expert; `sizes_E` rows belong to each."""
  of = (moe.lora or {}).get

  def dot(x_RI: jax.Array, w_EIO: jax.Array, adapter: lora.Adapter | None) -> jax.Array:
    y_RO = grouped(x_RI, w_EIO, sizes_E, cfg.quantise)
    if adapter is None:
      return y_RO
    low_Rr = adapter.scale * grouped(x_RI, adapter.a_NIr, sizes_E, 'none')
    return y_RO + grouped(low_Rr, adapter.b_NrO, sizes_E, 'none')

  gate_RF = jax.nn.silu(dot(x_RD, moe.wg_NEDF, of('expert_gate')))
  up_RF = dot(x_RD, moe.wu_NEDF, of('expert_up'))
  return dot(gate_RF * up_RF, moe.wd_NEFD, of('expert_down'))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(
  x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, quantise: str
) -> jax.Array:
  """Rows times the matrix of their expert, [R, O].

  With `quantise` ('weights' or 'both') from NVFP4 operands; the gradient is that of
  the unquantised product in bfloat16 (ops/quantize.py).
  """
  if quantise != 'none':
    w_EIO = quantize.weights(w_EIO)
    x_RI = quantize.tokens(x_RI) if quantise == 'both' else x_RI
  return jax.lax.ragged_dot(x_RI, w_EIO, sizes_E)


def _grouped_fwd(
  x_RI: jax.Array, w_EIO: jax.Array, sizes_E: jax.Array, quantise: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
  return grouped(x_RI, w_EIO, sizes_E, quantise), (x_RI, w_EIO, sizes_E)


def _grouped_bwd(quantise: str, saved: tuple, dy_RO: jax.Array) -> tuple:
  x_RI, w_EIO, sizes_E = saved
  if quantise != 'none':
    x_RI, w_EIO, dy_RO = (
      a.astype(jnp.bfloat16).astype(a.dtype) for a in (x_RI, w_EIO, dy_RO)
    )
  _, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes_E), x_RI, w_EIO)
  return (*pull(dy_RO), None)


grouped.defvjp(_grouped_fwd, _grouped_bwd)


@jax.custom_vjp
def permuted(x_RD: jax.Array, order_R: jax.Array, inverse_R: jax.Array) -> jax.Array:
  """x[order]; its gradient is a gather by the inverse, not a scatter."""
  del inverse_R
  return x_RD[order_R]


def _permuted_fwd(
  x_RD: jax.Array, order_R: jax.Array, inverse_R: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return x_RD[order_R], inverse_R


def _permuted_bwd(inverse_R: jax.Array, dy_RD: jax.Array) -> tuple:
  return dy_RD[inverse_R], None, None


permuted.defvjp(_permuted_fwd, _permuted_bwd)
