"""Parameters as a pytree: shapes first, values and shardings derived from them.

`abstract(cfg, vocab)` is the one description of the model: shape, logical axes and
initial scale of every leaf. Layers are stacked on N. The head is the embedding (tied).
"""

import dataclasses
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from swe17 import config

# A `Params` with something else at its leaves, or what optax makes of one: its own type
# of trees leaves out registered dataclasses.
Tree = Any

_COPY = 0.25  # how strongly a head's output starts as a copy


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Shape, logical axis names, and the standard deviation of initial values."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  scale: float  # 0: the leaf starts at ones (a norm)


@struct.dataclass
class Layers:
  """All layers, stacked on N. float32 masters."""

  attn_norm_ND: jax.Array
  wq_NDQH: jax.Array
  wk_NDCH: jax.Array
  wv_NDCH: jax.Array
  wo_NQHD: jax.Array
  mlp_norm_ND: jax.Array
  wg_NDF: jax.Array
  wu_NDF: jax.Array
  wd_NFD: jax.Array


@struct.dataclass
class Params:
  """A tied transformer: embedding, layers, final norm.

  `prev_JDD` (None where `model.ngram` is 1) adds a projection of the embedding of the
  token j + 1 before to each token's. A head can then look for "what followed the last
  x" in one layer, which otherwise takes two and many more tokens to form: what lets a
  model this small learn to point at code in a minute.
  """

  embed_VD: jax.Array
  prev_JDD: jax.Array | None
  layers: Layers
  norm_D: jax.Array


def abstract(cfg: config.Model, vocab: int) -> Tree:
  """The parameter tree with a `Leaf` at every leaf."""
  N, D, F = cfg.layers, cfg.width, cfg.ffn
  Q, C, H = cfg.heads, cfg.kv_heads, cfg.head_dim
  J, fan_in = cfg.ngram - 1, 1 / math.sqrt(D)
  # Residual branches start small so that depth does not change the initial scale.
  out = 1 / math.sqrt(2 * N)

  def leaf(shape: tuple[int, ...], axes: str, scale: float) -> Any:
    return Leaf(shape, tuple(axes.split()), scale)

  return Params(
    embed_VD=leaf((vocab, D), 'vocab embed', fan_in),
    prev_JDD=leaf((J, D, D), 'ngram embed embed', fan_in) if J else None,
    layers=Layers(
      attn_norm_ND=leaf((N, D), 'layer embed', 0),
      wq_NDQH=leaf((N, D, Q, H), 'layer embed heads head', fan_in),
      wk_NDCH=leaf((N, D, C, H), 'layer embed kv head', fan_in),
      wv_NDCH=leaf((N, D, C, H), 'layer embed kv head', fan_in),
      wo_NQHD=leaf((N, Q, H, D), 'layer heads head embed', out / math.sqrt(Q * H)),
      mlp_norm_ND=leaf((N, D), 'layer embed', 0),
      wg_NDF=leaf((N, D, F), 'layer embed ffn', fan_in),
      wu_NDF=leaf((N, D, F), 'layer embed ffn', fan_in),
      wd_NFD=leaf((N, F, D), 'layer ffn embed', out / math.sqrt(F)),
    ),
    norm_D=leaf((D,), 'embed', 0),
  )


def init(abstract: Params, key: jax.Array) -> Params:
  """Draws float32 initial values; every leaf from its own key.

  With an n-gram embedding, attention starts as `_mimetic` says.
  """
  leaves, tree = jax.tree.flatten(abstract)
  keys = jax.random.split(key, len(leaves))
  values = [
    jnp.ones(leaf.shape)
    if leaf.scale == 0
    else leaf.scale * jax.random.normal(k, leaf.shape)
    for leaf, k in zip(leaves, keys, strict=True)
  ]
  params = jax.tree.unflatten(tree, values)
  return params if params.prev_JDD is None else _mimetic(params)


def _mimetic(params: Params) -> Params:
  """Starts every head as one that copies what it attends to.

  Values go out through the transpose of the way they came in; keys of even heads match
  queries with the *previous* token (so the head looks for what followed the last
  occurrence), those of odd heads with the same token. After Trockman and Kolter,
  "Mimetic Initialization of Self-Attention Layers" (arXiv:2305.09828).
  """
  assert params.prev_JDD is not None
  layers = params.layers
  C = layers.wk_NDCH.shape[2]
  G = layers.wq_NDQH.shape[2] // C
  same_NDCH = layers.wq_NDQH[:, :, ::G]
  before_NDCH = jnp.einsum('ED,NECH->NDCH', params.prev_JDD[0], same_NDCH)
  even_C = (jnp.arange(C) % 2 == 0)[None, None, :, None]
  wv_NDQH = jnp.repeat(layers.wv_NDCH, G, axis=2)
  layers = dataclasses.replace(
    layers,
    wk_NDCH=jnp.where(even_C, before_NDCH, same_NDCH),
    wo_NQHD=_COPY * jnp.einsum('NDQH->NQHD', wv_NDQH),
  )
  return dataclasses.replace(params, layers=layers)


def rounded(params: Params) -> Params:
  """The values that are published: every leaf rounded to bfloat16, held in float32.

  Both sides compute from these, so equal versions mean equal weights (DESIGN.md 5).
  A gradient taken at them is applied to the masters as it is (straight through).
  """
  return jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), params)


def count(abstract: Tree) -> int:
  """Number of parameters."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))
