"""Finished groups in the store: rollouts append, the learner drains.

  groups/{start:08d}           one group; created if absent, never overwritten
  quarantine/groups/{start}    bytes that did not decode, set aside to be looked at

The key holds only the group's start index, so of several attempts at one start (a
rollout that was killed and restarted, a retry after a lost reply) exactly one is ever
in the store, and that one trains. What has been consumed is the learner's to remember:
its `seen` set is part of the checkpoint, and `discard` comes after the commit. A crash
in between leaves objects that `seen` already names: they are not trained again.
"""

from collections.abc import Container, Iterable
import re

from swe17 import types, wire
from swe17.store import kv

_PREFIX = 'groups/'
_QUARANTINE = 'quarantine/'
_KEY = re.compile(r'groups/(\d{8})')
_TRIES = 3


def key_of(start: int) -> str:
  """The key of the group with start index `start`."""
  if not 0 <= start < 10**8:
    raise ValueError(f'group start index: got {start}, want 0 <= start < 10**8')
  return f'{_PREFIX}{start:08d}'


def start_of(key: str) -> int:
  """Inverse of `key_of`; ValueError if `key` is no group's."""
  match = _KEY.fullmatch(key)
  if match is None:
    raise ValueError(f'group key: got {key!r}, want groups/ and eight digits')
  return int(match.group(1))


def append(store: kv.Store, group: types.Group) -> bool:
  """Stores a finished group. False if a group with this start index is present.

  A lost reply is looked into: if the bytes there are this group's, it was stored.
  StoreError if the store does not answer in three tries.
  """
  key, data = key_of(group.start), wire.group_to_bytes(group)
  for attempt in range(_TRIES):
    try:
      created = store.create(key, data)
      # After a failed try, "exists" may mean our own write whose reply was lost.
      return created or (attempt > 0 and store.read(key) == data)
    except kv.StoreError:
      if attempt == _TRIES - 1:
        raise
  raise AssertionError('unreachable: the last try returns or raises')


def list_new(store: kv.Store, seen: Container[str]) -> list[str]:
  """Lists keys of groups that are not in `seen`, in the order the groups started."""
  keys = store.list(_PREFIX)
  return [key for key in keys if _KEY.fullmatch(key) and key not in seen]


def load(store: kv.Store, key: str) -> types.Group:
  """Reads one group.

  ValueError if its bytes are corrupt, also when read a second time: count it and
  `quarantine` it. StoreError if it can't be read or is no longer there.
  """
  try:
    return _load(store, key)
  except ValueError:
    return _load(store, key)  # damaged on the way, or where it lies? ask again


def _load(store: kv.Store, key: str) -> types.Group:
  start = start_of(key)
  data = store.read(key)
  if data is None:
    raise kv.StoreError(store.url, key, 'the group is no longer there')
  group = wire.bytes_to_group(data)
  if group.start != start:
    raise ValueError(f'{key} holds the group with start index {group.start}')
  return group


def quarantine(store: kv.Store, key: str) -> str:
  """Moves a damaged group out of the learner's way; returns where its bytes lie now."""
  target = f'{_QUARANTINE}{key}'
  data = store.read(key)
  if data is not None:
    store.write(target, data)  # first the copy: a crash in between loses nothing
    store.delete(key)
  return target


def quarantined(store: kv.Store) -> set[int]:
  """Start indices of the groups that were set aside."""
  keys = store.list(f'{_QUARANTINE}{_PREFIX}')
  return {start_of(key.removeprefix(_QUARANTINE)) for key in keys}


def discard(store: kv.Store, keys: Iterable[str]) -> None:
  """Deletes consumed groups. Only after the checkpoint that names them is committed."""
  for key in keys:
    start_of(key)  # nothing but groups
    store.delete(key)
