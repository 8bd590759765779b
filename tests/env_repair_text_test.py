"""repair_text: edits that quote, and the scripted agent that makes them."""

import dataclasses
import random

import pytest

from swe17 import config, types
from swe17.agent import episode, formats, scripted
from swe17.env.repair import repair, repair_text
from tests.agent_scripted_test import Comparing, SOURCE, TASK

FMT = formats.Own(formats.tokenizer.load())
FAULTY = TASK.payload['source']


def env(hopeless: bool = False) -> repair_text.TextEnv:
  return repair_text.TextEnv(TASK, Comparing(hopeless))


async def edit(made: repair_text.TextEnv, old: str, new: str) -> str:
  return await made.step('edit', {'old': old, 'new': new})


async def test_the_first_message_shows_the_code():
  made = env()
  assert f'```python\n{FAULTY}\n```' in await made.reset()
  assert await made.step('view', {}) == FAULTY


@pytest.mark.parametrize(
  ('old', 'said'),
  [
    ('lo', 'old stands there 7 times, want once'),
    ('nowhere', 'old stands there 0 times, want once'),
    ('', 'old stands there 0 times, want once'),
    ('return lo', 'nothing changed'),
  ],
)
async def test_only_text_that_stands_there_once_is_replaced(old, said):
  made = env()
  assert FAULTY.count('lo') == 7
  assert await edit(made, old, old) == said
  assert made.source == FAULTY


async def test_an_edit_is_taken_back_whole_and_reset_begins_anew():
  made = env()
  assert await edit(made, 'while lo < hi:', 'while lo <= hi:\n      pass') == 'edited'
  assert 'pass' in await made.step('view', {})
  assert await edit(made, 'pass', '...') == 'edited'
  assert [await made.step('undo', {}) for _ in range(3)] == [
    'undone',
    'undone',
    'nothing to undo',
  ]
  assert made.source == FAULTY
  await edit(made, 'pass', '...')
  assert await made.step('submit', {}) == 'submitted'
  assert await edit(made, 'return lo', 'return 0') == 'already submitted'
  assert FAULTY in await made.reset()
  assert not made.done and made.source == FAULTY


async def test_code_that_grows_too_long_is_refused():
  made = env()
  long = 'return lo + ' + '1' * repair.MAX_CHARACTERS
  assert await edit(made, 'return lo', long) == 'the code would be too long'
  assert made.source == FAULTY


async def test_what_is_scored_is_the_text_as_edited():
  made = env()
  assert (await made.verify()).value == 0.0
  assert await edit(made, FAULTY, SOURCE) == 'edited'
  assert await made.step('test', {}) == 'passed 6 of 6'
  assert (await made.verify()).value == 1.0


def test_text_edits_are_the_tries_at_anchors_quoted_as_shortly_as_possible():
  source = 'def f(a, b):\n    if a < b:\n        return a + 1\n    return a + 2'
  found = scripted.text_edits(source)
  assert ('<', '<=', 'comparison') in found
  assert ('1', '2', 'off_by_one') in found
  assert ('if', 'if not', 'negated_condition') in found
  # Two additions: what tells them apart is quoted too.
  quoted = [old for old, new, kind in found if kind == 'operator']
  assert all('+' in old and len(old) > 1 for old in quoted)
  assert len(found) == len(scripted.edits(source))
  for old, new, _ in found:
    assert source.count(old) == 1 and old != new
    assert '\n' not in old + new


def test_text_edits_undo_the_fault_as_edits_at_anchors_do():
  fixed = [FAULTY.replace(old, new) for old, new, _ in scripted.text_edits(FAULTY)]
  assert SOURCE in fixed


async def test_a_careful_agent_tries_until_the_tests_pass():
  agent = scripted.Scripted(FMT, random.Random(0), scripted.CAREFUL)
  made = env()
  done = await episode.run(
    task=dataclasses.replace(TASK, prompt=await made.reset()),
    env=made,
    generate=agent,
    fmt=FMT,
    cfg=config.Agent(max_turns=60, max_context=8192, max_new_tokens=256),
    sampling=types.Sampling(),
    seed=3,
    group_id='0-a',
    member=0,
  )
  assert done.outcome.value == 1.0 and done.submitted
  assert done.tests == done.turns - 1 > 1  # the last one submits
