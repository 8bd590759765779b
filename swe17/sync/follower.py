"""Follows the learner's weight versions, from the store alone.

A follower holds one version: its number, its manifest (with the plan) and its tensors
on the host. `poll` looks for a newer one, downloads, decodes into new arrays and
verifies every byte; what it returns is staged, and nothing has changed. `commit`
switches. Between the two the sampler brings its device up to date.

  looking    the next manifest's key; a listing at the start, and after some misses,
             since the next version may have been collected
  chains     several versions behind: all deltas in one staging, or from the last full
             snapshot among them, whichever is fewer bytes (chains.py). Who keeps up
             reads the deltas only, also where a full snapshot stands beside one
  damage     a gap, a wrong base, a bad hash, a missing object: the old version stays,
             the reason is logged and counted in `faults`, and the newest full snapshot,
             with what follows it, is tried instead
  shards     with `names`, only the byte ranges of those tensors' blocks are read; each
             is verified by itself, and the version by its base's digest
  keeping    with `ack`, it tells the collector what it needs kept (collect.py)

So a follower is at some published version, byte for byte, or at none: never between.
Versions only go up; a store that holds only older ones is a fault ('older'). A delta is
on one base, known by number and digest, whichever learner made either of them.
"""

import collections
from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import logging
import time

import numpy as np

from swe17.store import kv
from swe17.sync import chains, codec, collect, manifest, pack, ranges

_log = logging.getLogger(__name__)
_LIST_AFTER = 8  # misses of the next key before the store is listed
_MAX_PAUSE = 8  # polls left out after repeated faults
_ACK_EVERY = 5.0  # seconds between acknowledgements of different versions, at least


@dataclasses.dataclass(frozen=True)
class Staged:
  """A verified version, ready to be applied and committed."""

  version: int
  base: int | None  # the version it takes the follower on from; None at the start
  manifest: manifest.Manifest
  tensors: Mapping[str, np.ndarray]  # read-only
  changed: frozenset[str]  # tensors whose bytes differ from the base's
  checksums: Mapping[str, np.ndarray]  # per tensor, `codec.checksum`
  bytes: int  # downloaded for it


class Follower:
  """One process's view of the weights. `poll` and `commit` from one thread at a time.

  names: the tensors to hold, for a follower of some shards; all without it.
  threads: that read objects and decode blocks.
  ack: the name to acknowledge under, unique to this process, or '' for none; it needs a
  store that can be written to. ack_seconds: as the learner's `sync.ack_seconds`.
  faults: how often what went wrong, by reason: store, missing, truncated, sha256,
  frame, raw_hash, names, manifest, base, gap, older, ack.
  """

  def __init__(
    self,
    store: kv.Store,
    *,
    names: Collection[str] | None = None,
    threads: int = 1,
    ack: str = '',
    ack_seconds: float = 600.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.faults: collections.Counter[str] = collections.Counter()
    self._store = store
    self._names = None if names is None else frozenset(names)
    self._threads = threads
    self._ack, self._ack_seconds, self._clock = ack, ack_seconds, clock
    self._acked: tuple[int, float] | None = None  # version, when
    self._held: Staged | None = None
    self._misses = 0
    self._pause = 0
    self._wait = 0

  @property
  def version(self) -> int | None:
    """The version held, or None before the first commit."""
    return self._held.version if self._held else None

  @property
  def tensors(self) -> Mapping[str, np.ndarray]:
    """The tensors of the version held; empty before the first commit."""
    return self._held.tensors if self._held else {}

  def poll(self) -> Staged | None:
    """Stages the newest version that can be reached, or returns None.

    Cheap while there is nothing new: one read of a key that is not there. After faults
    some calls return at once, so that a damaged object is not fetched in a tight loop.
    """
    if self._held is not None:
      self._acknowledge(self._held.version)
    if self._wait > 0:
      self._wait -= 1
      return None
    before = self.faults.total()
    try:
      for route in self._routes():
        staged = self._stage(route)
        if staged is not None:
          self._misses = self._pause = 0
          return staged
    except kv.StoreError as e:
      self._fault('store', str(e))
    if self.faults.total() > before:
      self._pause = min(_MAX_PAUSE, max(1, 2 * self._pause))
      self._wait = self._pause
    return None

  def commit(self, staged: Staged) -> None:
    """Switches to a staged version. ValueError unless it was staged from this one."""
    if staged.base != self.version:
      raise ValueError(
        f'version {staged.version} was staged from {staged.base}, but {self.version} '
        'is held now; poll again'
      )
    self._held = staged

  def close(self) -> None:
    """Takes the acknowledgement back: nothing needs to be kept for this follower."""
    if self._acked is not None:
      try:
        self._store.delete(collect.ack_key(self._ack))
      except kv.StoreError as e:
        _log.warning('an acknowledgement stays until it is old: %s', e)
      self._acked = None

  def _routes(self) -> Iterator[list[manifest.Manifest]]:
    """Chains of manifests that lead to a newer version, the cheapest first."""
    held = self.version
    if held is not None:
      before = self.faults.total()
      forward = chains.walk(self._read, held + 1)
      if forward:
        yield from chains.onward(forward, self._read_full)
      elif self.faults.total() == before:
        self._misses += 1
        if self._misses < _LIST_AFTER:
          return
    self._misses = 0
    newer = manifest.versions(self._store)
    if held is not None:
      if newer and newer[-1] < held:
        self._fault('older', f'the newest version is {newer[-1]}, {held} is held')
      newer = [v for v in newer if v > held]
      if newer and newer[0] > held + 1:
        self._fault('gap', f'version {held} is held, the next in the store: {newer[0]}')
    yield from chains.from_nothing(newer, self._read, self._read_full)

  def _read(self, version: int) -> manifest.Manifest | None:
    """One manifest, or None if it is absent or, twice in a row, damaged."""
    return self._twice(lambda: manifest.read(self._store, version))

  def _read_full(self, made: manifest.Manifest) -> manifest.Manifest | None:
    """The full snapshot of a version that has one; None, and a fault, if it is gone."""
    before = self.faults.total()
    full = self._twice(lambda: manifest.read_full(self._store, made))
    if full is None and self.faults.total() == before:
      self._fault('missing', f'the full snapshot of version {made.version} is gone')
    return full

  def _twice(
    self, read: Callable[[], manifest.Manifest | None]
  ) -> manifest.Manifest | None:
    for _ in range(2):
      try:
        return read()
      except ValueError as e:
        self._fault('manifest', str(e))
    return None

  def _stage(self, route: list[manifest.Manifest]) -> Staged | None:
    """Decodes as far along a chain as it verifies; None if not even its first step."""
    start = self._held
    made = start.manifest if start else None
    tensors = start.tensors if start else None
    size = 0
    if start is None:
      self._acknowledge(route[0].version)  # keep it while it is being read
    for step in route:
      try:
        tensors, read = self._decode(step, made, tensors)
      except pack.Damaged as e:
        self._fault(e.reason, str(e))
        break
      made = step
      size += read
    if made is None or tensors is None or (start and made.version == start.version):
      return None
    changed = _changed(start, made, tensors)
    kept = start.checksums if start else {}
    if start is not None and start.manifest.block_bytes != made.block_bytes:
      kept = {}  # sums are per block, cut otherwise now
    return Staged(
      version=made.version,
      base=start.version if start else None,
      manifest=made,
      tensors=tensors,
      changed=changed,
      checksums={
        n: kept[n]
        if n in kept and n not in changed
        else codec.checksum(a, made.block_bytes)
        for n, a in tensors.items()
      },
      bytes=size,
    )

  def _decode(
    self,
    made: manifest.Manifest,
    base: manifest.Manifest | None,
    tensors: Mapping[str, np.ndarray] | None,
  ) -> tuple[dict[str, np.ndarray], int]:
    """One version's tensors, verified, and the bytes read. Damaged if it fails twice.

    That the base is the right one is known by its digest, which covers every block of
    every tensor; what of it is held here was verified against the same digest.
    """
    if made.base is not None and (
      base is None or (made.base, made.base_digest) != (base.version, base.digest)
    ):
      raise pack.Damaged(
        'base',
        f'version {made.version} is a delta on version {made.base} '
        f'({made.base_digest}), held is {base and (base.version, base.digest)}',
      )
    try:
      return self._read_and_unpack(made, tensors)
    except pack.Damaged as e:
      # Damaged on the way, or where it lies? Reading once more tells.
      self._fault(e.reason, str(e))
      return self._read_and_unpack(made, tensors)

  def _read_and_unpack(
    self, made: manifest.Manifest, base: Mapping[str, np.ndarray] | None
  ) -> tuple[dict[str, np.ndarray], int]:
    spans = ranges.plan(made, self._names)
    parts = ranges.fetch(self._store, made, spans, self._threads)
    frame_of = ranges.frames(spans, parts)
    tensors = pack.unpack(
      made, frame_of, base, names=self._names, threads=self._threads
    )
    return tensors, sum(map(len, parts))

  def _acknowledge(self, version: int) -> None:
    """Says which version must be kept: when it changed, and again before it is old."""
    if not self._ack:
      return
    now = self._clock()
    if self._acked is not None:
      old, at = self._acked
      pause = min(_ACK_EVERY, self._ack_seconds / 4)
      if now - at < (self._ack_seconds / 4 if old == version else pause):
        return
    self._acked = version, now  # also if it fails: the next try is not at once
    try:
      collect.acknowledge(self._store, self._ack, version)
    except kv.StoreError as e:
      self.faults['ack'] += 1
      _log.warning('version %d was not acknowledged: %s', version, e)

  def _fault(self, reason: str, text: str) -> None:
    self.faults[reason] += 1
    _log.warning('weights stay at version %s: %s: %s', self.version, reason, text)

  # Last in the class: below it, the module of this name would be out of reach.
  @property
  def manifest(self) -> manifest.Manifest | None:
    """The manifest of the version held; `manifest.plan` is the plan."""
    return self._held.manifest if self._held else None


def _changed(
  start: Staged | None, made: manifest.Manifest, tensors: Mapping[str, np.ndarray]
) -> frozenset[str]:
  """The tensors whose bytes differ from those held, known by their digests."""
  if start is None:
    return frozenset(tensors)
  same_cut = start.manifest.block_bytes == made.block_bytes
  old = {row.name: row for row in start.manifest.tensors} if same_cut else {}
  new = {row.name: row for row in made.tensors}

  def kept(name: str) -> bool:
    if tensors[name] is start.tensors.get(name):
      return True
    was, now = old.get(name), new[name]
    return was is not None and (was.digest, was.dtype, was.shape) == (
      now.digest,
      now.dtype,
      now.shape,
    )

  return frozenset(name for name in tensors if not kept(name))


def read_plan(store: kv.Store, version: int | None = None) -> manifest.Manifest | None:
  """Reads a version's manifest, without weights: its plan, step and number.

  Without `version`, the newest one that is whole. None if there is none. ValueError if
  the version that was asked for is damaged.
  """
  if version is not None:
    return manifest.read(store, version)
  for newest in reversed(manifest.versions(store)):
    try:
      found = manifest.read(store, newest)
    except ValueError as e:
      _log.warning('manifest %d is damaged: %s', newest, e)
      continue
    if found is not None:
      return found
  return None
