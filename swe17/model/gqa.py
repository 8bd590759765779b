"""Grouped-query attention's projections (Ainslie et al., arXiv:2305.13245)."""

import jax

from swe17 import config
from swe17.model import layers, rope
from swe17.model import params as p


def queries_keys_values(
  attn: p.Gqa, h_BTD: jax.Array, position_BT: jax.Array, cfg: config.Model
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """q [B, T, Q, H], k and v [B, T, C, H] of one layer, rotated.

  Head norms (Qwen3) come before the rotation.
  """
  of = (attn.lora or {}).get
  q = layers.heads(h_BTD, attn.wq_NDQH, attn.bq_NQH, of('q'))
  k = layers.heads(h_BTD, attn.wk_NDCH, attn.bk_NCH, of('k'))
  v = layers.heads(h_BTD, attn.wv_NDCH, attn.bv_NCH, of('v'))
  if attn.q_norm_NH is not None and attn.k_norm_NH is not None:
    q = layers.rms_norm(q, attn.q_norm_NH, cfg.norm_eps)
    k = layers.rms_norm(k, attn.k_norm_NH, cfg.norm_eps)
  q = rope.rotate(q, position_BT, cfg.rope, cfg.rotary_dim)
  k = rope.rotate(k, position_BT, cfg.rope, cfg.rotary_dim)
  return (q if cfg.score_scale == 1.0 else q * cfg.score_scale), k, v


def out(attn: p.Gqa, o_BTQH: jax.Array) -> jax.Array:
  """Back to the residual stream, [B, T, D]."""
  return layers.from_heads(o_BTQH, attn.wo_NQHD, (attn.lora or {}).get('o'))
