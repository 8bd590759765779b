"""Loading in pieces and exporting: each device its own, one tensor at a time."""

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
import safetensors.numpy
import torch
import transformers

from swe17 import config
from swe17.model import export, hf_files, load, source
from tests import fixtures, parity

V = parity.VOCAB


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> dict[str, pathlib.Path]:
  return parity.save_all(tmp_path_factory.mktemp)


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
  whole, cfg = parity.loaded(saved['deepseek'])
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
  flag = '--xla_force_host_platform_device_count=4'
  env = os.environ | {
    'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} {flag}',
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False, env=env
  )
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) > 20


def test_shardings_on_one_device_give_the_same_bits(saved):
  whole, cfg = parity.loaded(saved['qwen3_moe'])
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
    ngram=1, layers=6, width=256, ffn=8192, heads=4, kv_heads=2, head_dim=32,
    rotary_dim=32, tied=False,
  )  # fmt: skip
  params = fixtures.params(cfg=cfg)
  tensor, leaf = 4 * 256 * 8192, 4 * 6 * 256 * 8192
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
  # At a reading the host holds the leaf that is filled, which is not on the device yet,
  # and one tensor; were the leaf before it still held, it would be a leaf more. (Leaves
  # are beyond 32 MiB, so that the C library gives their memory back at once.)
  assert leaf > 2**25 and most - before < model + leaf / 2
  assert fixtures.same_bits(params, again)


# Exports.


@pytest.mark.parametrize('name', parity.CASES)
def test_a_float32_export_has_the_same_bits_and_logits_in_transformers(
  saved, tmp_path, name
):
  params, cfg = parity.loaded(saved[name])
  folder = str(tmp_path / 'out')
  export.export(
    params, cfg, folder, dtype='float32', max_shard=40_000, like=str(saved[name])
  )
  again, _ = parity.loaded(pathlib.Path(folder))
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
    tensors = safetensors.numpy.load_file(path)
    size = sum(value.nbytes for value in tensors.values())
    assert size <= 40_000 or len(tensors) == 1


def test_a_bfloat16_export_is_rounded_to_nearest_but_for_the_routers_bias(
  saved, tmp_path
):
  params, cfg = parity.loaded(saved['deepseek'])
  export.export(params, cfg, str(tmp_path / 'out'))
  again, _ = parity.loaded(tmp_path / 'out')
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
  params, cfg = parity.loaded(like)
  export.export(params, cfg, str(tmp_path / 'out'), like=str(like))
  for name in ('tokenizer.json', 'chat_template.jinja', 'generation_config.json'):
    assert (tmp_path / 'out' / name).read_bytes() == (like / name).read_bytes()
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['eos_token_id'] == [7, 9]
  assert written['max_position_embeddings'] == 256


def test_an_export_appears_whole_or_not_at_all_and_replaces_nothing(saved, tmp_path):
  params, cfg = parity.loaded(saved['llama3'])
  broken = dataclasses.replace(params, norm_D=params.norm_D[:-1])
  with pytest.raises(ValueError, match='norm_D'):
    export.export(broken, cfg, str(tmp_path / 'out'))
  assert not list(tmp_path.iterdir())
  (tmp_path / 'out').mkdir()
  with pytest.raises(FileExistsError, match='out'):
    export.export(params, cfg, str(tmp_path / 'out'))
