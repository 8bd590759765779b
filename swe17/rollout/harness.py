"""Episodes of an agent that others wrote, between the recording proxy and a shell.

    agent (programs.py)  --OpenAI's API-->  proxy  --tokens-->  router, samplers
      | POST {"command"}
    shells  -->  repair_shell: each command in a sandbox, the folder a value
                   | at the end
                 graders, on solution.py as the folder has it

`agent.harness` names the agent. What it was served comes out of the proxy, what its
folder is worth from the verifier, and how it ended from the agent:

  submitted                     the verifier's outcome
  its own end, a limit          outcome 0: not submitted
  anything else: a sandbox,     no outcome, status 'invalid'
  a sampler, the agent's
  program, the wall clock
"""

import asyncio
import json
import math
import secrets
import time

from aiohttp import web
import numpy as np

from swe17 import config, types
from swe17.agent import formats, programs
from swe17.env import sandbox
from swe17.env.audit import cheating
from swe17.env.repair import repair, repair_shell
from swe17.rollout import proxy, recorded

_AT_ONCE = 8  # commands that run side by side
_MAX_BODY = 1 << 20  # bytes of a command
_MAX_OUTPUT = 64 << 10  # characters of what it said
_WAIT_SECONDS = 600.0  # longest a command waits for its turn


class Shells:
  """Gives each open shell a URL."""

  def __init__(self) -> None:
    self._open: dict[str, repair_shell.RepairShell] = {}
    self._gate = asyncio.Semaphore(_AT_ONCE)
    self._runner: web.AppRunner | None = None
    self._address = ''
    self.seconds: dict[str, float] = {}  # that commands ran, by key
    self.faults: dict[str, str] = {}  # of the sandbox, by key

  async def open(self) -> None:
    """Listens at a free port of this machine alone."""
    server = web.Application(client_max_size=_MAX_BODY)
    server.add_routes([web.post('/{key}', self._answer)])
    self._runner = web.AppRunner(server, access_log=None, handler_cancellation=True)
    await self._runner.setup()
    await web.TCPSite(self._runner, '127.0.0.1', 0).start()
    self._address = f'http://127.0.0.1:{self._runner.addresses[0][1]}'

  async def close(self) -> None:
    if self._runner is not None:
      await self._runner.cleanup()

  def add(self, shell: repair_shell.RepairShell) -> tuple[str, str]:
    """(key, URL) of a shell."""
    key = secrets.token_urlsafe(24)
    self._open[key] = shell
    self.seconds[key] = 0.0
    return key, f'{self._address}/{key}'

  def remove(self, key: str) -> tuple[float, str]:
    """Takes the URL away: (seconds that commands ran, the sandbox's fault or '')."""
    del self._open[key]
    return self.seconds.pop(key), self.faults.pop(key, '')

  async def _answer(self, http: web.Request) -> web.Response:
    key = http.match_info['key']
    shell = self._open.get(key)
    if shell is None:
      raise web.HTTPNotFound(text='no such shell, or its episode is over')
    try:
      command = json.loads(await http.read())['command']
    except (ValueError, KeyError, TypeError) as e:
      raise web.HTTPBadRequest(text='want {"command": text}') from e
    if not isinstance(command, str):
      raise web.HTTPBadRequest(text='command: want text')
    async with self._gate:
      began = time.monotonic()
      try:
        answer = await shell.run(command)
      except OSError as e:
        if key in self._open:
          self.faults[key] = f'{type(e).__name__}: {e}'
        raise web.HTTPServiceUnavailable(text='the sandbox failed') from e
      finally:
        if key in self._open:
          self.seconds[key] += time.monotonic() - began
    late = 'the command took too long and was ended' if answer.timed_out else ''
    return web.json_response(
      {
        'output': answer.output[:_MAX_OUTPUT],
        'returncode': answer.code,
        'exception_info': late,
      }
    )


class Harness:
  """Runs episodes of `agent.harness`. Open it inside a running event loop."""

  def __init__(
    self,
    cfg: config.Config,
    fmt: formats.Format,
    verifier: repair.Verifier,
    route: proxy.Route,
  ):
    """ValueError if the agent that the settings name is not there."""
    self.cfg, self._fmt, self._verifier = cfg, fmt, verifier
    self._program = programs.choose(cfg.agent.harness, cfg.agent.harness_settings)
    self._proxy = proxy.Proxy(cfg, fmt, route)
    self._shells = Shells()
    self._backend = ''

  async def open(self) -> None:
    """Starts what listens and the agent's program. ConnectionError if it does not."""
    self._backend = await asyncio.to_thread(sandbox.choose_backend, self.cfg.sandbox)
    await self._proxy.open()
    await self._shells.open()
    await self._program.open()

  async def close(self) -> None:
    await self._program.close()
    await self._shells.close()
    await self._proxy.close()

  async def episode(
    self,
    task: types.Task,
    group_id: str,
    member: int,
    sampling: types.Sampling,
    *,
    seconds: float = math.inf,
    min_version: int = 0,
  ) -> types.Episode:
    """Runs one episode to its end; see the module for what each end means.

    `seconds` bound its wall time where `agent.episode_seconds` is more.
    """
    agent = self.cfg.agent
    most = min(seconds, agent.episode_seconds)
    opened = self._proxy.open_episode(
      group_id, member, sampling=sampling, min_version=min_version
    )
    shell = repair_shell.RepairShell(
      task, self._verifier, self.cfg.sandbox, self._backend, agent.call_seconds
    )
    key, url = self._shells.add(shell)
    job = programs.Job(
      id=opened.key,
      base_url=opened.base_url,
      shell_url=url,
      task=repair_shell.prompt(task),
      turns=agent.max_turns,
      seconds=2 * agent.call_seconds + _WAIT_SECONDS,
    )
    limit = asyncio.timeout(most)
    served: recorded.Served | None = None
    ended, spent, fault = programs.Ended(''), 0.0, ''
    try:
      try:
        async with limit:
          ended = await self._program.run(job)
      except OSError as e:  # TimeoutError is one
        late = f'episode took over {most:g} s'
        fault = late if limit.expired() else f'{type(e).__name__}: {e}'
      finally:
        served = self._proxy.close_episode(opened.key)
        spent, broken = self._shells.remove(key)
        fault = fault or broken
      outcome = await self._outcome(shell, served, ended, fault)
      outcome = cheating.judged(outcome, shell.flags)
    finally:
      shell.close()
    return served.episode(
      task,
      group_id,
      member,
      outcome,
      calls=shell.calls,
      malformed=_malformed(served, self._fmt),
      tests=shell.tests,
      submitted=ended.exit == programs.SUBMITTED,
      tool_seconds=spent,
    )

  async def _outcome(
    self,
    shell: repair_shell.RepairShell,
    served: recorded.Served,
    ended: programs.Ended,
    fault: str,
  ) -> types.Outcome:
    if fault:
      return types.Outcome(None, fault)
    if ended.exit == programs.SUBMITTED:
      return await shell.verify()
    said = ': '.join(text for text in (ended.exit, ended.error) if text)
    if ended.exit in programs.OWN_ENDS or served.cut:
      return types.Outcome(0.0, f'not submitted: {said}')
    return types.Outcome(None, f'the agent failed: {said}')


def _malformed(served: recorded.Served, fmt: formats.Format) -> int:
  """Calls that did not parse; what a harness makes of them is its own business."""
  count = 0
  for segment in served.segments:
    for turn in np.unique(segment.turn_T[segment.mask_T]):
      ids = segment.token_T[segment.mask_T & (segment.turn_T == turn)].tolist()
      count += sum(bool(call.error) for call in fmt.parse(ids).calls)
  return count
