"""Answers that are kept by the content of what was asked."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
import hashlib
from typing import Any, Generic, TypeVar

Answer = TypeVar('Answer')


class Memo(Generic[Answer]):
  """Shared by all episodes of a process. Errors are never kept.

  Equal questions that come at the same time are asked once.
  """

  def __init__(self, lasting: Callable[[Answer], bool], capacity: int = 20_000):
    """`lasting` tells which answers would be the same again."""
    self._lasting, self._capacity = lasting, capacity
    self._kept: OrderedDict[bytes, Answer] = OrderedDict()
    self._running: dict[bytes, asyncio.Task[Answer]] = {}
    self.hits = self.misses = 0

  async def get(
    self, text: str, ask: Callable[[], Coroutine[Any, Any, Answer]]
  ) -> Answer:
    """The answer to the question that `text` is all of. Raises what `ask` raises."""
    key = hashlib.sha256(text.encode('utf-8', 'surrogatepass')).digest()
    if key in self._kept:
      self.hits += 1
      self._kept.move_to_end(key)
      return self._kept[key]
    if key in self._running:
      self.hits += 1
    else:
      self.misses += 1
      self._running[key] = asyncio.create_task(ask())
      self._running[key].add_done_callback(lambda done: self._ended(key, done))
    # Shielded: who waits may be cancelled, who else waits must not be.
    return await asyncio.shield(self._running[key])

  def _ended(self, key: bytes, done: asyncio.Task[Answer]) -> None:
    del self._running[key]
    if done.cancelled() or done.exception() is not None:
      return
    if self._lasting(done.result()):
      self._kept[key] = done.result()
      while len(self._kept) > self._capacity:
        self._kept.popitem(last=False)
