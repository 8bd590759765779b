"""Attention against plain NumPy in float64, and its own backward pass."""

from hypothesis import given, settings, strategies
import jax
from jax import test_util
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.model import attention
from tests import fixtures

B, T, Q, C, H = 2, 7, 4, 2, 6
_packed = jax.jit(attention.packed, static_argnums=4)
_cached = jax.jit(attention.cached)
_needed = jax.jit(attention.needed)
SEGMENT = np.int32([[1, 1, 1, 2, 2, 2, 2], [1, 2, 3, 3, 3, 0, 0]])
PREFIX = np.int32([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0, 0]])


def normal(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def seen(segment: np.ndarray, prefix: np.ndarray | None = None) -> np.ndarray:
  """bool [B, T, S]: earlier keys of the query's segment or of its prefix."""
  see = segment[:, :, None] == segment[:, None]
  if prefix is not None:
    see |= (prefix[:, :, None] == segment[:, None]) & (prefix[:, :, None] > 0)
  return see & np.tril(np.ones((segment.shape[1],) * 2, bool))


def attention64(q, k, v, mask) -> np.ndarray:
  """q [B, T, Q, H], k and v [B, S, C, H], mask [B, T, S]; one query at a time."""
  q, k, v = (np.float64(x) for x in (q, k, v))
  out = np.zeros((*q.shape[:3], v.shape[3]))
  for b, t, head in np.ndindex(q.shape[:3]):
    c = head * k.shape[2] // q.shape[2]
    at = np.flatnonzero(mask[b, t])
    score = k[b, at, c] @ q[b, t, head] / np.sqrt(q.shape[-1])
    out[b, t, head] = np.exp(score - fixtures.logsumexp64(score)) @ v[b, at, c]
  return out


def paged(
  k: np.ndarray, v: np.ndarray, S: int, spare: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Rows [B, J * S, C, H] in pages of S, shuffled, with rubbish in the spare ones."""
  rows, length, heads, _ = k.shape
  J = length // S
  table = np.random.default_rng(0).permutation(rows * J + spare).astype(np.int32)
  table_BJ = table[: rows * J].reshape(rows, J)
  k_PCHS = normal(rows * J + spare, heads, k.shape[3], S, seed=9)
  v_PCSU = normal(rows * J + spare, heads, S, v.shape[3], seed=9)
  for b, j in np.ndindex(rows, J):
    part = slice(j * S, (j + 1) * S)
    k_PCHS[table_BJ[b, j]] = k[b, part].transpose(1, 2, 0)
    v_PCSU[table_BJ[b, j]] = v[b, part].transpose(1, 0, 2)
  return k_PCHS, v_PCSU, table_BJ


@pytest.mark.parametrize('S', [2, 6, 12])
def test_attention_to_pages_equals_one_query_at_a_time(S):
  q, k, v = normal(B, T, Q, H), normal(B, 12, C, H), normal(B, 12, C, 5, seed=1)
  position = np.random.default_rng(0).integers(0, 12, (B, T)).astype(np.int32)
  mask = np.arange(12) <= position[:, :, None]
  k_PCHS, v_PCSU, table_BJ = paged(k, v, S, spare=3)
  got = _cached(q, k_PCHS, v_PCSU, table_BJ, position)
  want = attention64(q, k, v, mask)
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_values_that_are_the_first_dimensions_of_the_keys_need_no_array():
  q, k = normal(B, T, Q, H), normal(B, 12, 1, H)
  k_PCHS, v_PCSU, table_BJ = paged(k, k[..., :4], 4)
  position = np.full((B, T), 10, np.int32)
  want = _cached(q, k_PCHS, v_PCSU, table_BJ, position)
  got = jax.jit(attention.cached, static_argnames='latent')(
    q, k_PCHS, None, table_BJ, position, latent=4
  )
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_row_is_bit_for_bit_the_same_beside_a_longer_one():
  """The longer one makes the loop go on over pages that the row does not reach."""
  q, k, v = normal(B, 1, Q, H), normal(B, 24, C, H), normal(B, 24, C, H, seed=1)
  k_PCHS, v_PCSU, table_BJ = paged(k, v, 4)
  short, long = np.int32([[5], [3]]), np.int32([[5], [22]])
  alone = np.asarray(_cached(q, k_PCHS, v_PCSU, table_BJ, short))
  beside = np.asarray(_cached(q, k_PCHS, v_PCSU, table_BJ, long))
  np.testing.assert_array_equal(alone[0], beside[0])
  assert (alone[1] != beside[1]).any()


def test_a_query_beyond_the_pages_gives_no_nan_and_makes_nobody_look_further():
  q, k = normal(B, 1, Q, H), normal(B, 24, C, H)
  k_PCHS, v_PCSU, table_BJ = paged(k, k, 4)
  k_PCHS[table_BJ[:, 2:]] = v_PCSU[table_BJ[:, 2:]] = np.nan  # nobody gets there
  got = np.asarray(_cached(q, k_PCHS, v_PCSU, table_BJ, np.int32([[7], [24]])))
  assert np.isfinite(got).all()


@pytest.mark.parametrize('chunk', [3, 100])
def test_packed_attention_is_causal_within_segments_for_any_chunk(chunk):
  q, k, v = normal(B, T, Q, H), normal(B, T, C, H), normal(B, T, C, H, seed=1)
  segment = np.int32([[1, 1, 1, 2, 2, 2, 2], [1, 2, 3, 3, 3, 3, 3]])
  got = _packed(q, k, v, segment, chunk)
  np.testing.assert_allclose(got, attention64(q, k, v, seen(segment)), atol=1e-5)


def test_a_query_sees_its_prefix_and_no_other_segment():
  q, k, v = normal(B, T, Q, H), normal(B, T, C, H), normal(B, T, C, H, seed=1)
  got = np.asarray(_packed(q, k, v, SEGMENT, 2, PREFIX))
  want = attention64(q, k, v, seen(SEGMENT, PREFIX))
  np.testing.assert_allclose(got, want, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(strategies.integers(0, 2**32 - 1), strategies.booleans())
def test_no_block_is_left_out_that_a_query_sees(seed, in_order):
  rng = np.random.default_rng(seed)
  segment = rng.integers(0, 6, (2, 24)).astype(np.int32)
  if in_order:
    segment = np.sort(segment, axis=1)
  prefix = np.where(segment > 3, rng.integers(0, 4, (2, 24)), 0).astype(np.int32)
  blocks = [x.reshape(2, 6, 4).swapaxes(0, 1) for x in (segment, prefix)]
  key, count = (np.asarray(x) for x in _needed(*blocks))
  see = seen(segment, prefix).any(0).reshape(6, 4, 6, 4).any((1, 3))
  for i in range(6):
    found = key[i, : count[i]].tolist()
    assert set(np.flatnonzero(see[i])) <= set(found)
    assert found == sorted(set(found)) and found[-1] == i


def test_blocks_of_other_segments_are_skipped():
  # A prompt of 2 blocks with two tails of 1 and 2, then a segment of 1, and padding.
  segment = np.repeat([[1, 2, 3, 4, 0]], [8, 4, 8, 4, 4], axis=1)
  prefix = np.repeat([[0, 1, 1, 0, 0]], [8, 4, 8, 4, 4], axis=1)
  blocks = [jnp.asarray(x.reshape(7, 1, 4), jnp.int32) for x in (segment, prefix)]
  key, count = attention.needed(*blocks)
  want = [[0], [0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 3, 4], [5], [6]]
  assert [k[:c].tolist() for k, c in zip(np.asarray(key), count, strict=True)] == want


@pytest.mark.parametrize('chunk, prefix', [(1, None), (3, PREFIX), (100, PREFIX)])
def test_the_backward_pass_equals_the_derivative_of_the_plain_form(chunk, prefix):
  """JAX derives the gradient of the plain form."""
  q, k, v = normal(B, T, Q, H), normal(B, T, C, H), normal(B, T, C, H, seed=1)
  weight = jnp.asarray(normal(B, T, Q, H, seed=2))
  mask = seen(SEGMENT, prefix)

  def plain(q, k, v):
    k, v = (jnp.repeat(x, Q // C, axis=2) for x in (k, v))
    score = jnp.einsum('BTQH,BSQH->BQTS', q, k) / np.sqrt(H).astype(np.float32)
    weigh = jax.nn.softmax(jnp.where(mask[:, None], score, -1e30), axis=-1)
    return jnp.sum(jnp.einsum('BQTS,BSQH->BTQH', weigh, v) * weight)

  def ours(q, k, v):
    return jnp.sum(attention.packed(q, k, v, SEGMENT, chunk, prefix) * weight)

  args = tuple(map(jnp.asarray, (q, k, v)))
  want = jax.jit(jax.grad(plain, (0, 1, 2)))(*args)
  got = jax.jit(jax.grad(ours, (0, 1, 2)))(*args)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6)


def test_the_backward_pass_equals_finite_differences():
  args = tuple(
    map(jnp.asarray, (normal(1, 4, 2, 2), normal(1, 4, 1, 2), normal(1, 4, 1, 2)))
  )
  segment = np.int32([[1, 1, 1, 2]])
  test_util.check_grads(
    lambda q, k, v: _packed(q, k, v, segment, 2), args, 1, ['rev'], 2e-2, 2e-2
  )


def test_scores_that_overflow_when_exponentiated_give_finite_gradients():
  q, k = 1e3 * normal(B, T, Q, H), 1e3 * normal(B, T, C, H)
  of = jax.jit(jax.grad(lambda q, k: _packed(q, k, k, SEGMENT, 3).sum(), (0, 1)))
  grads = of(q, k)
  assert all(np.isfinite(np.asarray(g)).all() for g in grads)


def test_memory_of_the_backward_pass_is_linear_in_the_row():
  def kept(T: int) -> int:
    shapes = [jax.ShapeDtypeStruct((1, T, 1, 2), jnp.float32) for _ in range(3)]
    segment = jax.ShapeDtypeStruct((1, T), jnp.int32)
    _, saved = jax.eval_shape(
      lambda q, k, v, s: attention._forward(q, k, v, s, 16), *shapes, segment
    )
    return sum(x.size for x in jax.tree.leaves(saved))

  assert kept(128) == 2 * kept(64)
