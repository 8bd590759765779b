"""Commands that an agent's shell finds on its path, for tasks that repair a function.

  view             the code in solution.py, every place that can be edited behind «..»
  edit «2»' < '    writes a text in such a place; the text may be a word of its own
  undo             takes back the last edit
  run_tests        runs the visible cases of tests.json on solution.py

An agent may as well use cat, sed or Python: these only make edits short enough for a
small model. They answer in the words of the tools in repair.py. `edit` and `undo`
remember in .edits.json which place has which name, as long as nobody else changes the
file. A place and its text stand together, since what follows a name in the view is what
follows it here: that is how a small model finds out what to write.

This file runs inside the sandbox and imports the standard library only.
"""

import ast
from collections.abc import Callable, Sequence
import importlib
import json
import os
import signal
import sys

from swe17.env import canonical
from swe17.env.repair import anchors

SOLUTION, TESTS, STATE = 'solution.py', 'tests.json', '.edits.json'
NAMES = ('view', 'edit', 'undo', 'run_tests')
CPU_SECONDS = 0.5  # of one run of the tests
_BYTES = 1 << 20  # of one result


def main(name: str, *arguments: str) -> None:
  """Runs a command and exits as it should: 0 done, 1 not done, 2 misused."""
  commands: dict[str, Callable[..., tuple[str, int]]] = {
    'view': _view,
    'edit': _edit,
    'undo': _undo,
    'run_tests': _run_tests,
  }
  run = commands[name]
  if name == 'edit':
    arguments = place_and_text(arguments)
  if len(arguments) != 2 * (name == 'edit'):
    print(f'{name}: want {"PLACE TEXT" if name == "edit" else "no argument"}')
    sys.exit(2)
  try:
    text, code = run(*arguments)
  except (OSError, ValueError, SyntaxError) as error:
    text, code = f'{name}: {type(error).__name__}: {error}', 1
  print(text)
  sys.exit(code)


def place_and_text(words: Sequence[str]) -> tuple[str, ...]:
  """The arguments of `edit`, where place and text are one word or two."""
  if len(words) == 1 and '»' in words[0]:
    place, mark, text = words[0].partition('»')
    return place + mark, text
  return tuple(words)


def _read(name: str) -> str:
  with open(name, encoding='utf-8') as file:
    return file.read()


def _load() -> tuple[list[str], list[list]]:
  """Pieces of the code as anchors.py cuts it, and what `undo` puts back."""
  source = _read(SOLUTION).rstrip('\n')
  if os.path.exists(STATE):
    state = json.loads(_read(STATE))
    if ''.join(state['pieces']) == source:
      return state['pieces'], state['undo']
  return anchors.split(source), []


def _save(pieces: Sequence[str], undo: Sequence[Sequence]) -> None:
  state = {'pieces': pieces, 'undo': undo}
  for name, text in ((SOLUTION, ''.join(pieces) + '\n'), (STATE, json.dumps(state))):
    with open(name, 'w', encoding='utf-8') as file:
      file.write(text)


def _names(pieces: Sequence[str], undo: Sequence[Sequence]) -> dict[str, int]:
  """Anchor -> index, named by the code before the edits: a name keeps its place."""
  first = list(pieces)
  for index, text in reversed(undo):
    first[index] = text
  return anchors.names(first)


def _view() -> tuple[str, int]:
  pieces, undo = _load()
  return anchors.view(pieces, _names(pieces, undo)), 0


def _edit(at: str, new: str) -> tuple[str, int]:
  pieces, undo = _load()
  index = _names(pieces, undo).get(at.strip('«»'))
  if index is None:
    return f'no anchor {at[:8]}', 1
  old, new = pieces[index], new.strip(' ')
  if new == old:
    return 'nothing changed', 1
  if '\n' in new or '\r' in new:
    return 'new must be one line', 1
  pieces[index] = new
  _save(pieces, [*undo, [index, old]])
  return 'edited', 0


def _undo() -> tuple[str, int]:
  pieces, undo = _load()
  if not undo:
    return 'nothing to undo', 1
  index, old = undo.pop()
  pieces[index] = old
  _save(pieces, undo)
  return 'undone', 0


def _run_tests() -> tuple[str, int]:
  """Every case in one child, which a loop without end cannot outlive."""
  tests = json.loads(_read(TESTS))
  importlib.import_module(tests['module'])  # now: only the cases are timed
  read, write = os.pipe()
  pid = os.fork()
  if pid == 0:
    os.close(read)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)  # its signal kills
    _child(tests, write)
  os.close(write)
  with open(read, encoding='ascii', errors='replace') as file:
    got = file.read().splitlines()
  os.waitpid(pid, 0)
  cases = tests['cases']
  good = sum(g == e for g, (_, e) in zip(got, cases, strict=False))
  if good == len(cases):
    return f'passed {good} of {good}', 0
  return f'failed {len(cases) - good} of {len(cases)}', 1


def _child(tests: dict, write: int) -> None:
  """Writes what each case gives, a line each; never returns."""
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 1)
  os.dup2(null, 2)
  function, failure = _function(tests)
  for arguments, _ in tests['cases']:
    verdict = failure or _verdict(function, arguments)
    os.write(write, verdict.encode('ascii', 'replace').replace(b'\n', b' ') + b'\n')
  os._exit(0)


def _function(tests: dict) -> tuple[Callable | None, str]:
  """The function of solution.py among its module's names, or what went wrong."""
  name = tests['function']
  try:
    code = compile(_read(SOLUTION), SOLUTION, 'exec')
    scope = dict(vars(sys.modules[tests['module']]))
    scope.pop(name, None)
    exec(code, scope)
  except BaseException as error:
    return None, f'raise {canonical.name_of(error)}'  # the answer to every case
  return scope.get(name), '' if name in scope else 'raise NameError'


def _verdict(function: Callable | None, arguments: str) -> str:
  assert function is not None
  try:
    given = ast.literal_eval(arguments)
    if 'random' in sys.modules:
      sys.modules['random'].seed(0)
    return 'ok ' + canonical.encode((function(*given), given), _BYTES)
  except canonical.Unserialisable:
    return 'unserialisable'
  except BaseException as error:
    # SystemExit and the like are answers too.
    return f'raise {canonical.name_of(error)}'
