"""Hugging Face folders: every tensor once, of the right shape, or nothing is loaded."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
import torch

from swe17.model import hf_files, load, names, source
from tests import fixtures, parity

V = parity.VOCAB


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> dict[str, pathlib.Path]:
  return parity.save_all(tmp_path_factory.mktemp)


@pytest.mark.parametrize('name', parity.CASES)
def test_the_table_covers_every_tensor_once_and_fills_every_leaf(saved, name):
  opened = source.open(str(saved[name]))
  cfg, vocab = opened.described.model, opened.described.vocab
  for present in (opened.tensors.shapes, _fused(opened)):
    table = names.table(cfg, vocab, names.HF, present, interleaved=True)
    counts: dict[str, np.ndarray] = {}
    for part in table:
      tensor = counts.setdefault(part.tensor, np.zeros(part.tensor_shape))
      view = np.zeros(part.tensor_shape)
      part.into(view, np.ones(part.leaf_shape))
      tensor += view
    assert all((count == 1).all() for count in counts.values())


def _fused(opened: source.Opened) -> list[str]:
  cfg = opened.described.model
  experts = range(cfg.dense_layers, cfg.layers) if cfg.moe.experts else ()
  return [names.HF['experts gate up'].format(i=i) for i in experts]


# Strict loading: one tensor of every kind is spoilt in turn.


def everything(folder: pathlib.Path) -> dict[str, np.ndarray]:
  return dict(safetensors.numpy.load_file(folder / hf_files.SINGLE))


def rewritten(
  at: pathlib.Path, like: pathlib.Path, tensors: dict[str, np.ndarray]
) -> source.Opened:
  """A folder with other tensors and the config.json of `like`, opened."""
  shutil.rmtree(at, ignore_errors=True)
  at.mkdir()
  shutil.copy(like / 'config.json', at)
  safetensors.numpy.save_file(
    {name: np.ascontiguousarray(value) for name, value in tensors.items()},
    at / hf_files.SINGLE,
  )
  return source.open(str(at))


def check(opened: source.Opened) -> None:
  load.fills_of(opened, opened.described.model)


@pytest.mark.parametrize('name', ['llama3', 'qwen2', 'qwen3_moe', 'deepseek', 'kimi'])
def test_every_spoilt_tensor_fails_the_load_and_is_named(saved, tmp_path, name):
  good = everything(saved[name])
  check(rewritten(tmp_path / 'm', saved[name], good))
  tried = 0
  for key, value in good.items():
    if '.experts.' in key and '.experts.5.' not in key:
      continue  # one expert of a layer stands for all
    others = {k: v for k, v in good.items() if k != key}
    spoilt = {
      'renamed': others | {key.replace('weight', 'wieght') + '_': value},
      'deleted': others,
      'of another shape': others | {key: value[..., None]},
      'with a row less': others | {key: value[1:]},
      'of another dtype': others | {key: value.astype(np.float64)},
      'of whole numbers': others | {key: value.astype(np.int32)},
    }
    if value.ndim == 2:
      assert value.shape[0] != value.shape[1]
      spoilt['transposed'] = others | {key: value.T}
    for tensors in spoilt.values():
      with pytest.raises(ValueError, match=key.replace('.', r'\.')):
        check(rewritten(tmp_path / 'm', saved[name], tensors))
      tried += 1
  assert tried > 60


def test_a_tensor_too_many_fails_the_load_and_is_named(saved, tmp_path):
  tensors = everything(saved['llama3'])
  more = tensors | {'model.layers.0.self_attn.q_proj.bias': np.zeros(96, np.float32)}
  with pytest.raises(ValueError, match=r'left over: .*layers\.0\.self_attn\.q_proj\.b'):
    check(rewritten(tmp_path / 'm', saved['llama3'], more))


def test_buffers_that_everybody_computes_are_left_out(saved, tmp_path):
  tensors = everything(saved['llama3'])
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  check(rewritten(tmp_path / 'm', saved['llama3'], tensors | {name: np.zeros(12)}))


def test_layers_that_predict_further_tokens_are_left_out_as_config_json_says(
  saved, tmp_path
):
  tensors = everything(saved['deepseek'])
  more = tensors | {'model.layers.3.embed_tokens.weight': np.zeros((V, 64))}
  folder = tmp_path / 'm'
  with pytest.raises(ValueError, match=r'left over: model\.layers\.3\.embed'):
    check(rewritten(folder, saved['deepseek'], more))
  text = json.loads((folder / 'config.json').read_text())
  text['num_nextn_predict_layers'] = 1
  (folder / 'config.json').write_text(json.dumps(text))
  check(source.open(str(folder)))


def test_the_head_of_a_tied_model_may_be_there_if_it_is_the_embedding(saved, tmp_path):
  tensors = everything(saved['qwen2'])
  head = tensors['model.embed_tokens.weight'].copy()
  check(rewritten(tmp_path / 'm', saved['qwen2'], tensors | {'lm_head.weight': head}))
  head[50, 3] += 1e-3
  with pytest.raises(ValueError, match=r'lm_head\.weight differs'):
    check(rewritten(tmp_path / 'm', saved['qwen2'], tensors | {'lm_head.weight': head}))


def sharded(at: pathlib.Path, like: pathlib.Path) -> pathlib.Path:
  """The model in three shards with an index."""
  at.mkdir()
  shutil.copy(like / 'config.json', at)
  tensors, index = everything(like), {}
  for i, keys in enumerate(np.array_split(sorted(tensors), 3)):
    file = f'model-{i}.safetensors'
    safetensors.numpy.save_file({key: tensors[key] for key in keys}, at / file)
    index |= {str(key): file for key in keys}
  (at / hf_files.INDEX).write_text(json.dumps({'weight_map': index}))
  return at


def test_a_tensor_in_two_shards_or_twice_in_one_is_named(saved, tmp_path):
  folder = sharded(tmp_path / 'm', saved['llama3'])
  check(source.open(str(folder)))
  key = 'model.layers.1.mlp.down_proj.weight'
  value = everything(saved['llama3'])[key]
  second = safetensors.numpy.load_file(folder / 'model-2.safetensors')
  home = json.loads((folder / hf_files.INDEX).read_text())['weight_map'][key]
  assert home != 'model-2.safetensors'
  safetensors.numpy.save_file(second | {key: value}, folder / 'model-2.safetensors')
  with pytest.raises(ValueError, match=rf'{key} stands twice: in {home}'):
    source.open(str(folder))

  entry = {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}
  text = f'{{"norm":{json.dumps(entry)},"norm":{json.dumps(entry)}}}'.encode()
  shutil.copy(saved['llama3'] / 'config.json', tmp_path)
  (tmp_path / hf_files.SINGLE).write_bytes(len(text).to_bytes(8, 'little') + text)
  with pytest.raises(ValueError, match='norm stands twice'):
    source.open(str(tmp_path))


def test_an_index_that_is_wrong_or_a_missing_shard_is_named(saved, tmp_path):
  folder = sharded(tmp_path / 'm', saved['llama3'])
  index = json.loads((folder / hf_files.INDEX).read_text())
  index['weight_map']['model.norm.weight'] = 'model-0.safetensors'
  (folder / hf_files.INDEX).write_text(json.dumps(index))
  with pytest.raises(ValueError, match=r'wrong about the place of model\.norm'):
    source.open(str(folder))
  (folder / 'model-1.safetensors').unlink()
  with pytest.raises(FileNotFoundError, match=r'model-1\.safetensors'):
    source.open(str(folder))


def test_shards_and_fused_experts_give_the_same_bits(saved, tmp_path):
  whole, cfg = parity.loaded(saved['deepseek'])
  parts, _ = parity.loaded(sharded(tmp_path / 'm', saved['deepseek']))
  assert fixtures.same_bits(whole, parts)
  tensors = everything(saved['deepseek'])
  for i in range(cfg.dense_layers, cfg.layers):
    at = f'model.layers.{i}.mlp.experts.'
    stack = {
      x: np.stack([tensors.pop(f'{at}{e}.{x}_proj.weight') for e in range(8)])
      for x in ('gate', 'up', 'down')
    }
    tensors[f'{at}gate_up_proj'] = np.concatenate([stack['gate'], stack['up']], axis=1)
    tensors[f'{at}down_proj'] = stack['down']
  rewritten(tmp_path / 'fused', saved['deepseek'], tensors)
  assert fixtures.same_bits(whole, parity.loaded(tmp_path / 'fused')[0])


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_files_of_fewer_bits_are_widened_exactly(saved, tmp_path, dtype):
  model = parity.made('llama3').to(getattr(torch, dtype))
  model.save_pretrained(tmp_path)
  got, cfg = parity.loaded(tmp_path)
  want = model.state_dict()['model.layers.1.mlp.up_proj.weight'].float().numpy().T
  assert cfg.dtype == 'float32'  # masters, whatever the file has
  assert np.array_equal(got.dense.mlp.wu_NDF[1], want)
  assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(np.float32)}
