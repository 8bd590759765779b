"""Finished groups on their way to the store, and store calls that outlast a cut line.

Between a region and the store the line may be cut for minutes. `insist` asks again
until the store answers. A group that is not stored within seconds also lies in a file
until it is: neither the cut nor the end of this process loses it, and the next process
of this index puts it in line again. How many can wait is bounded by admission: nothing
more is issued while the plan does not move.
"""

import asyncio
from collections.abc import Callable
import logging
import pathlib
import time
from typing import TypeVar

from swe17 import types, wire
from swe17.metrics import lines
from swe17.store import groups as group_store
from swe17.store import kv

_T = TypeVar('_T')

_log = logging.getLogger(__name__)
PATIENCE = 600.0  # seconds until a store that does not answer is an error
_PAUSE, _LONGEST = 0.5, 8.0  # seconds between tries, doubling
_KEPT_AFTER = 2.0  # seconds until a group that is not stored is written to a file
_AT_ONCE = 4  # groups being stored together: a long line carries several


async def insist(call: Callable[[], _T]) -> _T:
  """Makes a call to the store, on a thread, until it is answered.

  StoreError after `PATIENCE` seconds, and at once where waiting is no help (a full
  disk, a missing permission).
  """
  until, pause = time.monotonic() + PATIENCE, _PAUSE
  while True:
    try:
      return await asyncio.to_thread(call)
    except kv.StoreError as e:
      if not e.transient or time.monotonic() > until:
        raise
      _log.warning('asking again in %g s: %s', pause, e)
    await asyncio.sleep(pause)
    pause = min(2 * pause, _LONGEST)


class Outbox:
  """Stores groups in the background. Use it from one event loop, and close it."""

  def __init__(
    self, store: kv.Store, folder: str, stored: Callable[[types.Group], None]
  ):
    """Args:
    store: where groups go.
    folder: where they wait as files while the store does not answer.
    stored: is told of every group that is in the store.
    """
    self._store, self._folder, self._stored = store, pathlib.Path(folder), stored
    self._waiting: dict[int, types.Group] = {}
    self._tasks: set[asyncio.Task[None]] = set()
    self._gate = asyncio.Semaphore(_AT_ONCE)

  @property
  def waiting(self) -> int:
    """Groups that are finished and not yet stored."""
    return len(self._waiting)

  def pick_up(self) -> set[int]:
    """Puts in line what an earlier process of this index left; its start indices."""
    found = set()
    for path in sorted(self._folder.glob('*.group')):
      try:
        group = wire.bytes_to_group(path.read_bytes())
      except ValueError as e:
        _log.warning('%s is set aside: %s', path, e)
        path.rename(path.with_suffix('.damaged'))
        continue
      self.put(group)
      found.add(group.start)
    return found

  def put(self, group: types.Group) -> None:
    """Takes a finished group over. Returns at once."""
    self._waiting[group.start] = group
    # The store itself may try for long before it says that there is no answer.
    asyncio.get_running_loop().call_later(_KEPT_AFTER, self._keep, group)
    self._tasks.add(asyncio.ensure_future(self._send(group)))

  def check(self) -> None:
    """Raises what kept a group from being stored: StoreError, or a bug."""
    for task in [task for task in self._tasks if task.done()]:
      self._tasks.discard(task)
      task.result()

  async def flush(self) -> None:
    """Waits until all are stored. Raises as `check` does."""
    while self._tasks:
      await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
      self.check()

  async def close(self) -> None:
    """Stops; what is not stored lies in files."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    self._tasks.clear()
    for group in self._waiting.values():
      self._keep(group)

  async def _send(self, group: types.Group) -> None:
    async with self._gate:
      await insist(lambda: group_store.append(self._store, group))
    del self._waiting[group.start]
    self._path(group).unlink(missing_ok=True)
    self._stored(group)

  def _keep(self, group: types.Group) -> None:
    path = self._path(group)
    if group.start in self._waiting and not path.exists():
      path.parent.mkdir(parents=True, exist_ok=True)
      lines.replace(str(path), wire.group_to_bytes(group))

  def _path(self, group: types.Group) -> pathlib.Path:
    return self._folder / f'{group.start:08d}.group'
