"""Sends turns to samplers; one that dies costs a prefill, not a token.

A request is asked as a stream. When its sampler fails in mid-answer, what has arrived
is kept, and the rest is asked of another one with those tokens in the context: draws
are keyed by position, so it goes on as the same sample, and every token keeps the
version that drew it. A full queue (429) is no failure: the request waits for as long
as the sampler says, or goes elsewhere if nothing of its session is cached there.
"""

import asyncio
from collections.abc import AsyncGenerator
import contextlib
import dataclasses
import logging
import math
import random

import aiohttp
import numpy as np

from swe17 import types
from swe17.rollout import samplers, stream
from swe17.store import kv

_log = logging.getLogger(__name__)
_CONNECT = 2.0  # seconds to reach a sampler
_PAUSE = 0.5  # seconds between looks while nobody can be asked
_UNSOUND = 2  # damaged answers in a row of every sampler that end the process
_SPREAD = 0.25  # those who wait for a full sampler do not come back all at once


class Unusable(ValueError):
  """What is registered as samplers gives no samples: asking again is no help."""


class Router:
  """Usable as an episode's `generate`. Open it inside a running event loop."""

  def __init__(
    self,
    store: kv.Store,
    *,
    seconds: float,
    turn_seconds: float = math.inf,
    patience: float = 60.0,
    region: int | None = None,
  ):
    """Args:
    store: where samplers register.
    seconds: longest silence of a sampler about one request.
    turn_seconds: bounds a whole answer, whoever gives it (`stream` has no bound).
    patience: seconds a request waits while there is no sampler that it could ask.
    region: asks only samplers that registered for it; None: all of them.
    """
    self._seconds, self._patience = seconds, patience
    self._turn_seconds = turn_seconds
    self._samplers = samplers.Samplers(store, region)
    self._unsound: dict[str, int] = {}  # url -> damaged answers since a sound one
    self._http: aiohttp.ClientSession | None = None
    self.rerouted = 0  # requests that went on elsewhere
    self.resumed = 0  # of those, with tokens that were drawn before
    self.waited = 0.0  # seconds, for samplers that were full
    self.lost_seconds = 0.0  # between a failure and the next part of what it hit

  async def open(self) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(
      total=None, sock_connect=_CONNECT, sock_read=self._seconds
    )
    self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)

  async def close(self) -> None:
    self._samplers.close()
    if self._http is not None:
      await self._http.close()

  async def discover(self) -> int:
    """Reads who is registered, asks how they are; how many serve.

    Call it now and then: it finds samplers that were started again.
    """
    return await self._samplers.discover(self._opened)

  def forget(self, session: str) -> None:
    """The session's episode has ended: its place counts no longer."""
    self._samplers.forget(session)

  async def __call__(self, request: types.GenerateRequest) -> types.GenerateResult:
    """Asks a sampler, another one if it fails.

    Raises as `stream` does, and TimeoutError once the turn took too long.
    """
    limit = asyncio.timeout(self._turn_seconds)
    try:
      async with limit, contextlib.aclosing(self.stream(request)) as parts:
        return types.join([part async for part in parts])
    except TimeoutError as e:
      if not limit.expired():
        raise
      raise TimeoutError(f'a turn took over {self._turn_seconds:g} s') from e

  async def stream(
    self, request: types.GenerateRequest
  ) -> AsyncGenerator[types.GenerateResult, None]:
    """Parts as they are drawn, the last with its `finish`; close it to take it back.

    Raises:
      ValueError: the sampler refused the request, with its reason.
      ConnectionError: no sampler answered in time.
      Unusable: nothing but damaged answers from all of them.
    """
    loop = asyncio.get_running_loop()
    until, tried, begun = loop.time() + self._patience, False, False
    failed: float | None = None  # when, if no part has come since
    while True:
      one = self._samplers.place(request.session, loop.time())
      if one is None:
        if loop.time() >= until:
          raise ConnectionError(f'no sampler answered in {self._patience:g} s')
        if not await self.discover() or tried:  # well, yet it failed: no tight loop
          await asyncio.sleep(min(_PAUSE, self._patience))
        continue
      if one.full_until > loop.time():
        await self._wait(one.full_until - loop.time())
        continue
      one.open += 1
      try:
        async with contextlib.aclosing(
          stream.parts(self._opened, one.url, request)
        ) as parts:
          async for part in parts:
            self._unsound.pop(one.url, None)
            self._samplers.answered(request.session)
            if failed is not None:
              self.lost_seconds += loop.time() - failed
              failed = None
            yield part
            request = beyond(request, part)
            until, tried, begun = loop.time() + self._patience, False, True
        return
      except stream.Busy as e:
        one.full_until = loop.time() + e.seconds
        until = one.full_until + self._patience
      except (aiohttp.ClientError, ConnectionError, TimeoutError) as e:
        self._failed(one, request, e)
        self.resumed += begun
        tried, failed = True, failed or loop.time()
      finally:
        one.open -= 1

  @property
  def _opened(self) -> aiohttp.ClientSession:
    assert self._http is not None, 'open() comes first'
    return self._http

  async def _wait(self, seconds: float) -> None:
    seconds *= 1 + _SPREAD * random.random()
    await asyncio.sleep(seconds)
    self.waited += seconds

  def _failed(
    self, one: samplers.Sampler, request: types.GenerateRequest, error: Exception
  ) -> None:
    """Takes note of a failure. Unusable once there is no sampler that gives samples."""
    # Every request that it had says the same.
    level = logging.DEBUG if one.failed else logging.WARNING
    _log.log(level, 'sampler %s failed (%s: %s)', one.url, type(error).__name__, error)
    if isinstance(error, stream.Damaged):
      self._unsound[one.url] = self._unsound.get(one.url, 0) + 1
      known = {one.url, *self._samplers.urls}
      if all(self._unsound.get(url, 0) >= _UNSOUND for url in known):
        raise Unusable(
          f'no sampler gives tokens with what each must carry: {sorted(self._unsound)} '
          f'answered {_UNSOUND} times or more with something else, the last time: '
          f'{error}'
        ) from error
    one.failed = True
    self._samplers.forget(request.session)
    self.rerouted += 1


def beyond(
  request: types.GenerateRequest, part: types.GenerateResult
) -> types.GenerateRequest:
  """What is left to ask once a part of the answer is there."""
  return dataclasses.replace(
    request,
    token_T=np.concatenate([request.token_T, part.token_T]).astype(np.int32),
    max_new=request.max_new - part.token_T.size,
  )
