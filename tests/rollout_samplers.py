"""Stand-in samplers: HTTP servers that draw by a fixed rule, and a router to them."""

import asyncio
from collections.abc import AsyncIterator
import contextlib
import json
import struct

from aiohttp import test_utils, web
import numpy as np

from swe17 import types, wire
from swe17.rollout import router
from swe17.store import kv


class Sampler:
  """Draws ids from the context and the key alone, as a sampler of one version does."""

  def __init__(self, store: kv.Store, index: int, slots: int = 8, region: int = 0):
    self._store, self._index, self._slots = store, index, slots
    self._region = region
    self.asked: list[types.GenerateRequest] = []
    self.status, self.body, self.well = 200, None, True
    self.says: dict = {}  # of /health
    self.headers: dict[str, str] = {}
    self.hold: asyncio.Event | None = None
    self.stall: asyncio.Event | None = None  # awaited after the first part
    self.after: bytes | None = None  # sent in place of all but the first part
    self.version, self.gone = 0, 0
    app = web.Application(client_max_size=1 << 24)
    routes = [web.post('/generate', self._generate), web.get('/health', self._health)]
    app.add_routes(routes)
    self._server = test_utils.TestServer(app)

  async def start(self) -> 'Sampler':
    await self._server.start_server()
    where = {'url': self.url, 'pid': 1, 'slots': self._slots}
    where |= {'region': self._region} if self._region else {}
    self._store.write(f'samplers/{self._index}.json', json.dumps(where).encode())
    return self

  async def die(self) -> None:
    """Goes as kill -9 would: its address stays registered, open requests break."""
    server = self._server.runner.server if self._server.runner else None
    for connection in server.connections if server else ():
      if connection.transport is not None:  # not already closed
        connection.transport.abort()
    for event in (self.hold, self.stall):
      if event is not None:
        event.set()
    await self._server.close()

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self._server.port}'

  async def _health(self, _: web.Request) -> web.Response:
    return web.json_response(self.says, status=200 if self.well else 503)

  async def _generate(self, request: web.Request) -> web.StreamResponse:
    assert request.query['stream'] == '1'
    asked = wire.bytes_to_request(await request.read())
    self.asked.append(asked)
    if self.hold is not None:
      await self.hold.wait()
    if self.status != 200:
      body = self.body or b'{"error": "no"}'
      return web.Response(body=body, status=self.status, headers=self.headers)
    response = web.StreamResponse()
    await response.prepare(request)
    try:
      for i, part in enumerate(drawn(asked, self.version)):
        if i and self.stall is not None:
          await self.stall.wait()
        if i and self.after is not None:
          await response.write(self.after)
          break
        await response.write(self.body or frame(wire.result_to_bytes(part)))
    except (asyncio.CancelledError, ConnectionError):
      self.gone += 1
      raise
    return response


def frame(data: bytes) -> bytes:
  return struct.pack('<I', len(data)) + data


def drawn(
  request: types.GenerateRequest, version: int = 0
) -> list[types.GenerateResult]:
  """One token a part; each depends on the key, its position and what is before it."""
  parts, context = [], request.token_T.tolist()
  for i in range(request.max_new):
    seed = [*request.key, len(context), *context]
    token_T = np.random.default_rng(seed).integers(0, 97, 1).astype(np.int32)
    context += token_T.tolist()
    zero_T = np.zeros(1, np.float32)
    kept = types.KeptSets(np.arange(2, dtype=np.int32), token_T)
    finish = 'length' if i + 1 == request.max_new else ''
    parts.append(
      types.GenerateResult(
        token_T, zero_T, zero_T, np.full(1, version, np.int32), kept, finish
      )
    )
  return parts


def whole(request: types.GenerateRequest) -> np.ndarray:
  return types.join(drawn(request)).token_T


def ask(session: str, size: int = 5) -> types.GenerateRequest:
  token_T = np.arange(size, dtype=np.int32)
  return types.GenerateRequest(session, token_T, 3, (), types.Sampling(top_k=4), (1, 2))


@contextlib.asynccontextmanager
async def rigged(tmp_path) -> AsyncIterator[tuple]:
  """(store, start a sampler, open a router); all of it is closed at the end."""
  store = kv.open(f'file://{tmp_path}')
  async with contextlib.AsyncExitStack() as stack:

    async def sampler(index: int, slots: int = 8, region: int = 0) -> Sampler:
      made = await Sampler(store, index, slots, region).start()
      stack.push_async_callback(made.die)
      return made

    async def opened(patience: float = 20.0, **changes) -> router.Router:
      given = {'store': store, 'seconds': 20.0, **changes}
      made = router.Router(given.pop('store'), patience=patience, **given)
      await made.open()
      stack.push_async_callback(made.close)
      return made

    yield store, sampler, opened
