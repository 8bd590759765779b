"""A sandboxed program that stays and answers, as the trusted side talks to it.

Messages are frames: 4 bytes of length (big-endian), then that many bytes. Who asks
keeps the time; what a program that failed still holds is unknown, so it is stopped.
"""

import asyncio
from collections.abc import Sequence
import struct
import subprocess

from swe17.env import sandbox

_SLACK = 4096  # bytes of an answer beside its payload


class Zygote:
  """One sandbox, started by whoever uses it first."""

  def __init__(self) -> None:
    self._process: asyncio.subprocess.Process | None = None

  @property
  def running(self) -> bool:
    """Whether it was started and not stopped since."""
    return self._process is not None

  @property
  def pid(self) -> int | None:
    return self._process.pid if self._process else None

  async def start(self, argv: Sequence[str]) -> None:
    """Starts the program of `sandbox.program`. OSError if it cannot be."""
    self._process = await asyncio.create_subprocess_exec(
      *argv,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      env=sandbox.environment(),
      cwd='/',
      start_new_session=True,
    )

  async def exchange(self, frames: bytes, most: int) -> bytes:
    """Sends frames; the body of the answer, of `most` bytes and a little more at most.

    Raises:
      asyncio.IncompleteReadError, OSError: it has ended.
      ValueError: the answer is too large.
    """
    process = self._process
    assert process and process.stdin and process.stdout
    process.stdin.write(frames)
    await process.stdin.drain()
    size = struct.unpack('>I', await process.stdout.readexactly(4))[0]
    if size > most + _SLACK:
      raise ValueError(f'an answer of {size} bytes')
    return await process.stdout.readexactly(size)

  def kill(self) -> None:
    """Ends what runs in it; who waits for its answer gets an error."""
    if self._process is not None:
      sandbox.kill(self._process)

  async def stop(self) -> None:
    """Kills it with all that is in it. Nobody may be reading its answer."""
    process, self._process = self._process, None
    if process is not None:
      assert process.stdin is not None
      sandbox.kill(process)
      process.stdin.close()
      for stream in (process.stdout, process.stderr):
        if stream is not None:
          await stream.read()  # to the end, so that nothing of it stays open
      await process.wait()

  async def last_words(self) -> str:
    """Kills it; the last line that it wrote to stderr."""
    process = self._process
    if process is None or process.stderr is None:
      return ''
    sandbox.kill(process)
    lines = (await process.stderr.read()).decode(errors='replace').strip().splitlines()
    return lines[-1] if lines else ''
