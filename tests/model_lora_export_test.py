"""Adapters beside a model from its files, and both written so that others read them."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

from swe17 import config_model
from swe17.model import export, load, lora, lora_export, transformer
from swe17.model import params as p
from tests import fixtures, parity

LORA = config_model.Lora(rank=3, alpha=6.0)
# Biases; experts; every matrix of MLA; queries without a latent.
CASES = ('qwen2', 'qwen3_moe', 'deepseek', 'kimi')
QUICK = {'xla_backend_optimization_level': 0}


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> dict[str, pathlib.Path]:
  folders = {name: tmp_path_factory.mktemp(name) for name in CASES}
  for name, folder in folders.items():
    parity.save(name, folder)
  return folders


def adapted(folder: pathlib.Path):
  """(base, with random adapters, settings)."""
  base, cfg = parity.loaded(folder, unroll=False)
  cfg, rng = dataclasses.replace(cfg, lora=LORA), np.random.default_rng(0)

  def value(leaf: p.Leaf) -> jax.Array:
    return jnp.asarray(np.float32(rng.normal(0, leaf.scale or 0.05, leaf.shape)))

  tree = p.abstract(cfg, parity.VOCAB)
  bare = jax.tree.unflatten(jax.tree.structure(lora.base(tree)), jax.tree.leaves(base))
  values = jax.tree.map(value, lora.adapters(tree))
  return base, lora.joined(tree, bare, values), cfg


def logits(params: p.Params, cfg, token_T: np.ndarray) -> np.ndarray:
  def scored(params):
    token_BT, one = token_T[None], np.ones((1, token_T.size), np.int32)
    at = np.arange(token_T.size, dtype=np.int32)[None]
    h = transformer.apply(params, token_BT, at, one, cfg=cfg)
    return transformer.logits(params, h)[0]

  return np.asarray(jax.jit(scored, compiler_options=QUICK)(params))


@pytest.mark.parametrize('name', ['qwen2', 'deepseek', 'kimi'])
def test_a_merged_export_gives_the_same_logits_in_transformers(saved, tmp_path, name):
  _, params, cfg = adapted(saved[name])
  export.export(params, cfg, str(tmp_path / 'out'), dtype='float32')
  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'out', output_loading_info=True
  )
  assert not any(info[key] for key in ('missing_keys', 'unexpected_keys'))
  token_T = parity.tokens(7)
  got = parity.logits(theirs.eval(), token_T)
  np.testing.assert_allclose(got, logits(params, cfg, token_T), rtol=0, atol=2e-5)
  assert np.abs(got - parity.logits(parity.made(name), token_T)).max() > 0.1


@pytest.mark.parametrize('name', ['qwen2', 'deepseek', 'kimi'])
def test_the_folder_for_peft_holds_what_merging_adds_to_each_module(
  saved, tmp_path, name
):
  base, params, cfg = adapted(saved[name])
  if params.moe is not None:  # without the adapters of experts
    mlp = dataclasses.replace(params.moe.mlp, lora=None)
    params = dataclasses.replace(params, moe=dataclasses.replace(params.moe, mlp=mlp))
  lora_export.export(params, cfg, str(tmp_path / 'peft'), base='the/base')
  for tree, folder in ((params, 'merged'), (base, 'base')):
    export.export(tree, cfg, str(tmp_path / folder), dtype='float32')
  merged, before = (
    safetensors.numpy.load_file(tmp_path / folder / 'model.safetensors')
    for folder in ('merged', 'base')
  )
  text = json.loads((tmp_path / 'peft' / lora_export.CONFIG).read_text())
  assert (text['peft_type'], text['task_type']) == ('LORA', 'CAUSAL_LM')
  assert (text['r'], text['lora_alpha'], text['bias']) == (3, 6.0, 'none')
  assert text['base_model_name_or_path'] == 'the/base'

  tensors = safetensors.numpy.load_file(tmp_path / 'peft' / lora_export.TENSORS)
  prefix, a_name, b_name = 'base_model.model.', '.lora_A.weight', '.lora_B.weight'
  modules = {key.removeprefix(prefix).removesuffix(a_name) for key in tensors}
  modules = {module.removesuffix(b_name) for module in modules}
  assert len(tensors) == 2 * len(modules)
  model = parity.made(name)
  for module in modules:
    assert isinstance(model.get_submodule(module), torch.nn.Linear), module
    a, b = (tensors[prefix + module + x] for x in (a_name, b_name))
    assert a.shape[0] == b.shape[1] == 3
    weight = f'{module}.weight'
    added = np.float64(merged[weight]) - before[weight]
    np.testing.assert_allclose(2.0 * b @ a, added, rtol=0, atol=2e-6)
    assert np.abs(added).max() > 0.01
  changed = {key for key, w in before.items() if not np.array_equal(w, merged[key])}
  assert changed == {f'{module}.weight' for module in modules}
  # PEFT takes each module whose name is a target or ends with '.' and one.
  linear = {key for key, of in model.named_modules() if isinstance(of, torch.nn.Linear)}
  ends = tuple(f'.{target}' for target in text['target_modules'])
  assert {key for key in linear if key.endswith(ends)} == modules


def test_adapters_of_experts_or_none_are_refused_in_the_layout_of_peft(saved, tmp_path):
  base, params, cfg = adapted(saved['qwen3_moe'])
  for tree, says in ((params, 'moe/mlp/lora/expert_down'), (base, 'got none')):
    with pytest.raises(ValueError, match=says):
      lora_export.export(tree, cfg, str(tmp_path / 'out'))
  assert not list(tmp_path.iterdir())


def test_a_loaded_model_gets_fresh_adapters_and_keeps_its_bits(saved):
  base, cfg = parity.loaded(saved['deepseek'])
  some = config_model.Lora(rank=3, targets='expert_up')
  cfg = dataclasses.replace(cfg, lora=some)
  params = load.load(cfg.source, cfg, key=jax.random.key(0))
  assert fixtures.same_bits(lora.base(params), base)
  found = lora.by_path(params)
  assert found.keys() == {'moe/mlp/lora/expert_up'}
  for name, adapter in found.items():
    assert np.std(adapter.a_NIr) > 0.05 and not adapter.b_NrO.any(), name
  with pytest.raises(ValueError, match=r'model\.lora\.rank=3: got no key'):
    load.load(cfg.source, cfg)

  mesh = jax.make_mesh((1,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  shardings = jax.tree.map(lambda _: NamedSharding(mesh, jax.P()), params)
  again = load.load(cfg.source, cfg, shardings, jax.random.key(0))
  assert fixtures.same_bits(again, params)
  assert {x.sharding for x in jax.tree.leaves(again)} == {NamedSharding(mesh, jax.P())}


def test_a_target_that_the_files_have_not_is_refused_when_they_are_read(saved):
  want = "model.lora.targets: got 'kv_a', want one of all, q, k, v, gate, up, down, o"
  with pytest.raises(ValueError, match=want):
    parity.loaded(saved['qwen2'], lora=config_model.Lora(rank=2, targets='q,kv_a'))
