"""NVFP4 fake quantisation: values that a 4-bit GEMM would see, held in float32.

Elements are E2M1, every block of 16 along the contracted axis has an E4M3 scale s, and
all blocks of a token (of a matrix, for weights) share a float32 scale g (NVFP4,
"Pretraining Large Language Models with NVFP4", arXiv:2509.25149; per-token g, IEEE
division and bf16 backward: Composer 2 report, arXiv:2603.24477). A scale shared by a
whole tensor of activations would let a later token change an earlier one.

The order of operations, the same for sampler and learner, each in float32 and rounded
to nearest even, never replaced by a reciprocal or a merged division:

  a = max |x| over what shares g         g = a / 2688             (2688 = 6 * 448)
  b = max |x| over the block             s = E4M3((b / g) / 6)    at most 448
  q = E2M1(x / (s * g)), at most 6       y = (q * s) * g          0 where s = 0

Where a < 2^-100 everything is 0, so that no step meets a denormal (which some backends
flush). Where a is NaN or infinite everything that shares g is NaN: never hidden.
"""

import functools

from flax import struct
import jax
import jax.numpy as jnp

BLOCK = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
SMALLEST = 2.0**-100


@struct.dataclass
class Quantised:
  """q, s and g of the header. The last axis is the contracted one.

  Attributes:
    q: float32 [..., I / 16, 16], values of E2M1.
    s: float32 [..., I / 16, 1], values of E4M3.
    g: float32, broadcasts against both.
  """

  q: jax.Array
  s: jax.Array
  g: jax.Array


def _rounded(x: jax.Array, mantissa: int, exponent: int, largest: float) -> jax.Array:
  """`x` to a small float: mantissa bits, least normal exponent, saturating.

  Multiples of a power of two, rounded half to even: exact in float32, and the same on
  every backend, where casts to 8 or 4 bits may round twice.
  """
  bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
  e = jnp.maximum((bits >> 23) - 127, exponent)
  # 2^(mantissa - e) and 2^(e - mantissa) from their bits; e may be up to 127.
  e = jnp.clip(e - mantissa, -126, 126)
  down = jax.lax.bitcast_convert_type((127 - e) << 23, jnp.float32)
  up = jax.lax.bitcast_convert_type((127 + e) << 23, jnp.float32)
  return jnp.clip(jnp.round(x * down) * up, -largest, largest)


def e2m1(x: jax.Array) -> jax.Array:
  """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to even."""
  return _rounded(x, 1, 0, E2M1_MAX)


def e4m3(x: jax.Array) -> jax.Array:
  """Nearest value of E4M3 (no infinity, at most 448), ties to even."""
  return _rounded(x, 3, -6, E4M3_MAX)


def _over(x: jax.Array, by: jax.Array | float) -> jax.Array:
  """IEEE x / by: the barrier keeps XLA from multiplying by a rounded reciprocal, and
  from merging two divisions into one."""
  by = jax.lax.optimization_barrier(jnp.broadcast_to(jnp.float32(by), x.shape))
  return jax.lax.optimization_barrier(x / by)


def quantise(x: jax.Array, *, shared: int) -> Quantised:
  """Quantises float32 `x` in blocks of 16 along its last axis.

  Args:
    x: [..., I]; I a multiple of 16.
    shared: how many of the last axes share one g: 1 for tokens, 2 for matrices.
  """
  *lead, I = x.shape
  if I % BLOCK:
    raise ValueError(f'NVFP4: got {I} elements to contract, want a multiple of {BLOCK}')
  if not 1 <= shared <= x.ndim:
    raise ValueError(f'NVFP4: got {shared=}, want 1 to {x.ndim} axes of {x.shape}')
  x = x.astype(jnp.float32).reshape(*lead, I // BLOCK, BLOCK)
  over = tuple(range(x.ndim - shared - 1, x.ndim))
  a = jnp.max(jnp.abs(x), axis=over, keepdims=True)
  finite = jnp.isfinite(a)
  some = finite & (a >= SMALLEST)
  x = jnp.where(some, x, 0.0)
  g = _over(jnp.where(some, a, 1.0), E2M1_MAX * E4M3_MAX)
  b = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
  s = e4m3(_over(_over(b, g), E2M1_MAX))
  q = e2m1(_over(x, jnp.where(s == 0, 1.0, s) * g))
  return Quantised(jnp.where(s == 0, 0.0, q), s, jnp.where(finite, g, jnp.nan))


def dequantise(parts: Quantised) -> jax.Array:
  """(q * s) * g as float32 [..., I]; q * s is exact."""
  y = jax.lax.optimization_barrier(parts.q * parts.s) * parts.g
  return y.reshape(*y.shape[:-2], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fake(x: jax.Array, shared: int) -> jax.Array:
  """Quantised and back, float32 like `x`; the gradient passes straight through.

  Args:
    x: [..., I], quantised in blocks of its last axis.
    shared: how many of the last axes share one g: 1 for tokens, 2 for matrices.
  """
  return dequantise(quantise(x, shared=shared))


def _fake_fwd(x: jax.Array, shared: int) -> tuple[jax.Array, None]:
  return fake(x, shared), None


def _fake_bwd(shared: int, _: None, dy: jax.Array) -> tuple[jax.Array]:
  del shared
  return (dy,)


fake.defvjp(_fake_fwd, _fake_bwd)


def tokens(x_TI: jax.Array) -> jax.Array:
  """Fake-quantised activations [..., T, I]: every token has its own g."""
  return fake(x_TI, 1)


def weights(w_IO: jax.Array) -> jax.Array:
  """Fake-quantised matrices [..., I, O], in blocks along I; one g a matrix."""
  return jnp.swapaxes(fake(jnp.swapaxes(w_IO, -1, -2), 2), -1, -2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def project(x_TI: jax.Array, w_IO: jax.Array, activations: bool) -> jax.Array:
  """x @ w with quantised operands, float32 [T, O]; the backward pass is bfloat16's.

  Gradients are those of the product of the *unquantised* operands, each and the
  incoming gradient rounded to bfloat16, summed in float32.

  Args:
    x_TI: float32 activations, quantised with `activations`, one g a token.
    w_IO: float32 weights of one expert, always quantised.
    activations: whether `x_TI` is quantised too.
  """
  return (tokens(x_TI) if activations else x_TI) @ weights(w_IO)


def _project_fwd(
  x_TI: jax.Array, w_IO: jax.Array, activations: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return project(x_TI, w_IO, activations), (x_TI, w_IO)


def _bf16(x: jax.Array) -> jax.Array:
  return x.astype(jnp.bfloat16).astype(jnp.float32)


def _project_bwd(
  activations: bool, kept: tuple[jax.Array, jax.Array], dy_TO: jax.Array
) -> tuple[jax.Array, jax.Array]:
  del activations
  x_TI, w_IO = map(_bf16, kept)
  dy_TO = _bf16(dy_TO)
  return dy_TO @ w_IO.T, x_TI.T @ dy_TO


project.defvjp(_project_fwd, _project_bwd)
