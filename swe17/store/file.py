"""The store in a folder, for one machine or a shared file system.

Files are written here, not by tensorstore. Of its ways to lock a file (0.1.86), `os`
re-uses the temporary file that a killed writer left without cutting it, so that its
tail ends up in the next object of that name; `lockfile` blocks for ever on it; `none`
does not hold the precondition.
"""

import builtins
from collections.abc import Callable
import contextlib
import errno
import os
import uuid

from swe17.store import driver, kv, reasons


def open(url: str, path: str) -> 'FileStore':
  """Opens the folder `path` (made if absent). StoreError if it can't be made."""
  try:
    os.makedirs(path, exist_ok=True)
  except OSError as e:
    reason = reasons.OS.get(e.errno or 0, e.strerror or str(e))
    raise kv.StoreError(url, path, f'cannot make the folder: {reason}') from e
  return FileStore(url, path.rstrip('/') + '/')


class FileStore(driver.TensorStore):
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
    path = self._root + kv.check_key(key)
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
      plain = reasons.OS.get(e.errno or 0, 'the write failed')
      raise kv.StoreError(self.url, key, f'{plain} [{e.strerror}]') from e
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
