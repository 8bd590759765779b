"""Settings of the model as a Hugging Face config.json. Without JAX."""

import math
from typing import Any

from swe17 import config_model
from swe17.model import hf_config


def to_hf(cfg: config_model.Model, vocab: int) -> dict[str, Any]:
  """The config.json of an export; `describe` gives `cfg` back.

  ValueError names what no family of transformers has.
  """
  architecture = _architecture(cfg)
  rope, all_dim = cfg.rope, 0.0
  parameters: dict[str, Any] = {'rope_theta': rope.theta, 'rope_type': 'default'}
  if rope.scaling != 'none':
    parameters |= {'rope_type': rope.scaling, 'factor': rope.factor}
  if rope.scaling in ('llama3', 'yarn'):
    parameters['original_max_position_embeddings'] = rope.original
  if rope.scaling == 'llama3':
    parameters |= {'low_freq_factor': rope.low, 'high_freq_factor': rope.high}
  if rope.scaling == 'yarn':
    parameters |= {
      'beta_slow': rope.low,
      'beta_fast': rope.high,
      'truncate': rope.truncate,
      'attention_factor': rope.amplitude,
    }
    if cfg.score_scale != 1.0:
      all_dim = (math.sqrt(cfg.score_scale) - 1) / (0.1 * math.log(rope.factor))
      parameters |= dict.fromkeys(('mscale', 'mscale_all_dim'), round(all_dim, 10))
  made: dict[str, Any] = {
    'architectures': [architecture],
    'model_type': hf_config.TYPES[architecture],
    'vocab_size': vocab,
    'hidden_size': cfg.width,
    'intermediate_size': cfg.ffn,
    'num_hidden_layers': cfg.layers,
    'num_attention_heads': cfg.heads,
    'num_key_value_heads': cfg.kv_heads,
    'hidden_act': 'silu',
    'rms_norm_eps': cfg.norm_eps,
    'tie_word_embeddings': cfg.tied,
    'rope_parameters': parameters,
    'max_position_embeddings': max(32_768, int(rope.original * rope.factor)),
  }
  if architecture != hf_config.QWEN2:
    made['attention_bias'] = False
  if architecture == hf_config.DEEPSEEK:
    return made | _latent_to_hf(cfg)
  made['head_dim'] = cfg.head_dim
  if architecture == hf_config.QWEN3_MOE:
    made |= {
      'num_experts': cfg.moe.experts,
      'num_experts_per_tok': cfg.moe.active,
      'moe_intermediate_size': cfg.moe.ffn,
      'mlp_only_layers': list(range(cfg.moe.first_dense)),
      'decoder_sparse_step': 1,
      'norm_topk_prob': cfg.moe.renormalise,
    }
  return made


def _latent_to_hf(cfg: config_model.Model) -> dict[str, Any]:
  """The keys that only DeepSeek-V3 has."""
  return {
    'q_lora_rank': cfg.mla.q_rank or None,
    'kv_lora_rank': cfg.mla.kv_rank,
    'qk_nope_head_dim': cfg.head_dim - cfg.rotary_dim,
    'qk_rope_head_dim': cfg.rotary_dim,
    'v_head_dim': cfg.mla.v_dim,
    'rope_interleave': True,
    'n_routed_experts': cfg.moe.experts,
    'num_experts_per_tok': cfg.moe.active,
    'moe_intermediate_size': cfg.moe.ffn,
    'n_shared_experts': cfg.moe.shared,
    'first_k_dense_replace': cfg.moe.first_dense,
    'norm_topk_prob': cfg.moe.renormalise,
    'n_group': cfg.moe.groups,
    'topk_group': cfg.moe.best_groups,
    'routed_scaling_factor': cfg.moe.scale,
    'num_nextn_predict_layers': 0,
  }


def _architecture(cfg: config_model.Model) -> str:
  """The family that computes what `cfg` does. ValueError if there is none."""
  latent, moe = cfg.attention == 'mla', cfg.moe
  sigmoid = moe.router == 'sigmoid'
  wrong = {
    f'ngram={cfg.ngram}': cfg.ngram != 1,
    f'rotary_dim={cfg.rotary_dim}': not latent and cfg.rotary_dim != cfg.head_dim,
    f'score_scale={cfg.score_scale}': cfg.score_scale != 1
    and not (latent and cfg.rope.scaling == 'yarn'),
    f'rope.amplitude={cfg.rope.amplitude}': cfg.rope.amplitude != 1
    and cfg.rope.scaling != 'yarn',
    'bias with qk_norm': cfg.bias and cfg.qk_norm,
    'mla without sigmoid experts': latent and not (moe.experts and sigmoid),
    'mla without shared experts': latent and moe.experts and not moe.shared,
    'gqa with sigmoid experts': not latent and moe.experts and sigmoid,
    f'gqa with moe.shared={moe.shared}': not latent and moe.experts and moe.shared,
    'experts without qk_norm': not latent and moe.experts and not cfg.qk_norm,
  }
  found = [text for text, is_wrong in wrong.items() if is_wrong]
  if found:
    raise ValueError(f'no model of transformers has {", ".join(found)}')
  if latent:
    return hf_config.DEEPSEEK
  if moe.experts:
    return hf_config.QWEN3_MOE
  return (
    hf_config.QWEN3 if cfg.qk_norm else hf_config.QWEN2 if cfg.bias else hf_config.LLAMA
  )
