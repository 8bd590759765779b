"""Which old weight versions may go, and their removal: manifests first, then data.

  weights/ack/{follower}.json    {"version", "time"}: what a follower needs kept

A follower acknowledges the version it holds, or, while it joins, the full snapshot it
begins from. An acknowledgement younger than `sync.ack_seconds` is live. What stays is

  everything from the newest full snapshot at or before the oldest live one,
  and at least the newest `sync.keep_fulls` full snapshots with what follows them,
  but no more than `sync.keep_most` versions, beyond the full snapshots above:

a follower that is stuck cannot fill the disk; it heals from the newest full snapshot.
Without any live acknowledgement the full snapshots alone decide.

A full snapshot beside a delta is part of its version: it stays and goes with it.
Manifests go before data and the oldest first, so that a reader who finds a manifest
can fetch its data unless it is the collector's turn just then, and no version is ever
left whose predecessors on the way from a full snapshot are gone. What no manifest
speaks of was left by an attempt that died; it goes once its version is known to be
another's: the data of a publish in flight has no such version yet.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import logging
import time
from typing import Protocol, TypeVar

from swe17 import config
from swe17.store import kv
from swe17.sync import manifest

ACKS = 'weights/ack/'
_log = logging.getLogger(__name__)
# What is deleted after the manifests of versions, in this order.
_PARTS = (
  (manifest.FULLS, manifest.full_version),
  (manifest.DATA, manifest.data_version),
)
_FORGET = 10  # ack_seconds after which an acknowledgement is deleted
_T = TypeVar('_T')


class Retry(Protocol):
  """Makes a call to the store, again while it raises StoreError and there is hope."""

  def __call__(self, call: Callable[[], _T], /) -> _T: ...


def once(call: Callable[[], _T], /) -> _T:
  """The `Retry` that does not."""
  return call()


@dataclasses.dataclass(frozen=True)
class Entry:
  """What a collector must know of a published version."""

  full: bool  # followers can begin here
  keys: frozenset[str]  # of its data, and of the full snapshot beside it


@dataclasses.dataclass(frozen=True)
class Collected:
  """What one collection came to."""

  cutoff: int  # versions below this one are gone
  found: list[int]  # the versions that were in the store, ascending
  versions: int  # manifests deleted
  objects: int  # data objects and manifests of full snapshots deleted
  orphans: int  # of them, of attempts that died


def entry(made: manifest.Manifest, beside: manifest.Manifest | None) -> Entry:
  """A version as its collector sees it. beside: the full snapshot that it names."""
  keys = {o.key for m in (made, beside) if m is not None for o in m.objects}
  if made.full is not None:
    keys.add(made.full.key)
  return Entry(made.starts, frozenset(keys))


def ack_key(follower: str) -> str:
  """The key under which a follower acknowledges."""
  return kv.check_key(f'{ACKS}{follower}.json')


def acknowledge(store: kv.Store, follower: str, version: int) -> None:
  """Says that `follower` needs `version` kept, and all that follow it. StoreError."""
  text = json.dumps({'version': version, 'time': time.time()})
  store.write(ack_key(follower), text.encode())


def live(
  store: kv.Store, seconds: float, now: float, retry: Retry = once
) -> dict[str, int]:
  """The versions acknowledged within `seconds` of `now`, by the key of their follower.

  One that is damaged, or far older than that, is no acknowledgement; the latter is
  deleted. A clock may be off in either direction by less than `seconds`.
  """
  found = {}
  for key in retry(lambda: store.list(ACKS)):
    ack = retry(lambda key=key: _read_ack(store, key))
    if ack is None:
      continue
    version, at = ack
    if abs(now - at) < seconds:
      found[key] = version
    elif now - at > _FORGET * seconds:
      retry(lambda key=key: store.delete(key))
  return found


def _read_ack(store: kv.Store, key: str) -> tuple[int, float] | None:
  """(version, time) of an acknowledgement; None if it is gone or, twice, damaged."""
  for _ in range(2):
    data = store.read(key)
    if data is None:
      return None
    try:
      ack = json.loads(data)
      return int(ack['version']), float(ack['time'])
    except (ValueError, KeyError, TypeError) as e:
      _log.warning('acknowledgement %s is damaged: %r', key, e)
  return None


def cutoff(
  fulls: Sequence[int], newest: int, acked: Sequence[int], cfg: config.Sync
) -> int:
  """The oldest version to keep, a full snapshot; 0 while there are few of them.

  fulls: the full snapshots in the store, ascending. acked: live acknowledgements.
  """
  if len(fulls) < cfg.keep_fulls:
    return 0
  last = fulls[-cfg.keep_fulls]
  needed = min([last, *acked])
  anchor = max((v for v in fulls if v <= needed), default=0)
  floor = newest - cfg.keep_most + 1
  bound = min((v for v in fulls if v >= floor), default=last) if floor > 0 else 0
  return min(last, max(anchor, bound))


def collect(
  store: kv.Store,
  newest: int,
  cfg: config.Sync,
  known: dict[int, Entry],
  retry: Retry = once,
) -> Collected:
  """Deletes what nobody can need of the versions up to `newest`, the one just made.

  known: what the caller published; manifests of others are read and added, once.
  retry: makes each single call to the store. StoreError: what is left goes next time.
  """
  versions = retry(lambda: manifest.versions(store))
  for version in versions:
    _learn(store, version, known, retry)
  fulls = [v for v in versions if v in known and known[v].full]
  acked = live(store, cfg.ack_seconds, time.time(), retry)
  first = cutoff(fulls, newest, list(acked.values()), cfg)
  gone = [version for version in versions if version < first]
  for version in gone:
    retry(lambda version=version: store.delete(manifest.key_of(version)))
  for version in [v for v in known if v < first]:
    del known[version]
  objects, orphans = 0, 0
  for prefix, version_of in _PARTS:
    for key in retry(lambda prefix=prefix: store.list(prefix)):
      version = version_of(key)
      if version is None:
        continue
      if version >= first:
        # Looked up after the listing: by now its version may have been published.
        _learn(store, version, known, retry)
        if version not in known or key in known[version].keys:
          continue
        orphans += 1
      retry(lambda key=key: store.delete(key))
      objects += 1
  return Collected(first, versions, len(gone), objects, orphans)


def _learn(
  store: kv.Store, version: int, known: dict[int, Entry], retry: Retry
) -> None:
  """Adds a version to `known`, unless it is there, not published yet, or damaged.

  Damaged is also a version whose full snapshot is not to be read: its data is not
  known then, and so not deleted as somebody else's.
  """
  for _ in range(2):
    if version in known:
      return
    try:
      made = retry(lambda: manifest.read(store, version))
      if made is None:
        return
      beside = retry(lambda made=made: manifest.read_full(store, made))
    except ValueError as e:
      _log.warning('manifest %d is damaged: %s', version, e)
      continue
    if made.full is None or beside is not None:
      known[version] = entry(made, beside)
