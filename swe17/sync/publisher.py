"""Publishes weight versions: data first, manifest last, nothing ever overwritten.

  encode -> data object under a fresh name -> read it back -> create the manifest

Until the manifest is there the version does not exist, and its creation is conditional
on its absence: a crash leaves an object that nobody refers to, and of two publishers
one wins. A delta is taken against what this publisher published last; after a restart,
a conflict or a failure that is unknown, so the next version is a full snapshot.

The disk and the way to it are not trusted: data is read back before the manifest
speaks of it, and a manifest that was stored damaged is put right by its own publisher.
"""

from collections.abc import Callable, Mapping
import dataclasses
import logging
import threading
import time
from typing import Any, TypeVar

import numpy as np

from swe17 import config
from swe17.store import kv
from swe17.sync import codec, manifest, pack

_log = logging.getLogger(__name__)
_T = TypeVar('_T')
_TRIES = 4
_BACKOFF = 0.05  # seconds, doubled with every try

latest = manifest.latest


class PublishConflict(RuntimeError):
  """The version is already published, by someone else or with other weights."""


@dataclasses.dataclass(frozen=True)
class Published:
  """What publishing one version came to."""

  version: int
  digest: str
  bytes: int  # stored, without the manifest
  raw_bytes: int
  changed_share: float  # elements whose bits changed; 1 for a full snapshot
  seconds: float
  full: bool


@dataclasses.dataclass(frozen=True)
class _Last:
  """What was published last: the base of the next delta."""

  manifest: manifest.Manifest
  tensors: Mapping[str, np.ndarray]


class Publisher:
  """Publishes to one store. One call at a time, from any thread.

  attempt: names this process, freshly for each start of a learner.
  """

  def __init__(self, store: kv.Store, cfg: config.Sync, *, attempt: str):
    kv.check_key(attempt)
    self._store = store
    self._cfg = cfg
    self._attempt = attempt
    self._lock = threading.Lock()
    self._last: _Last | None = None
    self._fulls: list[int] = []  # full snapshots known to be in the store, ascending
    self._objects = 0  # counts data objects, so that each gets a fresh name

  def publish(
    self,
    version: int,
    tensors: Mapping[str, np.ndarray],
    *,
    step: int,
    plan: Mapping[str, Any],
    full: bool = False,
  ) -> Published:
    """Publishes `tensors` as `version`, the one after the newest in the store.

    tensors: host copies that nobody writes to until the next version is published.
    ValueError: weights that are not finite, a version that leaves a gap, a plan that
    is not JSON. PublishConflict: the version exists already (nothing is changed; a
    repeated call with the same weights is no conflict). StoreError: the store failed
    `_TRIES` times; calling again with the same version is safe.
    """
    with self._lock:
      began = time.monotonic()
      _check_finite(tensors)
      last, self._last = self._last, None  # whatever fails below, the base is gone
      theirs = self._existing(version, last)
      if theirs is not None:
        return self._adopt(theirs, tensors, began)
      if full or not self._delta_fits(version, last, tensors):
        last = None
      rows, data, share = pack.pack(
        tensors,
        last.tensors if last else None,
        last.manifest.tensors if last else (),
        self._cfg.block_bytes,
      )
      made = manifest.Manifest(
        version=version,
        base=last.manifest.version if last else None,
        base_digest=last.manifest.digest if last else '',
        codec=self._cfg.codec if last else 'full',
        step=step,
        created=time.time(),
        attempt=self._attempt,
        block_bytes=self._cfg.block_bytes,
        objects=(),
        tensors=rows,
        digest=manifest.digest(rows),
        changed_share=share,
        plan=dict(plan),
      )
      made = self._put_data(made, data)
      self._put_manifest(made)
      self._last = _Last(made, dict(tensors))
      if made.base is None:
        self._fulls.append(version)
        self._collect()
      return _published(made, tensors, began)

  def _existing(self, version: int, last: _Last | None) -> manifest.Manifest | None:
    """The manifest that stands where `version` should go, if one does."""
    if last is not None and version == last.manifest.version + 1:
      return None  # the next one: creating it will tell
    found = self._retry(lambda: self._read(version))
    if found is not None:
      return found
    newest = self._retry(lambda: latest(self._store))
    if newest is not None and newest >= version:
      raise PublishConflict(f'version {version} is older than the newest, {newest}')
    want = 0 if newest is None else newest + 1
    if version != want:
      raise ValueError(f'version: got {version}, want {want}: versions leave no gap')
    return None

  def _read(self, version: int) -> manifest.Manifest | None:
    try:
      return manifest.read(self._store, version)
    except ValueError:
      _log.warning('manifest %d is damaged; reading it once more', version)
    try:
      return manifest.read(self._store, version)
    except ValueError as e:
      raise PublishConflict(f'version {version} exists and is damaged: {e}') from e

  def _adopt(
    self, found: manifest.Manifest, tensors: Mapping[str, np.ndarray], began: float
  ) -> Published:
    """Accepts a version as published if an earlier call of ours did publish it."""
    same = found.digest == codec.digest(tensors, found.block_bytes)
    if found.attempt != self._attempt or not same:
      raise PublishConflict(
        f'version {found.version} was published by attempt {found.attempt!r} '
        f'(this is {self._attempt!r}) with digest {found.digest}; '
        'publish under the number after the newest version'
      )
    self._last = _Last(found, dict(tensors))
    if found.base is None and found.version not in self._fulls:
      self._fulls.append(found.version)
    return _published(found, tensors, began)

  def _delta_fits(
    self, version: int, last: _Last | None, tensors: Mapping[str, np.ndarray]
  ) -> bool:
    if last is None or last.manifest.version != version - 1:
      return False
    if not self._fulls or version - self._fulls[-1] >= self._cfg.full_every:
      return False
    mine = {n: (a.dtype, a.shape) for n, a in tensors.items()}
    return mine == {n: (a.dtype, a.shape) for n, a in last.tensors.items()}

  def _put_data(self, made: manifest.Manifest, data: bytes) -> manifest.Manifest:
    """Stores the data under a fresh name and reads it back."""
    if not data:
      return made  # nothing changed: a manifest says it all

    def put() -> manifest.Manifest:
      # A name is never used twice, not even for another try at the same version: an
      # earlier try whose reply was lost may have a manifest that points to its name.
      self._objects += 1
      name = f'{made.version:08d}-{self._attempt}-{self._objects}.bin'
      key = manifest.DATA + name
      self._store.write(key, data)
      if self._store.read(key) != data:
        raise kv.StoreError(self._store.url, key, 'was not stored as it was written')
      return dataclasses.replace(made, objects=(manifest.Object(key, len(data)),))

    return self._retry(put)

  def _put_manifest(self, made: manifest.Manifest) -> None:
    """Creates the manifest, once; a reply that was lost is looked into."""
    key, data = manifest.key_of(made.version), manifest.to_bytes(made)
    created = False

    def put() -> None:
      nonlocal created
      if not created:
        created = self._store.create(key, data)
      found = self._store.read(key)
      if found == data:
        return
      if created:
        # Ours, but damaged on the way. Nobody can have parsed it, and nobody else can
        # have created this key, so putting the right bytes in its place is safe.
        self._store.write(key, data)
        raise kv.StoreError(self._store.url, key, 'was stored damaged; written again')
      if found is None:
        raise kv.StoreError(self._store.url, key, 'neither created nor there')
      if self._store.read(key) == data:
        return  # it was the reading that failed
      raise PublishConflict(
        f'version {made.version} holds what another learner published meanwhile; '
        'nothing of it was changed'
      )

    self._retry(put)

  def _collect(self) -> None:
    """Deletes what lies before the kept full snapshots: manifests, then data."""
    try:
      versions = self._retry(lambda: manifest.versions(self._store))
      keep = self._kept_fulls(versions)
      if len(keep) < self._cfg.keep_fulls:
        return
      cutoff = keep[0]
      for version in versions:
        if version < cutoff:
          self._store.delete(manifest.key_of(version))
      for key in self._store.list(manifest.DATA):
        version = manifest.data_version(key)
        if version is not None and version < cutoff:
          self._store.delete(key)
    except kv.StoreError as e:
      # Old versions that stay cost space only; the next full snapshot tries again.
      _log.warning('old weight versions were not deleted: %s', e)

  def _kept_fulls(self, versions: list[int]) -> list[int]:
    """The newest `keep_fulls` full snapshots, ascending; earlier learners' included."""
    keep = self._fulls[-self._cfg.keep_fulls :]
    older = [v for v in versions if v < keep[0]]
    while older and len(keep) < self._cfg.keep_fulls:
      version = older.pop()
      try:
        found = manifest.read(self._store, version)
      except ValueError as e:
        _log.warning('manifest %d is damaged: %s', version, e)
        continue
      if found is not None and found.base is None:
        keep.insert(0, version)
    self._fulls = keep
    return keep

  def _retry(self, call: Callable[[], _T]) -> _T:
    """Calls until the store answers, `_TRIES` times at most."""
    for attempt in range(_TRIES):
      try:
        return call()
      except kv.StoreError as e:
        if attempt == _TRIES - 1:
          raise
        _log.warning('publishing tries again: %s', e)
        time.sleep(_BACKOFF * 2**attempt)
    raise AssertionError('unreachable: the last try returns or raises')


def _check_finite(tensors: Mapping[str, np.ndarray]) -> None:
  if not tensors:
    raise ValueError('publish: got no tensors')
  for name, array in tensors.items():
    if array.dtype.name == 'bfloat16':
      bits = array.view(np.uint16) & 0x7F80
      count = int(np.count_nonzero(bits == 0x7F80))
    elif array.dtype.kind == 'f':
      count = int(np.count_nonzero(~np.isfinite(array)))
    else:
      continue
    if count:
      raise ValueError(
        f'tensor {name!r} has {count} of {array.size} values that are not finite; '
        'these weights are not published'
      )


def _published(
  made: manifest.Manifest, tensors: Mapping[str, np.ndarray], began: float
) -> Published:
  return Published(
    version=made.version,
    digest=made.digest,
    bytes=sum(entry.size for entry in made.objects),
    raw_bytes=sum(array.nbytes for array in tensors.values()),
    changed_share=made.changed_share,
    seconds=time.monotonic() - began,
    full=made.base is None,
  )
