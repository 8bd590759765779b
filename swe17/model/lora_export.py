"""Adapters alone, in a folder as PEFT lays it out.

  adapter_config.json        rank, alpha, and which modules have an adapter
  adapter_model.safetensors  base_model.model.<module>.lora_A.weight  [r, in]
                             base_model.model.<module>.lora_B.weight  [out, r]

Modules are those of the base in `transformers`, named as its files name their tensors
(PEFT's documentation, "PEFT checkpoint format"). Values are float32. How adapters of
fused experts are laid out differs between PEFT and what reads its folders, so they are
refused: `export.export` writes the model with them merged.
"""

import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import numpy as np

from swe17 import config
from swe17.model import lora, names
from swe17.model import params as p

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
_PREFIX, _LAYER = 'base_model.model.', re.compile(r'model\.layers\.\d+\.')


def export(params: p.Params, cfg: config.Model, folder: str, *, base: str = '') -> None:
  """Writes the adapters of `params`.

  Args:
    params: whole on this host or its devices.
    cfg: its settings.
    folder: must not exist yet.
    base: name or folder of the base model, which whoever loads the adapters needs.

  Raises:
    FileExistsError: `folder` exists.
    ValueError: there are no adapters, or some are of experts.
  """
  import safetensors.numpy

  target = pathlib.Path(folder).absolute()
  if target.exists():
    raise FileExistsError(f'{target} exists: choose another folder')
  tensors = _tensors(params, cfg)
  partial = target.with_name(f'{target.name}.partial-{os.getpid()}')
  partial.mkdir(parents=True)
  try:
    safetensors.numpy.save_file(tensors, partial / TENSORS, {'format': 'pt'})
    text = json.dumps(_settings(cfg, tensors, base), indent=2, sort_keys=True)
    (partial / CONFIG).write_text(text + '\n')
    partial.rename(target)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _settings(
  cfg: config.Model, tensors: dict[str, np.ndarray], base: str
) -> dict[str, Any]:
  """adapter_config.json. Modules go by the end of their names, the same in each layer.

  As much of the name as tells `mlp.gate_proj` from that of an expert.
  """
  modules = {name.removeprefix(_PREFIX).rpartition('.lora_')[0] for name in tensors}
  return {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base or None,
    'r': cfg.lora.rank,
    'lora_alpha': cfg.lora.alpha,
    'target_modules': sorted({_LAYER.sub('', module) for module in modules}),
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'init_lora_weights': True,
    'use_rslora': False,
    'use_dora': False,
    'modules_to_save': None,
    'inference_mode': True,
  }


def _tensors(params: p.Params, cfg: config.Model) -> dict[str, np.ndarray]:
  adapters = lora.by_path(params)
  experts = sorted(path for path in adapters if '/lora/expert_' in path)
  if not adapters or experts:
    raise ValueError(
      f'adapters in the layout of PEFT: got {experts or "none"}, want some, and none '
      'of experts; model/export.py writes a folder with all of them merged'
    )
  host = jax.device_get(adapters)
  tensors: dict[str, np.ndarray] = {}
  interleaved = cfg.attention == 'mla'
  vocab = params.embed_VD.shape[0]
  for part in names.table(cfg, vocab, names.HF, interleaved=interleaved):
    found = lora.beside(host, part.leaf)
    if found is None:
      continue
    adapter, last = found
    a_Ir, b_rO = (np.asarray(w)[part.at] for w in jax.tree.leaves(adapter))
    module, r = _PREFIX + part.tensor.removesuffix('.weight'), a_Ir.shape[1]
    tensors[f'{module}.lora_A.weight'] = np.ascontiguousarray(a_Ir.T)
    out = _out(part, r)
    b_Or = tensors.setdefault(
      f'{module}.lora_B.weight', np.zeros(out.tensor_shape, np.float32)
    )
    out.into(b_Or, lora.part_of(b_rO, out.leaf_shape, last))
  return tensors


def _out(part: names.Part, r: int) -> names.Part:
  """The part of B where a matrix has `part`: the same rows, r columns."""
  rows, _ = part.dims
  order = (len(rows), *range(len(rows)))
  return names.Part(
    part.leaf, part.at, part.tensor, (rows, (r,)), order, part.range, part.pairs
  )
