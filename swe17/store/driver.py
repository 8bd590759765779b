"""The five operations over one tensorstore driver; memory:// as it is.

One call here is one attempt: tensorstore's own retries are switched off where a driver
has them, so that who retries (store/retry.py) knows that an earlier try failed. Below
tensorstore, libcurl still repeats a request whose *re-used* connection broke before
the reply (seen with 0.1.86); a conditional create must reckon with it.
"""

from collections.abc import Callable
import os
from typing import Any

import tensorstore as ts

from swe17.store import kv, reasons

# Generation that tensorstore knows as "no such key". Its empty generation is "any".
_ABSENT = b'\x02'
_SLOWEST = 1 << 20  # bytes/s: an attempt gets the time of its bytes at this rate too
_WHOLE = 256 << 20  # bytes that an object of unknown size is taken to have


class TensorStore:
  """A store over one tensorstore driver. `seconds` bounds an attempt; None: nothing.

  An attempt gets the time of its bytes at 1 MiB/s on top.
  """

  def __init__(self, url: str, spec: dict[str, Any], seconds: float | None = None):
    self.url = url
    self._seconds = seconds
    self._pid = os.getpid()
    self._kv = self._call('look up', '', lambda: ts.KvStore.open(spec))

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    kv.check_key(key)
    if (start or 0) < 0 or (stop is not None and stop < (start or 0)):
      raise ValueError(
        f'read {key}: got range {start=} {stop=}, want 0 <= start <= stop'
      )
    span = slice(start, stop) if start or stop is not None else None
    size = _WHOLE if stop is None else stop - (start or 0)
    try:
      # One request, whose bytes are of one object; nothing is ever pieced together.
      got = self._call('read', key, lambda: self._kv.read(key, byte_range=span), size)
    except kv.StoreError as e:
      # The driver refuses a range that the object does not cover; a slice is cut.
      if span is None or 'OUT_OF_RANGE' not in e.reason:
        raise
      whole = self.read(key)
      return None if whole is None else whole[span]
    if got.state == 'unspecified':  # a reply that fits no read, such as 412
      raise kv.StoreError(self.url, key, 'the server did not answer the read')
    return None if got.state == 'missing' else got.value

  def write(self, key: str, data: bytes) -> None:
    kv.check_key(key)
    stamp = self._call('write', key, lambda: self._kv.write(key, data), len(data))
    if stamp.generation == b'':  # of a reply that says "not done" without an error
      raise kv.StoreError(self.url, key, 'the server did not take the write')

  def create(self, key: str, data: bytes) -> bool:
    kv.check_key(key)
    stamp = self._call(
      'create', key, lambda: self._kv.write(key, data, if_equal=_ABSENT), len(data)
    )
    # A generation comes back if the write took place, the empty one if it did not.
    return stamp.generation != b''

  def list(self, prefix: str) -> list[str]:
    last = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ''
    span = ts.KvStore.KeyRange(prefix, last)
    keys = self._call('list', '', lambda: self._kv.list(span))
    return sorted(key.decode() for key in keys)

  def delete(self, key: str) -> None:
    kv.check_key(key)
    self._call('delete', key, lambda: self._kv.write(key, None))

  def _call(self, kind: str, key: str, start: Callable[[], Any], size: int = 0) -> Any:
    """Starts one operation and waits for it; its errors as StoreError."""
    self._check_process()
    limit = self._limit(size)
    try:
      future = start()
      try:
        return future.result(timeout=limit)
      except TimeoutError:
        future.cancel()
        raise
    except TimeoutError as e:
      reason = f'no answer in {limit:.0f} s'
      raise kv.StoreError(self.url, key, reason, transient=True) from e
    except (ValueError, NotImplementedError, OSError) as e:
      reason, transient = self._reason(kind, str(e))
      raise kv.StoreError(self.url, key, reason, transient=transient) from e

  def _check_process(self) -> None:
    if os.getpid() != self._pid:
      raise RuntimeError(
        f'store {self.url} was opened by process {self._pid} and used after a fork; '
        'spawn the process and open the store there'
      )

  def _limit(self, size: int) -> float | None:
    """Seconds that an attempt over `size` bytes may take."""
    return None if self._seconds is None else self._seconds + size / _SLOWEST

  def _reason(self, kind: str, text: str) -> tuple[str, bool]:
    """(what to say, whether another try may succeed) for tensorstore's error text."""
    return reasons.of_system(text), False
