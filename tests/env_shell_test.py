"""A shell over a folder that is a value, and repair tasks in it."""

import asyncio
import functools
import hashlib
import json
import pathlib
import tempfile

import pytest

from swe17 import config, types
from swe17.env import sandbox, shell
from swe17.env.repair import functions, grader, repair, repair_shell

CFG = config.Sandbox(workers=1)
GOLD = 'def half(x):\n    return x // 2'


@pytest.fixture(scope='module')
def backend() -> str:
  return sandbox.choose_backend(CFG)


def run(backend: str, *commands: str, folder: bytes = b'', seconds: float = 20.0):
  """Answers of commands in one folder, one after another."""

  async def all_of_them() -> list[shell.Answer]:
    now = folder or shell.pack({'a.txt': 'hello\n'})
    answers = []
    for command in commands:
      answers.append(await sh.run(now, command))
      now = answers[-1].folder
    return answers

  sh = shell.Shell(CFG, backend, seconds)
  return asyncio.run(all_of_them())


def test_what_a_command_changes_is_there_for_the_next(backend):
  first, second = run(
    backend,
    'mkdir -p d/e && mv a.txt d/e/ && ln -s d/e link && chmod 700 d/e/a.txt && exit 3',
    'cat link/a.txt; stat -c %a d/e/a.txt; echo err >&2',
  )
  assert (first.code, first.output) == (3, '')
  assert (second.code, second.output) == (0, 'hello\n700\nerr\n')


def test_a_command_that_takes_too_long_ends_and_its_work_stays(backend):
  slow, after = run(
    backend, 'echo x > made; (sleep 60 &) ; sleep 60', 'cat made', seconds=1.5
  )
  assert slow.timed_out
  assert after.output == 'x\n'


def test_a_folder_that_grows_too_large_stays_as_it_was(backend):
  big, after = run(backend, 'head -c 40000000 /dev/zero > big; rm a.txt', 'ls')
  assert big.code != 0 and 'is lost' in big.output
  assert after.output == 'a.txt\n'


def test_no_process_and_no_network_is_left_to_a_later_command(backend):
  if backend != 'bubblewrap':
    pytest.skip('a plain process is not isolated')
  _, after = run(
    backend,
    '(setsid sleep 100 &) ; echo on',
    'ls -d /proc/[0-9]* | wc -l; grep -c : /proc/net/dev; '
    'cat /proc/[0-9]*/comm | grep -c sleep; id -u',
  )
  processes, devices, sleeping, uid, _ = after.output.split('\n')
  assert int(processes) < 8 and devices in ('0', '1')  # at most a loopback
  assert sleeping == '0' and uid != '0'


def test_a_link_is_not_followed_when_a_folder_is_read(backend):
  (answer,) = run(backend, 'ln -s /etc/hostname secret; mkdir solution.py')
  assert shell.read(answer.folder, 'secret', 1000) is None
  assert shell.read(answer.folder, 'solution.py', 1000) is None
  assert shell.read(answer.folder, 'none', 1000) is None
  assert shell.read(answer.folder, 'a.txt', 1000) == b'hello\n'
  assert shell.read(answer.folder, 'a.txt', 3) is None


@pytest.mark.parametrize(
  'source,found',
  [
    ('def f(x):\n  import bisect\n  return bisect.f(x)', 'import'),
    ('def f(x):\n  return __import__("bisect").f(x)', '__import__'),
    ('def f(x):\n  return os.sys.modules["bisect"].f(x)', 'modules'),
    ('def f(x):\n  return g.__globals__["f"](x)', '__globals__'),
  ],
)
def test_a_solution_that_looks_the_original_up_is_told(source, found):
  assert found in repair_shell.reaches(source)
  assert not repair_shell.reaches(GOLD)


@functools.cache
def gold_and_task() -> tuple[str, types.Task]:
  """The original and the task of three rows of the table that a shell may have."""
  wanted = ('heapq._siftup/0', 'posixpath.split/0')
  lines = [
    line
    for line in repair.TABLE.read_text('utf-8').splitlines()
    if json.loads(line)['id'] in wanted
    or (
      json.loads(line)['id'].startswith('colorsys.')
      and json.loads(line)['split'] == 'heldout'
    )
  ]
  with tempfile.TemporaryDirectory() as scratch:
    table = pathlib.Path(scratch, 'table.jsonl')
    table.write_text('\n'.join(lines[:4]), 'utf-8')
    tasks, _ = repair.read(config.Tasks(table=str(table)))
  usable, aside = repair_shell.usable(tasks)
  assert set(aside) == {'posixpath.split/0'}  # which Python itself runs on
  task = next(task for task in usable if task.id == 'heapq._siftup/0')
  return task.payload['original'], task


async def _episode(backend: str, commands):
  """(answers, outcome) of commands given to one task's shell."""
  gold, task = gold_and_task()
  graders = grader.Graders(CFG)
  await graders.start()
  try:
    (sound,), _ = await repair.verify([task], graders)
    env = repair_shell.RepairShell(sound, repair.Verifier(graders), CFG, backend, 20.0)
    try:
      answers = [await env.run(c) for c in commands(gold, sound)]
      return answers, await env.verify(), env, sound
    finally:
      env.close()
  finally:
    await graders.close()


def test_tools_in_the_shell_answer_as_those_of_the_loop(backend):
  """The same edits, once as calls of repair.RepairEnv, once as commands."""

  async def both():
    def commands(gold, task):
      return ['view', "edit «1»' >= ' && run_tests", 'undo', 'undo', "edit «99» ' < '"]

    answers, outcome, env, task = await _episode(backend, commands)
    graders = grader.Graders(CFG)
    await graders.start()
    loop = repair.RepairEnv(task, repair.Verifier(graders))
    said = [await loop.step('view', {})]
    edited = await loop.step('edit', {'at': '«1»', 'new': ' >= '})
    said.append(f'{edited}\n{await loop.step("test", {})}')
    said += [await loop.step('undo', {}), await loop.step('undo', {})]
    said.append(await loop.step('edit', {'at': '«99»', 'new': ' < '}))
    await graders.close()
    return answers, said, outcome, env

  answers, said, outcome, env = asyncio.run(both())
  assert [answer.output.rstrip('\n') for answer in answers] == said
  assert [answer.code for answer in answers][2:] == [0, 1, 1]
  assert outcome.value == 0.0  # the fault is still in it
  assert (env.calls, env.tests) == (5, 1)


def test_the_gold_solves_and_is_nowhere_in_the_sandbox(backend):
  if backend != 'bubblewrap':
    pytest.skip('a plain process is not isolated')

  def commands(gold, task):
    name = task.payload['module'].rsplit('.', 1)[-1]
    look = (
      'import hashlib, os\n'
      f'names = ({name!r} + ".", "test_" + {name!r})\n'
      'for folder, _, files in os.walk("/"):\n'
      '  for file in files:\n'
      '    if file.startswith(names) and not folder.startswith("/proc"):\n'
      '      data = open(os.path.join(folder, file), "rb").read()\n'
      '      print(os.path.join(folder, file), hashlib.sha256(data).hexdigest())\n'
    )
    heredoc = f"cat > look.py <<'EOF'\n{look}EOF\npython look.py"
    fix = f"cat > solution.py <<'EOF'\n{gold}\nEOF\nrun_tests"
    return [heredoc, fix]

  (looked, fixed), outcome, _, task = asyncio.run(_episode(backend, commands))
  payload = task.payload
  file, text = functions.with_source(
    payload['module'], payload['function'], payload['source']
  )
  digest = hashlib.sha256(text.encode()).hexdigest()
  assert looked.output == f'{file} {digest}\n'  # the one with the fault, no other
  assert fixed.output.startswith('passed') and fixed.code == 0
  assert outcome.value == 1.0
  cases = json.loads(
    shell.read(repair_shell.folder(task), 'tests.json', 1 << 20) or b''
  )
  shown = [case for case, _ in cases['cases']]
  assert not set(shown) & set(task.payload['hidden'])


def test_a_faulty_module_parses_and_keeps_its_other_functions():
  _, task = gold_and_task()
  payload = task.payload
  file, text = functions.with_source(
    payload['module'], payload['function'], payload['source']
  )
  scope: dict = {'__name__': payload['module']}
  exec(compile(text, str(file), 'exec'), scope)
  assert callable(scope[payload['function']]) and 'heappush' in scope


def test_what_an_import_runs_is_told_from_what_it_only_defines():
  assert '_siftup' not in functions.run_at_import('heapq')
  assert '_count_to_size' not in functions.run_at_import('bisect')
  # Called by methods of a class that the module makes an instance of.
  assert '_div_nearest' in functions.run_at_import('_pydecimal')
