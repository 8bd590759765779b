"""Warm graders: run an agent's version of a function on inputs, return its outputs.

Only outputs: expected values stay in this process, and the comparison with them is the
caller's, so the code under test can neither read them nor claim to have met them. See
runner.py for what happens inside.

A verdict ('raise ...', 'timeout', 'died', 'unserialisable') is about the code under
test. What is about us, a worker that died or fell silent, is retried once on a fresh
worker and is then a `GraderError`, never a verdict.
"""

import ast
import asyncio
import dataclasses
import functools
import json
import logging
import re
import sys

from swe17 import config
from swe17.env import base, sandbox, zygote
from swe17.env.repair import runner

_ANSWER = re.compile(r'ok .*|raise \w+|unserialisable', re.DOTALL)
_ENDS = ('', 'timeout', 'wall', 'died')
_MARGIN_SECONDS = 10.0  # beyond the wall limit that the runner itself keeps
_FILES = 0  # open files of a check: none, for the library on disk has the original


class GraderError(base.InfrastructureError):
  """The infrastructure failed twice in a row. Says nothing about the code."""


class _WorkerFault(Exception):
  """A worker gave no usable answer."""


@functools.lru_cache(maxsize=1 << 16)
def _is_arguments(case: str) -> bool:
  """Whether a case is a Python literal of a tuple."""
  try:
    case.encode()
    return type(ast.literal_eval(case)) is tuple
  except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
    return False


@dataclasses.dataclass(frozen=True)
class Check:
  """One version of a function and the inputs to run it on.

  Each case is a Python literal of the tuple of positional arguments, such as
  '([1, 2, 3], 2)'. `source` is executed in a copy of the module's namespace, less the
  function itself.
  """

  module: str  # of the standard library
  function: str
  source: str
  cases: tuple[str, ...]

  def __post_init__(self):
    parts = self.module.split('.')
    if parts[0] not in sys.stdlib_module_names or not all(map(str.isidentifier, parts)):
      raise ValueError(
        f'check.module: got {self.module!r}, want a module of the standard library'
      )
    if not self.function.isidentifier():
      raise ValueError(f'check.function: got {self.function!r}, want an identifier')
    if not self.cases:
      raise ValueError(f'check.cases of {self.function}: got none, want at least one')
    for case in self.cases:
      if not _is_arguments(case):
        raise ValueError(
          f'check.cases of {self.function}: got {case!r}, want a literal of a tuple'
        )


def _request(check: Check) -> bytes:
  first = json.dumps([check.module, len(check.cases)])
  head = json.dumps([check.function, check.source])
  body = b''.join(runner.frame(text.encode()) for text in (head, *check.cases))
  return runner.frame(first.encode()) + runner.frame(body)


def _results(bodies: list[bytes], end: str, count: int) -> tuple[str, ...]:
  """Results as text. What the child wrote itself is believed only to be an answer."""
  results = []
  for body in bodies:
    text = body.decode('ascii', 'replace')
    results.append(text if _ANSWER.fullmatch(text) else 'died')
  rest = 'timeout' if end == 'wall' else end
  return (*results, *[rest] * (count - len(results)))


class _Worker(zygote.Zygote):
  """One sandbox with runner.py in it, started when first asked."""

  def __init__(self, cfg: config.Sandbox, backend: str):
    super().__init__()
    self._cfg, self._backend = cfg, backend

  async def begin(self) -> None:
    settings = {
      'isolated': self._backend == 'bubblewrap',
      'cpu_seconds': self._cfg.cpu_seconds,
      'wall_seconds': self._cfg.wall_seconds,
      'memory_bytes': self._cfg.memory_mib << 20,
      'processes': self._cfg.processes,
      'files': _FILES,
      'output_bytes': self._cfg.output_kib << 10,
    }
    await self.start(
      sandbox.program(self._backend, 'repair.runner', 'main', json.dumps(settings))
    )

  async def ask(self, check: Check) -> tuple[tuple[str, ...], bool]:
    """Return the results and whether wall time cut them. Raises _WorkerFault."""
    try:
      if not self.running:
        await self.begin()
      async with asyncio.timeout(self._cfg.wall_seconds + _MARGIN_SECONDS):
        most = self._cfg.output_kib << 10
        first, *results = runner.split(await self.exchange(_request(check), most))
        meta = json.loads(first)
    except TimeoutError:
      raise _WorkerFault('it fell silent') from None
    except (asyncio.IncompleteReadError, OSError, ValueError) as error:
      raise _WorkerFault(f'{error!r} {await self.last_words()}'.strip()) from error
    if 'error' in meta:
      raise _WorkerFault(str(meta['error']))
    missing = len(check.cases) - len(results)
    if meta['end'] not in _ENDS or missing < 0 or (missing and not meta['end']):
      raise _WorkerFault(f'{len(results)} of {len(check.cases)} results, then {meta}')
    return _results(results, meta['end'], len(check.cases)), meta['end'] == 'wall'


class Graders:
  """A pool of `cfg.workers` warm sandboxes, each running one check at a time."""

  def __init__(self, cfg: config.Sandbox):
    self._cfg = cfg
    self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
    self._workers: list[_Worker] = []
    self._open = False
    self.restarts = 0  # workers replaced because they failed

  @property
  def pids(self) -> tuple[int, ...]:
    """The running workers' process ids."""
    return tuple(worker.pid for worker in self._workers if worker.pid is not None)

  async def start(self) -> None:
    """Choose a backend and start the workers. Raises ValueError as choose_backend."""
    backend = await asyncio.to_thread(sandbox.choose_backend, self._cfg)
    self._workers = [_Worker(self._cfg, backend) for _ in range(self._cfg.workers)]
    for worker in self._workers:
      await worker.begin()
      self._idle.put_nowait(worker)
    self._open = True

  async def close(self) -> None:
    """Kill all workers; checks that run end in GraderError."""
    self._open = False
    for worker in self._workers:
      worker.kill()
    for _ in self._workers:
      # Once its check has ended: two must not read from one pipe.
      worker = await self._idle.get()
      await worker.stop()
    self._workers = []
    self._idle = asyncio.Queue()

  async def run(self, check: Check) -> tuple[str, ...]:
    """Run a check and return one string a case.

    'ok <text of (result, arguments afterwards)>', 'raise TypeName', 'timeout', 'died'
    or 'unserialisable'. A source that does not compile gives 'raise SyntaxError'.
    Raises GraderError if a fresh worker fails too.
    """
    if not self._open:
      raise GraderError('the graders are not started')
    worker = await self._idle.get()
    try:
      return await self._run_on(worker, check)
    finally:
      self._idle.put_nowait(worker)

  async def _run_on(self, worker: _Worker, check: Check) -> tuple[str, ...]:
    name = f'{check.module}.{check.function}'
    first_fault = ''
    waited = False
    while self._open:
      try:
        results, wall = await self._ask(worker, check)
      except _WorkerFault as fault:
        logging.warning('grader: worker restarted, it failed on %s: %s', name, fault)
        self.restarts += 1
        if first_fault:
          raise GraderError(
            f'the grader failed twice on {name}: {first_fault}; then: {fault}'
          ) from fault
        first_fault = str(fault)
        continue
      # Wall time may have run out because the machine was busy: once more.
      if waited or not wall:
        return results
      waited = True
    raise GraderError(f'the graders were closed during a check of {name}')

  async def _ask(self, worker: _Worker, check: Check) -> tuple[tuple[str, ...], bool]:
    """Ask, and stop a worker that did not answer: what it holds is unknown."""
    answered = False
    try:
      answer = await worker.ask(check)
      answered = True
      return answer
    finally:
      if not answered:  # a fault, or the caller gave up
        await worker.stop()
