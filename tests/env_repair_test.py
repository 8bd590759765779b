"""repair_functions: the shipped table, verification, an episode, the build."""

import ast
import asyncio
import collections
from collections import Counter
import dataclasses
import itertools
import json

import pytest

from swe17 import config, types
from swe17.env import base, splits
from swe17.env.repair import anchors, build, faults, functions, grader, library, repair

MODULE, FUNCTION = 'bisect', 'count_below'
ORIGINAL = """def count_below(a, x):
    found = 0
    for item in a:
        if item < x:
            found += 1
    return found"""


@pytest.fixture
async def graders():
  pool = grader.Graders(config.Sandbox(workers=1))
  await pool.start()
  yield pool
  await pool.close()


def a_task(source, original=ORIGINAL, visible=2, hidden=4, **changes):
  cases = [repr((list(range(n + 2)), n)) for n in range(visible + hidden)]
  payload = {
    'module': MODULE,
    'function': FUNCTION,
    'kind': 'comparison',
    'original': original,
    'source': source,
    'visible': cases[:visible],
    'hidden': cases[visible:],
  }
  fields = {'id': 'bisect.count_below/0', 'unit': 'bisect.count_below', **changes}
  return types.Task(
    family=repair.FAMILY,
    split='train',
    prompt=repair.prompt(FUNCTION),
    payload=payload,
    **fields,
  )


FAULTY = ORIGINAL.replace('item < x', 'item <= x')
VIEW = """def count_below(a, x):
    «n1»found = «1»0
    for «n2»item in «n3»a:
        «2»if «n4»item«3» <= «n5»x:
            «n6»found«4» += «5»1
    return «n7»found"""


def practice_on(source):
  """A task without tests, as `library.practice` makes them."""
  return library._task(0, FUNCTION, source)


class Broken:
  """Graders whose infrastructure fails on the functions named."""

  def __init__(self, pool=None, names=(FUNCTION,)):
    self._pool, self._names = pool, names

  async def run(self, check):
    if check.function in self._names:
      raise grader.GraderError('worker died twice')
    return await self._pool.run(check)


class Untouched:
  """Graders that nobody may ask."""

  async def run(self, check):
    raise AssertionError(f'a grader was asked for {check.function}')


class Scripted:
  """Graders that answer from a list, one a check of a function."""

  def __init__(self, *answers):
    self.answers = collections.defaultdict(lambda: itertools.cycle(answers))
    self.calls = 0

  async def run(self, check):
    self.calls += 1
    await asyncio.sleep(0)
    return (next(self.answers[check.function]),) * len(check.cases)


async def an_episode(graders, source=FAULTY):
  (task,), _ = await repair.verify([a_task(source)], graders)
  return repair.RepairEnv(task, repair.Verifier(graders))


# The table.


def test_table_is_large_enough_and_split_by_function():
  rows = repair.read_table(repair.TABLE)
  assert len({row.id for row in rows}) == len(rows)
  units = {
    split: {(r.module, r.function) for r in rows if r.split == split}
    for split in ('train', 'heldout')
  }
  count = Counter(row.split for row in rows)
  assert count['train'] >= 300 and count['heldout'] >= 100
  assert len(units['train']) >= 90 and len(units['heldout']) >= 30
  assert not units['train'] & units['heldout']
  dropped = sum(row.kind == 'dropped_line' for row in rows)
  assert dropped <= 0.03 * len(rows)
  for split in units:  # both sides have all kinds
    assert {r.kind for r in rows if r.split == split} == set(faults.KINDS)


def test_near_copies_of_a_function_are_on_one_side():
  rows = repair.read_table(repair.TABLE)
  split = {f'{r.module}.{r.function}': r.split for r in rows}
  catalogue = functions.catalogue()
  sources = {
    name: functions.source_of(catalogue[name].module, catalogue[name].function) or name
    for name in split
  }
  groups = splits.clusters(sources)
  assert any(len(group) > 1 for group in groups)
  for group in groups:
    assert len({split[name] for name in group}) == 1, group


def test_tasks_regenerate_with_cases_that_do_not_overlap():
  tasks, _ = repair.read(config.Tasks())
  again, _ = repair.read(config.Tasks())
  assert tasks == again
  for task in tasks:
    payload = task.payload
    visible, hidden = payload['visible'], payload['hidden']
    assert len(visible) == functions.VISIBLE
    assert len(hidden) >= functions.MIN_HIDDEN
    assert len({*visible, *hidden}) == len(visible) + len(hidden)
    assert payload['source'] != payload['original']
    assert functions.misfit(payload['original']) == ''
    json.dumps(payload)
    for case in visible:
      assert type(ast.literal_eval(case)) is tuple


def test_first_tasks_of_a_split_are_of_different_functions():
  tasks = repair.load(config.Tasks(train=60, heldout=20))
  assert Counter(t.split for t in tasks) == {'train': 60, 'heldout': 20}
  assert len({t.unit for t in tasks}) == 80


def test_longer_functions_than_asked_for_are_left_out():
  everything, aside = repair.read(config.Tasks())
  short, also_aside = repair.read(config.Tasks(lines=6))
  lines = {task.id: len(task.payload['original'].splitlines()) for task in everything}
  assert [t.id for t in short] == [t.id for t in everything if lines[t.id] <= 6]
  assert 0 < len(short) < len(everything) and aside == also_aside
  with pytest.raises(ValueError, match=r'tasks\.train'):
    repair.read(config.Tasks(lines=1))


def test_only_the_kinds_asked_for_are_read_and_the_rest_is_not_set_aside():
  rows = {row.id: row.kind for row in repair.read_table(repair.TABLE)}
  asked = config.Tasks(kinds='comparison, off_by_one', train=0, heldout=0)
  tasks, aside = repair.read(asked)
  everything, also_aside = repair.read(config.Tasks(kinds='', train=0, heldout=0))
  want = [t for t in everything if rows[t.id] in ('comparison', 'off_by_one')]
  assert list(tasks) == want and 0 < len(tasks) < len(everything)
  assert {t.payload['kind'] for t in tasks} == {'comparison', 'off_by_one'}
  assert {t.split for t in tasks} == {'train', 'heldout'}
  assert set(aside) <= set(also_aside)


def test_row_with_another_source_hash_is_set_aside_and_replaced(tmp_path):
  rows = repair.read_table(repair.TABLE)
  rows = [r for r in rows if r.split == 'heldout'][:1] + [
    r for r in rows if r.split == 'train'
  ][:3]
  rows[1] = dataclasses.replace(rows[1], source_sha='0' * 16)
  path = tmp_path / 'table.jsonl'
  path.write_text('\n'.join(json.dumps(dataclasses.asdict(r)) for r in rows))
  tasks, aside = repair.read(config.Tasks(table=str(path), kinds='', train=2))
  assert [t.id for t in tasks] == [rows[2].id, rows[3].id, rows[0].id]
  assert aside == {rows[1].id: 'another source in this Python'}
  with pytest.raises(ValueError, match=r'tasks\.train.* 2 tasks .* want 3'):
    repair.load(config.Tasks(table=str(path), kinds='', train=3))


@pytest.mark.parametrize(
  ('cfg', 'says'),
  [
    (config.Tasks(family='kernels'), 'tasks.family'),
    (config.Tasks(kinds='comparison,typo'), "tasks.kinds: got 'typo', want some of"),
    (config.Tasks(table='/nowhere/table'), "no file '/nowhere/table'"),
  ],
)
def test_bad_settings_are_named(cfg, says):
  with pytest.raises(ValueError, match=says):
    repair.load(cfg)


def test_line_that_is_no_row_is_named(tmp_path):
  path = tmp_path / 'table.jsonl'
  path.write_text('{"id": "x"}\n')
  with pytest.raises(ValueError, match='line 1: not a row'):
    repair.load(config.Tasks(table=str(path)))


def test_canonical_source_has_no_docstring_annotation_or_blank_line():
  source = functions.source_of('textwrap', 'indent')
  assert source is not None and '"""' not in source and '\n\n' not in source
  assert functions.source_of('posixpath', 'split') is not None  # frozen module
  assert functions.source_of('textwrap', 'no_such') is None
  assert functions.source_of('no_such_module', 'f') is None


# Verification.


async def test_sound_tasks_get_expected_results_and_others_a_reason(graders):
  good = a_task(FAULTY)
  harmless = a_task(ORIGINAL.replace('found', 'n'), id='harmless')
  endless = a_task(
    ORIGINAL.replace('        if', '        while'), id='endless', hidden=2
  )
  lame = a_task(FAULTY, original=ORIGINAL.replace('found', '1', 1), id='lame')
  sound, aside = await repair.verify([good, harmless, endless, lame], graders)
  assert [t.id for t in sound] == [good.id]
  assert len(sound[0].payload['expected_visible']) == 2
  assert len(sound[0].payload['expected_hidden']) == 4
  assert aside['harmless'] == 'visible cases do not catch it'
  assert aside['endless'] == 'timeout'
  assert aside['lame'] == 'the original does not run'
  assert len(aside) == 3


async def test_shipped_tasks_are_sound(graders):
  tasks = repair.load(config.Tasks(train=8, heldout=8))
  sound, aside = await repair.verify(tasks, graders)
  assert [t.id for t in sound] == [t.id for t in tasks]
  assert aside == {}


async def test_task_whose_verifier_crashes_is_set_aside(graders):
  other = repair.load(config.Tasks(train=1, heldout=1))[0]
  tasks = [a_task(FAULTY), other]
  sound, aside = await repair.verify(tasks, Broken(graders))
  assert [t.id for t in sound] == [other.id]
  assert aside == {tasks[0].id: 'the verifier failed: worker died twice'}


# An episode.


async def test_episode_finds_edits_tests_and_submits(graders):
  env: base.Env = await an_episode(graders)
  assert await env.step('view', {}) == VIEW
  assert await env.step('test', {}) == 'failed 2 of 2'
  assert await env.step('undo', {}) == 'nothing to undo'
  wrong = {'at': '«3»', 'new': ' > '}
  assert await env.step('edit', wrong) == 'edited'
  assert await env.step('test', {}) == 'failed 1 of 2'
  assert await env.step('undo', {}) == 'undone'
  assert await env.step('edit', {'at': '«3»', 'new': ' < '}) == 'edited'
  assert await env.step('test', {}) == 'passed 2 of 2'
  assert not env.done
  assert await env.step('submit', {}) == 'submitted'
  assert env.done
  for name, arguments in (('edit', wrong), ('undo', {}), ('view', {})):
    assert await env.step(name, arguments) == 'already submitted'
  assert await env.verify() == types.Outcome(1.0)


async def test_untouched_fault_and_broken_syntax_score_zero(graders):
  env = await an_episode(graders)
  assert await env.verify() == types.Outcome(0.0)
  await env.step('edit', {'at': '«2»', 'new': 'fi'})
  assert await env.step('test', {}) == 'failed 2 of 2'
  assert await env.verify() == types.Outcome(0.0)


async def test_answers_learned_from_the_visible_cases_do_not_score(graders):
  env = await an_episode(graders)
  table = '{0: 0, 1: 1}.get(x)'  # right on both visible cases
  await env.step('edit', {'at': '«n7»', 'new': table})
  assert env.source.endswith(f'return {table}')
  assert await env.step('test', {}) == 'passed 2 of 2'
  assert await env.verify() == types.Outcome(0.0)


def an_env(source=FAULTY):
  """An environment whose edits need no grader."""
  return repair.RepairEnv(practice_on(source), repair.Verifier(Untouched()))


async def test_failed_edits_are_ordinary_short_results_and_nothing_to_undo():
  env = an_env()
  for at, new, says in (
    ('«8»', 'b', 'no anchor «8»'),
    ('«0»', 'b', 'no anchor «0»'),
    ('«n8»', 'b', 'no anchor «n8»'),
    ('', 'b', 'no anchor '),
    ('found', 'b', 'no anchor found'),
    (' «1»', 'b', 'no anchor  «1»'),
    ('«1»«2»', 'b', 'no anchor «1»«2»'),
    ('«1»', '0\n', 'new must be one line'),
    ('«1»', '0\r', 'new must be one line'),
    ('«1»', '0', 'nothing changed'),
    ('«3»', ' <= ', 'nothing changed'),
    ('«1»', 'x' * repair.MAX_CHARACTERS, 'the code would be too long'),
  ):
    result = await env.step('edit', {'at': at, 'new': new})
    assert result == says and len(result.split()) <= 8
  result = await env.step('edit', {'at': 'n' * 5000, 'new': 'b'})
  assert result.startswith('no anchor nnn') and len(result) < 40
  assert env.source == FAULTY
  assert await env.step('undo', {}) == 'nothing to undo'
  with pytest.raises(ValueError, match='tool: got'):
    await env.step('shell', {})


async def test_an_edit_may_make_the_code_as_long_as_the_limit_and_no_longer():
  env, room = an_env(), repair.MAX_CHARACTERS - len(FAULTY) + 1
  result = await env.step('edit', {'at': '«1»', 'new': '1' * (room + 1)})
  assert result == 'the code would be too long'
  assert await env.step('edit', {'at': '«1»', 'new': '1' * room}) == 'edited'
  assert len(env.source) == repair.MAX_CHARACTERS
  assert await env.step('edit', {'at': '«5»', 'new': '11'}) != 'edited'
  assert await env.step('edit', {'at': '«1»', 'new': '1'}) == 'edited'


@pytest.mark.parametrize('at', ['«{}»', '{}', '«{}', '{}»'])
@pytest.mark.parametrize(('name', 'line'), [('n1', 2), ('n6', 5), ('n7', 6)])
async def test_an_edit_lands_behind_its_anchor_and_nowhere_else(at, name, line):
  env = an_env()
  has = [i for i, row in enumerate(FAULTY.split('\n'), 1) if 'found' in row]
  assert has == [2, 5, 6]
  assert await env.step('edit', {'at': at.format(name), 'new': 'n'}) == 'edited'
  assert env.source == faults.apply(FAULTY, line, 'found', 'n')


@pytest.mark.parametrize('new', ['<', ' <', '< ', ' < ', '   <  '])
async def test_spaces_around_the_new_text_are_not_doubled(new):
  env = an_env()
  assert await env.step('edit', {'at': '«3»', 'new': new}) == 'edited'
  assert env.source == ORIGINAL


async def test_an_edit_may_leave_nothing_and_be_written_over():
  env = an_env(ORIGINAL.replace('item < x', 'not item'))
  assert '«2»if «3»not «n4»item:' in await env.step('view', {})
  assert await env.step('edit', {'at': '«3»', 'new': ''}) == 'edited'
  assert '        if  item:' in env.source
  assert await env.step('edit', {'at': '«3»', 'new': ' '}) == 'nothing changed'
  assert await env.step('edit', {'at': '«3»', 'new': 'not '}) == 'edited'
  assert '        if not item:' in env.source


async def test_an_anchor_names_the_same_place_whatever_was_written_there_or_before():
  env = an_env()
  marks = anchors.ANCHOR.findall(VIEW)
  for at, new in (
    ('«1»', '0 if x < 1 and not x else 2'),
    ('«3»', 'is not'),
    ('«1»', 'None'),
    ('«n7»', 'found)'),  # no longer Python
    ('«n1»', ''),
    ('«4»', '='),
  ):
    assert await env.step('edit', {'at': at, 'new': new}) == 'edited'
    shown = await env.step('view', {})
    assert anchors.ANCHOR.findall(shown) == marks
    assert anchors.strip(shown) == env.source
  assert (
    env.source
    == """def count_below(a, x):
     = None
    for item in a:
        if item is not x:
            found = 1
    return found)"""
  )


async def test_undo_takes_back_the_edits_one_by_one_and_the_last_first():
  env, before = an_env(), [FAULTY]
  for at, new in (('3', '<'), ('5', '2'), ('3', '>'), ('3', '<='), ('5', '1')):
    assert await env.step('edit', {'at': at, 'new': new}) == 'edited'
    before.append(env.source)
  assert len(set(before)) == 5  # the last one made the code as it was at the start
  await env.step('edit', {'at': '«99»', 'new': '1'})
  while len(before) > 1:
    assert env.source == before.pop()
    assert await env.step('undo', {}) == 'undone'
  assert env.source == FAULTY
  assert await env.step('undo', {}) == 'nothing to undo'
  assert await env.step('view', {}) == VIEW


def test_the_edit_tool_takes_the_anchor_before_the_text():
  (edit,) = [tool for tool in repair.TOOLS if tool.name == 'edit']
  assert list(edit.parameters.items()) == [('at', 'str'), ('new', 'str')]
  assert not any(tool.parameters for tool in repair.TOOLS if tool is not edit)


async def test_a_practice_task_has_no_tests_no_outcome_and_asks_no_grader():
  env = repair.RepairEnv(practice_on(ORIGINAL), repair.Verifier(Untouched()))
  assert await env.step('test', {}) == 'no tests'
  assert await env.step('edit', {'at': '«3»', 'new': ' <= '}) == 'edited'
  assert await env.step('test', {}) == 'no tests'
  assert await env.step('submit', {}) == 'submitted'
  outcome = await env.verify()
  assert outcome.value is None and 'practise' in outcome.reason


async def test_infrastructure_fault_is_no_outcome(graders):
  (task,), _ = await repair.verify([a_task(FAULTY)], graders)
  env = repair.RepairEnv(task, repair.Verifier(Broken()))
  outcome = await env.verify()
  assert outcome.value is None and 'worker died twice' in outcome.reason
  with pytest.raises(grader.GraderError):
    await env.step('test', {})


def test_task_that_was_not_verified_makes_no_episode():
  with pytest.raises(ValueError, match='pass it to verify first'):
    repair.RepairEnv(a_task(FAULTY), repair.Verifier(Broken()))


def test_only_view_and_test_may_run_side_by_side():
  assert {t.name: t.writes for t in repair.TOOLS} == {
    'view': False,
    'edit': True,
    'undo': True,
    'test': False,
    'submit': True,
  }


# Kept verdicts.


def a_check(source=ORIGINAL, cases=('([], 0)',)):
  return grader.Check(MODULE, FUNCTION, source, cases)


async def test_equal_checks_run_once_and_different_ones_do_not_mix():
  graders = Scripted('ok 1', 'ok 2', 'ok 3')
  verifier = repair.Verifier(graders)
  same = await asyncio.gather(*(verifier.run(a_check()) for _ in range(4)))
  assert same == [('ok 1',)] * 4
  assert await verifier.run(a_check(FAULTY)) == ('ok 2',)
  assert await verifier.run(a_check(cases=('([], 1)',))) == ('ok 3',)
  assert await verifier.run(a_check()) == ('ok 1',)
  assert (graders.calls, verifier.hits, verifier.misses) == (3, 4, 3)


@pytest.mark.parametrize('verdict', ['timeout', 'died'])
async def test_timeouts_are_not_kept(verdict):
  verifier = repair.Verifier(Scripted(verdict, 'ok 1'))
  assert await verifier.run(a_check()) == (verdict,)
  assert await verifier.run(a_check()) == ('ok 1',)


async def test_failures_of_the_grader_are_not_kept():
  broken = Broken(Scripted('ok 1'))
  verifier = repair.Verifier(broken)
  with pytest.raises(grader.GraderError):
    await verifier.run(a_check())
  broken._names = ()
  assert await verifier.run(a_check()) == ('ok 1',)


async def test_what_is_kept_is_bounded():
  graders = Scripted('ok 1')
  verifier = repair.Verifier(graders, capacity=1)
  for source in (ORIGINAL, FAULTY, ORIGINAL):
    await verifier.run(a_check(source))
  assert graders.calls == 3


async def test_cancelled_waiter_does_not_cancel_the_check_of_others():
  verifier = repair.Verifier(Scripted('ok 1'))
  first = asyncio.create_task(verifier.run(a_check()))
  second = asyncio.create_task(verifier.run(a_check()))
  await asyncio.sleep(0)
  first.cancel()
  assert await second == ('ok 1',)


# The build.


@pytest.fixture
def small_catalogue(monkeypatch):
  names = (
    'bisect.insort_left',
    'bisect.insort_right',
    'pydoc.cram',
    'operator.indexOf',
  )
  entries = {name: functions.catalogue()[name] for name in names}
  monkeypatch.setattr(functions, 'catalogue', lambda: entries)


async def test_build_gives_the_same_sound_table_twice(graders, small_catalogue):
  ask = {'per_function': 3, 'heldout': 0.3, 'seed': 1}
  rows, report = await build.build(graders, **ask)
  again, _ = await build.build(graders, **ask)
  assert rows == again
  assert report.accepted == len(rows) > 6
  assert sum(sum(kinds.values()) for kinds in report.kinds.values()) == len(rows)
  assert {r.split for r in rows} == {'train', 'heldout'}
  assert len({r.split for r in rows if r.module == 'bisect'}) == 1


async def test_build_rejects_and_counts_a_verdict_that_wavers(small_catalogue):
  rows, report = await build.build(
    Scripted('ok 1', 'ok 2'), per_function=3, heldout=0.3, seed=1
  )
  assert rows == []
  assert report.rejected_functions == {'the original wavers': 4}
