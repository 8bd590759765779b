"""Attention to rows that are split over devices, beside the same on one.

Run as `python -m tests.model_long_rows_main`, in a process of its own with 8 CPU
devices (XLA_FLAGS). Prints one JSON object: {name of a check: number}.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from swe17.model import attention, ring_attention, sharding

LONG = 131_072
_SHAPE = (2, 64, 4, 2, 8, 6)  # B, T, Q, C, H, U
# Mesh, chunk, shape.
CASES = {
  'context': ({'context': 8}, 4, _SHAPE),
  'one block a shard': ({'context': 8}, 100, _SHAPE),
  'blocks that do not divide': ({'context': 4, 'fsdp': 2}, 7, (2, 48, 4, 2, 8, 6)),
  'heads split': ({'context': 2, 'tensor': 2, 'fsdp': 2}, 8, _SHAPE),
  'heads that do not divide': ({'context': 2, 'tensor': 4}, 8, (1, 64, 6, 3, 8, 6)),
}


def inputs(B: int, T: int, Q: int, C: int, H: int, U: int) -> tuple:
  """Random q, k, v, a weight for the output, and segments that cross shards."""
  rng = np.random.default_rng([B, T, Q, C, H, U])
  q, k, v, w = (
    np.float32(rng.normal(size=s))
    for s in ((B, T, Q, H), (B, T, C, H), (B, T, C, U), (B, T, Q, U))
  )
  segment = np.sort(rng.integers(1, 4, (B, T)), axis=1)
  segment[:, -T // 8 :] = 0  # padding
  return q, k, v, w, np.int32(segment)


def value_and_gradient(fn, chunk: int, shared: bool = False):
  """`fn` of segments alone or, `shared`, with the first a prefix of all others."""

  def loss(q, k, v, w, segment):
    prefix = (jnp.where(segment > 1, 1, 0),) if shared else ()
    out = fn(q, k, v, segment, chunk, *prefix)
    return jnp.sum(out * w), out

  return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def difference(sizes: dict[str, int], chunk: int, shape: tuple) -> float:
  """Largest difference of output and gradients from attention without a mesh.

  With heads split, segments also share a prefix.
  """
  args, shared = inputs(*shape), sizes.get('tensor', 1) > 1
  want = value_and_gradient(attention.packed, 16, shared)(*args)
  with jax.set_mesh(sharding.mesh(sizes)):
    got = value_and_gradient(ring_attention.packed, chunk, shared)(*args)
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def compiled(T: int, chunk: int, dtype: str = 'float32'):
  """The gradient lowered from abstract arrays, on a context of 8."""
  shapes = ((1, T, 2, 8), (1, T, 1, 8), (1, T, 1, 8), (1, T, 2, 8))
  args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
  segment = jax.ShapeDtypeStruct((1, T), jnp.int32)
  on = sharding.mesh({'context': 8})
  split = jax.sharding.NamedSharding(on, jax.P(None, 'context'))
  with jax.set_mesh(on):
    fn = value_and_gradient(ring_attention.packed, chunk)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in args]
    return fn.lower(*args, segment)


def refused() -> str:
  """What is said of a row of 60 tokens on a context of 8."""
  q, k, v, _, segment = inputs(1, 60, 2, 2, 4, 4)
  try:
    with jax.set_mesh(sharding.mesh({'context': 8})):
      ring_attention.packed(q, k, v, segment, 8)
  except ValueError as e:
    return str(e)
  return ''


def main() -> None:
  found = {name: difference(*case) for name, case in CASES.items()}
  temporary = {
    T: compiled(T, 64).compile().memory_analysis().temp_size_in_bytes
    for T in (4096, 8192)
  }
  found['memory at 2 T'] = temporary[8192] / temporary[4096]
  text = compiled(LONG, 2048, 'bfloat16').as_text()
  assert 'collective_permute' in text
  print(json.dumps(found | {'long rows': len(text), 'refused': refused()}))


if __name__ == '__main__':
  sys.exit(main())
