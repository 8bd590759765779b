"""A container engine as a sandbox: docker, podman, or what reads the same command line.

  one command    run --rm --interactive IMAGE /bin/sh -c ...   then rm --force
  an episode     run --detach, exec for every command, rm --force

Each container has no network, no capabilities, no way to new privileges, an ordinary
user, bounds on processes, memory and CPU, a work directory in memory and, unless its
image's own files are what is worked on, a read-only file system. Images are never
pulled. A container is removed at every end of whoever made it; one that outlived its
maker ends by itself, for its first process counts the seconds.

An engine's failure and a command's look alike in an exit code. So what runs inside says
a random word before the command starts: without it nothing ran, which is an OSError.

Sources: docker-run(1), podman-run(1).
"""

import asyncio
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import io
import math
import pathlib
import secrets
import subprocess
import tarfile
import weakref

from swe17 import config
from swe17.env import sandbox

WORK = '/work'
_ENGINE_SECONDS = 60.0  # for the engine itself to answer
_END_SECONDS = 15.0  # for a killed client to be gone
_FILES = 256  # open files of one process
# Says the word $1, unpacks the first $2 bytes of its input, becomes the rest.
_START = (
  'printf %s "$1" >&2; '
  'if [ "$2" -gt 0 ]; then head -c "$2" | tar -xf - || exit 126; fi; '
  'shift 2; exec "$@"'
)
# The first process of a container that is kept: nobody inside can kill it.
_WAIT = 'i=0; while [ "$i" -lt "$1" ]; do sleep 1; i=$((i + 1)); done'
# Kills all but the first process; refuses to, where the first process is another one.
_SWEEP = (
  'case "$(tr "\\0" " " </proc/1/cmdline)" in *"$1"*) kill -9 -1;; *) exit 3;; esac'
)


def options(
  cfg: config.Sandbox,
  name: str,
  *,
  writable: bool = False,
  work: str = WORK,
  cpu_seconds: float = 0.0,
) -> list[str]:
  """Return the options of `run` that bound and isolate a container.

  `writable` leaves the image's own files writable, for images that hold the work at
  `work`; '' is the place that the image names.
  `cpu_seconds` bounds each process, rounded up; 0: they share `cfg.cpus` only.
  """
  memory = f'{cfg.memory_mib}m'
  found = ['--name', name, '--label', 'swe17', '--pull', 'never', '--network', 'none']
  found += ['--cap-drop', 'ALL', '--security-opt', 'no-new-privileges']
  found += ['--user', cfg.user, '--pids-limit', str(cfg.processes + 2)]  # sh, sleep
  found += ['--memory', memory, '--memory-swap', memory, '--cpus', f'{cfg.cpus:g}']
  found += ['--ulimit', f'nofile={_FILES}', '--ulimit', 'core=0']
  found += ['--ulimit', f'fsize={cfg.memory_mib << 20}']
  found += ['--hostname', 'sandbox', '--log-driver', 'none', '--ipc', 'private']
  if cpu_seconds:
    found += ['--ulimit', f'cpu={math.ceil(cpu_seconds)}']
  if not writable:
    found += ['--read-only', '--tmpfs', _memory('/tmp', cfg.memory_mib)]
  if work == WORK:
    found += ['--tmpfs', _memory(WORK, cfg.memory_mib)]
    found += ['--env', f'HOME={WORK}', '--env', f'TMPDIR={WORK}']
  if work:
    found += ['--workdir', work]
  return [*found, '--entrypoint', '/bin/sh']


def _memory(path: str, mib: int) -> str:
  return f'{path}:rw,exec,nosuid,nodev,size={mib}m,mode=1777'


def pack(files: Mapping[str, bytes]) -> bytes:
  """Return a tar file of `files`, by relative path; b'' for none.

  ValueError on a path that would leave the directory.
  """
  if not files:
    return b''
  made = io.BytesIO()
  with tarfile.open(fileobj=made, mode='w') as tar:
    for name, data in files.items():
      path = pathlib.PurePosixPath(name)
      if path.is_absolute() or '..' in path.parts or not path.parts:
        raise ValueError(f'files: got {name!r}, want relative paths without ..')
      member = tarfile.TarInfo(name)
      member.size, member.mode = len(data), 0o644
      tar.addfile(member, io.BytesIO(data))
  return made.getvalue()


def why_not(cfg: config.Sandbox, image: str = '') -> str:
  """Start a container of `image` (else `sandbox.image`): what went wrong, or ''.

  Blocks for as long as the engine takes.
  """
  if not (image := image or cfg.image):
    return 'no image is named: set sandbox.image'
  name = _name()
  try:
    done = subprocess.run(
      [cfg.engine, 'run', '--rm', *options(cfg, name), image, '-c', 'exit 0'],
      check=False,
      capture_output=True,
      timeout=_ENGINE_SECONDS,
      stdin=subprocess.DEVNULL,
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    return str(error)
  finally:
    _discard(cfg.engine, name)
  return '' if done.returncode == 0 else _last(done.stderr, done.returncode)


def _name() -> str:
  return f'swe17-{secrets.token_hex(8)}'


def _last(stderr: bytes, code: int | None) -> str:
  lines = [line.strip() for line in stderr.decode(errors='replace').splitlines()]
  # docker ends with advice to read its manual.
  lines = [line for line in lines if line and not line.startswith(('Run ', 'See '))]
  return lines[-1] if lines else f'exit code {code}, without a word'


def _discard(engine: str, name: str) -> None:
  """Remove a container without waiting: also of what is no longer awaited."""
  with contextlib.suppress(OSError):  # no engine, no container
    subprocess.Popen(
      [engine, 'rm', '--force', name],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      start_new_session=True,
    )


async def run(
  cfg: config.Sandbox,
  argv: Sequence[str],
  *,
  files: Mapping[str, bytes] | None = None,
  stdin: bytes = b'',
) -> sandbox.Completed:
  """Run a command of `sandbox.image` in a container of its own, as `sandbox.run` does.

  Raises OSError where the engine failed, TimeoutError where it did not answer.
  """
  name = _name()
  bounds = options(cfg, name, cpu_seconds=cfg.cpu_seconds)
  command = [cfg.engine, 'run', '--rm', '--interactive', *bounds, cfg.image]
  try:
    return await _start(cfg, command, argv, pack(files or {}), stdin)
  finally:
    await asyncio.shield(_remove(cfg.engine, name))


async def _start(
  cfg: config.Sandbox,
  command: Sequence[str],
  argv: Sequence[str],
  packed: bytes,
  stdin: bytes,
) -> sandbox.Completed:
  """Run `command`, whose last words are to be those of a shell, and read its answer."""
  word = secrets.token_hex(8)
  process = await asyncio.create_subprocess_exec(
    *command,
    *('-c', _START, 'sh', word, str(len(packed)), *argv),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,
  )
  # A killed client whose pipes somebody else holds open would be waited for for ever.
  async with asyncio.timeout(cfg.wall_seconds + _END_SECONDS):
    done = await sandbox.attend(process, 'container', packed + stdin, cfg)
  before, found, after = done.stderr.partition(word.encode())
  if not found:
    if done.timed_out:
      raise TimeoutError(f'container engine: no start within {cfg.wall_seconds:g} s')
    raise OSError(f'container engine: {_last(before, done.returncode)}')
  return dataclasses.replace(done, stderr=after)


async def _engine(*words: str) -> tuple[int | None, bytes, bytes]:
  """Call the engine: exit code, output, errors. TimeoutError if it does not answer."""
  process = await asyncio.create_subprocess_exec(
    *words,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,
  )
  try:
    async with asyncio.timeout(_ENGINE_SECONDS):
      out, err = await process.communicate()
  finally:
    if process.returncode is None:
      sandbox.kill(process)
      await process.wait()
  return process.returncode, out, err


async def _remove(engine: str, name: str) -> None:
  """Remove a container, killing what runs in it; one that is gone is no error."""
  code, _, err = await _engine(engine, 'rm', '--force', name)
  if code != 0 and b'no such container' not in err.lower():
    raise OSError(f'container engine: {name} was not removed: {_last(err, code)}')


class Container:
  """A container that is kept for several commands. Close it.

  Whatever a command leaves running is killed when it ends; files stay.
  """

  def __init__(self, cfg: config.Sandbox, name: str, work: str):
    self._cfg, self.name, self._work = cfg, name, work
    # Who forgets to close it still does not leave it running.
    self._finalizer = weakref.finalize(self, _discard, cfg.engine, name)

  async def run(
    self,
    argv: Sequence[str],
    *,
    files: Mapping[str, bytes] | None = None,
    stdin: bytes = b'',
    seconds: float = 0.0,
    output_kib: int = 0,
    sweep: bool = True,
  ) -> sandbox.Completed:
    """Run a command, having written `files` below the work directory.

    `seconds` and `output_kib` replace the settings' bounds where they are not 0.
    Without `sweep` what it leaves running stays: for programs that leave nothing.
    Raises OSError where the engine failed; the container is then not to be used again.
    """
    cfg = dataclasses.replace(
      self._cfg,
      wall_seconds=seconds or self._cfg.wall_seconds,
      output_kib=output_kib or self._cfg.output_kib,
    )
    at = ['--workdir', self._work] if self._work else []
    command = [cfg.engine, 'exec', '--interactive', *at, self.name, '/bin/sh']
    done = await _start(cfg, command, argv, pack(files or {}), stdin)
    if sweep or done.timed_out:
      await self._sweep()
    return done

  async def _sweep(self) -> None:
    words = ['exec', self.name, '/bin/sh', '-c', _SWEEP, 'sh', self.name]
    code, _, err = await _engine(self._cfg.engine, *words)
    if code != 0:
      raise OSError(f'container engine: {self.name}: {_last(err, code)}')

  async def close(self) -> None:
    """Remove the container and all that runs in it."""
    if self._finalizer.detach():
      await asyncio.shield(_remove(self._cfg.engine, self.name))


async def open_container(
  cfg: config.Sandbox, image: str, *, work: str = WORK, writable: bool = False
) -> Container:
  """Start a container of `image` that waits for commands in directory `work`.

  Raises OSError where the engine does not start it.
  """
  made = Container(cfg, _name(), work)
  words = ['run', '--detach', '--rm']
  words += options(cfg, made.name, writable=writable, work=work)
  wait = ['-c', _WAIT, made.name, f'{cfg.life_seconds:.0f}']
  try:
    code, _, err = await _engine(cfg.engine, *words, image, *wait)
    if code != 0:
      raise OSError(f'container engine: {_last(err, code)}')
  except BaseException:
    await made.close()
    raise
  return made
