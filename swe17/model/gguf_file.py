"""A GGUF file: its metadata as settings, its tensors dequantised. Without JAX.

Llama files hold the rows of queries and keys so that rotating dimensions stand in
pairs, those of Qwen in halves: the rule is the architecture's, nothing in a file says
so. Llama 3's stretched rotation comes as a tensor of factors, `rope_freqs.weight`.
"""

from collections.abc import Mapping
import math
import pathlib
import re
from typing import Any

import numpy as np

from swe17 import config_model
from swe17.model import hf_config, hf_files

TYPES = frozenset({'F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1', 'Q4_K', 'Q6_K'})
FACTORS = 'rope_freqs.weight'
HEAD = 'output.weight'

_PAIRS = {'llama': True, 'qwen2': False, 'qwen3': False}  # of a head's dimensions

# Of the file as a whole, of its tokeniser, or of how it was made: no number of ours.
_IGNORED = re.compile(
  r'GGUF\.|general\.|tokenizer\.|quantize\.imatrix\.'
  r'|[^.]+\.(context_length|vocab_size|rope\.scaling\.finetuned)$'
)


def _reader(path: pathlib.Path) -> Any:
  try:
    import gguf
  except ModuleNotFoundError as e:
    raise ModuleNotFoundError('to read GGUF: pip install "swe17[hf]"') from e
  return gguf.GGUFReader(path)


def open_file(path: pathlib.Path) -> tuple[hf_config.Described, hf_files.Tensors]:
  """Its model and its tensors.

  ValueError names an architecture or key that is not supported, or a tensor that
  stands twice.
  """
  reader = _reader(path)
  tensors = {tensor.name: tensor for tensor in reader.tensors}
  if len(tensors) < len(reader.tensors):
    raise ValueError(f'{path}: a tensor stands twice')
  shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in tensors.items()}

  def read(name: str, box: tuple[slice, ...]) -> np.ndarray:
    import gguf

    # Blocks lie within rows: other rows are not touched, other columns are.
    tensor = tensors[name]
    values = gguf.dequantize(tensor.data[box[:-1] or box], tensor.tensor_type)
    return np.asarray(values if len(box) == 1 else values[..., box[-1]], np.float32)

  dtypes = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
  opened = hf_files.Tensors(shapes, dtypes, TYPES, read)
  fields = {
    name: field.contents()
    for name, field in reader.fields.items()
    if name == 'general.architecture' or not _IGNORED.match(name)
  }
  tokens = reader.get_field('tokenizer.ggml.tokens')
  return _describe(fields, opened, None if tokens is None else len(tokens.data)), opened


def _describe(
  fields: Mapping[str, Any], tensors: hf_files.Tensors, tokens: int | None
) -> hf_config.Described:
  left = dict(fields)
  kind = left.pop('general.architecture', None)
  if kind not in _PAIRS:
    raise ValueError(
      f'general.architecture: got {kind!r}, want one of {", ".join(_PAIRS)}'
    )
  if left.pop('split.count', 0) > 1:
    raise ValueError('split.count: the file is one of several; merge them first')

  def take(key: str, *default: Any) -> Any:
    name = f'{kind}.{key}'
    if name not in left and not default:
      raise ValueError(f'the metadata lack {name!r}')
    return left.pop(name, *default)

  heads, width = take('attention.head_count'), take('embedding_length')
  head_dim = take('attention.key_length', width // heads)
  for key in ('attention.value_length', 'rope.dimension_count'):
    if (got := take(key, head_dim)) != head_dim:
      raise ValueError(f'{kind}.{key}: got {got}, want {head_dim}, a whole head')
  for key in ('expert_count', 'attention.sliding_window'):
    if got := take(key, 0):
      raise ValueError(f'{kind}.{key}: got {got}, want 0: it is not supported in GGUF')
  model = config_model.Model(
    layers=take('block_count'),
    width=width,
    ffn=take('feed_forward_length'),
    heads=heads,
    kv_heads=take('attention.head_count_kv', heads),
    head_dim=head_dim,
    rotary_dim=head_dim,
    tied=HEAD not in tensors.shapes,
    norm_eps=_decimal(take('attention.layer_norm_rms_epsilon')),
    rope=_rope(take, tensors, head_dim),
    ngram=1,
    bias=kind == 'qwen2',
    qk_norm=kind == 'qwen3',
  )
  if left:
    raise ValueError(f'metadata that this library does not read: {left}')
  vocab = tensors.shapes.get('token_embd.weight', (0,))[0]
  if tokens not in (None, vocab):
    raise ValueError(
      f'token_embd.weight: got {vocab} rows, want {tokens}, as the tokeniser'
    )
  return hf_config.Described(model, vocab, interleaved=_PAIRS[kind])


def _decimal(value: float) -> float:
  """What was written before it became a float32: 1e-5, not 9.99999974e-06."""
  return float(str(np.float32(value)))


def _rope(take: Any, tensors: hf_files.Tensors, head_dim: int) -> config_model.Rope:
  theta = _decimal(take('rope.freq_base', 10_000.0))
  kind = take('rope.scaling.type', 'none')
  if FACTORS in tensors.shapes:
    (size,) = tensors.shapes[FACTORS]
    factor_h = tensors.read(FACTORS, (slice(0, size),))
    return _llama3(theta, head_dim, factor_h)
  if kind == 'none':
    return config_model.Rope(theta=theta)
  factor = _decimal(take('rope.scaling.factor'))
  if kind == 'linear':
    return config_model.Rope(theta=theta, scaling='linear', factor=factor)
  if kind != 'yarn':
    raise ValueError(f'rope.scaling.type: got {kind!r}, want none, linear or yarn')
  return config_model.Rope(
    theta=theta,
    scaling='yarn',
    factor=factor,
    original=take('rope.scaling.original_context_length'),
    low=_decimal(take('rope.scaling.yarn_beta_slow', 1.0)),
    high=_decimal(take('rope.scaling.yarn_beta_fast', 32.0)),
    amplitude=_decimal(take('rope.scaling.attn_factor', 1.0))
    * (0.1 * math.log(factor) + 1),
  )


def _llama3(theta: float, head_dim: int, factor_h: np.ndarray) -> config_model.Rope:
  """The settings behind the factors: those of Llama 3.1 to 3.3, or ValueError."""
  made = config_model.Rope(
    theta=theta,
    scaling='llama3',
    factor=float(factor_h.max()),
    original=8192,
    low=1.0,
    high=4.0,
  )
  half = head_dim // 2
  freq_h = theta ** (-np.arange(half) / half)
  turns_h = made.original * freq_h / (2 * math.pi)
  keep_h = np.clip((turns_h - made.low) / (made.high - made.low), 0, 1)
  want_h = 1 / (keep_h + (1 - keep_h) / made.factor)
  if factor_h.shape != want_h.shape or not np.allclose(factor_h, want_h, rtol=1e-5):
    raise ValueError(
      f'{FACTORS}: got factors that are not those of Llama 3 (original context 8192, '
      'bounds 1 and 4); load the Hugging Face folder instead'
    )
  return made
