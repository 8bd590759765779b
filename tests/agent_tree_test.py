"""The tree of what an agent was served: exact contexts, every drawn token once."""

import collections
import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from swe17 import types
from swe17.agent import record, told, tree

SYSTEM = {'role': 'system', 'content': 'fix it'}
USER = {'role': 'user', 'content': 'go'}
TOOLS = [{'type': 'function', 'function': {'name': 'run', 'parameters': {}}}]
END, OPEN, CALL = 1, 2, 3


class Fmt:
  """Many ids have one letter, so that what is encoded again comes back as others."""

  vocab_size = 200

  def conversation(self, messages, tools):
    ids = [9] * len(tools)
    for message in messages:
      ids += self._ids(message)
    return [*ids, OPEN]

  def after(self, turn, messages, tools=()):
    ids = [] if turn[-1] == END else [END]
    for message in messages:
      assert message['role'] != 'assistant', 'encoded again'
      ids += self._ids(message)
    return [*ids, OPEN]

  def _ids(self, message):
    text = json.dumps(told.said(message), sort_keys=True)
    return [4, *(10 + ord(c) % 26 for c in text), END]

  def raw(self, text):
    return [30 + ord(c) % 7 for c in text]

  def thinking(self, turn):
    return sum(token == 10 for token in turn)

  def message(self, turn):
    text = ''.join(chr(97 + token % 3) for token in turn if token >= 10)
    said = {'role': 'assistant', 'content': text or None}
    if CALL in turn:
      function = {'name': 'run', 'arguments': json.dumps({'at': text, 'n': len(turn)})}
      call = {'id': f'c{turn[0]}', 'type': 'function', 'function': function}
      said['tool_calls'] = [call]
    return said


class Engine:
  """Draws at random; the log-probability of a token is its number in the run."""

  def __init__(self, seed: int, routes: bool = False):
    self.rng, self.count, self.routes = np.random.default_rng(seed), 0, routes
    self.served: list[tuple[list[int], types.GenerateResult]] = []

  def draw(self, place: tree.Place, size: int | None = None) -> types.GenerateResult:
    n = size or int(self.rng.integers(1, 6))
    token_T = self.rng.integers(10, 16, n).astype(np.int32)
    if self.rng.random() < 0.3:
      token_T[0] = CALL
    stops = self.rng.random() < 0.7
    if stops:
      token_T[-1] = END
    logp_T = -np.arange(self.count, self.count + n, dtype=np.float32)
    self.count += n
    size_T = self.rng.integers(0, 3, n)
    kept_T = np.concatenate([[0], np.cumsum(size_T)]).astype(np.int32)
    ids = np.concatenate(
      [np.r_[t, 90][:s] for t, s in zip(token_T, size_T, strict=True)]
    )
    rows, start = None, 0
    if self.routes:
      start = int(self.rng.integers(0, place.routed + 1))
      rows = np.full((place.length + n - 1 - start, 1, 1), self.count % 250, np.uint8)
    return types.GenerateResult(
      token_T,
      logp_T,
      self.rng.random(n).astype(np.float32),
      self.rng.integers(0, 9, n).astype(np.int32),
      types.KeptSets(kept_T, ids.astype(np.int32)),
      'stop' if stops else 'length',
      topk_bound=int(self.rng.integers(0, 2)),
      routes_RNK=rows,
      routes_start=start,
    )


def at(grown: tree.Tree, messages, tools) -> tree.Place:
  return grown.place(grown.seek(messages, tools))


def serve(grown: tree.Tree, engine: Engine, messages, tools=(), n=1, size=None):
  """Answers one request whole; the messages that the agent was told."""
  place = at(grown, messages, tools)
  answers = []
  for draw in grown.ask(place, n):
    result = engine.draw(place, size)
    answers.append(Fmt().message(result.token_T.tolist()))
    grown.serve(draw, result, answers[-1], 1.0)
  return answers


def segments(grown: tree.Tree) -> list[types.Segment]:
  log = record.Record(Fmt(), lambda: 0.0)
  grown.record(log)
  return list(log.segments())


def grown_by(*steps):
  """A tree, its engine, and the history after (new messages, ...) turn by turn."""
  grown, engine, history = tree.Tree(Fmt()), Engine(0), [SYSTEM, USER]
  for new in steps:
    history = [*history, *new]
    history += serve(grown, engine, history)
  return grown, engine, history


def result(text: str) -> dict:
  return {'role': 'tool', 'tool_call_id': 'c1', 'content': text}


# --- places ---------------------------------------------------------------------


def test_a_next_turn_is_asked_with_the_ids_as_they_were_drawn():
  grown, _, history = grown_by([])
  place = at(grown, [*history, result('ok')], ())
  (turn,) = grown.turns
  drawn = turn.result.token_T.tolist()
  want = Fmt().conversation([SYSTEM, USER], ()) + drawn
  want += Fmt().after(drawn, [result('ok')])
  assert place.context_T.tolist() == want
  assert Fmt().conversation([*history, result('ok')], ()) != want


@pytest.mark.parametrize(
  'change',
  [
    lambda m: {key: m[key] for key in reversed(m)},
    lambda m: {**m, 'refusal': None, 'annotations': [], 'audio': None},
    lambda m: {**m, 'content': m['content'] or ''},
    lambda m: {**m, 'content': [{'type': 'text', 'text': m['content'] or ''}]},
    lambda m: {**m, 'reasoning_content': 'hm', 'extra': {'cost': 1}},
  ],
)
def test_what_clients_do_to_a_message_without_changing_it_is_no_rewrite(change):
  grown, _, history = grown_by([], [result('a')])
  echoed = [change(m) if m['role'] == 'assistant' else m for m in history]
  at(grown, [*echoed, result('b')], ())
  assert len(grown.roots) == 1


def test_a_call_may_come_back_with_its_arguments_written_otherwise():
  grown, told = tree.Tree(Fmt()), Fmt().message([CALL, 12, END])
  place = at(grown, [USER], TOOLS)
  (draw,) = grown.ask(place)
  drawn = Engine(0).draw(place)
  grown.serve(draw, drawn, told, 1.0)
  call = told['tool_calls'][0]
  spaced = json.dumps(json.loads(call['function']['arguments']), indent=2)
  function = {'arguments': spaced, 'name': 'run'}
  same = {**told, 'tool_calls': [{'index': 0, 'id': call['id'], 'function': function}]}
  assert at(grown, [USER, same, result('a')], TOOLS).parent is grown.turns[0]
  for bad in (
    {**call, 'id': 'c9'},
    {**call, 'function': {**function, 'arguments': '{"at": "other"}'}},
    {**call, 'function': {**function, 'arguments': '{"at": '}},
    {**call, 'function': {**function, 'name': 'walk'}},
  ):
    edited = {**told, 'tool_calls': [bad]}
    assert at(grown, [USER, edited, result('a')], TOOLS).parent is None
  assert at(grown, [USER, {**told, 'tool_calls': []}, USER], TOOLS).parent is None


@pytest.mark.parametrize(
  'rewrite',
  [
    lambda h: [{**h[0], 'content': 'other'}, *h[1:]],
    lambda h: [*h[:2], {**h[2], 'content': 'aaaa'}, *h[3:]],
    lambda h: [*h[:3], result('other'), *h[4:]],
    lambda h: [h[0], *h[2:]],
    lambda h: [h[0], {'role': 'user', 'content': 'summary'}, *h[4:]],
    lambda h: [*h[:2], h[4], h[3], h[2], *h[5:]],
  ],
)
def test_a_rewritten_history_begins_a_root_of_its_own(rewrite):
  grown, engine, history = grown_by([], [result('a')])
  asked = [*rewrite(history), result('b')]
  place = at(grown, asked, ())
  assert place.parent is None
  assert place.context_T.tolist() == Fmt().conversation(asked, ())
  serve(grown, engine, asked)
  first, second = segments(grown)
  assert [first.mask_T.sum(), second.mask_T.sum()] == [
    sum(t.result.token_T.size for t in grown.turns[:2]),
    grown.turns[2].result.token_T.size,
  ]


def test_other_tools_begin_a_root_and_their_key_order_does_not():
  grown, engine = tree.Tree(Fmt()), Engine(0)
  told = serve(grown, engine, [USER], TOOLS)
  asked = [USER, *told, USER]
  turned = [dict(reversed(TOOLS[0].items()))]
  assert at(grown, asked, turned).parent is grown.turns[0]
  assert at(grown, asked, []).parent is None
  assert at(grown, asked, [*TOOLS, *TOOLS]).parent is None


def test_an_agent_that_drops_its_last_turns_branches_from_what_is_left():
  grown, _, history = grown_by([], [result('a')], [result('b')])
  place = at(grown, [*history[:3], result('other')], ())
  assert place.parent is grown.turns[0]
  assert at(grown, [*history[:5], USER], ()).parent is grown.turns[1]


def test_deep_nesting_is_refused_and_no_crash():
  deep: list = []
  for _ in range(100_000):
    deep = [deep]
  with pytest.raises(ValueError, match='nested too deeply'):
    at(tree.Tree(Fmt()), [{'role': 'user', 'content': deep}], ())


def complete(grown: tree.Tree, engine: Engine, text: str) -> str:
  place = grown.place(grown.seek_text(text))
  (draw,) = grown.ask(place)
  drawn = engine.draw(place)
  said = Fmt().message(drawn.token_T.tolist())['content'] or ''
  grown.serve(draw, drawn, {'role': 'assistant', 'content': said}, 1.0)
  return text + said


def test_a_text_that_goes_on_from_one_that_was_told_extends_its_ids():
  grown, engine = tree.Tree(Fmt()), Engine(1)
  first = complete(grown, engine, 'once')
  second = complete(grown, engine, first + ' more')
  place = grown.place(grown.seek_text(second))
  assert place.parent is grown.turns[1]
  want = [*Fmt().raw('once'), *grown.turns[0].result.token_T, *Fmt().raw(' more')]
  assert place.context_T.tolist() == [*want, *grown.turns[1].result.token_T]
  assert grown.place(grown.seek_text('two')).parent is None
  assert at(grown, [{'role': 'user', 'content': 'once'}], ()).parent is None
  assert sum(s.mask_T.sum() for s in segments(grown)) == engine.count


# --- draws and sessions ---------------------------------------------------------


def test_answers_to_one_place_have_names_of_their_own_whenever_they_are_asked():
  grown, engine = tree.Tree(Fmt()), Engine(0)
  place = at(grown, [USER], ())
  draws = grown.ask(place, 3)
  assert len({d.name for d in draws}) == 3
  assert len({d.session for d in draws}) == 3
  grown.serve(draws[1], engine.draw(place), {'content': 'a'}, 1.0)
  (fourth,) = grown.ask(place)
  assert fourth.name not in {d.name for d in draws}


def test_an_answer_that_nobody_got_is_drawn_again_under_its_name():
  """A client that gives up on long answers must not make them rare."""
  grown = tree.Tree(Fmt())
  place = at(grown, [USER], ())
  (first,) = grown.ask(place)
  grown.drop(first)
  (again,) = grown.ask(at(grown, [USER], ()))
  assert (again.name, again.session) == (first.name, first.session)
  assert grown.turns == []


def test_names_depend_on_the_context_and_not_on_what_ran_beside_it():
  one, other, engine = tree.Tree(Fmt()), tree.Tree(Fmt()), Engine(0)
  serve(other, engine, [SYSTEM, USER])
  names = [t.ask(at(t, [USER], ()))[0].name for t in (one, other)]
  assert names[0] == names[1]


def test_a_session_follows_a_branch_and_a_second_branch_has_its_own():
  grown, _, history = grown_by([], [result('a')], [result('b')])
  assert {t.session for t in grown.turns} == {0}
  (draw,) = grown.ask(at(grown, [*history[:3], result('other')], ()))
  assert draw.session == 1
  assert grown.sessions == 2


# --- what is trained ------------------------------------------------------------


def test_a_shared_trunk_is_trained_in_one_segment_and_masked_in_the_other():
  grown, engine, history = grown_by([], [result('a')])
  serve(grown, engine, [*history[:3], result('other')])
  first, second = segments(grown)
  sizes = [t.result.token_T.size for t in grown.turns]
  assert first.mask_T.sum() == sizes[0] + sizes[1]
  assert second.mask_T.sum() == sizes[2]
  shared = grown.turns[0].place.length + sizes[0]
  np.testing.assert_array_equal(first.token_T[:shared], second.token_T[:shared])
  assert not second.mask_T[:shared].any()
  assert set(second.turn_T[second.mask_T]) == {2}


def test_a_retried_request_leaves_out_the_answer_that_was_given_up():
  grown, engine = tree.Tree(Fmt()), Engine(0)
  serve(grown, engine, [USER])
  told = serve(grown, engine, [USER])
  serve(grown, engine, [USER, *told, USER])
  (segment,) = segments(grown)
  assert grown.replaced == 1
  drawn = [t.result.token_T.size for t in grown.turns]
  assert segment.mask_T.sum() == drawn[1] + drawn[2]
  assert set(segment.turn_T[segment.mask_T]) == {0, 1}


def test_an_answer_that_the_agent_went_on_from_is_trained_though_it_was_retried():
  grown, engine = tree.Tree(Fmt()), Engine(3)
  (first,) = serve(grown, engine, [USER], size=5)
  (second,) = serve(grown, engine, [USER], size=4)
  assert first != second
  serve(grown, engine, [USER, first, USER])
  assert grown.replaced == 0
  assert sum(s.mask_T.sum() for s in segments(grown)) == engine.count


def test_a_retry_that_is_never_answered_leaves_the_first_answer_trained():
  grown, engine = tree.Tree(Fmt()), Engine(0)
  serve(grown, engine, [USER])
  (draw,) = grown.ask(at(grown, [USER], ()))
  grown.drop(draw)
  assert grown.replaced == 0


def test_of_answers_that_read_the_same_the_last_is_the_one_gone_on_from():
  grown, engine = tree.Tree(Fmt()), Engine(0)
  place = at(grown, [USER], ())
  whole, cut = [engine.draw(place, 2), engine.draw(place, 1)]
  whole.token_T[:], cut.token_T[:] = [12, END], [12]
  assert Fmt().message([12, END]) == Fmt().message([12])
  for draw, drawn in zip(grown.ask(place, 2), (whole, cut), strict=True):
    grown.serve(draw, drawn, Fmt().message(drawn.token_T.tolist()), 1.0)
  after = at(grown, [USER, Fmt().message([12]), USER], ())
  assert after.parent is grown.turns[1]
  assert after.context_T[place.length : place.length + 2].tolist() == [12, END]


def test_answers_that_were_asked_together_are_all_trained():
  grown, engine = tree.Tree(Fmt()), Engine(0)
  serve(grown, engine, [USER], n=4)
  place = at(grown, [SYSTEM, USER], ())
  draws = [grown.ask(place)[0] for _ in range(3)]  # three requests at the same time
  for draw in draws:
    grown.serve(draw, engine.draw(place), {'content': 'x'}, 1.0)
  assert grown.replaced == 0
  assert sum(s.mask_T.sum() for s in segments(grown)) == engine.count


# --- any agent ------------------------------------------------------------------


class Agent:
  """Plays moves against a tree, and keeps its own account of them."""

  def __init__(self, seed: int, routes: bool):
    self.grown, self.engine = tree.Tree(Fmt()), Engine(seed, routes)
    self.histories: list[list[dict]] = [[SYSTEM, USER]]
    self.open: list[tuple[list, tree.Draw]] = []
    self.clock = itertools.count()
    # (asked, began, served at, context, result)
    self.account: list[tuple[str, int, int, list[int], types.GenerateResult]] = []
    self.began: dict[tree.Draw, int] = {}

  def ask(self, messages: list[dict], n: int) -> None:
    place = at(self.grown, messages, TOOLS)
    for draw in self.grown.ask(place, n):
      self.open.append((messages, draw))
      self.began[draw] = next(self.clock)

  def answer(self, i: int) -> None:
    messages, draw = self.open.pop(i % len(self.open))
    drawn = self.engine.draw(draw.place)
    told = Fmt().message(drawn.token_T.tolist())
    context = draw.place.context_T.tolist()
    self.grown.serve(draw, drawn, told, 0.5)
    asked = json.dumps([context, messages], sort_keys=True)
    self.account.append((asked, self.began[draw], next(self.clock), context, drawn))
    self.histories.append([*messages, told])

  def give_up(self, i: int) -> None:
    _, draw = self.open.pop(i % len(self.open))
    self.grown.drop(draw)

  def play(self, move: tuple[str, int, int, int]) -> None:
    kind, which, at, n = move
    history = self.histories[which % len(self.histories)]
    at = at % len(history)
    if kind == 'extend':
      self.ask([*history, result(f'r{at % 2}')], 1 + n % 2)
    elif kind == 'branch':
      self.ask([*history[: at + 1], {'role': 'user', 'content': f'u{n}'}], 1)
    elif kind == 'edit':
      edited = {**history[at], 'content': f'e{n}'}
      self.ask([*history[:at], edited, *history[at + 1 :], USER], 1)
    elif kind == 'drop':
      self.ask([*history[:at], *history[at + 1 :], result('d')], 1)
    elif kind == 'retry':
      while history[-1]['role'] == 'assistant':
        history = history[:-1]
      self.ask(history or [USER], n)
    elif kind == 'answer' and self.open:
      self.answer(at)
    elif kind == 'give_up' and self.open:
      self.give_up(at)

  def left_out(self) -> set[int]:
    """Which of the account were given up, found by going through all pairs."""
    out = set()
    for i, (asked, _, served, context, drawn) in enumerate(self.account):
      again = any(a == asked and b > served for a, b, _, _, _ in self.account)
      whole = [*context, *drawn.token_T.tolist()]
      went_on = any(
        c[: len(whole)] == whole and len(c) > len(whole) and self._parent(j) == i
        for j, (_, _, _, c, _) in enumerate(self.account)
      )
      if again and not went_on:
        out.add(i)
    return out

  def _parent(self, j: int) -> int | None:
    parent = self.grown.turns[j].place.parent
    return None if parent is None else parent.number


MOVES = st.lists(
  st.tuples(
    st.sampled_from(
      ['extend', 'extend', 'answer', 'answer', 'answer', 'branch', 'edit', 'drop']
      + ['retry', 'give_up']
    ),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(1, 4),
  ),
  max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(MOVES, st.integers(0, 9), st.booleans())
def test_every_drawn_token_is_trained_once_in_the_context_it_was_drawn_in(
  moves, seed, routes
):
  agent = Agent(seed, routes)
  agent.ask([SYSTEM, USER], 1)
  agent.answer(0)
  for move in moves:
    agent.play(move)
  log = record.Record(Fmt(), lambda: 0.0)
  agent.grown.record(log)
  out = agent.left_out()
  assert agent.grown.replaced == len(out)
  # What training on each branch alone would give: token by token, with its context.
  want: collections.Counter = collections.Counter()
  for i, (_, _, _, context, drawn) in enumerate(agent.account):
    if i in out:
      continue
    ids = [*context, *drawn.token_T.tolist()]
    for t in range(drawn.token_T.size):
      lo, hi = drawn.kept.offset_T1[t : t + 2]
      want[
        tuple(ids[: len(context) + t + 1]),
        float(drawn.logp_T[t]),
        float(drawn.entropy_T[t]),
        int(drawn.version_T[t]),
        tuple(drawn.kept.ids[lo:hi].tolist()),
      ] += 1
  got: collections.Counter = collections.Counter()
  turns = []
  for s in log.segments():
    assert s.mask_T.any()
    for t in np.flatnonzero(s.mask_T):
      assert s.temperature_T[t] == 0.5
      lo, hi = s.kept.offset_T1[t : t + 2]
      got[
        tuple(s.token_T[: t + 1].tolist()),
        float(s.mu_logp_T[t]),
        float(s.entropy_T[t]),
        int(s.version_T[t]),
        tuple(s.kept.ids[lo:hi].tolist()),
      ] += 1
    turns += np.unique(s.turn_T[s.mask_T]).tolist()
    assert s.kept.size_T[~s.mask_T].sum() == 0
    if routes:
      assert s.routes_RNK.shape[0] == s.token_T.size - 1
  assert got == want
  assert max(got.values()) == 1
  assert sorted(turns) == list(range(log.turns))  # no turn in two segments
  assert log.turns == len(agent.account) - len(out)
  assert log.drawn == sum(got.values())
