"""A store that fails on purpose, for tests of everything that stands on a store.

`FaultStore` wraps any store. Before each operation a *rule* looks at it and may name a
fault. What each fault does, and to which operations:

  drop_before  all           the request is lost: no effect, StoreError
  drop_after   all           it takes effect and the reply is lost: StoreError
  busy         all           429 Too Many Requests: no effect, StoreError
  unavailable  all           503 Service Unavailable: no effect, StoreError
  full         write, create the disk is full: no effect, StoreError
  delay        all           sleeps, then goes on soundly
  truncate     read          returns the first half of the bytes
               write, create stores the first half and reports success
  flip         read          returns the bytes with one bit flipped
               write, create stores them so and reports success
  stale        read          returns what the key held before its last write
               list          leaves out the key that was written last
  splice       read          first half of the new bytes, then the rest of the old

Dropped, busy and unavailable are *transient* errors, as the drivers of gs:// and s3://
raise them: `retry.RetryStore` around a fault store behaves as around those.

A fault that does not fit the operation does nothing. A rule may also raise, which is
how a test kills a process just before an operation; `drop_after` with an `error` of
its own kills just after. One wrapper stands for one client: give each its own with
`beside`, and its operations are counted and failed by themselves.
"""

from collections.abc import Callable, Mapping
import dataclasses
import random
import threading
import time
from typing import TypeVar

from swe17.store import kv

KINDS = (
  'drop_before',
  'drop_after',
  'busy',
  'unavailable',
  'full',
  'delay',
  'truncate',
  'flip',
  'stale',
  'splice',
)
_T = TypeVar('_T')
_WRITES = ('write', 'create')
# Kind of a refusal -> what the store says, and whether another try may succeed.
_REFUSALS = {
  'drop_before': ('the request was lost', True),
  'busy': ('too many requests for this key or bucket (429)', True),
  'unavailable': ('the server is not ready (503)', True),
  'full': ('the disk is full', False),
}


@dataclasses.dataclass(frozen=True)
class Operation:
  """One call, as a rule sees it."""

  index: int  # 0, 1, 2, … in the order of this wrapper
  kind: str  # read | write | create | list | delete
  key: str  # the prefix, for list
  size: int = 0  # bytes to be stored


@dataclasses.dataclass(frozen=True)
class Fault:
  """What shall go wrong."""

  kind: str  # one of KINDS
  seconds: float = 0.0  # of a delay
  error: BaseException | None = None  # raised in place of StoreError

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(f'fault: got {self.kind!r}, want one of {KINDS}')


Rule = Callable[[Operation], Fault | None]


def never(operation: Operation) -> Fault | None:
  """A rule under which nothing fails."""
  return None


def at(faults: Mapping[int, Fault]) -> Rule:
  """A rule that fails exactly the operations whose index is a key of `faults`."""
  return lambda operation: faults.get(operation.index)


def seeded(
  seed: int, share: float, kinds: tuple[str, ...] = KINDS, until: int = 1 << 62
) -> Rule:
  """A rule that fails a `share` of the operations before index `until`, at random.

  What happens to operation i depends on (seed, i) alone.
  """

  def rule(operation: Operation) -> Fault | None:
    draw = random.Random(f'{seed}/{operation.index}')
    if operation.index >= until or draw.random() >= share:
      return None
    return Fault(draw.choice(kinds))

  return rule


def paced(seconds: float, clock: Callable[[], float] = time.monotonic) -> Rule:
  """A rule that refuses a write to a key less than `seconds` after its last one."""
  last: dict[str, float] = {}

  def rule(operation: Operation) -> Fault | None:
    if operation.kind not in _WRITES:
      return None
    now = clock()
    if now - last.get(operation.key, -float('inf')) < seconds:
      return Fault('busy')
    last[operation.key] = now
    return None

  return rule


def fills_up(capacity: int) -> Rule:
  """A rule under which the disk is full once `capacity` bytes have been accepted.

  Deleting and writing over free nothing, as in a bucket that keeps old versions.
  """
  stored, lock = 0, threading.Lock()

  def rule(operation: Operation) -> Fault | None:
    nonlocal stored
    if operation.kind not in _WRITES:
      return None
    with lock:
      if stored + operation.size > capacity:
        return Fault('full')
      stored += operation.size
    return None

  return rule


class _History:
  """What a store held before, shared by the clients of one store."""

  def __init__(self):
    self.lock = threading.Lock()
    self.before: dict[str, bytes | None] = {}  # what a key held before its last write
    self.newest = ''  # the key written last


class FaultStore:
  """A store with the faults that `rule` names; `log` holds what was asked and done."""

  def __init__(
    self,
    inner: kv.Store,
    rule: Rule = never,
    sleep: Callable[[float], None] = time.sleep,
    history: _History | None = None,
  ):
    self.url = f'fault+{inner.url}'
    self.rule = rule
    self.log: list[tuple[Operation, Fault | None]] = []
    self._inner = inner
    self._sleep = sleep
    self._lock = threading.Lock()
    self._history = history or _History()

  def beside(self, rule: Rule = never) -> 'FaultStore':
    """A second client of the same store, with its own rule, count and log."""
    return FaultStore(self._inner, rule, self._sleep, self._history)

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    fault = self._enter('read', key)

    def get() -> bytes | None:
      before = self._history.before
      if not fault or fault.kind not in ('stale', 'splice') or key not in before:
        return self._inner.read(key, start, stop)
      old, new = before[key], self._inner.read(key)
      if fault.kind == 'splice' and old is not None and new is not None:
        half = len(new) // 2
        old = new[:half] + old[half:]
      return None if old is None else old[start:stop]

    data = self._run(key, fault, get)
    return None if data is None else _damage(data, fault)

  def write(self, key: str, data: bytes) -> None:
    fault = self._enter('write', key, len(data))

    def put() -> None:
      with self._history.lock:
        before = self._inner.read(key)
        self._inner.write(key, _damage(data, fault))
        self._history.before[key], self._history.newest = before, key

    self._run(key, fault, put)

  def create(self, key: str, data: bytes) -> bool:
    fault = self._enter('create', key, len(data))

    def put() -> bool:
      with self._history.lock:
        done = self._inner.create(key, _damage(data, fault))
        if done:
          self._history.before[key], self._history.newest = None, key
      return done

    return self._run(key, fault, put)

  def list(self, prefix: str) -> list[str]:
    fault = self._enter('list', prefix)
    keys = self._run(prefix, fault, lambda: self._inner.list(prefix))
    if fault and fault.kind == 'stale':
      keys = [key for key in keys if key != self._history.newest]
    return keys

  def delete(self, key: str) -> None:
    fault = self._enter('delete', key)
    self._run(key, fault, lambda: self._inner.delete(key))

  def _enter(self, kind: str, key: str, size: int = 0) -> Fault | None:
    with self._lock:
      operation = Operation(len(self.log), kind, key, size)
      # Logged before the rule runs: what a raising rule stopped is on record too.
      self.log.append((operation, None))
    fault = self.rule(operation)
    if fault and fault.kind == 'full' and kind not in _WRITES:
      fault = None
    self.log[operation.index] = (operation, fault)
    return fault

  def _run(self, key: str, fault: Fault | None, call: Callable[[], _T]) -> _T:
    kind = fault.kind if fault else ''
    if fault and kind in _REFUSALS:
      reason, transient = _REFUSALS[kind]
      raise fault.error or kv.StoreError(self.url, key, reason, transient=transient)
    if fault and kind == 'delay':
      self._sleep(fault.seconds)
    result = call()
    if fault and kind == 'drop_after':
      lost = kv.StoreError(self.url, key, 'the reply was lost', transient=True)
      raise fault.error or lost
    return result


def _damage(data: bytes, fault: Fault | None) -> bytes:
  """`data` as a truncating or bit-flipping fault leaves it."""
  if fault and fault.kind == 'truncate':
    return data[: len(data) // 2]
  if fault and fault.kind == 'flip' and data:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
  return data
