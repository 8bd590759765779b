"""Which byte ranges of a version's objects a follower reads, and where blocks lie.

A follower of everything reads each object whole. One of some tensors reads the ranges
of their blocks, neighbours and near neighbours in one request: a gap below `_GAP` costs
less to read than another round trip.
"""

import bisect
from collections.abc import Collection, Sequence
from concurrent import futures
import dataclasses

from swe17.store import kv
from swe17.sync import manifest, pack

_GAP = 64 << 10  # bytes between two ranges that are read along


@dataclasses.dataclass(frozen=True)
class Span:
  """One request: `start` to `stop` of an object."""

  object: int  # index into Manifest.objects
  key: str
  start: int
  stop: int
  whole: bool  # all of the object


def plan(made: manifest.Manifest, names: Collection[str] | None) -> list[Span]:
  """The requests for the tensors `names` (None: every object, whole), in order.

  A name the manifest does not have is left to `pack.unpack` to refuse.
  """
  if names is None:
    return [Span(i, o.key, 0, o.size, True) for i, o in enumerate(made.objects)]
  cuts = sorted(
    (block.object, block.start, block.stop)
    for row in made.tensors
    if row.name in names
    for block in row.blocks
    if block.coding != 'same'
  )
  merged: list[list[int]] = []
  for which, start, stop in cuts:
    last = merged[-1] if merged else None
    if last is not None and last[0] == which and start - last[2] <= _GAP:
      last[2] = max(last[2], stop)
    else:
      merged.append([which, start, stop])
  return [_span(made, *row) for row in merged]


def fetch(
  store: kv.Store, made: manifest.Manifest, spans: Sequence[Span], threads: int
) -> list[bytes]:
  """Reads the bytes of each span. Damaged if one is gone or cut; StoreError."""

  def read(span: Span) -> bytes:
    if span.whole:
      data = store.read(span.key)
    else:
      data = store.read(span.key, span.start, span.stop)
    if data is None:
      raise pack.Damaged('missing', f'version {made.version}: {span.key} is gone')
    if len(data) != span.stop - span.start:
      raise pack.Damaged(
        'truncated', f'{span.key}: got {len(data)} bytes of {span.stop - span.start}'
      )
    return data

  if threads <= 1 or len(spans) <= 1:
    return [read(span) for span in spans]
  with futures.ThreadPoolExecutor(threads) as pool:
    return list(pool.map(read, spans))


def frames(spans: Sequence[Span], parts: Sequence[bytes]) -> pack.FrameOf:
  """Finds a block's stored bytes in what was read. `parts`: the bytes of each span."""
  starts = [(span.object, span.start) for span in spans]

  def frame_of(block: manifest.Block) -> memoryview:
    at = bisect.bisect_right(starts, (block.object, block.start)) - 1
    span = spans[at]
    if at < 0 or span.object != block.object or block.stop > span.stop:
      raise pack.Damaged('missing', f'range of {block} was not read')
    return memoryview(parts[at])[block.start - span.start : block.stop - span.start]

  return frame_of


def _span(made: manifest.Manifest, which: int, start: int, stop: int) -> Span:
  entry = made.objects[which]
  return Span(which, entry.key, start, stop, (start, stop) == (0, entry.size))
