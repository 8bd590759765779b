"""One request to one sampler, part by part as it draws (POST /generate?stream=1).

  frame = length (uint32, little-endian) | that many bytes: a wire result
  an error in mid-stream = a frame of length 0, then a frame of JSON {"error"}

The last part has a `finish`; a stream that ends without one is a sampler that died.
"""

from collections.abc import AsyncGenerator
import math
import struct

import aiohttp

from swe17 import types, wire

_MOST = 1 << 30  # bytes of a frame
_TEXT = 500  # characters of an answer that are shown


class Busy(Exception):
  """The sampler's queue is full: it says when to ask again. No failure of it."""

  def __init__(self, url: str, seconds: float):
    super().__init__(f'{url} has no room, ask again in {seconds:g} s')
    self.seconds = seconds


class Damaged(ConnectionError):
  """An answer that is not what a sampler gives."""


async def parts(
  http: aiohttp.ClientSession, url: str, request: types.GenerateRequest
) -> AsyncGenerator[types.GenerateResult, None]:
  """Asks the sampler at `url`. Closing the generator takes the request back.

  Raises:
    ValueError: it refused the request, with its reason.
    Busy: it has no room now.
    Damaged: it answered with something else than parts.
    ConnectionError, TimeoutError, aiohttp.ClientError: it failed.
  """
  body = wire.request_to_bytes(request)
  async with http.post(url + '/generate?stream=1', data=body) as response:
    if response.status != 200:
      _refused(url, response, await response.read())
    left = request.max_new
    while True:
      data = await _frame(response.content)
      if not data:
        text = await _frame(response.content)
        raise ConnectionError(f'{url} gave up: {text[:_TEXT]!r}')
      try:
        part = wire.bytes_to_result(data)
      except ValueError as e:
        raise Damaged(f'{url} answered with a damaged record: {e}') from e
      left -= part.token_T.size
      if not part.token_T.size or left < 0 or (left == 0 and not part.finish):
        raise Damaged(f'{url} drew on beyond max_new={request.max_new}, or nothing')
      yield part
      if part.finish:
        return


def _refused(url: str, response: aiohttp.ClientResponse, data: bytes) -> None:
  """Raises what an answer other than 200 means."""
  text = f'HTTP {response.status}: {data[:_TEXT]!r}'
  if response.status in (400, 413):
    raise ValueError(f'{url} refused the request: {text}')
  if response.status == 429:
    raise Busy(url, _seconds(response.headers.get('Retry-After', '')))
  raise ConnectionError(text)


def _seconds(text: str) -> float:
  """A Retry-After, within what one may wait for without looking again."""
  try:
    seconds = float(text)
  except ValueError:
    seconds = 1.0
  return min(max(seconds, 0.05), 30.0) if math.isfinite(seconds) else 1.0


async def _frame(stream: aiohttp.StreamReader) -> bytes:
  """One frame; Damaged where there is none, ConnectionError where it is cut."""
  try:
    (size,) = struct.unpack('<I', await stream.readexactly(4))
    if size > _MOST:
      raise Damaged(f'a frame of {size} bytes, want at most {_MOST}')
    return await stream.readexactly(size)
  except EOFError as e:  # asyncio.IncompleteReadError
    raise ConnectionError(f'the stream ended early: {e}') from e
