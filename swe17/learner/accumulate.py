"""Sums over micro-batches: in order, or in a fixed binary tree that replicas can share.

  tree(l, i) = 0 + tree(l - 1, 2 i) + tree(l - 1, 2 i + 1)      tree(0, i) = one(i)

The order of a float sum changes its bits. In the tree it is fixed by micro-batch ids
alone: missing ids at the end are exact zeros, and R replicas (a power of two) that hold
equal aligned ranges of ids each sum a subtree, then the tops are joined pair by pair by
an explicit permutation. So 1, 2, 4, 8 replicas give the same bits at equal micro-batch
shapes (FACTS.md 6, DESIGN.md 6). It costs log2(M) copies of what is summed.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from swe17.learner import state as st
from swe17.model import lora
from swe17.model import params as p

# (params, one micro-batch [B, T]) -> (loss summed over tokens, additive pieces)
LossFn = Callable[[p.Params, st.Batch], tuple[jax.Array, Any]]
# A micro-batch id (int32 scalar) -> what is summed, a tree of arrays.
One = Callable[[jax.Array], Any]
Add = Callable[[Any, Any], Any]
AXIS = 'replica'


def gradient(
  loss_fn: LossFn,
  params: p.Params,
  batch: st.Batch,
  *,
  add: Add,
  exact: bool = False,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, Any, p.Params]:
  """Loss, pieces and gradient summed over the `batch.micro` leading micro-batches.

  Args:
    loss_fn: loss of one micro-batch.
    params: where the gradient is taken; by adapters alone, if it has any.
    batch: micro-batches [M, B, ...].
    add: joins two (loss, pieces, gradient).
    exact: sum in the fixed tree.
    mesh: with `exact`, its axis `replica` shares the micro-batches.

  Raises:
    ValueError: replicas without `exact`, or a number of them that cuts no tree.
  """
  if mesh is None:
    return _local(loss_fn, params, batch, add, exact)
  if not exact:
    raise ValueError('a mesh of replicas: got optim.exact_sum=False, want True')
  R = mesh.shape[AXIS]
  each = share(batch.token_MBT.shape[0], R)

  def mine(params: p.Params, batch: st.Batch) -> tuple[jax.Array, Any, p.Params]:
    micro = jnp.clip(batch.micro - jax.lax.axis_index(AXIS) * each, 0, each)
    held = dataclasses.replace(batch, micro=micro)
    return joined(_local(loss_fn, params, held, add, exact), R, add=add)

  batch = jax.tree.map(lambda x: _padded(x, R * each) if jnp.ndim(x) else x, batch)
  held_by = jax.tree.map(lambda x: jax.P(AXIS) if jnp.ndim(x) else jax.P(), batch)
  return jax.shard_map(
    mine,
    mesh=mesh,
    in_specs=(jax.P(), held_by),
    out_specs=jax.P(),
    axis_names={AXIS},
    check_vma=False,  # the sum is equal on all replicas by construction
  )(params, batch)


def _local(
  loss_fn: LossFn, params: p.Params, batch: st.Batch, add: Add, exact: bool
) -> tuple[jax.Array, Any, p.Params]:
  def one(i: jax.Array) -> tuple[jax.Array, Any, p.Params]:
    micro = jax.tree.map(lambda x: x[i] if jnp.ndim(x) else x, batch)

    def loss_of(trained: p.Tree) -> tuple[jax.Array, Any]:
      return loss_fn(lora.moved(params, trained), micro)

    trained = lora.trained(params)
    (loss, pieces), grad = jax.value_and_grad(loss_of, has_aux=True)(trained)
    # Summed in float32, whatever the weights were held in.
    return loss, pieces, jax.tree.map(lambda g: g.astype(jnp.float32), grad)

  if not exact:
    return in_order(one, batch.micro, add=add)
  M = batch.token_MBT.shape[0]
  if M == 1:
    # Indexing an axis of one is simplified away, and what follows compiled otherwise.
    batch = jax.tree.map(lambda x: _padded(x, 2) if jnp.ndim(x) else x, batch)
  return in_tree(one, batch.micro, M, add=add)


def _padded(x: jax.Array, M: int) -> jax.Array:
  """Zeros after the last micro-batch, M in all."""
  return jnp.concatenate([x, jnp.zeros((M - x.shape[0], *x.shape[1:]), x.dtype)])


def in_order(one: One, micro: jax.Array, *, add: Add) -> Any:
  """one(0) + one(1) + ... + one(micro - 1), left to right."""

  def body(i: jax.Array, total: Any) -> Any:
    return add(total, one(i))

  return jax.lax.fori_loop(0, micro, body, _zeros(one))


def in_tree(one: One, micro: jax.Array, M: int, *, add: Add) -> Any:
  """Sum over ids below `micro` in the fixed tree over M ids, rounded up to 2^n.

  Args:
    one: value of a micro-batch, computed for ids below `micro` only.
    micro: int32 scalar, how many there are.
    M: static bound of `micro`; a larger one gives the same bits.
    add: joins two values; its neutral element must be zeros.
  """
  zeros, one = _zeros(one), jax.jit(one)

  def tree(level: int, first: jax.Array) -> Any:
    # Nested loops are the binary counter: the carry of each is one partial sum. A leaf
    # is a loop too (of 0 or 1 turns), so that the micro-batch is compiled by itself
    # and no addition is fused into its last multiplication, whatever comes around it.
    size = 1 << max(level - 1, 0)
    turns = jnp.clip((micro - first + size - 1) // size, 0, 2 if level else 1)

    def body(j: jax.Array, total: Any) -> Any:
      at = first + j * size
      return add(total, tree(level - 1, at)) if level else one(at)

    return jax.lax.fori_loop(jnp.int32(0), turns, body, zeros)

  # Never a bare leaf: adding to 0 is what makes a lone -0 the 0 that any sum has.
  return tree(max((M - 1).bit_length(), 1), jnp.int32(0))


def joined(total: Any, R: int, *, add: Add, axis: str = AXIS) -> Any:
  """The top of the tree over `R` replicas: every replica gets the same sum.

  To be called under `shard_map` over `axis`. At level l a replica joins with the one
  whose number differs in bit l; a + b and b + a have the same bits.
  """
  for level in range(R.bit_length() - 1):
    pairs = [(r, r ^ (1 << level)) for r in range(R)]
    permute = functools.partial(jax.lax.ppermute, axis_name=axis, perm=pairs)
    total = add(total, jax.tree.map(permute, total))
  return total


def share(M: int, R: int) -> int:
  """Ids that each of `R` replicas holds: a power of two, with R * share >= M.

  Raises:
    ValueError: R is not a power of two.
  """
  if R < 1 or R & (R - 1):
    raise ValueError(f'optim.exact_sum with {R} replicas: got {R}, want a power of two')
  return 1 << (-(-M // R) - 1).bit_length()


def _zeros(one: One) -> Any:
  shapes = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
  return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
