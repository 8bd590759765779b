"""Tiny random models made and run by `transformers`: what ours must equal.

No two dimensions of a matrix are equal, so that a transposed one cannot go unnoticed.
Norms are moved away from one, biases away from zero, and weights are large enough that
attention is not uniform and routers are decided.
"""

from collections.abc import Callable
import functools
import pathlib

import numpy as np
import torch
import transformers

from swe17 import config
from swe17.model import load, source
from swe17.model import params as p

VOCAB, T = 97, 64

_BASE = {
  'vocab_size': VOCAB,
  'hidden_size': 64,
  'intermediate_size': 80,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 24,
  'max_position_embeddings': 256,
  'rms_norm_eps': 1e-5,
}
_YARN = {
  'rope_type': 'yarn',
  'rope_theta': 1e4,
  'factor': 4.0,
  'original_max_position_embeddings': 32,
}
_EXPERTS = {
  'num_hidden_layers': 3,
  'num_experts': 8,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 20,
  'mlp_only_layers': [0],
  'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e4},
}
_LATENT = {
  'num_hidden_layers': 3,
  'num_key_value_heads': 4,
  'head_dim': None,
  'q_lora_rank': 24,
  'kv_lora_rank': 20,
  'qk_nope_head_dim': 12,
  'qk_rope_head_dim': 8,
  'v_head_dim': 10,
  'n_routed_experts': 8,
  'num_experts_per_tok': 3,
  'n_group': 4,
  'topk_group': 2,
  'n_shared_experts': 2,
  'moe_intermediate_size': 28,
  'first_k_dense_replace': 1,
  'routed_scaling_factor': 2.5,
  'norm_topk_prob': True,
  'num_mtp_layers': 0,
}

# name: (family, what differs from the base)
CASES = {
  'llama3': (
    'Llama',
    {
      'rope_parameters': {
        'rope_type': 'llama3',
        'rope_theta': 1e4,
        'factor': 8.0,
        'low_freq_factor': 1.0,
        'high_freq_factor': 4.0,
        'original_max_position_embeddings': 64,
      }
    },
  ),
  'smollm': (
    'Llama',
    {
      'tie_word_embeddings': True,
      'rope_parameters': {'rope_type': 'linear', 'rope_theta': 1e5, 'factor': 2.0},
    },
  ),
  'qwen2': (
    'Qwen2',
    {
      'tie_word_embeddings': True,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6},
    },
  ),
  'qwen3': ('Qwen3', {'rope_parameters': _YARN}),
  'qwen3_moe': ('Qwen3Moe', _EXPERTS | {'norm_topk_prob': True}),
  'qwen3_moe_plain': (
    'Qwen3Moe',
    _EXPERTS | {'num_hidden_layers': 2, 'mlp_only_layers': [], 'norm_topk_prob': False},
  ),
  'deepseek': (
    'DeepseekV3',
    _LATENT | {'rope_parameters': _YARN | {'mscale': 0.7, 'mscale_all_dim': 1.2}},
  ),
  # One group, YaRN's bounds equal (both as Kimi-K2), one shared expert, queries without
  # a latent, rotating dimensions in halves.
  'kimi': (
    'DeepseekV3',
    _LATENT
    | {
      'n_group': 1,
      'topk_group': 1,
      'n_shared_experts': 1,
      'q_lora_rank': None,
      'rope_interleave': False,
      'rope_parameters': _YARN
      | {'beta_fast': 1.0, 'beta_slow': 1.0, 'mscale': 1.0, 'mscale_all_dim': 1.0},
    },
  ),
}


def made(name: str) -> transformers.PreTrainedModel:
  """The model of a case, float32, with values that matter everywhere."""
  torch.manual_seed(sorted(CASES).index(name))
  family, changes = CASES[name]
  settings = {k: v for k, v in (_BASE | changes).items() if v is not None}
  if 'q_lora_rank' in changes:
    settings['q_lora_rank'] = changes['q_lora_rank']
  config = getattr(transformers, f'{family}Config')(**settings)
  model = getattr(transformers, f'{family}ForCausalLM')(config).eval()
  with torch.no_grad():
    for key, value in model.state_dict().items():
      if key == 'lm_head.weight' and config.tie_word_embeddings:
        continue  # the embedding, once more
      if 'e_score' in key:
        value.normal_(0, 0.5)
      elif 'norm' in key:
        value.add_(torch.randn_like(value) * 0.1)
      elif 'bias' in key:
        value.normal_(0, 0.3)
      else:
        value.mul_(8 if key.startswith(('lm_head', 'model.embed')) else 4)
  return model


def save(name: str, folder: pathlib.Path) -> transformers.PreTrainedModel:
  """Makes and saves the model of a case."""
  model = made(name)
  model.save_pretrained(folder)
  return model


def logits(model: transformers.PreTrainedModel, token_T: np.ndarray) -> np.ndarray:
  """[T, V] of one sequence."""
  with torch.no_grad():
    found = model(torch.tensor(token_T[None], dtype=torch.long)).logits[0]
  return found.numpy().astype(np.float32)


def gradients(
  model: transformers.PreTrainedModel, token_T: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
  """Mean of -log p(next token), and its gradient by every parameter's name."""
  model.zero_grad()
  ids = torch.tensor(token_T[None], dtype=torch.long)
  found = model(ids).logits[0, :-1]
  loss = torch.nn.functional.cross_entropy(found, ids[0, 1:])
  loss.backward()
  by_name = {n: w.grad.numpy() for n, w in model.named_parameters() if w.requires_grad}
  return float(loss.detach()), by_name


@functools.cache
def tokens(seed: int, size: int = T) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, VOCAB, size).astype(np.int32)


def save_all(make: Callable[[str], pathlib.Path]) -> dict[str, pathlib.Path]:
  """A folder a case, as transformers saves it; nobody may change them."""
  folders = {name: make(name) for name in CASES}
  for name, folder in folders.items():
    save(name, folder)
  return folders


def loaded(folder: pathlib.Path, **settings) -> tuple[p.Params, config.Model]:
  """Our parameters and settings of a folder."""
  cfg = source.settle(config.Model(source=str(folder), **settings))
  return load.load(cfg.source, cfg), cfg
