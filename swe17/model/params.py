"""Parameters as a pytree: shapes first, values and shardings derived from them.

`abstract(cfg, vocab)` is the one description of the model: shape, logical axes and
initial values of every leaf. Layers of one kind are stacked on N: dense ones, then
those with experts.

  Params   embed, [prev], [head], dense: Layers, moe: Layers, norm
  Layers   norm, attn: Gqa | Mla, norm, mlp: Dense | Moe

With `model.lora.rank`, an adapter a matrix in `lora` of what holds it (model/lora.py).
"""

import dataclasses
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from swe17 import config
from swe17.model import lora

# A `Params` with something else at its leaves, or what optax makes of one: its own type
# of trees leaves out registered dataclasses.
Tree = Any
Adapters = lora.Adapters

_COPY = 0.25  # how strongly a head's output starts as a copy
# Folded into the key of initial values for those of adapters. Above the number of
# leaves: splitting a key and folding a small number in may give the same keys.
_ADAPTERS = 0x104A


@dataclasses.dataclass(frozen=True)
class Leaf:
  """Shape, logical axis names, and initial values: normal, around `mean`."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  scale: float  # standard deviation
  mean: float = 0.0


@struct.dataclass
class Gqa:
  """Grouped-query attention. Biases (Qwen2) and head norms (Qwen3) may be absent."""

  wq_NDQH: jax.Array
  wk_NDCH: jax.Array
  wv_NDCH: jax.Array
  wo_NQHD: jax.Array
  bq_NQH: jax.Array | None = None
  bk_NCH: jax.Array | None = None
  bv_NCH: jax.Array | None = None
  q_norm_NH: jax.Array | None = None
  k_norm_NH: jax.Array | None = None
  lora: Adapters | None = None


@struct.dataclass
class Mla:
  """Multi-head latent attention: A is the rank of queries, L that of keys and values.

  H = nope + rope dimensions of queries and keys, of which the last rope ones (r) turn
  and are shared by all heads on the key side; P = nope, U = value dimensions.
  """

  wq_NAQH: jax.Array  # from the latent query, or from D where there is none
  wkv_down_NDL: jax.Array
  wk_rope_NDr: jax.Array
  kv_norm_NL: jax.Array
  wk_NLQP: jax.Array
  wv_NLQU: jax.Array
  wo_NQUD: jax.Array
  wq_down_NDA: jax.Array | None = None
  q_norm_NA: jax.Array | None = None
  lora: Adapters | None = None


@struct.dataclass
class Dense:
  """SwiGLU."""

  wg_NDF: jax.Array
  wu_NDF: jax.Array
  wd_NFD: jax.Array
  lora: Adapters | None = None


@struct.dataclass
class Moe:
  """E experts, a router, and perhaps a layer that every token goes through.

  `bias_NE` moves the selection only (DeepSeek-V3); no gradient reaches it.
  """

  router_NDE: jax.Array
  wg_NEDF: jax.Array
  wu_NEDF: jax.Array
  wd_NEFD: jax.Array
  bias_NE: jax.Array | None = None
  shared: Dense | None = None
  lora: Adapters | None = None  # of the routed experts


@struct.dataclass
class Layers:
  """Layers of one kind, stacked on N. float32 masters."""

  attn_norm_ND: jax.Array
  attn: Gqa | Mla
  mlp_norm_ND: jax.Array
  mlp: Dense | Moe


@struct.dataclass
class Params:
  """A transformer: embedding, layers, final norm, and a head unless it is tied.

  `prev_JDD` (None where `model.ngram` is 1) adds a projection of the embedding of the
  token j + 1 before to each token's. A head can then look for "what followed the last
  x" in one layer, which otherwise takes two and many more tokens to form: what lets a
  model this small learn to point at code in a minute.
  """

  embed_VD: jax.Array
  prev_JDD: jax.Array | None
  dense: Layers | None
  moe: Layers | None
  norm_D: jax.Array
  head_VD: jax.Array | None = None

  @property
  def unembed_VD(self) -> jax.Array:
    """The matrix of the head: the embedding where it is tied."""
    return self.embed_VD if self.head_VD is None else self.head_VD

  @property
  def stacks(self) -> tuple[Layers, ...]:
    """The stacks of layers, in the order they are applied."""
    return tuple(s for s in (self.dense, self.moe) if s is not None)


@struct.dataclass
class Unstacked:
  """The same weights with every layer's leaves as arrays of their own.

  For decoding: a jitted step that slices stacked layers copies all of them first, at
  every dispatch (on CPU; 4 times as slow as this for a single sequence).
  """

  embed_VD: jax.Array
  prev_JDD: jax.Array | None
  layers: tuple[Layers, ...]
  norm_D: jax.Array
  head_VD: jax.Array | None = None

  @property
  def unembed_VD(self) -> jax.Array:
    """The matrix of the head: the embedding where it is tied."""
    return self.embed_VD if self.head_VD is None else self.head_VD


def layers(params: Params) -> tuple[Layers, ...]:
  """Every layer by itself, N sliced away, in order."""
  found = []
  for stack in params.stacks:
    N = stack.attn_norm_ND.shape[0]
    found += [jax.tree.map(lambda w, n=n: w[n], stack) for n in range(N)]
  return tuple(found)


def abstract(cfg: config.Model, vocab: int) -> Tree:
  """The parameter tree with a `Leaf` at every leaf."""
  D, J, fan_in = cfg.width, cfg.ngram - 1, 1 / math.sqrt(cfg.width)
  return Params(
    embed_VD=_leaf((vocab, D), 'vocab embed', fan_in),
    prev_JDD=_leaf((J, D, D), 'ngram embed embed', fan_in) if J else None,
    dense=_layers(cfg, cfg.dense_layers, _dense(cfg, cfg.dense_layers, cfg.ffn)),
    moe=_layers(cfg, cfg.moe_layers, _moe(cfg)),
    norm_D=_ones((D,), 'embed'),
    head_VD=None if cfg.tied else _leaf((vocab, D), 'vocab embed', fan_in),
  )


def _leaf(shape: tuple[int, ...], axes: str, scale: float, mean: float = 0.0) -> Any:
  return Leaf(shape, tuple(axes.split()), scale, mean)


def _ones(shape: tuple[int, ...], axes: str) -> Any:
  return _leaf(shape, axes, 0.0, 1.0)


def _zeros(shape: tuple[int, ...], axes: str) -> Any:
  return _leaf(shape, axes, 0.0)


def _layers(cfg: config.Model, N: int, mlp: Any) -> Layers | None:
  if N == 0:
    return None
  return Layers(
    attn_norm_ND=_ones((N, cfg.width), 'layer embed'),
    attn=_mla(cfg, N) if cfg.attention == 'mla' else _gqa(cfg, N),
    mlp_norm_ND=_ones((N, cfg.width), 'layer embed'),
    mlp=mlp,
  )


def _out(cfg: config.Model, fan_in: int) -> float:
  """Residual branches start small, so that depth does not change the first scale."""
  return 1 / math.sqrt(2 * cfg.layers * fan_in)


def _gqa(cfg: config.Model, N: int) -> Gqa:
  D, Q, C, H = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim
  fan_in, bias, norm = 1 / math.sqrt(D), cfg.bias, cfg.qk_norm
  return Gqa(
    wq_NDQH=_leaf((N, D, Q, H), 'layer embed heads head', fan_in),
    wk_NDCH=_leaf((N, D, C, H), 'layer embed kv head', fan_in),
    wv_NDCH=_leaf((N, D, C, H), 'layer embed kv head', fan_in),
    wo_NQHD=_leaf((N, Q, H, D), 'layer heads head embed', _out(cfg, Q * H)),
    bq_NQH=_zeros((N, Q, H), 'layer heads head') if bias else None,
    bk_NCH=_zeros((N, C, H), 'layer kv head') if bias else None,
    bv_NCH=_zeros((N, C, H), 'layer kv head') if bias else None,
    q_norm_NH=_ones((N, H), 'layer head') if norm else None,
    k_norm_NH=_ones((N, H), 'layer head') if norm else None,
    lora=_adapters(
      cfg,
      (N,),
      q=(D, 'embed', Q * H, 'heads'),
      k=(D, 'embed', C * H, 'kv'),
      v=(D, 'embed', C * H, 'kv'),
      o=(Q * H, 'heads', D, 'embed'),
    ),
  )


def _mla(cfg: config.Model, N: int) -> Mla:
  D, Q, H, r = cfg.width, cfg.heads, cfg.head_dim, cfg.rotary_dim
  A, L, U = cfg.mla.q_rank, cfg.mla.kv_rank, cfg.mla.v_dim
  fan_in, latent = 1 / math.sqrt(D), 1 / math.sqrt(L)
  return Mla(
    wq_NAQH=_leaf(
      (N, A or D, Q, H),
      f'layer {"q_rank" if A else "embed"} heads head',
      1 / math.sqrt(A or D),
    ),
    wkv_down_NDL=_leaf((N, D, L), 'layer embed kv_rank', fan_in),
    wk_rope_NDr=_leaf((N, D, r), 'layer embed head', fan_in),
    kv_norm_NL=_ones((N, L), 'layer kv_rank'),
    wk_NLQP=_leaf((N, L, Q, H - r), 'layer kv_rank heads head', latent),
    wv_NLQU=_leaf((N, L, Q, U), 'layer kv_rank heads head', latent),
    wo_NQUD=_leaf((N, Q, U, D), 'layer heads head embed', _out(cfg, Q * U)),
    wq_down_NDA=_leaf((N, D, A), 'layer embed q_rank', fan_in) if A else None,
    q_norm_NA=_ones((N, A), 'layer q_rank') if A else None,
    lora=_adapters(
      cfg,
      (N,),
      q=(D, 'embed', Q * H, 'heads'),
      q_a=(D, 'embed', A, 'q_rank'),
      q_b=(A, 'q_rank', Q * H, 'heads'),
      kv_a=(D, 'embed', L + r, 'kv_rank'),
      kv_b=(L, 'kv_rank', Q * (H - r + U), 'heads'),
      o=(Q * U, 'heads', D, 'embed'),
    ),
  )


def _dense(cfg: config.Model, N: int, F: int) -> Dense:
  D, fan_in = cfg.width, 1 / math.sqrt(cfg.width)
  return Dense(
    wg_NDF=_leaf((N, D, F), 'layer embed ffn', fan_in),
    wu_NDF=_leaf((N, D, F), 'layer embed ffn', fan_in),
    wd_NFD=_leaf((N, F, D), 'layer ffn embed', _out(cfg, F)),
    lora=_adapters(
      cfg,
      (N,),
      gate=(D, 'embed', F, 'ffn'),
      up=(D, 'embed', F, 'ffn'),
      down=(F, 'ffn', D, 'embed'),
    ),
  )


def _moe(cfg: config.Model) -> Moe:
  N, D, E, F = cfg.moe_layers, cfg.width, cfg.moe.experts, cfg.moe.ffn
  fan_in = 1 / math.sqrt(D)
  return Moe(
    router_NDE=_leaf((N, D, E), 'layer embed router', fan_in),
    wg_NEDF=_leaf((N, E, D, F), 'layer experts embed expert_ffn', fan_in),
    wu_NEDF=_leaf((N, E, D, F), 'layer experts embed expert_ffn', fan_in),
    wd_NEFD=_leaf((N, E, F, D), 'layer experts expert_ffn embed', _out(cfg, F)),
    bias_NE=_zeros((N, E), 'layer router') if cfg.moe.router == 'sigmoid' else None,
    shared=_dense(cfg, N, cfg.moe.shared * F) if cfg.moe.shared else None,
    lora=_adapters(
      cfg,
      (N, E),
      expert_gate=(D, 'embed', F, 'expert_ffn'),
      expert_up=(D, 'embed', F, 'expert_ffn'),
      expert_down=(F, 'expert_ffn', D, 'embed'),
    ),
  )


def _adapters(
  cfg: config.Model, lead: tuple[int, ...], **sizes: tuple[int, str, int, str]
) -> Adapters | None:
  """Those of `sizes` that `cfg` asks for: (fan in, its axis, fan out, its axis).

  x A starts with the deviation of x, B at zero: version 0 is the base's own function.
  """
  r, at = cfg.lora.rank, ' '.join(('layer', 'experts')[: len(lead)])
  found = {
    name: lora.Adapter(
      a_NIr=_leaf((*lead, In, r), f'{at} {axis_in} rank', 1 / math.sqrt(In)),
      b_NrO=_zeros((*lead, r, Out), f'{at} rank {axis_out}'),
      scale=cfg.lora.alpha / r,
    )
    for name, (In, axis_in, Out, axis_out) in sizes.items()
    if name in cfg.adapted
  }
  return found or None


def init(abstract: Params, key: jax.Array) -> Params:
  """Draws float32 initial values; every leaf from its own key.

  With an n-gram embedding, attention starts as `_mimetic` says. The base is the same
  with adapters and without.
  """
  params = _drawn(lora.base(abstract), key)
  params = params if params.prev_JDD is None else _mimetic(params)
  return lora.joined(abstract, params, init_adapters(abstract, key))


def init_adapters(abstract: Params, key: jax.Array) -> Tree:
  """Initial values of the adapters, None in the place of all else."""
  return _drawn(lora.adapters(abstract), jax.random.fold_in(key, _ADAPTERS))


def _drawn(abstract: Tree, key: jax.Array) -> Tree:
  leaves, tree = jax.tree.flatten(abstract)
  keys = jax.random.split(key, len(leaves))
  values = [
    leaf.mean + leaf.scale * jax.random.normal(k, leaf.shape)
    if leaf.scale
    else jnp.full(leaf.shape, leaf.mean)
    for leaf, k in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, values)


def _mimetic(params: Params) -> Params:
  """Starts every head as one that copies what it attends to.

  Values go out through the transpose of the way they came in; keys of even heads match
  queries with the *previous* token (so the head looks for what followed the last
  occurrence), those of odd heads with the same token. After Trockman and Kolter,
  "Mimetic Initialization of Self-Attention Layers" (arXiv:2305.09828).
  """
  layers = params.dense
  if layers is None or not isinstance(layers.attn, Gqa) or params.prev_JDD is None:
    return params
  attn = layers.attn
  C = attn.wk_NDCH.shape[2]
  G = attn.wq_NDQH.shape[2] // C
  same_NDCH = attn.wq_NDQH[:, :, ::G]
  before_NDCH = jnp.einsum('ED,NECH->NDCH', params.prev_JDD[0], same_NDCH)
  even_C = (jnp.arange(C) % 2 == 0)[None, None, :, None]
  wv_NDQH = jnp.repeat(attn.wv_NDCH, G, axis=2)
  attn = dataclasses.replace(
    attn,
    wk_NDCH=jnp.where(even_C, before_NDCH, same_NDCH),
    wo_NQHD=_COPY * jnp.einsum('NDQH->NQHD', wv_NDQH),
  )
  return dataclasses.replace(params, dense=dataclasses.replace(layers, attn=attn))


def rounded(params: Params, dtype: str = 'float32') -> Params:
  """The values that are published: every leaf rounded to bfloat16, held in `dtype`.

  Both sides compute from these, so equal versions mean equal weights (DESIGN.md 5).
  A gradient taken at them is applied to the masters as it is (straight through).
  """
  return jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(dtype), params)


def count(abstract: Tree) -> int:
  """Number of parameters."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract))
