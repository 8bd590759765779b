"""The gradient of gathered rows against float64 loops, and its order."""

import functools

import jax
import numpy as np
import pytest

from swe17.ops import row_gradient
from tests import fixtures

X, D = 13, 5

_sums = jax.jit(row_gradient.row_sums, static_argnames=('V', 'block'))


def example(P: int, V: int, high: int, seed: int = 0) -> tuple:
  rng = np.random.default_rng(seed)
  ids = rng.integers(-2, high, P).astype(np.int32)
  coef = rng.normal(size=P).astype(np.float32)
  row = rng.integers(0, X - 1, P).astype(np.int32)
  return ids, coef, row, rng.normal(size=(X, D)).astype(np.float32)


def by_loops(ids, coef, row, h, V) -> np.ndarray:
  out = np.zeros((V, D))
  for i, c, r in zip(ids, coef, row, strict=True):
    if 0 <= i < V:
      out[i] += np.float64(c) * h[r]
  return out


def test_by_hand():
  ids, coef = np.int32([2, 0, 2, -1]), np.float32([1, 10, 3, 99])
  h = np.float32([[1, 2], [5, 7]])
  got = _sums(ids, coef, np.int32([0, 1, 1, 0]), h, V=4, block=2)
  np.testing.assert_array_equal(got, [[50, 70], [0, 0], [16, 23], [0, 0]])


@pytest.mark.parametrize('block', [1, 4, 64])
@pytest.mark.parametrize('high', [1, 3, 40])  # one id throughout, few, many
def test_equal_to_the_loop(high, block):
  x = example(150, 37, high)
  got, want = _sums(*x, V=37, block=block), by_loops(*x, 37)
  np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


def test_ids_too_large_to_share_a_key_with_all_positions_are_summed_in_groups():
  V = (1 << 23) - 1  # leaves 9 bits: groups of 512 of the 1,300 pairs
  ids, coef, row, h = example(1300, V, 30)
  ids[::7] = V - 1 - ids[::7]
  h = h[:, :1]
  got = np.asarray(_sums(ids, coef, row, h, V=V, block=32))
  want = np.zeros((60, 1))
  for i, c, r in zip(ids, coef, row, strict=True):
    if 0 <= i < V:
      want[i if i < 30 else i - (V - 60)] += np.float64(c) * h[r]
  np.testing.assert_allclose(np.concatenate([got[:30], got[-30:]]), want, atol=1e-5)
  assert not got[30:-30].any()


def test_rows_and_coefficients_of_pairs_left_out_may_be_nan():
  ids, coef, row, h = example(40, 11, 11)
  out = ids < 0
  clean = _sums(ids, coef, row, h, V=11, block=16)
  coef[out], row[out], h[X - 1] = np.nan, X - 1, np.nan
  assert fixtures.same_bits(clean, _sums(ids, coef, row, h, V=11, block=16))


def test_no_pair_inside_gives_zeros():
  ids, coef, row, h = example(1, 7, 0)
  np.testing.assert_array_equal(_sums(ids, coef, row, h, V=7, block=8), 0.0)


def test_a_vocabulary_too_large_for_the_key_is_refused():
  x = example(4, 3, 3)
  with pytest.raises(ValueError, match='below'):
    jax.eval_shape(functools.partial(row_gradient.row_sums, V=1 << 24, block=8), *x)
