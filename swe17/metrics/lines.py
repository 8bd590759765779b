"""Files of JSON lines: appended whole, shared by processes, read after a kill."""

from collections.abc import Mapping
import json
import os
from typing import Any


class Lines:
  """An append-only file of JSON objects, one a line, each written in one call."""

  def __init__(self, path: str):
    self.path = path
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    end = os.lseek(self._fd, 0, os.SEEK_END)
    # A writer that was killed in mid-line must not swallow our first line as well.
    self._torn = end > 0 and os.pread(self._fd, 1, end - 1) != b'\n'

  def write(self, value: Mapping[str, Any]) -> None:
    """Appends one object. ValueError if it is not JSON; OSError names the file."""
    data = (b'\n' if self._torn else b'') + dump(value)
    self._torn = False
    try:
      while data:
        data = data[os.write(self._fd, data) :]
    except OSError as e:
      raise OSError(e.errno, f'cannot write ({e.strerror})', self.path) from e

  def close(self) -> None:
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1


def dump(value: Mapping[str, Any]) -> bytes:
  """One line. ValueError on NaN, infinity, or what JSON does not hold."""
  try:
    return (json.dumps(value, allow_nan=False) + '\n').encode()
  except TypeError as e:
    raise ValueError(str(e)) from e


def parse(line: bytes) -> dict[str, Any] | None:
  """One line as a JSON object, or None if it is none (NaN is not JSON)."""
  try:
    value = json.loads(line, parse_constant=_refuse)
  except ValueError:
    return None
  return value if isinstance(value, dict) else None


def split(path: str) -> list[bytes]:
  """The non-empty lines of a file, unparsed; [] where it does not exist."""
  if not os.path.exists(path):
    return []
  with open(path, 'rb') as f:
    return [line for line in f.read().split(b'\n') if line.strip()]


def replace(path: str, data: bytes) -> None:
  """Puts `data` in place of a file at once: a kill in between leaves the old one."""
  fresh = f'{path}.{os.getpid()}.new'
  try:
    with open(fresh, 'wb') as f:
      f.write(data)
    os.replace(fresh, path)
  except OSError as e:
    if os.path.exists(fresh):
      os.unlink(fresh)
    raise OSError(e.errno, f'cannot write ({e.strerror})', path) from e


def _refuse(name: str) -> None:
  raise ValueError(f'{name} is not JSON')
