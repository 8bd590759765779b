"""NVFP4 against a loop written from the format, bit by bit."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swe17.ops import quantize

F = np.float32
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = sorted(
  {m / 8 * 2.0**-6 for m in range(8)}
  | {(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)} - {480.0}
)
TOKENS, WEIGHTS = jax.jit(quantize.tokens), jax.jit(quantize.weights)


def nearest(x: float, values: list[float]) -> float:
  """The nearest value, of two the one with the even code; exact in Python's floats."""
  size = min(abs(float(x)), values[-1])
  code = min(range(len(values)), key=lambda i: (abs(values[i] - size), i % 2))
  return float(np.copysign(values[code], x))


def token64(x: np.ndarray, a: np.float32 | None = None) -> np.ndarray:
  """A token (or a column of a matrix whose largest size is `a`), one by one."""
  a = np.abs(x).max() if a is None else a
  if not np.isfinite(a):
    return np.full(x.shape, np.nan, F)
  out = np.zeros(x.shape, F)
  if a < F(2.0**-100):
    return out
  g = F(a) / F(2688)
  for start in range(0, x.size, 16):
    block = x[start : start + 16]
    s = F(nearest((np.abs(block).max() / g) / F(6), E4M3))
    for i, v in enumerate(block):
      if s:
        q = F(nearest(v / (s * g), E2M1))
        out[start + i] = (q * s) * g
  return out


def same(got, want) -> None:
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype == F
  # A sign on zero is not a value of the format's arithmetic.
  np.testing.assert_array_equal(
    (got + F(0)).view(np.int32), (want + F(0)).view(np.int32)
  )


def rows(seed: int = 0, T: int = 12, I: int = 48) -> np.ndarray:
  """Normal rows of very different sizes, blocks of different sizes in each."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(T, I)) * np.exp(rng.normal(size=(T, I // 16)) * 4).repeat(16, 1)
  return F(x * 10.0 ** rng.integers(-20, 20, size=(T, 1)))


@pytest.mark.parametrize(
  'fn, values, other',
  [
    (quantize.e2m1, E2M1, ml_dtypes.float4_e2m1fn),
    (quantize.e4m3, E4M3, ml_dtypes.float8_e4m3fn),
  ],
)
def test_every_code_stays_and_every_midpoint_goes_to_the_even_code(fn, values, other):
  exact = np.array(values)
  middle = (exact[1:] + exact[:-1]) / 2
  x = F(np.concatenate([exact, middle, np.nextafter(F(middle), F(1e9))]))
  x = np.concatenate([x, np.nextafter(F(middle), F(-1)), F([500, 1e9, np.inf])])
  x = np.concatenate([x, -x])
  got = np.asarray(jax.jit(fn)(x))
  same(got, F([nearest(v, values) for v in x]))
  same(got[: exact.size], F(exact))
  inside = np.abs(x) <= values[-1]
  same(got[inside], x[inside].astype(other).astype(F))


def test_tokens_equal_the_loop_bit_by_bit():
  x = rows()
  same(TOKENS(x), np.stack([token64(row) for row in x]))


def test_weights_equal_the_loop_with_blocks_along_the_contracted_axis():
  w_EIO = np.stack([rows(1, 32, 16), rows(2, 32, 16)])
  want = [
    np.stack([token64(column, np.abs(w).max()) for column in w.T]).T for w in w_EIO
  ]
  same(WEIGHTS(w_EIO), np.stack(want))


def test_values_of_the_format_come_back_exactly():
  # One block whose largest is 6 * 448 makes g = 1; others use all codes and scales.
  blocks = [[6 * 448.0] + [0] * 15]
  for s in (448.0, 1.0, 0.75, 2.0**-9):
    blocks.append([s * v for v in E2M1] + [-s * v for v in E2M1])
  x = F(blocks).reshape(1, -1)
  same(TOKENS(x), x)


def test_quantised_twice_is_quantised_once_up_to_the_rounding_of_the_scale():
  # The largest value of a token keeps its code, so its scale is found again.
  once = np.asarray(TOKENS(rows()))
  np.testing.assert_allclose(TOKENS(once), once, rtol=3e-7)


def test_the_error_of_an_element_is_within_half_a_step_of_its_block():
  x = rows(3)
  parts = quantize.quantise(jnp.asarray(x), shared=1)
  blocks = x.reshape(12, 3, 16)
  step = np.asarray(parts.s * parts.g)
  error = np.abs(np.asarray(TOKENS(x)).reshape(blocks.shape) - blocks)
  # Steps of 2 above 4, of .5 below 2; 3 % more where E4M3 rounded the scale down.
  some = np.broadcast_to(np.asarray(parts.s) > 2.0**-6, error.shape)
  assert (error <= np.float32(1.001) * step)[some].all()
  small = some & (np.abs(blocks) < 2 * step)
  assert (error <= np.float32(0.2501) * step)[small].all()


def test_zeros_tiny_rows_and_blocks_below_the_smallest_scale_are_zero():
  x = np.zeros((4, 32), F)
  x[1, 3] = 1e-38
  x[2] = 2.0**-101
  x[3, 0], x[3, 16:] = 1.0, 1e-7
  got = np.asarray(TOKENS(x))
  assert not got[:3].any()
  assert got[3, 0] == 1.0
  assert not got[3, 1:].any()


def test_denormals_beside_normal_values_are_zero_and_the_rest_is_not_disturbed():
  x = rows(4)
  x[:, 1::2] = F(1e-41)
  same(TOKENS(x), np.stack([token64(row) for row in x]))


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_makes_its_own_token_nan_and_no_other(bad):
  x = rows(5)
  clean = np.asarray(TOKENS(x))
  x[4, 7] = bad
  got = np.asarray(TOKENS(x))
  assert np.isnan(got[4]).all()
  same(np.delete(got, 4, 0), np.delete(clean, 4, 0))
  assert np.isnan(np.asarray(WEIGHTS(x[:, :].repeat(4, 0)))).all()


def test_the_largest_floats_stay_finite_to_within_a_rounding():
  x = np.full((1, 16), 1e38, F)
  x[0, 0] = -3e38
  assert np.isfinite(np.asarray(TOKENS(x))).all()


def test_a_later_token_leaves_earlier_outputs_bit_equal():
  x = rows(6)
  clean = np.asarray(TOKENS(x))
  x[7] *= F(1000)
  same(np.asarray(TOKENS(x))[:7], clean[:7])
  # A scale for the whole tensor does leak: what the per-token scale is for.
  tensor = functools.partial(quantize.fake, shared=2)
  one = np.ones((2, 16), F) * F(0.3)
  changed = one * F([[1], [1234.5]])
  assert not np.array_equal(np.asarray(tensor(one))[0], np.asarray(tensor(changed))[0])


def test_jit_equals_no_jit_bit_by_bit():
  x = rows(7)
  same(TOKENS(x), quantize.tokens(jnp.asarray(x)))


def test_the_gradient_passes_straight_through():
  x, dy = rows(8), np.random.default_rng(0).normal(size=(12, 48)).astype(F)
  _, back = jax.vjp(quantize.tokens, jnp.asarray(x))
  same(back(jnp.asarray(dy))[0], dy)
  _, back = jax.vjp(quantize.weights, jnp.asarray(x.T.copy()))
  same(back(jnp.asarray(dy.T.copy()))[0], dy.T)


@pytest.mark.parametrize('activations', [False, True])
def test_a_product_is_of_quantised_operands_and_its_gradient_of_bfloat16_ones(
  activations,
):
  rng = np.random.default_rng(0)
  x, w, dy = (F(rng.normal(size=s)) for s in ((5, 32), (32, 7), (5, 7)))
  y, back = jax.vjp(
    lambda x, w: quantize.project(x, w, activations), jnp.asarray(x), jnp.asarray(w)
  )
  xq = np.stack([token64(row) for row in x]) if activations else x
  wq = np.stack([token64(c, np.abs(w).max()) for c in w.T]).T
  np.testing.assert_allclose(y, np.float64(xq) @ np.float64(wq), rtol=1e-5, atol=1e-5)
  x16, w16, dy16 = (np.float64(v.astype(ml_dtypes.bfloat16)) for v in (x, w, dy))
  dx, dw = back(jnp.asarray(dy))
  np.testing.assert_allclose(dx, dy16 @ w16.T, rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(dw, x16.T @ dy16, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_cut_in_blocks_is_refused():
  with pytest.raises(ValueError, match='got 24 elements to contract'):
    quantize.tokens(jnp.ones((2, 24)))
  for shared in itertools.chain((0, 3)):
    with pytest.raises(ValueError, match='shared'):
      quantize.fake(jnp.ones((2, 16)), shared)
