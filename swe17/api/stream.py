"""Server-sent events: an answer as it is drawn, one JSON object an event.

  data: {chunk}\n\n ... data: [DONE]\n\n

Nothing is sent before the first chunk, so that what goes wrong until then has a status
of its own. Later it is an event {"error"}, which clients raise.
"""

import asyncio
from collections.abc import Mapping
import json
from typing import Any

from aiohttp import web

from swe17.api import errors

PATIENCE = 60.0  # seconds that a client may take to read what it was sent
_HEADERS = {'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache'}
_HEADERS |= {'X-Accel-Buffering': 'no'}  # proxies pass events on at once


class Gone(Exception):
  """The client went away, or does not read."""


class Events:
  """The events of one answer; several choices write side by side."""

  def __init__(self, http: web.Request, headers: Mapping[str, str]):
    self._http, self._lock = http, asyncio.Lock()
    self.response = web.StreamResponse(headers={**_HEADERS, **headers})

  @property
  def begun(self) -> bool:
    return self.response.prepared

  async def send(self, event: Mapping[str, Any] | str) -> None:
    """Writes an event, waiting until the client has room for it."""
    text = event if isinstance(event, str) else dumps(event)
    try:
      async with asyncio.timeout(PATIENCE), self._lock:
        if not self.begun:
          await self.response.prepare(self._http)
        await self.response.write(f'data: {text}\n\n'.encode())
    except TimeoutError as e:
      raise Gone(f'the client has read nothing for {PATIENCE:g} s') from e
    except ConnectionError as e:
      raise Gone('the client went away') from e

  async def fail(self, refused: errors.Refused) -> None:
    """Tells an error in mid-stream and ends."""
    await self.send(refused.body)
    await self.response.write_eof()


def gone(http: web.Request) -> bool:
  """Whether the client has closed the connection."""
  return http.transport is None or http.transport.is_closing()


def dumps(value: Mapping[str, Any]) -> str:
  """JSON in ASCII: what a model draws may hold half a character."""
  return json.dumps(value, allow_nan=False, separators=(',', ':'))
