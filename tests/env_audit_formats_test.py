"""The audit of families that read other people's tasks, on the fixtures of each.

Of each: the gold solves, who does nothing does not, every exploit of the standing list
scores 0 and is flagged, nothing leaks; and a verifier that accepts anything is caught.
"""

import asyncio
import dataclasses
import importlib.util
import inspect
import json
import pathlib
import random

import numpy
import pytest

from experiments import build_tasks, program, task_audit
from experiments.bench import tasks as bench_tasks
from swe17 import config, types
from swe17.env import base, sandbox
from swe17.env.audit import (
  cheating,
  exploits,
  leaks,
  ledger,
  of_kernels,
  of_swe,
  pipeline,
  subjects,
)
from swe17.env.formats import harbor, swe_bench, verifiers_env
from swe17.env.kernels import kernel_bench, worker
from swe17.env.packages import suite
from swe17.env.repair import repair_text
from tests import env_formats_harbor_test as folders
from tests import env_kernels_device_test as problems
from tests import swe_fixture

CFG = config.Sandbox(backend='bubblewrap', workers=2, wall_seconds=30.0)
EXAMPLE = f'{__name__}:guessing'


@pytest.fixture(autouse=True)
def isolated():
  if reason := sandbox._why_not_bubblewrap():
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')


# What one play shows of each kind: every sign of the list is looked at without a play
# below, and the whole of it is played with `--exploits=all`, as by build_tasks.
QUICK = ('leaves with exit code 0', 'returns what equals everything', 'edits the tests')
QUICK += ('adds a conftest', 'shadows a module', 'makes pytest say passed')


@pytest.fixture
def quick(monkeypatch, request) -> int:
  """Cuts the standing list short; how many are left."""
  if request.config.getoption('exploits') == 'all':
    return len(exploits.EXPLOITS)
  some = tuple(each for each in exploits.EXPLOITS if each.name in QUICK)
  monkeypatch.setattr(exploits, 'EXPLOITS', some)
  return len(some)


def proved(name: str, cfg: config.Tasks, work: pathlib.Path, **plan) -> dict:
  """The report of a family that nothing is wrong with."""
  plan = {'exploited': 1, 'repeats': 2, **plan}
  found = asyncio.run(
    task_audit.family(
      name, work, pipeline.Plan(**plan), sandbox=CFG, tasks=cfg, says=lambda text: None
    )
  )
  assert found['barred'] == {} and found['tasks'] > 0, found['set_aside']
  assert found['gold_solved'] == found['gold_played'] == found['tasks']
  assert found['null_played'] == found['tasks'] and found['null_solved'] == 0
  for what in ('exploits_scored', 'exploits_unflagged', 'exploits_solved_alone'):
    assert found[what] == [], (what, found[what])
  assert found['leaks'] == {} and found['accepted_wrong'] == []
  assert found['rejected_right'] == []
  return found


# ---- repair_text ---------------------------------------------------------------------


def test_repair_text_is_proved_by_its_own_tools(tmp_path, quick):
  found = proved('repair_text', config.Tasks(train=1, heldout=1), tmp_path)
  assert found['tasks'] == 2
  assert found['exploits'] == sum(bool(e.expression) for e in exploits.EXPLOITS)
  assert found['accept_wrong_count'] > 10 and found['reject_right_count'] > 3


# ---- swe_bench -----------------------------------------------------------------------

SOURCE = """def clamp(value, low, high):
  if value < low:
    return low
  if value > high:
    return low
  return value


def spread(values):
  lowest = min(values)
  highest = max(values)
  middle = sorted(values)[len(values) // 2]
  return lowest, middle, highest


def middle(values):
  return sorted(values)[len(values) // 4]
"""
FIXED = SOURCE.replace('high:\n    return low', 'high:\n    return high')
FIXED = FIXED.replace('// 4', '// 2')


def repository(root: pathlib.Path) -> config.Tasks:
  """A clone and a table with one row, whose patch has two hunks that both matter."""
  commit = swe_fixture.repository(root / 'numbers')
  (root / 'numbers' / swe_fixture.FILE).write_text(SOURCE)
  swe_fixture.git(root / 'numbers', 'commit', '-q', '-a', '-m', 'two faults')
  commit = swe_fixture.git(root / 'numbers', 'rev-parse', 'HEAD').strip()
  patch = swe_fixture.diff(swe_fixture.FILE, SOURCE, FIXED, root / 'scratch')
  high, middle = (f'{swe_fixture.TEST}::test_{n}' for n in ('high', 'middle'))
  row = swe_fixture.row(
    commit,
    root / 'scratch',
    patch=patch,
    FAIL_TO_PASS=[high, middle],
    PASS_TO_PASS=[f'{swe_fixture.TEST}::test_low'],
  )
  (root / 'rows.jsonl').write_text(json.dumps(row) + '\n')
  return config.Tasks(
    family='swe_bench', table=str(root / 'rows.jsonl'), root=str(root), place='local'
  )


def test_swe_bench_is_proved_and_the_command_line_says_where_its_rows_are(
  tmp_path, quick, capsys
):
  """CASES 7.2 and 7.3: hooks, settings, a pytest, hidden tests of the agent's own."""
  cfg = repository(tmp_path)
  words = [f'tasks.{name}={getattr(cfg, name)}' for name in ('table', 'root', 'place')]
  argv = ['x', '--family=swe_bench', '--nobuild', f'--work={tmp_path}/work', *words]
  main(argv[:-3] + ['--exploited=1', *words, 'sandbox.wall_seconds=30.0'])
  said = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
  assert (said['table'], said['gold_solved'], said['null_solved']) == (
    'rows.jsonl',
    1,
    0,
  )
  found = proved('swe_bench', cfg, tmp_path / 'work')  # the same answers, by ledger
  assert found['judged'] == 0 and found['exploits_tried'] > quick
  assert found['images'] == 1
  assert {'half of the hunks', 'tests of its own', 'tests of its own, hooked'} <= set(
    found['accept_wrong_labels']
  )
  assert found['accept_wrong_labels']['half of the hunks'] == [0, 2]
  assert found['reject_right_count'] == of_swe.RIGHT


def test_an_agent_may_run_the_tests_and_write_a_script_of_its_own(tmp_path):
  task = swe_bench.read(repository(tmp_path))[0][0]

  async def run():
    about = await subjects.get('swe_bench')(CFG, config.Tasks())
    (sound,), _ = await about.ready([task])
    gold, _ = about.players(sound)
    first = ['cd tests && python -m pytest -q', 'pytest -q tests 2>&1 | tail -3']
    first.append("cat > test_it.py <<'EOF'\nprint(1)\nEOF\npython test_it.py; rm *.py")
    calls = [('bash', {'command': command}) for command in first]
    played = await about.play(sound, [*calls, *gold])
    await about.close()
    return played

  played = asyncio.run(run())
  assert played.outcome.value == 1.0 and played.flags == (), played


def test_rows_and_verifiers_that_accept_anything_are_caught(
  tmp_path, monkeypatch, quick
):
  """A grader that passes every test: nothing solves the task, so it is barred."""
  (task,), _ = swe_bench.read(repository(tmp_path))

  async def passing(cfg, backend, tree, tests, seconds_a_test, **how):
    return suite.Report(dict.fromkeys(tests or (), 'passed'), 0.1, True, '', '')

  async def run():
    about = await subjects.get('swe_bench')(CFG, config.Tasks())
    ready, _ = await about.ready([task])
    monkeypatch.setattr(suite, 'run', passing)
    answers = ledger.Ledger(tmp_path / 'l.jsonl')
    plan = pipeline.Plan(exploited=1, scanned=1)
    found = await pipeline.run(about, ready, answers, plan, lambda text: None)
    _, aside = await about.ready([task])
    await about.close()
    return found, aside

  found, aside = asyncio.run(run())
  assert found['barred'] == {task.id: 'nothing solves it'}
  assert len(found['exploits_solved_alone']) == found['exploits_tried'] > quick
  assert found['exploits_scored'] == []  # the second wall
  assert 'passes already' in aside[task.id]


def test_halves_are_diffs_of_whole_hunks(tmp_path):
  one = swe_fixture.diff('a.py', 'a\n', 'b\n', tmp_path)
  assert of_swe.halves(one) == []
  first, second = of_swe.halves(one + swe_fixture.diff('b.py', 'c\n', 'd\n', tmp_path))
  assert first[1] == one and 'b.py' in second[1] and 'a.py' not in second[1]
  tests = {'t.py': b'', 'data.txt': b''}
  made = of_swe.own_tests(tests, ['t.py::A::test_b', 't.py::test_c[1::2]'])
  assert set(made) == {'t.py'}
  space: dict = {}
  exec(made['t.py'], space)
  assert space['A']().test_b() is None and space['test_c']() is None


# ---- harbor --------------------------------------------------------------------------


def test_harbor_is_proved_and_a_folder_without_a_gold_is_named(tmp_path, quick):
  folders.folder(tmp_path / 'root')
  folders.folder(tmp_path / 'root', 'bare', {'solution/solve.sh': None})
  folders.folder(tmp_path / 'root', 'unsolved', {'solution/solve.sh': 'true\n'})
  cfg = folders.local(tmp_path / 'root')
  found = proved('harbor', cfg, tmp_path / 'work')
  assert found['tasks'] == 1 and found['images'] == 1
  assert found['exploits_tried'] > 5
  assert set(found['accept_wrong_labels']) == {
    'looks about',
    'says that it is done',
    'emptied',
  }
  aside = found['set_aside']
  assert 'no solution/solve.sh' in aside['bare']
  assert 'its solution is rewarded with 0' in aside['unsolved']
  task_audit.write(tmp_path / 'work', 'the command')
  html = (tmp_path / 'work' / 'report.html').read_text()
  assert 'no solution/solve.sh' in html and '<td>bare</td>' in html


WEAK = 'test -f sum.txt && R=1 || R=0; echo $R > /logs/verifier/reward.txt\n'


def test_a_harbor_folder_whose_tests_accept_too_much_is_caught(tmp_path):
  """CASES 7.8: tests that look for a file and not at it."""
  folders.folder(tmp_path, 'weak', {'tests/test.sh': WEAK})
  (task,), _ = harbor.read(folders.local(tmp_path))

  async def run():
    about = await subjects.get('harbor')(CFG, config.Tasks())
    ((sound,), _), rng = await about.ready([task]), random.Random(0)
    tried = await about.wrong(sound, rng)
    return {t.label: (await about.judge(sound, t.solution)).value for t in tried}

  values = asyncio.run(run())
  assert values == {'looks about': 0.0, 'says that it is done': 0.0, 'emptied': 1.0}


def test_a_solution_that_lies_about_is_a_leak(tmp_path):
  script = '#!/bin/bash\necho 42 > sum.txt\n'
  folders.folder(tmp_path, 'a', {'solution/solve.sh': script})
  (task,), _ = harbor.read(folders.local(tmp_path))

  async def run():
    about = await subjects.get('harbor')(CFG, config.Tasks())
    (sound,), _ = await about.ready([task])
    clean = await about.leaks([sound])
    place = about._host._places[task.id]
    files = {'app/numbers.txt': b'40\n2\n', 'app/old/solve.sh': script.encode()}
    place._first = harbor_first(files)
    return clean, await about.leaks([sound])

  clean, leaked = asyncio.run(run())
  assert clean == {'task/a': []}
  (finding,) = leaked['task/a']
  assert finding.startswith('solution/solve.sh: ') and 'old/solve.sh' in finding


def harbor_first(files: dict[str, bytes]) -> bytes:
  from swe17.env.formats import harbor_places, repositories

  return repositories.pack(files, folders=harbor_places._PLACES)


# ---- verifiers -----------------------------------------------------------------------


def rows(name: str, arguments: str = '{}') -> config.Tasks:
  factory = f'tests.verifiers_fixture:{name}'
  return config.Tasks(family='verifiers', factory=factory, arguments=arguments)


@pytest.mark.parametrize('name', ['sums', 'guess'])
def test_verifiers_are_proved_with_the_answers_of_their_rows(tmp_path, name):
  found = proved('verifiers', rows(name, '{"rows": 3}'), tmp_path)
  assert found['exploits_tried'] >= 20 and found['images'] == 0
  assert found['accept_wrong_labels']['no answer'][1] == found['tasks']


def test_a_row_whose_answer_is_not_worth_the_full_score_is_named(tmp_path):
  async def run():
    about = await subjects.get('verifiers')(CFG, config.Tasks())
    tasks, _ = verifiers_env.read(rows('sums'))
    first, second, third = tasks
    for task, answer in ((second, ' 99 '), (third, None)):
      row = {**task.payload['row'], 'answer': answer}
      row = {key: value for key, value in row.items() if value is not None}
      tasks = [
        dataclasses.replace(t, payload={**t.payload, 'row': row}) if t is task else t
        for t in tasks
      ]
    ready, barred = await about.ready(tasks)
    assert [task.id for task in ready] == [first.id]
    return barred[second.id], barred[third.id]

  scored, absent = asyncio.run(run())
  assert scored == 'no gold: its answer scores 0.25, want 1'
  assert absent == 'no gold: the row has no answer'


def test_a_rubric_that_accepts_anything_is_caught(tmp_path):
  """`failing` at no place scores 1 whatever was said."""
  found = asyncio.run(
    task_audit.family(
      'verifiers',
      tmp_path,
      pipeline.Plan(exploited=1),
      sandbox=CFG,
      tasks=rows('failing', '{"where": ""}'),
      says=lambda text: None,
    )
  )
  assert list(found['barred'].values()) == ['nothing solves it']
  assert len(found['exploits_solved_alone']) == found['exploits_tried'] > 0


# ---- kernels -------------------------------------------------------------------------


def test_packages_that_candidates_see_are_looked_through():
  """A gold that numpy has would be found where candidates work."""
  shown, folder = worker.binds('bubblewrap', of_kernels.Subject.room)
  wanted = leaks.needles([inspect.getsource(numpy.vander)], below=[folder])
  found = asyncio.run(leaks.in_sandbox(CFG, 'bubblewrap', wanted, shown))
  assert found and all(f' {folder}/numpy/' in each for each in found), found
  assert asyncio.run(leaks.in_sandbox(CFG, 'bubblewrap', wanted)) == []


# ---- kernel_bench --------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec('torch') is None, reason='needs torch')
def test_kernel_bench_is_judged_by_golds_beside_its_problems(tmp_path, quick):
  """On the CPU, as its other tests; a problem without a gold is named."""
  for i in range(12):
    (tmp_path / f'{i}_scaled.py').write_text(problems.PROBLEM)
  (tmp_path / f'0_scaled{of_kernels.GOLD}').write_text(problems.FAST)
  cfg = problems.settings(tmp_path)
  tasks, _ = kernel_bench.read(cfg)
  box = config.Sandbox(workers=1, cpu_seconds=30.0, wall_seconds=60.0)

  async def run():
    about = await of_kernels.open_bench(box, cfg, 'cpu')
    answers = ledger.Ledger(tmp_path / 'l.jsonl')
    try:
      ready, barred = await about.ready(tasks)
      plan = pipeline.Plan(exploited=1, repeats=1, at_once=1)
      found = await pipeline.run(about, ready, answers, plan, lambda text: None)
      return ready, barred, found
    finally:
      answers.close()
      await about.close()

  ready, barred, found = asyncio.run(run())
  assert [task.id for task in ready] == ['0_scaled'] and len(barred) == 11
  assert barred['1_scaled'] == 'no gold: no file 1_scaled.gold beside the problem'
  assert found['barred'] == {} and (found['gold_solved'], found['null_solved']) == (
    1,
    0,
  )
  assert found['accepted_wrong'] == [] and found['accept_wrong_count'] >= 3
  assert found['exploits_scored'] == found['exploits_unflagged'] == []
  assert found['exploits_solved_alone'] == [] and found['exploits_tried'] >= quick
  assert found['leaks'] == {}


# ---- somebody else's -----------------------------------------------------------------


class Note:
  """An environment of somebody's: what was noted last is compared with a secret."""

  tools = (
    base.Tool('note', 'Note something.', {'text': 'str'}, writes=True),
    base.Tool('submit', 'End.', {}, writes=True),
  )

  def __init__(self, task: types.Task):
    self._task, self._text, self.done = task, '', False

  async def reset(self) -> str:
    self._text, self.done = '', False
    return self._task.prompt

  async def step(self, name, arguments) -> str:
    self._text = arguments.get('text', self._text)
    self.done = name == 'submit'
    return 'noted'

  async def verify(self) -> types.Outcome:
    lax = self._task.payload.get('lax')
    return types.Outcome(float(bool(lax) or self._text == self._task.payload['secret']))


class Host:
  async def verify(self, tasks):
    return list(tasks), {}

  def env(self, task):
    return Note(task)

  async def close(self) -> None:
    return


def _tasks(cfg):
  made = []
  for n, lax in enumerate((False, True, False)):
    gold = [['note', {'text': f's{n}'}], ['submit', {}]]
    payload = {'secret': f's{n}', 'lax': lax, **({} if n == 2 else {'gold': gold})}
    side = 'heldout' if n else 'train'
    made.append(
      types.Task(f'n{n}', 'notes', side, f'n{n}', f'Note number {n}.', payload)
    )
  return tuple(made), {'n9': 'it is not to be had'}


async def _open(cfg):
  return Host()


def guessing() -> base.Family:
  """What `module:factory` names."""
  return base.Family('notes', _tasks, _open)


def test_a_family_of_somebody_elses_is_audited_by_its_tools_and_golds(tmp_path):
  found = asyncio.run(
    task_audit.family(
      EXAMPLE,
      tmp_path,
      pipeline.Plan(exploited=9),
      sandbox=CFG,
      tasks=config.Tasks(),
      says=lambda text: None,
    )
  )
  assert found['barred'] == {'n1': 'nothing solves it'}  # its verifier accepts anything
  assert found['set_aside'] == {
    'n9': 'it is not to be had',
    'n2': 'no gold: its payload has no calls that solve it',
  }
  assert (found['gold_solved'], found['gold_played'], found['null_solved']) == (1, 1, 0)
  assert found['exploits_scored'] == found['exploits_unflagged'] == []
  assert {row['task'] for row in found['exploits_solved_alone']} == {'n1'}
  assert found['exploits_tried'] > 40
  (file,) = tmp_path.glob('*.audit.json')
  assert ':' not in file.name and json.loads(file.read_text())['tasks'] == 2


# ---- the command line ----------------------------------------------------------------


def main(argv):
  build_tasks.FLAGS.unparse_flags()  # of an earlier test
  program.parse(argv, build_tasks.FLAGS)
  build_tasks.main([argv[0], *(word for word in argv[1:] if not word.startswith('--'))])


@pytest.mark.parametrize(
  ('words', 'why'),
  [
    (['--family=harbor'], 'harbor has no builder'),
    (['--family=repair_text'], 'repair_text has no builder'),
    (['--family=harbour'], "did you mean 'harbor'"),
    (['--family=harbor,verifiers', '--nobuild'], 'want one family'),
    (['--family=harbor', '--nobuild', 'tasks.rot=x'], 'want tasks.name=value'),
    (['--family=harbor', '--nobuild'], 'tasks.root: got'),
    (['--family=no.such:thing', '--nobuild'], 'cannot be imported'),
  ],
)
def test_what_cannot_be_built_or_read_is_said_in_a_sentence(tmp_path, words, why):
  from absl import app

  with pytest.raises(app.UsageError, match=why):
    main(['x', f'--work={tmp_path}', *words])


def test_the_bench_runs_the_families_that_ship_a_table_and_no_others():
  assert bench_tasks.FLAGS['families'].value == list(build_tasks.TABLES)
  assert set(build_tasks.TABLES) < set(subjects.SUBJECTS)
  assert len(build_tasks.TABLES) == 6


# ---- the whole list ------------------------------------------------------------------


async def test_every_attempt_of_the_whole_list_is_flagged_by_its_calls(tmp_path):
  """But for what the environment sees: a reward that was there."""
  seen = {'writes the reward'}
  folders.folder(tmp_path)
  (folder,), _ = harbor.read(folders.local(tmp_path))
  (row,), _ = swe_bench.read(repository(tmp_path))
  text, _ = repair_text.read(config.Tasks(train=1, heldout=1))
  for name, task in (('harbor', folder), ('swe_bench', row), ('repair_text', text[0])):
    about = await subjects.get(name)(CFG, config.Tasks())
    try:
      (sound,), _ = await about.ready([task])
      env = about._host.env(sound)
      if name == 'swe_bench':
        await env.reset()  # reads the modules
      how = {'given': base.given(env), 'rules': base.rules(env)}
      how['writes'] = frozenset(tool.name for tool in env.tools if tool.writes)
      attempts = [a for a in about.attempts(sound) if a.exploit not in seen]
      assert len({a.exploit for a in attempts}) == len(attempts) > 12
      for attempt in attempts:
        assert cheating.found(attempt.calls, **how), attempt
    finally:
      await about.close()
