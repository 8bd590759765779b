"""Agents that others wrote, as processes beside ours: started, fed a task, seen to end.

  mini_swe_agent     one process, an episode on each of its threads (mini_swe_agent.py)
  command: words     a process an episode; in its environment OPENAI_BASE_URL,
                     OPENAI_API_KEY, SWE17_TASK and SWE17_SHELL

Whoever gets a shell's URL runs a command by a POST of {"command": text}, which answers
{"output", "returncode", "exception_info"}. Programs started here are trusted, as ours
are: it is what a model writes that runs in the sandbox. Exit code 0 of a command says
that it submitted.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from typing import Protocol

_log = logging.getLogger(__name__)
MINI = 'mini_swe_agent'
COMMAND = 'command:'
SUBMITTED = 'Submitted'
# Ends that are the agent's own, as mini-swe-agent and litellm call them.
OWN_ENDS = frozenset(
  ('LimitsExceeded', 'TimeExceeded', 'RepeatedFormatError')
  + ('ContextWindowExceededError', 'ended')
)
_START_SECONDS = 120.0  # imports, on a busy machine
_CLOSE_SECONDS = 5.0
_WORDS = 2000  # characters kept of what a command said on stderr
_HANDED_DOWN = ('PATH', 'HOME', 'LANG', 'TMPDIR', 'VIRTUAL_ENV', 'PYTHONPATH')


@dataclasses.dataclass(frozen=True)
class Job:
  """One episode of an agent."""

  id: str
  base_url: str
  shell_url: str
  task: str
  turns: int  # that it may take
  seconds: float  # that one command may take, waiting included


@dataclasses.dataclass(frozen=True)
class Ended:
  """How an agent ended: `SUBMITTED`, one of `OWN_ENDS`, or what went wrong."""

  exit: str
  error: str = ''


class Program(Protocol):
  """What runs agents. `run` may be cancelled."""

  async def open(self) -> None: ...

  async def run(self, job: Job) -> Ended: ...

  async def close(self) -> None: ...


def choose(harness: str, settings: str) -> Program:
  """What `agent.harness` names. ValueError if there is no such thing here."""
  if harness == MINI:
    if importlib.util.find_spec('minisweagent') is None:
      raise ValueError(
        "agent.harness: got 'mini_swe_agent', which is not installed: "
        'pip install mini-swe-agent'
      )
    return MiniSweAgent(settings)
  words = shlex.split(harness.removeprefix(COMMAND))
  if not harness.startswith(COMMAND) or not words:
    raise ValueError(
      f"agent.harness: got {harness!r}, want '', {MINI!r} or '{COMMAND} <words>'"
    )
  return Command(words)


class MiniSweAgent:
  """The process of mini_swe_agent.py, started again if it dies."""

  def __init__(self, settings: str):
    self._settings = [settings] if settings else []
    self._process: asyncio.subprocess.Process | None = None
    self._reading: asyncio.Task[None] | None = None
    self._waiting: dict[str, asyncio.Future[Ended]] = {}
    self._starting = asyncio.Lock()

  async def open(self) -> None:
    """Starts it. ConnectionError if it does not come up."""
    self._process = await asyncio.create_subprocess_exec(
      *(sys.executable, '-m', 'swe17.agent.mini_swe_agent', *self._settings),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=_environment(),
      start_new_session=True,
    )
    assert self._process.stdout is not None
    try:
      async with asyncio.timeout(_START_SECONDS):
        first = await self._process.stdout.readline()
    except TimeoutError:
      first = b''
    if not first:
      await self._end()
      raise ConnectionError('mini-swe-agent did not start: see the log')
    self._reading = asyncio.create_task(self._read(self._process))

  async def run(self, job: Job) -> Ended:
    """One episode to its end; 'died' if the process did."""
    async with self._starting:
      if self._process is None or self._process.returncode is not None:
        _log.warning('mini-swe-agent died and is started again')
        await self._end()
        await self.open()
    assert self._process is not None and self._process.stdin is not None
    ended = self._waiting[job.id] = asyncio.get_running_loop().create_future()
    try:
      self._process.stdin.write(json.dumps(dataclasses.asdict(job)).encode() + b'\n')
      return await ended
    finally:
      self._waiting.pop(job.id, None)

  async def close(self) -> None:
    await self._end()

  async def _read(self, process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    while line := await process.stdout.readline():
      said = json.loads(line)
      ended = self._waiting.get(said['id'])
      if ended is not None and not ended.done():
        ended.set_result(Ended(said['exit'], said['error']))
    for ended in self._waiting.values():
      if not ended.done():
        ended.set_result(Ended('died', 'the process of mini-swe-agent died'))
    await process.wait()

  async def _end(self) -> None:
    if self._process is not None:
      await _kill(self._process)
    if self._reading is not None:
      await self._reading
    self._process = self._reading = None


class Command:
  """A program that is started for each episode."""

  def __init__(self, words: list[str]):
    self._words = words

  async def open(self) -> None:
    """Nothing runs before the first episode."""

  async def run(self, job: Job) -> Ended:
    """One episode to its end. OSError if the program cannot be started."""
    own = {
      'OPENAI_BASE_URL': job.base_url,
      'OPENAI_API_KEY': 'none',
      'SWE17_TASK': job.task,
      'SWE17_SHELL': job.shell_url,
    }
    process = await asyncio.create_subprocess_exec(
      *self._words,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE,
      env={**_environment(), **own},
      start_new_session=True,
    )
    try:
      assert process.stderr is not None
      said = bytearray()
      while chunk := await process.stderr.read(1 << 16):
        said = (said + chunk)[-_WORDS:]
      code = await process.wait()
    finally:
      await _kill(process)
    if code == 0:
      return Ended(SUBMITTED)
    last = said.decode('utf-8', 'replace').strip().rpartition('\n')[2]
    return Ended('ended', f'exit code {code}: {last}')

  async def close(self) -> None:
    """Nothing outlives an episode."""


def _environment() -> dict[str, str]:
  """Of a program: no keys of anybody's; and this source, where we run from one."""
  found = {name: os.environ[name] for name in _HANDED_DOWN if name in os.environ}
  root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
  path = [root, found.get('PYTHONPATH', '')]
  return {
    **found,
    'PYTHONPATH': os.pathsep.join(filter(None, path)),
    'NO_PROXY': '127.0.0.1,localhost',
  }


async def _kill(process: asyncio.subprocess.Process) -> None:
  """Ends a program with all that it started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  async with asyncio.timeout(_CLOSE_SECONDS):
    await process.wait()
