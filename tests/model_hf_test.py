"""Hugging Face folders: settings read or refused by name, strict loads, exports."""

import copy
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tracemalloc

import jax
from jax.sharding import NamedSharding
import ml_dtypes
import numpy as np
import pytest

from swe17 import config, config_model
from swe17.model import (
  export,
  hf_config,
  hf_config_write,
  hf_files,
  load,
  names,
  source,
)
from swe17.model import params as p
from tests import fixtures, parity

torch = pytest.importorskip('torch')
safetensors_numpy = pytest.importorskip('safetensors.numpy')

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
  """A folder a case, as transformers saves it; nobody may change them."""
  folders = {}
  for name in parity.CASES:
    folders[name] = tmp_path_factory.mktemp(name)
    parity.save(name, folders[name])
  return folders


def loaded(folder: pathlib.Path, **settings) -> tuple[p.Params, config.Model]:
  cfg = source.settle(config.Model(source=str(folder), **settings))
  return load.load(cfg.source, cfg), cfg


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
  return dict(safetensors_numpy.load_file(folder / hf_files.SINGLE))


def rewritten(
  at: pathlib.Path, like: pathlib.Path, tensors: dict[str, np.ndarray]
) -> source.Opened:
  """A folder with other tensors and the config.json of `like`, opened."""
  shutil.rmtree(at, ignore_errors=True)
  at.mkdir()
  shutil.copy(like / 'config.json', at)
  safetensors_numpy.save_file(
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
    safetensors_numpy.save_file({key: tensors[key] for key in keys}, at / file)
    index |= {str(key): file for key in keys}
  (at / hf_files.INDEX).write_text(json.dumps({'weight_map': index}))
  return at


def test_a_tensor_in_two_shards_or_twice_in_one_is_named(saved, tmp_path):
  folder = sharded(tmp_path / 'm', saved['llama3'])
  check(source.open(str(folder)))
  key = 'model.layers.1.mlp.down_proj.weight'
  value = everything(saved['llama3'])[key]
  second = safetensors_numpy.load_file(folder / 'model-2.safetensors')
  home = json.loads((folder / hf_files.INDEX).read_text())['weight_map'][key]
  assert home != 'model-2.safetensors'
  safetensors_numpy.save_file(second | {key: value}, folder / 'model-2.safetensors')
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
  whole, cfg = loaded(saved['deepseek'])
  parts, _ = loaded(sharded(tmp_path / 'm', saved['deepseek']))
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
  assert fixtures.same_bits(whole, loaded(tmp_path / 'fused')[0])


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16'])
def test_files_of_fewer_bits_are_widened_exactly(saved, tmp_path, dtype):
  model = parity.made('llama3').to(getattr(torch, dtype))
  model.save_pretrained(tmp_path)
  got, cfg = loaded(tmp_path)
  want = model.state_dict()['model.layers.1.mlp.up_proj.weight'].float().numpy().T
  assert cfg.dtype == 'float32'  # masters, whatever the file has
  assert np.array_equal(got.dense.mlp.wu_NDF[1], want)
  assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(np.float32)}


# Sharded, and in little memory.


class Counted:
  """Counts the numbers that are read of each tensor."""

  def __init__(self, opened: source.Opened):
    self.sizes: dict[str, int] = {}
    inner = opened.tensors.read

    def read(name, box):
      values = inner(name, box)
      self.sizes[name] = self.sizes.get(name, 0) + values.size
      return values

    tensors = dataclasses.replace(opened.tensors, read=read)
    self.opened = dataclasses.replace(opened, tensors=tensors)


SPECS = {  # a mesh axis on every kind of dimension in turn
  'moe/attn/wq_NAQH': (None, None, 'x'),
  'moe/attn/wo_NQUD': (None, None, None, 'x'),
  'moe/attn/wk_NLQP': (None, None, None, 'x'),
  'moe/attn/wv_NLQU': (None, None, 'x'),
  'moe/attn/wkv_down_NDL': (None, None, 'x'),
  'moe/attn/wk_rope_NDr': (None, None, 'x'),
  'moe/mlp/wg_NEDF': (None, 'x'),
  'moe/mlp/wu_NEDF': (None, None, 'x'),
  'moe/mlp/wd_NEFD': (None, None, 'x'),
  'moe/mlp/router_NDE': ('x',),
  'embed_VD': (None, 'x'),
}


def test_boxes_of_every_leaf_are_those_of_the_whole_and_little_more_is_read(saved):
  whole, cfg = loaded(saved['deepseek'])
  counted = Counted(source.open(str(saved['deepseek'])))
  fills = load.fills_of(counted.opened, cfg)
  for name, leaf in load.by_name(whole).items():
    spec = SPECS.get(name, ())
    for half in range(2):
      index = [slice(None)] * leaf.ndim
      for axis, of in enumerate(spec):
        if of:
          size = leaf.shape[axis] // 2
          index[axis] = slice(half * size, (half + 1) * size)
      counted.sizes.clear()
      got = load._values(leaf.shape, fills[name], counted.opened.tensors, index)
      assert got.tobytes() == np.asarray(leaf)[tuple(index)].tobytes(), name
      read = sum(counted.sizes.values())
      # A head's dimensions lie apart in the file; pairs and halves too.
      apart = name.endswith(('wk_NLQP', 'wv_NLQU', 'wk_rope_NDr'))
      assert read <= got.size * (4 if apart else 1), name


def test_each_device_gets_its_own_part(saved):
  """In a process of its own, with four devices; the whole is compared by the bits."""
  code = f"""
import jax, numpy as np
from jax.sharding import NamedSharding
import ml_dtypes
from swe17 import config
from swe17.model import load, source
cfg = source.settle(config.Model(source={str(saved['deepseek'])!r}))
whole = load.load(cfg.source, cfg)
mesh = jax.make_mesh((2, 2), ('x', 'y'))
def placed(path, leaf):
  first = next((i for i, n in enumerate(leaf.shape) if n % 4 == 0), None)
  spec = [None] * leaf.ndim
  if first is not None:
    spec[first] = ('x', 'y')
  return NamedSharding(mesh, jax.P(*spec))
shardings = jax.tree_util.tree_map_with_path(placed, whole)
parts = load.load(cfg.source, cfg, shardings)
for a, b, s in zip(*(jax.tree.leaves(t) for t in (whole, parts, shardings))):
  assert b.sharding == s and b.shape == a.shape
  assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
print(sum(not s.is_fully_replicated for s in jax.tree.leaves(shardings)))
"""
  env = os.environ | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=4',
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False, env=env
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 20


def test_shardings_on_one_device_give_the_same_bits(saved):
  whole, cfg = loaded(saved['qwen3_moe'])
  mesh = jax.make_mesh((1,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
  shardings = jax.tree.map(lambda _: NamedSharding(mesh, jax.P()), whole)
  assert fixtures.same_bits(load.load(cfg.source, cfg, shardings), whole)


def anonymous_bytes() -> int:
  """Memory of this process that is no file's."""
  lines = pathlib.Path('/proc/self/status').read_text().splitlines()
  return 1024 * int(next(x for x in lines if x.startswith('RssAnon')).split()[1])


def test_loading_needs_one_leaf_beyond_the_model_and_exporting_one_tensor(
  tmp_path, monkeypatch
):
  cfg = config.Model(
    ngram=1, layers=8, width=256, ffn=2048, heads=4, kv_heads=2, head_dim=32,
    rotary_dim=32, tied=False,
  )  # fmt: skip
  params = fixtures.params(cfg=cfg)
  tensor, leaf = 4 * 256 * 2048, 4 * 8 * 256 * 2048
  export.export(params, cfg, str(tmp_path / 'a'), dtype='float32', max_shard=2 * tensor)
  tracemalloc.start()  # counts NumPy's arrays; the second time nothing is compiled
  export.export(params, cfg, str(tmp_path / 'b'), dtype='float32', max_shard=2 * tensor)
  exporting = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert tensor <= exporting < 3 * tensor

  opened, most = source.open(str(tmp_path / 'b')), 0

  def read(name, box):
    nonlocal most
    most = max(most, anonymous_bytes())
    return opened.tensors.read(name, box)

  watched = dataclasses.replace(opened.tensors, read=read)
  monkeypatch.setattr(
    source, 'open', lambda _: dataclasses.replace(opened, tensors=watched)
  )
  before = anonymous_bytes()
  again = load.load(str(tmp_path / 'b'), cfg)
  model = sum(x.nbytes for x in jax.tree.leaves(again))
  assert model > 3 * leaf
  assert most - before < model + leaf + tensor
  assert fixtures.same_bits(params, again)


# Exports.


@pytest.mark.parametrize('name', parity.CASES)
def test_a_float32_export_has_the_same_bits_and_logits_in_transformers(
  saved, tmp_path, name
):
  import transformers

  params, cfg = loaded(saved[name])
  folder = str(tmp_path / 'out')
  export.export(
    params, cfg, folder, dtype='float32', max_shard=40_000, like=str(saved[name])
  )
  again, _ = loaded(pathlib.Path(folder))
  assert fixtures.same_bits(params, again)
  theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, output_loading_info=True
  )
  assert not any(info[key] for key in ('missing_keys', 'unexpected_keys'))
  assert theirs.dtype == torch.float32
  want = parity.logits(parity.made(name), parity.tokens(7))
  np.testing.assert_allclose(
    parity.logits(theirs.eval(), parity.tokens(7)), want, rtol=0, atol=2e-5
  )
  index = json.loads((tmp_path / 'out' / hf_files.INDEX).read_text())
  assert len(set(index['weight_map'].values())) > 2
  for path in (tmp_path / 'out').glob('*.safetensors'):
    tensors = safetensors_numpy.load_file(path)
    size = sum(value.nbytes for value in tensors.values())
    assert size <= 40_000 or len(tensors) == 1


def test_a_bfloat16_export_is_rounded_to_nearest_but_for_the_routers_bias(
  saved, tmp_path
):
  params, cfg = loaded(saved['deepseek'])
  export.export(params, cfg, str(tmp_path / 'out'))
  again, _ = loaded(tmp_path / 'out')
  got, bias = load.by_name(again), 'moe/mlp/bias_NE'
  for name, leaf in load.by_name(params).items():
    want = np.asarray(leaf)
    if name != bias:
      want = want.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert fixtures.same_bits(got[name], want), name


def test_the_tokenisers_files_and_special_tokens_go_along(saved, tmp_path):
  like = tmp_path / 'like'
  shutil.copytree(saved['llama3'], like)
  (like / 'tokenizer.json').write_text('{"a": 1}')
  (like / 'chat_template.jinja').write_text('{{ messages }}')
  text = json.loads((like / 'config.json').read_text()) | {'eos_token_id': [7, 9]}
  (like / 'config.json').write_text(json.dumps(text))
  params, cfg = loaded(like)
  export.export(params, cfg, str(tmp_path / 'out'), like=str(like))
  for name in ('tokenizer.json', 'chat_template.jinja', 'generation_config.json'):
    assert (tmp_path / 'out' / name).read_bytes() == (like / name).read_bytes()
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['eos_token_id'] == [7, 9]
  assert written['max_position_embeddings'] == 256


def test_an_export_appears_whole_or_not_at_all_and_replaces_nothing(saved, tmp_path):
  params, cfg = loaded(saved['llama3'])
  broken = dataclasses.replace(params, norm_D=params.norm_D[:-1])
  with pytest.raises(ValueError, match='norm_D'):
    export.export(broken, cfg, str(tmp_path / 'out'))
  assert not list(tmp_path.iterdir())
  (tmp_path / 'out').mkdir()
  with pytest.raises(FileExistsError, match='out'):
    export.export(params, cfg, str(tmp_path / 'out'))
