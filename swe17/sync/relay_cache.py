"""A relay node's folder: verified objects, bounded, gone with the process.

Objects are put in after they verified and are checked again whenever they are read, so
that a disk that loses bits costs a transfer and nothing else. When the folder is full
the oldest version goes first: what stays is the newest deltas, and of full snapshots
the newest that was asked for, as long as the bound allows. The folder is emptied at the
start: what an earlier process left there may belong to another run.
"""

import collections
import contextlib
import dataclasses
import hashlib
import logging
import pathlib
import threading

import xxhash

_log = logging.getLogger(__name__)
_HOT = 64 << 20  # bytes of the objects read last that stay in memory


@dataclasses.dataclass(frozen=True)
class _Entry:
  version: int
  size: int
  hash: str  # xxh3-128
  path: pathlib.Path


class Cache:
  """Objects by key. Thread-safe; every call may touch the disk."""

  def __init__(self, folder: pathlib.Path, limit: int):
    self._folder, self._limit = folder, limit
    self._entries: dict[str, _Entry] = {}
    self._hot: collections.OrderedDict[str, bytes] = collections.OrderedDict()
    self._lock = threading.Lock()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob('*.object'):
      left.unlink()

  @property
  def size(self) -> int:
    """Bytes on disk."""
    with self._lock:
      return sum(entry.size for entry in self._entries.values())

  def keys(self) -> list[str]:
    with self._lock:
      return sorted(self._entries)

  def put(self, key: str, version: int, data: bytes) -> bool:
    """Keeps a verified object. False if the disk does not take it."""
    # Named by a hash: no key, whatever it holds, leads out of the folder.
    path = self._folder / f'{hashlib.sha256(key.encode()).hexdigest()[:40]}.object'
    try:
      path.write_bytes(data)
    except OSError as e:
      _log.warning('%s is not cached: %s', key, e)
      with contextlib.suppress(OSError):
        path.unlink()
      return False
    entry = _Entry(version, len(data), xxhash.xxh3_128_hexdigest(data), path)
    with self._lock:
      self._entries[key] = entry
      self._warm(key, data)
      self._evict()
    return True

  def read(self, key: str) -> bytes | None:
    """An object as it was put in, or None if it is not there, or not any more."""
    with self._lock:
      if key in self._hot:
        self._hot.move_to_end(key)
        return self._hot[key]
      entry = self._entries.get(key)
      if entry is None:
        return None
    try:
      data = entry.path.read_bytes()
    except OSError as e:
      _log.warning('%s cannot be read from the cache: %s', key, e)
      data = b''
    sound = xxhash.xxh3_128_hexdigest(data) == entry.hash
    with self._lock:
      if not sound and self._entries.get(key) is entry:
        _log.warning('%s is damaged in the cache and dropped', key)
        self._drop(key)
      if sound and key in self._entries:
        self._warm(key, data)
    return data if sound else None

  def _warm(self, key: str, data: bytes) -> None:
    self._hot[key] = data
    self._hot.move_to_end(key)
    # One object always stays, however large: it is about to be asked for k times.
    while len(self._hot) > 1 and sum(map(len, self._hot.values())) > _HOT:
      self._hot.popitem(last=False)

  def _evict(self) -> None:
    size = sum(entry.size for entry in self._entries.values())
    for key, entry in sorted(self._entries.items(), key=lambda item: item[1].version):
      if size <= self._limit:
        return
      self._drop(key)
      size -= entry.size

  def _drop(self, key: str) -> None:
    entry = self._entries.pop(key)
    entry.path.unlink(missing_ok=True)
