"""Sends an episode's turns to samplers: affinity first, another one when one dies.

A session stays with the sampler that holds its KV cache. When a request fails, the
same tokens go to another sampler, which prefills them anew: a dead sampler costs a
prefill, not a trajectory. Samplers are found in the store (samplers/<i>.json) and may
come and go. A region is self-contained: its routers ask its own samplers only, whose
addresses mean nothing elsewhere.
"""

import asyncio
import json
import logging
from typing import Any

import aiohttp

from swe17 import types, wire
from swe17.store import kv

_log = logging.getLogger(__name__)
_HEALTH = 2.0  # seconds for an answer to /health
_LOOK = 2.0  # seconds for the store to say who is registered
_PAUSE = 0.5  # seconds between looks while nobody can be asked
_UNSOUND = 2  # damaged answers in a row of every sampler that end the process


class Unusable(ValueError):
  """What is registered as samplers gives no samples: asking again is no help."""


class Router:
  """Usable as an episode's `generate`. Open it inside a running event loop."""

  def __init__(
    self,
    store: kv.Store,
    *,
    seconds: float,
    patience: float = 60.0,
    region: int | None = None,
  ):
    """Args:
    store: where samplers register.
    seconds: bounds one request to one sampler.
    patience: seconds a request waits while there is no sampler that it could ask.
    region: asks only samplers that registered for it; None: all of them.
    """
    self._store, self._seconds, self._patience = store, seconds, patience
    self._region = region
    self._elsewhere: set[str] = set()  # keys of samplers in other regions
    self._look: asyncio.Task[dict[str, int]] | None = None
    self._slots: dict[str, int] = {}  # url -> slots
    self._load: dict[str, int] = {}  # url -> open requests and idle sessions
    self._home: dict[str, str] = {}  # session -> url
    self._failed: set[str] = set()  # urls that failed and have not been well since
    self._unsound: dict[str, int] = {}  # url -> damaged answers since a sound one
    self._http: aiohttp.ClientSession | None = None
    self.rerouted = 0

  async def open(self) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=self._seconds, sock_connect=2.0)
    self._http = aiohttp.ClientSession(connector=connector, timeout=timeout)

  async def close(self) -> None:
    if self._look is not None:
      self._look.cancel()
    if self._http is not None:
      await self._http.close()

  async def discover(self) -> int:
    """Reads who is registered, asks those that failed how they are; how many serve.

    Call it now and then: it finds samplers that were started again. While the store
    does not answer, what was known stays, and nobody waits for it for long.
    """
    if self._look is None:
      self._look = asyncio.ensure_future(asyncio.to_thread(self._registered))
    await asyncio.wait({self._look}, timeout=_LOOK)
    # Of several callers the first takes the answer.
    if self._look is not None and self._look.done():
      look, self._look = self._look, None
      try:
        self._slots = look.result()
      except kv.StoreError as e:
        _log.warning('who serves is not known anew: %s', e)
    self._failed &= set(self._slots)
    for url in sorted(self._failed):
      if await self._healthy(url):
        self._failed.discard(url)
    return len(set(self._slots) - self._failed)

  def forget(self, session: str) -> None:
    """The session's episode has ended: its place counts no longer."""
    url = self._home.pop(session, None)
    if url is not None:
      self._load[url] -= 1

  async def __call__(self, request: types.GenerateRequest) -> types.GenerateResult:
    """Asks a sampler, another one if it fails.

    Raises:
      ValueError: the sampler refused the request, with its reason.
      ConnectionError: no sampler answered in time.
      Unusable: nothing but damaged answers from all of them.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + self._patience
    body, tried = wire.request_to_bytes(request), False
    while True:
      url = self._place(request.session)
      if url is None:
        if loop.time() >= until:
          raise ConnectionError(f'no sampler answered in {self._patience:g} s')
        if not await self.discover() or tried:  # well, yet it failed: no tight loop
          await asyncio.sleep(min(_PAUSE, self._patience))
        continue
      try:
        return await self._ask(url, body)
      except (aiohttp.ClientError, ConnectionError, TimeoutError) as e:
        _log.warning('sampler %s failed (%s: %s)', url, type(e).__name__, e)
        tried = True
        self._failed.add(url)
        self.forget(request.session)
        self.rerouted += 1

  def _place(self, session: str) -> str | None:
    """The session's sampler, or the least loaded one for its size."""
    url = self._home.get(session)
    if url is not None and url not in self._failed:
      return url
    live = [u for u in self._slots if u not in self._failed]
    if not live:
      return None
    if url is not None:  # its home has failed meanwhile
      self.forget(session)
    best = min(live, key=lambda u: (self._load.get(u, 0) / self._slots[u], u))
    self._home[session] = best
    self._load[best] = self._load.get(best, 0) + 1
    return best

  async def _ask(self, url: str, body: bytes) -> types.GenerateResult:
    assert self._http is not None, 'open() comes first'
    async with self._http.post(url + '/generate', data=body) as response:
      data = await response.read()
      if response.status == 400:
        raise ValueError(f'{url} refused the request: {data[:500]!r}')
      if response.status != 200:
        raise ConnectionError(f'HTTP {response.status}: {data[:200]!r}')
    try:
      result = wire.bytes_to_result(data)
    except ValueError as e:
      self._unsound[url] = self._unsound.get(url, 0) + 1
      if all(self._unsound.get(u, 0) >= _UNSOUND for u in {url, *self._slots}):
        raise Unusable(
          f'no sampler gives tokens with what each must carry: {sorted(self._unsound)} '
          f'answered {_UNSOUND} times or more with something else, the last time: {e}'
        ) from e
      raise ConnectionError(f'{url} answered with a damaged record: {e}') from e
    self._unsound.pop(url, None)
    return result

  def _registered(self) -> dict[str, int]:
    """{url: slots} of every sampler in the store that stands in this region."""
    found: dict[str, int] = {}
    for key in self._store.list('samplers/'):
      # A sampler keeps its region: those elsewhere are read once.
      data = None if key in self._elsewhere else self._store.read(key)
      entry = None if data is None else _entry(data)
      if data is not None and entry is None:
        _log.warning('%s is no registration: %r', key, data[:100])
      elif entry is not None and self._region in (None, entry['region']):
        found[entry['url']] = entry['slots']
      elif entry is not None:
        self._elsewhere.add(key)
    return found

  async def _healthy(self, url: str) -> bool:
    assert self._http is not None, 'open() comes first'
    try:
      timeout = aiohttp.ClientTimeout(total=_HEALTH)
      async with self._http.get(url + '/health', timeout=timeout) as response:
        return response.status == 200
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
      return False


def _entry(data: bytes) -> dict[str, Any] | None:
  """A registration, or None if that is not what the bytes are."""
  try:
    entry = json.loads(data)
    sound = isinstance(entry['url'], str) and entry['slots'] >= 1
    return {'region': 0, **entry} if sound else None
  except (ValueError, KeyError, TypeError):
    return None
