"""The retrieval families: tables that regenerate, answers that cannot be faked."""

import asyncio
import collections
import dataclasses
import json
import pathlib
import re
import threading

import pytest

from swe17 import config, types
from swe17.agent import tools
from swe17.env.retrieval import build as build_retrieval
from swe17.env.retrieval import retrieval, score, search, trees

# Small packages on both sides of the split, so that few files are read here.
PACKAGES = ('tinydb', 'funcy', 'voluptuous', 'textdistance', 'sqlparse', 'jwt')


@pytest.fixture(scope='module', params=[retrieval.FAMILY, retrieval.SMALL])
def family(request) -> str:
  return request.param


@pytest.fixture(scope='module')
def tasks(family, tmp_path_factory) -> list[types.Task]:
  rows = retrieval.read_table(retrieval.TABLES[family])
  kept = [row for row in rows if row.package in PACKAGES]
  path = tmp_path_factory.mktemp('rows') / 'table.jsonl'
  path.write_text(''.join(json.dumps(dataclasses.asdict(r)) + '\n' for r in kept))
  found, set_aside = retrieval.read(config.Tasks(family=family, table=str(path)))
  assert set_aside == {} and len(found) == len(kept) >= 60
  return list(found)


def rows(family: str) -> list[retrieval.Row]:
  return retrieval.read_table(retrieval.TABLES[family])


async def outcome(task: types.Task, answer: str) -> float:
  env = retrieval.Host().env(task)
  assert await env.reset() == task.prompt
  await env.step('submit', {'answer': answer})
  value = (await env.verify()).value
  assert value is not None
  return value


def test_hundreds_of_tasks_and_no_package_on_both_sides(family):
  found = rows(family)
  assert len(found) >= {retrieval.FAMILY: 800, retrieval.SMALL: 400}[family]
  assert len({row.id for row in found}) == len({row.sha for row in found}) == len(found)
  sides = collections.defaultdict(set)
  for row in found:
    sides[row.split].add(row.package)
  assert not sides['train'] & sides['heldout']
  assert sides['train'] | sides['heldout'] <= set(trees.PINS)
  assert len(sides['heldout']) >= 5


def test_no_question_is_answered_by_one_grep(family):
  found = rows(family)
  assert max(row.one_grep for row in found) <= build_retrieval.ONE_GREP
  assert sum(row.one_grep for row in found) / len(found) < 0.3


async def test_gold_scores_one_and_nothing_scores_nothing(tasks):
  for task in tasks:
    assert await outcome(task, score.text(retrieval.truth(task))) == 1.0
    assert await outcome(task, '') == 0.0
  sound, aside = await retrieval.Host().verify(tasks)
  assert sound == tasks and aside == {}


def exploits(task: types.Task, shelf: search.Shelf) -> dict[str, str]:
  """Answers that know nothing of the truth, or swamp it."""
  every = {path: ((1, len(lines)),) for path, lines in shelf.tree.lines.items()}
  names = re.findall(r'`(?:\w+\.)*(\w+)`', task.prompt)
  hits = {
    path: ((1, len(lines)),)
    for path, lines in shelf.tree.lines.items()
    if any(names[0] in line for line in lines)
  }
  most = score.MAX_RANGES
  return {
    'every line': ', '.join(score.text(every).split(', ')[:most]),
    'endless lines': ', '.join(f'{path}:1-999999999' for path in list(every)[:most]),
    'first lines': ', '.join(f'{path}:1' for path in list(every)[:most]),
    'files of one grep': ', '.join(score.text(hits).split(', ')[:most]),
    'outside': '/etc/passwd:1-9, ../../x.py:1-9',
    'the prompt': 'a.py:1-1',
  }


async def test_exploits_score_low_on_every_task_looked_at(tasks):
  sums = collections.Counter()
  for task in tasks:
    shelf = retrieval.Host().env(task)._shelf
    for name, answer in exploits(task, shelf).items():
      sums[name] += await outcome(task, answer)
  means = {name: total / len(tasks) for name, total in sums.items()}
  assert means.pop('files of one grep') < 0.4
  assert max(means.values()) < 0.25, means
  assert means['outside'] == 0.0


async def test_a_padded_gold_scores_less(tasks):
  for task in tasks[:40]:
    gold = score.text(retrieval.truth(task))
    path = next(iter(retrieval.truth(task)))
    assert await outcome(task, f'{gold}, {gold}') == 1.0
    assert await outcome(task, f'{gold}, {path}:1-99999') < 0.8
    assert await outcome(task, f'{gold}, no/such.py:1-9') < 1.0


async def test_an_answer_that_cannot_be_read_is_told_so_and_may_be_mended(tasks):
  env = retrieval.Host().env(tasks[0])
  await env.reset()
  said = await env.step('submit', {'answer': 'somewhere in the lexer'})
  assert said.startswith('not submitted: ') and not env.done
  assert (await env.verify()).value == 0.0
  gold = score.text(retrieval.truth(tasks[0]))
  assert await env.step('submit', {'answer': gold}) == 'submitted'
  assert env.done and await env.step('list', {'path': ''}) == 'already submitted'
  assert (await env.verify()).value == 1.0
  await env.reset()
  assert not env.done and (await env.verify()).value == 0.0


async def test_eight_slow_calls_of_a_turn_run_side_by_side(tasks, monkeypatch):
  together = threading.Barrier(8)

  def slow(shelf, pattern, path):
    del shelf, path
    together.wait(60)  # passed by eight that run at once, or by none
    return pattern

  monkeypatch.setattr(search, 'grep', slow)
  env = retrieval.Host().env(tasks[0])
  await env.reset()
  calls = [
    tools.Call(f'c{i}', 'grep', {'pattern': f'x{i}', 'path': ''}) for i in range(8)
  ]
  # asyncio's own executor has cores + 4 threads: as the rollout process, set enough.
  from concurrent import futures

  asyncio.get_running_loop().set_default_executor(futures.ThreadPoolExecutor(24))
  results = await tools.execute(calls, env, max_calls=8)
  assert [r.text for r in results] == [f'x{i}' for i in range(8)]


def test_a_tree_that_is_another_one_sets_its_rows_aside(tmp_path):
  found = [row for row in rows(retrieval.FAMILY) if row.package == 'tinydb']
  other = [row for row in rows(retrieval.FAMILY) if row.package == 'sqlparse'][:2]
  bad = dataclasses.replace(found[0], sha='0' * 16, id='bad')
  gone = dataclasses.replace(found[0], subject='tinydb/x.py:y', id='gone')
  path = tmp_path / 'table.jsonl'
  lines = [json.dumps(dataclasses.asdict(r)) for r in (bad, gone, *found, *other)]
  path.write_text('\n'.join(lines))
  got, aside = retrieval.read(config.Tasks(family=retrieval.FAMILY, table=str(path)))
  assert len(got) == len(found) + 2
  assert aside['bad'] == 'another tinydb than when the table was built'
  assert aside['gone'] == 'defined more than once, or not at all'
  with pytest.raises(ValueError, match='want 99'):
    retrieval.read(config.Tasks(family=retrieval.FAMILY, table=str(path), train=99))


def test_a_package_that_is_missing_says_how_to_get_it(monkeypatch):
  monkeypatch.setattr(trees.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(trees.TreeError, match=r'pip install "swe17\[retrieval\]"'):
    trees.load.__wrapped__('tinydb')
  with pytest.raises(trees.TreeError, match="got 'os'"):
    trees.load.__wrapped__('os')


def test_kinds_choose_rows_and_unknown_ones_are_refused(tmp_path):
  asked = config.Tasks(
    family=retrieval.FAMILY, kinds='overrides, default', train=30, heldout=10
  )
  tasks, _ = retrieval.read(asked)
  assert len(tasks) == 40
  assert {task.payload['kind'] for task in tasks} == {'overrides', 'default'}
  with pytest.raises(ValueError, match="got 'walrus'"):
    retrieval.read(config.Tasks(family=retrieval.FAMILY, kinds='walrus'))


def test_pins_and_the_extra_name_the_same_versions():
  text = (pathlib.Path(__file__).parent.parent / 'setup.py').read_text()
  pinned = re.findall(r"^  '([\w.-]+)==([\w.]+)',$", text, re.M)
  assert dict(pinned) == {p.distribution: p.version for p in trees.PINS.values()}
  licences = {part for p in trees.PINS.values() for part in p.licence.split(' OR ')}
  assert licences <= {'MIT', 'BSD-3-Clause', 'BSD-2-Clause', 'Apache-2.0'}


def test_a_build_is_reproducible_and_gives_reasons(monkeypatch):
  few = {name: trees.PINS[name] for name in ('tinydb', 'voluptuous', 'jwt')}
  monkeypatch.setattr(build_retrieval.trees, 'PINS', few)
  settings = {'per_kind': 3, 'heldout': 0.4, 'seed': 5}
  built, report = build_retrieval.build(retrieval.FAMILY, **settings)
  assert build_retrieval.build(retrieval.FAMILY, **settings)[0] == built
  assert len(built) == sum(sum(k.values()) for k in report.tasks.values()) > 10
  assert report.packages == {'train': 2, 'heldout': 1}
  assert report.rejected['one grep answers it'] > 0
  assert report.shuffled_mean < 0.25 and report.everything_mean < 0.2
  other = build_retrieval.build(retrieval.FAMILY, **{**settings, 'seed': 6})[0]
  assert {r.sha for r in other} != {r.sha for r in built}
