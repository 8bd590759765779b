"""Runs a package's suite inside a sandbox and tells what became of every test.

Called by suite.py as the sandbox's first program, with the number of a file descriptor
and the place of pytest. It imports that, then waits for what it is told: a line of JSON
(`suite._spec`) and the files of the tree. Two processes:

    keeper        holds the clock, keeps the results, believes little of what it is told
      | fork, once more for what is left whenever it dies or a test takes too long
    runner        limits, no privileges; pytest with the package and its tests (plugin)

The code under test runs in the runner, where it could reach pytest itself. So every
record carries a token and a number, must follow from the last one, and among the tests
are canaries: a test's own item once more, under its own name, but sure to fail. Who
makes all tests pass, or those of certain names, makes canaries pass.

This file runs inside the sandbox and imports the standard library and `limits` only.
"""

from collections.abc import Mapping, Sequence
import ctypes
import json
import os
import random
import resource
import secrets
import select
import signal
import sys
import time
import traceback
from typing import Any

from swe17.env import limits
from swe17.env.packages import plugin

OUTCOMES = ('passed', 'failed', 'error', 'skipped')
_CHILDREN = resource.RUSAGE_CHILDREN
_LINE = 1 << 22  # bytes of a record
_DEATHS = 25  # runners lost, by time or by themselves, before the suite is given up
_COLLECT_SECONDS = 30.0
_NEWNS = 0x20000
_READ_ONLY, _SAFE, _REMOUNT, _BIND = 1, 2 | 4, 32, 4096  # _SAFE: nosuid, nodev
_libc = ctypes.CDLL(None, use_errno=True)
_PATIENCE = 5  # times as long as it may take does a test get on a busy machine


def main(fd: str, parts: str) -> None:
  """Runs the suite that the descriptor tells of and prints what came of it, as JSON."""
  sys.path.insert(0, parts)
  import pytest  # before anything of the package can stand in its place

  assert pytest.__file__.startswith(parts)
  del sys.path[0]
  with open(int(fd), 'rb') as told:
    head = told.readline()
    if not head:
      sys.exit(1)  # nobody wants this sandbox any more
    spec = json.loads(head)
    for path, size in spec.pop('tree_files').items():
      place = os.path.join(spec['tree'], path)
      os.makedirs(os.path.dirname(place), exist_ok=True)
      with open(place, 'wb') as file:
        file.write(told.read(size))
  if spec['isolated']:
    _close(spec['tree'], spec.pop('hidden'))
  else:
    limits.set_subreaper()
  runs = []
  for i in range(spec['repeats']):
    own = {'seed': spec['seed'] + i, 'trace': spec['trace'] and i == 0}
    own['explain'] = spec['explain'] and i == spec['repeats'] - 1
    keeper = Keeper({**spec, **own})
    keeper.run()
    runs.append(keeper.told())
    if not runs[-1]['results'] or runs[-1]['reason'] or runs[-1]['forged']:
      break  # as bad as can be
  used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, _CHILDREN)]
  cpu = sum(each.ru_utime + each.ru_stime for each in used)
  sys.stdout.write(json.dumps({'runs': runs, 'cpu': cpu}))


def _close(tree: str, hidden: Sequence[str]) -> None:
  """Makes the tree read-only for good, and hides files and folders of the system.

  A mount namespace of its own, since that around us may belong to a user namespace
  that we have left.
  """
  limits.unshare(_NEWNS)
  for path in hidden:
    if os.path.isdir(path):
      _mount('tmpfs', path, 'tmpfs', _SAFE, 'mode=0755')
    elif os.path.exists(path):
      _mount('/dev/null', path, '', _BIND)
      _mount('', path, '', _BIND | _REMOUNT | _READ_ONLY | _SAFE)
  _mount('', tree, '', _BIND | _REMOUNT | _READ_ONLY | _SAFE)


def _mount(source: str, target: str, kind: str, flags: int, data: str = '') -> None:
  """mount(2). OSError."""
  words = [text.encode() or None for text in (source, target, kind)]
  if _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None) != 0:
    error = ctypes.get_errno()
    raise OSError(error, f'mount {target}: {os.strerror(error)}')


class Forged(Exception):
  """What the runner said cannot be what our plugin says."""


class Keeper:
  """What is known of the suite, over all runners that it takes."""

  def __init__(self, spec: Mapping[str, Any]):
    self._spec = spec
    self._end = time.monotonic() + spec['seconds']
    self._ids: list[str] | None = None
    self._plan: list[tuple[int, bool]] = []
    self._over: set[int] = set()  # places of the plan
    self._results: dict[str, list[Any]] = {}  # id -> [outcome, seconds, text]
    self._touched: dict[str, list[str]] = {}
    self._reason = self._forged = ''

  def told(self) -> dict[str, Any]:
    """All of it, JSON-able."""
    return {
      'results': self._results,
      'touched': self._touched,
      'reason': self._reason,
      'forged': self._forged,
    }

  def run(self) -> None:
    """Starts runners until everything is over, or nothing more can come of it."""
    for _ in range(_DEATHS):
      try:
        runner = _Runner(self._spec, sorted(self._over))
        over = self._attend(runner)
      except Forged as e:
        self._forged = str(e)
        return
      if over:
        return
    self._reason = f'{_DEATHS} times a test took too long or ended the process'

  def _attend(self, runner: '_Runner') -> bool:
    """Follows one runner; whether this was the last one."""
    seconds = self._spec['seconds_a_test']
    started: float | None = None
    current: int | None = None
    deadline = time.monotonic() + _COLLECT_SECONDS
    try:
      while True:
        record = runner.next(min(deadline, self._end))
        now = time.monotonic()
        if record is None:
          if deadline <= now < self._end and runner.starved(seconds):
            deadline = now + seconds
            continue
          timed_out = now >= min(deadline, self._end)
          return self._lost(current, timed_out, now >= self._end)
        match record:
          case ['items', *texts]:
            self._collected(texts)
          case ['start', place] if current is None and self._open(place):
            current, started, deadline = int(place), now, now + seconds
            runner.begin(now)
          case ['end', place, outcome, text] if place == str(current):
            assert current is not None and started is not None
            self._ended(current, outcome, text, now - started)
            current, deadline = None, now + _COLLECT_SECONDS
          case ['touched', name, *places] if self._spec['trace']:
            self._touched[name] = places
          case ['error', name, text]:
            self._results.setdefault(name, ['error', 0.0, text])
          case ['done'] if current is None:
            return self._finished()
          case _:
            raise Forged(f'a record that does not follow: {record[:2]}')
    finally:
      runner.kill()

  def _collected(self, texts: Sequence[str]) -> None:
    if self._ids is None:
      self._ids = [text[1:] for text in texts]
      self._plan = plugin.plan(texts, self._spec['seed'], self._spec['canaries'])
    elif self._ids != [text[1:] for text in texts]:
      raise Forged('other tests than before')

  def _open(self, place: str) -> bool:
    known = place.isdecimal() and int(place) < len(self._plan)
    return known and int(place) not in self._over

  def _ended(self, place: int, outcome: str, text: str, seconds: float) -> None:
    if outcome not in OUTCOMES:
      raise Forged(f'an outcome {outcome!r}')
    self._over.add(place)
    index, canary = self._plan[place]
    assert self._ids is not None
    name = self._ids[index]
    if not canary:
      self._results[name] = [outcome, round(seconds, 4), text]
    elif outcome not in ('failed', 'error'):
      raise Forged(f'a test that must fail {outcome}: {name}')

  def _lost(self, current: int | None, timed_out: bool, at_end: bool) -> bool:
    """A runner is gone, or has been silent for too long; whether to give up."""
    if at_end:
      self._reason = f'the suite took more than {self._spec["seconds"]:g} s'
      return True
    if current is None:
      what = 'took too long' if timed_out else 'died'
      self._reason = f'pytest {what} outside of a test'
      return True
    self._over.add(current)
    index, canary = self._plan[current]
    assert self._ids is not None
    if not canary:
      outcome, text = ('timeout', '') if timed_out else ('error', 'the process ended')
      self._results[self._ids[index]] = [outcome, 0.0, text]
    return len(self._over) == len(self._plan)

  def _finished(self) -> bool:
    if len(self._over) != len(self._plan):
      raise Forged(f'it ended after {len(self._over)} of {len(self._plan)}')
    return True


class _Runner:
  """A process that runs what is left of the suite, and the pipe that it tells by."""

  def __init__(self, spec: Mapping[str, Any], over: Sequence[int]):
    self._isolated = spec['isolated']
    self._token = secrets.token_hex(16)
    self._count = 0
    self._held = b''
    self._gone = False
    self._begun, self._cpu = time.monotonic(), 0.0
    self._pipe, out = os.pipe()
    self._pid = os.fork()
    if self._pid == 0:
      os.close(self._pipe)
      _become_runner(spec, over, out, self._token)
    os.close(out)
    os.set_blocking(self._pipe, False)
    self._pidfd = os.pidfd_open(self._pid)

  def begin(self, now: float) -> None:
    """A test begins: what `starved` counts from."""
    self._begun, self._cpu = now, self._used()

  def starved(self, seconds: float) -> bool:
    """Whether the machine, not the test, is why it has taken `seconds`."""
    waited = time.monotonic() - self._begun
    return self._used() - self._cpu < seconds / 2 and waited < _PATIENCE * seconds

  def _used(self) -> float:
    # The clock of another process's CPU time, as clock_getcpuclockid(3) names it.
    return time.clock_gettime((~self._pid << 3) | 2) if not self._gone else 0.0

  def next(self, deadline: float) -> list[str] | None:
    """The next record; None when the runner has ended or the time is over."""
    while b'\n' not in self._held:
      if len(self._held) > _LINE:
        raise Forged('an endless record')
      left = deadline - time.monotonic()
      if self._gone or left <= 0:
        return None
      ready, _, _ = select.select([self._pipe, self._pidfd], [], [], left)
      data = self._read()
      self._held += data
      self._gone = not data and bool(ready)
    line, _, self._held = self._held.partition(b'\n')
    return self._checked(line)

  def _read(self) -> bytes:
    try:
      return os.read(self._pipe, 1 << 16)
    except BlockingIOError:
      return b''

  def _checked(self, line: bytes) -> list[str]:
    try:
      token, count, *fields = line.decode('ascii').split('\t')
    except ValueError as e:
      raise Forged('a record that is none') from e
    if token != self._token or count != str(self._count) or not fields:
      raise Forged('a record of somebody else')
    self._count += 1
    return [field.encode().decode('unicode_escape') for field in fields]

  def kill(self) -> None:
    """Ends the runner and all that it has left behind."""
    os.close(self._pipe)
    os.close(self._pidfd)
    os.kill(self._pid, signal.SIGKILL)
    os.waitpid(self._pid, 0)
    if not self._isolated:
      limits.kill_children()
      return
    try:
      while True:  # the kernel's list: who forks meanwhile does not escape it
        os.kill(-1, signal.SIGKILL)
        time.sleep(0.002)
    except ProcessLookupError:
      return


def _become_runner(
  spec: Mapping[str, Any], over: Sequence[int], out: int, token: str
) -> None:
  """Takes the limits, runs pytest, ends. Never returns."""
  told = os.dup(2)
  try:
    null = os.open('/dev/null', os.O_RDWR)
    for fd in (0, 1, 2):
      os.dup2(null, fd)
    os.setsid()
    limits.confine(**spec['limits'], isolated=spec['isolated'], map_ids=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed(0)
    plugin.run(spec, frozenset(over), out, token)
  except BaseException:
    os.write(told, traceback.format_exc().encode())  # to whoever reads our stderr
    raise
  finally:
    os._exit(1)
