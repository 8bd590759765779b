"""The recording proxy: every episode has a base URL, behind it the router.

  http://host:port/e/<key>/v1/chat/completions, /completions, /models

An agent that speaks the OpenAI API is given its URL and needs to know nothing more. Its
messages become ids by extending what it was served (agent/tree.py); what it was told is
recorded token by token, and `close_episode` gives the segments to train on. The key is
the only secret: whoever has none of an open episode gets a 404, and nothing of another
episode can be reached with it.

How tokens are drawn is the run's business, not the client's: temperature, top_p, top_k,
min_p and seed of a request are ignored (and logged once) unless
`rollout.client_sampling` allows them. What goes beyond the episode's limits is refused
by 400, which clients do not try again; a context that is full in the words and with the
code by which agents know it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
import contextlib
import dataclasses
import logging
import secrets
from typing import Any, Protocol

from aiohttp import web
import numpy as np

from swe17 import config, types
from swe17.agent import episode, formats, record, tree
from swe17.api import app, backend, errors, request
from swe17.rollout import recorded, router

_log = logging.getLogger(__name__)
_EPISODE: web.RequestKey[recorded.Recorded] = web.RequestKey('e', recorded.Recorded)
_DRAWS: web.RequestKey[dict] = web.RequestKey('draws', dict)
_DRAWN = ('temperature', 'top_p', 'top_k', 'min_p', 'seed')


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclasses.dataclass(frozen=True)
class Opened:
  """What an episode's agent is told."""

  key: str
  base_url: str


class Route(Protocol):
  """What the proxy asks of a router."""

  def stream(
    self, request: types.GenerateRequest
  ) -> AsyncGenerator[types.GenerateResult, None]: ...

  def forget(self, session: str) -> None: ...


class Proxy:
  """Satisfies `backend.Backend`. Open it inside a running event loop."""

  models: tuple[str, ...] = ('swe17',)

  def __init__(self, cfg: config.Config, fmt: formats.Format, route: Route):
    self.fmt, self.max_context = fmt, cfg.agent.max_context
    self._cfg, self._router = cfg, route
    self._open: dict[str, recorded.Recorded] = {}
    self._asking: dict[str, set[asyncio.Task]] = {}  # requests under way, by key
    self._ignored: set[str] = set()
    self._runner: web.AppRunner | None = None
    self._address = ''

  async def open(self, host: str = '127.0.0.1', port: int = 0) -> None:
    """Starts to listen; port 0: a free one."""

    @web.middleware
    async def enter(request: web.Request, handler: Handler) -> web.StreamResponse:
      return await self._enter(request, handler)

    server = web.Application(client_max_size=app.MAX_BODY, middlewares=[enter])
    server.add_routes(app.routes(self, '/e/{key}/v1'))
    # A client that goes away ends its handler, and with it the draws.
    self._runner = web.AppRunner(server, access_log=None, handler_cancellation=True)
    await self._runner.setup()
    await web.TCPSite(self._runner, host, port).start()
    self._address = f'http://{host}:{self._runner.addresses[0][1]}'

  async def close(self) -> None:
    """Stops listening. Episodes that are open end where they are."""
    for key in list(self._open):
      self._end(key)
    if self._runner is not None:
      await self._runner.cleanup()

  # --- episodes -----------------------------------------------------------------

  def open_episode(
    self,
    group_id: str,
    member: int,
    *,
    sampling: types.Sampling | None = None,
    limits: recorded.Limits | None = None,
    min_version: int = 0,
  ) -> Opened:
    """Makes room for one episode. Close it, whatever becomes of it.

    `group_id` and `member` key its draws, with the run's seed, as they do those of an
    episode of our own.
    """
    cfg, key = self._cfg, secrets.token_urlsafe(24)
    self._open[key] = recorded.Recorded(
      self.fmt,
      limits or recorded.Limits.of(cfg.agent, cfg.rollout),
      sampling or cfg.sampler.sampling,
      group_id=group_id,
      member=member,
      min_version=min_version,
    )
    self._asking[key] = set()
    return Opened(key, f'{self._address}/e/{key}/v1')

  def close_episode(self, key: str) -> recorded.Served:
    """Ends an episode: its URL is gone, what was served is told.

    Raises:
      KeyError: there is no such episode (any longer).
      ValueError: the episode met a bug, or samplers that give no samples.
    """
    return self._end(key).close()

  def _end(self, key: str) -> recorded.Recorded:
    one = self._open.pop(key)
    for task in self._asking.pop(key):
      task.cancel()
    for session in one.sessions:
      self._router.forget(session)
    return one

  async def _enter(self, http: web.Request, handler: Handler) -> web.StreamResponse:
    """Finds the episode of a request; whatever is not served is dropped at its end."""
    key = http.match_info.get('key', '')
    one = self._open.get(key)
    if one is None:
      return _answer(errors.Refused('no such episode, or it is over', status=404))
    task = asyncio.current_task()
    assert task is not None
    http[_EPISODE], http[_DRAWS] = one, {}
    self._asking[key].add(task)
    try:
      return await handler(http)
    finally:
      self._asking.get(key, set()).discard(task)
      for draws in http[_DRAWS].values():
        one.drop(draws)

  # --- what stands behind the routes ----------------------------------------------

  def defaults(self) -> types.Sampling:
    return self._cfg.sampler.sampling

  async def context(self, http: web.Request, asked: backend.Asked) -> list[int]:
    one = http[_EPISODE]
    self._look_at(asked)
    one.admit(asked.n)
    if isinstance(asked, request.Chat):
      sought = one.tree.seek(asked.messages, asked.tools if asked.calls else ())
    else:
      sought = self._text(one, asked)
    place = one.tree.find(sought)
    if place is None:
      place = one.tree.put(sought, await asyncio.to_thread(sought.render))
    one.room(place.length)
    one.admit(asked.n)  # others may have come in meanwhile
    http[_DRAWS][id(asked)] = one.ask(place, asked.n)
    return place.context_T.tolist()

  async def generate(
    self, http: web.Request, asked: backend.Asked, context: list[int], choice: int
  ) -> AsyncGenerator[types.GenerateResult, None]:
    one, draw = http[_EPISODE], http[_DRAWS][id(asked)][choice]
    left = self._request(one, asked, draw)
    loop = asyncio.get_running_loop()
    until = loop.time() + min(one.limits.turn_seconds, max(0.0, one.seconds_left))
    async with contextlib.aclosing(self._router.stream(left)) as parts:
      while True:
        try:
          # Not around the yield: what the client takes its time for is its own.
          async with asyncio.timeout_at(until):
            part = await anext(parts)
          recorded.check_part(part, left, self.fmt.vocab_size)
        except (OSError, record.SamplerError) as e:
          # TimeoutError and ConnectionError are OSErrors.
          if one.seconds_left <= 0:
            one.late()
          late = f'a turn took over {one.limits.turn_seconds:g} s'
          one.failed(f'{type(e).__name__}: {e}' if loop.time() < until else late)
          raise ConnectionError(f'no answer now: {type(e).__name__}') from e
        except ValueError as e:
          one.error = e
          raise ConnectionError('no answer: see the log of the run') from e
        yield part
        if part.finish:
          return
        left = router.beyond(left, part)

  def served(
    self,
    http: web.Request,
    asked: backend.Asked,
    context: list[int],
    choice: int,
    result: types.GenerateResult,
    message: dict[str, Any],
  ) -> None:
    one = http[_EPISODE]
    if not one.closed:
      draw = http[_DRAWS][id(asked)][choice]
      one.served(draw, result, message, self._sampling(one, asked).temperature)

  def _request(
    self, one: recorded.Recorded, asked: backend.Asked, draw: tree.Draw
  ) -> types.GenerateRequest:
    place = draw.place
    room = one.room(place.length)
    return types.GenerateRequest(
      session=f'{one.name}.{draw.session}',
      token_T=np.asarray(place.context_T, np.int32),
      max_new=room if asked.max_tokens is None else min(room, asked.max_tokens),
      stop_ids=self.fmt.stop_ids,
      sampling=self._sampling(one, asked),
      key=episode.draw_key(self._cfg.seed, one.group_id, one.member, draw.name),
      min_version=one.min_version,
      routes_from=place.routed,
    )

  def _sampling(self, one: recorded.Recorded, asked: backend.Asked) -> types.Sampling:
    if not self._cfg.rollout.client_sampling:
      return one.sampling
    return request.sampling(asked, one.sampling)

  def _look_at(self, asked: backend.Asked) -> None:
    """Refuses what could not be trained on; says once what is ignored."""
    if asked.stop and self._cfg.model.routes is not None:
      errors.refuse(
        'stop', asked.stop[0], 'none: the routes of a turn that is cut are not recorded'
      )
    allowed = self._cfg.rollout.client_sampling
    if allowed and asked.temperature == 0 and self._cfg.loss.replay:
      errors.refuse('temperature', 0, 'above 0: what it draws is trained on')
    for name in _DRAWN:
      given = getattr(asked, name) is not None and (name == 'seed' or not allowed)
      if given and name not in self._ignored:
        self._ignored.add(name)
        _log.warning(
          '%s of requests is ignored: the run says how tokens are drawn', name
        )

  def _text(self, one: recorded.Recorded, asked: request.Completion) -> tree.Sought:
    (prompt,) = asked.prompts
    if not isinstance(prompt, str):
      errors.refuse('prompt', prompt, 'text: ids are made here')
    return one.tree.seek_text(prompt)


def _answer(refused: errors.Refused) -> web.Response:
  return web.json_response(refused.body, status=refused.status, headers=refused.headers)
