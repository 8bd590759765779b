"""A small, synchronous key-value store: the only bus between the roles.

Everything above is written against the five operations of `Store`. Values are whole
objects; the only condition is *create if absent*, and everything that must happen once
(a weight version, a group) rests on it. Each operation is atomic and thread-safe;
asyncio callers go through `asyncio.to_thread`.

  file://    store/file.py, one machine or a shared file system
  gs://      store/gcs.py   s3://  store/s3.py; both through store/retry.py
  memory://  tensorstore's, for tests

The store behind it is tensorstore's. It keeps threads of its own, so an open store
must not cross a fork: spawn, and open it there by its URL.

Object stores take about one write a second to one key. So whatever comes often has a
key of its own (a version, a group); keys that are written over, such as a sampler's
address, are written when a process starts.
"""

import re
from typing import Protocol

DEADLINE = 30.0  # s for which an operation of gs:// or s3:// is tried again
_SEGMENT = re.compile(r'[A-Za-z0-9_+=][A-Za-z0-9._+=-]*')
_MAX_KEY = 512
# Bucket names as both clouds take them, and a prefix without a slash at either end.
_BUCKET = re.compile(r'(gs|s3)://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(.+?))?/?')


class StoreError(RuntimeError):
  """The store did not answer as asked: the caller may try again, or stop and say so.

  After a failed `write`, `create` or `delete` it is *unknown* whether it took place.
  `transient`: the store was busy or out of reach, rather than wrong or full.
  """

  def __init__(self, url: str, key: str, reason: str, *, transient: bool = False):
    super().__init__(f'store {url}: {key or "(listing)"}: {reason}')
    self.url = url
    self.key = key
    self.reason = reason
    self.transient = transient


class Store(Protocol):
  """What every store offers. Keys as `check_key` wants them; all raise StoreError."""

  url: str

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    """Reads bytes [start, stop), cut like a slice, or None if there is no such key."""

  def write(self, key: str, data: bytes) -> None:
    """Writes an object whole, over what is there; on return it is durable."""

  def create(self, key: str, data: bytes) -> bool:
    """Writes an object if its key is absent. False, and nothing done, if it exists."""

  def list(self, prefix: str) -> list[str]:
    """Lists the keys that begin with `prefix`, sorted."""

  def delete(self, key: str) -> None:
    """Deletes an object; no error if it is not there."""


def check_key(key: str) -> str:
  """Returns `key` if it is one or more plain names joined by '/', else ValueError."""
  parts = key.split('/')
  plain = all(_SEGMENT.fullmatch(p) and not p.endswith('.__lock') for p in parts)
  if not plain or len(key) > _MAX_KEY:
    raise ValueError(
      f'store key: got {key!r}, want names of letters, digits and ._+=- joined by /, '
      f'not beginning with a dot or dash, at most {_MAX_KEY} characters'
    )
  return key


def bucket_of(url: str) -> tuple[str, str, str]:
  """(scheme, bucket, prefix) of a gs:// or s3:// URL; ValueError for any other."""
  found = _BUCKET.fullmatch(url)
  if found is None:
    raise ValueError(
      f'store: got {url!r}, want file:///absolute/folder, gs://bucket/prefix, '
      's3://bucket/prefix or memory://'
    )
  scheme, bucket, prefix = found.group(1), found.group(2), found.group(3) or ''
  return scheme, bucket, check_key(prefix) if prefix else ''


def open(url: str, *, deadline: float = DEADLINE) -> Store:
  """Opens a store by URL.

  `file:///absolute/folder` (made if absent) is shared by every process that opens it.
  `memory://` is private to the object that is returned: pass that object on.
  `gs://bucket[/prefix]` and `s3://bucket[/prefix]`: the bucket must be there, and is
  looked at. Their operations are tried again for `deadline` seconds, then StoreError.

  Whom they talk to is read from the environment by this call and kept by the store:
  TENSORSTORE_GCS_HTTP_URL with STORAGE_EMULATOR_HOST (both or neither) for gs://,
  AWS_ENDPOINT_URL for s3://. So processes, and stores of one process, may each have
  an endpoint of their own, such as a proxy.

  ValueError on any other URL; StoreError, within seconds, if the folder can't be made
  or the bucket is missing, out of reach, or barred.
  """
  # Each kind is imported when it is opened: no other pays for its libraries.
  scheme, found, path = url.partition('://')
  if found and scheme == 'file' and path.startswith('/'):
    from swe17.store import file

    return file.open(url, path)
  if url == 'memory://':
    from swe17.store import driver

    return driver.TensorStore(url, {'driver': 'memory'})
  scheme, bucket, prefix = bucket_of(url)
  if scheme == 'gs':
    from swe17.store import gcs

    return gcs.open(url, bucket, prefix, deadline)
  from swe17.store import s3

  return s3.open(url, bucket, prefix, deadline)
