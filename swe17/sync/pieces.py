"""Sharded tensors as pieces: one named tensor for each part that a device may hold.

  name@axis:i/n        part i of n along an axis:      [.., size / n, ..]
  name@0:1/4@2:0/2     part 1 of 4 along axis 0, and of that part 0 of 2 along axis 2
  name@0:7/64          expert 7 of 64 of a leaf [E, ..]: [1, ..]

The publisher cuts (`split`), so each piece has blocks, hashes and a digest of its own,
and a follower that holds some shards names the pieces that lie in them (`inside`). A
*grid* says into how many equal parts each axis of a tensor is cut; it may be finer than
the shards of a mesh, never coarser, so that no piece is fetched for a part of it.
"""

from collections.abc import Iterable, Mapping, Sequence
import itertools
import re

import numpy as np

Cuts = tuple[tuple[int, int], ...]  # (axis, parts), axes ascending, parts above 1
Grid = Mapping[str, Cuts]  # by tensor name; a tensor that is not named stays whole
_PART = re.compile(r'@(\d+):(\d+)/(\d+)')
_NAME = re.compile(r'(?P<base>[^@]+)(?P<parts>(@\d+:\d+/\d+)*)')


def cuts(shape: Sequence[int], parts: Sequence[int]) -> Cuts:
  """The cuts of a tensor of `shape` into `parts[axis]` equal parts along each axis.

  ValueError unless each divides its axis.
  """
  if len(shape) != len(parts):
    raise ValueError(f'grid: got {len(parts)} axes for a shape {tuple(shape)}')
  for axis, (size, n) in enumerate(zip(shape, parts, strict=True)):
    if n < 1 or size % n or n > max(size, 1):
      raise ValueError(f'grid: axis {axis} of {tuple(shape)} has no {n} equal parts')
  return tuple((axis, n) for axis, n in enumerate(parts) if n > 1)


def names(name: str, cut: Cuts) -> list[str]:
  """Names of a tensor's pieces, the last axis fastest; its own name if it is whole."""
  return [_named(name, cut, at) for at in itertools.product(*_ranges(cut))]


def parse(name: str) -> tuple[str, tuple[tuple[int, int, int], ...]]:
  """(tensor's name, ((axis, part, parts), ..)) of a piece. ValueError if malformed."""
  found = _NAME.fullmatch(name)
  if found is None:
    raise ValueError(f'piece: got {name!r}, want name@axis:part/parts')
  rows = _PART.findall(found['parts'])
  places = tuple((int(axis), int(i), int(n)) for axis, i, n in rows)
  axes = [axis for axis, _, _ in places]
  if any(i >= n for _, i, n in places) or axes != sorted(set(axes)):
    raise ValueError(f'piece {name!r}: want axes ascending and each part below parts')
  return found['base'], places


def split(tensors: Mapping[str, np.ndarray], grid: Grid) -> dict[str, np.ndarray]:
  """Cuts tensors into contiguous pieces; those that the grid does not name stay.

  ValueError if the grid names a tensor that is not there, or does not divide one.
  """
  unknown = sorted(grid.keys() - tensors.keys())
  if unknown:
    raise ValueError(f'grid: got {unknown}, which are no tensors')
  found: dict[str, np.ndarray] = {}
  for name, array in tensors.items():
    cut = grid.get(name, ())
    if '@' in name:
      raise ValueError(f'tensor {name!r}: @ is kept for the names of pieces')
    for at in itertools.product(*_ranges(cut)):
      index = _index(array.shape, cut, at)
      part = np.ascontiguousarray(array[index]).reshape(array[index].shape)
      found[_named(name, cut, at)] = part
  return found


def join(found: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Inverse of `split`. ValueError if pieces are missing or do not fit together."""
  groups: dict[str, dict[tuple[tuple[int, int, int], ...], np.ndarray]] = {}
  for name, array in found.items():
    base, places = parse(name)
    groups.setdefault(base, {})[places] = array
  return {name: _assembled(name, group) for name, group in groups.items()}


def inside(name: str, shape: Sequence[int], cut: Cuts, index: Sequence[slice]) -> Cuts:
  """The cuts of a shard into pieces: (axis, parts) as in `cut`, parts from 1.

  index: the shard, a slice per axis of the whole. ValueError if a piece would be cut.
  """
  within = []
  for axis, n in cut:
    start, stop, _ = index[axis].indices(shape[axis])
    size = shape[axis] // n
    if start % size or stop % size:
      raise ValueError(
        f'{name!r}: a shard holds {start}:{stop} of axis {axis}, pieces are of {size}: '
        'publish with a grid at least as fine as the mesh of whoever follows'
      )
    within.append((axis, (stop - start) // size))
  rest = [axis for axis, part in enumerate(index) if axis not in dict(cut)]
  for axis in rest:
    start, stop, _ = index[axis].indices(shape[axis])
    if (start, stop) != (0, shape[axis]):
      raise ValueError(
        f'{name!r}: a shard holds {start}:{stop} of axis {axis}, which is not cut: '
        'publish with a grid at least as fine as the mesh of whoever follows'
      )
  return tuple(within)


def of_shard(
  name: str, shape: Sequence[int], cut: Cuts, index: Sequence[slice]
) -> list[tuple[str, tuple[slice, ...]]]:
  """The pieces a shard is made of, each with its place in the shard."""
  within = inside(name, shape, cut, index)
  size = {axis: shape[axis] // n for axis, n in cut}
  first = {a: index[a].indices(shape[a])[0] // size[a] for a, _ in cut}
  local = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=True)]
  rows = []
  for at in itertools.product(*_ranges(within)):
    whole = [first[axis] + i for (axis, _), i in zip(within, at, strict=True)]
    rows.append((_named(name, cut, whole), _index(local, within, at)))
  return rows


def shard(
  found: Mapping[str, np.ndarray],
  name: str,
  shape: Sequence[int],
  cut: Cuts,
  index: Sequence[slice],
) -> np.ndarray:
  """A shard's array from its pieces: the piece itself if there is one, else a copy."""
  rows = of_shard(name, shape, cut, index)
  if len(rows) == 1:
    return found[rows[0][0]]
  local = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=True)]
  array = np.empty(local, found[rows[0][0]].dtype)
  for piece, place in rows:
    array[place] = found[piece]
  return array


def _assembled(
  name: str, group: Mapping[tuple[tuple[int, int, int], ...], np.ndarray]
) -> np.ndarray:
  places = next(iter(group))
  cut = tuple((axis, n) for axis, _, n in places)
  want = set(itertools.product(*_ranges(cut)))
  got = {tuple(i for _, i, _ in place) for place in group}
  alike = all(tuple((axis, n) for axis, _, n in place) == cut for place in group)
  if not alike or got != want:
    raise ValueError(f'{name!r}: its pieces {sorted(group)} do not make up a whole')
  part = next(iter(group.values()))
  shape = list(part.shape)
  for axis, n in cut:
    shape[axis] *= n
  if not cut:
    return part
  whole = np.empty(shape, part.dtype)
  for place, array in group.items():
    if array.shape != part.shape or array.dtype != part.dtype:
      raise ValueError(f'{name!r}: its pieces differ in shape or dtype')
    whole[_index(shape, cut, [i for _, i, _ in place])] = array
  return whole


def _ranges(cut: Cuts) -> Iterable[range]:
  return [range(n) for _, n in cut]


def _named(name: str, cut: Cuts, at: Sequence[int]) -> str:
  parts = zip(cut, at, strict=True)
  return name + ''.join(f'@{axis}:{i}/{n}' for (axis, n), i in parts)


def _index(shape: Sequence[int], cut: Cuts, at: Sequence[int]) -> tuple[slice, ...]:
  """Where part `at` lies in an array of `shape` cut by `cut`."""
  index = [slice(None)] * len(shape)
  for (axis, n), i in zip(cut, at, strict=True):
    if axis >= len(shape) or shape[axis] % n or n > max(shape[axis], 1):
      raise ValueError(f'grid: axis {axis} of {tuple(shape)} has no {n} equal parts')
    size = shape[axis] // n
    index[axis] = slice(i * size, (i + 1) * size)
  return tuple(index)
