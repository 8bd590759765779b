"""Where an agent of a loaded task works: a folder, and a shell in it.

  Local   the folder is a value; every command has a sandbox of its own (env/shell.py)
  Boxed   a container of the task's image, kept for the episode (env/container.py)

Both forget processes between commands and keep files. The environments of this package
offer the same two tools on either.
"""

import abc
import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import os
import posixpath
import shlex
import sys
from typing import Any, Protocol

from swe17 import config, types
from swe17.env import base, container, copies, shell
from swe17.env.formats import repositories
from swe17.env.packages import suite

COMMAND_SECONDS = 60.0
SHOWN = 10_000  # characters of what a command says
_COMMAND = 100_000  # characters of a command
_CHUNK = 60_000  # bytes of a file in one command
_PROCESSES, _MEMORY_MIB = 64, 1024
_PARTS = '/parts'  # where pytest is
# Finds pytest, and modules of the folder where graders look for them.
_PYTEST = f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{_PARTS}:src:lib" exec "$0" "$@"'

TOOLS = (
  base.Tool('bash', 'Run a command in the folder.', {'command': 'str'}, writes=True),
  base.Tool('submit', 'Hand in the folder as it is.', {}, writes=True),
)


@dataclasses.dataclass(frozen=True)
class Said:
  """What one command said, and how it ended."""

  output: str
  code: int
  timed_out: bool


class Workspace(Protocol):
  """A folder and a shell in it. Close it. All may raise OSError: infrastructure."""

  async def run(self, command: str, seconds: float = COMMAND_SECONDS) -> Said: ...

  async def files(self) -> dict[str, bytes]:
    """Plain files of the folder, by relative path."""
    ...

  async def close(self) -> None: ...


def roomy(cfg: config.Sandbox) -> config.Sandbox:
  """The settings with room for a program of somebody else's."""
  return dataclasses.replace(
    cfg,
    processes=max(cfg.processes, _PROCESSES),
    memory_mib=max(cfg.memory_mib, _MEMORY_MIB),
  )


class Local:
  """A folder in memory, with this machine's Python and pytest and nothing installed."""

  def __init__(
    self,
    cfg: config.Sandbox,
    backend: str,
    folder: bytes,
    before: str = '',
    options: Sequence[str] = (),
  ):
    """`before` stands before each command; `options` are further ones of bwrap."""
    self.folder = folder
    self._cfg, self._backend, self._before = roomy(cfg), backend, before
    python = os.path.realpath(sys.executable)
    test = [python, '-B', '-m', 'pytest', '-p', 'no:cacheprovider']
    self._tools = {'python': [python, '-B'], 'python3': [python, '-B']}
    self._options = list(options)
    if backend == 'bubblewrap':
      self._tools['pytest'] = ['sh', '-c', _PYTEST, *test]
      self._options += ['--perms', '0755', '--dir', _PARTS]
      for name, place in suite.pytest_parts().items():
        self._options += ['--ro-bind', place, f'{_PARTS}/{name}']
      self._options += copies.covering(copies.installed())

  async def run(self, command: str, seconds: float = COMMAND_SECONDS) -> Said:
    runner = shell.Shell(self._cfg, self._backend, seconds, self._tools, self._options)
    answer = await runner.run(self.folder, f'{self._before}{command}')
    self.folder = answer.folder
    return Said(answer.output, answer.code, answer.timed_out)

  async def files(self) -> dict[str, bytes]:
    return await asyncio.to_thread(repositories.files_of, self.folder)

  async def close(self) -> None:
    self.folder = b''


class Boxed:
  """A folder of a container's own file system; `before` stands before each command."""

  def __init__(self, box: container.Container, before: str = ':'):
    self.box, self._before = box, before

  async def run(self, command: str, seconds: float = COMMAND_SECONDS) -> Said:
    script = f'exec 2>&1\n{self._before}\n{command}'
    done = await self.box.run(['bash', '-c', script], seconds=seconds)
    code = 124 if done.returncode is None else done.returncode
    return Said(done.stdout.decode('utf-8', 'replace'), code, done.timed_out)

  async def files(self) -> dict[str, bytes]:
    """Raises OSError where the folder is larger than one that is kept in memory."""
    done = await self.box.run(
      ['tar', '--exclude=./.git', '-cf', '-', '.'],
      seconds=COMMAND_SECONDS,
      output_kib=repositories.MAX_BYTES >> 10,
      sweep=False,
    )
    if done.returncode != 0 or done.truncated:
      raise OSError(f'the folder of {self.box.name} could not be read')
    return await asyncio.to_thread(repositories.files_of, done.stdout)

  async def close(self) -> None:
    await self.box.close()


class BashEnv(abc.ABC):
  """What environments with a workspace share; how one is graded is each one's own.

  A graded episode gives its workspace back: containers do not wait to be collected.
  """

  tools: tuple[base.Tool, ...] = TOOLS

  def __init__(self, prompt: str, begin: Callable[[], Awaitable[Workspace]]):
    self._prompt, self._begin = prompt, begin
    self._work: Workspace | None = None
    self._outcome: types.Outcome | None = None
    self.done = False
    self.flags: tuple[str, ...] = ()
    self.figures: dict[str, float] = {}

  @property
  def given(self) -> str | Mapping[str, str]:
    """The task's own words: what they name is no sign of cheating."""
    return self._prompt

  async def reset(self) -> str:
    await self.close()
    self._outcome = None
    self._work = await self._begin()
    self.done, self.flags, self.figures = False, (), {}
    return self._prompt

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one well-formed call. OSError: the infrastructure failed."""
    if self.done or self._work is None:
      return 'already submitted'
    if name == 'submit':
      self.done = True
      return 'submitted'
    if name != 'bash':
      raise ValueError(f'tool: got {name!r}, want bash or submit')
    command = arguments['command']
    return refused(command) or shown(await self._work.run(command))

  async def verify(self) -> types.Outcome:
    """The score of what is in the workspace; value None where a sandbox failed."""
    if self._outcome is None:
      if self._work is None:
        return types.Outcome(None, 'the environment was not reset')
      outcome = await self._grade(self._work)
      if outcome.value is None:
        return outcome
      self._outcome = outcome
      await self.close()
    return self._outcome

  @abc.abstractmethod
  async def _grade(self, work: Workspace) -> types.Outcome: ...

  async def close(self) -> None:
    """Gives the workspace back. It may be reset afterwards."""
    if self._work is not None:
      await self._work.close()
      self._work = None


def refused(command: str) -> str:
  """Why a command is not run at all; '' if it is."""
  if '\0' in command:
    return 'bash: a command holds no null character'
  if len(command) > _COMMAND:
    return f'bash: a command has at most {_COMMAND} characters'
  return ''


def shown(said: Said) -> str:
  """What the agent is told of a command: its output, shortened, and how it ended."""
  text = said.output
  if len(text) > SHOWN:
    half, left = SHOWN // 2, len(text) - SHOWN
    text = f'{text[:half]}\n... {left} characters left out ...\n{text[-half:]}'
  if said.timed_out:
    return f'{text}\n[timed out; it was killed with all it had started]'.lstrip()
  return text if said.code == 0 else f'{text}\n[exit code {said.code}]'.lstrip()


def writing(changes: Mapping[str, bytes | None]) -> list[list[Any]]:
  """Calls of `bash` that make changes as `patches.apply` gives them, then `submit`."""
  calls: list[list[Any]] = []
  for name, data in changes.items():
    place = shlex.quote(name)
    if data is None:
      calls.append(['bash', {'command': f'rm -f -- {place}'}])
      continue
    folder = shlex.quote(posixpath.dirname(name) or '.')
    calls.append(['bash', {'command': f'mkdir -p -- {folder} && : > {place}'}])
    for at in range(0, len(data), _CHUNK):
      text = base64.b64encode(data[at : at + _CHUNK]).decode()
      calls.append(['bash', {'command': f'base64 -d >> {place} <<< {text}'}])
  return [*calls, ['submit', {}]]
