"""One machine: start every role as its own process, keep them alive, end them all.

  supervisor ── learner, learner-1 .. learner-l, sampler-0 .. sampler-n,
                rollout, rollout-1 .. rollout-m
                and, if weights are relayed, controller, relay-1 .. relay-k

Each is spawned and leads its own group. Whoever dies is started again, a learner with
`--resume`. The learner's processes are one program: if one dies, the others are ended,
and all are started together, on a new port. Exit code 2 means that the role refused its
input: the run stops with the role's sentence. The run is over when the first rollout
process, which evaluates at the end, ends with 0. The supervisor itself never imports
JAX.
"""

from collections.abc import Callable, Mapping
import dataclasses
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from typing import NoReturn

from launch import folder, process, watch
from swe17 import config
from swe17.metrics import records
from swe17.metrics import screen as screens

# (role, index, resume) -> argv of that role's process.
Command = Callable[[str, int, bool], list[str]]
# (role, index) -> what that role's process has in its environment beside ours.
EnvOf = Callable[[str, int], Mapping[str, str]]

DEATHS_A_MINUTE = 6  # of one sampler or rollout
LEARNER_DEATHS = 3  # in the whole run, of all its processes
LEARNER = 'learner'
_ARRAYS = (LEARNER, 'sampler')  # roles with big ones
REFUSED = 2  # exit code of a role (or a run) whose input was refused
LOST = 3  # exit code of a learner process that ends because another one did
_SECONDS_TO_NOTICE = 1.0  # for learner processes to say why they end
_SECONDS_TO_STOP = 4.5  # after Ctrl-C, the report included


class Stop(Exception):
  """Ends the run with an exit code; the text, if any, is for stderr."""

  def __init__(self, code: int, text: str = ''):
    super().__init__(text)
    self.code = code


@dataclasses.dataclass
class Child:
  """One role: its process now, and when it died before."""

  role: str
  index: int
  log: pathlib.Path
  process: subprocess.Popen | None = None
  done: bool = False  # ended with 0: it had nothing more to do
  due: float = 0.0  # when to start it again, on the monotonic clock
  deaths: list[float] = dataclasses.field(default_factory=list)

  @property
  def name(self) -> str:
    alone = self.role != 'sampler' and self.index == 0
    return self.role if alone else f'{self.role}-{self.index}'


def role_command(run_dir: str) -> Command:
  """How a role of the run in `run_dir` starts: this program, with `--role`."""

  def command(role: str, index: int, resume: bool) -> list[str]:
    argv = [sys.executable, '-m', 'experiments.swe17', f'--role={role}']
    argv += [f'--run_dir={run_dir}', f'--index={index}', f'--parent={os.getpid()}']
    return argv + (['--resume'] if resume else [])

  return command


def run(
  cfg: config.Config,
  *,
  resume: bool,
  command: Command | None = None,
  env_of: EnvOf = lambda role, index: {},
) -> int:
  """Runs all roles of `cfg` in its (claimed and filled) run folder to the end.

  `env_of` adds to the environment of each role, e.g. the way to the store from where it
  is meant to stand. Returns the exit code: 0 done, 1 a role kept dying, 2 a role
  refused its input, 130 Ctrl-C, 128 + n signal n. Whatever happens, no process is
  left.
  """
  started = time.monotonic()
  signals: list[int] = []
  kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  before = {kind: signal.signal(kind, lambda n, _: signals.append(n)) for kind in kinds}
  process.adopt_orphans()
  screen = screens.Screen(cfg.run_dir, cfg.steps)
  events = records.EventLog(str(pathlib.Path(cfg.run_dir) / 'events.jsonl'))
  feed = watch.Feed(cfg.run_dir, screen)
  fleet = Fleet(cfg, command or role_command(cfg.run_dir), events, env_of)
  try:
    try:
      fleet.start(resume)
      _watch(fleet, feed, signals)
    except Stop as stop:
      end, ended = stop, time.monotonic()
    finally:
      fleet.stop(process.GRACE)
      feed.pump()
      screen.close()
      events.close()
      folder.add_seconds(cfg.run_dir, time.monotonic() - started)
    return _conclude(cfg, end, started, ended)
  finally:
    for kind, handler in before.items():
      signal.signal(kind, handler)


def _watch(fleet: 'Fleet', feed: watch.Feed, signals: list[int]) -> NoReturn:
  """Supervises until a `Stop`; the screen is fed twice a second."""
  fed = 0.0
  while True:
    if signals:
      raise Stop(128 + signals[0])
    fleet.tend()
    if time.monotonic() - fed > 0.5:
      feed.pump()
      fed = time.monotonic()
    time.sleep(0.05)


def _conclude(cfg: config.Config, end: Stop, started: float, ended: float) -> int:
  """Writes the report, says how it went, and returns the exit code."""
  if end.code == 0:
    watch.write_report(cfg.run_dir)
    print(watch.summary(cfg, time.monotonic() - started), flush=True)
    return 0
  if end.code > 128:
    left = ended + _SECONDS_TO_STOP - time.monotonic()
    watch.write_report_within(cfg.run_dir, left)
  if end.args[0]:
    print(f'error: {end.args[0]}', file=sys.stderr)
  if end.code != REFUSED:
    again = shlex.join(['--resume', f'--run_dir={cfg.run_dir}'])
    print(f'go on with: python -m experiments.swe17 {again}', file=sys.stderr)
  return end.code


class Fleet:
  """The processes of a run."""

  def __init__(
    self,
    cfg: config.Config,
    command: Command,
    events: records.EventLog,
    env_of: EnvOf = lambda role, index: {},
  ):
    logs = pathlib.Path(cfg.run_dir) / 'logs'
    logs.mkdir(parents=True, exist_ok=True)
    self._command, self._events, self._env_of = command, events, env_of
    self._before = process.children()  # somebody else's, left alone
    self._cfg = cfg
    self._learner_env = process.coordinator_env(cfg)
    roles = [(LEARNER, i) for i in range(cfg.mesh.processes)]
    relays = range(cfg.relay_nodes)  # the first of them is the controller
    roles += [('relay' if i else 'controller', i) for i in relays]
    roles += [('sampler', i) for i in range(cfg.sampler.processes)]
    roles += [('rollout', i) for i in range(cfg.rollout.processes)]
    self.children = [Child(role, index, logs) for role, index in roles]
    for child in self.children:
      child.log = logs / f'{child.name}.log'

  def start(self, resume: bool) -> None:
    for child in self.children:
      self._spawn(child, resume and child.role == LEARNER)

  def tend(self) -> None:
    """Notices who ended and starts again who is due. Raises `Stop` at the run's end."""
    now = time.monotonic()
    for child in self.children:
      if child.process is None:
        if not child.done and now >= child.due:
          self._spawn(child, child.role == LEARNER)
      elif (code := child.process.poll()) is not None:
        self._ended(child, code, now)
    process.end_orphans(self._before | self._pids())

  def stop(self, grace: float) -> None:
    """SIGTERM to every role, SIGKILL to the groups after `grace` seconds in all."""
    for child in self.children:
      if child.process is not None:
        child.process.terminate()
    _wait(self.children, grace)
    for child in self.children:
      _reap(child)
    # The killed groups' own children come to us one generation at a time.
    while process.children() - self._before:
      process.end_orphans(self._before)
      time.sleep(0.01)

  def _pids(self) -> set[int]:
    return {c.process.pid for c in self.children if c.process is not None}

  def _spawn(self, child: Child, resume: bool) -> None:
    with open(child.log, 'ab') as log:
      child.process = subprocess.Popen(
        self._command(child.role, child.index, resume),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=process.ROOT,
        env={
          **os.environ,
          'PYTHONUNBUFFERED': '1',
          **(process.huge_pages() if child.role in _ARRAYS else {}),
          **(self._learner_env if child.role == LEARNER else {}),
          **self._env_of(child.role, child.index),
        },
        start_new_session=True,
      )

  def _ended(self, child: Child, code: int, now: float) -> None:
    """One role has ended: the run is over, or it starts again after a pause."""
    assert child.process is not None
    if code == 0 and child.role == 'rollout' and child.index == 0:
      _reap(child)
      raise Stop(0)
    if code == 0 and child.role in (LEARNER, 'rollout'):
      _reap(child)
      child.done = True  # all steps done; the first rollout still evaluates
      return
    ended = [child]
    if child.role == LEARNER:
      ended = [c for c in self.children if c.role == LEARNER]
      _wait(ended, _SECONDS_TO_NOTICE)
      child, code = _first_to_die(ended)
    assert child.process is not None
    pid = child.process.pid
    for one in ended:
      _reap(one)
    if code == REFUSED:
      last = folder.last_line(child.log, 'error: ').removeprefix('error: ')
      raise Stop(REFUSED, last or f'{child.name} refused its input: see {child.log}')
    self._start_later(child, ended, _how(child, pid, code), now)

  def _start_later(
    self, child: Child, ended: list[Child], text: str, now: float
  ) -> None:
    """Has `ended` started again, `child` of which died; `Stop` if it dies too often."""
    one = ended[0]  # keeps the count for all of them
    one.deaths = [t for t in one.deaths if one.role == LEARNER or now - t < 60]
    one.deaths.append(now)
    most = LEARNER_DEATHS if one.role == LEARNER else DEATHS_A_MINUTE
    if len(one.deaths) > most:
      raise Stop(1, f'{text}; it died {most} times before: see {child.log}')
    pause = min(0.5 * 2 ** (len(one.deaths) - 1), 10.0)
    for each in ended:
      each.due, each.done = now + pause, False
    if one.role == LEARNER:
      self._learner_env = process.coordinator_env(self._cfg)
    what = f'all {len(ended)} learner processes' if len(ended) > 1 else 'it'
    resumed = ' with --resume' if one.role == LEARNER else ''
    again = f'{text}; starting {what} again{resumed} in {pause:g} s'
    self._events.write('restart', role=child.name, text=again)


def _wait(children: list[Child], seconds: float) -> None:
  """Waits until all have ended, `seconds` at most."""
  until = time.monotonic() + seconds
  alive = [c.process for c in children if c.process is not None]
  while time.monotonic() < until and any(p.poll() is None for p in alive):
    time.sleep(0.02)


def _reap(child: Child) -> None:
  """Ends what is left of a role's process and its group."""
  if child.process is not None:
    _kill_group(child.process.pid)
    child.process.wait()
    child.process = None


def _first_to_die(learners: list[Child]) -> tuple[Child, int]:
  """Of the learner's processes, the one whose end made the others end; its exit code.

  These end with `LOST`, or are aborted by JAX, which noticed first.
  """
  found = [(c, c.process.poll()) for c in learners if c.process is not None]
  dead = [(c, code) for c, code in found if code]
  return min(dead, key=lambda d: (d[1] == LOST, d[1] == -signal.SIGABRT))


def _how(child: Child, pid: int, code: int) -> str:
  """What became of a process, with the last line of its log."""
  how = f'was killed by {signal.Signals(-code).name}' if code < 0 else f'exited {code}'
  last = folder.last_line(child.log)
  return f'{child.name} (pid {pid}) {how}' + (f', its log ends: {last}' if last else '')


def _kill_group(pid: int) -> None:
  try:
    os.killpg(pid, signal.SIGKILL)
  except ProcessLookupError:
    return  # the whole group is gone
