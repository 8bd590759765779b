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

from swe17.api import door, errors

_HEADERS = {'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache'}
_HEADERS |= {'X-Accel-Buffering': 'no'}  # proxies pass events on at once


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
    async with self._lock:
      await door.write(self._http, self.response, f'data: {text}\n\n'.encode())

  async def fail(self, refused: errors.Refused) -> None:
    """Tells an error in mid-stream and ends."""
    await self.send(refused.body)
    await door.end(self.response)


def dumps(value: Mapping[str, Any]) -> str:
  """JSON in ASCII: what a model draws may hold half a character."""
  return json.dumps(value, allow_nan=False, separators=(',', ':'))
