"""The scripted searchers: what they ask, how they answer, and that skill pays."""

import dataclasses
import random

import pytest

from swe17 import config, types
from swe17.agent import episode, formats, searcher, tokenizer
from swe17.env.retrieval import questions, retrieval, score, search, symbols, trees
from swe17.rollout import scripts

FMT = formats.Own(tokenizer.load(tokenizer.PATH.parent / 'tokenizer_search.json'))
AGENT = config.Agent(max_turns=4, max_context=512, max_new_tokens=96)

# x is called by three, each of which one other calls.
FILES = {
  'a.py': 'def xaxis(n):\n  return n\n\ndef one(n):\n  return xaxis(n)\n',
  'b.py': 'def two(n):\n  return xaxis(n)\n\ndef three(n):\n  return xaxis(n)\n',
  'c.py': 'def high(n):\n  return one(n)\n\ndef higher(n):\n  return two(n)\n',
  'd.py': 'def highest(n):\n  return three(n)\n\ndef other(n):\n  """xaxis"""\n',
}
SHELF = search.Shelf(trees.Tree(FILES), search.SMALL)
TASK = retrieval.task_of(
  retrieval.SMALL,
  'toy/second/0',
  'train',
  'toy',
  retrieval.Asked(SHELF, questions.ask(SHELF.index, 'second', 'a.py:xaxis')),
)


async def play(
  style: searcher.Style,
  member: int = 0,
  task: types.Task = TASK,
  agent: config.Agent = AGENT,
) -> types.Episode:
  return await episode.run(
    task=task,
    env=retrieval.Host().env(task),
    generate=searcher.Searcher(FMT, random.Random(member), style),
    fmt=FMT,
    cfg=agent,
    sampling=types.Sampling(),
    seed=0,
    group_id='g',
    member=member,
  )


def turns(done: types.Episode) -> list[list[tuple[str, dict]]]:
  (segment,) = done.segments
  found = FMT.messages(segment.token_T.tolist())
  return [
    [(call.name, dict(call.arguments)) for call in FMT.read(text).calls]
    for role, text in found
    if role == 'assistant'
  ]


async def test_the_careful_one_searches_side_by_side_and_finds_all():
  done = await play(searcher.CAREFUL)
  grep = [[c[1].get('pattern') for c in turn] for turn in turns(done)]
  assert grep[:2] == [['xaxis'], ['one', 'two', 'three', 'other']]
  assert done.outcome.value == 1.0 and done.solved
  assert (done.turns, done.calls, done.duplicate_calls) == (3, 6, 0)


async def test_one_call_a_turn_cannot_look_everywhere():
  slow = dataclasses.replace(searcher.CAREFUL, parallel=0.0)
  done = await play(slow)
  assert done.turns == 4 and done.calls == 4
  assert 0 < (done.outcome.value or 0) < 1
  late = dataclasses.replace(slow, deadline=0.0)
  assert (await play(late)).outcome == types.Outcome(0.0, 'not submitted: turn limit')


async def test_asking_again_is_counted_as_a_duplicate():
  again = dataclasses.replace(searcher.CAREFUL, parallel=0.0, repeat=1.0)
  done = await play(again)
  assert done.duplicate_calls == 2  # once in each turn after the first


async def test_strength_is_score():
  mean = {}
  for name, style in searcher.STRENGTHS.items():
    values = [(await play(style, member)).outcome.value for member in range(30)]
    mean[name] = sum(v for v in values if v is not None) / len(values)
  assert mean['weak'] < mean['clumsy'] < mean['careful'] == 1.0


async def test_members_draw_their_own_episodes_and_replay_alike():
  some = [await play(searcher.CLUMSY, member) for member in range(12)]
  assert len({str(turns(e)) for e in some}) > 4
  assert turns(await play(searcher.CLUMSY, 3)) == turns(some[3])


async def test_what_does_not_fit_in_a_turn_is_left_out():
  tight = dataclasses.replace(AGENT, max_new_tokens=12)
  done = await play(searcher.CAREFUL, agent=tight)
  assert done.malformed == 0 and done.submitted


async def test_outlines_are_looked_at_where_grep_does_not_place_its_hits():
  asked = questions.ask(SHELF.index, 'callers', 'a.py:xaxis')
  task = retrieval.task_of(
    retrieval.SMALL, 't', 'train', 'toy', retrieval.Asked(SHELF, asked)
  )
  env = retrieval.RetrievalEnv(task, search.Shelf(SHELF.tree, search.WHOLE))
  done = await episode.run(
    task=task,
    env=env,
    generate=searcher.Searcher(FMT, random.Random(0), searcher.CAREFUL),
    fmt=FMT,
    cfg=dataclasses.replace(AGENT, max_context=4000),
    sampling=types.Sampling(),
    seed=0,
    group_id='g',
    member=0,
  )
  names = [[c[0] for c in turn] for turn in turns(done)]
  assert names == [['grep'], ['list'] * 3, ['submit']]
  assert (done.outcome.value or 0) > 0.7  # a mention in a comment is taken for a call


def test_frames_of_calls_are_single_tokens():
  sizes = {
    'grep': len(FMT.call('grep', pattern='', path='')),
    'list': len(FMT.call('list', path='a.py')),
    'submit': len(FMT.call('submit', answer='a.py:1-2, h.py:12-99')),
  }
  assert sizes == {'grep': 3, 'list': 3, 'submit': 2 + 3 + 1 + 3}
  for call in (
    FMT.call('read', path='b.py', first=3, last=7),
    FMT.call('glob', pattern='*'),
  ):
    parsed = FMT.parse([*call, *FMT.stop_ids]).calls
    assert len(parsed) == 1 and not parsed[0].error


def test_what_a_tree_says_never_becomes_markup():
  said = '<tool_call>{"name": "submit", "arguments": {"answer": "'
  ids = FMT.tok.encode(said)
  assert FMT.tok.decode(ids) == said and min(ids) >= 9


async def test_practice_keeps_the_code_and_changes_every_name(monkeypatch):
  rows = [
    r
    for r in retrieval.read_table(retrieval.TABLES[retrieval.SMALL])
    if r.package == 'toolz'
  ][:4]
  assert {r.split for r in rows} == {'train'}
  monkeypatch.setattr(retrieval, 'read_table', lambda path: rows)
  monkeypatch.setattr(retrieval, '_RENAMED', 2)
  tasks = retrieval.practice([])
  assert len(tasks) >= 6 and len({t.id for t in tasks}) == len(tasks)
  for task in tasks:
    assert (await play(searcher.CAREFUL, task=task)).outcome.value is not None
    index = symbols.index(trees.Tree(task.payload['files']))
    assert len({d.leaf for d in index.defs if d.kind != 'class'}) >= 8
    assert score.text(retrieval.truth(task))
  asked = [t.prompt.split('`')[1] for t in tasks]
  assert len(set(asked)) > len(rows)  # a row is asked about under several names
  held = [dataclasses.replace(tasks[0], split='heldout')]
  assert retrieval.practice(held) == []  # never on a package that is held out


def test_a_family_without_a_script_is_refused_with_what_to_do():
  with pytest.raises(ValueError, match=r'imitation\.steps=0'):
    scripts.get('walrus')
