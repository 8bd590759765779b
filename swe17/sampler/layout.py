"""Weights as decoding on CPU reads them quickest: layer by layer, and turned.

A jitted step that slices stacked layers copies all of them first, at every dispatch:
for a single sequence that takes three times as long as the step. So the copy is made
when weights are swapped, into the memory of the one before. It also turns the matrices
(see layers.Turned). The embedding is not copied: it lies right for the head as it is.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from swe17.model import layers
from swe17.model import params as p


def unstacked(params: p.Params, old: p.Unstacked | None, dtype: str) -> p.Unstacked:
  """The same weights, laid out for decoding. `old` is overwritten, and gone."""
  if old is None:
    shapes = jax.eval_shape(functools.partial(_laid_out, dtype=dtype), params)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    spare = jax.device_put(zeros, jax.devices()[0])  # committed, as `old` will be
  else:
    spare = old.layers
  return p.Unstacked(
    embed_VD=params.embed_VD,
    prev_JDD=params.prev_JDD,
    layers=_overwrite(params, spare, dtype=dtype),
    norm_D=params.norm_D,
    head_VD=params.head_VD,
  )


# `old` gives its buffers: kept as an input, the output is written into them.
@functools.partial(
  jax.jit, static_argnames='dtype', donate_argnames='old', keep_unused=True
)
def _overwrite(params: p.Params, old: Any, *, dtype: str) -> tuple[p.Layers, ...]:
  return _laid_out(params, dtype)


def _laid_out(params: p.Params, dtype: str) -> tuple[p.Layers, ...]:
  cast = jax.tree.map(lambda w: w.astype(dtype), p.layers(params))
  return tuple(_turned(layer) for layer in cast)


def _turned(layer: p.Layers) -> p.Layers:
  """Turns the matrices of the kinds of layer that decode on CPU in earnest."""
  attn, mlp = layer.attn, layer.mlp
  if isinstance(attn, p.Gqa):
    attn = _replace(
      attn,
      wq_NDQH=_turn(attn.wq_NDQH, 1),
      wk_NDCH=_turn(attn.wk_NDCH, 1),
      wv_NDCH=_turn(attn.wv_NDCH, 1),
      wo_NQHD=_turn(attn.wo_NQHD, 2),
    )
  if isinstance(mlp, p.Dense):
    mlp = _replace(
      mlp,
      wg_NDF=_turn(mlp.wg_NDF, 1),
      wu_NDF=_turn(mlp.wu_NDF, 1),
      wd_NFD=_turn(mlp.wd_NFD, 1),
    )
  return dataclasses.replace(layer, attn=attn, mlp=mlp)


def _turn(w: jax.Array, inputs: int) -> layers.Turned:
  """[*inputs, *outputs] as [*outputs, inputs], the inputs side by side."""
  flat = w.reshape(-1, *w.shape[inputs:])
  return layers.Turned(jnp.moveaxis(flat, 0, -1))


def _replace(of: Any, **leaves: Any) -> Any:
  """Leaves of another type than the fields say: a matrix that is turned."""
  return dataclasses.replace(of, **leaves)
