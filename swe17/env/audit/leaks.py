"""The leak scan: what an agent could find in the image of a task, really looked for.

An image is what a process of the agent's sees: the sandbox of a shell, of a suite, of a
grader. No history, no compiled copy, no installed copy of what is under repair, no file
with the gold in it may be there. look.py does the looking, inside.
"""

import ast
import asyncio
from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import pathlib
import sys
import textwrap

from swe17 import config, types
from swe17.env import copies, sandbox, shell
from swe17.env.audit import look
from swe17.env.repair import grader, repair, repair_shell

_LOOK = pathlib.Path(look.__file__)
_WALK_SECONDS = 120.0  # of a look through a whole file system
_SECONDS = 20.0
_AT_ONCE = 2
_LONG = 160  # characters
_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# A function that tells what it can reach from inside the grader. Nothing must work. A C
# original is one of the module's own kind, `_heapq` for heapq: others may well have a
# function of that name.
_PROBE = """
def {function}(*a, **k):
  import os, sys
  found = []
  def tries(what, go):
    try: found.append(what + ': ' + repr(go())[:60])
    except BaseException: return
  tries('a folder', lambda: os.listdir('/'))
  tries('a file', lambda: os.open('/', 0))
  tries('the module file', lambda: open(sys.modules['{module}'].__file__).read(9))
  new = [n for n in ('zipapp', 'tabnanny', 'this') if n not in sys.modules][0]
  tries('another module', lambda: __import__(new))
  tries('the original', lambda: sys.modules['{module}'].{function}
    if sys.modules['{module}'].{function}.__code__.co_filename != '<check>' else 1 / 0)
  tries('a C original', lambda: [m for m in sys.modules.values()
    if type(vars(m).get('{function}')).__name__ == 'builtin_function_or_method'
    and m.__name__.strip('_') in '{module}'.split('.')][0])
  return found
"""


def needles(
  golds: Sequence[str], distributions: Sequence[str] = (), below: Sequence[str] = ()
) -> dict:
  """What look.py is told: functions of the golds' texts, names of distributions.

  Not `__init__` and its like: every file has some, which may well be alike.
  """
  found: dict[str, dict[str, list[str]]] = {'defs': {}, 'codes': {}}
  for gold in golds:
    for kind, tell in (('defs', look.shapes), ('codes', look.codes)):
      for name, its in tell(gold):
        if name.startswith('__') and name.endswith('__'):
          continue
        mine = found[kind].setdefault(name, [])
        mine += [its] if its not in mine else []
  return {**found, 'distributions': list(distributions), 'below': list(below)}


def telling(text: str) -> bool:
  """Whether a function is long enough that no other is like it by chance; what it says
  of itself in a docstring does not count."""
  try:
    (node,) = ast.parse(textwrap.dedent(text)).body
  except (SyntaxError, ValueError):
    return len(text) >= _LONG
  documented = isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None
  if documented and len(node.body) > 1:
    node.body = node.body[1:]
  return len(ast.unparse(node)) >= _LONG


async def in_shell(
  sh: shell.Shell, wanted: Mapping[str, object], files: Mapping[str, str] | None = None
) -> list[str]:
  """Looks through what a shell's command sees. OSError if the look itself failed."""
  carried = {'look.py': _LOOK.read_text('utf-8'), 'needles.json': json.dumps(wanted)}
  folder = shell.pack({**carried, **(files or {})})
  answer = await sh.run(folder, 'python look.py needles.json')
  return parsed(answer.output, answer.code)


async def in_sandbox(
  cfg: config.Sandbox,
  backend: str,
  wanted: Mapping[str, object],
  options: Sequence[str] = (),
) -> list[str]:
  """Looks through what any command in a sandbox sees, and what `options` of bwrap show
  beside it. OSError if the look failed."""
  cfg = dataclasses.replace(
    cfg, wall_seconds=2 * _WALK_SECONDS, cpu_seconds=_WALK_SECONDS, output_kib=4096
  )
  files = {'look.py': _LOOK.read_bytes(), 'needles.json': json.dumps(wanted).encode()}
  python = os.path.realpath(sys.executable)
  words = [python, '-S', '-B', 'look.py', 'needles.json']
  done = await sandbox.run(cfg, backend, words, files=files, options=options)
  return parsed(done.stdout.decode(errors='replace'), done.returncode)


def parsed(output: str, code: int | None) -> list[str]:
  """The findings that look.py printed. OSError if it did not come to its end."""
  last = (output.strip().splitlines() or [''])[-1]
  try:
    found = json.loads(last)
  except json.JSONDecodeError as e:
    raise OSError(f'the leak scan ended with {code}: {output[-200:]!r}') from e
  own = tuple(f'{sandbox.WORK}/{name}' for name in ('look.py', 'needles.json'))
  return [each for each in found if not each.split(' ')[1].startswith(own)]


async def of_repair(
  cfg: config.Sandbox,
  backend: str,
  host: repair.Host,
  images: Mapping[str, Sequence[types.Task]],
) -> dict[str, list[str]]:
  """Findings by image, of graders and of shells.

  Once, all of a shell's file system is looked through for every gold; in each task's
  own shell, which has its own masks, the places where its gold was found.
  """
  found: dict[str, list[str]] = {}
  shells = {name: some[0] for name, some in images.items() if name.startswith('shell/')}
  where = await _everywhere(cfg, backend, list(shells.values())) if shells else {}
  gate = asyncio.Semaphore(_AT_ONCE)

  async def one(name: str, tasks: Sequence[types.Task]) -> None:
    async with gate:
      if name in shells:
        found[name] = await _of_shell(cfg, backend, tasks[0], where)
      else:
        found[name] = await _of_grader(host, tasks[0])

  await asyncio.gather(*(one(name, tasks) for name, tasks in images.items()))
  return found


async def _everywhere(
  cfg: config.Sandbox, backend: str, tasks: Sequence[types.Task]
) -> dict[str, set[str]]:
  """Function -> files that hold its gold or its bytecode, where no task masks any."""
  options = copies.covering(await asyncio.to_thread(repair_shell.covered))
  tools = {'python': [os.path.realpath(sys.executable), '-B']}
  sh = shell.Shell(cfg, backend, _WALK_SECONDS, tools, options)
  wanted = needles([task.payload['original'] for task in tasks])
  places: dict[str, set[str]] = {}
  for finding in await in_shell(sh, wanted):
    kind, path, *name = finding.split(' ')
    if name:
      places.setdefault(name[0].strip('()'), set()).add(path)
    else:
      places.setdefault('', set()).add(f'{kind} {path}')
  return places


async def _of_shell(
  cfg: config.Sandbox,
  backend: str,
  task: types.Task,
  where: Mapping[str, set[str]],
) -> list[str]:
  payload = task.payload
  verifier = repair.Verifier(grader.Graders(cfg))  # not started: nothing is graded here
  env = repair_shell.RepairShell(task, verifier, cfg, backend, _SECONDS)
  wanted = needles([payload['original']], below=['/work'])
  wanted['files'] = sorted(where.get(payload['function'], ()))
  carry = {'look.py': _LOOK.read_text('utf-8'), 'needles.json': json.dumps(wanted)}
  writes = [f"cat > {name} <<'EOF-L'\n{text}\nEOF-L\n" for name, text in carry.items()]
  try:
    answer = await env.run(f'{"".join(writes)}python look.py needles.json')
  finally:
    env.close()
  return [*parsed(answer.output, answer.code), *sorted(where.get('', ()))]


async def _of_grader(host: repair.Host, task: types.Task) -> list[str]:
  payload = task.payload
  names = {'module': payload['module'], 'function': payload['function']}
  source = _PROBE.format(**names)
  check = grader.Check(payload['module'], payload['function'], source, ('()',))
  (said,) = await host.graders.run(check)
  if said == 'ok ([], (,),)':
    return []
  return [f'the grader: {said[:300]}']
