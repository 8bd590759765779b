"""One transformer for training and serving: parity, causality, isolation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config, config_model
from swe17.model import cache as kv
from swe17.model import gqa, transformer
from swe17.model import params as p
from tests import fixtures

CFG = fixtures.MODEL
V = fixtures.VOCAB
PLAIN = dataclasses.replace(CFG, ngram=1)
PARAMS = fixtures.params(sharp=2.0)
T = 64


@functools.partial(jax.jit, static_argnames='cfg')
def logits(params, token_BT, position_BT, segment_BT, cfg=CFG) -> jax.Array:
  hidden = transformer.apply(params, token_BT, position_BT, segment_BT, cfg=cfg)
  return transformer.logits(params, hidden)


_cached_of = jax.jit(transformer.apply_cached, static_argnames='cfg')
_cached = functools.partial(_cached_of, cfg=CFG)


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)


def alone(token_T: np.ndarray) -> np.ndarray:
  """Logits of one sequence in a row of its own, padded at the end to T."""
  n = token_T.size
  row = np.zeros((2, T), np.int32)
  segment = np.zeros((2, T), np.int32)
  row[0, :n], segment[0, :n] = token_T, 1
  position = np.tile(np.arange(T, dtype=np.int32), (2, 1))
  return np.asarray(logits(PARAMS, row, position, segment))[0, :n]


def packed(*parts: tuple[int, np.ndarray]) -> tuple[np.ndarray, ...]:
  """Rows [2, T] with each sequence at its offset of row 0: token, position, segment."""
  token, position, segment = (np.zeros((2, T), np.int32) for _ in range(3))
  for i, (at, ids) in enumerate(parts):
    to = slice(at, at + ids.size)
    token[0, to], position[0, to], segment[0, to] = ids, np.arange(ids.size), i + 1
  return token, position, segment


def test_logits_equal_a_float64_forward_pass_at_many_positions():
  token_T = tokens(T)
  want = fixtures.forward64(PARAMS, token_T, CFG)
  got = alone(token_T)
  for t in (0, 1, 17, 63):
    np.testing.assert_allclose(got[t], want[t], atol=1e-4)
  assert np.abs(want).max() > 3  # the logits are no trivial ones


# (ngram, rotary_dim): other spans and heads of 24 that rotate in part or whole.
SHAPES = [(1, 24), (2, 6), (4, 2)]


def of_shape(ngram: int, rotary_dim: int) -> tuple[config.Model, p.Params]:
  cfg = dataclasses.replace(
    CFG,
    layers=1,
    width=32,
    ffn=48,
    heads=2,
    kv_heads=1,
    head_dim=24,
    rotary_dim=rotary_dim,
    rope=config_model.Rope(theta=1e6),
    ngram=ngram,
  )
  return cfg, fixtures.params(3, sharp=2.0, cfg=cfg)


@pytest.mark.parametrize('shape', SHAPES)
def test_logits_equal_float64_with_another_span_head_size_and_rotary_base(shape):
  cfg, params = of_shape(*shape)
  token_T = tokens(20, seed=3)
  want = fixtures.forward64(params, token_T, cfg)
  got = logits(params, *(x[:1, :20] for x in packed((0, token_T))), cfg=cfg)
  np.testing.assert_allclose(got[0], want, atol=1e-4)
  assert np.abs(want).max() > 3


@pytest.mark.parametrize('shape', SHAPES)
def test_cached_decode_equals_training_for_any_span_of_an_embedding(shape):
  """Token by token from the first, and after a prefill, which ends inside a span."""
  cfg, params = of_shape(*shape)
  token_T = tokens(12, seed=4)
  full = logits(params, *(x[:1, :12] for x in packed((0, token_T))), cfg=cfg)
  want = fixtures.forward64(params, token_T, cfg)
  for cuts in (range(1, 13), [5, *range(6, 13)], [1, 6, 7, 12]):
    got, _ = cached(token_T[None], [*cuts], params=params, cfg=cfg)
    np.testing.assert_allclose(got, full, atol=1e-5)
    np.testing.assert_allclose(got[0], want, atol=1e-4)


@pytest.mark.parametrize('length', [1, 2, 3])
def test_a_row_shorter_than_a_span_scores_as_the_start_of_a_longer_one(length):
  cfg, params = of_shape(4, 6)
  rows = packed((0, tokens(20)))
  long = logits(params, *(x[:1, :20] for x in rows), cfg=cfg)
  short = logits(params, *(x[:1, :length] for x in rows), cfg=cfg)
  np.testing.assert_allclose(short, long[:, :length], atol=1e-5)


def test_each_of_the_tokens_of_a_span_counts_by_how_far_back_it_is():
  token, position, segment = packed((0, tokens(10)), (10, tokens(9, seed=1)))
  rows = token, position, segment, None
  before_JBT = np.asarray(transformer._before(*rows, 3))
  assert before_JBT.shape == (3, 2, T)
  for j, before in enumerate(before_JBT[:, 0, :19], 1):
    for start, end in ((0, 10), (10, 19)):
      assert before[start : start + j].tolist() == [-1] * j
      assert before[start + j : end].tolist() == token[0, start : end - j].tolist()
  assert transformer._before(*rows, 0).shape == (0, 2, T)


def test_the_tokens_before_a_tail_are_the_last_of_its_prefix():
  token = np.arange(12, dtype=np.int32)[None]
  segment = np.int32([[1, 1, 1, 2, 2, 3, 4, 4, 5, 5, 0, 0]])
  prefix = np.int32([[0, 0, 0, 1, 1, 1, 0, 0, 4, 4, 0, 0]])
  position = np.int32([[0, 1, 2, 3, 4, 3, 0, 1, 2, 3, 0, 1]])
  before = transformer._before(token, position, segment, prefix, 3)
  want = [
    [-1, 0, 1, 2, 3, 2, -1, 6, 7, 8, -1, 10],
    [-1, -1, 0, 1, 2, 1, -1, -1, 6, 7, -1, -1],
    [-1, -1, -1, 0, 1, 0, -1, -1, -1, 6, -1, -1],
  ]
  assert np.asarray(before)[:, 0].tolist() == want


@pytest.mark.parametrize('at', [(0, 5), (0, 27), (59, 10)])
def test_packed_and_shifted_sequences_score_as_alone(at):
  # Two rollouts of lengths 5 and 37: side by side, apart, and right-aligned.
  a, b = tokens(5), tokens(37, seed=1)
  got = np.asarray(logits(PARAMS, *packed((at[0], a), (at[1], b))))[0]
  np.testing.assert_allclose(got[at[0] : at[0] + 5], alone(a), atol=1e-5)
  np.testing.assert_allclose(got[at[1] : at[1] + 37], alone(b), atol=1e-5)


def test_a_token_changes_nothing_in_other_segments_and_nothing_before_it():
  a, b, c = tokens(20), tokens(17, seed=1), tokens(19, seed=2)
  rows = packed((0, a), (20, b), (37, c))
  before = np.asarray(logits(PARAMS, *rows))[0]
  rows[0][0, 25] = (rows[0][0, 25] + 1) % V  # position 5 of b
  rows[0][0, 60] = 7  # padding
  after = np.asarray(logits(PARAMS, *rows))[0]
  assert before[:25].tobytes() == after[:25].tobytes()
  assert before[37:56].tobytes() == after[37:56].tobytes()
  changed = np.abs(before - after).max(-1)
  assert (changed[25:37] > 1e-4).all()
  rows[0][0, 36] = (rows[0][0, 36] + 1) % V  # the last of b, right before c
  last = np.asarray(logits(PARAMS, *rows))[0]
  assert last[37:56].tobytes() == before[37:56].tobytes()
  assert last[:36].tobytes() == after[:36].tobytes()


def test_a_segment_with_another_inside_it_does_not_see_that_ones_tokens():
  """Neither by attention nor as the token before: ids decide, not positions."""
  rows = packed((0, tokens(30)))
  rows[2][0, 10:20] = 2
  before = np.asarray(logits(PARAMS, *rows))[0]
  for at in (13, 19):  # 19 comes right before the first segment goes on
    rows[0][0, at] = (rows[0][0, at] + 1) % V
  after = np.asarray(logits(PARAMS, *rows))[0]
  assert before[:13].tobytes() == after[:13].tobytes()
  assert before[20:30].tobytes() == after[20:30].tobytes()
  assert (np.abs(before - after).max(-1)[13:20] > 1e-4).all()
  # What goes on has no token before it, as at a segment's start.
  rows[0][0, 9] = (rows[0][0, 9] + 1) % V
  moved = np.asarray(_embedded(*rows))[0]
  rows[0][0, 9] = (rows[0][0, 9] + 1) % V
  assert moved[20].tobytes() == np.asarray(_embedded(*rows))[0, 20].tobytes()
  assert moved[20].tobytes() == np.asarray(PARAMS.embed_VD[rows[0][0, 20]]).tobytes()


def _embedded(token_BT, position_BT, segment_BT) -> jax.Array:
  """What enters the first layer: the final norm undone of a model without layers."""
  seen = []
  real = transformer._embed
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(transformer, '_embed', lambda *a: seen.append(real(*a)) or seen[0])
    transformer.apply(PARAMS, token_BT, position_BT, segment_BT, cfg=CFG)
  return seen[0]


def test_the_first_token_of_a_full_row_does_not_follow_the_last():
  row = tokens(2, T)
  position = np.tile(np.arange(5, T + 5, dtype=np.int32), (2, 1))
  ones = np.ones((2, T), np.int32)
  before = np.asarray(logits(PARAMS, row, position, ones))
  row[:, -1] = (row[:, -1] + 1) % V
  after = np.asarray(logits(PARAMS, row, position, ones))
  assert before[:, :-1].tobytes() == after[:, :-1].tobytes()


def test_no_gradient_flows_from_a_logit_to_later_tokens_or_other_segments():
  token, position, segment = packed((0, tokens(16)), (16, tokens(16, seed=1)))

  def fn(x_BTD):
    def attend(attn, h):
      q, k, v = gqa.queries_keys_values(attn, h, position, CFG)
      return gqa.out(attn, transformer.attention.packed(q, k, v, segment, T))

    for i in range(CFG.layers):
      layer = jax.tree.map(lambda w, i=i: w[i], PARAMS.dense)
      x_BTD, _ = transformer.block(layer, x_BTD, attend, CFG)
    return jnp.sum(x_BTD[0, 20])

  grad = np.asarray(jax.jit(jax.grad(fn))(PARAMS.embed_VD[token]))[0]
  touched = np.abs(grad).max(-1) > 0
  assert touched.tolist() == [16 <= t <= 20 for t in range(T)]


def cached(
  token_BT: np.ndarray, cuts: list[int], params: p.Params = PARAMS, cfg=CFG
) -> tuple[np.ndarray, kv.Cache]:
  """Logits of rows fed to an empty cache in chunks that end at `cuts`."""
  cache = kv.init(cfg, token_BT.shape[0], T)
  out, start = [], 0
  for end in cuts:
    chunk = token_BT[:, start:end]
    position = np.tile(np.arange(start, end, dtype=np.int32), (len(chunk), 1))
    hidden, cache, _ = _cached_of(params, chunk, position, cache, None, cfg=cfg)
    out.append(np.asarray(transformer.logits(params, hidden)))
    start = end
  return np.concatenate(out, 1), cache


@pytest.mark.parametrize('cuts', [[24], [8, 16, 24], [16, *range(17, 25)]])
def test_prefill_chunks_and_decode_equal_training(cuts):
  token_BT = np.stack([tokens(24), tokens(24, seed=1)])
  got, _ = cached(token_BT, cuts)
  for row, ids in zip(got, token_BT, strict=True):
    np.testing.assert_allclose(row, alone(ids), atol=1e-5)


def test_rows_of_different_lengths_in_chosen_slots_equal_training():
  a, b = tokens(16), tokens(11, seed=1)
  cache = kv.init(CFG, 4, T)
  dirty = jax.tree.map(lambda x: x + np.array(3, x.dtype), cache)  # an earlier session
  rows = np.zeros((2, 16), np.int32)
  rows[0], rows[1, :11] = a, b
  position = np.tile(np.arange(16, dtype=np.int32), (2, 1))
  position[1, 11:] = T  # padding: beyond the cache
  hidden, cache, _ = _cached(PARAMS, rows, position, dirty, np.int32([[3], [1]]))
  got = np.asarray(transformer.logits(PARAMS, hidden))
  np.testing.assert_allclose(got[0], alone(a), atol=1e-5)
  np.testing.assert_allclose(got[1, :11], alone(b), atol=1e-5)
  # One more token of each, at positions of their own, in all four slots at once.
  step = np.int32([[0], [9], [0], [8]])
  position = np.int32([[T], [11], [T], [16]])
  hidden, _, _ = _cached(PARAMS, step, position, cache, None)
  got = np.asarray(transformer.logits(PARAMS, hidden))[:, 0]
  np.testing.assert_allclose(got[1], alone(np.append(b, 9))[-1], atol=1e-5)
  np.testing.assert_allclose(got[3], alone(np.append(a, 8))[-1], atol=1e-5)


def test_a_position_beyond_the_cache_writes_nothing():
  cache = jax.tree.map(lambda x: x + np.array(1, x.dtype), kv.init(CFG, 2, 8))
  _, after, _ = _cached(PARAMS, tokens(2, 1), np.int32([[8], [9]]), cache, None)
  assert fixtures.same_bits(cache, after)


def test_only_the_named_slots_are_written():
  cache = kv.init(CFG, 4, 8)
  position = np.int32([[2], [5]])
  _, after, _ = _cached(PARAMS, tokens(2, 1), position, cache, np.int32([[3], [1]]))
  for axes, pools in (((1, 2), after.k), ((1, 3), after.v)):
    for array in fixtures.leaves(pools):
      written = np.argwhere(np.abs(array).max(axes) > 0)
      assert written.tolist() == [[1, 5], [3, 2]]


def test_remat_unrolling_and_chunks_change_neither_value_nor_gradient():
  rows = tuple(x[:1, :16] for x in packed((0, tokens(16))))

  def fn(params, cfg):
    return jnp.mean(jnp.square(transformer.apply(params, *rows, cfg=cfg)[0, 7]))

  value = jax.jit(jax.value_and_grad(fn), static_argnums=1)
  other = dataclasses.replace(CFG, remat=True, unroll=True, attention_chunk=7)
  want, got = (fixtures.leaves(value(PARAMS, cfg)) for cfg in (CFG, other))
  for a, b in zip(want, got, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(a).max())


def test_scores_of_16_prompts_together_and_alone_differ_by_rounding_only():
  token_BT = tokens(16, 16)
  grid = np.tile(np.arange(16, dtype=np.int32), (16, 1))
  ones = np.ones((16, 16), np.int32)
  together = np.asarray(logits(PARAMS, token_BT, grid, ones))
  one = [logits(PARAMS, token_BT[i : i + 1], grid[:1], ones[:1]) for i in range(16)]
  floor = 2e-6 * np.abs(together).max()  # a few units in the last place
  assert np.abs(together - np.concatenate(one)).max() < 10 * floor


def test_shapes_count_and_initial_scale():
  for cfg in (CFG, PLAIN):
    shapes = p.abstract(cfg, V)
    made = p.init(shapes, jax.random.key(0))
    pairs = zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(made), strict=True)
    for (path, leaf), value in pairs:
      name = jax.tree_util.keystr(path)
      assert value.shape == leaf.shape and value.dtype == jnp.float32
      assert len(leaf.axes) == len(leaf.shape)
      if leaf.scale == 0:
        assert bool(jnp.all(value == leaf.mean)), name
      elif cfg.ngram == 1 or not name.endswith(('wk_NDCH', 'wo_NQHD')):
        # Those two have a start of their own where there is an n-gram embedding.
        assert float(jnp.std(value)) == pytest.approx(leaf.scale, rel=0.05), name
  N, D, F, Q, C, H = 2, 64, 96, 4, 2, 16
  layer = 2 * D + D * Q * H + 2 * D * C * H + Q * H * D + 3 * D * F
  for ngram in (1, 2, 3, 5):
    shapes = p.abstract(dataclasses.replace(CFG, ngram=ngram), V)
    assert p.count(shapes) == V * D + (ngram - 1) * D * D + N * layer + D
    assert (shapes.prev_JDD is None) is (ngram == 1)


@pytest.fixture(scope='module')
def wide() -> p.Params:
  """Wide enough that random vectors are nearly orthogonal. Two query heads a key."""
  cfg = dataclasses.replace(
    CFG, layers=1, width=512, ffn=8, heads=8, kv_heads=4, head_dim=128, ngram=2
  )
  return p.init(p.abstract(cfg, V), jax.random.key(1))


@pytest.mark.parametrize('head', range(4))
def test_heads_look_for_the_token_before_if_even_and_for_the_same_token_if_odd(
  wide, head
):
  w = jax.tree.map(np.asarray, wide)
  query_VH = w.embed_VD @ w.dense.attn.wq_NDQH[0, :, 2 * head]
  token_V = np.random.default_rng(0).permutation(V)
  # Key i is of a token `token_V[i]` that follows token i.
  key_VD = w.embed_VD[token_V] + w.embed_VD @ w.prev_JDD[0]
  key_VH = key_VD @ w.dense.attn.wk_NDCH[0, :, head]
  found_V = np.argmax(query_VH @ key_VH.T, axis=1)
  follows, same = (
    np.mean(found_V == np.arange(V)),
    np.mean(token_V[found_V] == range(V)),
  )
  assert (follows > 0.95) if head % 2 == 0 else (same > 0.95)
  assert (same < 0.1) if head % 2 == 0 else (follows < 0.1)


def test_a_head_writes_out_what_it_read_through_the_transpose(wide):
  wv_DCH, wo_QHD = (
    np.asarray(x[0]) for x in (wide.dense.attn.wv_NDCH, wide.dense.attn.wo_NQHD)
  )
  for head in range(8):
    assert np.array_equal(wo_QHD[head], 0.25 * wv_DCH[:, head // 2].T)


def test_without_an_n_gram_embedding_attention_starts_at_random():
  made = p.init(p.abstract(PLAIN, V), jax.random.key(0))
  assert made.prev_JDD is None
  leaves = made.dense.attn
  for q in range(4):
    wv = np.asarray(leaves.wv_NDCH[:, :, q // 2])
    like = np.corrcoef(np.moveaxis(wv, 1, 2).ravel(), leaves.wo_NQHD[:, q].ravel())
    assert abs(like[0, 1]) < 0.1
    for c in range(2):
      like = np.corrcoef(
        leaves.wq_NDQH[:, :, q].ravel(), leaves.wk_NDCH[:, :, c].ravel()
      )
      assert abs(like[0, 1]) < 0.1


def test_equal_shapes_get_different_values_and_equal_keys_the_same():
  made = p.init(p.abstract(CFG, V), jax.random.key(0))
  assert not np.array_equal(made.dense.mlp.wg_NDF, made.dense.mlp.wu_NDF)
  assert not np.array_equal(made.dense.mlp.wg_NDF[0], made.dense.mlp.wg_NDF[1])
  assert fixtures.same_bits(made, p.init(p.abstract(CFG, V), jax.random.key(0)))


def test_published_values_are_bfloat16_and_rounding_twice_is_rounding_once():
  made = p.init(p.abstract(CFG, V), jax.random.key(0))
  once = p.rounded(made)
  assert not fixtures.same_bits(made, once)
  assert fixtures.same_bits(once, p.rounded(once))
  for leaf in fixtures.leaves(once):
    assert leaf.dtype == np.float32
    assert not (leaf.view(np.uint32) & 0xFFFF).any()
