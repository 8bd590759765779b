"""The transformer, once: training, prefill and decode run the same block.

`apply` maps tokens to final hidden states. Training attends within packed segments of
a row; serving attends to a cache row by row. What differs is only where keys and
values come from, so both sides compute the same function.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from swe17 import config
from swe17.model import (
  attention,
  attention_kernels,
  embedding,
  gqa,
  layers,
  mla,
  moe,
  sharding,
)
from swe17.model import cache as kv
from swe17.model import params as p

# (one layer's attention leaves, h [B, T, D]) -> what is added to the residual stream
Attention = Callable[[p.Gqa | p.Mla, jax.Array], jax.Array]


def block(
  layer: p.Layers,
  x_BTD: jax.Array,
  attend: Attention,
  cfg: config.Model,
  recorded_BTK: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """One pre-norm layer and its router's choice [B, T, K] (None where it is dense).

  `layer` holds one layer's leaves (N sliced away).
  """
  h_BTD = layers.rms_norm(x_BTD, layer.attn_norm_ND, cfg.norm_eps)
  x_BTD = x_BTD + attend(layer.attn, h_BTD)
  h_BTD = layers.rms_norm(x_BTD, layer.mlp_norm_ND, cfg.norm_eps)
  if isinstance(layer.mlp, p.Dense):
    mlp = layer.mlp
    y_BTD = layers.mlp(h_BTD, mlp.wg_NDF, mlp.wu_NDF, mlp.wd_NFD, mlp.lora)
    return x_BTD + y_BTD, None
  y_BTD, ids_BTK = moe.mix(h_BTD, layer.mlp, cfg.moe, recorded_BTK)
  return x_BTD + y_BTD, ids_BTK


def _embed(
  params: p.Params | p.Unstacked, token_BT: jax.Array, before_JBT: jax.Array
) -> jax.Array:
  """Embeddings; with `prev_JDD`, each also carries the tokens before it (-1: none)."""
  x_BTD = embedding.embed(params.embed_VD, token_BT)
  if params.prev_JDD is None:
    return x_BTD
  for before_BT, prev_DD in zip(before_JBT, params.prev_JDD, strict=True):
    prev_BTD = embedding.embed(params.embed_VD, jnp.maximum(before_BT, 0))
    prev_BTD = layers.project(prev_BTD, prev_DD)
    x_BTD += jnp.where(before_BT[:, :, None] >= 0, prev_BTD, 0.0)
  return x_BTD


def _before(
  token_BT: jax.Array,
  position_BT: jax.Array,
  segment_BT: jax.Array,
  prefix_BT: jax.Array | None,
  J: int,
) -> jax.Array:
  """[J, B, T] ids of the tokens 1 to J before each, in segment or prefix; else -1."""
  if J == 0:
    return jnp.zeros((0, *token_BT.shape), jnp.int32)
  if prefix_BT is None:
    prefix_BT = jnp.zeros_like(segment_BT)
  first_BT = _first(segment_BT, prefix_BT)
  found = []
  for j in range(1, J + 1):
    same_BT = segment_BT == jnp.roll(segment_BT, j, axis=1)
    same_BT &= (jnp.arange(segment_BT.shape[1]) >= j)[None, :]
    # Positions run on from the prefix: position p of it lies p after its first token.
    back_BT = position_BT - j
    there_BT = jnp.take_along_axis(token_BT, first_BT + jnp.maximum(back_BT, 0), axis=1)
    there_BT = jnp.where((prefix_BT > 0) & (back_BT >= 0), there_BT, -1)
    found.append(jnp.where(same_BT, jnp.roll(token_BT, j, axis=1), there_BT))
  return jnp.stack(found)


def _first(segment_BT: jax.Array, of_BT: jax.Array) -> jax.Array:
  """Where in its row the segment `of_BT` begins, int32 [B, T]; 0 of segment 0."""
  B, T = segment_BT.shape
  at_B1, place_1T = jnp.arange(B)[:, None], jnp.arange(T, dtype=jnp.int32)[None, :]
  first_BP = jnp.full((B, T + 1), T, jnp.int32).at[at_B1, segment_BT].min(place_1T)
  return jnp.where(of_BT > 0, jnp.take_along_axis(first_BP, of_BT, axis=1), 0)


def _computed(params: Any, cfg: config.Model) -> Any:
  """The weights in the dtype that matrices are multiplied in."""
  if cfg.dtype == 'float32':
    return params
  return jax.tree.map(lambda w: w.astype(cfg.dtype), params)


def apply(
  params: p.Params,
  token_BT: jax.Array,
  position_BT: jax.Array,
  segment_BT: jax.Array,
  *,
  cfg: config.Model,
) -> jax.Array:
  """Hidden states of packed rows, float32 [B, T, D]; see `apply_routed`."""
  return apply_routed(params, token_BT, position_BT, segment_BT, None, cfg=cfg)[0]


def apply_routed(
  params: p.Params,
  token_BT: jax.Array,
  position_BT: jax.Array,
  segment_BT: jax.Array,
  recorded_BTNK: jax.Array | None,
  *,
  cfg: config.Model,
  prefix_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Hidden states of packed rows, float32 [B, T, D], and what the routers choose.

  Args:
    params: values to compute with (already rounded, see `params.rounded`).
    token_BT: int32 ids; padding may be any id.
    position_BT: int32 position within the token's own segment, counted from the start
      of the prefix that it continues.
    segment_BT: int32, 0 for padding; tokens see earlier tokens of their own segment.
    recorded_BTNK: int32 routes to replay in the layers with experts; -1: none recorded.
    cfg: the model's shape, and whether layers are rematerialised or unrolled.
    prefix_BT: int32, segment of the same row that the token's own continues and sees
      too, 0: none; None: no segment continues another.

  Returns:
    The hidden states, and int32 [B, T, N, K] experts that the routers choose by
    themselves (None without): what was used, except where a route was replayed.
  """
  params = _computed(params, cfg)

  def attend(attn: p.Gqa | p.Mla, h_BTD: jax.Array) -> jax.Array:
    if isinstance(attn, p.Mla):
      q, k, v = mla.expanded(attn, h_BTD, position_BT, cfg)
      return mla.out(
        attn, attention_kernels.attend(q, k, v, segment_BT, cfg, prefix_BT)
      )
    q, k, v = gqa.queries_keys_values(attn, h_BTD, position_BT, cfg)
    return gqa.out(attn, attention_kernels.attend(q, k, v, segment_BT, cfg, prefix_BT))

  def step(x_BTD: jax.Array, layer: tuple) -> tuple[jax.Array, jax.Array | None]:
    x_BTD = sharding.constrain(x_BTD, 'batch', 'time', '')
    return block(layer[0], x_BTD, attend, cfg, layer[1])

  before_JBT = _before(token_BT, position_BT, segment_BT, prefix_BT, cfg.ngram - 1)
  x_BTD, routes_NBTK = _embed(params, token_BT, before_JBT), None
  recorded_NBTK = None if recorded_BTNK is None else jnp.moveaxis(recorded_BTNK, 2, 0)
  for stack in params.stacks:
    routed = isinstance(stack.mlp, p.Moe)
    x_BTD, routes = jax.lax.scan(
      jax.checkpoint(step) if cfg.remat else step,
      x_BTD,
      (stack, recorded_NBTK if routed else None),
      unroll=stack.attn_norm_ND.shape[0] if cfg.unroll else 1,
    )
    routes_NBTK = routes if routed else routes_NBTK
  hidden_BTD = layers.rms_norm(x_BTD, params.norm_D, cfg.norm_eps).astype(jnp.float32)
  return hidden_BTD, None if routes_NBTK is None else jnp.moveaxis(routes_NBTK, 0, 2)


def apply_cached(
  params: p.Params | p.Unstacked,
  token_BT: jax.Array,
  position_BT: jax.Array,
  cache: kv.Cache,
  table_BJ: jax.Array | None,
  *,
  cfg: config.Model,
) -> tuple[jax.Array, kv.Cache, jax.Array | None]:
  """Hidden states of new tokens after what the cache holds; the cache; routes.

  Args:
    params: values to compute with.
    token_BT: int32 new tokens of each row.
    position_BT: int32 their positions; one beyond the row's pages writes nothing.
    cache: pages; an entry of a row is seen by queries at its position and beyond, so
      entries beyond a row's own length must not be looked at before being written.
      Several batch rows may be pieces of one context: all entries are written before
      any is looked at.
    table_BJ: int32, the pages of each batch row; None: page i is all of row i.
    cfg: the model's shape.

  Returns:
    float32 [B, T, D], the cache, and int32 [B, T, N, K] experts that were used (None
    without experts).
  """
  params = _computed(params, cfg)
  if table_BJ is None:
    table_BJ = jnp.arange(token_BT.shape[0])[:, None]
  ks, vs, routes = list(cache.k), list(cache.v), []
  page_BT, slot_BT = _places(table_BJ, position_BT, cache)
  token_PS = cache.token.at[page_BT, slot_BT].set(token_BT, mode='drop')
  before = []
  for j in range(1, cfg.ngram):
    at_BT = _places(table_BJ, jnp.maximum(position_BT - j, 0), cache)
    before.append(jnp.where(position_BT >= j, token_PS[at_BT], -1))
  before_JBT = jnp.stack(before) if before else jnp.zeros((0, *token_BT.shape), int)
  x_BTD = _embed(params, token_BT, before_JBT)

  def attend(attn: p.Gqa | p.Mla, h_BTD: jax.Array, i: int) -> jax.Array:
    if isinstance(attn, p.Mla):
      q, k = mla.absorbed(attn, h_BTD, position_BT, cfg)
      ks[i] = ks[i].at[page_BT, :, :, slot_BT].set(k, mode='drop')
      o = attention.cached(
        q, ks[i], None, table_BJ, position_BT, latent=cfg.mla.kv_rank
      )
      return mla.out_absorbed(attn, o)
    q, k, v = gqa.queries_keys_values(attn, h_BTD, position_BT, cfg)
    ks[i] = ks[i].at[page_BT, :, :, slot_BT].set(k, mode='drop')
    vs[i] = vs[i].at[page_BT, :, slot_BT].set(v, mode='drop')
    return gqa.out(attn, attention.cached(q, ks[i], vs[i], table_BJ, position_BT))

  for i, layer in enumerate(_each(params)):
    x_BTD, used = block(layer, x_BTD, functools.partial(attend, i=i), cfg)
    routes += [] if used is None else [used]
  hidden_BTD = layers.rms_norm(x_BTD, params.norm_D, cfg.norm_eps).astype(jnp.float32)
  routes_BTNK = jnp.stack(routes, axis=2) if routes else None
  routes_PSNK = cache.routes
  if routes_PSNK is not None and routes_BTNK is not None:
    fed_BTNK = routes_BTNK.astype(routes_PSNK.dtype)
    routes_PSNK = routes_PSNK.at[page_BT, slot_BT].set(fed_BTNK, mode='drop')
  cache = kv.Cache(token_PS, tuple(ks), tuple(vs), routes_PSNK)
  return hidden_BTD, cache, routes_BTNK


def _places(
  table_BJ: jax.Array, position_BT: jax.Array, cache: kv.Cache
) -> tuple[jax.Array, jax.Array]:
  """(page, position in it) of positions of rows; a page beyond the pool if outside."""
  P, S = cache.token.shape
  at_BT = position_BT // S
  page_BT = jnp.take_along_axis(table_BJ, at_BT, axis=1, mode='clip')
  return jnp.where(at_BT < table_BJ.shape[1], page_BT, P), position_BT % S


def _each(params: p.Params | p.Unstacked) -> tuple[p.Layers, ...]:
  return params.layers if isinstance(params, p.Unstacked) else p.layers(params)


def logits(params: p.Params | p.Unstacked, hidden_BTD: jax.Array) -> jax.Array:
  """Vocabulary logits, float32 [B, T, V]."""
  if isinstance(params, p.Unstacked):
    return layers.project(hidden_BTD, layers.Turned(params.unembed_VD))
  return layers.project(hidden_BTD, params.unembed_VD.T)
