"""What runs inside the sandbox: a warm process that forks one child for each check.

    grader (trusted, outside)
      | frames over stdin and stdout
    zygote      imports modules, passes bytes on, watches the clock
      | fork, into a new pid namespace
    child       limits, no privileges, two pipes; runs the code under test

A frame is a big-endian uint32 and that many bytes. A check comes as two: JSON of
[module, number of cases], and a body of frames itself: the head, JSON of [function,
source], then one for each case. One frame answers: a frame of JSON, {end} or {error},
then one for each result, in order.

The child is given a case only after it answered the last one, and no expected value is
ever in here: all that the code under test can do to the answer is to give one. Nor is
the original: it is taken out of the child's memory (originals.py), and a child can open
no file, so it finds no other copy; what it may import the zygote has imported. The
zygote keeps a check's bytes in two buffers that it wipes, so the next check's child,
which inherits its memory, finds nothing of the last.

This file imports the standard library only.
"""

import ast
import codecs
from collections.abc import Mapping
import gc
import importlib
import json
import os
import select
import signal
import struct
import sys
import time
from types import ModuleType
from typing import Any, NoReturn

from swe17.env import canonical, limits
from swe17.env.repair import originals

# Codecs that a check may ask for: a child can import none that is not here.
_CODECS = ('ascii', 'latin_1', 'utf_8_sig', 'utf_16', 'utf_32', 'cp1252', 'idna')
_CODECS += ('raw_unicode_escape', 'unicode_escape', 'punycode')


def frame(body: bytes) -> bytes:
  """Return a frame that holds `body`."""
  return struct.pack('>I', len(body)) + body


def split(body: bytes) -> list[bytes]:
  """Return what the frames in `body` hold. Raises ValueError on a torn one."""
  bodies, start = [], 0
  while start < len(body):
    end = _end_of_frame(body, start)
    if end > len(body):
      raise ValueError(f'got a frame that ends at {end} of {len(body)} bytes')
    bodies.append(body[start + 4 : end])
    start = end
  return bodies


def _end_of_frame(buffer: bytes | bytearray | memoryview, start: int) -> int:
  """Where the frame at `start` ends, as far as its length is there to be read."""
  if len(buffer) < start + 4:
    return start + 4
  return start + 4 + struct.unpack_from('>I', buffer, start)[0]


def _read_frame(fd: int) -> bytearray | None:
  """Return the next frame's body, in memory of its own; None at the stream's end."""
  head = bytearray(4)
  body = None
  if _fill(fd, head):
    body = bytearray(struct.unpack('>I', head)[0])
    if not _fill(fd, body):
      return None
  return body


def _fill(fd: int, buffer: bytearray) -> bool:
  """Read until `buffer` is full; False if the stream ended before."""
  view = memoryview(buffer)
  while view:
    count = os.readv(fd, [view])
    if not count:
      return False
    view = view[count:]
  return True


def _write_all(fd: int, data: bytes | memoryview) -> None:
  view = memoryview(data)
  while view:
    view = view[os.write(fd, view) :]


def main(settings: str) -> None:
  """Serve checks from stdin until it closes. `settings` is JSON, see grader.py."""
  cfg = json.loads(settings)
  limits.set_undumpable()
  home, keep = -1, []
  if cfg['isolated']:
    home = os.pidfd_open(os.getpid())
  else:
    limits.set_subreaper()
    keep = _reach_library()
  cfg['keep'] = keep
  for name in _CODECS:
    codecs.lookup(name)
  inbox = bytearray(cfg['output_bytes'])
  while (request := _read_frame(0)) is not None:
    name, count = json.loads(request)
    try:
      module = importlib.import_module(name)
    except ImportError as error:
      _reply({'error': f'cannot import {name}: {error}'}, memoryview(b''))
      sys.exit(1)
    gc.freeze()  # the collector of a child leaves these pages shared
    _check(module, count, cfg, home, inbox)


def _reach_library() -> list[int]:
  """Let nobody import from a Python that lies below a directory of root's.

  Inside namespaces the way there is made passable. Without, the way goes through an
  open descriptor, which is returned: it takes no permission of the directories above.
  """
  prefix = sys.base_prefix
  above = [prefix[:i] or '/' for i, letter in enumerate(prefix) if letter == '/']
  if os.getuid() != 0 or all(os.stat(path).st_mode & 0o001 for path in above):
    return []
  fd = os.open(prefix, os.O_PATH)
  way = f'/proc/self/fd/{fd}'

  def moved(path: str) -> str:
    return way + path[len(prefix) :] if path.startswith(prefix + '/') else path

  sys.path[:] = [moved(path) for path in sys.path]
  sys.path_importer_cache.clear()
  for module in list(sys.modules.values()):
    if isinstance(paths := getattr(module, '__path__', None), list):
      paths[:] = [moved(path) for path in paths]
  return [fd]


def _reply(meta: Mapping[str, str], results: memoryview) -> None:
  first = frame(json.dumps(meta).encode())
  _write_all(1, struct.pack('>I', len(first) + len(results)) + first)
  _write_all(1, results)


def _check(
  module: ModuleType,
  count: int,
  cfg: Mapping[str, Any],
  home: int,
  inbox: bytearray,
) -> None:
  """Run one check in a child and reply."""
  case_r, case_w = os.pipe()
  result_r, result_w = os.pipe()
  if cfg['isolated']:
    limits.unshare(limits.NEWPID)
  pid = os.fork()
  if pid == 0:
    _child(module, count, cfg, case_r, result_w)
  if cfg['isolated']:
    limits.enter_pid_namespace(home)  # for the next child's, made from here again
  os.close(case_r)
  os.close(result_w)
  body = _read_frame(0) or bytearray()
  greeting = _read_frame(result_r)  # sent before any code under test runs
  if greeting == b'ready':
    os.set_blocking(case_w, False)
    whole, filled, end = _converse(
      pid, count, memoryview(body), inbox, case_w, result_r, cfg
    )
  else:
    whole, filled, end = 0, 0, 'failed'
  os.close(case_w)
  os.close(result_r)
  end = _bury(pid, end, cfg)
  if end == 'failed':
    text = bytes(greeting or b'the check did not start').decode()
    _reply({'error': text}, memoryview(b''))
  elif end == 'killed':
    text = 'the check was killed from outside the sandbox (out of memory?)'
    _reply({'error': text}, memoryview(b''))
  else:
    _reply({'end': end}, memoryview(inbox)[:whole])
  inbox[:filled] = bytes(filled)
  body[:] = bytes(len(body))


def _bury(pid: int, end: str, cfg: Mapping[str, Any]) -> str:
  """Kill and reap a check's processes; return what it died of, if `end` is 'died'."""
  gone = None
  if end == 'died':
    # Let it finish dying by itself, so that the status says of what.
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    deadline = time.monotonic() + 0.2
    while not (gone := os.waitid(os.P_PID, pid, options)):
      if time.monotonic() > deadline:
        break
      time.sleep(0.002)
  os.kill(pid, signal.SIGKILL)
  _, status, usage = os.wait4(pid, 0)  # returns when its pid namespace is empty
  if not cfg['isolated']:
    limits.kill_children()
  if end == 'died' and usage.ru_utime + usage.ru_stime >= cfg['cpu_seconds']:
    return 'timeout'
  killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
  if gone and killed and cfg['isolated']:
    return 'killed'  # which none in a pid namespace can do to its first process
  return end


def _converse(
  pid: int,
  count: int,
  body: memoryview,
  inbox: bytearray,
  case_w: int,
  result_r: int,
  cfg: Mapping[str, Any],
) -> tuple[int, int, str]:
  """Hand cases over one by one, gather the results in `inbox`.

  Returns the bytes of whole results, all bytes received, and what ended it: '' (all
  answered), 'timeout' (CPU time), 'wall' (wall time) or 'died'.
  """
  sent, allowed = 0, _end_of_frame(body, _end_of_frame(body, 0))  # head, first case
  filled = whole = answered = 0
  deadline = time.monotonic() + cfg['wall_seconds']
  while answered < count:
    wall_left = deadline - time.monotonic()
    cpu_left = cfg['cpu_seconds'] - _cpu_seconds(pid)
    if cpu_left <= 0 or wall_left <= 0:
      return whole, filled, 'timeout' if cpu_left <= 0 else 'wall'
    wait = min(wall_left, max(cpu_left, 0.01))
    writers = [case_w] if sent < allowed else []
    readers, writers, _ = select.select([result_r], writers, [], wait)
    if writers:
      try:
        sent += os.write(case_w, body[sent:allowed])
      except BrokenPipeError:
        sent = allowed  # it is gone; the read below says so
    if not readers:
      continue
    got = os.readv(result_r, [memoryview(inbox)[filled:]])
    if not got:  # it ended, or the inbox is full
      return whole, filled, 'died'
    filled += got
    while answered < count and (end := _end_of_frame(inbox, whole)) <= filled:
      if filled < whole + 4:
        break
      whole = end
      answered += 1
      if answered < count:
        allowed = _end_of_frame(body, allowed)
  return whole, filled, ''


def _cpu_seconds(pid: int) -> float:
  """CPU time of all threads of a process; its descendants have limits of their own."""
  if sys.platform != 'linux':
    return 0.0  # RLIMIT_CPU is left
  return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)


def _child(
  module: ModuleType,
  count: int,
  cfg: Mapping[str, Any],
  case_r: int,
  result_w: int,
) -> NoReturn:
  """Give up everything, then run the code under test. Never returns."""
  os.setsid()
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  last = 2
  for fd in sorted((case_r, result_w, *cfg['keep'])):
    os.closerange(last + 1, fd)
    last = fd
  os.closerange(last + 1, os.sysconf('SC_OPEN_MAX'))
  try:
    limits.confine(
      cpu_seconds=cfg['cpu_seconds'] + 1,  # the zygote watches, this only backs it up
      memory_bytes=cfg['memory_bytes'],
      processes=cfg['processes'],
      files=cfg['files'],
      file_bytes=0,
      isolated=cfg['isolated'],
    )
    limits.set_undumpable()
  except OSError as error:
    _write_all(result_w, frame(f'cannot confine the check: {error}'.encode()))
    os._exit(1)
  if not cfg['files']:
    sys.meta_path.clear()  # what cannot be opened is missing, and says so
  _write_all(result_w, frame(b'ready'))
  _run_cases(module, cfg['output_bytes'] // count - 16, case_r, result_w)
  os._exit(0)


def _run_cases(module: ModuleType, limit: int, case_r: int, result_w: int) -> None:
  name, source = json.loads(_read_frame(case_r) or b'')
  failure = ''
  function: Any = None
  try:
    try:
      code = compile(source, '<check>', 'exec', dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
      failure = 'raise SyntaxError'
    else:
      removed = originals.remove(module, name)  # it must not stand in for the version
      scope = dict(vars(module))
      exec(code, scope)
      function = scope.get(name)
      if name in scope:
        originals.install(module, name, removed, function)
      failure = '' if name in scope else 'raise NameError'
  except BaseException as error:
    # Whatever the code under test raises is its answer to every case.
    failure = f'raise {canonical.name_of(error)}'
  while (case := _read_frame(case_r)) is not None:
    text = failure or _run_case(function, case.decode(), limit)
    _write_all(result_w, frame(text.encode('ascii', 'replace')))


def _run_case(function: Any, case: str, limit: int) -> str:
  try:
    arguments = ast.literal_eval(case)
    if 'random' in sys.modules:
      sys.modules['random'].seed(0)  # the same draws for every version of a function
    result = function(*arguments)
    return 'ok ' + canonical.encode((result, arguments), limit)
  except canonical.Unserialisable:
    return 'unserialisable'
  except BaseException as error:
    # SystemExit and the like are answers too.
    return f'raise {canonical.name_of(error)}'
