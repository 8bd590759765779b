"""Weights between the host and the device: publish from it, apply to it, check it.

The published dtype is bfloat16: floating leaves are cast to it on the device before
they are pulled (`to_host`), and a device that computes in float32 holds the same
bfloat16 values widened, which is exact. Integer leaves travel as they are.

A leaf's name is its path joined by '/'. Names, shapes and dtypes must match one to one:
a leaf that no tensor names would silently stay old. Nothing is touched until they do.

With a `grid` (pieces.py) leaves are published in pieces: a process reads those that lie
in the shards of its own devices (`needed`), and each shard is put together from them.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swe17.sync import codec, follower, pieces

Params = Any  # a pytree of arrays: nested dicts, registered dataclasses
PUBLISHED = jnp.bfloat16


def name_tree(params: Params) -> dict[str, Any]:
  """Flattens a pytree to {path joined by '/': leaf}, in the order of the tree.

  ValueError if two leaves get one name, or one array stands at two leaves: a tied
  weight is held once, else one of the two would be updated and the other deleted.
  """
  named: dict[str, Any] = {}
  owner: dict[int, str] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = '/'.join(_part(entry) for entry in path)
    if name in named:
      raise ValueError(f'two leaves are named {name!r}')
    if owner.setdefault(id(leaf), name) != name:
      raise ValueError(
        f'{owner[id(leaf)]!r} and {name!r} are one array: hold tied weights once'
      )
    named[name] = leaf
  return named


def unname(named: Mapping[str, Any], like: Params) -> Params:
  """Inverse of `name_tree`: the leaves in a tree of the structure of `like`.

  ValueError if the names are not exactly those of `like`.
  """
  want = name_tree(like)
  _check_names(named, want)
  return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in want])


def to_host(params: Params) -> dict[str, np.ndarray]:
  """Copies weights to the host as they are published: {name: bfloat16 array}.

  The copies are the host's own: `params` may be donated as soon as this returns.
  """
  cast = _published(name_tree(params))
  # np.asarray of a CPU array is a view of its buffer; the publisher needs its own.
  return {name: np.array(leaf) for name, leaf in jax.device_get(cast).items()}


def grid(abstract: Params) -> pieces.Grid:
  """The coarsest grid whose pieces lie in the shards of `abstract`: one piece a shard.

  What a learner publishes with must be at least as fine as this for each sampler.
  """
  found = {}
  for name, leaf in name_tree(abstract).items():
    sharding = getattr(leaf, 'sharding', None)
    if sharding is None or not leaf.shape or 0 in leaf.shape:
      continue
    local = sharding.shard_shape(leaf.shape)
    parts = [n // m for n, m in zip(leaf.shape, local, strict=True)]
    if max(parts) > 1:
      found[name] = pieces.cuts(leaf.shape, parts)
  return found


def needed(
  abstract: Params, cut: pieces.Grid, devices: Iterable[jax.Device] | None = None
) -> frozenset[str]:
  """Names of what `devices` (default: those of this process) hold of `abstract`.

  cut: the grid that the learner publishes with. ValueError if it is too coarse.
  """
  chosen = None if devices is None else set(devices)
  names = set()
  for name, leaf in name_tree(abstract).items():
    if name not in cut:
      names.add(name)
      continue
    for device, index in leaf.sharding.addressable_devices_indices_map(
      leaf.shape
    ).items():
      if chosen is None or device in chosen:
        rows = pieces.of_shard(name, leaf.shape, cut[name], index)
        names.update(piece for piece, _ in rows)
  return frozenset(names)


def from_host(
  tensors: Mapping[str, np.ndarray], abstract: Params, cut: pieces.Grid | None = None
) -> Params:
  """Puts host tensors on the device, with the dtypes and shardings of `abstract`.

  abstract: a pytree of jax.ShapeDtypeStruct (or arrays). cut: the grid of the pieces.
  ValueError if a name is unknown or missing, or a shape or dtype does not fit.
  """
  cut, want = cut or {}, name_tree(abstract)
  _check(tensors, want, cut)
  leaves: dict[str, jax.Array] = {}
  for name, leaf in want.items():
    if name in cut:
      new = _from_pieces(tensors, name, leaf, cut[name])
      leaves[name] = _widen(new, jnp.dtype(leaf.dtype))
      continue
    # jnp.array copies. Without that a CPU array may share the host tensor's memory, and
    # the next donated update would write into the follower's copy.
    leaves[name] = jnp.array(tensors[name], dtype=leaf.dtype, copy=True)
    # Said in any case: what stands on a device by default would be compiled anew by the
    # first swap, whose result is committed to it.
    where = getattr(leaf, 'sharding', None) or jax.devices()[0]
    leaves[name] = jax.device_put(leaves[name], where)
  return unname(leaves, abstract)


def apply(
  params: Params, staged: follower.Staged, cut: pieces.Grid | None = None
) -> Params:
  """Updates device weights in place to a staged version and checks every leaf.

  `params` must be the version that `staged.base` names; its buffers are donated and
  re-used, leaf by leaf, so memory grows by one leaf. ValueError, with nothing touched,
  if names, shapes or dtypes do not match. RuntimeError if afterwards the device does
  not hold the staged bytes: these weights must not be served.
  """
  cut, named = cut or {}, name_tree(params)
  _check(staged.tensors, named, cut)
  for name, old in named.items():
    if name in cut:
      if not staged.changed.isdisjoint(_pieces_of(name, old, cut[name])):
        new = _from_pieces(staged.tensors, name, old, cut[name])
        named[name] = _overwrite(old, new)
    elif name in staged.changed:
      new = jax.device_put(staged.tensors[name], old.sharding)
      named[name] = _overwrite(old, new)
  wrong = _wrong(named, staged, cut)
  if wrong:
    raise RuntimeError(
      f'version {staged.version}: the device does not hold the staged bytes of {wrong}'
    )
  return unname(named, params)


def warm(
  params: Params, staged: follower.Staged, cut: pieces.Grid | None = None
) -> Params:
  """Compiles what `apply` runs, by applying a version to weights that are that version.

  Call it before serving, so that the first swap does not wait for a compiler. Donates
  `params` and checks the device as `apply` does; of leaves that are alike in shape,
  dtype and sharding one is written.
  """
  cut, alike = cut or {}, {}
  for name, leaf in name_tree(params).items():
    kind = leaf.shape, leaf.dtype, leaf.sharding, cut.get(name)
    alike.setdefault(kind, _pieces_of(name, leaf, cut[name]) if name in cut else [name])
  written = frozenset(name for names in alike.values() for name in names)
  return apply(params, dataclasses.replace(staged, changed=written), cut)


def device_checksum(params: Params, block_bytes: int) -> dict[str, np.ndarray]:
  """Sums device contents per block, on the device: {name: uint32 [blocks, 2]}.

  Equal to `codec.checksum` of the published tensors, bit for bit.
  """
  return jax.device_get(_checksums(name_tree(params), block_bytes=block_bytes))


def device_digest(params: Params, block_bytes: int) -> str:
  """The exact digest of what a device holds; pulls every byte back.

  Equal to the manifest's `digest`. ValueError if a leaf holds a value that bfloat16
  does not: such weights were never published.
  """
  for name, exact in jax.device_get(_is_published(name_tree(params))).items():
    if not exact:
      raise ValueError(f'{name!r} holds values that are not bfloat16 values')
  return codec.digest(to_host(params), block_bytes)


def _part(entry: Any) -> str:
  """One step of a tree path as text."""
  for attribute in ('key', 'name', 'idx'):
    if hasattr(entry, attribute):
      return str(getattr(entry, attribute))
  raise ValueError(f'leaf path: got {entry!r}, want a dict key, a field or an index')


def _check_names(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
  missing, unknown = sorted(want.keys() - got.keys()), sorted(got.keys() - want.keys())
  if missing or unknown:
    raise ValueError(f'tensors do not match the model: {missing=} {unknown=}')


def _check(
  tensors: Mapping[str, np.ndarray], want: Mapping[str, Any], cut: pieces.Grid
) -> None:
  shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
  for name, leaf in want.items():
    parts = dict(cut.get(name, ()))
    shape = tuple(n // parts.get(axis, 1) for axis, n in enumerate(leaf.shape))
    names = _pieces_of(name, leaf, cut[name]) if name in cut else [name]
    shapes |= dict.fromkeys(names, (shape, np.dtype(leaf.dtype)))
  _check_names(tensors, shapes)
  for name, (shape, dtype) in shapes.items():
    got = tensors[name]
    if got.shape != shape:
      raise ValueError(f'{name!r}: got shape {got.shape}, want {shape}')
    # bfloat16 widens exactly; anything else must be the same type on both sides.
    exact = got.dtype == PUBLISHED and dtype in (PUBLISHED, np.float32)
    if not exact and got.dtype != dtype:
      raise ValueError(f'{name!r}: got dtype {got.dtype}, which {dtype} does not hold')


def _pieces_of(name: str, leaf: Any, cut: pieces.Cuts) -> list[str]:
  """Names of the pieces of a leaf that this process's devices hold."""
  names: dict[str, None] = {}
  places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
  for index in places.values():
    rows = pieces.of_shard(name, leaf.shape, cut, index)
    names |= dict.fromkeys(piece for piece, _ in rows)
  return list(names)


def _from_pieces(
  tensors: Mapping[str, np.ndarray], name: str, leaf: Any, cut: pieces.Cuts
) -> jax.Array:
  """A leaf, with its sharding and in the published dtype, from the pieces held here."""
  places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
  made: dict[str, np.ndarray] = {}  # replicas share a host array
  shards = []
  for device, index in places.items():
    key = str(index)
    if key not in made:
      made[key] = pieces.shard(tensors, name, leaf.shape, cut, index)
    # A CPU device may share the host array's memory: this one must be the device's own.
    shards.append(jnp.array(made[key], copy=True, device=device))
  return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _wrong(
  named: Mapping[str, jax.Array], staged: follower.Staged, cut: pieces.Grid
) -> list[str]:
  """Names of staged tensors that the device does not hold, by their checksums."""
  block_bytes = staged.manifest.block_bytes
  whole = {name: leaf for name, leaf in named.items() if name not in cut}
  found = [device_checksum(whole, block_bytes)]
  # Pieces are summed where they lie, device by device: nothing moves between them.
  local: dict[jax.Device, dict[str, jax.Array]] = {}
  places: dict[jax.Device, dict[str, Any]] = {}
  for name in named.keys() & cut.keys():
    for part in named[name].addressable_shards:
      rows = pieces.of_shard(name, named[name].shape, cut[name], part.index)
      local.setdefault(part.device, {})[name] = part.data
      places.setdefault(part.device, {})[name] = rows
  for device, parts in local.items():
    table = tuple(
      (name, piece, tuple((s.start, s.stop) for s in place))
      for name, rows in sorted(places[device].items())
      for piece, place in rows
    )
    found.append(
      jax.device_get(_piece_checksums(parts, table=table, block_bytes=block_bytes))
    )
  return sorted(
    {
      name
      for sums in found
      for name, got in sums.items()
      if not np.array_equal(got, staged.checksums[name])
    }
  )


def _cast(leaf: jax.Array) -> jax.Array:
  floating = jnp.issubdtype(leaf.dtype, jnp.floating)
  return leaf.astype(PUBLISHED) if floating else leaf


@jax.jit
def _published(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return jax.tree.map(_cast, named)


@jax.jit
def _is_published(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
  def exact(leaf: jax.Array) -> jax.Array:
    if leaf.dtype != jnp.float32:
      return jnp.array(True)
    # On the bits: a compiler may drop a cast to bfloat16 and back as excess precision.
    return jnp.all(jax.lax.bitcast_convert_type(leaf, jnp.uint32) & 0xFFFF == 0)

  return jax.tree.map(exact, named)


# `old` gives its buffer: with it kept as an input, the output is written into it.
@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _overwrite(old: jax.Array, new: jax.Array) -> jax.Array:
  return new.astype(old.dtype)


@functools.partial(jax.jit, static_argnames='dtype')
def _widen(leaf: jax.Array, dtype: jnp.dtype) -> jax.Array:
  return leaf.astype(dtype)


@functools.partial(jax.jit, static_argnames=('table', 'block_bytes'))
def _piece_checksums(
  parts: dict[str, jax.Array],
  *,
  table: tuple[tuple[str, str, tuple[tuple[int | None, int | None], ...]], ...],
  block_bytes: int,
) -> dict[str, jax.Array]:
  """Checksums of the pieces in one device's shards: (leaf, piece, place) a row."""
  return {
    piece: _checksum(_cast(parts[name][tuple(slice(*p) for p in place)]), block_bytes)
    for name, piece, place in table
  }


@functools.partial(jax.jit, static_argnames='block_bytes')
def _checksums(
  named: dict[str, jax.Array], *, block_bytes: int
) -> dict[str, jax.Array]:
  return {name: _checksum(_cast(leaf), block_bytes) for name, leaf in named.items()}


def _checksum(leaf: jax.Array, block_bytes: int) -> jax.Array:
  """`codec.checksum` in jnp: uint32 [blocks, 2]."""
  width = leaf.dtype.itemsize
  word = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f'uint{8 * width}'))
  word = word.reshape(-1).astype(jnp.uint32)
  cuts = codec.blocks(word.size * width, width, block_bytes)
  if not cuts:
    return jnp.zeros((0, 2), jnp.uint32)
  size = (cuts[0].stop - cuts[0].start) // width
  word = jnp.pad(word, (0, len(cuts) * size - word.size)).reshape(len(cuts), size)
  i = jnp.arange(size, dtype=jnp.uint32)
  terms = tuple(word * (i * jnp.uint32(m) | 1)[None, :] for m in codec.ODD)
  zero = jnp.uint32(0)
  # One pass for both sums: on CPU a third of the time of two, within a swap's pause.
  sums = jax.lax.reduce(
    terms, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,)
  )
  return jnp.stack(sums, axis=1)
