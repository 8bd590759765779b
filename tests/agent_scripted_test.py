"""The scripted agents in the repair environment, with a grader that compares texts."""

import asyncio
import random

import numpy as np
import pytest

from swe17 import config, types
from swe17.agent import chat, episode, scripted, tokenizer, tools
from swe17.env import faults, repair

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


async def attempt(agent, member, hopeless=False):
  return await episode.run(
    task=TASK,
    env=repair.RepairEnv(TASK, Comparing(hopeless)),
    generate=agent,
    tokenizer=TOK,
    cfg=config.Agent(),
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
  assert solved >= 5  # up to 13 distinct tries


async def test_careful_agent_uses_all_its_turns_within_the_context():
  for member in range(5):
    done = await attempt(agent_of(scripted.CAREFUL), member, hopeless=True)
    assert done.outcome.reason == 'not submitted: turn limit'
    assert (done.turns, done.tests) == (14, 13)


async def test_a_thought_names_the_line_of_the_edit():
  done = await attempt(agent_of(scripted.CAREFUL), 0, hopeless=True)
  thoughts = []
  for role, text in chat.messages(TOK, done.segments[0].token_T.tolist()):
    parsed = tools.parse(text)
    for call in parsed.calls if role == 'assistant' else ():
      if call.name == 'edit':
        thoughts.append((parsed.thinking, f'line {call.arguments["line"]}'))
  assert len(thoughts) == 13
  assert all(thought == line for thought, line in thoughts)
  assert done.thinking_tokens == 1 + 2 * 13


async def test_clumsy_agent_solves_some_and_far_from_all():
  dones = [await attempt(agent_of(scripted.CLUMSY), m) for m in range(200)]
  share = sum(done.solved for done in dones) / len(dones)
  assert 0.02 < share < 0.4
  untested = [done for done in dones if done.submitted and not done.tests]
  assert 0.2 < len(untested) / len(dones) < 0.7
  assert all(done.malformed == 0 for done in dones)


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
