"""A widened program is the same function, computed in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import float64


def test_a_program_with_loops_constants_and_infinities_is_computed_in_float64():
  table = np.linspace(0.1, 3.0, 7, dtype=np.float32)  # a constant array of the program

  def fn(x: jax.Array, n: jax.Array) -> dict[str, jax.Array]:
    def body(total: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
      return total + jnp.exp(row.astype(jnp.float32) * table).sum(), row.max()

    total, most = jax.lax.scan(body, jnp.float32(0), x)
    largest = jnp.where(x > 0, x, -jnp.inf).max() + 0.1
    return {'total': total * n, 'most': most, 'largest': largest}

  x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
  got = float64.run(fn, x, np.int32(3))
  wide, table64 = np.float64(x), np.float64(table)
  assert got['total'].dtype == np.float64
  # exp differs between libraries in the last place.
  want = 3 * np.exp(wide * table64).sum()
  np.testing.assert_allclose(got['total'], want, rtol=1e-14)
  np.testing.assert_array_equal(got['most'], wide.max(1))
  assert got['largest'] == wide.max() + np.float64(np.float32(0.1))


def test_what_depends_on_the_type_is_refused():
  with pytest.raises(ValueError, match='bitcast_convert'):
    float64.run(lambda x: jax.lax.bitcast_convert_type(x, jnp.int32), np.ones(3, 'f'))
