"""Publishes weight versions: data first, manifest last, nothing ever overwritten.

  encode -> data objects under fresh names -> read back -> create the manifest

Until the manifest is there the version does not exist, and its creation is conditional
on its absence: a crash leaves objects that nobody refers to, and of two publishers one
wins. A delta is taken against what was *published* last, not against what was computed:
a version known to be in the store, byte for byte. A restarted learner reads it back
(`restore`), verified as any follower would; without it the next version is a full
snapshot. A chain is held together by digests, so it may run through several attempts.

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
from swe17.sync import codec, collect, follower, manifest, pack, pieces
from swe17.sync import plan as plans

_log = logging.getLogger(__name__)
_T = TypeVar('_T')
_TRIES = 4
_BACKOFF = 0.05  # seconds, doubled with every try
_RESTORE_POLLS = 20  # the follower leaves some of them out after faults

latest = manifest.latest


class PublishConflict(RuntimeError):
  """Another learner is at work on this run: this one must stop, and say so."""


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
  full_at: int  # the newest full snapshot, this version or one before it


class Publisher:
  """Publishes to one store. One call at a time, from any thread.

  attempt: names this process, freshly for each start of a learner.
  grid: how sharded tensors and stacks of experts are cut into pieces; None: not at all.
  """

  def __init__(
    self,
    store: kv.Store,
    cfg: config.Sync,
    *,
    attempt: str,
    grid: pieces.Grid | None = None,
  ):
    kv.check_key(attempt)
    self._store = store
    self._cfg = cfg
    self._attempt = attempt
    self._grid = grid or {}
    self._lock = threading.Lock()
    self._last: _Last | None = None
    self._unsure = False  # a call failed: its version may be in the store
    self._known: dict[int, collect.Entry] = {}
    self._objects = 0  # counts data objects, so that each gets a fresh name

  def restore(self, seconds: float) -> int | None:
    """Takes the newest version in the store as the base of the next delta.

    Every byte is verified. None, and the reason logged, if that fails or is not done
    within `seconds`: the next version is then a full snapshot.
    """
    found: list[_Last | None] = []
    reader = threading.Thread(
      target=lambda: found.append(self._read_last()), name='restore', daemon=True
    )
    reader.start()
    reader.join(seconds)
    if not found:
      _log.warning(
        'the base was not read within %g s: the next version is full', seconds
      )
      return None
    with self._lock:
      self._last = found[0]
    return None if found[0] is None else found[0].manifest.version

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
    is not one. PublishConflict: another learner published this version or a later one
    (nothing is changed; a repeated call with the same weights is no conflict).
    StoreError: the store failed `_TRIES` times; calling again with the same version is
    safe, and takes up the same base.
    """
    with self._lock:
      began = time.monotonic()
      _check_finite(tensors)
      plans.check(plan)
      tensors = pieces.split(tensors, self._grid)
      last, unsure = self._last, self._unsure
      self._last, self._unsure = None, True  # whatever else fails, the base is gone
      try:
        made = self._publish(version, tensors, step, plan, full, last, unsure)
      except kv.StoreError:
        self._last = last  # it was published, whatever became of this version
        raise
      self._unsure = False
      at = version if made.base is None or last is None else last.full_at
      self._last = _Last(made, dict(tensors), at)
      self._known[version] = collect.entry(made)
      if made.base is None:
        self._collect(version)
      return _published(made, tensors, began)

  def _publish(
    self,
    version: int,
    tensors: Mapping[str, np.ndarray],
    step: int,
    plan: Mapping[str, Any],
    full: bool,
    last: _Last | None,
    unsure: bool,
  ) -> manifest.Manifest:
    """Brings one version into the store, or finds that an earlier call did."""
    cfg = self._cfg
    follows = last is not None and version == last.manifest.version + 1
    if unsure or not follows:  # else: the next one, creating it will tell
      theirs = self._existing(version)
      if theirs is not None:
        return self._adopt(theirs, tensors)
    if full or not self._delta_fits(version, last, tensors):
      last = None
    rows, objects, share = pack.pack(
      tensors,
      last.tensors if last else None,
      last.manifest.tensors if last else (),
      codec=cfg.codec,
      block_bytes=cfg.block_bytes,
      object_bytes=cfg.object_bytes,
      threads=cfg.threads,
    )
    made = manifest.Manifest(
      version=version,
      base=last.manifest.version if last else None,
      base_digest=last.manifest.digest if last else '',
      codec=cfg.codec if last else 'full',
      step=step,
      created=time.time(),
      attempt=self._attempt,
      block_bytes=cfg.block_bytes,
      objects=tuple(self._put_data(version, data) for data in objects),
      tensors=rows,
      digest=manifest.digest(rows),
      changed_share=share,
      plan=dict(plan),
    )
    return self._put_manifest(made)

  def _read_last(self) -> _Last | None:
    """The newest version with its tensors, or None with the reason in the log."""
    try:
      newest = self._retry(lambda: latest(self._store))
      if newest is None:
        return None
      reader = follower.Follower(self._store, threads=self._cfg.threads)
      staged = None
      for _ in range(_RESTORE_POLLS):
        staged = reader.poll()
        if staged is not None and staged.version == newest:
          break
      else:
        _log.warning(
          'the base %d could not be read (%s): the next version is full',
          newest,
          dict(reader.faults),
        )
        return None
      at = newest
      while True:
        made = self._retry(lambda at=at: self._read(at))
        if made is None or made.base is None:
          break
        at = made.base
    except (kv.StoreError, PublishConflict) as e:
      _log.warning('the base was not read, the next version is full: %s', e)
      return None
    return _Last(staged.manifest, staged.tensors, at)

  def _existing(self, version: int) -> manifest.Manifest | None:
    """The manifest that stands where `version` should go, if one does."""
    found = self._retry(lambda: self._read(version))
    if found is not None:
      return found
    newest = self._retry(lambda: latest(self._store))
    if newest is not None and newest >= version:
      raise PublishConflict(
        f'version {version} is older than the newest, {newest}: another learner is '
        'ahead on this run'
      )
    want = 0 if newest is None else newest + 1
    if version != want and (
      version == 0 or self._retry(lambda: self._read(version - 1)) is None
    ):
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
    self, found: manifest.Manifest, tensors: Mapping[str, np.ndarray]
  ) -> manifest.Manifest:
    """Accepts a version as published if an earlier call of ours did publish it."""
    same = found.digest == codec.digest(tensors, found.block_bytes)
    if found.attempt != self._attempt or not same:
      raise PublishConflict(
        f'version {found.version} was published by attempt {found.attempt!r} '
        f'(this is {self._attempt!r}) with digest {found.digest}: two learners on one '
        'run; stop one of them'
      )
    return found

  def _delta_fits(
    self, version: int, last: _Last | None, tensors: Mapping[str, np.ndarray]
  ) -> bool:
    if last is None or last.manifest.version != version - 1:
      return False
    if version - last.full_at >= self._cfg.full_every:
      return False
    if last.manifest.block_bytes != self._cfg.block_bytes:
      return False  # restored from a learner with other settings
    mine = {n: (a.dtype, a.shape) for n, a in tensors.items()}
    return mine == {n: (a.dtype, a.shape) for n, a in last.tensors.items()}

  def _put_data(self, version: int, data: bytes) -> manifest.Object:
    """Stores an object under a fresh name and reads it back."""

    def put() -> manifest.Object:
      # A name is never used twice, not even for another try at the same version: an
      # earlier try whose reply was lost may have a manifest that points to its name.
      self._objects += 1
      name = f'{version:08d}-{self._attempt}-{self._objects}.bin'
      key = manifest.DATA + name
      self._store.write(key, data)
      if self._store.read(key) != data:
        raise kv.StoreError(self._store.url, key, 'was not stored as it was written')
      return manifest.Object(key, len(data))

    return self._retry(put)

  def _put_manifest(self, made: manifest.Manifest) -> manifest.Manifest:
    """Creates the manifest, once, and gives the one that stands there.

    A reply that was lost is looked into: what an earlier call of ours created late is
    as good, if it is of the same weights.
    """
    key, data = manifest.key_of(made.version), manifest.to_bytes(made)
    created = False

    def put() -> manifest.Manifest:
      nonlocal created
      if not created:
        created = self._store.create(key, data)
      found = self._store.read(key)
      if found == data:
        return made
      if created:
        # Ours, but damaged on the way. Nobody can have parsed it, and nobody else can
        # have created this key, so putting the right bytes in its place is safe.
        self._store.write(key, data)
        raise kv.StoreError(self._store.url, key, 'was stored damaged; written again')
      if found is None:
        raise kv.StoreError(self._store.url, key, 'neither created nor there')
      if self._store.read(key) == data:
        return made  # it was the reading that failed
      theirs = self._read(made.version)
      ours = theirs and (theirs.attempt, theirs.digest) == (made.attempt, made.digest)
      if theirs is not None and ours:
        return theirs
      raise PublishConflict(
        f'version {made.version} holds what another learner published meanwhile: two '
        'learners on one run; stop one of them. Nothing of it was changed'
      )

    return self._retry(put)

  def _collect(self, version: int) -> None:
    """Deletes old versions; notices a learner that is ahead of this one."""
    try:
      done = collect.collect(self._store, version, self._cfg, self._known, self._retry)
    except kv.StoreError as e:
      # Old versions that stay cost space only; the next full snapshot tries again.
      _log.warning('old weight versions were not deleted: %s', e)
      return
    if done.versions or done.orphans:
      _log.info(
        'versions below %d are deleted: %d, with %d objects (%d of attempts that died)',
        done.cutoff,
        done.versions,
        done.objects,
        done.orphans,
      )
    if done.found and done.found[-1] > version:
      raise PublishConflict(
        f'version {version} is out, but the newest is {done.found[-1]}: another '
        'learner is ahead on this run'
      )

  def _retry(self, call: Callable[[], _T], /) -> _T:
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
