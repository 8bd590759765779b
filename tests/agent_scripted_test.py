"""The scripted agents in the repair environment, with a grader that compares texts."""

import ast
import asyncio
import collections
import dataclasses
import itertools
import keyword
import random
import re

import numpy as np
import pytest
import xxhash

from swe17 import config, types
from swe17.agent import chat, episode, formats, scripted, tokenizer, tools
from swe17.env.repair import anchors, faults, library, repair

TOK = tokenizer.load()
FMT = formats.Own(TOK)
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
VIEW = anchors.view(anchors.split(SOURCE), anchors.names(anchors.split(SOURCE)))
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
ROOMY = config.Agent(max_turns=14, max_context=512, max_new_tokens=64)
ENDLESS = dataclasses.replace(ROOMY, max_turns=60, max_context=2048)
CAREFUL = scripted.Style(think=1.0, test=1.0, undo=1.0, persist=1.0, retry_same=0.0)
CLUMSY = scripted.Style(think=0.9, test=0.9, undo=0.4, persist=0.9, retry_same=0.2)
PRACTICE = scripted.Style(think=0.9, persist=0.9, practice=2)
EDITS = scripted.edits(TASK.payload['source'])  # one of them takes the fault back


async def attempt(agent, member, hopeless=False, cfg=ROOMY):
  return await episode.run(
    task=TASK,
    env=repair.RepairEnv(TASK, Comparing(hopeless)),
    generate=agent,
    fmt=FMT,
    cfg=cfg,
    sampling=types.Sampling(),
    seed=3,
    group_id='0-a',
    member=member,
  )


def agent_of(style, seed=0):
  return scripted.Scripted(FMT, random.Random(seed), style)


def turns_of(done: types.Episode) -> list[list[tools.Call]]:
  messages = chat.messages(TOK, done.segments[0].token_T.tolist())
  parsed = [tools.parse(text) for role, text in messages if role == 'assistant']
  return [list(turn.calls) for turn in parsed]


def edited(source: str, at: str, new: str) -> str:
  """What the edit tool makes of a source."""
  pieces = anchors.split(source)
  pieces[anchors.names(pieces)[at.strip('«»')]] = new.strip(' ')
  return ''.join(pieces)


async def test_careful_agent_tests_undoes_and_never_repeats_until_it_passes():
  tried = set()
  for member in range(20):
    done = await attempt(agent_of(CAREFUL), member, cfg=ENDLESS)
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
    assert done.submitted and done.solved  # the edit is among those it tries
    tried |= set(edits)
  assert tried <= {edit[:2] for edit in EDITS}
  assert len(tried) > len(EDITS) / 2


async def test_careful_agent_uses_all_its_turns_within_the_context():
  for member in range(5):
    done = await attempt(agent_of(CAREFUL), member, hopeless=True)
    assert done.outcome.reason == 'not submitted: turn limit'
    assert (done.turns, done.tests) == (14, 13)


async def test_an_agent_that_has_tried_everything_submits():
  done = await attempt(agent_of(CAREFUL), 0, hopeless=True, cfg=ENDLESS)
  assert len(EDITS) == done.tests
  tried = [c.arguments for t in turns_of(done) for c in t if c.name == 'edit']
  assert sorted(tuple(a.values()) for a in tried) == sorted(e[:2] for e in EDITS)
  assert done.submitted and not done.solved


@pytest.mark.parametrize(
  ('changes', 'turns'),
  [
    ({'persist': 0.0}, ['view', 'edit test', 'submit']),
    ({'test': 0.0}, ['view', 'edit', 'submit']),
    ({'undo': 0.0}, ['view'] + ['edit test'] * 13),
    ({'undo': 1.0}, ['view', 'edit test'] + ['undo edit test'] * 12),
    ({'practice': 3}, ['view'] + ['edit undo edit undo edit undo'] * 13),
  ],
)
async def test_a_style_says_what_the_agent_does_after_an_edit(changes, turns):
  agent = agent_of(dataclasses.replace(CAREFUL, **changes))
  done = await attempt(
    agent, 0, hopeless=True, cfg=dataclasses.replace(ROOMY, max_context=1024)
  )
  assert [' '.join(call.name for call in turn) for turn in turns_of(done)] == turns
  assert done.malformed == 0


async def test_an_agent_that_does_not_think_says_nothing_and_does_the_rest():
  agent = agent_of(dataclasses.replace(CAREFUL, think=0.0))
  done = await attempt(agent, 0, cfg=ENDLESS)
  assert (done.thinking_tokens, done.solved) == (0, True)


@pytest.mark.parametrize(('retry_same', 'repeats'), [(0.0, False), (1.0, True)])
async def test_only_an_agent_that_retries_draws_an_edit_again(retry_same, repeats):
  agent = agent_of(dataclasses.replace(CAREFUL, retry_same=retry_same))
  done = await attempt(agent, 0, hopeless=True, cfg=ENDLESS)
  calls = [call for turn in turns_of(done) for call in turn if call.name == 'edit']
  tried = collections.Counter(tuple(call.arguments.values()) for call in calls)
  assert (max(tried.values()) > 1) is repeats


def kinds_of(source: str) -> dict[str, str]:
  """Syntax of every faulty version of a source -> the kind of the fault."""
  return {
    syntax(faults.apply(source, fault.line, fault.old, fault.new)): fault.kind
    for fault in faults.candidates(source)
  }


def syntax(source: str) -> str:
  return ast.dump(ast.parse(source))


async def test_a_thought_names_the_kind_of_fault_that_the_edit_takes_back():
  source = TASK.payload['source']
  kinds = kinds_of(source)
  done = await attempt(agent_of(CAREFUL), 0, hopeless=True)
  thoughts = []
  for role, text in chat.messages(TOK, done.segments[0].token_T.tolist()):
    parsed = tools.parse(text)
    for call in parsed.calls if role == 'assistant' else ():
      if call.name == 'edit':
        now = syntax(edited(source, **call.arguments))
        thoughts.append((parsed.thinking, scripted.SUSPECT.get(kinds.get(now, ''))))
  assert len(thoughts) == 13
  assert all(thought in scripted.SUSPECT.values() for thought, _ in thoughts)
  named = [pair for pair in thoughts if pair[1]]  # the rest is no fault of a task
  assert all(thought == kind for thought, kind in named)
  assert len(named) >= 6 and len(set(named)) >= 3
  assert done.thinking_tokens == 1 + 13


def test_names_and_dropped_lines_are_never_suspected_and_every_edit_parses():
  assert set(scripted.SUSPECT) == set(faults.KINDS) - {'wrong_name', 'dropped_line'}
  assert all(len(TOK.encode(word)) == 1 for word in scripted.SUSPECT.values())
  found = set()
  for source in [SOURCE, *itertools.islice(library.functions(), 150)]:
    pieces, kinds = anchors.split(source), kinds_of(source)
    places = anchors.names(pieces)
    tried = scripted.edits(source)
    assert len({edit[:2] for edit in tried}) == len(tried)
    for at, new, kind in tried:
      old = pieces[places[at.strip('«»')]]
      assert kind in scripted.SUSPECT and not at.startswith('«n')
      assert names(old) == names(new), (at, old, new)
      assert new.strip(' ') != old
      now = syntax(edited(source, at, new))
      assert now != syntax(source)
      assert kinds.get(now, kind) == kind, (at, old, new)
      found.add(kind)
  assert found == set(scripted.SUSPECT)


def names(text: str) -> list[str]:
  """The words of an edit's text that are no keywords."""
  words = re.findall(r'[A-Za-z_]\w*', re.sub(r"'[^']*'", '', text))
  return sorted(word for word in words if not keyword.iskeyword(word))


def test_every_shipped_fault_in_a_condition_or_an_operator_is_one_the_agent_tries():
  """And most of those in numbers and texts: not `-1` made `0`, nor ` + 1` put in."""
  count: collections.Counter = collections.Counter()
  for task in repair.read(config.Tasks(kinds='', train=0, heldout=0))[0]:
    kind, want = task.payload['kind'], syntax(task.payload['original'])
    if kind in scripted.SUSPECT:
      source = task.payload['source']
      tries = [edit for edit in scripted.edits(source) if edit[2] == kind]
      found = any(syntax(edited(source, at, new)) == want for at, new, _ in tries)
      count[kind, found] += 1
  for kind in ('comparison', 'operator', 'negated_condition'):
    assert count[kind, True] and not count[kind, False]
  for kind in ('off_by_one', 'wrong_constant'):
    assert count[kind, True] > 2 * count[kind, False]


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('<', [' <= ', ' > ']),
    ('not in', [' in ']),
    ('if', ['if not ']),
    ('not', ['']),
    ('or', [' and ']),
    ('+=', [' -= ']),
    ('%', [' // ']),
    ('0', ['1']),
    ('10', ['9', '11']),
    ('True', ['False']),
    ("'('", ["')'"]),
    ('None', []),
    ('lo', []),
    ('find', []),
    ('0x1f', []),
    ('1.5', []),
    ("'abc'", []),
    ('pass', []),
  ],
)
def test_alternatives_of_a_place(text, want):
  assert [new for new, _ in scripted.alternatives(text)] == want


async def test_clumsy_agent_solves_some_and_far_from_all():
  agent = agent_of(CLUMSY)
  dones = [await attempt(agent, m) for m in range(200)]
  share = sum(done.solved for done in dones) / len(dones)
  assert 0.02 < share < 0.5
  untested = [done for done in dones if done.submitted and not done.tests]
  assert 0.04 < len(untested) / len(dones) < 0.2  # of the first edits, 10 %
  assert all(done.malformed == 0 for done in dones)


def test_the_shipped_styles_are_clumsy_careful_and_practising():
  assert scripted.CAREFUL == CAREFUL
  clumsy, practice = scripted.CLUMSY, scripted.PRACTICE
  # Where learning can help: each of these is done sometimes, and not always.
  assert all(0 < p < 1 for p in (clumsy.test, clumsy.undo, clumsy.persist))
  assert clumsy.practice == 0 and practice.practice > 0
  assert 0 < practice.persist < 1


async def test_the_code_is_what_view_said_first_and_no_other_answer():
  """An edit names places, so the agent need not follow what it wrote there."""
  agent, look = agent_of(CAREFUL), [*chat.call(TOK, 'view'), TOK.end]
  ids = chat.open_prompt(TOK, 'x') + look
  late = ids + chat.tool_results(TOK, ["timed out (it's been 5 s"])
  again = await agent(request(late, 64))
  assert TOK.decode(again.token_T.tolist()).endswith(
    TOK.decode([*chat.call(TOK, 'view'), TOK.end])
  )
  late += again.token_T.tolist() + chat.tool_results(TOK, [VIEW])
  changed = VIEW.replace('«2» <', '«2» >').replace('«14»1', '«14»5')
  twice = late + look + chat.tool_results(TOK, [changed])
  for context in (late, twice):
    turns = [await agent_of(CAREFUL, i)(request(context, 64)) for i in range(40)]
    parsed = [tools.parse(TOK.decode(turn.token_T.tolist()[:-1])) for turn in turns]
    drawn = {tuple(turn.calls[0].arguments.values()) for turn in parsed}
    assert drawn <= {edit[:2] for edit in scripted.edits(SOURCE)}
    assert len(drawn) > 10


async def test_practice_edits_and_undoes_and_never_tests_or_ends_with_an_edit():
  counts = collections.Counter()
  for member in range(20):
    done = await attempt(agent_of(PRACTICE), member)
    view, *turns = turns_of(done)
    assert [call.name for call in view] == ['view']
    for turn in turns:
      said = ' '.join(call.name for call in turn)
      assert said in ('edit undo edit undo', 'submit')
      counts[said] += 1
    assert (done.tests, done.malformed) == (0, 0)
    assert not done.solved  # the fault is as it was
  assert 0.05 < counts['submit'] / counts.total() < 0.2


@pytest.mark.parametrize('room, edits', [(64, 2), (16, 2), (15, 1), (10, 1), (9, 0)])
async def test_practice_leaves_out_the_edits_that_do_not_fit_a_turn(room, edits):
  # A thought is 3 tokens, an edit 5 here and its undo 1, the end of the turn 1.
  style = scripted.Style(think=1.0, persist=1.0, practice=2)
  ids = chat.open_prompt(TOK, 'x') + [*chat.call(TOK, 'view'), TOK.end]
  ids += chat.tool_results(TOK, ['def f(a, b):\n    return «n1»a«1» < «n2»b'])
  for seed in range(5):
    got = await agent_of(style, seed)(request(ids, room))
    turn = tools.parse(TOK.decode(got.token_T.tolist()[:-1]))
    called = [call.name for call in turn.calls]
    assert called == (['edit', 'undo'] * edits or ['submit'])
    assert got.finish == 'stop' and not any(call.error for call in turn.calls)


async def test_episodes_are_the_same_alone_and_side_by_side():
  agent = agent_of(CLUMSY, 5)
  beside = await asyncio.gather(*(attempt(agent, member) for member in range(8)))
  for member in (7, 2):
    alone = await attempt(agent_of(CLUMSY, 5), member)
    ids = alone.segments[0].token_T.tolist()
    assert ids == beside[member].segments[0].token_T.tolist()
  assert len({done.segments[0].token_T.size for done in beside}) > 1


@pytest.mark.parametrize('room', [1, 5, 9])
async def test_a_turn_that_does_not_fit_is_cut_not_dropped(room):
  agent = agent_of(CAREFUL)
  ids = chat.open_prompt(TOK, 'x') + [*chat.call(TOK, 'view'), TOK.end]
  ids += chat.tool_results(TOK, [VIEW])
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


async def test_episodes_have_the_ids_that_they_had_before_there_were_other_formats():
  """Recorded once: a change of our format must be meant, and shows here."""
  digest, count = xxhash.xxh3_64(), 0
  for style in (CAREFUL, CLUMSY, PRACTICE, scripted.CLUMSY):
    for member in range(6):
      done = await attempt(agent_of(style, seed=member), member)
      for s in done.segments:
        digest.update(s.token_T.astype('<i4').tobytes())
        digest.update(s.mask_T.astype(np.uint8).tobytes())
        digest.update(s.turn_T.astype('<i4').tobytes())
        count += s.token_T.size
      ended = (done.outcome, done.turns, done.calls, done.thinking_tokens, done.cut)
      digest.update(repr(ended).encode())
  assert (digest.hexdigest(), count) == ('b2694e0878fb3639', 7698)
