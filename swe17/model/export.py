"""Parameters into a Hugging Face folder that `transformers` opens.

Written tensor by tensor, so that beyond the model memory holds one tensor of the file.
The folder appears whole or not at all: it is written beside its place and then renamed.
"""

from collections.abc import Iterable
import json
import math
import os
import pathlib
import shutil
from typing import Any, BinaryIO

import jax
import numpy as np

from swe17 import config
from swe17.model import hf_config_write, hf_files, load, lora, names
from swe17.model import params as p

# Of a tokeniser, and how its makers sample; copied as they are.
_COPIED = (
  'tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'vocab.json',
  'merges.txt', 'added_tokens.json', 'chat_template.jinja', 'generation_config.json',
  'tokenizer.model', 'tiktoken.model',
)  # fmt: skip
_KEPT = ('bos_token_id', 'eos_token_id', 'pad_token_id', 'max_position_embeddings')
_DTYPES = {'float32': 'F32', 'bfloat16': 'BF16'}


def export(
  params: p.Params,
  cfg: config.Model,
  folder: str,
  *,
  dtype: str = 'bfloat16',
  max_shard: int = 5 * 2**30,
  like: str = '',
) -> None:
  """Writes config.json, shards with an index, and a tokeniser's files.

  Adapters are merged, W + (alpha / r) A B; model/lora_export.py writes them alone.

  Args:
    params: what to write, whole on this host or its devices.
    cfg: its settings.
    folder: must not exist yet.
    dtype: float32 (exact) or bfloat16 (rounded to nearest, ties to even). A router's
      bias is float32 always: it decides between experts that are nearly even.
    max_shard: bytes of tensors a shard may hold, unless one alone is larger.
    like: a Hugging Face folder whose tokeniser files and special tokens are taken.

  Raises:
    FileExistsError: `folder` exists.
    ValueError: no family of transformers has this shape, or a leaf is not all here.
  """
  target = pathlib.Path(folder).absolute()
  if target.exists():
    raise FileExistsError(f'{target} exists: choose another folder')
  if dtype not in _DTYPES:
    raise ValueError(f'dtype: got {dtype!r}, want {" or ".join(_DTYPES)}')
  leaves = _named(params)
  made = hf_config_write.to_hf(cfg, params.embed_VD.shape[0]) | {'torch_dtype': dtype}
  tensors = _tensors(names.table(
    cfg,
    params.embed_VD.shape[0],
    names.HF,
    interleaved=cfg.attention == 'mla',
  ))  # fmt: skip
  partial = target.with_name(f'{target.name}.partial-{os.getpid()}')
  partial.mkdir(parents=True)
  try:
    if like:
      made |= _taken(pathlib.Path(like), partial)
    _write_json(partial / 'config.json', made)
    shards = _shards(tensors, dtype, max_shard)
    _write_shards(partial, shards, leaves, lora.by_path(params))
    partial.rename(target)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _named(params: p.Params) -> dict[str, jax.Array]:
  found = load.by_name(params)
  for name, leaf in found.items():
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      raise ValueError(f'{name} is spread over processes: gather it before the export')
  return found


def _tensors(table: Iterable[names.Part]) -> dict[str, list[names.Part]]:
  """The parts of every tensor, in the order of the model."""
  found: dict[str, list[names.Part]] = {}
  for part in table:
    found.setdefault(part.tensor, []).append(part)
  return found


def _taken(like: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
  """Copies a tokeniser's files; the keys of config.json that belong to it."""
  for name in _COPIED:
    if (like / name).is_file():
      shutil.copyfile(like / name, folder / name)
  theirs = hf_files.read_json(like / 'config.json')
  return {key: theirs[key] for key in _KEPT if key in theirs}


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2) + '\n')


def _shards(
  tensors: dict[str, list[names.Part]], dtype: str, most: int
) -> list[dict[str, tuple[str, list[names.Part]]]]:
  """Tensors by shard: {name: (dtype as files call it, parts)}."""
  shards, size = [{}], 0
  for name, parts in tensors.items():
    exact = parts[0].leaf.endswith('mlp/bias_NE')
    kind = 'F32' if exact else _DTYPES[dtype]
    adds = math.prod(parts[0].tensor_shape) * hf_files.FLOATS[kind].itemsize
    if shards[-1] and size + adds > most:
      shards.append({})
      size = 0
    shards[-1][name] = kind, parts
    size += adds
  return shards


def _write_shards(
  folder: pathlib.Path,
  shards: list[dict[str, tuple[str, list[names.Part]]]],
  leaves: dict[str, jax.Array],
  adapters: lora.Adapters,
) -> None:
  index, total = {}, 0
  for i, shard in enumerate(shards):
    name = f'model-{i + 1:05}-of-{len(shards):05}.safetensors'
    name = name if len(shards) > 1 else hf_files.SINGLE
    with (folder / name).open('wb') as file:
      total += _write_header(file, shard)
      for kind, parts in shard.values():
        values = _values(parts, leaves, adapters).astype(
          hf_files.FLOATS[kind], copy=False
        )
        file.write(values.view(np.uint8).data)
      file.flush()
      os.fsync(file.fileno())
    index |= dict.fromkeys(shard, name)
  if len(shards) > 1:
    content = {'metadata': {'total_size': total}, 'weight_map': index}
    _write_json(folder / hf_files.INDEX, content)


def _write_header(
  file: BinaryIO, shard: dict[str, tuple[str, list[names.Part]]]
) -> int:
  """The head of a safetensors file; bytes of tensors that follow.

  8 bytes length, JSON with the place of every tensor, spaces up to 8 bytes. The
  library writes only tensors that are all in memory.
  """
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  end = 0
  for name, (kind, parts) in shard.items():
    start, shape = end, parts[0].tensor_shape
    end += math.prod(shape) * hf_files.FLOATS[kind].itemsize
    header[name] = {'dtype': kind, 'shape': shape, 'data_offsets': [start, end]}
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  file.write(len(text).to_bytes(8, 'little') + text)
  return end


def _values(
  parts: list[names.Part], leaves: dict[str, jax.Array], adapters: lora.Adapters
) -> np.ndarray:
  """One tensor of the file, float32, from the leaves that have a part in it."""
  tensor = np.empty(parts[0].tensor_shape, np.float32)
  for part in parts:
    leaf = leaves[part.leaf]
    if leaf.shape[len(part.at) :] != part.leaf_shape:
      raise ValueError(f'{part.leaf}: got {leaf.shape}, want .. {part.leaf_shape}')
    values = np.asarray(_slice(leaf, *part.at))
    found = lora.beside(adapters, part.leaf)
    if found is not None:
      values = values + _delta(*found, part)
    part.into(tensor, values)
  return tensor


def _delta(adapter: lora.Adapter, last: bool, part: names.Part) -> np.ndarray:
  """(alpha / r) A B of one layer or expert, in the shape of its matrix."""
  a_Ir, b_rO = (np.asarray(_slice(w, *part.at)) for w in jax.tree.leaves(adapter))
  high = np.float32(adapter.scale) * (a_Ir @ b_rO)
  return lora.part_of(high, part.leaf_shape, last)


@jax.jit
def _slice(leaf: jax.Array, *at: int) -> jax.Array:
  """One layer or expert of a leaf; indices are traced: one compile for all."""
  return leaf[tuple(at)]
