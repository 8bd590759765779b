"""Starts one command inside a sandbox: writes its files, takes the limits, executes.

Called by `sandbox.run` as the sandbox's first program, with the number of a file
descriptor that holds a marshalled dict {argv, files (bytes), limits, isolated}. The
working directory is already the private one.

This file imports the standard library only, and little of it: its imports are a third
of a sandbox's start. So no json, which brings re, and no typing.
"""

import marshal
import os
import signal
import sys

from swe17.env import limits


def main(fd: str) -> None:
  """Run the command that the descriptor tells of; exit as it does."""
  with open(int(fd), 'rb') as file:
    file.seek(0)
    spec = marshal.load(file)  # our own, of the same interpreter
  if spec['isolated']:
    _execute(spec)
  sys.exit(_attend(spec))


def _attend(spec: dict) -> int:
  """Run the command as a child and kill all it leaves behind, at its end or SIGTERM."""
  limits.set_subreaper()
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
  pid = os.fork()
  if pid == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _execute(spec)
  try:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if status >= 0 else 128 - status
  finally:
    limits.kill_children()


def _execute(spec: dict) -> None:
  """Become the command; does not return."""
  try:
    os.setsid()  # what it sends to its process group does not reach its keeper
    limits.confine(**spec['limits'], isolated=spec['isolated'], map_ids=True)
    for name, data in spec['files'].items():
      os.makedirs(os.path.dirname(name) or '.', exist_ok=True)
      with open(name, 'wb') as file:
        file.write(data)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec keeps
    os.execvp(spec['argv'][0], spec['argv'])
  except OSError as error:
    os.write(2, f'cannot start {spec["argv"][0]}: {error}\n'.encode())
    os._exit(127)
