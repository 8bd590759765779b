"""The scripted agents in the repair environment, with a grader that compares texts."""

import asyncio
import collections
import dataclasses
import itertools
import keyword
import random
import re

import numpy as np
import pytest

from swe17 import config, types
from swe17.agent import chat, episode, scripted, tokenizer, tools
from swe17.env import faults, library, repair

TOK = tokenizer.load()
SOURCE = """\
def bisect_left(a, x, lo=0, hi=None):
    if lo < 0:
        raise ValueError('lo must be non-negative')
    if hi is None:
        hi = len(a)
    while lo < hi:
        mid = (lo + hi) // 2
        if a[mid] < x:
            lo = mid + 1
        else:
            hi = mid
    return lo"""
FAULT = faults.candidates(SOURCE)[-3]
TASK = types.Task(
  't/1',
  'toy',
  'train',
  't',
  repair.prompt('bisect_left'),
  {
    'module': 'bisect',
    'function': 'bisect_left',
    'original': SOURCE,
    'source': faults.apply(SOURCE, FAULT.line, FAULT.old, FAULT.new),
    'visible': ['(1,)'] * 6,
    'hidden': ['(2,)'] * 8,
    'expected_visible': ['ok'] * 6,
    'expected_hidden': ['ok'] * 8,
  },
)


class Comparing:
  """A verifier that passes the original's text and fails half the cases of others."""

  def __init__(self, hopeless: bool = False):
    self.hopeless = hopeless

  async def run(self, check):
    good = check.source == SOURCE and not self.hopeless
    return tuple('ok' if good or i % 2 else 'no' for i in range(len(check.cases)))


# Room for all turns of an agent that tests and undoes everything.
ROOMY = config.Agent(max_context=512)


async def attempt(agent, member, hopeless=False, cfg=ROOMY):
  return await episode.run(
    task=TASK,
    env=repair.RepairEnv(TASK, Comparing(hopeless)),
    generate=agent,
    tokenizer=TOK,
    cfg=cfg,
    sampling=types.Sampling(),
    seed=3,
    group_id='0-a',
    member=member,
  )


def agent_of(style, seed=0):
  return scripted.Scripted(TOK, random.Random(seed), style)


def turns_of(done: types.Episode) -> list[list[tools.Call]]:
  messages = chat.messages(TOK, done.segments[0].token_T.tolist())
  parsed = [tools.parse(text) for role, text in messages if role == 'assistant']
  return [list(turn.calls) for turn in parsed]


async def test_careful_agent_tests_undoes_and_never_repeats_until_it_passes():
  solved = 0
  for member in range(20):
    done = await attempt(agent_of(scripted.CAREFUL), member)
    assert done.malformed == 0
    turns = turns_of(done)
    assert [call.name for call in turns[0]] == ['view']
    edits = []
    for i, turn in enumerate(turns[1:]):
      names = [call.name for call in turn]
      if names == ['submit']:
        assert done.solved
      else:
        assert names == ['undo'] * (i > 0) + ['edit', 'test']
        edits.append(tuple(turn[-2].arguments.values()))
    assert len(edits) == len(set(edits)) == done.tests
    assert done.submitted == done.solved
    solved += done.solved
  assert solved >= 15  # 13 distinct tries of 14 edits


async def test_careful_agent_uses_all_its_turns_within_the_context():
  for member in range(5):
    done = await attempt(agent_of(scripted.CAREFUL), member, hopeless=True)
    assert done.outcome.reason == 'not submitted: turn limit'
    assert (done.turns, done.tests) == (14, 13)


async def test_a_thought_names_the_kind_of_fault_that_the_edit_takes_back():
  source = TASK.payload['source']
  kinds = {
    faults.apply(source, fault.line, fault.old, fault.new): fault.kind
    for fault in faults.candidates(source)
  }
  done = await attempt(agent_of(scripted.CAREFUL), 0, hopeless=True)
  thoughts = []
  for role, text in chat.messages(TOK, done.segments[0].token_T.tolist()):
    parsed = tools.parse(text)
    for call in parsed.calls if role == 'assistant' else ():
      if call.name == 'edit':
        edit = call.arguments
        edited = faults.apply(source, edit['line'], edit['old'], edit['new'])
        thoughts.append((parsed.thinking, scripted.SUSPECT[kinds[edited]]))
  assert len(thoughts) == 13
  assert all(thought == kind for thought, kind in thoughts)
  assert len(set(thoughts)) >= 3
  assert done.thinking_tokens == 1 + 13


def test_names_and_dropped_lines_are_never_suspected():
  assert set(scripted.SUSPECT) == set(faults.KINDS) - {'wrong_name', 'dropped_line'}
  assert all(len(TOK.encode(word)) == 1 for word in scripted.SUSPECT.values())
  found = set()
  for source in [SOURCE, *itertools.islice(library.functions(), 150)]:
    for (line, old, new), kind in scripted._edits(TOK, source):
      assert kind in scripted.SUSPECT
      assert names(old) == names(new), (line, old, new)
      assert faults.apply(source, line, old, new) != source
      found.add(kind)
  assert found == set(scripted.SUSPECT)


def names(text: str) -> list[str]:
  """The words of an edit's text that are no keywords."""
  words = re.findall(r'[A-Za-z_]\w*', text)
  return sorted(word for word in words if not keyword.iskeyword(word))


async def test_clumsy_agent_solves_some_and_far_from_all():
  agent, cfg = agent_of(scripted.CLUMSY), config.Agent()
  dones = [await attempt(agent, m, cfg=cfg) for m in range(200)]
  share = sum(done.solved for done in dones) / len(dones)
  assert 0.02 < share < 0.4
  untested = [done for done in dones if done.submitted and not done.tests]
  assert 0.04 < len(untested) / len(dones) < 0.2  # of the first edits, 10 %
  assert all(done.malformed == 0 for done in dones)


def test_the_styles_are_clumsy_where_learning_can_help():
  clumsy = scripted.CLUMSY
  assert (clumsy.test, clumsy.undo, clumsy.persist) == (0.9, 0.4, 0.95)
  assert (clumsy.think, clumsy.retry_same, clumsy.practice) == (0.95, 0.2, 0)
  assert (scripted.PRACTICE.practice, scripted.PRACTICE.persist) == (2, 0.9)


async def test_practice_edits_and_undoes_and_never_tests_or_ends_with_an_edit():
  counts = collections.Counter()
  for member in range(20):
    done = await attempt(agent_of(scripted.PRACTICE), member)
    view, *turns = turns_of(done)
    assert [call.name for call in view] == ['view']
    for turn in turns:
      said = ' '.join(call.name for call in turn)
      assert said in ('edit undo edit undo', 'submit')
      counts[said] += 1
    assert (done.tests, done.malformed) == (0, 0)
    assert not done.solved  # the fault is as it was
  assert 0.05 < counts['submit'] / counts.total() < 0.2


@pytest.mark.parametrize('room, edits', [(64, 2), (33, 2), (19, 1), (8, 0)])
async def test_practice_leaves_out_the_edits_that_do_not_fit_a_turn(room, edits):
  style = dataclasses.replace(scripted.PRACTICE, persist=1.0)
  ids = chat.open_prompt(TOK, 'x') + [*chat.call(TOK, 'view'), TOK.end]
  ids += chat.tool_results(TOK, [repair.view(SOURCE)])
  for seed in range(5):
    got = await agent_of(style, seed)(request(ids, room))
    turn = tools.parse(TOK.decode(got.token_T.tolist()[:-1]))
    called = [call.name for call in turn.calls]
    assert called == (['edit', 'undo'] * edits or ['submit'])
    assert got.finish == 'stop' and not any(call.error for call in turn.calls)


async def test_episodes_are_the_same_alone_and_side_by_side():
  agent = agent_of(scripted.CLUMSY, 5)
  beside = await asyncio.gather(*(attempt(agent, member) for member in range(8)))
  for member in (7, 2):
    alone = await attempt(agent_of(scripted.CLUMSY, 5), member)
    ids = alone.segments[0].token_T.tolist()
    assert ids == beside[member].segments[0].token_T.tolist()
  assert len({done.segments[0].token_T.size for done in beside}) > 1


@pytest.mark.parametrize('room', [1, 5, 9])
async def test_a_turn_that_does_not_fit_is_cut_not_dropped(room):
  agent = agent_of(scripted.CAREFUL)
  ids = chat.open_prompt(TOK, 'x') + [*chat.call(TOK, 'view'), TOK.end]
  ids += chat.tool_results(TOK, [repair.view(SOURCE)])
  whole = await agent(request(ids, 64))
  cut = await agent(request(ids, room))
  assert cut.token_T.tolist() == whole.token_T.tolist()[:room]
  assert (whole.finish, cut.finish) == ('stop', 'length')


def request(ids: list[int], max_new: int) -> types.GenerateRequest:
  return types.GenerateRequest(
    session='s',
    token_T=np.asarray(ids, np.int32),
    max_new=max_new,
    stop_ids=(TOK.end,),
    sampling=types.Sampling(),
    key=(1, 2),
  )
