"""Follows the learner's weight versions, from the store alone.

A follower holds one version: its number, its manifest (with the plan) and its tensors
on the host. `poll` looks for a newer one, downloads, decodes into new arrays and
verifies every byte; what it returns is staged, and nothing has changed. `commit`
switches. Between the two the sampler brings its device up to date.

  looking    the next manifest's key; a listing at the start, and after some misses,
             since the next version may have been collected
  chains     several versions behind: all deltas in one staging, or from the last full
             snapshot among them
  damage     a gap, a wrong base, another learner's delta, a bad hash, a missing object:
             the old version stays, the reason is logged and counted in `faults`, and
             the newest full snapshot, with what follows it, is tried instead

So a follower is at some published version, byte for byte, or at none: never between.
Versions only go up; a store that holds only older ones is a fault ('older').
"""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import logging

import numpy as np

from swe17.store import kv
from swe17.sync import codec, manifest, pack

_log = logging.getLogger(__name__)
_LIST_AFTER = 8  # misses of the next key before the store is listed
_MAX_PAUSE = 8  # polls left out after repeated faults


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

  faults: how often what went wrong, by reason: store, missing, truncated, sha256,
  frame, raw_hash, names, manifest, base, attempt, gap, older.
  """

  def __init__(self, store: kv.Store):
    self.faults: collections.Counter[str] = collections.Counter()
    self._store = store
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

  def _routes(self) -> Iterator[list[manifest.Manifest]]:
    """Chains of manifests that lead to a newer version, the cheapest first."""
    held = self.version
    if held is not None:
      before = self.faults.total()
      forward = self._walk(held + 1)
      if forward:
        fulls = [i for i, made in enumerate(forward) if made.base is None]
        if fulls:
          yield forward[fulls[-1] :]
        yield forward
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
    for version in reversed(newer):
      made = self._read(version)
      if made is not None and made.base is None:
        yield [made, *self._walk(version + 1)]

  def _walk(self, version: int) -> list[manifest.Manifest]:
    """Reads manifests from `version` on, up to the first that is absent or damaged."""
    chain = []
    while (made := self._read(version)) is not None:
      chain.append(made)
      version += 1
    return chain

  def _read(self, version: int) -> manifest.Manifest | None:
    """One manifest, or None if it is absent or, twice in a row, damaged."""
    for _ in range(2):
      try:
        return manifest.read(self._store, version)
      except ValueError as e:
        self._fault('manifest', str(e))
    return None

  def _stage(self, route: list[manifest.Manifest]) -> Staged | None:
    """Decodes as far along a chain as it verifies; None if not even its first step."""
    start = self._held
    made = start.manifest if start else None
    tensors = start.tensors if start else None
    size = 0
    for step in route:
      try:
        tensors = self._decode(step, made, tensors)
      except pack.Damaged as e:
        self._fault(e.reason, str(e))
        break
      made = step
      size += sum(entry.size for entry in step.objects)
    if made is None or tensors is None or (start and made.version == start.version):
      return None
    old = start.tensors if start else {}
    changed = frozenset(n for n, a in tensors.items() if a is not old.get(n))
    sums = dict(start.checksums) if start else {}
    for name in changed:
      sums[name] = codec.checksum(tensors[name], made.block_bytes)
    return Staged(
      version=made.version,
      base=start.version if start else None,
      manifest=made,
      tensors=tensors,
      changed=changed,
      checksums={name: sums[name] for name in tensors},
      bytes=size,
    )

  def _decode(
    self,
    made: manifest.Manifest,
    base: manifest.Manifest | None,
    tensors: Mapping[str, np.ndarray] | None,
  ) -> dict[str, np.ndarray]:
    """One version's tensors, verified. Damaged if that fails twice."""
    if made.base is not None:
      if base is None or (made.base, made.base_digest) != (base.version, base.digest):
        raise pack.Damaged(
          'base',
          f'version {made.version} is a delta on version {made.base} '
          f'({made.base_digest}), held is {base and (base.version, base.digest)}',
        )
      if made.attempt != base.attempt:
        raise pack.Damaged(
          'attempt',
          f'version {made.version} of attempt {made.attempt} is a delta on one of '
          f'{base.attempt}: a learner begins with a full snapshot',
        )
    try:
      return pack.unpack(made, self._fetch(made), tensors)
    except pack.Damaged as e:
      # Damaged on the way, or where it lies? Reading once more tells.
      self._fault(e.reason, str(e))
      return pack.unpack(made, self._fetch(made), tensors)

  def _fetch(self, made: manifest.Manifest) -> list[bytes]:
    objects = []
    for entry in made.objects:
      data = self._store.read(entry.key)
      if data is None:
        raise pack.Damaged('missing', f'version {made.version}: {entry.key} is gone')
      objects.append(data)
    return objects

  def _fault(self, reason: str, text: str) -> None:
    self.faults[reason] += 1
    _log.warning('weights stay at version %s: %s: %s', self.version, reason, text)

  # Last in the class: below it, the module of this name would be out of reach.
  @property
  def manifest(self) -> manifest.Manifest | None:
    """The manifest of the version held; `manifest.plan` is the plan."""
    return self._held.manifest if self._held else None


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
