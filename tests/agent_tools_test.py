"""Parsing, checking and running tool calls: odd input, order, and time-outs."""

import asyncio
import json
import random
import time

import pytest

from swe17 import types
from swe17.agent import tools
from swe17.env import base

TOOLS = (
  base.Tool('view', 'Show the code.', {}, writes=False),
  base.Tool('edit', 'Edit.', {'line': 'int', 'old': 'str', 'new': 'str'}, writes=True),
  base.Tool('test', 'Run the tests.', {}, writes=False),
  base.Tool('submit', 'End.', {}, writes=True),
)
VIEW = '{"name": "view", "arguments": {}}'
GOOD = ('view', {}, '')
JSON = ('', {}, 'invalid JSON')


def tag(body: str) -> str:
  return f'<tool_call>{body}</tool_call>'


def edit(old: str, new: str = 'b') -> str:
  arguments = {'line': 3, 'old': old, 'new': new}
  return json.dumps({'name': 'edit', 'arguments': arguments})


def edited(old: str, new: str = 'b') -> tuple:
  return ('edit', {'line': 3, 'old': old, 'new': new}, '')


# (turn, calls as (name, arguments, start of the error), thinking, text)
CORPUS = [
  ('', [], '', ''),
  ('done', [], '', 'done'),
  (tag(VIEW), [GOOD], '', ''),
  (tag(VIEW) * 3, [GOOD] * 3, '', ''),
  (f' {tag(VIEW)}\n{tag(VIEW)} ', [GOOD] * 2, '', ''),
  (f'I look.{tag(VIEW)}', [GOOD], '', 'I look.'),
  (f'a{tag(VIEW)}b{tag(VIEW)}c', [GOOD] * 2, '', 'abc'),
  (tag(f'\n  {VIEW}\n'), [GOOD], '', ''),
  (tag('{"arguments":{},"name":"view"}'), [GOOD], '', ''),
  (tag('{"name": "x y", "arguments": {"a": [1, {"b": null}]}}'),
   [('x y', {'a': [1, {'b': None}]}, '')], '', ''),
  # Thoughts.
  (f'<think>line 5</think>{tag(VIEW)}', [GOOD], 'line 5', ''),
  (f'\n<think></think>ok{tag(VIEW)}', [GOOD], '', 'ok'),
  (f'<think>a {tag(VIEW)}', [], f'a {tag(VIEW)}', ''),
  (f'<think>{tag(VIEW)}</think>', [], tag(VIEW), ''),
  (f'x<think>y</think>{tag(VIEW)}', [GOOD], '', 'x<think>y</think>'),
  (f'<think>a<think>b</think>{tag(VIEW)}', [GOOD], 'a<think>b', ''),
  (f'</think>{tag(VIEW)}', [GOOD], '', '</think>'),
  ('<think>a</think></think>', [], 'a', '</think>'),
  # Braces, tags and quotes inside strings.
  (tag(edit('mkdir -p test/{a,b}')), [edited('mkdir -p test/{a,b}')], '', ''),
  (tag(edit('}</tool_call>')), [edited('}</tool_call>')], '', ''),
  (tag(edit('</tool_call>')) + tag(VIEW), [edited('</tool_call>'), GOOD], '', ''),
  (tag(edit('<tool_call>{')), [edited('<tool_call>{')], '', ''),
  (tag(edit(tag(VIEW))), [edited(tag(VIEW))], '', ''),
  (tag(edit('a "b" \\ {')), [edited('a "b" \\ {')], '', ''),
  (tag(edit('\n\t\r\b')), [edited('\n\t\r\b')], '', ''),
  (tag(edit('}}}{{{')), [edited('}}}{{{')], '', ''),
  (tag(edit('<think>')), [edited('<think>')], '', ''),
  (tag(edit("f'{x}'")), [edited("f'{x}'")], '', ''),
  # Unicode.
  (tag(edit('\u00e9\U0001f600')), [edited('\u00e9\U0001f600')], '', ''),
  (tag('{"name": "edit", "arguments": {"line": 3, "old": "\u00e9", "new": "b"}}'),
   [edited('\u00e9')], '', ''),
  (tag('{"name": "vi\\u0065w", "arguments": {}}'), [GOOD], '', ''),
  (tag('{"name": "view\ufffd", "arguments": {}}'), [('view\ufffd', {}, '')], '', ''),
  (tag('{"name": "\\u00zz", "arguments": {}}'), [JSON], '', ''),
  # Not JSON.
  (tag(''), [('', {}, 'want a JSON object')], '', ''),
  (tag('view'), [('', {}, 'want a JSON object')], '', ''),
  (tag("{'name': 'view', 'arguments': {}}"), [JSON], '', ''),
  (tag('{"name": "view", "arguments": {},}'), [JSON], '', ''),
  (tag('{"name": "view" "arguments": {}}'), [JSON], '', ''),
  (tag('{"name": "edit", "arguments": {"old": "a\nb"}}'), [JSON], '', ''),
  (tag('{"name": "view", "arguments": {"a": NaN}}'), [JSON], '', ''),
  (tag('{"name": "view", "arguments": {"a": 1' + '0' * 5000 + '}}'), [JSON], '', ''),
  (tag('{bad}') + tag(VIEW), [JSON, GOOD], '', ''),
  (tag('{"name": "vi') + tag(VIEW), [JSON, GOOD], '', ''),
  (f'{tag("{bad}")}x{tag(VIEW)}', [JSON, GOOD], '', 'x'),
  # One JSON value, but not a call.
  (tag('[]'), [('', {}, 'want a JSON object')], '', ''),
  (tag('null'), [('', {}, 'want a JSON object')], '', ''),
  (tag('"view"'), [('', {}, 'want a JSON object')], '', ''),
  (tag('{}'), [('', {}, 'want "name"')], '', ''),
  (tag('{"name": 5, "arguments": {}}'), [('', {}, 'want "name"')], '', ''),
  (tag('{"name": "view"}'), [('view', {}, 'want "arguments"')], '', ''),
  (tag('{"name": "view", "arguments": null}'), [('view', {}, 'want "arg')], '', ''),
  (tag('{"name": "view", "arguments": []}'), [('view', {}, 'want "arg')], '', ''),
  (tag('{"name": "view", "arguments": "{}"}'), [('view', {}, 'want "arg')], '', ''),
  (tag('{"name": "view", "arguments": {}, "id": 1}'),
   [('view', {}, "unexpected key 'id'")], '', ''),
  (tag(edit('x' * 255 + '"')), [edited('x' * 255 + '"')], '', ''),
  (tag(edit('x' * 5000)) + tag(VIEW), [edited('x' * 5000), GOOD], '', ''),
  (tag('{"name": "' + 'x' * 230 + '", "arguments": {"a": true}}'),
   [('x' * 230, {'a': True}, '')], '', ''),
  # Several in one tag, or tags that do not pair.
  (tag(VIEW + VIEW), [('', {}, 'text after')], '', ''),
  (tag(VIEW + '\n' + VIEW) + tag(VIEW), [('', {}, 'text after'), GOOD], '', ''),
  (tag(VIEW + '}'), [('', {}, 'text after')], '', ''),
  (f'<tool_call>{VIEW}{tag(VIEW)}', [('', {}, 'no closing tag'), GOOD], '', ''),
  (f'<tool_call>{tag(VIEW)}', [('', {}, 'want a JSON'), GOOD], '', ''),
  (f'{VIEW}</tool_call>', [], '', f'{VIEW}</tool_call>'),
  # Cut by a length limit.
  ('<tool_call>', [('', {}, 'cut')], '', ''),
  (f'<tool_call>{VIEW}', [('', {}, 'cut')], '', ''),
  (f'<tool_call>{VIEW}</tool_c', [('', {}, 'cut')], '', ''),
  (f'<tool_call>{VIEW[:20]}', [('', {}, 'cut')], '', ''),
  (f'a{tag(VIEW)}<tool_call>{edit("x")[:-3]}', [GOOD, ('', {}, 'cut')], '', 'a'),
  (f'{tag(VIEW)}<tool_', [GOOD], '', '<tool_'),
  (f'<tool_call>{VIEW}{VIEW}', [('', {}, 'cut')], '', ''),
]  # fmt: skip


@pytest.mark.parametrize('case', range(len(CORPUS)))
def test_corpus(case):
  turn, calls, thinking, text = CORPUS[case]
  parsed = tools.parse(turn)
  assert (parsed.thinking, parsed.text) == (thinking, text)
  assert [call.id for call in parsed.calls] == [f'c{i}' for i in range(len(calls))]
  for call, (name, arguments, error) in zip(parsed.calls, calls, strict=True):
    assert (call.name, call.arguments) == (name, arguments)
    assert call.error.startswith(error)
    assert bool(call.error) == bool(error)


def test_no_mutation_of_the_corpus_raises():
  rng = random.Random(0)
  pieces = ['<tool_call>', '</tool_call>', '<think>', '</think>', '"', '\\', '{', '}']
  pieces += ['[', ',', ':', '\ud800', '\x00', '\\ud800', '1e999', '-', '\n', VIEW]
  for _ in range(10_000):
    turn = rng.choice(CORPUS)[0]
    for _ in range(rng.randint(1, 4)):
      at = rng.randint(0, len(turn))
      drop = rng.choice([0, 0, 1, 5])
      turn = turn[:at] + rng.choice(pieces) + turn[at + drop :]
    parsed = tools.parse(turn)
    for call in parsed.calls:
      tools.check(call, TOOLS).error.encode()
    starts = turn.count('<tool_call>')
    assert len(parsed.calls) <= starts


@pytest.mark.parametrize(
  'turn',
  [
    '<tool_call>' + '{' * 200_000,
    '<tool_call>' + '[' * 200_000,
    '<tool_call>' + '{"a":' * 40_000,
    '<tool_call>{' * 8_000,
    '<tool_call>["' * 8_000,
    '<tool_call>' * 8_000 + '</tool_call>',
    '<tool_call>["' + '</tool_call><tool_call>","' * 8_000,
    '<tool_call>' + ' ' * 200_000,
    ('<tool_call>' + ' ' * 50) * 4_000,
    '<think>' * 30_000,
    tag(VIEW) * 4_000,
  ],
)
def test_work_is_linear_in_200_kilobytes(turn, monkeypatch):
  """Characters given to the JSON decoder, and a limit that only a hang reaches."""
  decoder, given = tools._DECODER, []

  class Counting:
    def raw_decode(self, window):
      given.append(len(window))
      return decoder.raw_decode(window)

  monkeypatch.setattr(tools, '_DECODER', Counting())
  start = time.process_time()
  tools.parse(turn)
  assert sum(given) < 300 * turn.count('<tool_call>') + 8 * len(turn)
  assert time.process_time() - start < 10


@pytest.mark.parametrize(
  ('name', 'arguments', 'error'),
  [
    ('view', {}, ''),
    ('edit', {'line': 3, 'old': 'a', 'new': ''}, ''),
    ('look', {}, "unknown tool 'look'"),
    ('', {}, "unknown tool ''"),
    ('edit', {'line': 3, 'old': 'a'}, "edit: missing argument 'new'"),
    ('edit', {'line': '3', 'old': 'a', 'new': 'b'}, 'edit: line must be int'),
    ('edit', {'line': 3.0, 'old': 'a', 'new': 'b'}, 'edit: line must be int'),
    ('edit', {'line': True, 'old': 'a', 'new': 'b'}, 'edit: line must be int'),
    ('edit', {'line': 3, 'old': None, 'new': 'b'}, 'edit: old must be str'),
    ('edit', {'line': 3, 'old': 'a', 'new': '\ud800'}, 'edit: new is not valid text'),
    ('view', {'line': 3}, "view: unexpected argument 'line'"),
  ],
)
def test_check_names_what_is_wrong(name, arguments, error):
  assert tools.check(tools.Call('c0', name, arguments), TOOLS).error == error


def test_check_keeps_the_error_of_the_parser():
  call = tools.Call('c0', 'view', {}, 'invalid JSON')
  assert tools.check(call, TOOLS) is call


class Scene:
  """An environment whose steps take as long as told and log when they start and end."""

  tools = TOOLS

  def __init__(self, delay=0.0):
    self.delay = delay
    self.done = False
    self.lines: list[str] = []
    self.running: set[str] = set()
    self.together = 0
    self.overlapped: list[set[str]] = []

  async def step(self, name, arguments):
    self.running.add(name)
    self.together = max(self.together, len(self.running))
    if 'edit' in self.running and len(self.running) > 1:
      self.overlapped.append(set(self.running))
    delay = self.delay(name, arguments) if callable(self.delay) else self.delay
    await asyncio.sleep(delay)
    self.running.discard(name)
    if name == 'edit':
      self.lines.append(arguments['new'])
      return f'edited {len(self.lines)}'
    if name == 'submit':
      self.done = True
    return f'{name} sees {"".join(self.lines)}'

  async def verify(self):
    return types.Outcome(1.0)


def calls_of(*names: str) -> list[tools.Call]:
  """'edit:x' writes x; a name with '!' is a call that did not parse."""
  calls = []
  for i, name in enumerate(names):
    name, _, new = name.partition(':')
    arguments = {'line': 1, 'old': 'a', 'new': new} if name == 'edit' else {}
    error = 'invalid JSON' if name == '!' else ''
    calls.append(tools.check(tools.Call(f'c{i}', name, arguments, error), TOOLS))
  return calls


async def test_good_calls_of_a_turn_run_though_others_are_bad_and_finish_out_of_order():
  calls = calls_of('view', 'look', '!', 'test')
  texts = set()
  for _ in range(20):
    scene = Scene(lambda name, _: 0.002 if name == 'view' else 0.0)
    results = await tools.execute(calls, scene, max_calls=8)
    assert [result.id for result in results] == ['c0', 'c1', 'c2', 'c3']
    assert [result.ran for result in results] == [True, False, False, True]
    texts.add(tuple(result.text for result in results))
  (only,) = texts
  assert only[0] == 'view sees '
  assert only[1:3] == ("error: unknown tool 'look'", 'error: invalid JSON')


async def test_state_seen_is_program_order_even_if_the_first_write_is_the_slowest():
  scene = Scene(lambda name, args: 0.01 if args.get('new') == 'x' else 0.0)
  calls = calls_of('view', 'edit:x', 'view', 'edit:y', 'test')
  results = await tools.execute(calls, scene, max_calls=8)
  texts = [result.text for result in results]
  assert texts == ['view sees ', 'edited 1', 'view sees x', 'edited 2', 'test sees xy']
  assert scene.overlapped == []


async def test_reads_between_two_writes_run_side_by_side():
  scene = Scene(0.01)
  await tools.execute(calls_of('edit:x', 'view', 'test', 'edit:y'), scene, max_calls=8)
  assert scene.together == 2
  assert scene.overlapped == []


async def test_a_call_that_times_out_does_not_cancel_the_others():
  scene = Scene(lambda name, _: 30.0 if name == 'test' else 0.0)
  calls = calls_of('view', 'test', 'edit:x')
  results = await tools.execute(calls, scene, max_calls=8, call_seconds=0.1)
  texts = [result.text for result in results]
  assert texts == ['view sees ', 'timed out after 0.1 s', 'edited 1']


async def test_calls_beyond_the_bound_are_answered_and_not_run():
  scene = Scene()
  results = await tools.execute(
    calls_of('edit:x', 'edit:y', 'view'), scene, max_calls=1
  )
  assert scene.lines == ['x']
  assert [result.ran for result in results] == [True, False, False]
  assert results[2].text == 'not run: more than 1 calls in a turn'


async def test_nothing_runs_after_submit():
  scene = Scene()
  results = await tools.execute(
    calls_of('submit', 'edit:x', 'view'), scene, max_calls=8
  )
  assert scene.lines == []
  assert [result.text for result in results[1:]] == ['not run: already submitted'] * 2


@pytest.mark.parametrize('error', [TimeoutError('grader'), RuntimeError('bug')])
async def test_what_the_environment_raises_is_raised(error):
  class Broken(Scene):
    async def step(self, name, arguments):
      if name == 'test':
        raise error
      return await super().step(name, arguments)

  scene = Broken(0.01)
  with pytest.raises(type(error), match=str(error)):
    await tools.execute(
      calls_of('view', 'test', 'edit:x'), scene, max_calls=8, call_seconds=30.0
    )
  assert scene.running == set()  # the call beside it ended first
  assert scene.lines == []
