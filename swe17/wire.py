"""Byte forms of what crosses a process boundary. No pickle, no JAX.

A record is a JSON header and raw little-endian arrays in one zstd frame:

  b'S17\\x01' | xxh3-64 of the rest (8 bytes) | zstd(body)
  body: header length u32 | header | arrays

The header holds `meta` (JSON) and, per array, name, dtype and shape in order.
Decoding checks the magic, the hash and every length, and raises ValueError on
anything else. Kept sets travel as the bytes of `wire_kept`, routes as planes of bytes,
uint8 [bytes of an id, N, K, R], so that equal places lie side by side: of the second
plane of 384 experts, one bit an id, zstd makes a bit and a half where ids are random.
"""

from collections.abc import Mapping
import dataclasses
import json
import struct
from typing import Any

import numpy as np
import xxhash
import zstandard

from swe17 import kept as kept_sets
from swe17 import types, wire_kept

_MAGIC = b'S17\x01'
_MAX_BYTES = 1 << 31
_MAX_REQUEST = 1 << 26  # bytes of a sampler request, unpacked

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


_SEGMENT = ('mask', 'mu_logp', 'entropy', 'temperature', 'version', 'turn')


def group_to_bytes(group: types.Group) -> bytes:
  """A finished group as one record."""
  arrays: dict[str, np.ndarray] = {}
  episodes = []
  segments = [s for episode in group.episodes for s in episode.segments]
  for i, episode in enumerate(group.episodes):
    row: dict[str, Any] = dataclasses.asdict(dataclasses.replace(episode, segments=()))
    row['segments'] = len(episode.segments)
    if episode.turn_scores is None:
      del row['turn_scores']  # readers from before there were any read on
    episodes.append(row)
    for j, segment in enumerate(episode.segments):
      at = f'{i}.{j}.'
      arrays[at + 'token'] = segment.token_T
      for name in _SEGMENT:
        arrays[at + name] = getattr(segment, name + '_T')
      if segment.routes_RNK is not None:  # nothing where there are no experts
        arrays[at + 'routes'] = _routes_to_planes(segment.routes_RNK)
  # All sets of a group in one: the more there are, the less their code tables weigh.
  kept = kept_sets.concat([segment.kept for segment in segments])
  arrays['kept'] = _kept_to_array(kept, _concat([s.token_T for s in segments]))
  meta = dataclasses.asdict(dataclasses.replace(group, episodes=()))
  return encode({**meta, 'episodes': episodes}, arrays)


def bytes_to_group(data: bytes) -> types.Group:
  """Inverse of `group_to_bytes`. ValueError on anything malformed."""
  meta, arrays = decode(data)
  try:
    names, tokens = [], []
    for i, row in enumerate(meta['episodes']):
      names.append([])
      for j in range(row['segments']):  # the first that is missing ends it
        names[i].append(f'{i}.{j}.')
        tokens.append(_token(arrays, names[i][j]))
    kept = _array_to_kept(arrays['kept'], _concat(tokens))
    sets = iter(kept_sets.split(kept, [token_T.size for token_T in tokens]))
    episodes = []
    for row, ats in zip(meta['episodes'], names, strict=True):
      segments = [_segment(arrays, at, next(sets)) for at in ats]
      fields: dict[str, Any] = {**row, 'segments': tuple(segments)}
      fields['outcome'] = types.Outcome(**row['outcome'])
      fields['turn_scores'] = _scores(row.get('turn_scores'))
      episodes.append(types.Episode(**fields))
    fields = {**meta, 'episodes': tuple(episodes)}
    return types.Group(**fields)
  except (KeyError, TypeError) as e:
    raise ValueError(f'not a group record: {e!r}') from e


def _scores(scores: Any) -> tuple[float, ...] | None:
  if scores is None:
    return None
  if not isinstance(scores, list) or any(type(x) not in (int, float) for x in scores):
    raise ValueError(f'turn_scores: got {scores!r:.60}, want a list of numbers')
  return tuple(map(float, scores))


def _concat(tokens: list[np.ndarray]) -> np.ndarray:
  return np.concatenate([np.zeros(0, np.int32), *tokens])


def _kept_to_array(kept: types.KeptSets, token_T: np.ndarray) -> np.ndarray:
  return np.frombuffer(wire_kept.to_bytes(kept, token_T), np.uint8)


def _routes_to_planes(routes_RNK: np.ndarray) -> np.ndarray:
  """Ids as uint8 [planes, N, K, R]. ValueError unless they are uint8 or uint16."""
  if routes_RNK.ndim != 3 or routes_RNK.dtype not in (np.uint8, np.uint16):
    raise ValueError(
      f'routes: got {routes_RNK.dtype} {routes_RNK.shape}, want uint8 or uint16 of 3 '
      'axes'
    )
  little = routes_RNK.astype(routes_RNK.dtype.newbyteorder('<'))
  ids_NKR = np.ascontiguousarray(np.moveaxis(little, 0, -1))
  return np.moveaxis(ids_NKR[..., None].view(np.uint8), -1, 0)


def _planes_to_routes(planes: np.ndarray | None, at: str) -> np.ndarray | None:
  if planes is None:
    return None
  if planes.dtype != np.uint8 or planes.ndim != 4 or planes.shape[0] not in (1, 2):
    raise ValueError(
      f'{at}routes: got {planes.dtype} {planes.shape}, want uint8 [1 or 2, N, K, R]'
    )
  ids_NKR = np.ascontiguousarray(np.moveaxis(planes, 0, -1)).view(
    (np.uint8, np.dtype('<u2'))[planes.shape[0] - 1]
  )
  native = ids_NKR[..., 0].astype((np.uint8, np.uint16)[planes.shape[0] - 1])
  return np.ascontiguousarray(np.moveaxis(native, -1, 0))


def _token(arrays: Mapping[str, np.ndarray], at: str = '') -> np.ndarray:
  token_T = arrays[at + 'token']
  if token_T.ndim != 1 or token_T.dtype != np.int32:
    raise ValueError(
      f'{at}token: got {token_T.dtype} {token_T.shape}, want int32 of one axis'
    )
  return token_T


def _array_to_kept(array: np.ndarray, token_T: np.ndarray) -> types.KeptSets:
  return wire_kept.from_bytes(array.tobytes(), token_T)


def _segment(
  arrays: Mapping[str, np.ndarray], at: str, kept: types.KeptSets
) -> types.Segment:
  token_T = arrays[at + 'token']
  fields = {name + '_T': arrays[at + name] for name in _SEGMENT}
  for name, array in fields.items():
    if array.shape != token_T.shape:
      raise ValueError(f'{at}{name}: got shape {array.shape}, want {token_T.shape}')
  routes_RNK = _planes_to_routes(arrays.get(at + 'routes'), at)
  if routes_RNK is not None and routes_RNK.shape[0] > token_T.size:
    raise ValueError(
      f'{at}routes: got {routes_RNK.shape[0]} rows for {token_T.size} tokens'
    )
  return types.Segment(token_T=token_T, kept=kept, routes_RNK=routes_RNK, **fields)


def request_to_bytes(request: types.GenerateRequest) -> bytes:
  """A sampler request as one record."""
  meta = dataclasses.asdict(request)
  del meta['token_T']
  if not request.routes_from:
    del meta['routes_from']  # samplers from before there were any read on
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
    'kept': _kept_to_array(result.kept, result.token_T),
  }
  meta: dict[str, Any] = {'finish': result.finish, 'topk_bound': result.topk_bound}
  if result.routes_RNK is not None:
    arrays['routes'] = _routes_to_planes(result.routes_RNK)
    meta['routes_start'] = result.routes_start
  return encode(meta, arrays)


def bytes_to_result(data: bytes) -> types.GenerateResult:
  """Inverse of `result_to_bytes`. ValueError on anything malformed."""
  meta, arrays = decode(data)
  try:
    token_T = _token(arrays)
    return types.GenerateResult(
      token_T=token_T,
      logp_T=arrays['logp'],
      entropy_T=arrays['entropy'],
      version_T=arrays['version'],
      kept=_array_to_kept(arrays['kept'], token_T),
      finish=meta['finish'],
      topk_bound=int(meta['topk_bound']),
      routes_RNK=_planes_to_routes(arrays.get('routes'), ''),
      routes_start=int(meta.get('routes_start', 0)),
    )
  except (KeyError, TypeError) as e:
    raise ValueError(f'not a generate result: {e!r}') from e
