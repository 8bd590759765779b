"""Runs one shell command in a sandbox and hands back the folder as it left it.

Called by `shell.run` as the sandbox's first program, with the numbers of two file
descriptors: one holds a spec (JSON, a line) and a tar file, the folder before; the
other takes the folder after, as a tar file.

    keeper        holds the clock, kills what the command leaves running
      | fork
    command       limits, no privileges; unpacks the folder, becomes bash
      | then, when nothing of that is left
    packer        the same limits; packs the folder

What a command sees persists as bytes, not as a mount: nothing of the machine's file
system is written, and every command starts in a sandbox of its own.

This file imports the standard library only.
"""

from collections.abc import Callable, Mapping
import io
import json
import os
import signal
import sys
import tarfile
import time
from typing import Any, NoReturn

from swe17.env import limits

TIMED_OUT = 124  # exit code, that of timeout(1)
UNPACKED = 'the folder could not be packed: what the command changed is lost'
_POLL = 0.005  # seconds


def main(spec_fd: str, out_fd: str) -> None:
  """Runs the command of the spec; exits as it does, `TIMED_OUT` at its time limit."""
  given, out = int(spec_fd), int(out_fd)
  with open(given, 'rb') as file:
    file.seek(0)
    spec = json.loads(file.readline())
    folder = file.read()
  if not spec['isolated']:
    limits.set_subreaper()
  _write_tools(spec)
  code = _attend(_fork(_command, spec, folder, out), spec['seconds'])
  _kill_others(spec)
  if _attend(_fork(_pack, spec, out), spec['seconds']) != 0:
    sys.stderr.write(f'{UNPACKED}\n')
    code = code or 1
  _kill_others(spec)
  sys.exit(code)


def _write_tools(spec: Mapping[str, Any]) -> None:
  """Programs beside the system's, before anything that could change them runs."""
  for name, text in spec['tools'].items():
    path = os.path.join(spec['bin'], name)
    with open(path, 'w', encoding='utf-8') as file:
      file.write(text)
    os.chmod(path, 0o755)


def _fork(run: Callable[..., None], *arguments: Any) -> int:
  pid = os.fork()
  if pid == 0:
    try:
      run(*arguments)
    except (OSError, ValueError, tarfile.TarError, MemoryError) as error:
      os.write(2, f'sandbox: {error}\n'.encode())
    os._exit(127)
  return pid


def _command(spec: Mapping[str, Any], folder: bytes, out: int) -> NoReturn:
  os.close(out)
  os.dup2(1, 2)  # one stream, as a terminal shows it
  os.setsid()
  limits.confine(**spec['limits'], isolated=spec['isolated'], map_ids=True)
  with tarfile.open(fileobj=io.BytesIO(folder)) as tar:
    tar.extractall('.', filter='tar')
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps
  os.execvpe('bash', ['bash', '-c', spec['command']], {**os.environ, **spec['env']})


def _pack(spec: Mapping[str, Any], out: int) -> None:
  """Tars the folder. The limit on the size of a file is one on the whole of it."""
  own = {**spec['limits'], 'file_bytes': spec['folder_bytes']}
  limits.confine(**own, isolated=spec['isolated'], map_ids=True)
  with open(out, 'wb') as file, tarfile.open(fileobj=file, mode='w') as tar:
    for name in sorted(os.listdir('.')):
      tar.add(name, filter=_plain)
  os._exit(0)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
  """Files, folders and links as they are; no devices, pipes or owners."""
  if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
    return None
  if not member.issym() and not os.access(member.name, os.R_OK):
    os.chmod(member.name, 0o700 if member.isdir() else 0o600)
  member.uid = member.gid = 0
  member.uname = member.gname = ''
  return member


def _attend(pid: int, seconds: float) -> int:
  """Waits for a child: its exit code, as a shell tells it."""
  deadline = time.monotonic() + seconds
  while True:
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
      code = os.waitstatus_to_exitcode(status)
      return code if code >= 0 else 128 - code
    if time.monotonic() > deadline:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      return TIMED_OUT
    time.sleep(_POLL)


def _kill_others(spec: Mapping[str, Any]) -> None:
  """Kills all that is left. In a pid namespace of our own that is everybody else."""
  if not spec['isolated']:
    limits.kill_children()
    return
  try:
    while True:  # the kernel's list: who forks meanwhile does not escape it
      os.kill(-1, signal.SIGKILL)
      time.sleep(_POLL)
  except ProcessLookupError:
    return  # nobody is left
