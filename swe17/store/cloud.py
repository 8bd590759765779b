"""What gs:// and s3:// share: one attempt at each operation, and opening a bucket."""

from collections.abc import Callable
import os
from typing import Any

from swe17.store import driver, reasons, retry

# s for an attempt: a line that went dead is left for a new connection.
_ATTEMPT = 15.0
_OPENING = 10.0  # s until the bucket must have answered
# Read by tensorstore when it makes its first request: curl gives up a connection that
# is not made in 10 s, and a transfer that has not moved for as long.
_CURL = {
  'TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS': '10',
  'TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS': '10',
  'TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES': '1',
}


class CloudStore(driver.TensorStore):
  """Reads, writes and deletes through tensorstore, without its retries."""

  def __init__(
    self, url: str, spec: dict[str, Any], bucket: str, prefix: str, seconds: float
  ):
    for name, value in _CURL.items():
      os.environ.setdefault(name, value)
    self._scheme, self._bucket = url.partition('://')[0], bucket
    self._prefix = f'{prefix}/' if prefix else ''
    retries = f'{spec["driver"]}_request_retries'
    context = {**spec.get('context', {}), retries: {'max_retries': 0}}
    place = {'bucket': bucket, 'path': self._prefix, 'context': context}
    super().__init__(url, {**spec, **place}, seconds)

  def ours(self, key: str, data: bytes) -> bool:
    """Whether the object that is said to be there is the one we created."""
    return retry.holds(self, key, data)

  def check(self) -> None:
    """StoreError if the bucket is missing, barred or out of reach."""
    self.list('.opening')  # no key begins with a dot: an empty answer, in one request

  def _reason(self, kind: str, text: str) -> tuple[str, bool]:
    return reasons.of_cloud(self._scheme, self._bucket, kind, text)


def opened(make: Callable[[float], CloudStore], deadline: float) -> retry.RetryStore:
  """The store that `make(seconds of an attempt)` gives, looked at, with retries."""
  if deadline <= 0:
    raise ValueError(f'deadline of a store: got {deadline=}, want > 0 s')
  store = make(min(_ATTEMPT, deadline))
  policy = retry.Policy(deadline=min(_OPENING, deadline))
  retry.again(store.check, store.url, '', policy)
  return retry.RetryStore(store, retry.Policy(deadline=deadline), ours=store.ours)
