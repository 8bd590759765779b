"""A shell in a sandbox, command by command, over a folder that is a value.

  folder (a tar file, bytes) + command -> output, exit code, folder afterwards

No command sees the machine: what it changes is packed inside the sandbox and carried to
the next one, which is a sandbox of its own (shell_keeper.py). A folder can therefore be
kept, copied, replayed and graded without its being unpacked out here.
"""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import io
import json
import os
import shlex
import tarfile
import tempfile

from swe17 import config
from swe17.env import limits, sandbox, shell_keeper

_FILES = 256  # open files of a command
_MARGIN_SECONDS = 10.0  # for the folder to be unpacked and packed
FOLDER_BYTES = 16 << 20  # of a folder, packed
_BIN = '/tools'


@dataclasses.dataclass(frozen=True)
class Answer:
  """What one command said."""

  output: str  # stdout and stderr as they came
  code: int  # exit code; `shell_keeper.TIMED_OUT` at the time limit
  folder: bytes  # as the command left it; as it was, if that could not be packed

  @property
  def timed_out(self) -> bool:
    return self.code == shell_keeper.TIMED_OUT


def pack(files: Mapping[str, str]) -> bytes:
  """Returns a folder that holds text files, by relative path."""
  made = io.BytesIO()
  with tarfile.open(fileobj=made, mode='w') as tar:
    for name, text in files.items():
      data = text.encode()
      member = tarfile.TarInfo(name)
      member.size, member.mode = len(data), 0o644
      tar.addfile(member, io.BytesIO(data))
  return made.getvalue()


def read(folder: bytes, name: str, most: int) -> bytes | None:
  """Bytes of a plain file of a folder; None if there is none of at most `most`."""
  try:
    with tarfile.open(fileobj=io.BytesIO(folder)) as tar:
      member = tar.getmember(name)
      if not member.isreg() or member.size > most:
        return None
      file = tar.extractfile(member)
      return None if file is None else file.read()
  except (KeyError, tarfile.TarError):
    return None


def texts(folder: bytes, most: int) -> dict[str, str]:
  """Plain files by path, links among them; '' for one of more than `most` bytes."""
  found = {}
  try:
    with tarfile.open(fileobj=io.BytesIO(folder)) as tar:
      for member in tar:
        if not member.isdir():
          small = member.isreg() and member.size <= most
          file = tar.extractfile(member) if small else None
          found[member.name] = file.read().decode(errors='replace') if file else ''
  except tarfile.TarError:
    return found
  return found


class Shell:
  """Runs commands with the settings of `cfg`, a given tool path and given hidings.

  Attributes:
    tools: programs on the path, beside the system's: name -> words of what is called
      with the program's own arguments after them.
    options: further bwrap options, such as what is hidden.
  """

  def __init__(
    self,
    cfg: config.Sandbox,
    backend: str,
    seconds: float,
    tools: Mapping[str, Sequence[str]] | None = None,
    options: Sequence[str] = (),
  ):
    self._backend, self._seconds = backend, seconds
    self._tools = {
      name: f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'
      for name, words in (tools or {}).items()
    }
    self._options = ('--perms', '0755', '--tmpfs', _BIN, *options)
    self._cfg = dataclasses.replace(cfg, wall_seconds=2 * seconds + _MARGIN_SECONDS)
    size = cfg.memory_mib << 20
    self._limits = {
      'cpu_seconds': seconds,
      'memory_bytes': size,
      'processes': cfg.processes,
      'files': _FILES,
      'file_bytes': size,
    }

  async def run(self, folder: bytes, command: str) -> Answer:
    """Runs one bash command in a folder.

    Raises OSError (TimeoutError among them) where the sandbox failed, not the command.
    """
    with contextlib.ExitStack() as stack:
      given = stack.enter_context(tempfile.TemporaryFile())
      taken = stack.enter_context(tempfile.TemporaryFile())
      work, programs = '/work', _BIN
      if self._backend == 'process':
        work, programs = self._directories(stack)
      await asyncio.to_thread(given.write, self._spec(command, programs) + folder)
      given.flush()
      fds = (given.fileno(), taken.fileno())
      done = await sandbox.run_program(
        self._cfg,
        self._backend,
        'shell_keeper',
        *map(str, fds),
        work=work,
        pass_fds=fds,
        options=self._options,
      )
      output = done.stdout.decode('utf-8', 'replace')
      if done.returncode is None:
        raise TimeoutError('sandbox: the keeper of a command did not end')
      words = done.stderr.decode('utf-8', 'replace').strip()
      if shell_keeper.UNPACKED in words:  # too much is in it
        return Answer(f'{output}{words}\n', done.returncode, folder)
      taken.seek(0)
      after = await asyncio.to_thread(taken.read)
      if not after:
        last = (words.splitlines() or [f'exit code {done.returncode}'])[-1]
        raise OSError(f'sandbox: {last}')
      return Answer(output, done.returncode, after)

  def _directories(self, stack: contextlib.ExitStack) -> tuple[str, str]:
    work, programs = (
      stack.enter_context(tempfile.TemporaryDirectory(prefix=f'{name}-'))
      for name in ('sandbox', 'tools')
    )
    os.chmod(programs, 0o755)
    if os.getuid() == 0:
      os.chown(work, limits.NOBODY, limits.NOBODY)
    return work, programs

  def _spec(self, command: str, programs: str) -> bytes:
    path = sandbox.environment()['PATH']
    spec = {
      'command': command,
      'isolated': self._backend == 'bubblewrap',
      'limits': self._limits,
      'folder_bytes': FOLDER_BYTES,
      'seconds': self._seconds,
      'tools': self._tools,
      'bin': programs,
      'env': {'PATH': f'{programs}:{path}', 'SHELL': '/bin/bash'},
    }
    return json.dumps(spec).encode() + b'\n'
