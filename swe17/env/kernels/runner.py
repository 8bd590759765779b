"""What runs inside a sandbox of the bench: a warm process that forks candidates.

    bench (trusted, outside)
      | frames over stdin and stdout
    zygote      has numpy loaded, passes bytes on, reads the clock of the child
      | fork, into a new pid namespace
    child       limits, no privileges, one thread; runs the code under test

A frame is a big-endian uint32 and that many bytes. Requests are JSON, {op, ...}; a call
is followed by a frame of its arguments (pickle: they come from the bench). One frame
answers: JSON, a newline, and for a call the bytes of the result.

  open   {id, source, function}  a new child; {} once the source has run, or {failure}
  call   {id, function, after}   {spent} and the result, or {failure}, or {end}
  close  {id}                    {}: the child is gone

`spent` is the CPU time that the kernel counts for the child's process, all of its
threads, from before it is handed the arguments until all of the result has been read
here: work that is put off until the result is looked at, or begun before, is counted
too. It may start no process that would be counted elsewhere. With `clock` 'wall', for
devices whose work no CPU clock counts, it is the time that passes meanwhile.

This file imports numpy and the standard library only.
"""

from collections.abc import Mapping
import gc
import json
import os
import pickle
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

from swe17.env import limits

_BACKUP_SECONDS = 600  # of RLIMIT_CPU, over all calls of a child
_WORDS = 160  # characters of what an error said
_DYING_SECONDS = 0.2  # for a child that closed its pipe to be gone
_POLL = 0.01  # seconds between two looks at the clock of a child that runs
# One thread: without, BLAS would start some at its import.
_THREADS = ('OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS', 'MKL_NUM_THREADS')
_LOADED = ('fft', 'linalg', 'random', 'polynomial', 'lib.stride_tricks')
_STANDARD = ('bisect', 'collections', 'functools', 'heapq', 'itertools', 'math')
_STANDARD += ('operator', 'statistics', 'string', 're', 'cmath', 'array', 'fractions')


def main(settings: str) -> None:
  """Serves requests from stdin until it closes. `settings` is JSON, see bench.py."""
  cfg = json.loads(settings)
  limits.set_undumpable()
  for name in _THREADS:
    os.environ[name] = '1'
  sys.path.append(cfg['packages'])
  for name in ('numpy', *(f'numpy.{part}' for part in _LOADED), *_STANDARD):
    __import__(name)  # now: the child may not be able to read the files
  for name in cfg['modules']:
    __import__(name)
  from swe17.env.kernels import values

  cfg['encode'], cfg['refused'] = values.encode, values.Unserialisable
  cfg['home'] = os.pidfd_open(os.getpid()) if cfg['isolated'] else -1
  if not cfg['isolated']:
    limits.set_subreaper()
  gc.collect()
  gc.freeze()  # the collector of a child leaves these pages shared
  children: dict[str, _Child] = {}
  while (request := _read_frame(0)) is not None:
    asked = json.loads(request)
    name = asked['id']
    if name in children and asked['op'] in ('open', 'close'):
      children.pop(name).end()
    if asked['op'] == 'open':
      children[name], said = _open(cfg, asked)
    elif asked['op'] == 'call':
      arguments = _read_frame(0) or b''
      head = json.dumps([asked['function'], asked['after']]).encode()
      body = frame(head) + frame(arguments)
      said = children[name].call(body)
    else:
      said = _say({})
    _write_all(1, frame(said))


def frame(body: bytes) -> bytes:
  """A frame that holds `body`."""
  return struct.pack('>I', len(body)) + body


def _say(meta: Mapping[str, Any], result: bytes | bytearray = b'') -> bytes:
  return json.dumps(meta).encode() + b'\n' + result


def _read_frame(fd: int) -> bytes | None:
  """The next frame's body; None at the stream's end."""
  head = _read(fd, 4)
  return None if head is None else _read(fd, struct.unpack('>I', head)[0])


def _read(fd: int, count: int) -> bytes | None:
  parts = bytearray(count)
  view = memoryview(parts)
  while view:
    got = os.readv(fd, [view])
    if not got:
      return None
    view = view[got:]
  return bytes(parts)


def _write_all(fd: int, data: bytes) -> None:
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view) :]


def _open(cfg: Mapping[str, Any], asked: Mapping[str, str]) -> 'tuple[_Child, bytes]':
  """Forks a child and has it run the source."""
  to_r, to_w = os.pipe()
  from_r, from_w = os.pipe()
  if cfg['isolated']:
    limits.unshare(limits.NEWPID)
  pid = os.fork()
  if pid == 0:
    _live(cfg, to_r, from_w)
  if cfg['isolated']:
    limits.enter_pid_namespace(cfg['home'])  # for the next child's, made from here
  os.close(to_r)
  os.close(from_w)
  child = _Child(pid, to_w, from_r, cfg)
  greeting, _ = child.answer(b'')  # sent before any code under test runs
  if greeting != b'ready':
    text = greeting.decode(errors='replace') or 'the child did not start'
    return child, _say({'error': text})
  body = frame(json.dumps([asked['source'], asked['function']]).encode())
  answer, end = child.answer(body)
  return child, _say({'end': end}) if end else _of_child(answer, {})


def _of_child(answer: bytes | bytearray, known: Mapping[str, Any]) -> bytes:
  """A child's answer: b'+' and a result, or b'-' and the words of a failure."""
  if answer[:1] == b'+':
    return _say(known, answer[1:])
  words = bytes(answer[1 : 1 + 2 * _WORDS]).decode('ascii', 'replace')
  return _say({'failure': ''.join(c for c in words if c.isprintable())[:_WORDS]})


class _Child:
  """One candidate's process, as the zygote holds it."""

  def __init__(self, pid: int, to: int, back: int, cfg: Mapping[str, Any]):
    self._pid, self._to, self._back, self._cfg = pid, to, back, cfg
    os.set_blocking(to, False)

  def call(self, body: bytes) -> bytes:
    began = self._clock()
    answer, end = self.answer(body)
    spent = self._clock() - began if not end else 0.0
    return _say({'end': end}) if end else _of_child(answer, {'spent': spent})

  def _clock(self) -> float:
    wall = self._cfg['clock'] == 'wall'
    return time.monotonic() if wall else _cpu_seconds(self._pid)

  def answer(self, body: bytes) -> tuple[bytes | bytearray, str]:
    """Hands `body` over and reads a frame: (its body, '' or what ended it)."""
    cfg, left, got = self._cfg, memoryview(body), bytearray()
    wall = time.monotonic() + cfg['wall_seconds']
    cpu = _cpu_seconds(self._pid) + cfg['cpu_seconds']
    want = 4
    while True:
      readers, writers, _ = select.select(
        [self._back], [self._to] if left else [], [], _POLL
      )
      if writers:
        try:
          left = left[os.write(self._to, left) :]
        except BrokenPipeError:
          left = left[:0]  # it is gone; the read below says so
      if readers:
        part = os.read(self._back, 1 << 20)
        got += part
        if not part:
          return b'', self._death()
        if want == 4 and len(got) >= 4:
          want = 4 + struct.unpack_from('>I', got)[0]
          if want > cfg['output_bytes']:
            return b'', 'large'
        if want > 4 and len(got) >= want:
          return got[4:want], ''
      elif _cpu_seconds(self._pid) > cpu or time.monotonic() > wall:
        return b'', 'timeout' if _cpu_seconds(self._pid) > cpu else 'wall'

  def _death(self) -> str:
    """'died', or 'killed' if it was from outside its namespace."""
    gone = None
    until = time.monotonic() + _DYING_SECONDS
    while gone is None and time.monotonic() < until:
      options = os.WEXITED | os.WNOHANG | os.WNOWAIT
      gone = os.waitid(os.P_PID, self._pid, options)
      time.sleep(0.0 if gone else 0.002)
    if gone is None or not self._cfg['isolated']:
      return 'died'
    # Which nobody in a pid namespace can do to its first process.
    outside = gone.si_code == os.CLD_KILLED and gone.si_status == signal.SIGKILL
    return 'killed' if outside else 'died'

  def end(self) -> None:
    """Kills it. Returns when its pid namespace is empty."""
    os.close(self._to)
    os.close(self._back)
    os.kill(self._pid, signal.SIGKILL)
    os.waitpid(self._pid, 0)
    if not self._cfg['isolated']:
      limits.kill_children()


def _cpu_seconds(pid: int) -> float:
  """CPU time of all threads of a process, as the kernel counts it."""
  if sys.platform != 'linux':
    raise OSError('the bench reads the clocks of Linux')
  try:
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
  except OSError:
    return 0.0  # it has ended, as the next read of its pipe says


def _live(cfg: Mapping[str, Any], to_r: int, from_w: int) -> NoReturn:
  """Gives up everything, then runs the code under test. Never returns."""
  os.setsid()
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  last = 2
  for fd in sorted((to_r, from_w)):
    os.closerange(last + 1, fd)
    last = fd
  os.closerange(last + 1, os.sysconf('SC_OPEN_MAX'))
  try:
    limits.confine(
      cpu_seconds=_BACKUP_SECONDS,  # the zygote watches, this only backs it up
      memory_bytes=cfg['memory_bytes'],
      processes=cfg['processes'],
      files=cfg['files'],
      file_bytes=cfg['file_bytes'],
      isolated=cfg['isolated'],
    )
    limits.set_undumpable()
  except OSError as error:
    _write_all(from_w, frame(f'cannot confine the child: {error}'.encode()))
    os._exit(1)
  gc.disable()  # as timeit does
  _write_all(from_w, frame(b'ready'))
  _serve(cfg, to_r, from_w)
  os._exit(0)


def _serve(cfg: Mapping[str, Any], to_r: int, from_w: int) -> None:
  source, name = json.loads(_read_frame(to_r) or b'')
  scope: dict[str, Any] = {'__name__': 'kernel'}
  failure = ''
  try:
    exec(compile(source, '<kernel>', 'exec', dont_inherit=True), scope)
    if name not in scope:
      failure = f'NameError: no {name} is defined'
  except BaseException as error:
    # Whatever the code under test raises is its answer.
    failure = _words(error)
  _write_all(
    from_w, frame(b'-' + failure.encode('ascii', 'replace') if failure else b'+')
  )
  encode, refused = cfg['encode'], cfg['refused']
  while (head := _read_frame(to_r)) is not None:
    asked, after = json.loads(head)
    arguments = pickle.loads(_read_frame(to_r) or b'')
    try:
      result = scope[asked](*arguments)
      answer = b'+' + encode([result, list(arguments)] if after else result)
    except refused as error:
      answer = f'-TypeError: returned {error}'.encode('ascii', 'replace')
    except BaseException as error:
      # As above, SystemExit and the like among them.
      answer = b'-' + _words(error).encode('ascii', 'replace')
    _write_all(from_w, frame(answer))
    del arguments


def _words(error: BaseException) -> str:
  """Type and message of an error, as far as it has one that can be told."""
  try:
    return f'{type(error).__name__}: {error}'
  except BaseException:
    # Its own __str__ raised.
    return type(error).__name__
