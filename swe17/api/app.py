"""The OpenAI routes over a `backend.Backend`.

  POST /v1/chat/completions    POST /v1/completions    GET /v1/models[/id]

Choices are drawn side by side. Whoever goes away, in the middle of an answer or before
its first token, has all of them closed, and so their slots freed. Everything is
bounded: bytes of a body and the time for it, requests at once, choices, the time that
a client may take to read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
import contextlib
import dataclasses
import itertools
import logging
import time
from typing import Any
import uuid

from aiohttp import web

from swe17.api import backend, chunks, door, errors, request, response, stream, turn

MAX_BODY = door.MAX_BODY
_MOST_OPEN = 1024  # requests at once

_log = logging.getLogger(__name__)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Tell = Callable[[int, turn.Turn, turn.Delta], Awaitable[None]]


def routes(behind: backend.Backend, prefix: str = '/v1') -> list[web.RouteDef]:
  """Routes for a `web.Application`; `prefix` may hold parts like {key}."""
  began, limit = int(time.time()), _Limit()

  async def chat(http: web.Request) -> web.StreamResponse:
    asked = request.chat(await door.body(http), behind.models)
    return await _serve(_Answer(http, behind, asked, [asked]))

  async def completion(http: web.Request) -> web.StreamResponse:
    asked = request.completion(await door.body(http), behind.models)
    each = [dataclasses.replace(asked, prompts=(one,)) for one in asked.prompts]
    return await _serve(_Answer(http, behind, asked, each))

  async def models(_: web.Request) -> web.Response:
    return _json(response.models(behind.models, began))

  async def model(http: web.Request) -> web.Response:
    name = http.match_info['model']
    if name not in behind.models:
      raise errors.Refused(
        f'model: there is no {errors.shown(name)}', 'model', status=404,
        code='model_not_found',
      )  # fmt: skip
    return _json(response.model(name, began))

  async def other(http: web.Request) -> web.Response:
    raise errors.Refused(f'{http.method} {http.path[:100]} is not served', status=404)

  return [
    web.post(f'{prefix}/chat/completions', limit.guard(chat)),
    web.post(f'{prefix}/completions', limit.guard(completion)),
    web.get(f'{prefix}/models', limit.guard(models)),
    web.get(f'{prefix}/models/{{model:.+}}', limit.guard(model)),
    web.route('*', f'{prefix}/{{other:.*}}', limit.guard(other)),
  ]


class _Limit:
  """Counts who is inside, and says no in OpenAI's form."""

  def __init__(self) -> None:
    self._open = 0

  def guard(self, answer: Answer) -> Answer:
    async def guarded(http: web.Request) -> web.StreamResponse:
      self._open += 1
      try:
        if self._open > _MOST_OPEN:
          raise errors.full(1.0)
        return await answer(http)
      except errors.Refused as e:
        return _json(e.body, e.status, e.headers)
      except door.Gone as e:
        _log.info('%s: %s', http.path, e)
        return web.Response(status=499)
      finally:
        self._open -= 1

    return guarded


@dataclasses.dataclass
class _Answer:
  """One request and what is known of its answer."""

  http: web.Request
  behind: backend.Backend
  asked: backend.Asked
  each: Sequence[backend.Asked]  # of one prompt each
  contexts: list[list[int]] = dataclasses.field(default_factory=list)

  def __post_init__(self) -> None:
    kind = 'chatcmpl' if isinstance(self.asked, request.Chat) else 'cmpl'
    name = f'{kind}-{uuid.uuid4().hex}'
    self.head = response.Head(name, int(time.time()), self.asked.model)
    self.headers = {'x-request-id': self.head.id}

  def version(self, done: turn.Turn) -> None:
    """Notes the weights that drew the last token."""
    version_T = done.result.version_T
    if version_T.size:
      self.head = dataclasses.replace(self.head, fingerprint=f'v{version_T[-1]}')


async def _serve(answer: _Answer) -> web.StreamResponse:
  work = _streamed(answer) if answer.asked.stream else _whole(answer)
  return await door.while_there(answer.http, work)


async def _whole(answer: _Answer) -> web.StreamResponse:
  logprobs: dict[int, list[tuple[str, bytes, float]]] = {}

  async def tell(i: int, _: turn.Turn, delta: turn.Delta) -> None:
    logprobs.setdefault(i, []).extend(delta.logprobs)

  turns = await _choices(answer, tell)
  used = _usage(answer, turns)
  asked = answer.asked.logprobs
  each = [(i, done, logprobs[i] if asked else None) for i, done in enumerate(turns)]
  if isinstance(answer.asked, request.Chat):
    made = [response.chat_choice(i, done, logp) for i, done, logp in each]
    return _json(response.chat(answer.head, made, used), headers=answer.headers)
  made = [
    response.completion_choice(
      i, done.message['content'], logprobs=logp, finish=done.finish_reason
    )
    for i, done, logp in each
  ]
  return _json(response.completion(answer.head, made, used), headers=answer.headers)


async def _streamed(answer: _Answer) -> web.StreamResponse:
  events = stream.Events(answer.http, answer.headers)
  chat = isinstance(answer.asked, request.Chat)
  made = chunks.Chat() if chat else chunks.Completion()

  async def tell(i: int, done: turn.Turn, delta: turn.Delta) -> None:
    for chunk in made.of(answer.head, i, done, delta):
      await events.send(chunk)

  try:
    turns = await _choices(answer, tell)
  except errors.Refused as e:
    if not events.begun:
      raise
    await events.fail(e)
    return events.response
  if answer.asked.include_usage:
    used = _usage(answer, turns)
    whole = response.chat if chat else response.completion
    last = {**whole(answer.head, [], used), 'object': made.kind}
    await events.send(last)
  await events.send('[DONE]')
  await door.end(events.response)
  return events.response


async def _choices(answer: _Answer, tell: Tell) -> list[turn.Turn]:
  """Draws all choices side by side; the first error ends them all."""
  for asked in answer.each:
    answer.contexts.append(await _context(answer, asked))
    limit = answer.behind.max_context
    request.max_new(asked, len(answer.contexts[-1]), limit)  # refuses before any draws
  places = list(itertools.product(range(len(answer.each)), range(answer.asked.n)))
  jobs = [
    asyncio.ensure_future(_choice(answer, i, at, n, tell))
    for i, (at, n) in enumerate(places)
  ]
  try:
    turns = await asyncio.gather(*jobs)
  finally:
    for job in jobs:
      job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
  if not answer.asked.stream:  # all of them are given, or none
    for (at, n), done in zip(places, turns, strict=True):
      _served(answer, at, n, done)
  return turns


def _served(answer: _Answer, at: int, n: int, done: turn.Turn) -> None:
  given = answer.http, answer.each[at], answer.contexts[at], n
  answer.behind.served(*given, done.result, dict(done.message))


async def _context(answer: _Answer, asked: backend.Asked) -> list[int]:
  with _refusals():
    return await answer.behind.context(answer.http, asked)


async def _choice(answer: _Answer, i: int, at: int, n: int, tell: Tell) -> turn.Turn:
  """Choice `n` of prompt `at`, told under the number `i`."""
  asked, context, http = answer.each[at], answer.contexts[at], answer.http
  done = turn.Turn(answer.behind.fmt, asked, f'{answer.head.id}.{i}')
  delta = turn.Delta()
  with _refusals():
    parts = answer.behind.generate(http, asked, context, n)
    async with contextlib.aclosing(parts):
      async for part in parts:
        delta = done.take(part)
        if done.finish:
          break
        await tell(i, done, delta)
    if not done.finish:
      raise ConnectionError('the answer broke off')
  answer.version(done)
  if asked.stream:
    _served(answer, at, n, done)
  await tell(i, done, delta)
  return done


@contextlib.contextmanager
def _refusals():
  """What a backend raises, as what a client is told."""
  try:
    yield
  except ConnectionError as e:
    raise errors.Refused(f'not now: {e}', status=503) from e
  except ValueError as e:
    raise errors.of_value(e) from e


def _usage(answer: _Answer, turns: Sequence[turn.Turn]) -> dict[str, int]:
  drawn = sum(done.result.token_T.size for done in turns)
  return response.usage(sum(map(len, answer.contexts)), drawn)


def _json(
  body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
  return web.json_response(body, status=status, headers=headers, dumps=stream.dumps)
