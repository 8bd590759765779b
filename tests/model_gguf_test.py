"""GGUF: layouts of queries and keys, quantised blocks, metadata; SmolLM2 itself.

The files of these tests are written by the `gguf` package from a known state; q and k
of Llama files are permuted here as its converter does, by a reshape that is not the
reader's.
"""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from swe17 import config, config_model
from swe17.model import gguf_file, load, source, transformer
from swe17.model import params as p
from tests import fixtures

gguf = pytest.importorskip('gguf')

V, FFN, LAYERS = fixtures.VOCAB, 96, 2


def shape(kind: str, head_dim: int) -> config.Model:
  """Query heads of twice as many as key heads; widths of whole blocks of 32."""
  return config.Model(
    layers=LAYERS,
    width=64,
    ffn=FFN,
    heads=4,
    kv_heads=2,
    head_dim=head_dim,
    rotary_dim=head_dim,
    bias=kind == 'qwen2',
    qk_norm=kind == 'qwen3',
    tied=kind == 'qwen2',
    norm_eps=1e-5,
    ngram=1,
    rope=config_model.Rope(theta=1e4 if kind == 'llama' else 1e6),
    unroll=False,
  )


def paired(rows_XD: np.ndarray, heads: int) -> np.ndarray:
  """Rows of heads, rotating dimensions from halves to pairs, as converters do it."""
  head_dim = rows_XD.shape[0] // heads
  split = rows_XD.reshape(heads, 2, head_dim // 2, *rows_XD.shape[1:])
  return split.swapaxes(1, 2).reshape(rows_XD.shape)


def tensors(params: p.Params, cfg: config.Model, kind: str) -> dict[str, np.ndarray]:
  """The tensors of a GGUF file, named and laid out by hand."""
  D, found = cfg.width, {}
  w = jax.tree.map(np.asarray, params)
  turn = paired if kind == 'llama' else lambda rows, heads: rows
  for i in range(cfg.layers):
    layer, b = jax.tree.map(lambda x, i=i: x[i], w.dense), f'blk.{i}.'
    a = layer.attn
    found |= {
      f'{b}attn_norm.weight': layer.attn_norm_ND,
      f'{b}ffn_norm.weight': layer.mlp_norm_ND,
      f'{b}attn_q.weight': turn(a.wq_NDQH.reshape(D, -1).T, cfg.heads),
      f'{b}attn_k.weight': turn(a.wk_NDCH.reshape(D, -1).T, cfg.kv_heads),
      f'{b}attn_v.weight': a.wv_NDCH.reshape(D, -1).T,
      f'{b}attn_output.weight': a.wo_NQHD.reshape(-1, D).T,
      f'{b}ffn_gate.weight': layer.mlp.wg_NDF.T,
      f'{b}ffn_up.weight': layer.mlp.wu_NDF.T,
      f'{b}ffn_down.weight': layer.mlp.wd_NFD.T,
    }
    if cfg.bias:
      for x, value in (('q', a.bq_NQH), ('k', a.bk_NCH), ('v', a.bv_NCH)):
        found[f'{b}attn_{x}.bias'] = value.reshape(-1)
    if cfg.qk_norm:
      found[f'{b}attn_q_norm.weight'] = a.q_norm_NH
      found[f'{b}attn_k_norm.weight'] = a.k_norm_NH
  found['token_embd.weight'], found['output_norm.weight'] = w.embed_VD, w.norm_D
  if not cfg.tied:
    found['output.weight'] = w.head_VD
  return found


def write(
  path: pathlib.Path,
  values: dict[str, np.ndarray],
  cfg: config.Model,
  kind: str,
  quantised: dict[str, gguf.GGMLQuantizationType] | None = None,
  **more,
) -> str:
  writer = gguf.GGUFWriter(path, kind)
  writer.add_block_count(cfg.layers)
  writer.add_context_length(256)
  writer.add_embedding_length(cfg.width)
  writer.add_feed_forward_length(cfg.ffn)
  writer.add_head_count(cfg.heads)
  writer.add_head_count_kv(cfg.kv_heads)
  writer.add_key_length(cfg.head_dim)
  writer.add_value_length(cfg.head_dim)
  writer.add_layer_norm_rms_eps(cfg.norm_eps)
  writer.add_rope_freq_base(cfg.rope.theta)
  writer.add_token_list([f'<{i}>' for i in range(len(values['token_embd.weight']))])
  for key, value in more.items():
    name = f'{kind}.{key.replace("__", ".")}'
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    add[type(value)](name, value)
  for name, value in values.items():
    of = (quantised or {}).get(name)
    if of is None:
      writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    elif value.dtype == np.uint8:
      writer.add_tensor(name, value, raw_dtype=of)
    else:
      data = gguf.quantize(np.ascontiguousarray(value, np.float32), of)
      writer.add_tensor(name, data, raw_dtype=of)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return str(path)


def loaded(path: str) -> tuple[p.Params, config.Model]:
  cfg = source.settle(config.Model(source=path, unroll=False))
  return load.load(path, cfg), cfg


@pytest.mark.parametrize('head_dim', [8, 16])
@pytest.mark.parametrize('kind', ['llama', 'qwen2', 'qwen3'])
def test_leaves_have_the_bits_they_had_before_the_file(tmp_path, kind, head_dim):
  want = shape(kind, head_dim)
  params = fixtures.params(cfg=want)
  path = write(tmp_path / 'm.gguf', tensors(params, want, kind), want, kind)
  got, cfg = loaded(path)
  assert dataclasses.replace(cfg, source='') == want
  assert fixtures.same_bits(got, params)


def test_logits_of_a_llama_file_are_those_of_a_float64_forward_pass(tmp_path):
  """The forward pass knows nothing of files; the permutation is undone or it fails."""
  want = dataclasses.replace(shape('llama', 16), tied=True)
  params = fixtures.params(sharp=2.0, cfg=want)
  values = tensors(params, want, 'llama')
  got, cfg = loaded(write(tmp_path / 'm.gguf', values, want, 'llama'))
  token_BT = np.random.default_rng(0).integers(0, V, (1, 24)).astype(np.int32)
  position_BT = np.arange(24, dtype=np.int32)[None]
  h = transformer.apply(got, token_BT, position_BT, np.ones_like(token_BT), cfg=cfg)
  found = np.asarray(transformer.logits(got, h))[0]
  np.testing.assert_allclose(
    found, fixtures.forward64(params, token_BT[0], want), atol=1e-4
  )
  # The control: read as if the file were Qwen's, the same bytes speak nonsense.
  wrong = dict(values)
  for name in values:
    if 'attn_q.' in name or 'attn_k.' in name:
      wrong[name] = paired(values[name], 4 if 'attn_q.' in name else 2)
  spoilt, _ = loaded(write(tmp_path / 'n.gguf', wrong, want, 'llama'))
  h = transformer.apply(spoilt, token_BT, position_BT, np.ones_like(token_BT), cfg=cfg)
  assert np.abs(np.asarray(transformer.logits(spoilt, h))[0] - found).max() > 0.1


EXACT = {  # kind: bits of the fraction that are kept
  'F32': 24,
  'F16': 11,
  'BF16': 8,
  'Q8_0': 7,
}


@pytest.mark.parametrize('name', ['F32', 'F16', 'BF16', 'Q8_0', 'Q4_0', 'Q4_1'])
def test_floats_and_blocks_of_32_are_read_as_they_were_written(tmp_path, name):
  cfg = shape('llama', 16)
  params = fixtures.params(cfg=cfg)
  of = gguf.GGMLQuantizationType[name]
  values = tensors(params, cfg, 'llama')
  kinds = {key: of for key, value in values.items() if value.ndim == 2}
  got, _ = loaded(write(tmp_path / 'm.gguf', values, cfg, 'llama', kinds))
  plain = {
    key: gguf.dequantize(gguf.quantize(np.ascontiguousarray(value), of), of)
    if key in kinds
    else value
    for key, value in values.items()
  }
  want, _ = loaded(write(tmp_path / 'n.gguf', plain, cfg, 'llama'))
  assert fixtures.same_bits(got, want)
  close = 2.0 ** -EXACT.get(name, 2)
  for key, leaf in load.by_name(params).items():
    largest = np.abs(leaf).max()
    assert np.abs(load.by_name(got)[key] - leaf).max() <= close * largest, key


def q4_k(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
  """Random super-blocks of 256 and their values, by the format's description.

  A block: float16 d and dmin, 8 six-bit scales and minima packed in 12 bytes, 256
  nibbles. Values: d scale q - dmin minimum.
  """
  d, dmin = rng.uniform(0.01, 0.1, (2, rows)).astype(np.float16)
  scale, least = rng.integers(0, 64, (2, rows, 8)).astype(np.uint8)
  q = rng.integers(0, 16, (rows, 4, 2, 32)).astype(np.uint8)
  packed = np.zeros((rows, 12), np.uint8)
  packed[:, 0:4] = scale[:, :4] | (scale[:, 4:] >> 4 << 6)
  packed[:, 4:8] = least[:, :4] | (least[:, 4:] >> 4 << 6)
  packed[:, 8:12] = (scale[:, 4:] & 15) | (least[:, 4:] & 15) << 4
  nibbles = (q[:, :, 0] | q[:, :, 1] << 4).reshape(rows, 128)
  head = np.stack([d, dmin], axis=1).view(np.uint8)
  values = d.astype(np.float32)[:, None, None] * scale[:, :, None] * q.reshape(
    rows, 8, 32
  ) - dmin.astype(np.float32)[:, None, None] * least[:, :, None].astype(np.float32)
  return np.concatenate([head, packed, nibbles], axis=1), values.reshape(rows, 256)


def q6_k(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
  """The same for six bits: low nibbles, high pairs of bits, 16 scales, float16 d."""
  d = rng.uniform(0.001, 0.01, rows).astype(np.float16)
  scale = rng.integers(-100, 100, (rows, 16)).astype(np.int8)
  q = rng.integers(0, 64, (rows, 2, 4, 32)).astype(np.uint8)  # halves, quarters of 32
  low, high = q & 15, q >> 4
  nibbles = np.concatenate([low[:, :, :2] | low[:, :, 2:] << 4], axis=2)
  pairs = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
  data = [
    nibbles.reshape(rows, 128),
    pairs.reshape(rows, 64),
    scale.view(np.uint8),
    d[:, None].view(np.uint8),
  ]
  centred = q.reshape(rows, 16, 16).astype(np.float32) - 32
  values = d.astype(np.float32)[:, None, None] * scale[:, :, None] * centred
  return np.concatenate(data, axis=1), values.reshape(rows, 256)


@pytest.mark.parametrize(('name', 'made'), [('Q4_K', q4_k), ('Q6_K', q6_k)])
def test_super_blocks_of_256_are_read_as_the_format_describes_them(
  tmp_path, name, made
):
  cfg = dataclasses.replace(shape('llama', 64), width=256, ffn=64)
  params = fixtures.params(cfg=cfg)
  values = tensors(params, cfg, 'llama')
  key = 'blk.1.ffn_up.weight'
  data, want = made(np.random.default_rng(0), 64)
  path = write(
    tmp_path / 'm.gguf',
    values | {key: data},
    cfg,
    'llama',
    {key: gguf.GGMLQuantizationType[name]},
  )
  got, _ = loaded(path)
  np.testing.assert_allclose(
    np.asarray(got.dense.mlp.wu_NDF[1]).T, want, rtol=1e-6, atol=1e-6
  )
  assert np.array_equal(got.dense.mlp.wu_NDF[0], params.dense.mlp.wu_NDF[0])


def test_another_quantisation_is_refused_by_name(tmp_path):
  cfg = shape('llama', 16)
  values = tensors(fixtures.params(cfg=cfg), cfg, 'llama')
  key = 'blk.1.ffn_up.weight'
  of = {key: gguf.GGMLQuantizationType.Q5_0}
  path = write(tmp_path / 'm.gguf', values, cfg, 'llama', of)
  with pytest.raises(ValueError, match=r'blk\.1\.ffn_up\.weight .*got Q5_0'):
    loaded(path)


@pytest.mark.parametrize('kind', ['llama', 'qwen2', 'qwen3'])
def test_every_missing_renamed_or_transposed_tensor_is_named(tmp_path, kind):
  cfg = shape(kind, 8)
  values = tensors(fixtures.params(cfg=cfg), cfg, kind)
  for key, value in values.items():
    if key in ('output.weight', 'token_embd.weight'):
      continue  # without a head the file is a tied model's; see below
    others = {k: v for k, v in values.items() if k != key}
    spoilt = [others, others | {f'{key}s': value}, others | {key: value[:-1]}]
    if value.ndim == 2:
      assert value.shape[0] != value.shape[1]
      spoilt.append(others | {key: value.T})
    for each in spoilt:
      path = write(tmp_path / 'm.gguf', each, cfg, kind)
      opened = source.open(path)
      with pytest.raises(ValueError, match=key.replace('.', r'\.')):
        load.fills_of(opened, opened.described.model)


def test_a_head_that_is_gone_contradicts_the_settings(tmp_path):
  cfg = shape('llama', 8)
  values = tensors(fixtures.params(cfg=cfg), cfg, 'llama')
  settled = source.settle(
    config.Model(source=write(tmp_path / 'm.gguf', values, cfg, 'llama'))
  )
  del values['output.weight']
  path = write(tmp_path / 'm.gguf', values, cfg, 'llama')
  with pytest.raises(ValueError, match=r'model\.tied: got False'):
    load.load(path, settled)


@pytest.mark.parametrize(
  ('more', 'match'),
  [
    ({'expert_count': 8}, 'expert_count: got 8'),
    ({'attention__sliding_window': 128}, 'sliding_window: got 128'),
    ({'rope__dimension_count': 4}, 'dimension_count: got 4'),
    ({'rope__scaling__type': 'longrope', 'rope__scaling__factor': 2.0}, 'longrope'),
    ({'attention__clamp_kqv': 3.0}, 'clamp_kqv'),
  ],
)
def test_metadata_that_are_not_supported_are_refused_by_name(tmp_path, more, match):
  cfg = shape('llama', 8)
  values = tensors(fixtures.params(cfg=cfg), cfg, 'llama')
  path = write(tmp_path / 'm.gguf', values, cfg, 'llama', **more)
  with pytest.raises(ValueError, match=match):
    source.describe(path)


def test_another_architecture_and_a_wrong_vocabulary_are_refused(tmp_path):
  cfg = shape('llama', 8)
  values = tensors(fixtures.params(cfg=cfg), cfg, 'llama')
  path = write(tmp_path / 'm.gguf', values, cfg, 'gemma3')
  with pytest.raises(ValueError, match="architecture: got 'gemma3'"):
    source.describe(path)
  opened = gguf_file.open_file(
    pathlib.Path(write(tmp_path / 'n', values, cfg, 'llama'))
  )
  with pytest.raises(ValueError, match='97 rows, want 98'):
    gguf_file._describe(
      {
        'general.architecture': 'llama',
        'llama.attention.head_count': 4,
        'llama.embedding_length': 64,
        'llama.attention.key_length': 8,
        'llama.block_count': 2,
        'llama.feed_forward_length': 96,
        'llama.attention.layer_norm_rms_epsilon': 1e-5,
      },
      opened[1],
      98,
    )


def test_scaled_rotations_are_read_from_metadata_and_from_factors(tmp_path):
  cfg = shape('llama', 16)
  values = tensors(fixtures.params(cfg=cfg), cfg, 'llama')

  def rope(values=values, **more) -> config_model.Rope:
    path = write(tmp_path / 'm.gguf', values, cfg, 'llama', **more)
    return source.describe(path).model.rope

  linear = {'rope__scaling__type': 'linear', 'rope__scaling__factor': 2.0}
  assert rope(**linear) == config_model.Rope(1e4, 'linear', 2.0)
  yarn = {
    'rope__scaling__type': 'yarn',
    'rope__scaling__factor': 4.0,
    'rope__scaling__original_context_length': 64,
  }
  amplitude = 0.1 * np.log(4) + 1
  want = config_model.Rope(1e4, 'yarn', 4.0, 64, 1.0, 32.0, amplitude=amplitude)
  assert rope(**yarn) == want
  # Llama 3.2's factors: of wave lengths up to 2048 one, from 8192 on 32.
  wave_h = 2 * np.pi * 1e4 ** (np.arange(8) / 8)
  blend_h = (8192 / wave_h - 1) / 3
  factor_h = np.select(
    [wave_h < 2048, wave_h > 8192], [1.0, 32.0], 1 / (blend_h + (1 - blend_h) / 32)
  )
  assert 1 < factor_h[-2] < 32 == factor_h[-1]
  got = rope(values | {'rope_freqs.weight': factor_h})
  assert got == config_model.Rope(1e4, 'llama3', 32.0, 8192, 1.0, 4.0)
  with pytest.raises(ValueError, match='not those of Llama 3'):
    rope(values | {'rope_freqs.weight': np.sqrt(factor_h)})
