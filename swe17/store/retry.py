"""Tries again what is worth it: back-off, jitter, one deadline an operation.

Only errors that say `transient` are tried again; all others are passed on at once.
Reading, listing and deleting may be repeated as they are, and a write over a key puts
the same bytes again. A *create* may not: after a try whose reply was lost, "it exists"
may mean our own object. It is then looked at, and

  ours     -> True, never a lost race
  another  -> False, never a success with another's bytes
  no answer by the deadline -> StoreError: unknown

By default an object is ours if it holds our bytes, so creators who must be told apart
write different bytes (an attempt id); gs:// marks every object with its creator.
"""

from collections.abc import Callable
import dataclasses
import random
import time
from typing import TypeVar

from swe17.store import kv

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Policy:
  """How long and how often. The pause doubles; each is cut by a random part of half."""

  deadline: float = kv.DEADLINE  # s from the start to the last try's start
  first_pause: float = 0.1  # s
  longest_pause: float = 5.0  # s


class RetryStore:
  """`inner` with retries. `ours(key, data)` tells whether we made what is there.

  An attempt is bounded by `inner` itself, so an operation ends at the latest one
  attempt after the deadline.
  """

  def __init__(
    self,
    inner: kv.Store,
    policy: Policy = Policy(),
    *,
    ours: Callable[[str, bytes], bool] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.url = inner.url
    self._inner, self._policy = inner, policy
    self._ours = ours or self._holds
    self._sleep, self._clock = sleep, clock

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    # A try that broke off is forgotten whole: its bytes never meet another object's.
    return self._try(key, lambda: self._inner.read(key, start, stop))

  def write(self, key: str, data: bytes) -> None:
    self._try(key, lambda: self._inner.write(key, data))

  def create(self, key: str, data: bytes) -> bool:
    failed = False

    def attempt() -> bool:
      nonlocal failed
      try:
        return self._inner.create(key, data) or (failed and self._ours(key, data))
      except kv.StoreError:
        failed = True
        raise

    return self._try(key, attempt)

  def list(self, prefix: str) -> list[str]:
    return self._try('', lambda: self._inner.list(prefix))

  def delete(self, key: str) -> None:
    self._try(key, lambda: self._inner.delete(key))

  def _holds(self, key: str, data: bytes) -> bool:
    return holds(self._inner, key, data)

  def _try(self, key: str, attempt: Callable[[], _T]) -> _T:
    return again(attempt, self.url, key, self._policy, self._sleep, self._clock)


def holds(store: kv.Store, key: str, data: bytes) -> bool:
  """Whether `key`, which is said to exist, holds `data`."""
  found = store.read(key)
  if found is None:
    reason = 'neither created nor there: deleted meanwhile, or the bucket is missing'
    raise kv.StoreError(store.url, key, reason, transient=True)
  return found == data


def again(
  attempt: Callable[[], _T],
  url: str,
  key: str,
  policy: Policy,
  sleep: Callable[[float], None] = time.sleep,
  clock: Callable[[], float] = time.monotonic,
) -> _T:
  """Calls `attempt` until it returns; StoreError if it can't or may not any more."""
  started, pause, tries = clock(), policy.first_pause, 0
  while True:
    try:
      return attempt()
    except kv.StoreError as e:
      if not e.transient:
        raise
      tries += 1
      # Several clients that were refused together shall not come back together.
      wait = pause * random.uniform(0.5, 1.0)
      spent = clock() - started
      if spent + wait > policy.deadline:
        reason = f'{e.reason}; gave up after {tries} tries in {spent:.1f} s'
        raise kv.StoreError(url, key, reason, transient=True) from e
    sleep(wait)
    pause = min(2 * pause, policy.longest_pause)
