"""The pipeline on families that are made up: what it bars, counts and remembers."""

import asyncio
import json
import pathlib
import py_compile

import pytest

from experiments.bench import tasks as bench_tasks
from swe17 import types
from swe17.env.audit import (
  contamination,
  ledger,
  look,
  pipeline,
  report,
  soundness,
  subject,
)


def task(name: str, split: str = 'train', unit: str = '') -> types.Task:
  return types.Task(name, 'made_up', split, unit or name, f'Repair {name}.', {})


class MadeUp:
  """A family whose verifier solves what is in `solved`, and wavers where it is told."""

  family = 'made_up'

  def __init__(self, solved=('gold', 'other'), wavering=(), flags=('a sign (x)',)):
    self.solved, self.wavering, self.flags = set(solved), set(wavering), flags
    self.judged = 0

  async def judge(self, task, solution):
    self.judged += 1
    wavers = solution in self.wavering and self.judged % 2
    if solution == 'broken':
      return types.Outcome(None, 'the sandbox died')
    return types.Outcome(float(solution in self.solved and not wavers))

  def gold(self, task):
    return 'gold'

  def empty(self, task):
    return 'empty'

  def right(self, task, rng):
    return [subject.Tried('other', 'other'), subject.Tried('third', 'third')]

  async def wrong(self, task, rng):
    return [subject.Tried(f'half: {i}', f'half{i}') for i in range(3)]

  def players(self, task):
    return [('edit', {})], ()

  def attempts(self, task):
    return [subject.Attempt('exits', (('edit', {}),)), subject.Attempt('prints', ())]

  async def play(self, task, calls):
    value = 0.0 if self.flags else 1.0
    return subject.Played(types.Outcome(value), float(bool(calls)), self.flags, ())

  def images(self, tasks):
    return {f'image/{task.unit}': [task] for task in tasks}

  async def leaks(self, tasks):
    return {f'image/{t.unit}': ['source: /x.py'] * (t.id == 'b') for t in tasks}

  def text(self, task):
    return f'def {task.id}(): pass'


def run(about, tasks, path, **plan):
  async def whole():
    answers = ledger.Ledger(path)
    try:
      said = []
      return await pipeline.run(
        about, tasks, answers, pipeline.Plan(**plan), said.append
      )
    finally:
      answers.close()

  return asyncio.run(whole())


def test_rates_count_what_the_verifier_got_wrong(tmp_path):
  about = MadeUp(solved=('gold', 'other', 'half1'))
  found = run(about, [task('a'), task('b')], tmp_path / 'l.jsonl', exploited=1)
  assert found['accept_wrong'] == pytest.approx(1 / 3)
  assert found['reject_right'] == pytest.approx(1 / 2)
  assert found['accept_wrong_labels'] == {'half': [2, 6]}
  assert found['accepted_wrong'] == [
    {'task': name, 'label': 'half: 1'} for name in ('a', 'b')
  ]
  assert found['barred'] == {}
  assert (found['images'], found['leaks']) == (2, {'image/b': ['source: /x.py']})
  assert (found['gold_played'], found['null_played']) == (2, 2)
  assert found['exploits_tried'] == 2 and found['exploits_scored'] == []
  assert [row['exploit'] for row in found['exploits_solved_alone']] == ['exits']


@pytest.mark.parametrize(
  ('changes', 'reason'),
  [
    ({'solved': ()}, 'the gold does not solve it'),
    ({'solved': ('gold', 'empty')}, 'nothing solves it'),
    ({'wavering': ('gold',)}, 'the gold wavers: 2 of 5 runs solved'),
    ({'solved': ('gold', 'empty'), 'wavering': ('empty',)}, 'nothing wavers'),
  ],
)
def test_a_task_that_wavers_or_tells_nothing_apart_is_barred(tmp_path, changes, reason):
  found = run(MadeUp(**changes), [task('a')], tmp_path / 'l.jsonl', exploited=1)
  assert found['barred']['a'].startswith(reason)
  assert found['accept_wrong'] is None  # nothing was tried on it


def test_a_verifier_that_fails_is_no_reason_to_say_wrong(tmp_path):
  class Broken(MadeUp):
    async def wrong(self, task, rng):
      return [subject.Tried('half', 'broken')]

  found = run(Broken(), [task('a')], tmp_path / 'l.jsonl', exploited=1)
  assert (found['accept_wrong'], found['accept_wrong_missing']) == (None, 1)


def test_an_attempt_that_scores_or_is_not_seen_is_told(tmp_path):
  found = run(MadeUp(flags=()), [task('a')], tmp_path / 'l.jsonl', exploited=1)
  assert len(found['exploits_scored']) == len(found['exploits_unflagged']) == 2
  row = bench_tasks.row([found], 1.0, {'sandbox_ms': 20.0})
  assert {s.split(':')[0] for s in bench_tasks.failures(row)} >= {
    'exploits_scored', 'exploits_unflagged', 'reject_right',
  }  # fmt: skip


def test_a_stopped_run_goes_on_and_gives_the_same(tmp_path):
  tasks = [task(name) for name in 'abcd']
  path = tmp_path / 'l.jsonl'
  whole = run(MadeUp(), tasks, tmp_path / 'other.jsonl', exploited=2)
  run(MadeUp(), tasks[:2], path, exploited=2)
  with path.open('a') as file:
    file.write('{"key": "sound/c", "va')  # killed in mid-line
  about = MadeUp()
  found = run(about, tasks, path, exploited=2)
  each = 2 * soundness.REPEATS + 5
  assert about.judged == 2 * each  # of the two that were not there
  for name in ('barred', 'accept_wrong', 'reject_right', 'exploits_tried', 'leaks'):
    assert found[name] == whole[name]
  assert found['verifications'] == 4 * each and found['judged'] == 2 * each


def test_a_ledger_with_a_line_that_is_none_is_refused(tmp_path):
  path = tmp_path / 'l.jsonl'
  path.write_text('{"key": "a", "value": 1}\n[]\n')
  with pytest.raises(ValueError, match='line 2'):
    ledger.Ledger(path)


def test_a_sample_is_seeded_and_of_as_many_units_as_there_are():
  tasks = [task(f'{u}{i}', unit=u) for u in 'abc' for i in range(5)]
  some = pipeline.drawn(tasks, 4, 's')
  assert some == pipeline.drawn(tasks, 4, 's') != pipeline.drawn(tasks, 4, 't')
  assert {t.unit for t in some} == {'a', 'b', 'c'} and len(some) == 4
  assert pipeline.drawn(tasks, 0, 's') == tasks


LONG = """
def weigh(items, limit):
  total, kept = 0, []
  for item in sorted(items, key=len):
    if total + len(item) > limit:
      break
    total += len(item)
    kept.append(item)
  return kept, total
"""


def test_copies_are_found_whatever_their_names_and_on_whichever_side():
  other = LONG.replace('total', 'sum_of_all').replace('kept', 'chosen')
  texts = {'a': LONG, 'b': LONG, 'c': other, 'd': 'def f(x):\n  return x', 'e': LONG}
  sides = {'a': 'train', 'b': 'train', 'c': 'heldout', 'd': 'heldout', 'e': 'heldout'}
  tasks = [task(n, side, 'u' if n in 'ae' else n) for n, side in sides.items()]
  found = contamination.check(tasks, texts)
  assert found.duplicates == {'b': 'a'}
  assert set(found.contaminated) == {'c', 'e'}
  assert found.units == ('u',)


def test_tasks_that_were_found_wanting_are_left_out():
  tasks = [task(name) for name in 'abc']
  found = {'barred': {'a': 'wavers'}, 'duplicates': {'b': 'a'}, 'contaminated': {}}
  kept, barred = pipeline.sound(tasks, found)
  assert [t.id for t in kept] == ['c']
  assert barred == {'a': 'wavers', 'b': 'the same as a'}


def test_the_report_shows_counts_reasons_and_what_went_wrong(tmp_path):
  found = run(MadeUp(flags=()), [task('a')], tmp_path / 'l.jsonl', exploited=1)
  found |= {'rejected': {'not caught': 7}, 'barred': {'x': '<b>wavers</b>'}}
  found['examples'] = [{'id': 'a', 'split': 'train', 'prompt': 'Repair <it>.'}]
  html = report.render([json.loads(json.dumps(found))], 'the command')
  for text in ('not caught', '&lt;b&gt;wavers', 'Repair &lt;it&gt;.', 'the command'):
    assert text in html
  assert (
    'src="data:image/png;base64,' in html and 'http' not in html.split('</style>')[1]
  )


def test_look_finds_every_kind_of_leak_and_nothing_else(tmp_path):
  gold = 'def half(x: int) -> int:\n  """Doc."""\n  return x // 2\n'
  needles = {
    'defs': {'half': [s for _, s in look.shapes(gold)]},
    'codes': {'half': [s for name, s in look.codes(gold) if name == 'half']},
    'distributions': ['Some-Package'],
    'below': [str(tmp_path)],
  }
  assert look.through(needles) == []
  (tmp_path / 'fine.py').write_text('def half(x):\n  return x / 2\n')
  assert look.through(needles) == []
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a/copy.py').write_text(
    'class A:\n  @cached\n  def half(x): return x // 2'
  )
  (tmp_path / '.git').mkdir()
  (tmp_path / 'some_package-1.2.dist-info').mkdir()
  (tmp_path / 'some-package-1.2.tar.gz').touch()
  (tmp_path / 'fix.patch').touch()
  (tmp_path / '__pycache__').mkdir()
  (tmp_path / '__pycache__/gold.py').write_text(gold)
  compiled = str(tmp_path / '__pycache__/x.pyc')
  py_compile.compile(str(tmp_path / '__pycache__/gold.py'), compiled, doraise=True)
  (tmp_path / '__pycache__/gold.py').unlink()
  kinds = [each.split(':')[0] for each in look.through(needles)]
  assert sorted(kinds) == [
    'archive', 'bytecode', 'history', 'installed', 'left over', 'source',
  ]  # fmt: skip


def test_shapes_are_of_what_a_function_does():
  plain = dict(look.shapes('def f(a, b):\n  return a + b'))
  same = (
    'import x\n@x.y\ndef f(a: int, b: int = 1) -> int:\n  "Adds."\n\n  return (a + b)'
  )
  other = 'def f(a, b):\n  return b + a'
  assert dict(look.shapes(other)) != plain
  assert dict(look.shapes(same.replace(' = 1', ''))) == plain
  assert list(look.shapes('def f(:')) == []
  method = '  def f(a, b):\n    return a + b\n'  # as it stands in its class
  assert dict(look.shapes(method)) == plain
  assert 'f' in dict(look.codes(method)) and list(look.codes('def f(:')) == []


def test_the_file_that_looks_imports_the_standard_library_only():
  text = pathlib.Path(look.__file__).read_text()
  assert 'swe17' not in text and 'yield from' not in text.split('"""')[1]
