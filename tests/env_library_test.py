"""Practice functions: what they may not resemble, and that nothing judges them."""

import random

import pytest

from swe17 import config, types
from swe17.agent import episode, formats, scripted, tools
from swe17.env import splits
from swe17.env.repair import faults, library, repair

MEDIAN = """\
def median_low(data):
    data = sorted(data)
    n = len(data)
    if n == 0:
        raise ValueError('no median for empty data')
    if n % 2 == 1:
        return data[n // 2]
    else:
        return data[n // 2 - 1]"""
# Another name, other variables, another constant: a near-copy.
COPY = MEDIAN.replace('data', 'rows').replace('median_low', 'lower').replace('0', '1')
COUNT = """\
def count_below(a, x):
    found = 0
    for item in a:
        if item < x:
            found += 1
    return found"""
DULL = """\
def greet(name):
    text = name.title()
    return text"""


def heldout(function: str, original: str) -> types.Task:
  payload = {'function': function, 'original': original}
  return types.Task(f'm.{function}/0', repair.FAMILY, 'heldout', function, '', payload)


@pytest.fixture
def few(monkeypatch):
  """A library of four functions."""
  sources = [MEDIAN, COPY, COUNT, DULL, COUNT]
  monkeypatch.setattr(library, 'functions', lambda: iter(sources))


@pytest.fixture(scope='module')
def real() -> tuple[list[types.Task], list[types.Task]]:
  """The shipped held-out tasks, and what is left to practise on."""
  tasks = repair.load(config.Tasks(train=1))
  held = [task for task in tasks if task.split == 'heldout']
  return held, library.practice(held)


def sources(tasks: list[types.Task]) -> list[str]:
  return sorted(task.payload['source'] for task in tasks)


def test_every_function_with_enough_edits_is_practised_on_once(few):
  assert sources(library.practice([])) == sorted([MEDIAN, COPY, COUNT])
  assert len(faults.candidates(DULL)) < 3


def test_a_held_out_function_and_its_near_copies_are_left_out(few):
  assert splits.alike([COPY, COUNT], [MEDIAN]) == {COPY}
  assert sources(library.practice([heldout('other', MEDIAN)])) == [COUNT]


def test_a_function_with_a_held_out_name_is_left_out_whatever_it_does(few):
  assert sources(library.practice([heldout('median_low', COUNT)])) == sorted([COPY])


def test_no_practice_task_resembles_a_shipped_held_out_task(real):
  held, practice = real
  assert len(held) > 100 and len(practice) > 300
  names = {task.unit.rsplit('.', 1)[1] for task in held}
  assert names == {task.payload['function'] for task in held}
  assert not names & {task.unit for task in practice}
  # Counted anew: none clusters with a held-out original, alone with all of those.
  originals = {f'held/{task.unit}': task.payload['original'] for task in held}
  for task in random.Random(0).sample(practice, 40):
    groups = splits.clusters({**originals, task.id: task.payload['source']})
    assert [task.id] in groups


def test_practice_tasks_say_nothing_of_what_is_right(real):
  _, practice = real
  assert len({task.id for task in practice}) == len(practice)
  for task in practice:
    assert (task.family, task.split) == ('repair_functions', 'train')
    assert task.prompt == f'Practise on {task.unit}.'
    payload = dict(task.payload)
    assert payload.pop('source').startswith(f'def {task.unit}(')
    assert set(payload) == {'visible', 'hidden', 'expected_visible', 'expected_hidden'}
    assert not any(payload.values())


class Untouched:
  """Graders that nobody may ask."""

  async def run(self, check):
    raise AssertionError(f'a grader was asked for {check.function}')


async def test_practice_episodes_edit_and_undo_and_have_no_outcome(few):
  fmt, tasks = formats.load(), library.practice([])
  edits = 0
  for member in range(24):
    task = tasks[member % len(tasks)]
    env = repair.RepairEnv(task, repair.Verifier(Untouched()))
    done = await episode.run(
      task=task,
      env=env,
      generate=scripted.Scripted(fmt, random.Random(1), scripted.PRACTICE),
      fmt=fmt,
      cfg=config.Agent(),
      sampling=types.Sampling(),
      seed=0,
      group_id='practice',
      member=member,
    )
    messages = fmt.messages(done.segments[0].token_T.tolist())
    turns = [tools.parse(text) for role, text in messages if role == 'assistant']
    results = [text for role, text in messages if role == 'tool']
    assert [call.name for call in turns[0].calls] == ['view']
    for turn in turns[1:]:
      names = [call.name for call in turn.calls]
      assert names in (['edit', 'undo'] * 2, ['edit', 'undo'], ['submit'])
      edits += names.count('edit')
    assert set(results[1:]) <= {'edited', 'undone'}
    assert env.source == task.payload['source']
    # A turn that is full holds one edit less, and no call that is cut.
    assert (done.tests, done.malformed) == (0, 0)
    if done.submitted:
      assert done.outcome.value is None and done.status == 'invalid'
      assert 'practise' in done.outcome.reason
  assert edits > 50
