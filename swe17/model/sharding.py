"""Where arrays lie on a mesh: one table from logical axes to mesh axes.

  replica   whole copies of the model, rows of the batch split
  fsdp      parameters and rows of the batch split
  expert    experts split; rows of the batch too, and what is not an expert's
  context   positions of a row split
  tensor    heads, feed-forward and vocabulary split

Axes are Auto: the compiler places what is not said here. What is said: every parameter
(`shardings`), the batch, and the residual stream at the boundary of a block
(`constrain`). Functions find the mesh by `jax.set_mesh`; without one nothing is done.
"""

from collections.abc import Sequence
import math

import jax
import numpy as np

from swe17.model import params as p

AXES = ('replica', 'fsdp', 'expert', 'context', 'tensor')
BATCH = ('replica', 'fsdp', 'expert')  # what rows are split over

# Logical axis -> mesh axes, the first that fit. In this order: an axis of the mesh is
# used once in an array, and experts go before what else could use theirs.
RULES: dict[str, tuple[str, ...]] = {
  'experts': ('expert',),
  'vocab': ('tensor',),
  'heads': ('tensor',),
  'kv': ('tensor',),
  'ffn': ('tensor',),
  'expert_ffn': ('tensor',),
  'embed': ('fsdp', 'expert'),
  'q_rank': ('fsdp', 'expert'),
  'kv_rank': ('fsdp', 'expert'),
  # Of an optimiser's stack, in the order of what they are exchanged with.
  'matrices': ('fsdp', 'expert', 'replica', 'context', 'tensor'),
  'expert_matrices': ('expert', 'fsdp', 'replica', 'context', 'tensor'),
  'batch': BATCH,
  'time': ('context',),
  # Never split: layers are scanned, heads are whole, routers and ranks are small.
  'layer': (),
  'head': (),
  'router': (),
  'ngram': (),
  'rank': (),
}


def mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None):
  """A mesh with all of `AXES`, Auto; what `sizes` leaves out has size 1.

  ValueError if the product is not the number of devices.
  """
  unknown = sorted(set(sizes) - set(AXES))
  devices = jax.devices() if devices is None else devices
  shape = tuple(sizes.get(axis, 1) for axis in AXES)
  if unknown or math.prod(shape) != len(devices):
    raise ValueError(
      f'mesh: got {sizes} for {len(devices)} devices, want axes among {AXES} whose '
      'product is that number'
    )
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.sharding.Mesh(np.reshape(devices, shape), AXES, axis_types=auto)


def spec(
  names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]
) -> jax.sharding.PartitionSpec:
  """The partition of an array with these logical axes on a mesh of these sizes.

  A dimension that a mesh axis does not divide stays whole along it.
  """
  used: set[str] = set()
  found: dict[int, tuple[str, ...]] = {}
  for i in sorted(range(len(names)), key=lambda i: list(RULES).index(names[i])):
    taken: tuple[str, ...] = ()
    for axis in RULES[names[i]]:
      size = math.prod(sizes.get(a, 1) for a in (*taken, axis))
      if sizes.get(axis, 1) > 1 and axis not in used and shape[i] % size == 0:
        taken += (axis,)
    used |= set(taken)
    found[i] = taken
  return jax.P(*(found[i] or None for i in range(len(names))))


def shardings(abstract: p.Tree, on: jax.sharding.Mesh) -> p.Tree:
  """A NamedSharding for every `Leaf` of `params.abstract`."""
  sizes = dict(on.shape)

  def of(leaf: p.Leaf) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(on, spec(leaf.axes, leaf.shape, sizes))

  return jax.tree.map(of, abstract)


def like(tree: p.Tree, abstract: p.Tree, on: jax.sharding.Mesh) -> p.Tree:
  """Shardings of a tree that holds parameter-shaped leaves: an optimiser's state.

  A leaf whose path ends as a parameter's does, with its shape, lies as that parameter;
  every other one (a count) is on all devices.
  """
  table = {
    jax.tree_util.keystr(path): (leaf.shape, s)
    for (path, leaf), s in zip(
      jax.tree_util.tree_leaves_with_path(abstract),
      jax.tree.leaves(shardings(abstract, on)),
      strict=True,
    )
  }
  whole = jax.sharding.NamedSharding(on, jax.P())

  def of(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
    for start in range(len(path)):
      shape, found = table.get(jax.tree_util.keystr(path[start:]), (None, whole))
      if shape == leaf.shape:
        return found
    return whole

  return jax.tree_util.tree_map_with_path(of, tree)


def current() -> dict[str, int]:
  """Sizes of the mesh that is set; empty without one.

  Axes that a `shard_map` around holds are not the compiler's to place: they are left
  out, and with them a mesh that has no others.
  """
  on = jax.sharding.get_abstract_mesh()
  auto = jax.sharding.AxisType.Auto
  kinds = zip(on.axis_names, on.axis_types, strict=True)
  return {axis: on.shape[axis] for axis, kind in kinds if kind == auto}


def dealt(x: jax.Array, name: str) -> jax.Array:
  """`x` with its first axis, of that logical name, over all mesh axes of its rule.

  The compiler may place the other axes. It knows how to exchange one group of mesh axes
  between two axes of an array (all-to-all), not all at once: they come step by step.
  """
  for axes in _steps(name):
    x = _first_over(x, axes)
  return x


def gathered(x: jax.Array, name: str, *names: str) -> jax.Array:
  """The way back from `dealt`, to `names`."""
  for axes in reversed(_steps(name)[:-1]):
    x = _first_over(x, axes)
  return constrain(x, *names)


def _steps(name: str) -> list[tuple[str, ...]]:
  """Leading mesh axes of a rule: first those that parameters are split over."""
  axes = tuple(axis for axis in RULES[name] if current()[axis] > 1)
  split = sum(axis in ('fsdp', 'expert') for axis in axes)
  return [axes[:n] for n in range(max(split, 1), len(axes) + 1)]


def _first_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  free = [jax.P.UNCONSTRAINED] * (x.ndim - 1)
  return jax.lax.with_sharding_constraint(x, jax.P(axes, *free))


def constrain(x: jax.Array, *names: str) -> jax.Array:
  """Says where `x`, with these logical axes ('' = whole), lies on the current mesh."""
  sizes = current()
  if not sizes:
    return x
  axes = [name or 'layer' for name in names]
  return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, sizes))
