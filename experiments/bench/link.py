"""A slow line on loopback: a TCP proxy with latency and a bandwidth each way.

  line = link.Link(('127.0.0.1', port), latency=0.15, rate=12.5e6)
  ... connect to line.address in place of the server ...
  line.cut(); line.heal(); line.close()

`latency` is one way, in seconds: a request and its answer take twice that, and so does
opening a connection before the first byte is through. `rate` is bytes a second in each
direction, shared by all connections, as on a real line. Each direction is a `Pipe`: a
byte leaves when the line has sent what came before it, and arrives `latency` later. How
much may be on its way at once is bounded by rate x latency and a buffer, so that a
sender feels a slow line as it would elsewhere. `cut` breaks every connection and
refuses new ones, `heal` ends that.

The proxy runs on a thread with an event loop of its own, in the process that makes it.
"""

import asyncio
import collections
from collections.abc import Callable, Coroutine
import dataclasses
import threading
import time
from typing import Any, TypeVar

_T = TypeVar('_T')
_CHUNK = 16 << 10  # bytes read at once: 1.3 ms of a line of 100 Mbit/s
_BUFFER = 256 << 10  # bytes that wait for the line, beyond those on their way


class Pipe:
  """When bytes get through one direction of a line. Times from `clock`, in seconds."""

  def __init__(self, latency: float, rate: float, clock: Callable[[], float]):
    if latency < 0 or rate <= 0:
      raise ValueError(f'link: got {latency=} {rate=}, want latency >= 0 and rate > 0')
    self.latency, self.rate = latency, rate
    self.bytes = 0  # sent through it so far
    self._clock = clock
    self._free = -float('inf')  # when the line has sent all that it was given

  def arrival(self, size: int) -> float:
    """Gives the line `size` bytes now; returns when the last of them arrives."""
    self._free = max(self._free, self._clock()) + size / self.rate
    self.bytes += size
    return self._free + self.latency

  @property
  def room(self) -> int:
    """Bytes that may be on the line or wait for it."""
    return _BUFFER + int(self.rate * self.latency)


@dataclasses.dataclass
class _Way:
  """One direction of one connection."""

  pipe: Pipe
  reader: asyncio.StreamReader
  writer: asyncio.StreamWriter


class Link:
  """A line to the server at `target`; clients connect to `address` instead."""

  def __init__(self, target: tuple[str, int], *, latency: float, rate: float):
    self.up = Pipe(latency, rate, time.monotonic)  # to the server
    self.down = Pipe(latency, rate, time.monotonic)
    self.connections = 0  # accepted so far
    self._target = target
    self._whole = True
    self._tasks: set[asyncio.Task[None]] = set()
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='link', daemon=True
    )
    self._thread.start()
    self._server: asyncio.Server = self._call(self._listen())
    self.port: int = self._server.sockets[0].getsockname()[1]

  @property
  def address(self) -> str:
    """http:// and the place to connect to."""
    return f'http://127.0.0.1:{self.port}'

  def cut(self) -> None:
    """Breaks every connection, and each new one, until `heal`."""

    async def cut() -> None:
      self._whole = False
      await self._end()

    self._call(cut())

  def heal(self) -> None:
    self._whole = True

  def close(self) -> None:
    async def close() -> None:
      self._server.close()
      await self._end()

    self._call(close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()

  def __enter__(self) -> 'Link':
    return self

  def __exit__(self, *error: object) -> None:
    self.close()

  def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run_coroutine_threadsafe(work, self._loop).result()

  async def _listen(self) -> asyncio.Server:
    return await asyncio.start_server(self._accept, '127.0.0.1', 0, limit=_CHUNK)

  async def _end(self) -> None:
    for task in list(self._tasks):
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  async def _accept(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    """Carries one connection until both sides are done or one breaks."""
    if not self._whole:
      writer.transport.abort()
      return
    self.connections += 1
    task = asyncio.current_task()
    assert task is not None
    self._tasks.add(task)
    ends = [writer]
    try:
      # The handshake goes over the line too.
      await asyncio.sleep(self.up.latency + self.down.latency)
      far_reader, far_writer = await asyncio.open_connection(
        *self._target, limit=_CHUNK
      )
      ends.append(far_writer)
      async with asyncio.TaskGroup() as group:
        group.create_task(_carry(_Way(self.up, reader, far_writer)))
        group.create_task(_carry(_Way(self.down, far_reader, writer)))
    except* (OSError, asyncio.CancelledError):
      for end in ends:
        end.transport.abort()
    finally:
      self._tasks.discard(task)
      for end in ends:
        end.close()


async def _carry(way: _Way) -> None:
  """Carries bytes from reader to writer through a pipe, until the end of the stream."""
  on_way: collections.deque[tuple[float, bytes]] = collections.deque()
  changed = asyncio.Event()
  held = 0

  async def take() -> None:
    nonlocal held
    while True:
      while held >= way.pipe.room:
        changed.clear()
        await changed.wait()
      data = await way.reader.read(_CHUNK)
      held += len(data)
      on_way.append((way.pipe.arrival(len(data)), data))
      changed.set()
      if not data:
        return

  async def give() -> None:
    nonlocal held
    while True:
      while not on_way:
        changed.clear()
        await changed.wait()
      due, data = on_way.popleft()
      await asyncio.sleep(max(0.0, due - time.monotonic()))
      if not data:
        way.writer.write_eof()
        return
      way.writer.write(data)
      await way.writer.drain()
      held -= len(data)
      changed.set()

  async with asyncio.TaskGroup() as group:
    group.create_task(take())
    group.create_task(give())
