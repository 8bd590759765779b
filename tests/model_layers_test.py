"""The pieces of a layer, each against plain NumPy in float64."""

import functools

import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config_model
from swe17.model import attention, embedding, layers, rope

B, T, Q, C, H = 2, 7, 4, 2, 6


@functools.partial(jax.jit, static_argnums=(2, 3))
def _rotate(x, position, theta, dims):
  return rope.rotate(x, position, config_model.Rope(theta=theta), dims)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def test_project_is_a_product_over_the_last_axis():
  x, w = normal(B, T, 5), normal(5, 3)
  np.testing.assert_allclose(layers.project(x, w), np.float64(x) @ w, atol=1e-5)


def test_rms_norm_by_hand():
  got = layers.rms_norm(jnp.float32([[[3.0, 4.0]]]), jnp.float32([1.0, 2.0]), 0.0)
  np.testing.assert_allclose(got[0, 0], np.array([3, 8]) / np.sqrt(12.5), rtol=1e-6)


def test_rms_norm_does_not_see_the_scale_of_its_input():
  x, scale = normal(B, T, 8), normal(8)
  one, two = (layers.rms_norm(x * f, scale, 0.0) for f in (1.0, 64.0))
  np.testing.assert_allclose(one, two, rtol=1e-5)


def test_rms_norm_of_zeros_is_zero():
  assert not np.asarray(layers.rms_norm(jnp.zeros((1, 1, 4)), jnp.ones(4), 1e-6)).any()


def test_rotation_is_a_complex_product_of_half_split_pairs():
  x, position = normal(B, T, Q, H), np.int32([[0, 1, 2, 17, 63, 5, 400]] * B)
  turn = np.float64(x[..., : H // 2]) + 1j * x[..., H // 2 :]
  angle = position[..., None, None] * 1e4 ** (-np.arange(H // 2) / (H // 2))
  turn = turn * np.exp(1j * angle)
  got = _rotate(x, position, 1e4, H)
  want = np.concatenate([turn.real, turn.imag], -1)
  np.testing.assert_allclose(got, want, atol=2e-4)
  np.testing.assert_allclose(got[:, 0], x[:, 0], atol=0)  # position 0: the identity


@pytest.mark.parametrize('dims', [2, 4])
def test_only_the_leading_dims_rotate_and_as_a_head_of_that_size_would(dims):
  x, position = normal(B, T, Q, H), np.int32([[0, 1, 2, 17, 63, 5, 400]] * B)
  got = np.asarray(_rotate(x, position, 1e4, dims))
  alone = np.asarray(_rotate(x[..., :dims], position, 1e4, dims))
  np.testing.assert_allclose(got[..., :dims], alone, atol=1e-6)
  assert got[..., dims:].tobytes() == x[..., dims:].tobytes()
  assert np.abs(got[:, 1:, :, :dims] - x[:, 1:, :, :dims]).max(-1).min() > 1e-3


@pytest.mark.parametrize('dims', [H, 2])
def test_scores_after_rotation_depend_on_the_distance_alone(dims):
  q, k = normal(1, 1, 1, H), normal(1, 1, 1, H, seed=1)

  def score(i: int, j: int) -> float:
    a = _rotate(q, np.int32([[i]]), 1e4, dims)
    b = _rotate(k, np.int32([[j]]), 1e4, dims)
    return float(jnp.sum(a * b))

  assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
  assert abs(score(7, 3) - score(3, 7)) > 1e-3


def test_what_does_not_rotate_scores_the_same_at_any_distance():
  q, k = normal(1, 1, 1, H), normal(1, 1, 1, H, seed=1)
  q[..., :2] = 0  # looks for nothing among the dimensions that rotate
  scores = [
    float(jnp.sum(_rotate(q, np.int32([[i]]), 1e4, 2) * k)) for i in (0, 1, 9, 400)
  ]
  assert scores == [scores[0]] * 4 and abs(scores[0]) > 1e-2


def test_swiglu_equals_float64():
  x, wg, wu, wd = normal(B, T, 5), normal(5, 8), normal(5, 8, seed=1), normal(8, 5)
  gate = np.float64(x) @ wg
  want = (gate / (1 + np.exp(-gate)) * (np.float64(x) @ wu)) @ wd
  np.testing.assert_allclose(layers.mlp(x, wg, wu, wd), want, atol=1e-4)


def test_the_gradient_of_an_embedding_sums_over_repeated_ids():
  table, grad = normal(6, 3), normal(2, 4, 3)
  token = np.int32([[5, 0, 5, 5], [2, 0, 1, 5]])
  out, pull = jax.vjp(lambda w: embedding.embed(w, token), jnp.asarray(table))
  np.testing.assert_array_equal(out, table[token])
  want = np.zeros((6, 3))
  np.add.at(want, token, np.float64(grad))
  np.testing.assert_allclose(pull(jnp.asarray(grad))[0], want, atol=1e-5)


def test_gradients_equal_finite_differences():
  token = np.int32([[1, 1, 0]])
  segment, position = np.int32([[1, 1, 2]]), np.int32([[0, 1, 0]])

  @jax.jit
  def fn(table, scale, wg, wd):
    x = layers.rms_norm(embedding.embed(table, token), scale, 1e-6)
    q = _rotate(x.reshape(1, 3, 1, 4), position, 100.0, 2).reshape(1, 3, 2, 2)
    o = attention.packed(q, q[:, :, :1], q[:, :, 1:], segment, 2)
    return jnp.sum(jnp.square(layers.mlp(o.reshape(1, 3, 4), wg, wg, wd)))

  args = (normal(2, 4), normal(4), normal(4, 3), normal(3, 4))
  test_util.check_grads(fn, jax.tree.map(jnp.asarray, args), 1, ['rev'], 2e-2, 2e-2)


@pytest.mark.parametrize('scaling', ['llama3', 'yarn'])
def test_a_blend_of_no_width_is_yarn_s_alone(scaling):
  made = {'scaling': scaling, 'factor': 4.0, 'original': 64, 'low': 1.0, 'high': 1.0}
  if scaling == 'llama3':  # it would divide by zero
    with pytest.raises(ValueError, match=r'model\.rope\.low'):
      config_model.Rope(**made)
  else:
    assert np.isfinite(rope.frequencies(config_model.Rope(**made), 16)).all()
