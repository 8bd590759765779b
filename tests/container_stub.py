"""A container engine for tests: it keeps no container, but runs what it is told to.

  container_stub.py STATE run|exec|rm ...

STATE/calls.jsonl gets every command line, STATE/mode says how to misbehave:

  down      no daemon answers        no_image  the image is not there
  hang      nothing ever starts      warn      says something before it starts
  stubborn  removes nothing

A "container" is a folder, with a copy of STATE/images/IMAGE if there is one: what it
runs then has that for its root, by the bubblewrap that STATE/bwrap names. It is also
every process that has its name in the environment: those outlive the client, as they do
with a real engine, until `rm` or the sweep kills them.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import IO

NAME = 'CONTAINER_STUB_NAME'
VALUES = ('--name', '--label', '--pull', '--network', '--cap-drop', '--security-opt')
VALUES += ('--user', '--pids-limit', '--memory', '--memory-swap', '--cpus', '--ulimit')
VALUES += ('--hostname', '--log-driver', '--ipc', '--tmpfs', '--env', '--workdir')
VALUES += ('--entrypoint',)
SWITCHES = ('--rm', '--interactive', '--detach', '--read-only', '--force')


def split(words: list[str]) -> tuple[dict[str, str], list[str]]:
  """Options, and the rest; an option that no engine has ends the program."""
  found, at = {}, 0
  while at < len(words) and words[at].startswith('-'):
    word = words[at]
    if word in SWITCHES:
      found[word] = ''
    elif word in VALUES:
      at += 1
      found[word] = words[at]
    else:
      sys.exit(f'unknown flag: {word}')
    at += 1
  return found, words[at:]


def kill_all(folder: pathlib.Path) -> None:
  for place in pathlib.Path('/proc').glob('[0-9]*/environ'):
    with contextlib.suppress(OSError):
      if f'{NAME}={folder}\0'.encode() in place.read_bytes():
        os.kill(int(place.parent.name), signal.SIGKILL)


def start(folder: pathlib.Path, words: list[str]) -> int:
  folder.mkdir(parents=True, exist_ok=True)
  child = subprocess.Popen(
    words,
    cwd=folder,
    env={**os.environ, NAME: str(folder)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,  # the engine's process, not the client's
  )
  # What it says goes through the client, whose end closes the pipes.
  pipes = [
    threading.Thread(target=forward, args=(pipe, fd), daemon=True)
    for pipe, fd in ((child.stdout, 1), (child.stderr, 2))
  ]
  for pipe in pipes:
    pipe.start()
  code = child.wait()
  for pipe in pipes:
    pipe.join(1)  # who is left in the background may hold it open
  return code if code >= 0 else 128 - code


def rooted(state: pathlib.Path, folder: pathlib.Path, at: str) -> list[str]:
  """Words before a command whose root is the folder."""
  words = [(state / 'bwrap').read_text(), '--bind', str(folder), '/']
  words += ['--ro-bind', '/usr', '/usr', '--dev', '/dev', '--proc', '/proc']
  for name in ('/bin', '/sbin', '/lib', '/lib64'):
    if os.path.islink(name):
      words += ['--symlink', os.readlink(name), name]
    elif os.path.isdir(name):
      words += ['--ro-bind', name, name]
  for name in (state / 'python').read_text().split('\n'):
    words += ['--ro-bind', name, name]
  return [*words, '--chdir', at]


def forward(pipe: IO[bytes] | None, fd: int) -> None:
  assert pipe is not None
  while data := os.read(pipe.fileno(), 1 << 16):
    os.write(fd, data)


def main(state: pathlib.Path, verb: str, *rest: str) -> int:
  with open(state / 'calls.jsonl', 'a', encoding='utf-8') as file:
    file.write(json.dumps([verb, *rest]) + '\n')
  mode = (state / 'mode').read_text() if (state / 'mode').exists() else ''
  if mode == 'down':
    sys.exit('Cannot connect to the daemon. Is it running?')
  given, words = split(list(rest))
  if mode == 'warn':
    print('WARNING: no swap limit support', file=sys.stderr)
  if verb == 'rm':
    if mode == 'stubborn':
      sys.exit('Error: device or resource busy')
    kill_all(state / words[0])
    if not (state / words[0]).exists():
      sys.exit(f'Error: No such container: {words[0]}')
    shutil.rmtree(state / words[0])
    return 0
  if mode == 'hang':
    time.sleep(60)
  if verb == 'run':
    image, *words = words
    if mode == 'no_image':
      print(f'Unable to find image {image!r} locally', file=sys.stderr)
      return 125
    folder = state / given['--name']
    if '--detach' in given:
      if (state / 'images' / image).exists():
        shutil.copytree(state / 'images' / image, folder, symlinks=True)
      else:
        folder.mkdir()
      return 0
    code = start(folder, [given['--entrypoint'], *words])
    shutil.rmtree(folder, ignore_errors=True)  # --rm
    return code
  name, *words = words
  if not (state / name).exists():
    sys.exit(f'Error: No such container: {name}')
  if any('kill -9' in word for word in words):  # of this machine it would be too much
    kill_all(state / name)
    return 0
  if (state / 'bwrap').exists():
    words = rooted(state, state / name, given['--workdir']) + words
  return start(state / name, words)


if __name__ == '__main__':
  sys.exit(main(pathlib.Path(sys.argv[1]), *sys.argv[2:]))
