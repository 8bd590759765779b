"""Where the learner's arrays lie: on one device, or on a mesh (`mesh` in the settings).

  open -> init: parameters are born split, never whole on one device
       -> state: the optimiser's part lies as the parameters do
       -> part, put: each process gives its own part of a batch, [M, B, T, ...]
       -> jit: the step, whose state comes out where it went in

On one device no mesh is set and nothing is said: the program is as without this file.

With `optim.exact_sum` and several replicas, each holds a whole copy, and micro-batches
of its own (learner/accumulate.py). No other axis may be above 1 then: what splits a
product changes the order of its sum.

On several processes (learner/team.py) all of them run the same program, on a mesh over
all of their devices.
"""

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from swe17 import config
from swe17.learner import state as st
from swe17.model import params as p
from swe17.model import sharding


@dataclasses.dataclass(frozen=True)
class Devices:
  """A mesh (None: one device) and what lies on it.

  Attributes:
    leaves: the parameters' shapes and axes, `params.abstract`.
    whole: every device holds all of the parameters; replicas share micro-batches.
  """

  leaves: p.Tree
  mesh: jax.sharding.Mesh | None = None
  whole: bool = False

  @property
  def replicas(self) -> jax.sharding.Mesh | None:
    """The mesh whose replicas share the exact sum, if they do."""
    return self.mesh if self.whole else None


def open(
  cfg: config.Config, vocab: int, devices: Sequence[jax.Device] | None = None
) -> Devices:
  """The mesh of `cfg.mesh` on `devices` (None: all).

  Raises:
    ValueError: their number, or a size that the mesh does not divide.
  """
  sizes, leaves = cfg.mesh.sizes, p.abstract(cfg.model, vocab)
  count = math.prod(sizes.values())
  if count == 1:
    return Devices(leaves)
  rows = cfg.mesh.replica * cfg.mesh.fsdp * cfg.mesh.expert
  whole = cfg.optim.exact_sum and cfg.mesh.replica > 1
  if whole and count > cfg.mesh.replica:
    raise ValueError(
      f'optim.exact_sum with mesh {sizes}: got other axes beside replica, want 1 (what '
      'splits a product changes the order of its sum)'
    )
  _divides('batch.micro_rows', cfg.batch.micro_rows, rows * (not whole) or 1, 'rows')
  _divides('batch.row_length', cfg.batch.row_length, cfg.mesh.context, 'context')
  _divides('the vocabulary', vocab, cfg.mesh.tensor, 'tensor')
  if cfg.model.moe.experts:
    _divides('model.moe.experts', cfg.model.moe.experts, cfg.mesh.expert, 'expert')
    _divides('model.moe.ffn', cfg.model.moe.ffn, cfg.mesh.tensor, 'tensor')
  on = sharding.mesh(sizes, devices)
  if whole:  # without axes that the compiler would place
    axes = (jax.sharding.AxisType.Auto,)
    on = jax.sharding.Mesh(on.devices.reshape(-1), ('replica',), axis_types=axes)
  return Devices(leaves, on, whole)


def _divides(name: str, value: int, by: int, axis: str) -> None:
  if value % by:
    axis = 'replica * fsdp * expert' if axis == 'rows' else axis
    raise ValueError(f'{name}: got {value}, want a multiple of mesh {axis}={by}')


def scope(on: Devices) -> contextlib.AbstractContextManager:
  """Sets the mesh, for what is traced inside."""
  if on.mesh is None or on.whole:
    return contextlib.nullcontext()
  return jax.set_mesh(on.mesh)


def init(on: Devices, key: jax.Array) -> p.Params:
  """Initial parameters, each shard drawn where it lies."""
  if on.mesh is None:
    return p.init(on.leaves, key)
  born = jax.jit(lambda key: p.init(on.leaves, key), out_shardings=shardings(on))
  with scope(on):
    return born(key)


def state(on: Devices, params: p.Params, tx: optax.GradientTransformation) -> st.State:
  """The state before the first step, split like `params`."""
  if on.mesh is None:
    return st.init(params, tx)
  tree: p.Tree = params
  with scope(on):
    where = _like(on, jax.eval_shape(tx.init, tree)), _everywhere(on)
    # The count too is made by a program: with one device a process, `device_put` to all
    # gives an array that cannot be saved.
    first = jax.jit(
      lambda tree: (tx.init(tree), jnp.zeros((), jnp.int32)), out_shardings=where
    )
    opt, step = first(tree)
  return st.State(params=params, opt=opt, step=step)


def jit(on: Devices, step: Callable[..., Any], like: st.State) -> Any:
  """`step(state, batch, ...) -> (state, metrics)`, jitted, the state donated."""
  if on.mesh is None:
    return jax.jit(step, donate_argnums=0)
  out = jax.tree.map(lambda x: x.sharding, like)
  return jax.jit(step, donate_argnums=0, out_shardings=(out, None))


def put(on: Devices, batch: st.Batch) -> st.Batch:
  """A batch of this process's part (all of it, if there is one) on the devices."""
  if on.mesh is None:
    return batch
  split = _split(on)

  def of(x: np.ndarray) -> jax.Array:
    where = split if np.ndim(x) else _everywhere(on)
    return jax.make_array_from_process_local_data(where, np.asarray(x))

  return jax.tree.map(of, batch)


def part(on: Devices, batch: st.Batch, process: int) -> st.Batch:
  """What a process gives to `put` of a batch on the host: exactly what it holds.

  Raises:
    ValueError: it holds no block of rows and positions.
  """
  if on.mesh is None or on.whole:
    return batch
  split = _split(on)

  def of(x: np.ndarray) -> np.ndarray:
    return x[_block(split, np.shape(x), process)] if np.ndim(x) else x

  return jax.tree.map(of, batch)


def _split(on: Devices) -> jax.sharding.NamedSharding:
  """Where a batch's arrays lie; `whole`, every device has all of it."""
  assert on.mesh is not None
  spec = jax.P() if on.whole else jax.P(None, sharding.BATCH, 'context')
  return jax.sharding.NamedSharding(on.mesh, spec)


def _block(
  split: jax.sharding.NamedSharding, shape: tuple[int, ...], process: int
) -> tuple[slice, ...]:
  """The block of an array that lies on the devices of a process."""
  held = {
    tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    for device, index in split.devices_indices_map(shape).items()
    if device.process_index == process
  }
  block = [
    (min(a for a, _ in d), max(b for _, b in d)) for d in zip(*held, strict=True)
  ]
  full = sum(math.prod(b - a for a, b in one) for one in held)
  if full != math.prod(b - a for a, b in block):
    raise ValueError(
      f'mesh: the devices of process {process} hold {len(held)} parts of a batch that '
      'are no block: give every process neighbouring devices of the mesh'
    )
  return tuple(slice(a, b) for a, b in block)


def shardings(on: Devices) -> p.Tree:
  """Where each parameter lies on the mesh."""
  assert on.mesh is not None
  if on.whole:
    return jax.tree.map(lambda _: _everywhere(on), on.leaves)
  return sharding.shardings(on.leaves, on.mesh)


def _everywhere(on: Devices) -> jax.sharding.NamedSharding:
  assert on.mesh is not None
  return jax.sharding.NamedSharding(on.mesh, jax.P())


def _like(on: Devices, tree: p.Tree) -> p.Tree:
  """Shardings of a tree that holds leaves of the parameters' names and shapes."""
  assert on.mesh is not None
  if on.whole:
    return jax.tree.map(lambda _: _everywhere(on), tree)
  return sharding.like(tree, on.leaves, on.mesh)
