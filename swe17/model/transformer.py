"""The transformer, once: training, prefill and decode run the same block.

`apply` maps tokens to final hidden states. Training attends within packed segments of
a row; serving attends to a cache row by row. What differs is only where keys and
values come from, so both sides compute the same function.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from swe17 import config
from swe17.model import attention, layers
from swe17.model import cache as kv
from swe17.model import params as p

# (layer index or tracer, q, k, v) -> attention output, all [B, T, heads, H]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def block(
  layer: p.Layers,
  x_BTD: jax.Array,
  position_BT: jax.Array,
  attend: Attend,
  cfg: config.Model,
) -> jax.Array:
  """One pre-norm layer. `layer` holds one layer's leaves (N sliced away)."""
  h_BTD = layers.rms_norm(x_BTD, layer.attn_norm_ND, cfg.norm_eps)
  q_BTQH = _heads(h_BTD, layer.wq_NDQH)
  k_BTCH = _heads(h_BTD, layer.wk_NDCH)
  v_BTCH = _heads(h_BTD, layer.wv_NDCH)
  q_BTQH = layers.rotate(q_BTQH, position_BT, cfg.rope_theta, cfg.rotary_dim)
  k_BTCH = layers.rotate(k_BTCH, position_BT, cfg.rope_theta, cfg.rotary_dim)
  o_BTQH = attend(q_BTQH, k_BTCH, v_BTCH)
  D = x_BTD.shape[-1]
  o_BTO = o_BTQH.reshape(*o_BTQH.shape[:2], -1)
  x_BTD = x_BTD + layers.project(o_BTO, layer.wo_NQHD.reshape(-1, D))
  h_BTD = layers.rms_norm(x_BTD, layer.mlp_norm_ND, cfg.norm_eps)
  return x_BTD + layers.mlp(h_BTD, layer.wg_NDF, layer.wu_NDF, layer.wd_NFD)


def _heads(x_BTD: jax.Array, w_DQH: jax.Array) -> jax.Array:
  D, Q, H = w_DQH.shape
  return layers.project(x_BTD, w_DQH.reshape(D, Q * H)).reshape(*x_BTD.shape[:2], Q, H)


def _embed(params: p.Params, token_BT: jax.Array, before_JBT: jax.Array) -> jax.Array:
  """Embeddings; with `prev_JDD`, each also carries the tokens before it (-1: none)."""
  x_BTD = layers.embed(params.embed_VD, token_BT)
  if params.prev_JDD is None:
    return x_BTD
  for before_BT, prev_DD in zip(before_JBT, params.prev_JDD, strict=True):
    prev_BTD = layers.embed(params.embed_VD, jnp.maximum(before_BT, 0))
    prev_BTD = layers.project(prev_BTD, prev_DD)
    x_BTD += jnp.where(before_BT[:, :, None] >= 0, prev_BTD, 0.0)
  return x_BTD


def _before(token_BT: jax.Array, segment_BT: jax.Array, J: int) -> jax.Array:
  """[J, B, T] ids of the tokens 1 to J before each in its own segment, else -1."""
  found = []
  for j in range(1, J + 1):
    same_BT = segment_BT[:, j:] == segment_BT[:, :-j]
    none_Bj = jnp.full_like(token_BT[:, :j], -1)
    before_BT = jnp.where(same_BT, token_BT[:, :-j], -1)
    found.append(jnp.concatenate([none_Bj, before_BT], axis=1))
  return jnp.stack(found) if found else jnp.zeros((0, *token_BT.shape), jnp.int32)


def apply(
  params: p.Params,
  token_BT: jax.Array,
  position_BT: jax.Array,
  segment_BT: jax.Array,
  *,
  cfg: config.Model,
) -> jax.Array:
  """Hidden states of packed rows, float32 [B, T, D].

  Args:
    params: values to compute with (already rounded, see `params.rounded`).
    token_BT: int32 ids; padding may be any id.
    position_BT: int32 position within the token's own segment.
    segment_BT: int32, 0 for padding; tokens see earlier tokens of their own segment.
    cfg: the model's shape, and whether layers are rematerialised or unrolled.
  """

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention.packed(q, k, v, segment_BT, cfg.attention_chunk)

  def step(x_BTD: jax.Array, layer: p.Layers) -> tuple[jax.Array, None]:
    return block(layer, x_BTD, position_BT, attend, cfg), None

  before_JBT = _before(token_BT, segment_BT, cfg.ngram - 1)
  x_BTD = _embed(params, token_BT, before_JBT)
  x_BTD, _ = jax.lax.scan(
    jax.checkpoint(step) if cfg.remat else step,
    x_BTD,
    params.layers,
    unroll=cfg.layers if cfg.unroll else 1,
  )
  return layers.rms_norm(x_BTD, params.norm_D, cfg.norm_eps)


def apply_cached(
  params: p.Params,
  token_BT: jax.Array,
  position_BT: jax.Array,
  cache: kv.Cache,
  row_B: jax.Array | None,
  *,
  cfg: config.Model,
) -> tuple[jax.Array, kv.Cache]:
  """Hidden states of new tokens after what the cache holds, and the cache with them.

  Args:
    params: values to compute with.
    token_BT: int32 new tokens of each row.
    position_BT: int32 their positions; a position beyond the cache writes nothing.
    cache: B' rows; position s of a row is seen by queries at positions >= s, so
      entries beyond a row's own length must not be looked at before being written.
    row_B: cache row of each batch row; None: batch row i is cache row i.
    cfg: the model's shape.
  """
  ks, vs = list(cache.k), list(cache.v)
  at_B1 = (jnp.arange(token_BT.shape[0]) if row_B is None else row_B)[:, None]
  S = cache.k[0].shape[2]
  mask_BTS = jnp.arange(S)[None, None, :] <= position_BT[:, :, None]
  token_BS = cache.token.at[at_B1, position_BT].set(token_BT, mode='drop')
  offset_J11 = jnp.arange(1, cfg.ngram)[:, None, None]
  place_JBT = position_BT[None] - offset_J11
  before_JBT = token_BS[at_B1[None], jnp.maximum(place_JBT, 0)]
  x_BTD = _embed(params, token_BT, jnp.where(place_JBT >= 0, before_JBT, -1))
  for i in range(cfg.layers):

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, i: int = i) -> jax.Array:
      ks[i] = ks[i].at[at_B1, :, position_BT].set(k, mode='drop')
      vs[i] = vs[i].at[at_B1, :, position_BT].set(v, mode='drop')
      k_BCSH, v_BCSH = (ks[i], vs[i]) if row_B is None else (ks[i][row_B], vs[i][row_B])
      return attention.cached(q, k_BCSH, v_BCSH, mask_BTS)

    layer = jax.tree.map(lambda w, i=i: w[i], params.layers)
    x_BTD = block(layer, x_BTD, position_BT, attend, cfg)
  hidden_BTD = layers.rms_norm(x_BTD, params.norm_D, cfg.norm_eps)
  return hidden_BTD, kv.Cache(token_BS, tuple(ks), tuple(vs))


def logits(params: p.Params, hidden_BTD: jax.Array) -> jax.Array:
  """Vocabulary logits of the tied head, float32 [B, T, V]."""
  return layers.project(hidden_BTD, params.embed_VD.T)
