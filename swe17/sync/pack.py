"""A whole version to bytes and back: `pack` for the publisher, `unpack` for followers.

The frames of all blocks lie in order, tensors sorted by name, in objects of about one
size. `unpack` trusts nothing: a block's stored bytes must hash to its sha256, decode at
the right size, and give, on the base at hand, bytes that hash to what the learner had.
Blocks are independent, so threads share them; the result is the same for any number.
"""

from collections.abc import (
  Callable,
  Collection,
  Generator,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from concurrent import futures
import contextlib
import dataclasses
import io
from typing import Protocol, TypeVar

import numpy as np

from swe17.sync import codec as codecs
from swe17.sync import manifest, ulp

_J = TypeVar('_J')
_R = TypeVar('_R')
CODECS = ('ulp', 'ulp_ctx', 'xor')
_POOR = 0.5  # a delta of more than this share of its block may lose to 'full'


class FrameOf(Protocol):
  """Gives a block's stored bytes, `block.start` to `block.stop` of its object."""

  def __call__(self, block: manifest.Block, /) -> codecs.Bytes: ...


class Damaged(ValueError):
  """Stored weights that are not what their manifest says; `reason` is one word."""

  def __init__(self, reason: str, text: str):
    super().__init__(text)
    self.reason = reason


@dataclasses.dataclass(frozen=True)
class _Job:
  """One block on its way out. `base`: its bytes and their hash, or None."""

  name: str
  block: np.ndarray  # uint8 [n]
  dtype: str
  codec: str
  base: np.ndarray | None
  base_hash: str


@dataclasses.dataclass(frozen=True)
class _Stored:
  """One block on its way in, to `out`, which is `base` if all of a tensor is kept."""

  at: str
  row: manifest.Block
  dtype: str
  out: np.ndarray  # uint8 [n]
  base: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class _Encoded:
  coding: str
  frame: bytes
  sha256: str
  raw_hash: str
  changed: int  # elements


def pack(
  tensors: Mapping[str, np.ndarray],
  base: Mapping[str, np.ndarray] | None,
  base_rows: Sequence[manifest.Tensor],
  *,
  codec: str,
  block_bytes: int,
  object_bytes: int,
  threads: int,
) -> tuple[tuple[manifest.Tensor, ...], list[bytes], float]:
  """Encodes a version: its rows, the objects that they point into, the changed share.

  codec: 'ulp', 'ulp_ctx' or 'xor'. Integers are coded by 'xor' in any case, and a block
  that changed throughout may be coded by itself; each block's row says how.
  An object is closed as soon as it holds `object_bytes`, so one frame may exceed that.
  base: tensors of the same names and shapes that `base_rows` was packed from, or None
  for a full snapshot. ValueError if they were written to since, or on another codec.
  """
  if codec not in CODECS:
    raise ValueError(f'codec: got {codec!r}, want one of {CODECS}')
  names = sorted(tensors)
  known = {row.name: row for row in base_rows}
  jobs = (
    job
    for name in names
    for job in _jobs(
      name,
      tensors[name],
      None if base is None else (base[name], known[name]),
      codec,
      block_bytes,
    )
  )
  objects = _Objects(object_bytes)
  rows, changed, total = [], 0, 0
  with _each(_encode, jobs, threads) as encoded:
    for name in names:
      array = tensors[name]
      made = []
      for _ in codecs.blocks(array.nbytes, array.dtype.itemsize, block_bytes):
        done = next(encoded)
        changed += done.changed
        made.append(objects.add(done))
      rows.append(
        manifest.Tensor(
          name=name,
          dtype=array.dtype.name,
          shape=array.shape,
          digest=codecs.tensor_digest(row.raw_hash for row in made),
          blocks=tuple(made),
        )
      )
      total += array.size
  share = 1.0 if base is None else changed / max(total, 1)
  return tuple(rows), objects.close(), share


def unpack(
  made: manifest.Manifest,
  frame_of: FrameOf,
  base: Mapping[str, np.ndarray] | None,
  *,
  names: Collection[str] | None = None,
  threads: int = 1,
) -> dict[str, np.ndarray]:
  """Decodes a version into new, read-only arrays and checks every byte.

  frame_of: called for each block that stores bytes, in order; from several threads at
  once if `threads` is above 1. It may raise Damaged itself.
  names: the tensors that are wanted; all without it. Others' frames are not asked for.
  Tensors that did not change are the base's own arrays. Damaged, with the reason, if
  anything differs from the manifest; the base is left as it is in any case.
  """
  wanted = _wanted(made, base, names)
  old = base if made.base is not None and base is not None else {}
  result: dict[str, np.ndarray] = {}
  jobs: list[_Stored] = []
  for row in wanted:
    held = old.get(row.name)
    if held is not None and all(block.coding == 'same' for block in row.blocks):
      result[row.name], data = held, codecs.raw(held)
    else:
      data = np.empty(row.nbytes, np.uint8)
      result[row.name] = codecs.from_raw(data.view(), row.dtype, row.shape)
    raw = None if held is None else codecs.raw(held)
    cuts = codecs.blocks(row.nbytes, row.itemsize, made.block_bytes)
    for i, (cut, block) in enumerate(zip(cuts, row.blocks, strict=True)):
      at = f'version {made.version}: {row.name} block {i}'
      part = None if raw is None else raw[cut]
      jobs.append(_Stored(at, block, row.dtype, data[cut], part))
  with _each(lambda job: _decode(job, frame_of), jobs, threads) as decoded:
    for _ in decoded:
      pass
  return result


def _wanted(
  made: manifest.Manifest,
  base: Mapping[str, np.ndarray] | None,
  names: Collection[str] | None,
) -> list[manifest.Tensor]:
  """The rows asked for; Damaged unless they, and their base, are what was expected."""
  rows = {row.name: row for row in made.tensors}
  held = {n: (a.dtype.name, a.shape) for n, a in (base or {}).items()}
  if names is not None:
    missing = sorted(set(names) - rows.keys())
    if missing:
      raise Damaged('names', f'version {made.version}: has no tensors {missing}')
    rows = {name: row for name, row in rows.items() if name in names}
    held = {name: kind for name, kind in held.items() if name in names}
  if made.base is not None:
    kinds = {name: (row.dtype, row.shape) for name, row in rows.items()}
    if kinds != held:
      odd = sorted(n for n in kinds.keys() | held.keys() if kinds.get(n) != held.get(n))
      raise Damaged(
        'names', f'version {made.version}: tensors differ from its base: {odd}'
      )
  return list(rows.values())


def _jobs(
  name: str,
  array: np.ndarray,
  base: tuple[np.ndarray, manifest.Tensor] | None,
  codec: str,
  block_bytes: int,
) -> Iterator[_Job]:
  """A tensor's blocks, each with the same block of its base."""
  raw = codecs.raw(array)
  cuts = codecs.blocks(raw.size, array.dtype.itemsize, block_bytes)
  kind = array.dtype.name
  if base is None:
    for cut in cuts:
      yield _Job(name, raw[cut], kind, codec, None, '')
    return
  old, row = base
  old_raw = codecs.raw(old)
  for cut, block in zip(cuts, row.blocks, strict=True):
    yield _Job(name, raw[cut], kind, codec, old_raw[cut], block.raw_hash)


def _encode(job: _Job) -> _Encoded:
  """Encodes one block. ValueError if its base is not what was published."""
  if job.base is None:
    coding, frame, changed = 'full', codecs.encode_full(job.block), 0
  else:
    if codecs.raw_hash(job.base) != job.base_hash:
      raise ValueError(
        f'tensor {job.name!r} was written to after it was published; publish copies'
      )
    coding, frame, changed = _delta(job, job.base)
  return _Encoded(
    coding,
    frame,
    codecs.stored_hash(frame),
    codecs.raw_hash(job.block),
    changed,
  )


def _delta(job: _Job, base: np.ndarray) -> tuple[str, bytes, int]:
  """A block on its base: coding, frame, changed elements."""
  floats = job.dtype in ulp.DTYPES and job.block.size < ulp.LIMIT
  if job.codec in ('ulp', 'ulp_ctx') and floats:
    coding, thin = 'ulp', job.codec == 'ulp_ctx'
    frame, changed = ulp.encode(job.block, base, job.dtype, by_exponent=thin)
  else:
    coding = 'xor'
    frame = codecs.encode_delta(job.block, base)
    dtype = codecs.DTYPES[job.dtype]
    changed = codecs.changed(job.block.view(dtype), base.view(dtype)) if frame else 0
  if not changed:
    return 'same', b'', 0
  if len(frame) > _POOR * job.block.size:
    full = codecs.encode_full(job.block)
    if len(full) <= len(frame):
      coding, frame = 'full', full
  return coding, frame, changed


def _decode(job: _Stored, frame_of: FrameOf) -> None:
  """Decodes one block in place and checks it. Damaged if anything is not right."""
  block, out, base = job.row, job.out, job.base
  if block.coding == 'same':
    if base is not None and not np.may_share_memory(out, base):
      out[:] = base
  else:
    frame = frame_of(block)
    if len(frame) != block.stop - block.start:
      raise Damaged(
        'truncated',
        f'{job.at}: got {len(frame)} stored bytes of {block.stop - block.start}',
      )
    if codecs.stored_hash(frame) != block.sha256:
      raise Damaged('sha256', f'{job.at}: stored bytes do not match their sha256')
    try:
      if block.coding == 'full':
        out[:] = codecs.decode_full(frame, out.size)
      elif base is None:
        raise ValueError(f'coding {block.coding!r} without a base')
      elif block.coding == 'ulp':
        ulp.decode(frame, base, out, job.dtype)
      else:
        codecs.decode_delta(frame, base, out)
    except ValueError as e:
      raise Damaged('frame', f'{job.at}: {e}') from e
  if codecs.raw_hash(out) != block.raw_hash:
    raise Damaged('raw_hash', f'{job.at}: resulting bytes do not match their hash')


@contextlib.contextmanager
def _each(
  call: Callable[[_J], _R], jobs: Iterable[_J], threads: int
) -> Generator[Iterator[_R], None, None]:
  """Results in the order of the jobs; on an error the jobs not yet begun are left."""
  if threads <= 1:
    yield map(call, jobs)
    return
  with futures.ThreadPoolExecutor(threads) as pool:
    try:
      yield pool.map(call, jobs)
    finally:
      pool.shutdown(cancel_futures=True)


class _Objects:
  """Objects being filled with frames, one after another."""

  def __init__(self, object_bytes: int):
    self._limit = object_bytes
    self._closed: list[bytes] = []
    self._open = io.BytesIO()  # its value is handed over without a copy

  def add(self, done: _Encoded) -> manifest.Block:
    """Appends a frame and says where it lies."""
    start = self._open.tell()
    row = manifest.Block(
      coding=done.coding,
      object=len(self._closed),
      start=start,
      stop=start + self._open.write(done.frame),
      sha256=done.sha256,
      raw_hash=done.raw_hash,
    )
    if row.stop >= self._limit:
      self.close()
    return row

  def close(self) -> list[bytes]:
    """Closes the object being filled, if it holds anything; all objects so far."""
    if self._open.tell():
      self._closed.append(self._open.getvalue())
      self._open = io.BytesIO()
    return self._closed
