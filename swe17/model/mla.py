"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

  c = norm(h W_down)            L dimensions, cached with
  k_r = rotate(h W_r)           the r dimensions that turn, shared by all heads
  k = [c W_k ; k_r]    v = c W_v    q = [q_P ; rotate(q_r)]

Training expands k and v head by head. Serving never does: W_k is absorbed by the query,
q_P W_k^T . c = q_P . (c W_k), and W_v by the output, so that a cached token costs
L + r numbers and attention is that of Q query heads to one key head.

The two matrices of a projection that is one in files share an adapter (model/lora.py):
W_down and W_r that of kv_a, W_k and W_v that of kv_b, each with columns of its own.
"""

import math

import jax
import jax.numpy as jnp

from swe17 import config
from swe17.model import layers, lora, rope
from swe17.model import params as p

_EPS = 1e-6  # of the norms of latents, whatever the model's own (as DeepSeek-V3 has it)


def _adapter(attn: p.Mla, name: str) -> lora.Adapter | None:
  return (attn.lora or {}).get(name)


def _kv_a(attn: p.Mla, of: slice) -> lora.Adapter | None:
  """The adapter of W_down (the first L columns) or W_r (the rest)."""
  adapter = _adapter(attn, 'kv_a')
  return None if adapter is None else lora.columns(adapter, of)


def _kv_b(attn: p.Mla, of: slice) -> lora.Adapter | None:
  """The adapter of W_k (the first P columns of each head) or W_v (the rest)."""
  adapter, Q = _adapter(attn, 'kv_b'), attn.wk_NLQP.shape[1]
  return None if adapter is None else lora.columns(adapter, of, Q)


def _queries(
  attn: p.Mla, h_BTD: jax.Array, position_BT: jax.Array, cfg: config.Model
) -> tuple[jax.Array, jax.Array]:
  """(q_P [B, T, Q, P], rotated q_r [B, T, Q, r]), with the score's factor in both."""
  if attn.wq_down_NDA is not None and attn.q_norm_NA is not None:
    h_BTD = layers.project(h_BTD, attn.wq_down_NDA, _adapter(attn, 'q_a'))
    h_BTD = layers.rms_norm(h_BTD, attn.q_norm_NA, _EPS)
  of_q = _adapter(attn, 'q_b') or _adapter(attn, 'q')
  q_BTQH = layers.heads(h_BTD, attn.wq_NAQH, None, of_q)
  if cfg.score_scale != 1.0:
    q_BTQH = q_BTQH * cfg.score_scale
  P = cfg.head_dim - cfg.rotary_dim
  q_r = rope.rotate(q_BTQH[..., P:], position_BT, cfg.rope, cfg.rotary_dim)
  return q_BTQH[..., :P], q_r


def _latent(
  attn: p.Mla, h_BTD: jax.Array, position_BT: jax.Array, cfg: config.Model
) -> tuple[jax.Array, jax.Array]:
  """What is cached: (c [B, T, L], k_r [B, T, 1, r])."""
  L = attn.wkv_down_NDL.shape[1]
  c_BTL = layers.project(h_BTD, attn.wkv_down_NDL, _kv_a(attn, slice(0, L)))
  c_BTL = layers.rms_norm(c_BTL, attn.kv_norm_NL, _EPS)
  of_rope = _kv_a(attn, slice(L, None))
  k_BT1r = layers.project(h_BTD, attn.wk_rope_NDr, of_rope)[:, :, None, :]
  return c_BTL, rope.rotate(k_BT1r, position_BT, cfg.rope, cfg.rotary_dim)


def expanded(
  attn: p.Mla, h_BTD: jax.Array, position_BT: jax.Array, cfg: config.Model
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """q, k [B, T, Q, H] and v [B, T, Q, U], every head its own."""
  q_P, q_r = _queries(attn, h_BTD, position_BT, cfg)
  c_BTL, k_BT1r = _latent(attn, h_BTD, position_BT, cfg)
  P = attn.wk_NLQP.shape[2]
  k_P = layers.heads(c_BTL, attn.wk_NLQP, None, _kv_b(attn, slice(0, P)))
  k_r = jnp.broadcast_to(k_BT1r, (*k_P.shape[:3], k_BT1r.shape[-1]))
  q_BTQH, k_BTQH = (jnp.concatenate(x, axis=-1) for x in ((q_P, q_r), (k_P, k_r)))
  v_BTQU = layers.heads(c_BTL, attn.wv_NLQU, None, _kv_b(attn, slice(P, None)))
  return q_BTQH, k_BTQH, v_BTQU


def absorbed(
  attn: p.Mla, h_BTD: jax.Array, position_BT: jax.Array, cfg: config.Model
) -> tuple[jax.Array, jax.Array]:
  """q [B, T, Q, L + r] against cached [c ; k_r], [B, T, 1, L + r].

  Attention divides by the root of L + r; the scores' own root is of H.
  """
  q_P, q_r = _queries(attn, h_BTD, position_BT, cfg)
  c_BTL, k_BT1r = _latent(attn, h_BTD, position_BT, cfg)
  q_BTQL = jnp.einsum('BTQP,LQP->BTQL', q_P, attn.wk_NLQP)
  adapter = _kv_b(attn, slice(0, attn.wk_NLQP.shape[2]))
  if adapter is not None:
    b_rQP = adapter.b_NrO.reshape(-1, *attn.wk_NLQP.shape[1:])
    low_BTQr = adapter.scale * jnp.einsum('BTQP,rQP->BTQr', q_P, b_rQP)
    q_BTQL += layers.project(low_BTQr, adapter.a_NIr.T)
  q_BTQM = jnp.concatenate([q_BTQL, q_r], axis=-1)
  root = math.sqrt(q_BTQM.shape[-1] / cfg.head_dim)
  return q_BTQM * root, jnp.concatenate([c_BTL[:, :, None, :], k_BT1r], axis=-1)


def out(attn: p.Mla, o_BTQU: jax.Array) -> jax.Array:
  """Back to the residual stream from heads of values, [B, T, D]."""
  return layers.from_heads(o_BTQU, attn.wo_NQUD, _adapter(attn, 'o'))


def out_absorbed(attn: p.Mla, o_BTQL: jax.Array) -> jax.Array:
  """The same from attended latents: W_v is applied after the sum."""
  o_BTQU = jnp.einsum('BTQL,LQU->BTQU', o_BTQL, attn.wv_NLQU)
  adapter = _kv_b(attn, slice(attn.wk_NLQP.shape[2], None))
  if adapter is not None:
    b_rQU = adapter.b_NrO.reshape(-1, *attn.wv_NLQU.shape[1:])
    low_BTQr = lora.down(o_BTQL, adapter)
    o_BTQU += jnp.einsum('BTQr,rQU->BTQU', low_BTQr, b_rQU)
  return out(attn, o_BTQU)
