"""Stores what a version is made of: data and full snapshots, and last its manifest.

Nothing is ever overwritten. Data objects and the manifests of full snapshots get names
that were never used before, not even by another try at the same version: an earlier
try whose reply was lost may have a manifest that points to its names. They are read
back before anything speaks of them. A version's manifest is created on condition that
there is none; one that was stored damaged is put right by the attempt that created it.
"""

from collections.abc import Callable
import logging
import time
from typing import TypeVar

from swe17.store import kv
from swe17.sync import codec, manifest

_log = logging.getLogger(__name__)
_T = TypeVar('_T')
_TRIES = 4
_BACKOFF = 0.05  # seconds, doubled with every try


class PublishConflict(RuntimeError):
  """Another learner is at work on this run: this one must stop, and say so."""


class Upload:
  """One attempt's way into one store. One call at a time.

  Every call tries again, `_TRIES` times at most, and then raises StoreError.
  """

  def __init__(self, store: kv.Store, attempt: str):
    self.attempt = kv.check_key(attempt)
    self._store = store
    self._names = 0  # counts them, so that each object gets a fresh one

  def data(self, version: int, data: bytes) -> manifest.Object:
    """Stores one object of a version's frames."""
    return self._fresh(f'{manifest.DATA}{version:08d}', '.bin', data)

  def full(self, made: manifest.Manifest) -> manifest.Beside:
    """Stores the manifest of a full snapshot, for the version's own to name."""
    data = manifest.to_bytes(made)
    stored = self._fresh(f'{manifest.FULLS}{made.version:08d}', '.json', data)
    return manifest.Beside(
      stored.key, stored.size, codec.stored_hash(data), made.data_bytes
    )

  def version(self, made: manifest.Manifest) -> manifest.Manifest:
    """Creates a version's manifest, once, and gives the one that stands there.

    A reply that was lost is looked into: what an earlier call of ours created late is
    as good, if it is of the same weights. Otherwise PublishConflict.
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

    return self.retry(put)

  def latest(self) -> int | None:
    """The newest version that has a manifest, or None."""
    return self.retry(lambda: manifest.latest(self._store))

  def read(self, version: int) -> manifest.Manifest | None:
    """A version's manifest. PublishConflict if it is damaged, twice in a row."""
    return self.retry(lambda: self._read(version))

  def retry(self, call: Callable[[], _T], /) -> _T:
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

  def _read(self, version: int) -> manifest.Manifest | None:
    try:
      return manifest.read(self._store, version)
    except ValueError:
      _log.warning('manifest %d is damaged; reading it once more', version)
    try:
      return manifest.read(self._store, version)
    except ValueError as e:
      raise PublishConflict(f'version {version} exists and is damaged: {e}') from e

  def _fresh(self, stem: str, suffix: str, data: bytes) -> manifest.Object:
    """Stores an object under a fresh name and reads it back."""

    def put() -> manifest.Object:
      self._names += 1
      key = f'{stem}-{self.attempt}-{self._names}{suffix}'
      self._store.write(key, data)
      if self._store.read(key) != data:
        raise kv.StoreError(self._store.url, key, 'was not stored as it was written')
      return manifest.Object(key, len(data))

    return self.retry(put)
