"""Floats that moved a little: where they are, and by how many representable numbers.

Read as ordered integers, neighbouring floats of one dtype are neighbouring numbers, so
a small update is a small distance. Nothing is computed with the values: every bit
pattern (-0, infinities, NaN payloads) has its own integer and comes back.

  order      o = bits ^ (~0 if the sign bit is set, else the sign bit)
  distance   z = zig-zag((o_new - o_old) mod 2**width): 1, 2, 3 .. for -1, +1, -2 ..;
             0 only where the bits are equal
  positions  gaps, the number of unchanged elements before each changed one, a byte
             each; 255 says that 255 are unchanged and no changed one follows yet
  distances  z - 1 of the changed elements: four bits each, two to a byte, 15 and above
             in words beside; two to a byte halve what Huffman codes lose on few symbols

From `DENSE` changed on, positions cost more than they save: then z of all elements is
coded, without positions. For thin lines elements may be told apart by their exponent in
the base: small numbers have neighbours closer by, so an update of one size moves more
of them, and by more. Each class has its own gaps (counted within it) and distances,
which takes a quarter off the bytes and several times the work. Each stream is a zstd
frame with its own checksum:

  kind u8 | classes u8 | length of each class's gaps u32 | stored size of each u32
  | the streams

The streams are the gaps of each class, its four-bit distances, and the words of all as
byte planes, lowest first; an empty one is absent or all zero. `decode` trusts none of
it. It can't know whether the base is the right one: that is for the hash of the
resulting bytes.
"""

from collections.abc import Iterator, Sequence
import struct
import threading

import numpy as np
import zstandard

from swe17.sync import codec, streams

# Bits below the exponent, and the exponent's own.
DTYPES = {'bfloat16': (7, 0xFF), 'float16': (10, 0x1F), 'float32': (23, 0xFF)}
DENSE = 1 / 3  # share of changed elements
LIMIT = 1 << 31  # bytes of a block, so that every size fits the header
_SPARSE_KIND, _DENSE_KIND, _THIN_KIND = 0, 1, 2
_CLASSES = 16  # exponents that are classes of their own, at most; the rest is one
_LEAST = 1 / 512  # share of the elements that such an exponent has
_SAMPLE = 16  # one element in so many is looked at to find them
_FEW = 1024  # changed elements of a block below which classes can't pay
_LOCAL = threading.local()


def encode(
  block: np.ndarray, base: np.ndarray, dtype: str, *, by_exponent: bool = False
) -> tuple[bytes, int]:
  """Codes a block on its base: (frame, changed elements); (b'', 0) if they are equal.

  block, base: uint8 [n], the raw bytes of elements of `dtype`, one of `DTYPES`.
  by_exponent: take the slower form where it is smaller.
  """
  new, old = _words(block, dtype), _words(base, dtype)
  if new.shape != old.shape or block.size >= LIMIT:
    raise ValueError(
      f'ulp: got {block.size} bytes on a base of {base.size}, want the same, '
      f'below {LIMIT}'
    )
  differs = np.not_equal(new, old, out=codec.scratch(new.size).view(np.bool_))
  changed = int(np.count_nonzero(differs))
  if not changed:
    return b'', 0
  if changed >= DENSE * new.size:
    return _dense(new, old), changed
  at = np.flatnonzero(differs)
  frame = _sparse(new, old, at)
  if by_exponent and changed >= _FEW:
    frame = min(frame, _thin(new, old, at, dtype), key=len)
  return frame, changed


def decode(frame: codec.Bytes, base: np.ndarray, out: np.ndarray, dtype: str) -> None:
  """Inverse of `encode`: writes the block's bytes to `out`, uint8 [n] as `base`.

  `out` may be `base` itself. ValueError, with `out` untouched, if the frame is not one
  that `encode` makes for `n` bytes.
  """
  old, word = _words(base, dtype), _words(out, dtype)
  kind, lengths, stored = _open(frame, old)
  count = len(lengths)
  gaps, pairs, planes = (
    stored[:count],
    stored[count : 2 * count],
    stored[2 * count :],
  )
  if kind == _DENSE_KIND:
    word[:] = streams.moved(old, _join(pairs, [old.size], planes, old.dtype))
    return
  if kind == _SPARSE_KIND:
    parts = [streams.positions(codec.decode_full(gaps[0], lengths[0]), old.size)]
  else:
    members = _classes(old, dtype)
    parts = [
      _among(member, stream, length)
      for member, stream, length in zip(members, gaps, lengths, strict=True)
    ]
  at = np.concatenate(parts)
  z = _join(pairs, [part.size for part in parts], planes, old.dtype)
  z += 1
  new = streams.moved(old[at], z)
  if not np.may_share_memory(out, base):
    out[:] = base
  word[at] = new


def _dense(new: np.ndarray, old: np.ndarray) -> bytes:
  return _frame(_DENSE_KIND, [np.empty(0, np.uint8)], [streams.distances(new, old)])


def _sparse(new: np.ndarray, old: np.ndarray, at: np.ndarray) -> bytes:
  return _frame(
    _SPARSE_KIND, [streams.gaps_between(at)], [streams.distances(new[at], old[at]) - 1]
  )


def _thin(new: np.ndarray, old: np.ndarray, at: np.ndarray, dtype: str) -> bytes:
  """The frame with a class for each exponent; `at` is where elements changed."""
  gaps, z = [], []
  for members in _classes(old, dtype):
    # Not at[members[at]]: a mask that is hard to predict costs ten times as much.
    part = at[np.flatnonzero(members[at])]
    gaps.append(streams.gaps_among(members, part))
    z.append(streams.distances(new[part], old[part]) - 1)
  return _frame(_THIN_KIND, gaps, z)


def _frame(kind: int, gaps: Sequence[np.ndarray], z: Sequence[np.ndarray]) -> bytes:
  """Compresses the streams of each class and puts them behind a header."""
  pairs, large = zip(*map(streams.pairs, z), strict=True)
  planes = streams.planes(np.concatenate(large))
  stored = [_compress(stream) for stream in (*gaps, *pairs, *planes)]
  lengths = [stream.size for stream in gaps]
  header = struct.pack(
    f'<BB{len(gaps) + len(stored)}I', kind, len(gaps), *lengths, *map(len, stored)
  )
  return b''.join((header, *stored))


def _words(raw: np.ndarray, dtype: str) -> np.ndarray:
  if dtype not in DTYPES:
    raise ValueError(f'ulp: got dtype {dtype!r}, want one of {list(DTYPES)}')
  return raw.view(f'<u{codec.DTYPES[dtype].itemsize}')


def _classes(old: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
  """Who belongs to each class, bool [elements], one class after another.

  It is one array that is written anew for each: a fresh one costs more than a class.
  The classes follow from the base alone, so that a frame need not name them.
  """
  shift, bits = DTYPES[dtype]
  exponent = (old >> shift).astype(np.uint8)  # drops the sign, or all but
  if bits != 0xFF:
    exponent &= bits
  count = np.bincount(exponent[::_SAMPLE], minlength=256)
  most = np.argsort(-count, kind='stable')[:_CLASSES]
  members, rest = np.empty(old.size, np.bool_), np.ones(old.size, np.bool_)
  for value in most[count[most] > _LEAST * count.sum()]:
    np.equal(exponent, np.uint8(value), out=members)
    rest ^= members
    yield members
  yield rest


def _among(members: np.ndarray, stream: memoryview, length: int) -> np.ndarray:
  """Inverse of `streams.gaps_among` and compression. `length`: gap bytes."""
  if not length:
    return np.empty(0, np.intp)
  place = np.flatnonzero(members)
  return place[streams.positions(codec.decode_full(stream, length), place.size)]


def _join(
  pairs: Sequence[memoryview],
  counts: Sequence[int],
  planes: Sequence[memoryview],
  word: np.dtype,
) -> np.ndarray:
  """Decompresses the distances of all classes, `counts` of each, into one array."""
  parts = []
  for stream, count in zip(pairs, counts, strict=True):
    if not count and not len(stream):
      continue
    pair = codec.decode_full(stream, (count + 1) // 2)
    nibble = np.empty((pair.size, 2), np.uint8)
    np.bitwise_and(pair, 15, out=nibble[:, 0])
    np.right_shift(pair, 4, out=nibble[:, 1])
    parts.append(nibble.reshape(-1)[:count])
  nibble = parts[0] if len(parts) == 1 else np.concatenate(parts)
  z = nibble.astype(word)
  large = np.flatnonzero(nibble == streams.ESCAPE)
  words = np.zeros((large.size, word.itemsize), np.uint8)
  for i, stream in enumerate(planes):
    if len(stream):
      words[:, i] = codec.decode_full(stream, large.size)
  z[large] += words.reshape(-1).view(word)
  return z


def _open(
  frame: codec.Bytes, old: np.ndarray
) -> tuple[int, tuple[int, ...], list[memoryview]]:
  """A frame's kind, gap bytes of each class, and streams; ValueError if it is none."""
  view = memoryview(frame)
  count = view[1] if len(view) > 1 else 0
  header = struct.Struct(f'<BB{3 * count + old.itemsize}I')
  if not 0 < count <= _CLASSES + 1 or len(view) < header.size:
    raise ValueError(f'ulp frame: got {len(view)} bytes and {count} classes')
  kind, _, *numbers = header.unpack_from(view)
  lengths, sizes = tuple(numbers[:count]), numbers[count:]
  if kind == _DENSE_KIND:
    sound = count == 1 and lengths[0] == sizes[0] == 0
  else:
    # A gap byte takes one element or more, so that a lie about them allocates little.
    sound = kind == _THIN_KIND or (kind == _SPARSE_KIND and count == 1)
    sound = sound and 0 < sum(lengths) <= old.size
    sound = sound and all(
      (length > 0) == (size > 0)
      for length, size in zip(lengths, sizes[:count], strict=True)
    )
  if not sound:
    raise ValueError(
      f'ulp frame: got kind {kind} with {lengths} gaps in {sizes[:count]} bytes for '
      f'{old.size} elements'
    )
  if sum(sizes) != len(view) - header.size:
    raise ValueError(
      f'ulp frame: streams of {sizes} bytes, got {len(view) - header.size} of them'
    )
  stored, start = [], header.size
  for size in sizes:
    stored.append(view[start : start + size])
    start += size
  return kind, lengths, stored


def _compress(stream: np.ndarray) -> bytes:
  """One stream as a zstd frame; b'' if it is empty."""
  if not stream.size:
    return b''
  if not hasattr(_LOCAL, 'compressor'):
    # The streams hold no repeats worth finding, only skewed counts. Matches of seven
    # bytes or more leave the rest to Huffman codes: smaller and faster than level 3.
    _LOCAL.compressor = zstandard.ZstdCompressor(
      compression_params=zstandard.ZstdCompressionParameters.from_level(
        1,
        strategy=zstandard.STRATEGY_DFAST,
        min_match=7,
        write_checksum=True,
        write_content_size=True,
      )
    )
  return _LOCAL.compressor.compress(stream.data)
