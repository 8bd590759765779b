"""Where weights may be read from: another relay node, or the store itself.

Both answer the same three questions: a manifest, the bytes of a data object, the
versions there are. None is "there is no such thing", `Unwell` is "ask somebody else".
Neither is trusted: `relay_route` checks whatever they say.

A node's answers over HTTP (`relay_node` gives them):

  GET /read/<key>?wait=s&start=a&stop=b   200 with the bytes, 404 no such version
                                          so far, 410 there is no such object,
                                          202 still fetching: ask again, and
                                          `X-Relay-Progress` says that it gets on
  GET /versions                           200 with a JSON list
  GET /health                             200 with what the node holds

Every request names the run (`X-Relay-Run`), so that a node of another run, at an
address that was ours once, refuses it instead of answering with its own weights.
"""

import asyncio
from collections.abc import Callable
import dataclasses
import hashlib
import json
import os
import re
import time
from typing import Protocol

import aiohttp

from swe17 import config
from swe17.store import kv
from swe17.sync import manifest

RUN, TOKEN, PROGRESS = 'X-Relay-Run', 'X-Relay-Token', 'X-Relay-Progress'
TOKEN_VARIABLE = 'SWE17_RELAY_TOKEN'  # environment: a secret that all nodes share
LARGEST_MANIFEST = 256 << 20  # bytes
LARGEST_LISTING = 16 << 20
_MANIFEST = re.compile(re.escape(manifest.MANIFESTS) + r'(\d{8})\.json')
_PART = 8 << 20  # bytes read from the store at once
_SLOWEST = 50_000  # bytes/s below which a body, after a while, counts as stalled

# Index of a node -> its URL now, or None; called in a thread. ValueError, StoreError.
Directory = Callable[[int], str | None]
Tick = Callable[[], None]  # called whenever a transfer gets on


class Unwell(Exception):
  """A source did not answer, or not as it should."""


class Behind(Exception):
  """A source is sound but does not know of the version yet."""


@dataclasses.dataclass(frozen=True)
class Span:
  """Bytes `start` to `stop` of the object `key`, which has `size` bytes."""

  key: str
  size: int
  start: int
  stop: int


class Source(Protocol):
  """Somebody to ask. All raise Unwell, `data` Behind too."""

  name: str
  final: bool  # "there is none" from here is believed at once

  async def manifest(self, version: int, wait: float, tick: Tick) -> bytes | None:
    """A manifest's bytes, waiting up to `wait` seconds for it to appear."""

  async def data(self, span: Span, tick: Tick) -> bytes | None:
    """Bytes of a data object."""

  async def versions(self) -> list[int]:
    """Versions that have a manifest, ascending."""

  async def probe(self) -> None:
    """Raises Unwell unless the source answers."""

  async def close(self) -> None:
    """Lets connections go."""


def manifest_version(key: str) -> int | None:
  """The version whose manifest `key` names, or None for another key."""
  found = _MANIFEST.fullmatch(key)
  return int(found.group(1)) if found else None


def object_version(key: str) -> int | None:
  """The version whose data, or full snapshot's manifest, `key` names, or None."""
  if key.count('/') != 2:
    return None
  found = manifest.data_version(key)
  return manifest.full_version(key) if found is None else found


def run_name(store: str, cluster: str) -> str:
  """The name by which nodes of one run and cluster know each other, 16 hex digits."""
  return hashlib.sha256(f'{store}\n{cluster}'.encode()).hexdigest()[:16]


def headers(run: str) -> dict[str, str]:
  """What every request carries."""
  token = os.environ.get(TOKEN_VARIABLE, '')
  return {RUN: run, **({TOKEN: token} if token else {})}


class Bucket:
  """The store itself. `reads` counts its operations."""

  name, final = 'the store', True

  def __init__(self, store: kv.Store, poll_seconds: float):
    self.reads = 0
    self._store, self._poll = store, poll_seconds

  async def manifest(self, version: int, wait: float, tick: Tick) -> bytes | None:
    until = time.monotonic() + wait
    while True:
      data = await self._read(manifest.key_of(version))
      left = until - time.monotonic()
      if data is not None or left <= 0:
        return data
      await asyncio.sleep(min(self._poll, left))

  async def data(self, span: Span, tick: Tick) -> bytes | None:
    parts = []
    for start in range(span.start, span.stop, _PART):
      part = await self._read(span.key, start, min(start + _PART, span.stop))
      if part is None:
        return None
      parts.append(part)
      tick()
    return b''.join(parts)

  async def versions(self) -> list[int]:
    self.reads += 1
    try:
      return await asyncio.to_thread(manifest.versions, self._store)
    except kv.StoreError as e:
      raise Unwell(str(e)) from e

  async def probe(self) -> None:
    return  # whether it answers, the next question tells

  async def close(self) -> None:
    return

  async def _read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    self.reads += 1
    try:
      return await asyncio.to_thread(self._store.read, key, start, stop)
    except kv.StoreError as e:
      raise Unwell(str(e)) from e


class Peer:
  """Node `index`, found by `directory` and found again after it failed."""

  def __init__(self, index: int, directory: Directory, run: str, cfg: config.Relay):
    self.name, self.final = f'node {index}', index == 0
    self._index, self._directory, self._run, self._cfg = index, directory, run, cfg
    self._url: str | None = None
    self._session: aiohttp.ClientSession | None = None

  async def manifest(self, version: int, wait: float, tick: Tick) -> bytes | None:
    status, data = await self._read(
      manifest.key_of(version), {'wait': f'{wait:g}'}, LARGEST_MANIFEST, wait, tick
    )
    return data if status == 200 else None

  async def data(self, span: Span, tick: Tick) -> bytes | None:
    wait = self._cfg.stall_seconds / 2
    ask = {'start': str(span.start), 'stop': str(span.stop), 'wait': f'{wait:g}'}
    size = span.stop - span.start
    status, data = await self._read(span.key, ask, size, wait, tick)
    if status == 404:
      raise Behind(f'{self.name} does not know of {span.key} yet')
    return data if status == 200 else None

  async def versions(self) -> list[int]:
    status, data, _ = await self._get('/versions', {}, LARGEST_LISTING, 0.0)
    try:
      found = json.loads(data)
    except ValueError as e:
      raise Unwell(f'{self.name}: its list of versions is not JSON') from e
    if status != 200 or not isinstance(found, list):
      raise Unwell(f'{self.name}: got status {status} and {found!r} for its versions')
    if not all(type(v) is int and 0 <= v < 10**8 for v in found):
      raise Unwell(f'{self.name}: its list of versions holds something else')
    return sorted(found)

  async def probe(self) -> None:
    await self._get('/health', {}, 1 << 16, 0.0)

  async def close(self) -> None:
    if self._session is not None:
      await self._session.close()

  async def _read(
    self, key: str, ask: dict[str, str], limit: int, wait: float, tick: Tick
  ) -> tuple[int, bytes]:
    """One object, asked for again while the node is still fetching it."""
    seen, since = '', time.monotonic()
    while True:
      status, data, progress = await self._get(f'/read/{key}', ask, limit, wait, tick)
      if status != 202:
        return status, data
      wait = self._cfg.stall_seconds / 2
      ask = {**ask, 'wait': f'{wait:g}'}
      # As long as its own fetch gets on, nobody else would be quicker.
      if progress != seen:
        seen, since = progress, time.monotonic()
        tick()
      elif time.monotonic() - since > self._cfg.stall_seconds:
        raise Unwell(f'{self.name} does not get on with {key}')

  async def _get(
    self,
    path: str,
    ask: dict[str, str],
    limit: int,
    wait: float,
    tick: Tick | None = None,
  ) -> tuple[int, bytes, str]:
    """One request: its status (200, 202, 404 or 410), body and progress."""
    stall = self._cfg.stall_seconds
    timeout = aiohttp.ClientTimeout(
      total=wait + 2 * stall + limit / _SLOWEST, connect=stall, sock_read=wait + stall
    )
    try:
      url = await self._where()
      async with self._opened().get(
        url + path, params=ask, timeout=timeout, allow_redirects=False
      ) as reply:
        if reply.status not in (200, 202, 404, 410):
          raise Unwell(f'{self.name} answered {reply.status}')
        data = await _body(reply, limit, stall, tick)
        return reply.status, data, reply.headers.get(PROGRESS, '')
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, Unwell) as e:
      self._url = None  # it may have started again elsewhere
      if isinstance(e, Unwell):
        raise
      raise Unwell(f'{self.name}: {e or type(e).__name__}') from e

  async def _where(self) -> str:
    if self._url is None:
      try:
        self._url = await asyncio.to_thread(self._directory, self._index)
      except kv.StoreError as e:
        raise Unwell(f'{self.name} cannot be looked up: {e}') from e
    if self._url is None:
      raise Unwell(f'{self.name} has not said where it is')
    return self._url

  def _opened(self) -> aiohttp.ClientSession:
    if self._session is None:
      # Not decompressed: nothing here is, and a few bytes could become very many.
      self._session = aiohttp.ClientSession(
        headers=headers(self._run),
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=64),
        cookie_jar=aiohttp.DummyCookieJar(),
      )
    return self._session


async def _body(
  reply: aiohttp.ClientResponse, limit: int, stall: float, tick: Tick | None
) -> bytes:
  """A body of `limit` bytes at most, that comes faster than a trickle."""
  data, began = bytearray(), time.monotonic()
  async for part in reply.content.iter_any():
    data += part
    if len(data) > limit:
      raise Unwell(f'{reply.url} sends more than {limit} bytes')
    if len(data) < _SLOWEST * (time.monotonic() - began - stall):
      raise Unwell(f'{reply.url} sends less than {_SLOWEST} bytes a second')
    if tick is not None:
      tick()
  return bytes(data)
