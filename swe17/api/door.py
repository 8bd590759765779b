"""What every route does at its door: bounded bodies, and an eye on who is there."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
import contextlib
from typing import Any

from aiohttp import web

from swe17.api import errors

MAX_BODY = 8 << 20  # bytes; for `web.Application(client_max_size=..)`
PATIENCE = 60.0  # seconds that a client may take to send a body, or to read a part
_LOOK = 0.25  # seconds between looks at whether a client is still there


class Gone(Exception):
  """The client went away, or does not read."""


async def body(http: web.Request) -> bytes:
  """The whole body. `errors.Refused` if it is too large (413) or too slow (408)."""
  try:
    async with asyncio.timeout(PATIENCE):
      return await http.read()
  except TimeoutError as e:
    raise errors.Refused(
      f'the body did not come within {PATIENCE:g} s', status=408
    ) from e
  except web.RequestPayloadError as e:
    raise errors.Refused(f'the body does not decode: {e!s:.200}') from e
  except web.HTTPRequestEntityTooLarge as e:
    raise errors.Refused(f'the body is larger than {MAX_BODY} bytes', status=413) from e


async def write(http: web.Request, response: web.StreamResponse, data: bytes) -> None:
  """Sends a part, the headers before the first. `Gone` if nobody takes it."""
  async with _patient():
    if not response.prepared:
      await response.prepare(http)
    await response.write(data)


async def end(response: web.StreamResponse) -> None:
  """Ends an answer that was written in parts. `Gone` if nobody takes it."""
  async with _patient():
    await response.write_eof()


@contextlib.asynccontextmanager
async def _patient() -> AsyncGenerator[None, None]:
  try:
    async with asyncio.timeout(PATIENCE):
      yield
  except TimeoutError as e:
    raise Gone(f'the client has read nothing for {PATIENCE:g} s') from e
  except ConnectionError as e:
    raise Gone('the client went away') from e


async def while_there(
  http: web.Request, work: Coroutine[Any, Any, web.StreamResponse]
) -> web.StreamResponse:
  """Runs `work` to its end; `Gone`, and it is cancelled, if the client goes first."""
  job = asyncio.ensure_future(work)
  try:
    while not job.done():
      await asyncio.wait({job}, timeout=_LOOK)
      if not job.done() and _gone(http):
        raise Gone('the client went away')
    return job.result()
  finally:
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)


def _gone(http: web.Request) -> bool:
  """Whether the connection is closed."""
  return http.transport is None or http.transport.is_closing()
