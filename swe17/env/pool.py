"""Sandboxes that are started before they are wanted, each for one command.

  sandbox, waiting for its spec on a pipe  --run-->  command  -->  gone
        ^ another one is started in its place

What takes time of a start, namespaces, mounts and an interpreter, is over by the time a
command comes; its limits are taken then, as always. No sandbox serves two commands.
Where there is no bubblewrap nothing is kept, and `run` is `sandbox.run`.
"""

import asyncio
from collections.abc import Mapping, Sequence
import logging
import os
import subprocess

from swe17 import config
from swe17.env import sandbox


class Pool:
  """`size` sandboxes that wait. Open it in a running event loop; close it."""

  def __init__(self, cfg: config.Sandbox, backend: str, size: int = 2):
    if size < 1:
      raise ValueError(f'a pool of sandboxes: got {size=}, want at least 1')
    self._cfg, self._backend = cfg, backend
    self._size = size if backend == 'bubblewrap' else 0
    self._waiting: list[_Waiting] = []
    self._starting: set[asyncio.Task[None]] = set()
    self._open = False

  @property
  def waiting(self) -> int:
    """Sandboxes that are ready."""
    return len(self._waiting)

  async def open(self) -> None:
    """Starts them. OSError if the first does not start."""
    self._open = True
    for _ in range(self._size):
      self._waiting.append(await _started(self._cfg, self._backend))

  async def close(self) -> None:
    """Ends those that wait; commands that run are their callers' to end."""
    self._open = False
    for task in self._starting:
      task.cancel()
    await asyncio.gather(*self._starting, return_exceptions=True)
    for each in self._waiting:
      await each.stop()
    self._waiting = []

  async def run(
    self,
    argv: Sequence[str],
    *,
    files: Mapping[str, bytes] | None = None,
    stdin: bytes = b'',
  ) -> sandbox.Completed:
    """`sandbox.run` with the settings of the pool."""
    if not self._open:
      raise ValueError('a pool of sandboxes: it is closed')
    taken = self._take()
    if taken is None:  # none is kept, or none is ready yet
      return await sandbox.run(self._cfg, self._backend, argv, files=files, stdin=stdin)
    spec = sandbox.spec_of(self._cfg, self._backend, argv, files or {})
    await asyncio.to_thread(taken.tell, spec)
    return await sandbox.attend(taken.process, self._backend, stdin, self._cfg)

  def _take(self) -> '_Waiting | None':
    """One that waits; another is started in its place."""
    while self._waiting:
      each = self._waiting.pop(0)
      task = asyncio.ensure_future(self._replace())
      self._starting.add(task)
      task.add_done_callback(self._ended)
      if each.process.returncode is None:
        return each
      each.drop()  # it died while it waited
    return None

  def _ended(self, task: asyncio.Task[None]) -> None:
    self._starting.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
      # The next command starts a sandbox itself, and is told if that fails too.
      logging.warning('a pool of sandboxes: none in its place: %r', error)

  async def _replace(self) -> None:
    made = await _started(self._cfg, self._backend)
    if self._open:
      self._waiting.append(made)
    else:
      await made.stop()


class _Waiting:
  """A sandbox whose prelude waits for what it is to run."""

  def __init__(self, process: asyncio.subprocess.Process, pipe: int):
    self.process = process
    self._pipe = pipe

  def tell(self, spec: bytes) -> None:
    """Hands the spec over, which ends the waiting. Blocks while it is read."""
    try:
      view = memoryview(spec)
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


async def _started(cfg: config.Sandbox, backend: str) -> _Waiting:
  read, write = os.pipe()
  try:
    process = await asyncio.create_subprocess_exec(
      *sandbox.program(
        backend, 'prelude', 'main', str(read), options=sandbox.work_options(cfg)
      ),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=(read,),
      cwd='/',
      env={**sandbox.environment(), 'HOME': '/work', 'TMPDIR': '/work'},
      start_new_session=True,
    )
  except BaseException:
    os.close(write)
    raise
  finally:
    os.close(read)
  return _Waiting(process, write)
