"""One relay node: follows the versions through its route and serves them over HTTP.

Two things run side by side. The pulling task takes version after version from the
route and fetches the objects ahead; requests are answered from the cache or join a
fetch under way, so that however many ask for an object, it is fetched once. A full
snapshot that stands beside a delta is fetched when somebody who joins asks for it. New
versions are asked for by the pulling task alone: a question for one that nobody told
of is held until it comes, and costs nothing upstream.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import time

from aiohttp import web

from swe17 import config
from swe17.store import kv
from swe17.sync import manifest, relay_cache, relay_route, relay_source

_log = logging.getLogger(__name__)
_CHUNK = 256 << 10  # bytes handed to a connection at once
_AT_ONCE = 4  # objects fetched ahead side by side
_LIST_AFTER = 3  # questions without answer before the versions are listed
_LISTED = 2.0  # seconds a list of versions is good for
_ABSENT = 5.0  # seconds for which "there is none" is remembered
_LEAST_WAIT = 0.02  # seconds that a fetch is waited for at least
_MOST_HELD = 4096  # requests held at once


def _asked(request: web.Request) -> tuple[float, int | None, int | None]:
  """What a request wants: seconds to wait, start and stop. ValueError if it is odd."""
  ask = request.query
  wait = float(ask.get('wait', '0'))
  if not 0 <= wait <= 60:
    raise ValueError(f'wait: got {wait}, want 0 to 60 seconds')
  start, stop = (int(ask[n]) if n in ask else None for n in ('start', 'stop'))
  if (start or 0) < 0 or (stop is not None and stop < (start or 0)):
    raise ValueError(f'range: got {start=} {stop=}, want 0 <= start <= stop')
  return wait, start, stop


def _version_of(key: str) -> int:
  """The version a key belongs to. ValueError unless it is a manifest or its object."""
  kv.check_key(key)
  for version in (relay_source.manifest_version(key), relay_source.object_version(key)):
    if version is not None:
      return version
  raise ValueError(f'key: got {key!r}, want a manifest or data under weights/')


class _Flight:
  """One fetch under way, which any number of requests wait for."""

  def __init__(self, task: 'asyncio.Task[bytes | None]'):
    self.task = task
    self.ticks = 0  # grows while it gets on


class Node:
  """One relay node: follows the versions through `route` and serves them.

  run: `relay_source.run_name`; requests of other runs are refused.
  """

  def __init__(
    self,
    cfg: config.Relay,
    route: relay_route.Route,
    cache: relay_cache.Cache,
    *,
    run: str,
  ):
    self.route = route
    self.newest = -1  # the highest version whose manifest is at hand
    self.served = 0  # bytes of bodies sent
    self._cfg, self._cache, self._run = cfg, cache, run
    self._token = os.environ.get(relay_source.TOKEN_VARIABLE, '')
    self._flights: dict[str, _Flight] = {}
    self._absent: dict[str, float] = {}  # key -> when to ask again
    self._ahead: dict[asyncio.Task[None], int] = {}  # -> the version it fetches
    self._slots = asyncio.Semaphore(_AT_ONCE)
    self._news = asyncio.Event()
    self._listed: tuple[float, list[int]] = (-_LISTED, [])
    self._listing = asyncio.Lock()
    self._held = 0
    self._pulling: asyncio.Task[None] | None = None
    self._runner: web.AppRunner | None = None

  async def start(self, host: str, port: int = 0) -> int:
    """Starts to follow and to serve; returns the port. OSError if it is taken."""
    app = web.Application(client_max_size=1 << 10, middlewares=[self._admit])
    app.add_routes(
      [
        web.get('/read/{key:.+}', self._read, allow_head=False),
        web.get('/versions', self._versions),
        web.get('/health', self._health),
      ]
    )
    # A question that is held ends with the connection of the one who asked.
    self._runner = web.AppRunner(
      app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
    )
    await self._runner.setup()
    await web.TCPSite(self._runner, host, port).start()
    self._pulling = asyncio.create_task(self._pull())
    return self._runner.addresses[0][1]

  async def close(self) -> None:
    if self._runner is not None:
      await self._runner.cleanup()
    tasks = [*self._ahead, *([self._pulling] if self._pulling else [])]
    tasks += [flight.task for flight in self._flights.values()]
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await self.route.close()

  def check(self) -> None:
    """Raises what ended the following of new versions, if anything did."""
    if self._pulling is not None and self._pulling.done():
      self._pulling.result()

  @property
  def needed(self) -> int:
    """The oldest version that is still being fetched ahead, or the newest."""
    return min(self._ahead.values(), default=self.newest)

  @property
  def _known(self) -> int:
    """The highest version that is at hand or was listed."""
    return max([self.newest, *self._listed[1][-1:]])

  # Following.

  async def _pull(self) -> None:
    """Takes version after version; after a gap or damage, on from the newest full."""
    at: int | None = None  # the version wanted next
    misses = 0
    while True:
      try:
        if at is None:
          at = await self._newest_full()
        key = manifest.key_of(at)
        if time.monotonic() < self._absent.get(key, 0.0):
          data = None
        elif at <= self._known:
          data = await self._join(key, at)
        else:
          data = await self._manifest(at, self._cfg.wait_seconds)
        if data is not None:
          self._fetch_ahead(at)
          at, misses = at + 1, 0
          continue
        misses += 1
        if misses % _LIST_AFTER == 0 and max(await self._list(), default=-1) > at:
          _log.warning('version %d is not to be had; on from the newest full', at)
          at = None
      except kv.StoreError as e:
        _log.warning('no news of weights: %s', e)
      # A source that says "none" at once instead of waiting is not asked in a rush.
      await asyncio.sleep(self._cfg.poll_seconds)

  async def _newest_full(self) -> int:
    """Where to start: the newest full snapshot that is whole, or version 0."""
    for version in reversed(await self._list()):
      if await self._join(manifest.key_of(version), version) is not None:
        held = await self._contents(version)
        if held is not None and held.full:
          return version
    return 0

  def _fetch_ahead(self, version: int) -> None:
    task = asyncio.create_task(self._fetch(version))
    self._ahead[task] = version
    task.add_done_callback(lambda done: self._ahead.pop(done, None))

  async def _fetch(self, version: int) -> None:
    """Gets a version's objects before anybody asks for them."""
    try:
      held = await self._contents(version)
      keys = [key for key in held.sizes if key != held.beside] if held else []
      await asyncio.gather(*(self._take(key, version) for key in keys))
    except kv.StoreError as e:
      _log.warning('version %d is not fetched ahead: %s', version, e)

  async def _take(self, key: str, version: int) -> None:
    async with self._slots:
      await self._join(key, version)

  async def _contents(self, version: int) -> relay_route.Contents | None:
    """What a manifest says, which is read from the cache if it is there."""
    if not self.route.knows(version):
      await self._join(manifest.key_of(version), version)
    return await self.route.contents(version)

  async def _manifest(
    self, version: int, wait: float, tick: relay_source.Tick = lambda: None
  ) -> bytes | None:
    key = manifest.key_of(version)
    data = await asyncio.to_thread(self._cache.read, key)
    if data is None:
      data = await self.route.manifest(version, wait, tick)
      if data is None:
        return None
      await asyncio.to_thread(self._cache.put, key, version, data)
    elif not self.route.knows(version):
      await self.route.learn(version, data)
    if version > self.newest:
      self.newest = version
      self._news.set()
      self._news = asyncio.Event()
    return data

  async def _list(self) -> list[int]:
    async with self._listing:
      if time.monotonic() - self._listed[0] > _LISTED:
        found = await self.route.versions()
        self._listed = (time.monotonic(), found)
      return self._listed[1]

  # Serving.

  @web.middleware
  async def _admit(self, request: web.Request, handler) -> web.StreamResponse:
    token = request.headers.get(relay_source.TOKEN, '').encode()
    if self._token and not hmac.compare_digest(token, self._token.encode()):
      return web.Response(status=401, text='the token is missing or wrong')
    if request.headers.get(relay_source.RUN, '') != self._run:
      return web.Response(status=421, text='this node serves another run')
    if self._held >= _MOST_HELD:
      return web.Response(status=503, text='too many requests at once')
    self._held += 1
    try:
      return await handler(request)
    except kv.StoreError as e:
      return web.Response(status=503, text=str(e))
    finally:
      self._held -= 1

  async def _health(self, _: web.Request) -> web.Response:
    values = {
      'version': self.newest,
      'served': self.served,
      'cached': self._cache.size,
      'faults': self.route.faults,
    }
    return web.json_response(values)

  async def _versions(self, _: web.Request) -> web.Response:
    return web.json_response(await self._list())

  async def _read(self, request: web.Request) -> web.StreamResponse:
    key = request.match_info['key']
    try:
      wait, start, stop = _asked(request)
      version = _version_of(key)
    except ValueError as e:
      return web.Response(status=400, text=str(e))
    until = time.monotonic() + wait
    while version > self.newest and (left := until - time.monotonic()) > 0:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(left):
          await self._news.wait()
    # What nobody told of is not there: only the pulling task asks for new versions.
    if version > self._known:
      return web.Response(status=404)
    data = await asyncio.to_thread(self._cache.read, key)
    if data is None and time.monotonic() < self._absent.get(key, 0.0):
      return web.Response(status=410)
    if data is None:
      flight = self._flight(key, version)
      left = max(_LEAST_WAIT, until - time.monotonic())
      await asyncio.wait([flight.task], timeout=left)
      if not flight.task.done():
        progress = {relay_source.PROGRESS: str(flight.ticks)}
        return web.Response(status=202, headers=progress)
      data = flight.task.result()
    if data is None:
      return web.Response(status=410)
    return await self._send(request, memoryview(data)[start:stop])

  def _flight(self, key: str, version: int) -> _Flight:
    """The fetch of an object, started if it is not under way."""
    if key not in self._flights:
      task = asyncio.create_task(self._get(key, version))
      self._flights[key] = _Flight(task)
      task.add_done_callback(lambda _: self._landed(key))
    return self._flights[key]

  def _landed(self, key: str) -> None:
    task = self._flights.pop(key).task
    if not task.cancelled():
      task.exception()  # whoever still waits for it gets it; perhaps nobody does

  async def _join(self, key: str, version: int) -> bytes | None:
    """Waits for a fetch without ending it when the one who waits is ended."""
    return await asyncio.shield(self._flight(key, version).task)

  async def _get(self, key: str, version: int) -> bytes | None:
    if key == manifest.key_of(version):
      data = await self._manifest(version, 0.0, lambda: self._tick(key))
    else:
      data = await asyncio.to_thread(self._cache.read, key)
      if data is None:
        await self._contents(version)
        data = await self.route.data(key, tick=lambda: self._tick(key))
        if data is not None:
          await asyncio.to_thread(self._cache.put, key, version, data)
    if data is None:
      if len(self._absent) > _MOST_HELD:
        self._absent.clear()
      self._absent[key] = time.monotonic() + _ABSENT
    return data

  def _tick(self, key: str) -> None:
    if key in self._flights:
      self._flights[key].ticks += 1

  async def _send(self, request: web.Request, data: memoryview) -> web.StreamResponse:
    """Sends a body piece by piece; a reader that goes away or stalls is let go."""
    reply = web.StreamResponse(headers={'Content-Type': 'application/octet-stream'})
    reply.content_length = len(data)
    await reply.prepare(request)
    try:
      for at in range(0, len(data), _CHUNK):
        async with asyncio.timeout(self._cfg.stall_seconds):
          await reply.write(data[at : at + _CHUNK])
        self.served += len(data[at : at + _CHUNK])
      await reply.write_eof()
    except (ConnectionError, TimeoutError) as e:
      _log.info('a reader of %s went away: %r', request.path, e)
      if request.transport is not None:
        request.transport.abort()
    return reply
