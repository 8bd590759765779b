"""Byte forms of what crosses a process boundary. No pickle, no JAX.

A record is a JSON header and raw little-endian arrays in one zstd frame:

  b'S17\\x01' | xxh3-64 of the rest (8 bytes) | zstd(body)
  body: header length u32 | header | arrays

The header holds `meta` (JSON) and, per array, name, dtype and shape in order.
Decoding checks the magic, the hash and every length, and raises ValueError on
anything else.
"""

from collections.abc import Mapping
import dataclasses
import json
import struct
from typing import Any

import numpy as np
import xxhash
import zstandard

from swe17 import types

_MAGIC = b'S17\x01'
_MAX_BYTES = 1 << 31
_MAX_REQUEST = 1 << 26  # bytes of a sampler request, unpacked
_MAX_SET = (1 << 16) - 1  # sizes travel in two bytes

# What a header of the wrong shape raises on the way (RecursionError: nested too deep).
_MALFORMED = (KeyError, TypeError, OverflowError, RecursionError)


def encode(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
  """Packs JSON-able `meta` and named arrays into one checked frame."""
  specs, bodies = [], []
  for name, array in arrays.items():
    array = np.ascontiguousarray(array)
    if array.dtype.hasobject:
      raise ValueError(f'array {name!r}: got dtype {array.dtype}, want plain numbers')
    little = array.astype(array.dtype.newbyteorder('<'), copy=False)
    specs.append([name, little.dtype.str, list(array.shape)])
    bodies.append(little.tobytes())
  header = json.dumps({'meta': meta, 'arrays': specs}).encode()
  raw = b''.join([struct.pack('<I', len(header)), header, *bodies])
  body = zstandard.ZstdCompressor(level=3).compress(raw)
  return _MAGIC + xxhash.xxh3_64_digest(body) + body


def decode(
  data: bytes, limit: int = _MAX_BYTES
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Inverse of `encode`. ValueError if the bytes are not exactly one sound frame."""
  if data[:4] != _MAGIC:
    raise ValueError(f'not a swe17 record: got magic {data[:4]!r}, want {_MAGIC!r}')
  if xxhash.xxh3_64_digest(data[12:]) != data[4:12]:
    raise ValueError('record is corrupt: its xxh3 hash does not match its bytes')
  try:
    # zstd would follow the size in the frame whatever it is told.
    size = zstandard.frame_content_size(data[12:])
    if not 0 <= size <= limit:
      raise ValueError(f'record unpacks to {size} bytes, want a known size to {limit}')
    raw = zstandard.ZstdDecompressor().decompress(data[12:])
    (n,) = struct.unpack_from('<I', raw)
    header = json.loads(raw[4 : 4 + n])
    arrays, at = {}, 4 + n
    for name, dtype, shape in header['arrays']:
      dtype = np.dtype(dtype)
      count = int(np.prod(shape, dtype=np.int64))
      if dtype.hasobject or count < 0 or at + count * dtype.itemsize > len(raw):
        raise ValueError(f'array {name!r} does not fit the record')
      arrays[name] = np.frombuffer(raw, dtype, count, at).reshape(shape).copy()
      at += count * dtype.itemsize
  except (*_MALFORMED, zstandard.ZstdError, struct.error) as e:
    raise ValueError(f'record does not parse: {e}') from e
  if at != len(raw):
    raise ValueError(f'record has {len(raw) - at} bytes too many')
  return header['meta'], arrays


def pack_kept(kept: types.KeptSets, token_T: np.ndarray) -> dict[str, np.ndarray]:
  """Kept sets as two narrow arrays; a set of one is its token and stores no id."""
  size_T = kept.size_T
  if size_T.max(initial=0) > _MAX_SET:
    raise ValueError(f'a kept set holds {size_T.max()} ids, want at most {_MAX_SET}')
  wide = np.repeat(size_T > 1, size_T)
  ids = kept.ids[wide]
  lone = kept.ids[kept.offset_T1[:-1][size_T == 1]]
  if not np.array_equal(lone, token_T[size_T == 1]):
    raise ValueError('a kept set of one id does not hold the token that was drawn')
  narrow = np.uint16 if ids.size == 0 or ids.max() < 1 << 16 else np.uint32
  return {'kept_size': size_T.astype(np.uint16), 'kept_ids': ids.astype(narrow)}


def unpack_kept(
  arrays: Mapping[str, np.ndarray], token_T: np.ndarray
) -> types.KeptSets:
  """Inverse of `pack_kept`. ValueError if sizes and ids disagree."""
  size_T = arrays['kept_size'].astype(np.int64)
  if size_T.shape != token_T.shape:
    raise ValueError(f'kept sets: got {size_T.size} sizes for {token_T.size} tokens')
  offset_T1 = np.concatenate([[0], np.cumsum(size_T)]).astype(np.int32)
  wide = np.repeat(size_T > 1, size_T)
  if int(wide.sum()) != arrays['kept_ids'].size:
    raise ValueError(
      f'kept sets: got {arrays["kept_ids"].size} ids, want {int(wide.sum())}'
    )
  ids = np.empty(int(size_T.sum()), np.int32)
  ids[wide] = arrays['kept_ids']
  ids[~wide] = token_T[size_T == 1]
  return types.KeptSets(offset_T1, ids)


_SEGMENT = ('mask', 'mu_logp', 'entropy', 'temperature', 'version', 'turn')


def group_to_bytes(group: types.Group) -> bytes:
  """A finished group as one record."""
  arrays: dict[str, np.ndarray] = {}
  episodes = []
  for i, episode in enumerate(group.episodes):
    row: dict[str, Any] = dataclasses.asdict(dataclasses.replace(episode, segments=()))
    row['segments'] = len(episode.segments)
    episodes.append(row)
    for j, segment in enumerate(episode.segments):
      at = f'{i}.{j}.'
      arrays[at + 'token'] = segment.token_T
      for name in _SEGMENT:
        arrays[at + name] = getattr(segment, name + '_T')
      for name, array in pack_kept(segment.kept, segment.token_T).items():
        arrays[at + name] = array
  meta = dataclasses.asdict(dataclasses.replace(group, episodes=()))
  return encode({**meta, 'episodes': episodes}, arrays)


def bytes_to_group(data: bytes) -> types.Group:
  """Inverse of `group_to_bytes`. ValueError on anything malformed."""
  meta, arrays = decode(data)
  try:
    episodes = []
    for i, row in enumerate(meta['episodes']):
      segments = [_segment(arrays, f'{i}.{j}.') for j in range(row['segments'])]
      fields: dict[str, Any] = {**row, 'segments': tuple(segments)}
      fields['outcome'] = types.Outcome(**row['outcome'])
      episodes.append(types.Episode(**fields))
    fields = {**meta, 'episodes': tuple(episodes)}
    return types.Group(**fields)
  except (KeyError, TypeError) as e:
    raise ValueError(f'not a group record: {e!r}') from e


def _segment(arrays: Mapping[str, np.ndarray], at: str) -> types.Segment:
  token_T = arrays[at + 'token']
  fields = {name + '_T': arrays[at + name] for name in _SEGMENT}
  for name, array in fields.items():
    if array.shape != token_T.shape:
      raise ValueError(f'{at}{name}: got shape {array.shape}, want {token_T.shape}')
  packed = {name: arrays[at + name] for name in ('kept_size', 'kept_ids')}
  return types.Segment(token_T=token_T, kept=unpack_kept(packed, token_T), **fields)


def request_to_bytes(request: types.GenerateRequest) -> bytes:
  """A sampler request as one record."""
  meta = dataclasses.asdict(request)
  del meta['token_T']
  return encode(meta, {'token': request.token_T})


def bytes_to_request(data: bytes) -> types.GenerateRequest:
  """Inverse of `request_to_bytes`. ValueError on anything malformed."""
  meta, arrays = decode(data, _MAX_REQUEST)
  try:
    meta['sampling'] = types.Sampling(**meta['sampling'])
    meta['stop_ids'] = tuple(meta['stop_ids'])
    meta['key'] = tuple(meta['key'])
    return types.GenerateRequest(token_T=arrays['token'], **meta)
  except (KeyError, TypeError) as e:
    raise ValueError(f'not a generate request: {e!r}') from e


def result_to_bytes(result: types.GenerateResult) -> bytes:
  """A sampler's answer as one record."""
  arrays = {
    'token': result.token_T,
    'logp': result.logp_T,
    'entropy': result.entropy_T,
    'version': result.version_T,
    **pack_kept(result.kept, result.token_T),
  }
  return encode({'finish': result.finish}, arrays)


def bytes_to_result(data: bytes) -> types.GenerateResult:
  """Inverse of `result_to_bytes`. ValueError on anything malformed."""
  meta, arrays = decode(data)
  try:
    token_T = arrays['token']
    return types.GenerateResult(
      token_T=token_T,
      logp_T=arrays['logp'],
      entropy_T=arrays['entropy'],
      version_T=arrays['version'],
      kept=unpack_kept(arrays, token_T),
      finish=meta['finish'],
    )
  except KeyError as e:
    raise ValueError(f'not a generate result: missing {e}') from e
