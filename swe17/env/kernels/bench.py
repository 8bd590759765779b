"""Runs a candidate beside its reference, each in a sandboxed process of its own.

For every call fresh inputs are drawn here, from the operating system's randomness. The
candidate runs first; the reference's answer, from another sandbox, is compared with
its out here. The time of a call is the CPU time of the process as the kernel counts it
(runner.py says from when to when), so that other load on the machine weighs on both
alike. Calls alternate, one pair at a time on this machine: a lock on a file is held.

  speedup = median over calls of (reference's CPU time / candidate's)

and 1 within the band that the reference shows against itself (`noise`). A failure of
ours is retried once on fresh workers and is then a `GraderError`, never a verdict.
"""

import asyncio
from collections import defaultdict, OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
import contextlib
import dataclasses
import fcntl
import logging
import math
import os
import pathlib
import pickle
import secrets
import statistics
import tempfile
from typing import Any

import numpy as np

from swe17 import config
from swe17.env import sandbox
from swe17.env.kernels import rules, values, worker
from swe17.env.repair import grader

CLASSES = ('parse', 'run', 'barred', 'wrong', 'correct')
_MEMORY_MIB = 1024  # of a candidate at least: numpy alone maps much
_WALL = 60.0  # times its CPU time that a call may take at least
_LEAST_BAND = 0.03  # log ratio
_REDRAWS = 1000  # of the medians that make a band
_NOISE_CALLS, _COLD_CALLS = 30, 3  # of a reference beside itself; first, not counted
_REFERENCES = 24  # whose processes a pair keeps: groups at work on the same tasks
_CANDIDATE = 'candidate'
_PAUSE = 0.002  # between two looks at the lock [s]

Inputs = Callable[[np.random.Generator, bool], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True)
class Problem:
  """What a candidate must do, and how often it is asked to.

  Attributes:
    inputs: (generator, whether small) -> positional arguments.
    checks: calls on small inputs, untimed, after which the arguments must be as the
      reference leaves them.
    calls: timed calls.
    prepare: a function that is given the arguments instead, untimed.
    module: makes what is run of a text, the reference's or a candidate's.
    compared: the function that must not be the reference's; '': `function`.
    allowed: modules that a candidate may import beside those of rules.py.
    noise: problems with this in common share a noise band; '': it has its own.
  """

  name: str
  function: str
  reference: str
  inputs: Inputs
  checks: int = 4
  calls: int = 7
  rtol: float = 1e-9
  prepare: str = ''
  module: Callable[[str], str] = str
  compared: str = ''
  allowed: frozenset[str] = frozenset()
  noise: str = ''


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What became of a candidate.

  Attributes:
    kind: one of `CLASSES`.
    words: what went wrong.
    speedup: of a correct one; 1 inside the noise band.
    flag: the rule it breaks (rules.py): it scores nothing.
    ratios: of the timed calls, in order.
  """

  kind: str
  words: str = ''
  speedup: float = 0.0
  flag: str = ''
  ratios: tuple[float, ...] = ()
  lasting: bool = True  # the same text has it again; not so if it hung or died


def score(verdict: Verdict, cap: float) -> float:
  """Kevin's S = .3 correct + speedup x correct, the speedup at most `cap`."""
  if verdict.kind != 'correct' or verdict.flag:
    return 0.0
  return 0.3 + min(verdict.speedup, cap)


def draw(problem: Problem, small: bool) -> tuple[Any, ...]:
  """Arguments that nobody can foresee."""
  return problem.inputs(np.random.default_rng(secrets.randbits(128)), small)


def band(ratios: Sequence[float], calls: int, seed: int = 0) -> float:
  """Half width of a noise band [log ratio], from ratios of a thing against itself.

  95 % of the medians of `calls` of them, redrawn, lie within; at least .03.
  """
  logs = np.log(np.asarray(ratios))
  rng = np.random.default_rng(seed)
  drawn = rng.choice(logs, (_REDRAWS, calls))
  return max(float(np.quantile(np.abs(np.median(drawn, axis=1)), 0.95)), _LEAST_BAND)


def speedup(ratios: Sequence[float], width: float) -> float:
  """The median ratio; exactly 1 within `width` [log ratio] of it."""
  middle = statistics.median(ratios)
  return 1.0 if abs(math.log(middle)) <= width else middle


class Bench:
  """`cfg.workers` pairs of warm sandboxes, and one lock for all that is timed."""

  def __init__(self, cfg: config.Sandbox, room: worker.Room | None = None):
    self._room = room or worker.Room()
    self._cfg = dataclasses.replace(
      cfg,
      memory_mib=max(cfg.memory_mib, _MEMORY_MIB),
      wall_seconds=max(cfg.wall_seconds, _WALL * cfg.cpu_seconds),
    )
    self._idle: asyncio.Queue[_Pair] = asyncio.Queue()
    self._pairs: list[_Pair] = []
    self._lock = asyncio.Lock()
    self._bands: dict[str, float] = {}
    self._measuring: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
    self._lock_fd = -1
    self.restarts = 0  # pairs replaced because they failed

  async def start(self) -> None:
    """Starts the sandboxes. ValueError as `sandbox.choose_backend`."""
    backend = await asyncio.to_thread(sandbox.choose_backend, self._cfg)
    path = pathlib.Path(tempfile.gettempdir(), f'swe17-bench-{os.getuid()}.lock')
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    self._lock_fd = os.open(path, flags, 0o600)
    self._pairs = [
      _Pair(self._cfg, backend, self._room) for _ in range(self._cfg.workers)
    ]
    for pair in self._pairs:
      self._idle.put_nowait(pair)

  async def close(self) -> None:
    """Kills all; measurements that run end in GraderError."""
    for pair in self._pairs:
      pair.kill()
    for _ in self._pairs:
      await (await self._idle.get()).stop()
    self._pairs = []
    if self._lock_fd >= 0:
      os.close(self._lock_fd)
      self._lock_fd = -1

  async def measure(self, problem: Problem, source: str) -> Verdict:
    """The verdict on a candidate. GraderError if the infrastructure fails twice."""
    try:
      asked = problem.compared or problem.function
      flag = rules.broken(source, problem.reference, asked, problem.allowed)
    except SyntaxError as e:
      return Verdict('parse', f'line {e.lineno}: {e.msg}')
    except (ValueError, RecursionError, MemoryError) as e:
      return Verdict('parse', type(e).__name__)
    if flag:
      return Verdict('barred', flag, flag=flag)
    width = await self.noise(problem)
    return await self._insist(problem, source, width)

  async def noise(self, problem: Problem) -> float:
    """The noise band of a problem, measured once: its reference against itself."""
    key = problem.noise or problem.name
    async with self._measuring[key]:  # whoever else wants it waits
      if key not in self._bands:
        self._bands[key] = await self._noise(problem)
    return self._bands[key]

  async def _noise(self, problem: Problem) -> float:
    own = dataclasses.replace(problem, calls=_COLD_CALLS + _NOISE_CALLS)
    seen = await self._insist(own, problem.reference, 0.0)
    if seen.kind != 'correct':
      raise grader.GraderError(
        f'the reference of {problem.name} does not run: {seen.kind} {seen.words}'
      )
    return band(seen.ratios[_COLD_CALLS:], problem.calls)

  async def _insist(self, problem: Problem, source: str, width: float) -> Verdict:
    if not self._pairs:
      raise grader.GraderError('the bench is not started')
    pair = await self._idle.get()
    try:
      for again in (True, False):
        try:
          verdict = await self._on(pair, problem, source, width)
          if not again or verdict.words != worker.WAITED:
            return verdict
        except worker.Fault as fault:
          self.restarts += 1
          logging.warning('bench: worker restarted on %s: %s', problem.name, fault)
          if not again or not self._pairs:
            raise grader.GraderError(f'the bench failed: {fault}') from fault
      raise AssertionError('unreachable')
    finally:
      self._idle.put_nowait(pair)

  async def _on(
    self, pair: '_Pair', problem: Problem, source: str, width: float
  ) -> Verdict:
    """Stops a pair that did not answer: what it holds is unknown."""
    answered = False
    try:
      verdict = await self._compare(pair, problem, source, width)
      answered = True
      return verdict
    finally:
      if not answered:
        await pair.stop()

  async def _compare(
    self, pair: '_Pair', problem: Problem, source: str, width: float
  ) -> Verdict:
    failure = await pair.open(problem, source)
    if failure:
      return Verdict('run', failure, lasting=failure not in worker.ENDS)
    ratios = []
    for _ in range(problem.checks):
      bad, _ = await pair.both(problem, draw(problem, True), after=True)
      if bad is not None:
        return bad
    async with self._alone():
      for _ in range(problem.calls):
        bad, ratio = await pair.both(problem, draw(problem, False), after=False)
        if bad is not None:
          return bad
        ratios.append(ratio)
    await pair.candidate.end(_CANDIDATE)
    return Verdict('correct', '', speedup(ratios, width), ratios=tuple(ratios))

  @contextlib.asynccontextmanager
  async def _alone(self) -> AsyncGenerator[None]:
    """While nobody else on this machine times anything."""
    async with self._lock:
      while True:
        try:
          fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
          break
        except BlockingIOError:
          await asyncio.sleep(_PAUSE)
      try:
        yield
      finally:
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)


class _Pair:
  """A sandbox for candidates and one for references, which never share a process."""

  def __init__(self, cfg: config.Sandbox, backend: str, room: worker.Room):
    self.candidate = worker.Worker(cfg, backend, room)
    self.reference = worker.Worker(cfg, backend, room)
    self._opened: OrderedDict[str, None] = OrderedDict()  # references that run

  async def open(self, problem: Problem, source: str) -> str:
    """Has both run their sources: why the candidate's does not, '' if it does."""
    function, text = problem.function, problem.module(source)
    failure = await self.candidate.open(_CANDIDATE, text, function)
    name = problem.reference
    if name in self._opened:
      self._opened.move_to_end(name)
      return failure
    own = await self.reference.open(name, problem.module(name), function)
    if own:
      raise worker.Fault(f'the reference of {problem.name}: {own}')
    self._opened[name] = None
    if len(self._opened) > _REFERENCES:
      await self.reference.end(self._opened.popitem(last=False)[0])
    return failure

  async def both(
    self, problem: Problem, arguments: tuple[Any, ...], *, after: bool
  ) -> tuple[Verdict | None, float]:
    """Calls the candidate, then the reference: (what is wrong, ratio of times)."""
    data = pickle.dumps(arguments, protocol=5)
    if problem.prepare:
      failure = await self._prepare(problem, data)
      if failure is not None:
        return failure, 0.0
      data, after = pickle.dumps(()), False
    name, key = problem.function, problem.reference
    meta, got = await self.candidate.call(_CANDIDATE, name, data, after=after)
    failure = worker.failure(meta)
    if failure:
      return Verdict('run', failure, lasting='failure' in meta), 0.0
    own, want = await self.reference.call(key, name, data, after=after)
    if 'spent' not in own:
      raise worker.Fault(f'the reference of {problem.name}: {own}')
    try:
      reason = values.differs(values.decode(want), values.decode(got), problem.rtol)
    except ValueError as e:
      reason = str(e)
    if reason:
      return Verdict('wrong', reason), 0.0
    return None, own['spent'] / max(meta['spent'], 1e-9)

  async def _prepare(self, problem: Problem, data: bytes) -> Verdict | None:
    """Has both make their inputs ready; a verdict if the candidate does not."""
    name = problem.prepare
    meta, _ = await self.candidate.call(_CANDIDATE, name, data, after=False)
    if failure := worker.failure(meta):
      return Verdict('run', failure, lasting='failure' in meta)
    own, _ = await self.reference.call(problem.reference, name, data, after=False)
    if 'spent' not in own:
      raise worker.Fault(f'the reference of {problem.name}: {own}')
    return None

  def kill(self) -> None:
    self.candidate.kill()
    self.reference.kill()

  async def stop(self) -> None:
    self._opened.clear()
    await self.candidate.stop()
    await self.reference.stop()
