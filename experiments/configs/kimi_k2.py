"""A trillion parameters: Kimi-K2's shape, to be lowered and compiled, not run here.

  python -m experiments.bench.aot --config=experiments/configs/kimi_k2.py

61 layers of width 7,168, the first dense; 64 heads of latent attention; 384 experts of
which 8 and a shared one serve a token; vocabulary 163,840 (moonshotai/Kimi-K2-Instruct,
config.json). The mesh is of 64 devices; a cluster's own goes into `mesh`.

Hardware for a run: see what the bench prints. Expect: `"compiled": true`.
"""

import ml_collections

from swe17 import settings


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """The settings; ValueError on an argument."""
  if arg:
    raise ValueError(f'argument {arg!r}: want none')
  cfg = settings.default()
  m = cfg.model
  m.layers, m.width, m.ffn = 61, 7168, 18_432
  m.attention, m.heads, m.kv_heads = 'mla', 64, 64
  m.head_dim, m.rotary_dim = 192, 64
  m.mla.q_rank, m.mla.kv_rank, m.mla.v_dim = 1536, 512, 128
  m.tied, m.ngram, m.norm_eps = False, 1, 1e-6
  m.rope.theta, m.rope.scaling, m.rope.factor = 50_000.0, 'yarn', 32.0
  m.rope.original, m.rope.low, m.rope.high = 4096, 1.0, 1.0
  m.score_scale = 1.813  # (0.1 ln 32 + 1)^2, yarn's mscale
  m.moe.experts, m.moe.active, m.moe.ffn, m.moe.shared = 384, 8, 2048, 1
  m.moe.first_dense, m.moe.router, m.moe.scale = 1, 'sigmoid', 2.827
  m.dtype, m.remat, m.unroll, m.attention_chunk = 'bfloat16', True, False, 2048
  cfg.mesh.fsdp, cfg.mesh.expert = 4, 16
  cfg.batch.row_length, cfg.batch.micro_rows = 4096, 64
  cfg.optim.muon_stack = True
  cfg.agent.max_context, cfg.sampler.slots = 4096, 64
  return cfg
