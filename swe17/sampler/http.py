"""The HTTP interface of an engine.

  POST /generate           a wire request in, a wire result out
  POST /generate?stream=1  the same in parts: frames of length (uint32, little-endian)
                           and a wire result, the last with its `finish`; an error in
                           mid-stream is a frame of length 0, then one of JSON {"error"}
  GET  /health             {"version", "busy", "sampled", "waiting", "room", "stopping"}
  GET  /metrics            for Prometheus
  /v1/..                   the OpenAI routes (api/app.py)

Nothing waits without bound: beyond `sampler.queue` requests the answer is 429 and when
to ask again. 400 names the field, 413 is a body too large, 503 an engine that stops. A
client that goes away takes its request back, and its slot is free.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
import contextlib
import hashlib
import json
import struct
from typing import Any
import uuid

from aiohttp import web

from swe17 import config, types, wire
from swe17.agent import formats
from swe17.api import app as openai
from swe17.api import backend, door, errors, request
from swe17.sampler import engine, gauges

_BINARY = 'application/octet-stream'
_TOKENISERS = 2  # prompts that are made at once
# Seconds between the parts of a native stream. Packing one takes a third of a
# millisecond, as long as some dispatches; who reads them only wants to lose little.
_PAUSE = 0.2


async def parts(
  serving: engine.Engine, asked: types.GenerateRequest, pause: float = 0.0
) -> AsyncGenerator[types.GenerateResult, None]:
  """Parts of an answer as they are drawn. Closing it gives the request up.

  Args:
    serving: the engine.
    asked: the request.
    pause: seconds that a part waits for others, which are then one with it.

  Raises:
    errors.Refused: the queue is full (429).
    ValueError: the request can never be served.
    ConnectionError: the engine stops.
  """
  loop = asyncio.get_running_loop()
  drawn: asyncio.Queue[types.GenerateResult | None] = asyncio.Queue()

  def tell(part: types.GenerateResult | None) -> None:
    # Nobody waits any longer where the loop has ended.
    with contextlib.suppress(RuntimeError):
      loop.call_soon_threadsafe(drawn.put_nowait, part)

  try:
    future = serving.submit(asked, tell)
  except engine.Full as e:
    raise errors.full(e.retry_after_s) from e
  future.add_done_callback(lambda _: tell(None))
  try:
    while (part := await drawn.get()) is not None:
      yield await _with_others(part, drawn, loop.time() + pause)
    future.result()
  finally:
    serving.cancel(future)


async def _with_others(
  part: types.GenerateResult,
  drawn: asyncio.Queue[types.GenerateResult | None],
  until: float,
) -> types.GenerateResult:
  """The part and those that are there, or come by the time `until`, as one."""
  made = [part]
  while not made[-1].finish:
    try:
      more = drawn.get_nowait()
    except asyncio.QueueEmpty:
      if asyncio.get_running_loop().time() >= until:
        break
      try:
        async with asyncio.timeout_at(until):
          more = await drawn.get()
      except TimeoutError:
        break
    if more is None:  # it has failed: `parts` looks why
      drawn.put_nowait(None)
      break
    made.append(more)
  return made[0] if len(made) == 1 else types.join(made)


class Direct:
  """Satisfies `backend.Backend`: an engine whose clients bring their whole history."""

  def __init__(
    self,
    serving: engine.Engine,
    fmt: formats.Format,
    cfg: config.Sampler,
    length: int,
    models: Sequence[str],
  ):
    """`length`: tokens of a context and its turn together."""
    self.fmt, self.max_context, self.models = fmt, length, tuple(models)
    self._serving, self._cfg = serving, cfg
    self._tokenisers = asyncio.Semaphore(_TOKENISERS)

  def defaults(self) -> types.Sampling:
    return self._cfg.sampling

  async def context(self, http: web.Request, asked: backend.Asked) -> list[int]:
    if asked.n > self._cfg.queue:
      errors.refuse('n', asked.n, f'at most {self._cfg.queue}: no more may wait here')
    async with self._tokenisers:
      if isinstance(asked, request.Chat):
        return await asyncio.to_thread(
          self.fmt.conversation, asked.messages, asked.tools
        )
      (prompt,) = asked.prompts
      if isinstance(prompt, str):
        return await asyncio.to_thread(self.fmt.raw, prompt)
    if max(prompt) >= self.fmt.vocab_size:
      errors.refuse('prompt', max(prompt), f'ids below {self.fmt.vocab_size}')
    return list(prompt)

  async def generate(
    self, http: web.Request, asked: backend.Asked, context: list[int], choice: int
  ) -> AsyncGenerator[types.GenerateResult, None]:
    made = backend.ask(self, asked, context, choice, _session(asked))
    async with contextlib.aclosing(parts(self._serving, made)) as drawn:
      async for part in drawn:
        yield part

  def served(
    self,
    http: web.Request,
    asked: backend.Asked,
    context: list[int],
    choice: int,
    result: types.GenerateResult,
    message: dict[str, Any],
  ) -> None:
    """Nothing is kept."""


def _session(asked: backend.Asked) -> str:
  """Equal for the turns of one conversation, so that they find its cache again."""
  if isinstance(asked, request.Completion):
    return f'completion-{uuid.uuid4().hex}'
  first = next((m for m in asked.messages if m['role'] == 'user'), asked.messages[0])
  said = json.dumps([asked.user, asked.messages[0], first]).encode()
  return f'chat-{hashlib.blake2b(said, digest_size=16).hexdigest()}'


def app(serving: engine.Engine, chat: Direct | None = None) -> web.Application:
  """The application of an engine, with the OpenAI routes if `chat` is given."""
  seen = gauges.Gauges(serving)

  async def generate(http: web.Request) -> web.StreamResponse:
    streamed = http.query.get('stream') == '1'
    try:
      asked = wire.bytes_to_request(await door.body(http))
      work = _streamed if streamed else _whole
      return await door.while_there(http, work(http, serving, asked))
    except errors.Refused as e:
      return _error(e.message, e.status, e.headers)
    except ValueError as e:
      return _error(str(e), 400)
    except ConnectionError as e:
      return _error(str(e), 503)
    except door.Gone:
      return web.Response(status=499)

  async def health(_: web.Request) -> web.Response:
    values: dict[str, Any] = {
      'version': serving.version,
      'busy': serving.busy,
      'sampled': serving.sampled,
      'waiting': serving.waiting,
      'room': serving.room(),
      'stopping': serving.stopping,
    }
    return web.json_response(values, status=503 if serving.error else 200)

  async def metrics(_: web.Request) -> web.Response:
    return web.Response(body=seen.text(), headers={'Content-Type': gauges.TYPE})

  server = web.Application(client_max_size=door.MAX_BODY, middlewares=[seen.middleware])
  server.add_routes(
    [
      web.post('/generate', generate),
      web.get('/health', health),
      web.get('/metrics', metrics),
    ]
  )
  if chat is not None:
    server.add_routes(openai.routes(chat))
  return server


async def _whole(
  _: web.Request, serving: engine.Engine, asked: types.GenerateRequest
) -> web.StreamResponse:
  async with contextlib.aclosing(parts(serving, asked)) as drawn:
    made = [part async for part in drawn]
  body = wire.result_to_bytes(types.join(made))
  return web.Response(body=body, content_type=_BINARY)


async def _streamed(
  http: web.Request, serving: engine.Engine, asked: types.GenerateRequest
) -> web.StreamResponse:
  response = web.StreamResponse(headers={'Content-Type': _BINARY})
  try:
    async with contextlib.aclosing(parts(serving, asked, _PAUSE)) as drawn:
      async for part in drawn:
        await door.write(http, response, _frame(wire.result_to_bytes(part)))
  except (ValueError, ConnectionError) as e:
    if not response.prepared:
      raise
    text = json.dumps({'error': str(e)}).encode()
    await door.write(http, response, _frame(b'') + _frame(text))
  await door.end(response)
  return response


def _frame(data: bytes) -> bytes:
  return struct.pack('<I', len(data)) + data


def _error(
  text: str, status: int, headers: dict[str, str] | None = None
) -> web.Response:
  return web.json_response({'error': text}, status=status, headers=headers)
