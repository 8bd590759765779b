"""`repair_functions` for agents that have a shell: the same tasks as a small folder.

  solution.py   the function with its fault
  tests.json    the visible cases and what the original gives on them

Commands on the path (shell_tools.py): view, edit, undo, run_tests, python. An episode
is graded by what solution.py holds at its end: read from the folder out here, run by
the graders on the hidden cases. Nothing hidden, nor the gold, is within the shell's
reach: in its library the module itself has the fault, and no other copy is there.

The grader has no original to be asked for either (originals.py). That a solution
imports, or looks code up by name, where the task's own source does not, is a sign of
cheating all the same, and scores 0.
"""

import ast
import asyncio
from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

from swe17 import config, types
from swe17.env import copies, sandbox, shell
from swe17.env.audit import cheating
from swe17.env.repair import functions, grader, repair, shell_tools

PROMPT = (
  '{task} It is in solution.py. Commands: view, edit PLACE"TEXT", undo, run_tests.'
)
_PROCESSES = 32  # of one command
_REACHES = 'reaches for '
# Names that reach beyond what a module's own code can see.
_REACHING = frozenset(
  ('__import__', 'importlib', 'import_module', 'eval', 'exec', 'compile', 'open')
  + ('globals', 'vars', 'sys', 'modules', 'builtins', '__builtins__', '__globals__')
  + ('__subclasses__', '__loader__', '__spec__', '__code__', 'inspect', 'gc', 'ctypes')
  + ('getattr', '__getattribute__', '__dict__', '__class__', 'breakpoint')
)


def prompt(task: types.Task) -> str:
  """What an agent with a shell is asked."""
  return PROMPT.format(task=task.prompt)


def folder(task: types.Task) -> bytes:
  """The folder that an episode begins with. The task must be a verified one."""
  payload = task.payload
  cases = list(zip(payload['visible'], payload['expected_visible'], strict=True))
  tests = {
    'module': payload['module'],
    'function': payload['function'],
    'cases': cases,
  }
  return shell.pack(
    {
      shell_tools.SOLUTION: payload['source'] + '\n',
      shell_tools.TESTS: json.dumps(tests, indent=1) + '\n',
    }
  )


def usable(tasks: Sequence[types.Task]) -> tuple[list[types.Task], dict[str, str]]:
  """(tasks that a shell can be given, set-aside id -> reason).

  Set aside are those in a module that the sandbox's own Python programs import: with a
  fault in it they would not run, without it they would show the original. And those
  whose module calls the function when it is imported.
  """
  covered()  # looked for now, since it takes seconds, not in an episode
  taken, aside = _imported(), {}
  for task in tasks:
    module, function = task.payload['module'], task.payload['function']
    if module in taken:
      aside[task.id] = 'the programs of the sandbox import the module'
    elif function in functions.run_at_import(module):
      aside[task.id] = 'the module runs the function when it is imported'
  return [task for task in tasks if task.id not in aside], aside


@functools.cache
def _imported() -> frozenset[str]:
  """Modules that a bare interpreter has loaded once it runs our programs."""
  code = (
    'import sys; sys.path.insert(0, sys.argv[1]); '
    'from swe17.env import canonical, shell_keeper; '
    'from swe17.env.repair import anchors, shell_tools; print(*sys.modules)'
  )
  root = str(pathlib.Path(__file__).resolve().parents[3])
  done = subprocess.run(
    [os.path.realpath(sys.executable), '-S', '-B', '-P', '-c', code, root],
    check=True,
    capture_output=True,
    text=True,
  )
  return frozenset(done.stdout.split())


class RepairShell:
  """One episode on one task that `repair.verify` found sound. Close it."""

  def __init__(
    self,
    task: types.Task,
    verifier: repair.Verifier,
    cfg: config.Sandbox,
    backend: str,
    seconds: float,
  ):
    self._task, self._verifier = task, verifier
    self._folder = folder(task)
    self._masks = tempfile.TemporaryDirectory(prefix='faulty-')
    options = mask(task, self._masks.name) if backend == 'bubblewrap' else []
    cfg = dataclasses.replace(cfg, processes=max(cfg.processes, _PROCESSES))
    self._shell = shell.Shell(cfg, backend, seconds, _tools(backend), options)
    self._turn = asyncio.Lock()  # commands of one episode, one after another
    self._commands: list[str] = []
    self.calls = self.tests = 0

  async def run(self, command: str) -> shell.Answer:
    """Runs one bash command. OSError where the sandbox failed."""
    async with self._turn:
      self._commands.append(command)
      answer = await self._shell.run(self._folder, command)
      self._folder = answer.folder
      self.calls += 1
      self.tests += 'run_tests' in command
      return answer

  @property
  def flags(self) -> tuple[str, ...]:
    """Signs of cheating in the commands and in what the folder has become."""
    payload = self._task.payload
    before = shell.texts(folder(self._task), repair.MAX_CHARACTERS)
    after = shell.texts(self._folder, repair.MAX_CHARACTERS)
    changes = [
      cheating.Change(path, before.get(path), text)
      for path, text in after.items()
      if text != before.get(path) and path != shell_tools.STATE
    ]
    calls = [('bash', {'command': command}) for command in self._commands]
    given = f'{payload["original"]}\n{payload["source"]}'
    signs = cheating.found(calls, changes, given=given)
    reason = _solution(self._folder, payload['source'])[1]
    return (*signs, reason) if reason.startswith(_REACHES) else signs

  @property
  def source(self) -> str:
    """What solution.py holds; '' if it is no text that parses."""
    return _solution(self._folder, self._task.payload['source'])[0]

  async def verify(self) -> types.Outcome:
    """1.0 if all hidden cases give what the original gives, else 0.0."""
    payload = self._task.payload
    source, reason = _solution(self._folder, payload['source'])
    if reason:
      return types.Outcome(0.0, reason)
    check = grader.Check(
      payload['module'], payload['function'], source, tuple(payload['hidden'])
    )
    try:
      got = await self._verifier.run(check)
    except grader.GraderError as e:
      return types.Outcome(None, f'the verifier failed: {e}')
    same = list(got) == list(payload['expected_hidden'])
    return types.Outcome(1.0 if same else 0.0)

  def close(self) -> None:
    self._masks.cleanup()


def _solution(folder: bytes, given: str) -> tuple[str, str]:
  """(source, '') of what is to be graded, or ('', why it scores 0)."""
  data = shell.read(folder, shell_tools.SOLUTION, repair.MAX_CHARACTERS)
  if data is None:
    return '', f'no {shell_tools.SOLUTION}, or it is too long'
  try:
    source = data.decode().rstrip('\n')
    found = reaches(source) - reaches(given)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
    return '', f'{shell_tools.SOLUTION} does not parse: {type(e).__name__}'
  return source, f'{_REACHES}{min(found)}' if found else ''


def reaches(source: str) -> frozenset[str]:
  """What a source uses to get at code that is not in it. SyntaxError, ValueError."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import | ast.ImportFrom):
      found.add('import')
    elif isinstance(node, ast.Name) and node.id in _REACHING:
      found.add(node.id)
    elif isinstance(node, ast.Attribute) and node.attr in _REACHING:
      found.add(node.attr)
  return frozenset(found)


def _tools(backend: str) -> dict[str, list[str]]:
  python = os.path.realpath(sys.executable)
  tools = {
    name: sandbox.inside(backend, 'repair.shell_tools', 'main', name)
    for name in shell_tools.NAMES
  }
  return {**tools, 'python': [python, '-B'], 'python3': [python, '-B']}


def mask(task: types.Task, scratch: str) -> list[str]:
  """bwrap options that leave no copy of the original in the sandbox.

  The library's module gets a text with the fault in it (made in `scratch`); compiled
  modules beside it, other Pythons, installed packages and the library's own tests are
  covered.
  """
  payload = task.payload
  file, text = functions.with_source(
    payload['module'], payload['function'], payload['source']
  )
  made = pathlib.Path(scratch, file.name)
  made.write_text(text, encoding='utf-8')
  os.chmod(scratch, 0o755)
  hidden = copies.covering([file.parent / '__pycache__', *covered()])
  return [*hidden, '--ro-bind', str(made), str(file)]


def covered() -> list[pathlib.Path]:
  """Folders with copies of the library, or of some of it, whatever the task: packages
  and programs of the system bring functions of it along."""
  return list(dict.fromkeys([*copies.installed(), *_other_libraries()]))


@functools.cache
def _other_libraries() -> tuple[pathlib.Path, ...]:
  """Folders that hold the library of a Python which is not ours."""
  own = sysconfig.get_path('stdlib')
  found: list[pathlib.Path] = []
  for place in dict.fromkeys(('/usr', sys.base_prefix)):
    for at, folders, files in os.walk(place):
      if at == own:
        folders.clear()
      elif 'heapq.py' in files:  # which any such library has
        found.append(pathlib.Path(at))
        folders.clear()
  return tuple(found)
