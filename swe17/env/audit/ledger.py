"""A file of JSON lines that remembers what is done, so that a stopped build goes on.

One line is one answer, written when it is known and never changed. A line that was cut
off when a build was killed is the last one; it is left out and its answer found anew.
"""

from collections.abc import Awaitable, Callable
import json
import os
import pathlib
from typing import Any


class Ledger:
  """Answers by key. Close it."""

  def __init__(self, path: str | os.PathLike[str]):
    self._path = pathlib.Path(path)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._rows: dict[str, Any] = {}
    whole = self._read()
    self._file = self._path.open('a', encoding='utf-8')
    if self._file.tell() > whole:
      self._file.truncate(whole)
    self.found = len(self._rows)  # answers of an earlier start

  def _read(self) -> int:
    """Reads whole lines; where they end. ValueError names a line that is none."""
    if not self._path.exists():
      return 0
    data = self._path.read_bytes()
    whole = data.rfind(b'\n') + 1
    for number, line in enumerate(data[:whole].splitlines(), 1):
      try:
        row = json.loads(line)
        self._rows[row['key']] = row['value']
      except (json.JSONDecodeError, KeyError, TypeError) as e:
        raise ValueError(f'{self._path}, line {number}: not an answer: {e}') from e
    return whole

  def __contains__(self, key: str) -> bool:
    return key in self._rows

  def get(self, key: str) -> Any:
    """The answer of a key. KeyError if there is none."""
    return self._rows[key]

  def put(self, key: str, value: Any) -> Any:
    """Writes an answer down, JSON-able, and returns it."""
    self._rows[key] = value
    self._file.write(json.dumps({'key': key, 'value': value}) + '\n')
    self._file.flush()
    return value

  async def once(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a key, made if it is not there. What `make` raises is not kept."""
    if key not in self._rows:
      self.put(key, await make())
    return self._rows[key]

  def close(self) -> None:
    self._file.close()
