"""Where a Harbor task runs: its folder on this machine's programs, or its image.

  /app or whatever is the work directory   what the agent works on
  /tests, /solution, /logs/verifier        put there for grading, emptied before

Source: harbor 0.26.0, harbor/verifier/verifier.py and models/trial/paths.py.
"""

import asyncio
from collections.abc import Mapping
import dataclasses
import io
import json
import math
import posixpath
import shlex
import tarfile
from typing import Any, Protocol

from swe17 import config
from swe17.env import container, sandbox
from swe17.env.formats import dockerfiles, harbor_tasks, repositories, workspace

SOLUTION_SECONDS = 600.0
REWARDS = ('logs/verifier/reward.json', 'logs/verifier/reward.txt')
_REWARD_KIB = 1 << 8
_PLACES = ('tests', 'solution', 'logs/verifier', 'logs/artifacts', 'logs/agent', 'tmp')
# Places at the top that a sandbox has already, or that are ours.
_TAKEN = frozenset(
  ('usr', 'bin', 'sbin', 'lib', 'lib32', 'lib64', 'etc', 'dev', 'proc', 'sys', 'run')
  + ('boot', 'work', 'code', 'parts', 'tools')
)
# Modules and settings that a Python, or pytest, takes up without being asked.
_SHADOWS = frozenset(
  ('sitecustomize.py', 'usercustomize.py', 'conftest.py', 'pytest.py', 'pytest.ini')
)


@dataclasses.dataclass(frozen=True)
class Grade:
  """What the tests of a task gave."""

  reward: float | str  # or why there is none
  signs: tuple[str, ...] = ()  # of cheating


class Place(Protocol):
  """A task that can be begun and graded. Both may raise OSError: infrastructure."""

  async def open(self) -> workspace.Workspace: ...

  async def grade(self, work: Any) -> Grade:
    """Grades what is in a workspace that `open` gave; it is not to be used after."""
    ...

  def gold(self) -> list[list[Any]]:
    """Calls of an agent that knows the solution."""
    ...


def start(folder: harbor_tasks.Folder) -> dockerfiles.Plain:
  """What a local task begins with. NotPlain if it needs an image."""
  if not folder.dockerfile:
    raise dockerfiles.NotPlain(f'environment.docker_image: it needs {folder.image}')
  plain = dockerfiles.read(folder.dockerfile, folder.context)
  workdir = folder.workdir or plain.workdir
  env = {**plain.env, **folder.env}
  folders = (*plain.folders, workdir)
  for place in (*plain.files, *folders):
    if place.strip('/').partition('/')[0] in _TAKEN or not place.strip('/'):
      raise dockerfiles.NotPlain(f'Dockerfile: {place} is a place of the system')
  return dataclasses.replace(plain, workdir=workdir, env=env, folders=folders)


def reward(files: Mapping[str, bytes]) -> float | str:
  """The number that a verifier wrote, or what is wrong with it.

  As in Harbor the JSON file comes first where both are there.
  """
  found = next((name for name in REWARDS if name in files), None)
  if found is None:
    return 'the verifier wrote no reward'
  text = files[found].decode('utf-8', 'replace').strip()
  try:
    value = json.loads(text) if found.endswith('.json') else float(text)
  except ValueError:
    return f'{posixpath.basename(found)} holds {text[:40]!r}'
  if isinstance(value, Mapping):
    if 'reward' not in value and len(value) != 1:
      return f'rewards {sorted(value)[:4]}, none of them named reward'
    value = value['reward'] if 'reward' in value else next(iter(value.values()))
  if isinstance(value, bool) or not isinstance(value, int | float):
    return f'a reward that is no number: {value!r:.40}'
  return float(value) if math.isfinite(value) else f'a reward of {value}'


class Local:
  """A task folder on this machine's own programs, under bubblewrap."""

  def __init__(self, cfg: config.Sandbox, folder: harbor_tasks.Folder):
    memory = max(cfg.memory_mib, folder.memory_mib)
    self._cfg = dataclasses.replace(cfg, memory_mib=memory)
    self._folder, self._plain = folder, start(folder)
    self._own = {name.strip('/'): data for name, data in self._plain.files.items()}
    places = [*_PLACES, *(name.strip('/') for name in self._plain.folders)]
    self._first = repositories.pack(self._own, folders=places)
    tops = dict.fromkeys(name.partition('/')[0] for name in (*places, *self._own))
    self._options = [
      w for top in tops for w in ('--symlink', f'{sandbox.WORK}/{top}', f'/{top}')
    ]
    self._before = f'cd {shlex.quote(self._plain.workdir)} || exit 1\n'
    self._before += _exports(self._plain.env)

  def _at(self, folder: bytes) -> workspace.Local:
    return workspace.Local(self._cfg, 'bubblewrap', folder, self._before, self._options)

  async def open(self) -> workspace.Local:
    return self._at(self._first)

  async def grade(self, work: workspace.Local) -> Grade:
    folder, signs = await asyncio.to_thread(self._with_tests, work.folder)
    tests = self._at(folder)
    await tests.run(_test_command(self._folder), self._folder.verifier_seconds)
    return Grade(reward(await tests.files()), signs)

  def gold(self) -> list[list[Any]]:
    return _gold(self._folder)

  def _with_tests(self, folder: bytes) -> tuple[bytes, tuple[str, ...]]:
    """The agent's folder without what it has no business with, and with the tests."""
    signs: set[str] = set()
    made = io.BytesIO()
    tests = {f'tests/{name}': data for name, data in self._folder.tests.items()}
    added = repositories.pack(tests, executable=tests, folders=_PLACES)
    with tarfile.open(fileobj=made, mode='w') as new:
      with tarfile.open(fileobj=io.BytesIO(folder)) as old:
        for member in old:
          name = posixpath.normpath(member.name)
          shadows = posixpath.basename(name) in _SHADOWS and name not in self._own
          if shadows and posixpath.basename(name) not in self._folder.instruction:
            signs.add('shadowing_module')
          elif name in REWARDS:
            signs.add('reward_file')
          elif name.partition('/')[0] not in ('tests', 'solution', 'logs'):
            new.addfile(member, old.extractfile(member) if member.isreg() else None)
      with tarfile.open(fileobj=io.BytesIO(added)) as old:
        for member in old:
          new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return made.getvalue(), tuple(sorted(signs))


class Boxed:
  """A task folder in the image that it names."""

  def __init__(self, cfg: config.Sandbox, folder: harbor_tasks.Folder):
    memory = max(cfg.memory_mib, folder.memory_mib)
    self._cfg = workspace.roomy(dataclasses.replace(cfg, memory_mib=memory))
    self._folder = folder

  async def open(self) -> workspace.Boxed:
    box = await container.open_container(
      self._cfg, self._folder.image, work=self._folder.workdir, writable=True
    )
    try:
      await _must(box, ['mkdir', '-p', *(f'/{place}' for place in _PLACES)])
    except BaseException:
      await box.close()
      raise
    return workspace.Boxed(box, _exports(self._folder.env))

  async def grade(self, work: workspace.Boxed) -> Grade:
    names = ' '.join(posixpath.basename(name) for name in REWARDS)
    script = f'cd /logs/verifier && ls {names} 2>/dev/null; '
    script += 'cd / && rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier'
    tests = repositories.pack(self._folder.tests, executable=self._folder.tests)
    words = ['sh', '-c', f'{script} && tar -xf - -C /tests']
    was = (await _must(work.box, words, tests)).stdout.strip()
    await work.run(_test_command(self._folder), self._folder.verifier_seconds)
    # Missing ones are left out, and links are no plain files.
    script = f'cd /logs/verifier && tar -cf - $(ls {names} 2>/dev/null)'
    done = await work.box.run(['sh', '-c', script], output_kib=_REWARD_KIB, sweep=False)
    found: dict[str, bytes] = {}
    if done.returncode == 0 and not done.truncated:
      logs = repositories.files_of(done.stdout)
      found = {f'logs/verifier/{name}': data for name, data in logs.items()}
    signs = ('reward_file',) if was else ()
    return Grade(reward(found), signs)

  def gold(self) -> list[list[Any]]:
    return _gold(self._folder)


async def _must(
  box: container.Container, argv: list[str], stdin: bytes = b''
) -> sandbox.Completed:
  seconds = workspace.COMMAND_SECONDS
  done = await box.run(argv, stdin=stdin, seconds=seconds, sweep=False)
  if done.returncode != 0:
    lines = done.stderr.decode('utf-8', 'replace').strip().splitlines()
    why = (lines or ['without a word'])[-1]
    raise OSError(f'{box.name}: {argv[0]}: {why} (done as sandbox.user)')
  return done


def _exports(env: Mapping[str, str]) -> str:
  return ''.join(f'export {name}={shlex.quote(text)}\n' for name, text in env.items())


def _test_command(folder: harbor_tasks.Folder) -> str:
  log = '/logs/verifier/test-stdout.txt'
  return f'{_exports(folder.verifier_env)}bash /tests/test.sh > {log} 2>&1'


def _gold(folder: harbor_tasks.Folder) -> list[list[Any]]:
  files = {f'/solution/{name}': data for name, data in folder.solution.items()}
  *written, submit = workspace.writing(files)
  command = f'{_exports(folder.solution_env)}bash /solution/solve.sh'
  return [*written, ['bash', {'command': command}], submit]
