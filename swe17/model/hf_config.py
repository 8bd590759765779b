"""A Hugging Face config.json as settings of the model. Without JAX.

Every key is read, or is known to change no number here, or is refused by name: a
setting that is silently dropped gives a model that loads and speaks nonsense.

Older files say `rope_theta` and `rope_scaling`, those of transformers 5
`rope_parameters`. YaRN's attention factors follow arXiv:2309.00071 and DeepSeek-V3:
sine and cosine carry m(mscale) / m(mscale_all_dim), and latent attention multiplies its
scores by m(mscale_all_dim)^2, with m(c) = 1 + c ln(factor) / 10.
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

from swe17 import config_model

LLAMA, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK = (
  'LlamaForCausalLM',
  'Qwen2ForCausalLM',
  'Qwen3ForCausalLM',
  'Qwen3MoeForCausalLM',
  'DeepseekV3ForCausalLM',  # Kimi-K2 too
)
TYPES = {
  LLAMA: 'llama',
  QWEN2: 'qwen2',
  QWEN3: 'qwen3',
  QWEN3_MOE: 'qwen3_moe',
  DEEPSEEK: 'deepseek_v3',
}

# What changes no number here: names, ids that belong to the tokeniser, how others
# initialise, regularise, cache or balance, and limits that we set ourselves.
_IGNORED = frozenset({
  '_name_or_path', 'attention_dropout', 'auto_map', 'aux_loss_alpha', 'bos_token_id',
  'dtype', 'eos_token_id', 'ep_size', 'id2label', 'initializer_range',
  'is_llama_config', 'label2id', 'max_position_embeddings', 'max_window_layers',
  'model_type', 'output_router_logits', 'pad_token_id', 'router_aux_loss_coef',
  'seq_aux', 'torch_dtype', 'transformers.js_config', 'transformers_version',
  'unk_token_id', 'use_cache',
})  # fmt: skip

_NONE = object()


@dataclasses.dataclass(frozen=True)
class Described:
  """What a model's files say of it.

  Attributes:
    model: its shape, with the defaults of what files do not say.
    vocab: rows of the embedding.
    interleaved: rotating dimensions stand in pairs (2i, 2i + 1), not in halves.
    skipped: further layers at the end that predict more than one token; not read.
  """

  model: config_model.Model
  vocab: int
  interleaved: bool = False
  skipped: int = 0


def describe(config: Mapping[str, Any]) -> Described:
  """Reads the contents of a config.json.

  ValueError names the architecture, key or value that is not supported.
  """
  left = dict(config)
  architectures = left.pop('architectures', None)
  known = isinstance(architectures, list) and len(architectures) == 1
  if not known or architectures[0] not in TYPES:
    raise ValueError(
      f'architectures: got {architectures!r}, want one of {", ".join(TYPES)}'
    )
  if left.get('quantization_config') is not None:
    method = dict(left['quantization_config']).get('quant_method', 'unknown')
    raise ValueError(
      f'quantization_config: got {method!r}; dequantise the model to bfloat16 first: '
      'quantised safetensors (the FP8 files of DeepSeek and Kimi) are not read'
    )
  left.pop('quantization_config', None)
  _want(left, 'hidden_act', 'silu', 'silu')
  _want(left, 'mlp_bias', False, False)
  _want(left, 'attention_bias', False, False)  # Qwen2 has its biases without saying so
  _want(left, 'pretraining_tp', 1, 1)
  found = _FAMILIES[architectures[0]](left)
  unread = sorted(key for key in left if key not in _IGNORED)
  if unread:
    said = ', '.join(f'{key}={left[key]!r}' for key in unread)
    raise ValueError(
      f'keys of config.json that this library does not read: {said}; if they change no '
      'number, remove them from the file'
    )
  return found


def _take(left: dict[str, Any], key: str, default: Any = _NONE) -> Any:
  """The value of a key, which then counts as read. ValueError if there is none."""
  value = left.pop(key, default)
  if value is _NONE:
    raise ValueError(f'config.json lacks {key!r}')
  return value


def _want(left: dict[str, Any], key: str, default: Any, *allowed: Any) -> None:
  """Reads a key of which only some values are supported."""
  got = _take(left, key, default)
  if got not in allowed:
    raise ValueError(
      f'{key}: got {got!r}, want {" or ".join(map(repr, allowed))}: '
      'nothing else is supported'
    )


def _base(left: dict[str, Any]) -> dict[str, Any]:
  """What all families have."""
  return {
    'layers': _take(left, 'num_hidden_layers'),
    'width': _take(left, 'hidden_size'),
    'ffn': _take(left, 'intermediate_size'),
    'heads': _take(left, 'num_attention_heads'),
    'norm_eps': float(_take(left, 'rms_norm_eps', 1e-6)),
    'tied': _take(left, 'tie_word_embeddings', False),
    'ngram': 1,
  }


def _grouped(left: dict[str, Any], **settings: Any) -> Described:
  """A family with grouped-query attention."""
  base = _base(left) | settings
  heads = base['heads']
  head_dim = _take(left, 'head_dim', None) or base['width'] // heads
  _want(left, 'partial_rotary_factor', 1.0, 1.0)
  windowed = _take(left, 'use_sliding_window', left.get('sliding_window') is not None)
  window = _take(left, 'sliding_window', None)
  kinds = set(_take(left, 'layer_types', None) or ['full_attention'])
  if windowed or kinds != {'full_attention'}:
    raise ValueError(
      f'sliding_window: got {window} (layer_types {sorted(kinds)}), want none: '
      'every layer attends to the whole context'
    )
  interleaved = [
    _take(left, key, False) for key in ('rope_interleaved', 'rope_interleave')
  ]
  rope, _ = _rope(left)
  made = config_model.Model(
    **base,
    kv_heads=_take(left, 'num_key_value_heads', None) or heads,
    head_dim=head_dim,
    rotary_dim=head_dim,
    rope=rope,
  )
  return Described(made, _take(left, 'vocab_size'), interleaved=any(interleaved))


def _qwen3_moe(left: dict[str, Any]) -> Described:
  """Qwen3 with experts, perhaps after leading dense layers."""
  _want(left, 'decoder_sparse_step', 1, 1)
  dense = list(_take(left, 'mlp_only_layers', None) or [])
  if sorted(dense) != list(range(len(dense))):
    raise ValueError(f'mlp_only_layers: got {dense}, want leading layers 0, 1, ..')
  _same(left, 'num_local_experts', 'num_experts')
  moe = config_model.Moe(
    experts=_take(left, 'num_experts'),
    active=_take(left, 'num_experts_per_tok'),
    ffn=_take(left, 'moe_intermediate_size'),
    first_dense=len(dense),
    renormalise=bool(_take(left, 'norm_topk_prob', False)),
  )
  return _grouped(left, qk_norm=True, moe=moe)


def _deepseek(left: dict[str, Any]) -> Described:
  """DeepSeek-V3 and Kimi-K2: latent attention, sigmoid router with groups."""
  base = _base(left)
  _want(left, 'scoring_func', 'sigmoid', 'sigmoid')
  _want(left, 'topk_method', 'noaux_tc', 'noaux_tc')
  _want(left, 'moe_layer_freq', 1, 1)
  _want(left, 'num_key_value_heads', base['heads'], base['heads'], None)
  _same(left, 'num_local_experts', 'n_routed_experts')
  left.pop('head_dim', None)  # of the rotating part, or of nothing; see below
  rotary = _take(left, 'qk_rope_head_dim')
  head_dim = rotary + _take(left, 'qk_nope_head_dim')
  _want(left, 'qk_head_dim', head_dim, head_dim)
  rope, all_dim = _rope(left)
  moe = config_model.Moe(
    experts=_take(left, 'n_routed_experts'),
    active=_take(left, 'num_experts_per_tok'),
    ffn=_take(left, 'moe_intermediate_size'),
    shared=_take(left, 'n_shared_experts') or 0,
    first_dense=_take(left, 'first_k_dense_replace'),
    router='sigmoid',
    renormalise=bool(_take(left, 'norm_topk_prob')),
    groups=_take(left, 'n_group') or 1,
    best_groups=_take(left, 'topk_group') or 1,
    scale=float(_take(left, 'routed_scaling_factor')),
  )
  made = config_model.Model(
    **base,
    attention='mla',
    kv_heads=base['heads'],
    head_dim=head_dim,
    rotary_dim=rotary,
    score_scale=_magnitude(rope.factor, all_dim) ** 2,
    rope=rope,
    mla=config_model.Mla(
      q_rank=_take(left, 'q_lora_rank') or 0,
      kv_rank=_take(left, 'kv_lora_rank'),
      v_dim=_take(left, 'v_head_dim'),
    ),
    moe=moe,
  )
  skipped = [
    _take(left, key, 0) for key in ('num_nextn_predict_layers', 'num_mtp_layers')
  ]
  return Described(
    made,
    _take(left, 'vocab_size'),
    interleaved=_take(left, 'rope_interleave', True),
    skipped=max(skipped),
  )


_FAMILIES: dict[str, Callable[[dict[str, Any]], Described]] = {
  LLAMA: _grouped,
  QWEN2: lambda left: _grouped(left, bias=True),
  QWEN3: lambda left: _grouped(left, qk_norm=True),
  QWEN3_MOE: _qwen3_moe,
  DEEPSEEK: _deepseek,
}


def _same(left: dict[str, Any], other: str, key: str) -> None:
  """Makes `other`, transformers 5's name, the value of `key`."""
  value = left.pop(other, _NONE)
  if value is not _NONE and left.setdefault(key, value) != value:
    raise ValueError(f'{other}: got {value}, want {left[key]}, as in {key}')


def _magnitude(factor: float, scale: float) -> float:
  """m(scale) of YaRN."""
  return 1.0 if factor <= 1 or not scale else 0.1 * scale * math.log(factor) + 1


def _rope(left: dict[str, Any]) -> tuple[config_model.Rope, float]:
  """(the rotation, mscale_all_dim), from the old keys or the new one."""
  old = _take(left, 'rope_scaling', None)
  new = _take(left, 'rope_parameters', None)
  rope = dict(new or old or {})
  theta = float(_take(left, 'rope_theta', 10_000.0))
  theta = float(rope.pop('rope_theta', None) or theta)
  kind = rope.pop('rope_type', None) or rope.get('type') or 'default'
  rope.pop('type', None)
  positions = left.get('max_position_embeddings')
  settings, all_dim = {}, 0.0
  if kind in ('llama3', 'yarn'):
    settings['original'] = rope.pop('original_max_position_embeddings', positions)
    if settings['original'] is None:
      raise ValueError(f'rope {kind}: got no original_max_position_embeddings')
  if kind == 'llama3':
    for ours, theirs in (('low', 'low_freq_factor'), ('high', 'high_freq_factor')):
      settings[ours] = float(_take(rope, theirs))
  if kind == 'yarn':
    settings['high'] = float(rope.pop('beta_fast', None) or 32)
    settings['low'] = float(rope.pop('beta_slow', None) or 1)
    settings['truncate'] = bool(rope.pop('truncate', True))
  if kind in ('linear', 'llama3', 'yarn'):
    factor = rope.pop('factor', None)
    if factor is None and kind == 'yarn' and positions:
      factor = positions / settings['original']
    if factor is None:
      raise ValueError(f'rope {kind}: got no factor')
    settings |= {'scaling': kind, 'factor': float(factor)}
  elif kind != 'default':
    raise ValueError(f'rope_type: got {kind!r}, want default, linear, llama3 or yarn')
  if kind == 'yarn':
    mscale, all_dim = rope.pop('mscale', None), rope.pop('mscale_all_dim', None) or 0.0
    ratio = (mscale, all_dim) if mscale and all_dim else (1.0, 0.0)
    up, down = (_magnitude(settings['factor'], scale) for scale in ratio)
    settings['amplitude'] = float(rope.pop('attention_factor', None) or up / down)
  if rope.pop('partial_rotary_factor', 1.0) != 1.0:
    raise ValueError('partial_rotary_factor: want 1.0: heads rotate whole')
  if rope:
    raise ValueError(f'rope {kind}: got {rope}, which this library does not read')
  return config_model.Rope(theta=theta, **settings), all_dim
