"""Positions and distances of changed floats as bytes; pure array functions for `ulp`.

The format is described there. Words are the bits of floats as unsigned integers.
"""

import numpy as np

_SKIP = 255  # a gap byte: so many unchanged elements, and no changed one yet
ESCAPE = 15  # four bits of a distance: it is this or more, the rest lies elsewhere


def distances(new: np.ndarray, old: np.ndarray) -> np.ndarray:
  """Zig-zag distances of floats, given and returned as unsigned words of their bits."""
  return _zigzag(_order(new) - _order(old))


def moved(old: np.ndarray, z: np.ndarray) -> np.ndarray:
  """Inverse of `distances`: the words that lie `z` away from `old`."""
  return _unorder(_order(old) + _unzigzag(z))


def _order(bits: np.ndarray) -> np.ndarray:
  """Bits of floats as integers in the order of the numbers."""
  top = bits.itemsize * 8 - 1
  mask = bits >> top
  np.negative(mask, out=mask)
  mask |= bits.dtype.type(1 << top)
  mask ^= bits
  return mask


def _unorder(order: np.ndarray) -> np.ndarray:
  top = order.itemsize * 8 - 1
  mask = order >> top
  mask -= 1
  mask |= order.dtype.type(1 << top)
  mask ^= order
  return mask


def _zigzag(distance: np.ndarray) -> np.ndarray:
  """Distances modulo 2**width, small ones of either sign to small numbers."""
  sign = distance >> (distance.itemsize * 8 - 1)
  np.negative(sign, out=sign)
  sign ^= distance << 1
  return sign


def _unzigzag(z: np.ndarray) -> np.ndarray:
  sign = z & 1
  np.negative(sign, out=sign)
  sign ^= z >> 1
  return sign


def gaps_between(at: np.ndarray) -> np.ndarray:
  """Positions, ascending, as bytes."""
  gap = at.copy()
  gap[1:] -= at[:-1]
  gap[1:] -= 1
  return _skipping(gap)


def gaps_among(members: np.ndarray, at: np.ndarray) -> np.ndarray:
  """Positions of members as bytes; only members count as unchanged between two."""
  if not at.size:
    return np.empty(0, np.uint8)
  gap = np.empty(at.size, np.int32)
  gap[0] = np.count_nonzero(members[: at[0]])
  # From each changed one up to the next: itself and the members between.
  gap[1:] = np.add.reduceat(members, at, dtype=np.int32)[:-1]
  gap[1:] -= 1
  return _skipping(gap)


def _skipping(gap: np.ndarray) -> np.ndarray:
  """Gaps as bytes, long ones with `_SKIP` in front. May write to `gap`."""
  large = np.flatnonzero(gap >= _SKIP)
  if not large.size:
    return gap.astype(np.uint8)
  room = np.ones_like(gap)
  room[large] += gap[large] // _SKIP
  gap[large] %= _SKIP
  end = np.cumsum(room)
  stream = np.full(end[-1], _SKIP, np.uint8)
  end -= 1
  stream[end] = gap
  return stream


def positions(stream: np.ndarray, size: int) -> np.ndarray:
  """Inverse of `gaps_between`. ValueError unless all lie below `size`."""
  ends = stream != _SKIP
  at = np.cumsum(np.add(stream, ends, dtype=np.intp))
  if not ends[-1] or at[-1] > size:
    raise ValueError(f'positions end at {at[-1]}, want at most {size}, a changed one')
  if not ends.all():
    at = at[ends]
  at -= 1
  return at


def pairs(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Distances at four bits each, and what is above that of the large ones."""
  nibble = np.zeros(z.size + z.size % 2, np.uint8)
  np.minimum(z, ESCAPE, out=nibble[: z.size], casting='unsafe')
  pairs = nibble[1::2] << 4
  pairs |= nibble[::2]
  return pairs, z[nibble[: z.size] == ESCAPE] - z.dtype.type(ESCAPE)


def planes(words: np.ndarray) -> list[np.ndarray]:
  """Byte planes of words, lowest first; one that is all zero is empty."""
  planes = words.view(np.uint8).reshape(-1, words.itemsize).T
  return [np.ascontiguousarray(row if row.any() else row[:0]) for row in planes]
