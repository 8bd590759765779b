"""The byte form of kept sets: close to the information bound, and strict.

A set of s ids holds the token drawn from it, which travels anyway. So its size costs
one byte, and a set of one costs nothing more. Of a wider set travel the n = s - 1 other
ids, ascending, those above the token moved down by one: n of V - 1 ids. They are gaps
u >= 1 (to the id before, the first to -1), and a gap is a bucket and a place in it, as
in an Elias gamma code (Elias 1975) with two buckets an octave:

  code = 2 floor(log2 u) + the bit below the leading one      one byte, entropy coded
  low  = the floor(log2 u) - 1 bits below those               plain, lowest bit first

Codes that are distributed alike share a stream. A context is (octave of n, eighth of
the set), in this order; neighbours join until they hold `_JOIN` codes. Uniform ids take
about 2 % more than the bound H(size) + log2 C(V - 1, n); where ids follow the order of
the vocabulary (a frequent token has a small id) they take less. V need not be known.

  version u8 = 1 | blocks of at most `_BLOCK` sets and as many ids
  block: sets u32 | others u32 | bound u32 (every id is below) | streams
  streams: sizes (a byte each, 255 = wide) | wide sizes u16 | codes by context | low
  stream, unless empty: kind u8 (0 plain, 1 zstd) | length u32 | bytes

How many codes a stream holds follows from the sizes and is not written. Lengths are
checked before anything of that length is allocated.
"""

import struct

import numpy as np
import zstandard

from swe17 import kept as kept_sets
from swe17 import types

_VERSION = 1
_HEAD = struct.Struct('<III')
_STREAM = struct.Struct('<BI')
_WIDE = 255  # size byte of a set whose size follows in two bytes
_MAX_SET = (1 << 16) - 1
_BLOCK = 1 << 18  # what is worked on at once stays in cache; above `_MAX_SET`
_MAX_IDS = 1 << 26  # ids that decoding will make room for
_JOIN = 1024  # codes worth a code table of their own
_CODES = 62  # gaps are below 2**31
# Runs of equal sizes (a prompt has none) are worth a match, likenesses by chance not.
_ZSTD = {'min_match': 7}

_OCTAVE = np.arange(_CODES) // 2
_WIDTH = np.maximum(_OCTAVE - 1, 0)  # low bits of a code
_MASK = (1 << np.arange(32, dtype=np.uint64)) - 1  # by width
_BASE = (1 << _OCTAVE) + (np.arange(_CODES) % 2 << _WIDTH)  # smallest gap of a code


def to_bytes(kept: types.KeptSets, token_T: np.ndarray) -> bytes:
  """Packs the sets that `token_T` was drawn from.

  ValueError if a set is not ascending, does not hold its token or is too wide.
  """
  if kept.offset_T1.shape != (token_T.size + 1,):
    raise ValueError(
      f'kept sets: got {kept.offset_T1.size - 1} sets for {token_T.size} tokens'
    )
  if kept.size_T.min(initial=0) < 0 or kept.ids.shape != (kept.offset_T1[-1],):
    raise ValueError('kept sets: offsets and ids disagree')
  out, lo = [bytes([_VERSION])], 0
  while lo < token_T.size:
    hi = _end_of_block(kept.offset_T1, lo)
    out.append(_pack(kept_sets.cut(kept, lo, hi), token_T[lo:hi]))
    lo = hi
  return b''.join(out)


def from_bytes(
  data: bytes, token_T: np.ndarray, limit: int = _MAX_IDS
) -> types.KeptSets:
  """Inverse of `to_bytes`, given the same tokens.

  ValueError, saying what is wrong, unless `data` is exactly what `to_bytes` may write
  and holds at most `limit` ids.
  """
  if data[:1] != bytes([_VERSION]):
    raise ValueError(f'kept sets: got version {data[:1]!r}, want {_VERSION}')
  parts, at, lo, room = [], 1, 0, limit
  while lo < token_T.size:
    part, at = _unpack(data, at, token_T[lo:], room)
    lo += part.offset_T1.size - 1
    room -= part.ids.size
    parts.append(part)
  if at != len(data):
    raise ValueError(f'kept sets: got {len(data) - at} bytes too many')
  return kept_sets.concat(parts)


def _end_of_block(offset_T1: np.ndarray, lo: int) -> int:
  """First token behind the block that begins at `lo`: bounded in sets and in ids."""
  hi = int(np.searchsorted(offset_T1, int(offset_T1[lo]) + _BLOCK, 'right')) - 1
  return min(max(hi, lo + 1), lo + _BLOCK, offset_T1.size - 1)


def _pack(kept: types.KeptSets, token_T: np.ndarray) -> bytes:
  size_T, others = kept.size_T, _others(kept, token_T)
  if kept.ids.min(initial=0) < 0:
    raise ValueError(f'kept sets: got id {kept.ids.min()}, want at least 0')
  if size_T.max(initial=0) > _MAX_SET:
    raise ValueError(f'a kept set holds {size_T.max()} ids, want at most {_MAX_SET}')
  n_S = size_T[size_T > 1] - 1
  first_S = np.cumsum(n_S) - n_S
  gap = np.diff(others, prepend=np.int32(-1))
  gap[first_S] = others[first_S] + 1
  if gap.min(initial=1) < 1:
    raise ValueError('kept sets: ids of a set are not ascending from 0')
  bits = gap.astype(np.float64).view(np.int64) >> 51  # exponent, top mantissa bit
  code = bits.astype(np.int32) - 2 * 1023
  order, counts = _contexts(n_S)
  sorted_code, at = code.astype(np.uint8)[order], 0
  bound = int(kept.ids.max(initial=-1)) + 1
  out = [_HEAD.pack(size_T.size, gap.size, bound)]
  out.append(_stream(np.minimum(size_T, _WIDE).astype(np.uint8).tobytes()))
  out.append(_stream(size_T[size_T >= _WIDE].astype('<u2').tobytes()))
  for count in counts:
    out.append(_stream(sorted_code[at : at + count].tobytes()))
    at += count
  out.append(_stream(_to_bits(gap - _BASE[code], _WIDTH[code])))
  return b''.join(out)


def _unpack(
  data: bytes, at: int, token_T: np.ndarray, room: int
) -> tuple[types.KeptSets, int]:
  """One block of at most `room` ids at `data[at:]`; also where it ends."""
  if len(data) - at < _HEAD.size:
    raise ValueError(f'kept sets: cut short at byte {at} of {len(data)}')
  sets, others, bound = _HEAD.unpack_from(data, at)
  most = min(token_T.size, _BLOCK)
  if not 0 < sets <= most:
    raise ValueError(f'kept sets: got a block of {sets} sets, want 1 to {most}')
  raw, at = _unstream(data, at + _HEAD.size, sets, 'sizes')
  size_T = np.frombuffer(raw, np.uint8).astype(np.int64)
  wide_T = size_T == _WIDE
  raw, at = _unstream(data, at, 2 * int(wide_T.sum()), 'wide sizes')
  size_T[wide_T] = np.frombuffer(raw, '<u2')
  n_S, room = size_T[size_T > 1] - 1, min(room, _BLOCK)
  if size_T.sum() > room or n_S.sum() != others or np.any(size_T[wide_T] < _WIDE):
    raise ValueError(
      f'kept sets: sizes add up to {size_T.sum()} ids, {n_S.sum()} of them not drawn; '
      f'want at most {room}, and {others}'
    )
  order, counts = _contexts(n_S)
  sorted_code = np.empty(others, np.uint8)
  done = 0
  for count in counts:
    raw, at = _unstream(data, at, count, 'codes')
    sorted_code[done : done + count] = np.frombuffer(raw, np.uint8)
    done += count
  if np.any((sorted_code >= _CODES) | (sorted_code == 1)):
    raise ValueError('kept sets: a code that no gap has')
  code = np.empty(others, np.uint8)
  code[order] = sorted_code
  width = _WIDTH[code]
  raw, at = _unstream(data, at, -(-int(width.sum()) // 8), 'low bits')
  gap = _BASE[code] + _from_bits(raw, width)
  return _assemble(size_T, n_S, gap, token_T[:sets], bound), at


def _others(kept: types.KeptSets, token_T: np.ndarray) -> np.ndarray:
  """Ids that were not drawn, those above their set's token less one. int32."""
  some_T = kept.size_T > 0
  token_S, size_S = token_T[some_T].astype(np.int32), kept.size_T[some_T]
  token = np.repeat(token_S, size_S)
  own = kept.ids == token
  at_S, start_S = np.flatnonzero(own), kept.offset_T1[:-1][some_T]
  if at_S.size != start_S.size or np.any((at_S < start_S) | (at_S >= start_S + size_S)):
    raise ValueError('a kept set does not hold the token that was drawn')
  return (kept.ids - (kept.ids > token))[~own]


def _assemble(
  size_T: np.ndarray, n_S: np.ndarray, gap: np.ndarray, token_T: np.ndarray, bound: int
) -> types.KeptSets:
  """Inverse of `_others` and of the gaps. ValueError if an id is not below `bound`."""
  offset_T1 = kept_sets.offsets(size_T)
  first_S, wide_T = np.cumsum(n_S) - n_S, size_T > 1
  sum_ = np.cumsum(gap)
  id_ = sum_ - np.repeat(sum_[first_S] - gap[first_S] + 1, n_S)
  above = id_ >= np.repeat(token_T[wide_T], n_S)
  id_ += above
  drawn_T = token_T[size_T > 0]
  if max(id_.max(initial=-1), drawn_T.max(initial=-1)) >= bound or np.any(drawn_T < 0):
    raise ValueError(f'kept sets: got an id or a token outside 0 to {bound - 1}')
  # Each set's place is filled with its token; the others then leave it one slot.
  ids = np.repeat(token_T.astype(np.int32), size_T)
  to = np.arange(gap.size) + np.repeat(offset_T1[:-1][wide_T] - first_S, n_S) + above
  ids[to] = id_
  return types.KeptSets(offset_T1, ids)


def _contexts(n_S: np.ndarray) -> tuple[np.ndarray, list[int]]:
  """Order of codes by context, and how many of them each stream holds."""
  if not n_S.size:
    return np.zeros(0, np.int64), []
  _, octave_S = np.frexp(n_S - 1)  # 0, 1, 2, 2, 3, ...: sizes up to powers of two
  n_S = n_S.astype(np.int32)
  j = np.arange(n_S.sum(), dtype=np.int32) - np.repeat(np.cumsum(n_S) - n_S, n_S)
  eighth = 8 * j // np.repeat(n_S, n_S)
  context = np.repeat((8 * octave_S).astype(np.uint8), n_S) + eighth.astype(np.uint8)
  counts = [0]
  for count in np.bincount(context).tolist():
    if counts[-1] >= _JOIN:
      counts.append(0)
    counts[-1] += count
  return np.argsort(context, kind='stable'), counts


def _to_bits(value: np.ndarray, width: np.ndarray) -> bytes:
  """Fields of `width` < 32 bits, one after another, lowest bit first."""
  end = np.cumsum(width)
  total = int(end[-1]) if end.size else 0
  if total == 0:
    return b''
  begin = end - width
  word, shift = begin >> 6, (begin & 63).astype(np.uint64)
  value = value.astype(np.uint64)
  # A field begins in every word, and only the last of them may reach into the next.
  last = np.append(np.flatnonzero(np.diff(word)), word.size - 1)
  words = np.zeros(last.size + 1, '<u8')
  words[:-1] = np.bitwise_or.reduceat(value << shift, np.append(0, last[:-1] + 1))
  words[1:] |= value[last] >> np.uint64(1) >> (np.uint64(63) - shift[last])
  return words.tobytes()[: -(-total // 8)]


def _from_bits(raw: bytes, width: np.ndarray) -> np.ndarray:
  """Inverse of `_to_bits`, int64. ValueError if a bit behind the last field is set."""
  end = np.cumsum(width)
  total = int(end[-1]) if end.size else 0
  if total % 8 and raw[-1] >> total % 8:
    raise ValueError('kept sets: a bit is set behind the last field')
  words = np.zeros(total // 64 + 2, '<u8')
  words.view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
  begin = end - width
  word, shift = begin >> 6, (begin & 63).astype(np.uint64)
  value = words[word] >> shift
  value |= words[word + 1] << np.uint64(1) << (np.uint64(63) - shift)
  return (value & _MASK[width]).astype(np.int64)


def _stream(raw: bytes) -> bytes:
  """A stream with its head; zstd where that is smaller; nothing for nothing."""
  if not raw:
    return b''
  params = zstandard.ZstdCompressionParameters.from_level(
    1, source_size=len(raw), **_ZSTD
  )
  small = zstandard.ZstdCompressor(compression_params=params).compress(raw)
  kind, body = (1, small) if len(small) < len(raw) else (0, raw)
  return _STREAM.pack(kind, len(body)) + body


def _unstream(data: bytes, at: int, size: int, name: str) -> tuple[bytes, int]:
  """The `size` bytes of the stream at `data[at:]`, and where it ends."""
  if size == 0:
    return b'', at
  if len(data) - at < _STREAM.size:
    raise ValueError(f'kept sets, {name}: cut short at byte {at} of {len(data)}')
  kind, length = _STREAM.unpack_from(data, at)
  at += _STREAM.size
  if length > len(data) - at:
    raise ValueError(f'kept sets, {name}: got {len(data) - at} bytes, want {length}')
  body = data[at : at + length]
  if kind == 1:
    body = _unzstd(body, size, name)
  if kind > 1 or len(body) != size:
    raise ValueError(
      f'kept sets, {name}: got kind {kind} and {len(body)} bytes, want {size}'
    )
  return body, at + length


def _unzstd(body: bytes, size: int, name: str) -> bytes:
  try:
    # The frame says what will be allocated, and is not believed without a look.
    told = zstandard.frame_content_size(body)
    if told != size:
      raise ValueError(f'kept sets, {name}: unpacks to {told} bytes, want {size}')
    return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
  except zstandard.ZstdError as e:
    raise ValueError(f'kept sets, {name}: does not unpack: {e}') from e
