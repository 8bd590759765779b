"""Sandboxes that are started before they are wanted, each for one use.

  program in a sandbox, waiting on a pipe  --told what to do-->  result  -->  gone
        ^ another one is started in its place

What takes time of a start, namespaces, mounts, an interpreter and its imports, is over
by the time somebody comes; the program takes its limits then. What differs from one use
to the next is told, since mounts are made at the start. No sandbox serves two.

Nothing waits until one was wanted, and never without bubblewrap.
"""

import asyncio
from collections.abc import Sequence
import logging
import os
import subprocess

from swe17 import config
from swe17.env import sandbox


class Pool:
  """Runs a program of ours, `size` of which wait. Close it in the loop that used it."""

  def __init__(
    self,
    backend: str,
    module: str,
    *arguments: str,
    options: Sequence[str] = (),
    work: str = '/work',
    size: int = 0,
  ):
    """The program is `swe17.env.<module>.main(descriptor, *arguments)`.

    `work` is its directory; with bubblewrap it is in memory, by `options`, which are
    those of bwrap. With size 0, as always without bubblewrap, every one is started
    when it is wanted.
    """
    self._backend, self._work = backend, work
    self._program = module, arguments, options
    self.size = size if backend == 'bubblewrap' else 0
    self._waiting: list[_Waiting] = []
    self._starting: set[asyncio.Task[None]] = set()
    self._open = True

  @property
  def waiting(self) -> int:
    """Sandboxes that are ready."""
    return len(self._waiting)

  async def close(self) -> None:
    """Ends those that wait; programs that run are their callers' to end."""
    self._open = False
    # Not cancelled: who is stopped half way through a start may leave something.
    await asyncio.gather(*self._starting, return_exceptions=True)
    waiting, self._waiting = self._waiting, []
    for each in waiting:
      await each.stop()

  async def run(self, cfg: config.Sandbox, told: bytes) -> sandbox.Completed:
    """The program, told what to do; wall time and output are bounded by `cfg`.

    OSError if it cannot be started, TimeoutError as `sandbox.run`.
    """
    if not self._open:
      raise ValueError('a pool of sandboxes: it is closed')
    taken = self._take() or await self._start()
    for _ in range(self.size - len(self._waiting) - len(self._starting)):
      task = asyncio.ensure_future(self._add())
      self._starting.add(task)
      task.add_done_callback(self._ended)
    await asyncio.to_thread(taken.tell, told)
    return await sandbox.attend(taken.process, self._backend, b'', cfg)

  def _take(self) -> '_Waiting | None':
    while self._waiting:
      each = self._waiting.pop(0)
      if each.process.returncode is None:
        return each
      each.drop()  # it died while it waited
    return None

  def _ended(self, task: asyncio.Task[None]) -> None:
    self._starting.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
      # Who comes next starts a sandbox itself, and is told if that fails too.
      logging.warning('a pool of sandboxes: none in its place: %r', error)

  async def _add(self) -> None:
    made = await self._start()
    if self._open:
      self._waiting.append(made)
    else:
      await made.stop()

  async def _start(self) -> '_Waiting':
    module, arguments, options = self._program
    read, write = os.pipe()
    try:
      process = await asyncio.create_subprocess_exec(
        *sandbox.program(
          self._backend, module, 'main', str(read), *arguments, options=options
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(read,),
        cwd=self._work if self._backend == 'process' else '/',
        env={**sandbox.environment(), 'HOME': self._work, 'TMPDIR': self._work},
        start_new_session=True,
      )
    except BaseException:
      os.close(write)
      raise
    finally:
      os.close(read)
    return _Waiting(process, write)


class _Waiting:
  """A sandbox whose program waits for what it is to do."""

  def __init__(self, process: asyncio.subprocess.Process, pipe: int):
    self.process = process
    self._pipe = pipe

  def tell(self, told: bytes) -> None:
    """Says it, and that that was all. Blocks while it is read."""
    try:
      view = memoryview(told)
      while view:
        view = view[os.write(self._pipe, view) :]
    except BrokenPipeError:
      return  # it ended; whoever attends to it sees that
    finally:
      self.drop()

  def drop(self) -> None:
    os.close(self._pipe)

  async def stop(self) -> None:
    """Ends it with all that is in it, and closes what it held open."""
    self.drop()
    sandbox.kill(self.process)
    assert self.process.stdin is not None
    self.process.stdin.close()
    for stream in (self.process.stdout, self.process.stderr):
      if stream is not None:
        await stream.read()
    await self.process.wait()
