"""Tasks of SWE-bench tables in their own images: /testbed of a container.

  a fresh container            its /testbed, without .git: what the base is
  an episode's container       the agent's commands; its files are read at the end
  another fresh container      the graded tree is written there, its tests are run

Results come by records of boxed_plugin.py, under a word that the agent's files have
never seen, with a test among them that must fail: if it does not, the report is forged.
That program shares its process with the code under test. So it is weaker than the
keeper of packages/inside.py, which needs a Python as new as ours in the image.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import secrets
import shlex
import time

from swe17 import config, types
from swe17.env import container, sandbox
from swe17.env.formats import repositories, swe_trees, workspace
from swe17.env.packages import sources, suite

WORK = '/testbed'
_PLUGIN = pathlib.Path(__file__).with_name('boxed_plugin.py')
# Images of SWE-bench have the packages of a task in this environment of conda.
_CONDA = '/opt/miniconda3/bin/activate'
_ACTIVATE = f'[ ! -f {_CONDA} ] || . {_CONDA} testbed'
_OUTPUT_KIB = 16 << 10


async def open_workspace(cfg: config.Sandbox, task: types.Task) -> workspace.Boxed:
  """A container of the task's image, its history removed. OSError of the engine."""
  image = task.payload['image']
  box = await container.open_container(
    workspace.roomy(cfg), image, work=WORK, writable=True
  )
  try:
    seconds = workspace.COMMAND_SECONDS
    done = await box.run(['rm', '-rf', '.git'], seconds=seconds, sweep=False)
    if done.returncode != 0:
      raise OSError(f'{image}: its history could not be removed')
  except BaseException:
    await box.close()
    raise
  return workspace.Boxed(box, _ACTIVATE)


async def problem(cfg: config.Sandbox, task: types.Task) -> swe_trees.Problem:
  """The task on its image's files. ValueError of patches, OSError of the engine."""
  work = await open_workspace(cfg, task)
  try:
    files = await work.files()
  finally:
    await work.close()
  return swe_trees.problem(task, repositories.Snapshot(files, {}, frozenset()))


async def report(
  cfg: config.Sandbox,
  task: types.Task,
  was: Mapping[str, bytes],
  tree: sources.Tree,
  tests: Sequence[str],
  seconds: float,
) -> suite.Report:
  """Runs tests of a tree in a fresh container, where `was` stands so far.

  SuiteError where the engine failed or the program in the image did not begin.
  """
  start = time.monotonic()
  canary = f'test_{secrets.token_hex(6)}.py'
  files = {name: data for name, data in tree.files.items() if was.get(name) != data}
  files[canary] = b'def test_one():\n  assert [1] == [2]\n'
  gone = ' '.join(shlex.quote(name) for name in was if name not in tree.files)
  token = secrets.token_hex(16)
  given = json.dumps({'token': token, 'tests': [*tests, f'{canary}::test_one']})
  words = ['bash', '-c', f'rm -f -- {gone}; {_ACTIVATE}; exec python -c "$0"']
  try:
    work = await open_workspace(cfg, task)
    try:
      done = await work.box.run(
        [*words, _PLUGIN.read_text(encoding='utf-8')],
        files=files,
        stdin=given.encode(),
        seconds=seconds,
        output_kib=_OUTPUT_KIB,
        sweep=False,  # nothing comes after it
      )
    finally:
      await work.close()
  except OSError as e:
    raise suite.SuiteError(f'{task.id}: {e}') from e
  return read(done, token, f'{canary}::test_one', time.monotonic() - start)


def read(
  done: sandbox.Completed, token: str, canary: str, seconds: float
) -> suite.Report:
  """The report of what the program in the image wrote. SuiteError if it never began."""
  lines = done.stdout.decode('utf-8', 'replace').split('\n')
  told = [line[len(token) :] for line in lines if line.startswith(f'{token} ')]
  if not told:
    lines = done.stderr.decode('utf-8', 'replace').strip().splitlines()
    raise suite.SuiteError(f'pytest did not begin: {(lines or ["without a word"])[-1]}')
  results: dict[str, str] = {}
  over = False
  for number, line in enumerate(told):
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      record = {}
    if over or record.get('number') != number:
      return suite.Report({}, seconds, False, 'other records', 'records do not follow')
    if 'test' in record:
      results[record['test']] = record['outcome']
    over = record.get('over', False)
  seen = results.pop(canary, 'absent')
  forged = f'a test that must fail is {seen}' if over and seen != 'failed' else ''
  late = 'it took too long' if done.timed_out else 'pytest ended early'
  reason = forged or ('' if over else late)
  return suite.Report(results, seconds, not reason, reason, forged)
