"""The family repair_packages: its table, its tools, its verdicts, its build."""

import asyncio
import dataclasses
import random

import pytest

from swe17 import config, types
from swe17.env import check, sandbox
from swe17.env.packages import (
  build,
  catalogue,
  desk,
  faults,
  packages,
  rows,
  sources,
  suite,
  verdicts,
)
from tests import tiny_package as tiny

CFG = config.Sandbox()


@pytest.fixture(scope='module')
def backend() -> str:
  chosen = sandbox.choose_backend(CFG)
  if chosen != 'bubblewrap':
    pytest.skip('without namespaces nothing is promised')
  return chosen


@pytest.fixture
def cache(tmp_path, monkeypatch) -> str:
  """A cache with the made-up package, which the catalogue knows."""
  monkeypatch.setitem(catalogue.SOURCES, 'tiny', tiny.stored(tmp_path))
  sources.fetch.cache_clear()
  return str(tmp_path)


def a_row(**changes) -> rows.Row:
  start = tiny.CORE.index(b'x < low')
  row = rows.Row(
    id='tiny/reverted/0',
    package='tiny',
    version='1.0',
    kind='reverted',
    split='train',
    seed=0,
    sha=tiny.tree().sha,
    fail_to_pass=tuple(tiny.CLAMP),
    pass_to_pass=(tiny.MEAN, tiny.UP),
    shown={tiny.CLAMP[0]: 'assert -1 == 0'},
    edits=(faults.Edit('src/tiny/core.py', start, 'x < low', 'not (x < low)'),),
  )
  return dataclasses.replace(row, **changes)


def play(task: types.Task, calls, backend: str = 'bubblewrap'):
  """(outcome, answers, environment) of calls."""

  async def episode():
    env = packages.PackageEnv(
      task, packages.problem_of(task), packages.Runner(CFG, backend)
    )
    await env.reset()
    said = [await env.step(name, arguments) for name, arguments in calls]
    return await env.verify(), said, env

  return asyncio.run(episode())


def test_a_table_reads_as_it_was_written(tmp_path):
  file = tmp_path / 'table.jsonl'
  wanted = [a_row(), a_row(id='tiny/other/1', split='heldout', edits=())]
  rows.write(file, wanted)
  assert rows.read(file) == wanted
  file.write_text(file.read_text() + '{"id": 1}\n')
  with pytest.raises(ValueError, match='line 3: not a row'):
    rows.read(file)


def test_tasks_are_read_and_what_does_not_fit_is_set_aside(cache, tmp_path):
  file = tmp_path / 'table.jsonl'
  other = a_row(id='tiny/old/0', sha='0' * 16)
  rows.write(file, [other, a_row(), a_row(id='tiny/held/0', split='heldout')])
  cfg = config.Tasks(
    family=packages.FAMILY, table=str(file), cache=cache, train=1, heldout=1
  )
  tasks, aside = packages.read(cfg)
  assert [task.id for task in tasks] == ['tiny/reverted/0', 'tiny/held/0']
  assert aside == {'tiny/old/0': 'another tiny than when the table was built'}
  with pytest.raises(ValueError, match='has 1 tasks here, want 2'):
    packages.read(dataclasses.replace(cfg, train=2))
  with pytest.raises(ValueError, match=r'tasks\.kinds'):
    packages.read(dataclasses.replace(cfg, kinds='reverted,wrong'))
  with pytest.raises(ValueError, match=r'tasks\.train'):
    packages.read(dataclasses.replace(cfg, kinds='several'))


def test_the_statement_tells_the_symptom_and_not_the_place(cache):
  task = packages.task_of(a_row(), cache)
  assert 'assert -1 == 0' in task.prompt and tiny.CLAMP[0] in task.prompt
  assert 'core' not in task.prompt and 'low' not in task.prompt


def test_hidden_tests_are_not_in_the_agents_tree(cache):
  shown = rows.problem(a_row(), cache)
  assert shown.rest == tiny.tree().rest  # the one function that fails is told of
  hidden = a_row(fail_to_pass=(*tiny.CLAMP, tiny.UP, tiny.MEAN), pass_to_pass=())
  rest = rows.problem(hidden, cache).rest[tiny.FILE]
  assert b'def test_clamp(' in rest and b'def test_mean_of_one' in rest
  assert b'def test_mean(' not in rest and b'def test_up' not in rest
  compile(rest, 'x', 'exec')
  assert rows.problem(hidden, cache).clean.rest == tiny.tree().rest


def test_gold_scores_1_nothing_0_and_half_of_it_0(cache, backend):
  start = tiny.CORE.index(b'total + value')
  second = faults.Edit('src/tiny/core.py', start, 'total + value', 'total - value')
  row = a_row(
    edits=(*a_row().edits, second),
    fail_to_pass=(*tiny.CLAMP, tiny.MEAN),
    pass_to_pass=(tiny.UP,),
  )
  task = packages.task_of(row, cache)
  gold = task.payload['gold']
  assert [name for name, _ in gold] == ['edit', 'edit', 'submit']
  assert play(task, gold)[0] == types.Outcome(1.0)
  assert play(task, gold[1:])[0] == types.Outcome(0.0)
  assert play(task, [])[0] == types.Outcome(0.0)


def test_another_right_solution_scores_1(cache, backend):
  task = packages.task_of(a_row(), cache)
  other = tiny.CORE.replace(b'x < low', b'not x >= low').decode()
  call = ('create', {'path': 'src/tiny/core.py', 'text': other})
  assert play(task, [call])[0] == types.Outcome(1.0)


def test_what_breaks_another_test_scores_0(cache, backend):
  task = packages.task_of(a_row(), cache)
  broken = tiny.CORE.replace(b'by=1', b'by=2').decode()
  call = ('create', {'path': 'src/tiny/core.py', 'text': broken})
  assert play(task, [call])[0] == types.Outcome(0.0)


def test_tests_and_settings_cannot_be_written(cache, backend):
  task = packages.task_of(a_row(), cache)
  calls = [
    ('create', {'path': path, 'text': 'def test_clamp(): pass\n'})
    for path in (
      tiny.FILE,
      'conftest.py',
      'src/tiny/conftest.py',
      '../x.py',
      'pytest.py',
    )
  ]
  calls.append(('edit', {'path': tiny.FILE, 'old': 'import tiny', 'new': ''}))
  outcome, said, env = play(task, calls)
  assert all('is not source' in answer for answer in said)
  assert outcome == types.Outcome(0.0)
  assert env.source == dict(packages.problem_of(task).source)


def test_who_bends_pytest_is_flagged_and_scores_0(cache, backend):
  task = packages.task_of(a_row(), cache)
  bent = (
    'import _pytest.reports as r\ninit = r.TestReport.__init__\n'
    'def bent(self, *a, **k):\n'
    '  init(self, *a, **k)\n  self.outcome, self.longrepr = "passed", None\n'
    'r.TestReport.__init__ = bent\n'
  )
  old = '"""Arithmetic, badly needed."""\n'
  call = ('edit', {'path': 'src/tiny/core.py', 'old': old, 'new': bent})
  outcome, said, env = play(task, [call])
  assert said == ['written'] and outcome.value == 0.0
  assert outcome.reason.startswith('cheating: bends the tests')
  assert env.flags and env.flags[0].startswith('bends the tests')


def test_the_test_tool_says_what_fails_and_how(cache, backend):
  task = packages.task_of(a_row(), cache)
  calls = [
    ('test', {'tests': ''}),
    ('test', {'tests': tiny.MEAN}),
    ('test', {'tests': 'tests/none.py::test_it'}),
  ]
  said = play(task, calls)[1]
  assert said[0].startswith('passed 2 of 4\nfailed tests/test_tiny.py::test_clamp[')
  assert 'assert ' in said[0]
  assert said[1] == 'passed 1 of 1'
  assert said[2].startswith('no such test')
  broken = ('create', {'path': 'src/tiny/core.py', 'text': 'x = (\n'})
  said = play(task, [broken, ('test', {'tests': ''})])[1]
  assert said[1].startswith('passed 0 of 4\nerror tests/test_tiny.py\n')
  assert 'SyntaxError' in said[1]


def test_a_failing_sandbox_is_no_outcome(cache, backend, monkeypatch):
  async def fail(*_, **__):
    raise suite.SuiteError('tiny: the sandbox failed')

  monkeypatch.setattr(suite, 'run', fail)
  outcome = play(packages.task_of(a_row(), cache), [])[0]
  assert outcome.value is None and 'the sandbox failed' in outcome.reason


def test_the_environment_has_no_problems(cache, backend):
  task = packages.task_of(a_row(), cache)
  runner = packages.Runner(CFG, backend)

  def make(each: types.Task) -> packages.PackageEnv:
    return packages.PackageEnv(each, packages.problem_of(each), runner)

  assert asyncio.run(check.environment(make, [task])) == []


def test_a_host_sets_aside_what_is_not_sound(cache, backend):
  sound = packages.task_of(a_row(), cache)
  loose = packages.task_of(a_row(id='loose', fail_to_pass=(tiny.UP,)), cache)
  absent = packages.task_of(a_row(id='absent', pass_to_pass=('a.py::b',)), cache)

  async def verify():
    host = await packages.open_host(CFG)
    return await host.verify([sound, loose, absent])

  tasks, aside = asyncio.run(verify())
  assert tasks == [sound]
  assert aside == {
    'loose': 'its tests do not catch it',
    'absent': 'its gold does not pass',
  }


def test_edits_answer_in_words():
  clean = tiny.tree()
  on = desk.Desk(clean, clean.source, clean.rest)
  core = 'src/tiny/core.py'
  assert on.edit(core, 'return', 'x').startswith('old occurs 5 times')
  assert on.edit(core, '', 'x').startswith('old occurs 0 times')
  assert on.edit('none.py', 'a', 'b') == "no such file: 'none.py'"
  assert on.create('src/tiny/new.py', '\ud800') == 'not a text in UTF-8'
  assert on.create('src/tiny/new.py', 'x' * 500_000).endswith('over 400000 bytes')
  assert on.create('src/tiny/new.py', 'y = 1\n') == 'written'
  assert (
    on.look('grep', {'pattern': '^y = 1', 'path': ''}) == 'src/tiny/new.py:1: y = 1'
  )
  assert on.look('list', {'path': 'src/tiny'}) == '__init__.py\ncore.py\nnew.py'
  assert on.look('read', {'path': '/etc/passwd', 'first': 1, 'last': 2}).startswith(
    'no'
  )


def test_gold_calls_turn_the_faulty_source_into_the_clean_one():
  clean = tiny.tree()
  for fault in faults.candidates(clean, 5):
    given = faults.apply(clean, fault)
    on = desk.Desk(clean, given.source, given.rest)
    for name, arguments in desk.gold(given.source, clean.source):
      assert getattr(on, name)(**arguments) == 'written'
    assert on.source == dict(clean.source)
  windows = {p: d.replace(b'\n', b'\r\n') for p, d in tiny.faulty().items()}
  wanted = {p: d.replace(b'\n', b'\r\n') for p, d in clean.source.items()}
  on = desk.Desk(clean, windows, {})
  for name, arguments in desk.gold(windows, wanted):
    assert getattr(on, name)(**arguments) == 'written'
  assert on.source == wanted


def test_a_release_pair_is_graded_by_the_new_tests(cache, tmp_path, backend):
  old = {
    **tiny.FILES,
    'src/tiny/core.py': tiny.CORE.replace(*tiny.FAULT),
    tiny.FILE: b'import tiny\n\ndef test_old():\n  assert tiny.mean([1]) == 1\n',
  }
  sides = {
    'new': dataclasses.asdict(catalogue.SOURCES['tiny']),
    'old': dataclasses.asdict(tiny.stored(tmp_path, tiny.distribution(old))),
  }
  row = a_row(kind=rows.RELEASE, edits=(), release=sides)
  rows.write(tmp_path / 't.jsonl', [row])
  task = packages.task_of(rows.read(tmp_path / 't.jsonl')[0], cache)
  problem = packages.problem_of(task)
  assert problem.rest[tiny.FILE] == old[tiny.FILE]
  assert play(task, [])[0] == types.Outcome(0.0)
  assert play(task, task.payload['gold'])[0] == types.Outcome(1.0)


def test_a_build_judges_and_goes_on_where_it_stopped(cache, tmp_path, backend):
  def begin() -> build.Build:
    return build.Build(
      CFG, tmp_path / 'work', cache=cache, packages=['tiny'], say=lambda _: None
    )

  first = begin()
  asyncio.run(first.run(2))
  assert first.accepted == 2
  file = tmp_path / 'work' / 'candidates.jsonl'
  lines = file.read_text()
  file.write_text(lines + '{"package": "tin')  # it was killed while it wrote
  second = begin()
  assert second.accepted == 2 and file.read_text() == lines
  asyncio.run(second.run(3))
  assert file.read_text().startswith(lines) and second.accepted == 3
  found, report = second.result()
  assert report.tasks == 3 and report.tests == {'tiny': 10}
  assert report.candidates == 3 + sum(report.rejected.values())
  for row in found:
    assert row.split == 'train' and row.sha == tiny.tree().sha
    assert row.fail_to_pass and row.shown.keys() <= set(row.fail_to_pass)
    task = packages.task_of(row, cache)
    assert play(task, [])[0] == types.Outcome(0.0)
    assert play(task, task.payload['gold'])[0] == types.Outcome(1.0)


@pytest.mark.parametrize(
  'old, new, reason',
  [
    (b'return total / len', b'return 1 * total / len', 'not caught'),
    (b'total = 0', b'while True: pass', 'hangs'),
    (b'class Counter', b'raise ValueError\nclass Counter', 'does not import'),
    (b'total = 0', b'import os; total = os.urandom(1)[0] % 2', 'unsteady'),
    (b'total = 0', b'import os; os._exit(1)', ''),
  ],
)
def test_every_rejection_has_its_reason(backend, monkeypatch, old, new, reason):
  monkeypatch.setattr(verdicts, 'SECONDS_A_TEST', 0.5)
  monkeypatch.setattr(verdicts, 'FEWEST', 1)
  monkeypatch.setitem(catalogue.SOURCES, 'tiny', catalogue.SOURCES['parse'])
  start = tiny.CORE.index(old)
  edit = faults.Edit('src/tiny/core.py', start, old.decode(), new.decode())
  fault = faults.Fault('operator', (edit,), ('f',))
  known = verdicts.Suite('', dict.fromkeys([tiny.MEAN], 0.0), {'f': [tiny.MEAN]}, {})
  for _ in range(10):  # a result that wavers may come out equal five times
    found = asyncio.run(verdicts.judge(CFG, backend, tiny.tree(), known, fault, seed=0))
    if found.reason == reason or reason != 'unsteady':
      break
  assert found.reason == reason and (found.row is None) == bool(reason)


def test_tests_of_a_verdict_are_bounded_in_number_and_time():
  tests = {f't.py::test_{n}': 0.001 if n % 2 else 0.3 for n in range(300)}
  known = verdicts.Suite('', tests, {'f': list(tests), 'g': ['t.py::test_1']}, {})
  chosen = verdicts.choose(known, ['f', 'g'], random.Random(0))
  assert len(chosen) <= 61 and sum(tests[test] for test in chosen) < 1.0
  assert 't.py::test_1' in chosen
  assert chosen == verdicts.choose(known, ['f', 'g'], random.Random(0))


def test_what_a_failure_says_names_no_place_of_the_machine():
  said = "from '/opt/py/lib/python3.11/operator.py' at 0x7f\n- /opt/p...in/python3.11"
  told = verdicts.message(said, tiny.tree())
  where = f"no such file: '{sandbox.WORK}/pytest-3/test_a1/test.db'"
  assert verdicts.message(where, tiny.tree()) == "no such file: '<folder>/test.db'"
  assert told == "from '<python>' at 0x...\n- <python>"
