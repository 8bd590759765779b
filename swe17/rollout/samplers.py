"""Who serves, how loaded each one is, and which sampler a session lives at.

Samplers are found in the store (samplers/<i>.json) and come and go. Each is asked how
it is now and then: one that failed is asked nothing until it is well, one that says
that it stops gets no new session, one whose queue was full gets none for as long as it
said. A session stays where its KV cache is; a new one goes where the load is least for
the size: sessions of ours, and what the sampler itself has to do for others. Members of
a group ('<group>.<member>.<segment>') go to one sampler, which fills in their prompt
once, as long as that one is not much busier than the least busy.

A region is self-contained: its routers ask its own samplers only, whose addresses mean
nothing elsewhere.
"""

import asyncio
import collections
from collections.abc import Sequence
import dataclasses
import json
import logging
from typing import Any

import aiohttp

from swe17.store import kv

_log = logging.getLogger(__name__)
_HEALTH = 2.0  # seconds for an answer to /health
_LOOK = 2.0  # seconds for the store to say who is registered
_TOGETHER = 0.25  # of the slots: how much more load a group's members accept


@dataclasses.dataclass
class Sampler:
  """What is known of one address."""

  url: str
  slots: int = 1
  registered: bool = False
  failed: bool = False  # and has not been well since
  stopping: bool = False
  full_until: float = 0.0  # loop time
  sessions: int = 0  # of ours that live there
  groups: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )  # their groups
  open: int = 0  # requests of ours under way
  others: int = 0  # requests there that are not ours, when it was last asked

  @property
  def load(self) -> float:
    return (self.sessions + self.others) / self.slots


@dataclasses.dataclass
class Home:
  """Where a session lives; `warm` once something was drawn for it there."""

  sampler: Sampler
  warm: bool = False


class Samplers:
  """The samplers of one region. Use it from one event loop."""

  def __init__(self, store: kv.Store, region: int | None = None):
    """`region`: asks only samplers that registered for it; None: all of them."""
    self._store, self._region = store, region
    self._elsewhere: set[str] = set()  # keys of samplers in other regions
    self._look: asyncio.Task[dict[str, int]] | None = None
    self._known: dict[str, Sampler] = {}
    self._home: dict[str, Home] = {}

  def close(self) -> None:
    if self._look is not None:
      self._look.cancel()

  @property
  def urls(self) -> list[str]:
    """Addresses of all that are registered."""
    return sorted(s.url for s in self._known.values() if s.registered)

  async def discover(self, http: aiohttp.ClientSession) -> int:
    """Reads who is registered, asks how they are; how many serve.

    While the store does not answer, what was known stays, and nobody waits for it for
    long.
    """
    if self._look is None:
      self._look = asyncio.ensure_future(asyncio.to_thread(self._registered))
    await asyncio.wait({self._look}, timeout=_LOOK)
    # Of several callers the first takes the answer.
    if self._look is not None and self._look.done():
      look, self._look = self._look, None
      try:
        self._take(look.result())
      except kv.StoreError as e:
        _log.warning('who serves is not known anew: %s', e)
    await asyncio.gather(
      *(self._ask(http, one) for one in list(self._known.values()) if one.registered)
    )
    return len(self._live())

  def place(self, session: str, now: float) -> Sampler | None:
    """The session's sampler, or the least loaded one; None: nobody can be asked.

    One that has something of the session's in its cache is waited for while it is full
    (`full_until`); any other session goes elsewhere meanwhile.
    """
    home = self._home.get(session)
    if home is not None:
      if not home.sampler.failed and (home.warm or home.sampler.full_until <= now):
        return home.sampler
      self.forget(session)
    live = [one for one in self._live() if not one.stopping]
    if not live:
      return None
    free = [one for one in live if one.full_until <= now]
    best = _best(free, _group(session))
    if best is None:
      best = min(live, key=lambda one: (one.full_until, one.url))
    self._home[session] = Home(best)
    best.sessions += 1
    best.groups[_group(session)] += 1
    return best

  def forget(self, session: str) -> None:
    """The session has ended: its place counts no longer."""
    home = self._home.pop(session, None)
    if home is not None:
      one, group = home.sampler, _group(session)
      one.sessions -= 1
      one.groups[group] -= 1
      if not one.groups[group]:
        del one.groups[group]

  def answered(self, session: str) -> None:
    """Something was drawn for the session where it lives."""
    home = self._home.get(session)
    if home is not None:
      home.warm = True

  def _live(self) -> list[Sampler]:
    return [one for one in self._known.values() if one.registered and not one.failed]

  def _take(self, found: dict[str, int]) -> None:
    for url, slots in found.items():
      self._known.setdefault(url, Sampler(url)).slots = slots
    for url, one in list(self._known.items()):
      one.registered = url in found
      if not one.registered and not one.sessions:
        del self._known[url]

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

  async def _ask(self, http: aiohttp.ClientSession, one: Sampler) -> None:
    """Asks a sampler how it is. Silence alone is no failure: it may be busy."""
    try:
      timeout = aiohttp.ClientTimeout(total=_HEALTH)
      async with http.get(one.url + '/health', timeout=timeout) as response:
        well, said = response.status == 200, _object(await response.read())
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
      return
    one.stopping = bool(said.get('stopping')) or not well
    one.failed = one.failed and not well
    busy = said.get('busy')
    one.others = max(0, busy - one.open) if type(busy) is int else 0


def _group(session: str) -> str:
  return session.rsplit('.', 2)[0] if session.count('.') >= 2 else session


def _best(free: Sequence[Sampler], group: str) -> Sampler | None:
  """Where the group is, if that is not much busier than elsewhere; the least busy."""
  best = min(free, key=lambda one: (one.load, one.url), default=None)
  if best is None:
    return None
  near = [
    one for one in free if one.groups[group] and one.load <= best.load + _TOGETHER
  ]
  return min(near, key=lambda one: (one.load, one.url), default=best)


def _object(data: bytes) -> dict[str, Any]:
  try:
    value = json.loads(data)
  except ValueError:
    return {}
  return value if isinstance(value, dict) else {}


def _entry(data: bytes) -> dict[str, Any] | None:
  """A registration, or None if that is not what the bytes are."""
  try:
    entry = json.loads(data)
    sound = isinstance(entry['url'], str) and entry['slots'] >= 1
    return {'region': 0, **entry} if sound else None
  except (ValueError, KeyError, TypeError):
    return None
