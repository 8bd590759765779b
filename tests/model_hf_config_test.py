"""config.json as settings and back: read, or refused by name."""

import copy
import dataclasses
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from swe17 import config, config_model
from swe17.model import (
  hf_config,
  hf_config_write,
  source,
)
from swe17.model import params as p
from tests import parity

V = parity.VOCAB
LLAMA = {  # as Llama 3.1 8B has it, in the words of transformers 4
  'architectures': ['LlamaForCausalLM'],
  'attention_bias': False,
  'attention_dropout': 0.0,
  'bos_token_id': 128000,
  'eos_token_id': [128001, 128008],
  'hidden_act': 'silu',
  'hidden_size': 4096,
  'initializer_range': 0.02,
  'intermediate_size': 14336,
  'max_position_embeddings': 131072,
  'mlp_bias': False,
  'model_type': 'llama',
  'num_attention_heads': 32,
  'num_hidden_layers': 32,
  'num_key_value_heads': 8,
  'pretraining_tp': 1,
  'rms_norm_eps': 1e-05,
  'rope_scaling': {
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
    'rope_type': 'llama3',
  },
  'rope_theta': 500000.0,
  'tie_word_embeddings': False,
  'torch_dtype': 'bfloat16',
  'transformers_version': '4.43.0',
  'use_cache': True,
  'vocab_size': 128256,
}
KIMI = {  # Kimi-K2's keys
  'architectures': ['DeepseekV3ForCausalLM'],
  'attention_bias': False,
  'aux_loss_alpha': 0.001,
  'auto_map': {'AutoConfig': 'configuration_deepseek.DeepseekV3Config'},
  'ep_size': 1,
  'first_k_dense_replace': 1,
  'hidden_act': 'silu',
  'hidden_size': 7168,
  'intermediate_size': 18432,
  'kv_lora_rank': 512,
  'max_position_embeddings': 131072,
  'model_type': 'kimi_k2',
  'moe_intermediate_size': 2048,
  'moe_layer_freq': 1,
  'n_group': 1,
  'n_routed_experts': 384,
  'n_shared_experts': 1,
  'norm_topk_prob': True,
  'num_attention_heads': 64,
  'num_experts_per_tok': 8,
  'num_hidden_layers': 61,
  'num_key_value_heads': 64,
  'num_nextn_predict_layers': 0,
  'pretraining_tp': 1,
  'q_lora_rank': 1536,
  'qk_nope_head_dim': 128,
  'qk_rope_head_dim': 64,
  'rms_norm_eps': 1e-06,
  'rope_scaling': {
    'beta_fast': 1.0,
    'beta_slow': 1.0,
    'factor': 32.0,
    'mscale': 1.0,
    'mscale_all_dim': 1.0,
    'original_max_position_embeddings': 4096,
    'type': 'yarn',
  },
  'rope_theta': 50000.0,
  'routed_scaling_factor': 2.827,
  'scoring_func': 'sigmoid',
  'seq_aux': True,
  'tie_word_embeddings': False,
  'topk_group': 1,
  'topk_method': 'noaux_tc',
  'v_head_dim': 128,
  'vocab_size': 163840,
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> dict[str, pathlib.Path]:
  return parity.save_all(tmp_path_factory.mktemp)


def test_llama_3_in_the_keys_of_transformers_4():
  found = hf_config.describe(LLAMA)
  assert found.vocab == 128256 and not found.interleaved
  assert found.model == config_model.Model(
    layers=32,
    width=4096,
    ffn=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    rotary_dim=128,
    tied=False,
    norm_eps=1e-5,
    ngram=1,
    rope=config_model.Rope(
      theta=5e5, scaling='llama3', factor=8.0, original=8192, low=1.0, high=4.0
    ),
  )


def test_old_and_new_keys_of_the_rotation_say_the_same():
  new = copy.deepcopy(LLAMA)
  new['rope_parameters'] = new.pop('rope_scaling') | {
    'rope_theta': new.pop('rope_theta')
  }
  assert hf_config.describe(new) == hf_config.describe(LLAMA)


def test_kimi_k2_has_a_trillion_parameters_and_a_ramp_without_width():
  found = hf_config.describe(KIMI)
  assert found.interleaved and found.skipped == 0
  cfg = found.model
  assert (cfg.rope.low, cfg.rope.high, cfg.rope.amplitude) == (1.0, 1.0, 1.0)
  assert cfg.score_scale == pytest.approx((0.1 * np.log(32) + 1) ** 2)
  assert cfg.moe.shared == 1 and cfg.dense_layers == 1 and cfg.moe_layers == 60
  assert 1.02e12 < p.count(p.abstract(cfg, found.vocab)) < 1.03e12


@pytest.mark.parametrize('base', [LLAMA, KIMI], ids=['llama', 'kimi'])
def test_what_is_written_is_what_is_read(base):
  found = hf_config.describe(base)
  written = hf_config_write.to_hf(found.model, found.vocab)
  assert hf_config.describe(json.loads(json.dumps(written))) == found


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('architectures', ['MistralForCausalLM']),
    ('architectures', None),
    ('hidden_act', 'gelu'),
    ('attention_bias', True),
    ('mlp_bias', True),
    ('pretraining_tp', 2),
    ('sliding_window', 4096),
    ('layer_types', ['sliding_attention'] * 32),
    ('partial_rotary_factor', 0.5),
    ('rope_scaling', {'rope_type': 'dynamic', 'factor': 2.0}),
    ('rope_scaling', {'rope_type': 'longrope', 'factor': 2.0}),
    ('rope_scaling', {'rope_type': 'linear', 'factor': 2.0, 'mscale': 1.0}),
    ('quantization_config', {'quant_method': 'fp8'}),
    ('logit_softcapping', 30.0),
  ],
)
def test_what_is_not_supported_is_refused_by_name(key, value):
  with pytest.raises(ValueError, match=key.replace('rope_scaling', 'rope')) as error:
    hf_config.describe(LLAMA | {key: value})
  shown = value[0] if isinstance(value, list) else value
  shown = next(iter(shown.values())) if isinstance(shown, dict) else shown
  assert str(shown) in str(error.value) or key == 'partial_rotary_factor'


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('scoring_func', 'softmax'),
    ('topk_method', 'group_limited_greedy'),
    ('moe_layer_freq', 2),
    ('num_key_value_heads', 8),
    ('num_local_experts', 8),
  ],
)
def test_another_router_or_layout_of_deepseek_is_refused_by_name(key, value):
  with pytest.raises(ValueError, match=f'{key}: got {value!r}'):
    hf_config.describe(KIMI | {key: value})


@pytest.mark.parametrize('key', ['hidden_size', 'num_hidden_layers', 'vocab_size'])
def test_a_key_that_is_needed_and_missing_is_named(key):
  with pytest.raises(ValueError, match=key):
    hf_config.describe({k: v for k, v in LLAMA.items() if k != key})


def test_experts_in_the_middle_only_are_refused():
  moe = hf_config_write.to_hf(
    config_model.Model(
      ngram=1, qk_norm=True, rotary_dim=48, moe=config_model.Moe(experts=4)
    ),
    V,
  )
  assert hf_config.describe(moe).model.moe.experts == 4
  for key, value in (('mlp_only_layers', [1]), ('decoder_sparse_step', 2)):
    with pytest.raises(ValueError, match=key):
      hf_config.describe(moe | {key: value})


def test_a_shape_that_no_family_has_is_not_exported():
  for changes in ({'ngram': 2}, {'rotary_dim': 6}, {'bias': True, 'qk_norm': True}):
    cfg = dataclasses.replace(
      config_model.Model(ngram=1, head_dim=12, rotary_dim=12), **changes
    )
    with pytest.raises(ValueError, match='no model of transformers'):
      hf_config_write.to_hf(cfg, V)


def test_settling_reads_the_shape_and_keeps_how_it_is_computed(saved):
  mine = config.Model(
    source=str(saved['qwen3_moe']),
    dtype='bfloat16',
    remat=True,
    attention_chunk=64,
    moe=config_model.Moe(capacity=3.0, quantise='weights'),
  )
  got = source.settle(mine)
  assert (got.dtype, got.remat, got.attention_chunk) == ('bfloat16', True, 64)
  assert (got.moe.capacity, got.moe.quantise) == (3.0, 'weights')
  assert (got.moe.experts, got.layers, got.qk_norm, got.ngram) == (8, 3, True, 1)
  assert source.settle(got) == got  # of a run's own config.json
  assert source.settle(config.Model()) == config.Model()


def test_a_shape_that_contradicts_the_files_is_refused_by_name(saved):
  with pytest.raises(ValueError, match=r'model\.layers: got 5, the files have 2'):
    source.settle(config.Model(source=str(saved['llama3']), layers=5))


def test_a_source_that_is_not_there_is_named(tmp_path):
  for text in (str(tmp_path / 'none'), 'pip:no_such_package', 'pip:json'):
    with pytest.raises(FileNotFoundError, match=text.removeprefix('pip:')):
      source.describe(text)
  with pytest.raises(FileNotFoundError, match=r'config\.json'):
    source.describe(str(tmp_path))


def test_settings_are_read_where_jax_is_missing(saved):
  code = (
    "import sys; sys.modules['jax'] = None\n"
    'from swe17.model import source\n'
    f'print(source.describe({str(saved["kimi"])!r}).model.moe.experts)'
  )
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False
  )
  assert done.stdout == '8\n', done.stderr
