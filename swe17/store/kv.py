"""A small, synchronous key-value store: the only bus between the roles.

Everything above is written against the five operations of `Store`. Values are whole
objects; the only condition is *create if absent*, and everything that must happen once
(a weight version, a group) rests on it. Each operation is atomic and thread-safe;
asyncio callers go through `asyncio.to_thread`.

The store behind it is tensorstore's. It keeps threads of its own, so an open store
must not cross a fork: spawn, and open it there by its URL.

Files are written by `_FileStore` itself. Of tensorstore's ways to lock a file (0.1.86),
`os` re-uses the temporary file that a killed writer left without cutting it, so that
its tail ends up in the next object of that name; `lockfile` blocks for ever on it;
`none` does not hold the precondition.
"""

import builtins
from collections.abc import Callable
import contextlib
import errno
import os
import re
from typing import Protocol, TypeVar
import uuid

import tensorstore as ts

_T = TypeVar('_T')

# Generation that tensorstore knows as "no such key". Its empty generation is "any".
_ABSENT = b'\x02'
_SEGMENT = re.compile(r'[A-Za-z0-9_+=][A-Za-z0-9._+=-]*')
_MAX_KEY = 512
_OS_CODE = re.compile(r"os_error_code='(\d+)'")
_OS_REASON = {
  1: 'no permission',
  2: 'the folder is missing',
  13: 'no permission',
  17: 'a file is where a folder should be',
  20: 'a file is where a folder should be',
  21: 'a folder is where the object should be',
  27: 'the object exceeds the file size limit',
  28: 'the disk is full',
  30: 'the file system is read-only',
  95: 'the file system has no hard links',
  122: 'the disk quota is used up',
}


class StoreError(RuntimeError):
  """The store did not answer as asked: the caller may try again, or stop and say so.

  After a failed `write`, `create` or `delete` it is *unknown* whether it took place.
  """

  def __init__(self, url: str, key: str, reason: str):
    super().__init__(f'store {url}: {key or "(listing)"}: {reason}')
    self.url = url
    self.key = key
    self.reason = reason


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


def open(url: str) -> Store:
  """Opens a store by URL.

  `file:///absolute/folder` (made if absent) is shared by every process that opens it.
  `memory://` is private to the object that is returned: pass that object on.
  ValueError on any other URL; StoreError if the folder can't be made.
  """
  scheme, found, path = url.partition('://')
  if found and scheme == 'file' and path.startswith('/'):
    try:
      os.makedirs(path, exist_ok=True)
    except OSError as e:
      reason = _OS_REASON.get(e.errno or 0, e.strerror or str(e))
      raise StoreError(url, path, f'cannot make the folder: {reason}') from e
    return _FileStore(url, path.rstrip('/') + '/')
  if url == 'memory://':
    return _TensorStore(url, {'driver': 'memory'})
  raise ValueError(f'store: got {url!r}, want file:///absolute/folder or memory://')


class _TensorStore:
  """A store over one tensorstore driver."""

  def __init__(self, url: str, spec: dict[str, str]):
    self.url = url
    self._kv = ts.KvStore.open(spec).result()
    self._pid = os.getpid()

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    check_key(key)
    if (start or 0) < 0 or (stop is not None and stop < (start or 0)):
      raise ValueError(
        f'read {key}: got range {start=} {stop=}, want 0 <= start <= stop'
      )
    span = slice(start, stop) if start or stop is not None else None
    try:
      got = self._call(key, lambda: self._kv.read(key, byte_range=span).result())
    except StoreError as e:
      # The driver refuses a range that the object does not cover; a slice is cut.
      if span is None or 'OUT_OF_RANGE' not in e.reason:
        raise
      whole = self.read(key)
      return None if whole is None else whole[span]
    return None if got.state == 'missing' else got.value

  def write(self, key: str, data: bytes) -> None:
    check_key(key)
    self._call(key, lambda: self._kv.write(key, data).result())

  def create(self, key: str, data: bytes) -> bool:
    check_key(key)
    stamp = self._call(
      key, lambda: self._kv.write(key, data, if_equal=_ABSENT).result()
    )
    # A generation comes back if the write took place, the empty one if it did not.
    return stamp.generation != b''

  def list(self, prefix: str) -> list[str]:
    last = prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else ''
    span = ts.KvStore.KeyRange(prefix, last)
    keys = self._call('', lambda: self._kv.list(span).result())
    return sorted(key.decode() for key in keys)

  def delete(self, key: str) -> None:
    check_key(key)
    self._call(key, lambda: self._kv.write(key, None).result())

  def _call(self, key: str, operation: Callable[[], _T]) -> _T:
    if os.getpid() != self._pid:
      raise RuntimeError(
        f'store {self.url} was opened by process {self._pid} and used after a fork; '
        'spawn the process and open the store there'
      )
    try:
      return operation()
    except (ValueError, NotImplementedError, OSError) as e:
      raise StoreError(self.url, key, _reason(str(e))) from e


class _FileStore(_TensorStore):
  """A folder. Objects appear whole: a temporary file is linked or renamed into place.

  Temporary names are fresh ones that the driver's listing leaves out, so what a killed
  writer leaves behind is never seen and never re-used.
  """

  def __init__(self, url: str, root: str):
    super().__init__(url, {'driver': 'file', 'path': root})
    self._root = root

  def write(self, key: str, data: bytes) -> None:
    self._put(key, data, os.replace)

  def create(self, key: str, data: bytes) -> bool:
    return self._put(key, data, _link)

  def _put(
    self, key: str, data: bytes, place: Callable[[str, str], bool | None]
  ) -> bool:
    path = self._root + check_key(key)
    folder = os.path.dirname(path)
    temporary = f'{folder}/.{uuid.uuid4().hex}.__lock'
    try:
      os.makedirs(folder, exist_ok=True)
      try:
        with builtins.open(temporary, 'xb') as file:
          file.write(data)
          file.flush()
          os.fsync(file.fileno())
        done = place(temporary, path) is not False
      finally:
        with contextlib.suppress(FileNotFoundError):
          os.unlink(temporary)
      _sync_folder(folder)
    except OSError as e:
      plain = _OS_REASON.get(e.errno or 0, 'the write failed')
      raise StoreError(self.url, key, f'{plain} [{e.strerror}]') from e
    return done


def _link(temporary: str, path: str) -> bool:
  """Gives a file its name if the name is free. A hard link is atomic, also on NFS."""
  try:
    os.link(temporary, path)
  except FileExistsError:
    if os.path.isdir(path):
      raise IsADirectoryError(errno.EISDIR, 'Is a directory') from None
    # Over NFS the reply may be lost and the call repeated: two names say it worked.
    return os.stat(temporary).st_nlink == 2
  return True


def _sync_folder(folder: str) -> None:
  """Makes a new name durable."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _reason(text: str) -> str:
  """A plain reason for tensorstore's error text, which follows in brackets."""
  code = _OS_CODE.search(text)
  plain = _OS_REASON.get(int(code.group(1))) if code else None
  return f'{plain} [{text}]' if plain else text
