"""Tasks in images: SWE-bench's and Harbor's, on a stub engine that has real files."""

import json
import os
import pathlib
import shutil
import sys

import pytest

from swe17 import config, types
from swe17.env import sandbox
from swe17.env.formats import harbor, swe_bench, swe_boxed
from swe17.env.packages import suite
from tests import container_stub, env_formats_harbor_test, swe_fixture

PYTHON = f'#!/bin/sh\nexec {sys.executable} -B "$@"\n'


class Engine:
  """The stub, with images."""

  def __init__(self, folder: pathlib.Path):
    self.state = folder / 'state'
    (self.state / 'images').mkdir(parents=True)
    (self.state / 'bwrap').write_text(sandbox._bwrap())
    places = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    places = {place for place in places if not place.startswith('/usr')}
    (self.state / 'python').write_text('\n'.join(sorted(places)))
    engine = folder / 'engine'
    stub = pathlib.Path(container_stub.__file__)
    engine.write_text(
      f'#!/bin/sh\nexec {sys.executable} -S -E {stub} {self.state} "$@"\n'
    )
    engine.chmod(0o755)
    self.cfg = config.Sandbox(
      backend='container', engine=str(engine), workers=1, wall_seconds=60.0
    )

  def image(self, name: str) -> pathlib.Path:
    """A new image: an empty root, with a Python that has pytest."""
    root = self.state / 'images' / name
    for place in ('tmp', 'opt/miniconda3/bin'):
      (root / place).mkdir(parents=True)
    (root / 'opt/miniconda3/bin/python').write_text(PYTHON)
    (root / 'opt/miniconda3/bin/python').chmod(0o755)
    (root / 'opt/miniconda3/bin/activate').write_text(
      '[ "$1" = testbed ] && export PATH=/opt/miniconda3/bin:$PATH PYTHONPATH=src '
      'PYTEST_DISABLE_PLUGIN_AUTOLOAD=1\n'
    )
    return root

  def left(self) -> list[str]:
    return [path.name for path in self.state.glob('swe17-*')]


@pytest.fixture(scope='module')
def engine(tmp_path_factory) -> Engine:
  reason = sandbox._why_not_bubblewrap()
  if reason:
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')
  return Engine(tmp_path_factory.mktemp('boxed'))


@pytest.fixture(scope='module')
def task(engine, tmp_path_factory) -> types.Task:
  root = tmp_path_factory.mktemp('rows')
  commit = swe_fixture.repository(root / 'clone')
  swe_fixture.git(root / 'clone', 'reset', '-q', '--hard', commit)
  shutil.copytree(root / 'clone', engine.image('numbers:1') / 'testbed', symlinks=True)
  row = swe_fixture.row(commit, root / 'scratch', image='numbers:1')
  (root / 'rows.jsonl').write_text(json.dumps(row))
  cfg = config.Tasks(family=swe_bench.FAMILY, table=str(root / 'rows.jsonl'))
  (task,), aside = swe_bench.read(cfg)
  assert not aside
  return task


async def played(host, task: types.Task, *commands: str):
  env = host.env(task)
  await env.reset()
  said = [await env.step('bash', {'command': command}) for command in commands]
  await env.step('submit', {})
  return await env.verify(), env, said


async def test_a_row_in_its_image_is_graded_on_a_clean_copy(engine, task):
  host = await swe_bench.open_host(engine.cfg)
  (sound,), aside = await host.verify([task])
  assert not aside and not engine.left()
  fix = f"sed -i '5s/low/high/' {swe_fixture.FILE}"
  weak = f'printf "def test_high(): pass" > {swe_fixture.TEST}'
  got, env, said = await played(host, sound, 'git log; ls -A', weak, fix)
  assert got.value == 1.0 and env.figures['files_changed'] == 2
  assert await env.verify() == got and not engine.left()  # given back, still graded
  assert 'not a git repository' in said[0] and '\n.git\n' not in said[0]
  hook = 'printf "import os; os._exit(0)" > conftest.py'
  bend = 'import _pytest.python as p; p.Function.runtest = lambda self: None'
  bend = f'echo "{bend}" >> {swe_fixture.FILE}'
  got, env, _ = await played(host, sound, weak, hook, bend)
  assert got.value == 0.0 and env.flags == (
    'reaches for the test framework (_pytest)',
    'forged_report',
  )
  assert 'a test that must fail is passed' in got.reason
  await host.close()
  assert not engine.left()


async def test_an_engine_that_fails_is_no_outcome(engine, task):
  host = await swe_bench.open_host(engine.cfg)
  env = host.env(task)
  await env.reset()
  (engine.state / 'mode').write_text('down')
  try:
    got = await env.verify()
    assert got.value is None and 'Cannot connect' in got.reason
    _, aside = await host.verify([task])
    assert 'the verifier failed' in aside[task.id]
  finally:
    (engine.state / 'mode').write_text('')
    await host.close()
  assert not engine.left()


async def test_an_image_that_is_not_there_sets_its_task_aside(engine, task):
  (engine.state / 'mode').write_text('no_image')
  host = await swe_bench.open_host(engine.cfg)
  _, aside = await host.verify([task])
  (engine.state / 'mode').write_text('')
  assert 'Unable to find image' in aside[task.id]


async def test_a_harbor_task_in_its_image(engine, tmp_path):
  app = engine.image('sum:1') / 'app'
  app.mkdir()
  (app / 'numbers.txt').write_text('40\n2\n')
  test = env_formats_harbor_test.TEST.replace('pytest', 'python -m pytest')
  test = test.replace('if', '. /opt/miniconda3/bin/activate testbed\nif', 1)
  toml = '[environment]\ndocker_image = "sum:1"\nworkdir = "/app"\n'
  env_formats_harbor_test.folder(
    tmp_path, changes={'task.toml': toml, 'tests/test.sh': test}
  )
  root = str(tmp_path)
  (task,), aside = harbor.read(config.Tasks(family=harbor.FAMILY, root=root))
  host = await harbor.open_host(engine.cfg)
  (sound,), aside = await host.verify([task])
  assert not aside and not engine.left()
  got, _, _ = await played(host, sound, 'echo 42 > sum.txt')
  assert got.value == 1.0
  wrong = 'ln -sf /etc/passwd /logs/verifier/reward.json'
  got, env, _ = await played(host, sound, wrong)
  assert got.value == 0.0 and env.flags == ('reward_file',)
  await host.close()
  assert not engine.left()


def told(*records: dict, token: str = 't') -> sandbox.Completed:
  lines = [f'{token} {json.dumps(record)}' for record in records]
  return sandbox.Completed(0, '\n'.join(lines).encode(), b'', False, False)


def test_records_that_do_not_follow_are_forged():
  begun, over = {'number': 0, 'begun': True}, {'number': 3, 'over': True}
  one = {'number': 1, 'test': 'a', 'outcome': 'passed'}
  bad = {'number': 2, 'test': 'c', 'outcome': 'failed'}
  report = swe_boxed.read(told(begun, one, bad, over), 't', 'c', 1.0)
  assert report.complete and report.passed(['a']) and not report.passed(['a', 'b'])
  for records in (
    (begun, one, over),  # one is missing
    (begun, one, one, over),  # one is there twice
    (begun, one, {**bad, 'outcome': 'passed'}, over),  # it must fail
    (begun, one, {**bad, 'test': 'd'}, over),  # it did not run
    (begun, one, bad, over, {'number': 4, 'test': 'a', 'outcome': 'passed'}),
  ):
    report = swe_boxed.read(told(*records), 't', 'c', 1.0)
    assert report.forged and not report.passed(['a'])
  report = swe_boxed.read(told(begun, one), 't', 'c', 1.0)
  assert not report.complete and not report.forged and not report.passed(['a'])
  with pytest.raises(suite.SuiteError, match='did not begin'):
    swe_boxed.read(told(begun, one, over, token='other'), 't', 'c', 1.0)
