"""How the heads are split over a mesh: the vocabulary over one axis, rows over others.

Each head is differentiated as a whole (`custom_vjp` around `shard_map`, never through
it), so what a shard computes and what is summed over which axis is written out in its
forward and backward pass, and nothing depends on transposition rules.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

Plan = TypeVar('Plan')


@dataclasses.dataclass(frozen=True)
class Shard:
  """Axes of a mesh. Their sizes must divide V and the number of tokens."""

  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
  vocab: str  # axis that the rows of the unembedding are split over
  rows: tuple[str, ...] = ()  # axes that tokens are split over


@dataclasses.dataclass(frozen=True)
class Static(Generic[Plan]):
  """What a head is told beside arrays: how its work is cut, and how it is split."""

  plan: Plan
  shard: Shard | None


def spread(
  fn: Callable[..., Any], shard: Shard | None, ins: str, outs: str
) -> Callable[..., Any]:
  """`fn` of local arrays as a function of global ones.

  One letter an argument and a result: X is split over tokens, V over the vocabulary.
  Without a shard it is `fn` itself.
  """
  if shard is None:
    return fn
  rows = shard.rows if shard.rows else None
  spec = {'X': jax.P(rows), 'V': jax.P(shard.vocab)}
  return jax.shard_map(
    fn,
    mesh=shard.mesh,
    in_specs=tuple(spec[letter] for letter in ins),
    out_specs=tuple(spec[letter] for letter in outs),
    check_vma=False,
  )


def offset(shard: Shard | None, V: int) -> jax.Array | int:
  """First id of this shard's `V` rows."""
  return 0 if shard is None else jax.lax.axis_index(shard.vocab) * V


def sum_vocab(x: jax.Array, shard: Shard | None) -> jax.Array:
  """The sum over shards of the vocabulary."""
  return x if shard is None else jax.lax.psum(x, shard.vocab)


def max_vocab(x: jax.Array, shard: Shard | None) -> jax.Array:
  """The maximum over shards of the vocabulary."""
  return x if shard is None else jax.lax.pmax(x, shard.vocab)


def sum_rows(x: jax.Array, shard: Shard | None) -> jax.Array:
  """The sum over shards of the tokens."""
  return jax.lax.psum(x, shard.rows) if shard is not None and shard.rows else x


def lanes(
  order_X: jax.Array, first: jax.Array | int, C: int, end: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The tokens of one chunk of a list: indices, whether each is one, where it writes.

  A lane past `end` reads some token and writes beyond the array, which drops it.
  """
  X = order_X.shape[0]
  at_C = first + jnp.arange(C)
  x_C = order_X[jnp.minimum(at_C, X - 1)]
  valid_C = at_C < end
  return x_C, valid_C, jnp.where(valid_C, x_C, X + jnp.arange(C))
