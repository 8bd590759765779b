"""The weights of a store as a follower reads them through relay nodes.

`Client` has the reading half of `kv.Store`, so a `follower.Follower` does not know what
it stands on. It asks the node of its own host first, then that one's ancestors, then
perhaps the store, and hands out only what verifies. A manifest that was absent and is
asked for again is waited for (long polling): a follower that polls in a loop learns of
a version when its node does.
"""

import asyncio
from collections.abc import Coroutine, Sequence
import concurrent.futures
import threading
from typing import Any, TypeVar

from swe17.store import kv
from swe17.sync import manifest, relay_route, relay_source

_T = TypeVar('_T')


class Client:
  """A read-only store over relay nodes. Thread-safe; owns a thread until `close`."""

  def __init__(self, url: str, sources: Sequence[relay_source.Source], wait: float):
    self.url = url
    self._wait = wait
    self._absent = ''  # the manifest that was not there when it was last asked for
    self._route = relay_route.Route(sources)
    self._lock = threading.Lock()
    self._closed = False
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='relay-client', daemon=True
    )
    self._thread.start()

  @property
  def faults(self) -> dict[str, int]:
    """Failures by source."""
    return dict(self._route.faults)

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    """Reads as `kv.Store.read` does. ValueError for a key outside of weights/."""
    version = relay_source.manifest_version(kv.check_key(key))
    if version is not None:
      wait = self._wait if key == self._absent else 0.0
      data = self._call(self._route.manifest(version, wait), key)
      self._absent = key if data is None else ''
      return data if data is None else data[start:stop]
    if relay_source.object_version(key) is None:
      raise ValueError(
        f'{self.url}: got key {key!r}, want weights, no relay has others'
      )
    return self._call(self._route.data(key, start, stop), key)

  def list(self, prefix: str) -> list[str]:
    """Lists manifests. ValueError for another prefix than theirs."""
    if not prefix.startswith(manifest.MANIFESTS):
      raise ValueError(f'{self.url}: got {prefix=}, want {manifest.MANIFESTS}')
    found = self._call(self._route.versions(), '')
    return [key for key in map(manifest.key_of, found) if key.startswith(prefix)]

  def write(self, key: str, data: bytes) -> None:
    raise kv.StoreError(self.url, key, 'a relay is read-only')

  def create(self, key: str, data: bytes) -> bool:
    raise kv.StoreError(self.url, key, 'a relay is read-only')

  def delete(self, key: str) -> None:
    raise kv.StoreError(self.url, key, 'a relay is read-only')

  def close(self) -> None:
    """Ends what is under way, with StoreError for those who wait, and the thread."""

    async def end() -> None:
      tasks = asyncio.all_tasks() - {asyncio.current_task()}
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
      await self._route.close()

    with self._lock:
      if self._closed:
        return
      self._closed = True
    asyncio.run_coroutine_threadsafe(end(), self._loop).result()
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def _call(self, work: Coroutine[Any, Any, _T], key: str) -> _T:
    with self._lock:  # whatever is submitted under it is ended by `close`
      if self._closed:
        work.close()
        raise kv.StoreError(self.url, key, 'was closed')
      done = asyncio.run_coroutine_threadsafe(work, self._loop)
    try:
      return done.result()
    except concurrent.futures.CancelledError as e:
      raise kv.StoreError(self.url, key, 'was closed meanwhile') from e
