"""Tool calls as families write them: read, written, cut, mutated, in linear time."""

import gc
import json
import random
import time

import pytest

from swe17.agent import syntax, tools

ARGUMENTS = {'at': '«3»', 'new': ' <= '}
WAYS = {
  'hermes': syntax.HERMES,
  'llama': syntax.LLAMA,
  'deepseek': syntax.DEEPSEEK,
  'deepseek_v31': syntax.DEEPSEEK_V31,
  'kimi': syntax.KIMI,
}
ODD = [
  {}, {'a': 'test/{a,b}'}, {'a': '}</tool_call>'}, {'a': '}{'}, {'a': '"\\'},
  {'a': '<｜tool▁call▁end｜>'}, {'a': '<|tool_call_end|>'}, {'a': '```'},
  {'a': '; {"name": "x"}'}, {'a': None, 'b': [1, {'c': 2}], 'c': 1.5, 'd': True},
  {'a': '<|python_tag|>'}, {'a': '<think>'}, {'a': ''}, {'a': 'é\u2028\n'},
]  # fmt: skip


def written(way: syntax.Syntax, *calls: tuple[str, dict]) -> str:
  return ''.join(way.write(name, given, i) for i, (name, given) in enumerate(calls))


def read(way: syntax.Syntax, text: str) -> list[tuple]:
  return [(call.name, call.arguments, call.error) for call in way.parse(text).calls]


@pytest.mark.parametrize('way', WAYS.values(), ids=WAYS)
@pytest.mark.parametrize('given', ODD, ids=repr)
def test_what_is_written_is_read_back(way, given):
  if way is syntax.LLAMA and '<|python_tag|>' in given.values():
    pytest.skip('the tag opens a call wherever it stands')
  calls = [('edit', given), ('view', {}), ('edit', given)]
  text = written(way, *calls)
  assert read(way, text) == [(name, arguments, '') for name, arguments in calls]
  parsed = way.parse(f'<think>I look</think>{text}')
  assert [call.id for call in parsed.calls] == ['c0', 'c1', 'c2']
  assert (parsed.thinking, parsed.text) == ('I look', '')


@pytest.mark.parametrize('way', WAYS.values(), ids=WAYS)
@pytest.mark.parametrize('size', range(1, 400, 7))
def test_a_call_that_a_limit_cut_is_cut_and_those_before_it_stand(way, size):
  first = written(way, ('view', {}))
  if way is syntax.LLAMA:
    first += '; '
  last = way.write('edit', {'at': '«3»', 'new': 'a{b}' * 80}, 0)
  opens = last[: min(size, len(last) - 1)].rstrip('\n')
  got = read(way, first + opens)
  assert got[0] == ('view', {}, '')
  begun = {'hermes': '<tool_call>', 'kimi': '<|tool_call_begin|>', 'llama': '{'}
  if begun.get(way.name, '<｜tool▁call▁begin｜>') in opens:
    assert [error for _, _, error in got[1:]] == [tools.CUT]


@pytest.mark.parametrize(
  ('way', 'good', 'bad'),
  [
    ('hermes', '<tool_call>{"name": "view", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "view", "arguments": </tool_call>'),
    ('deepseek', '<｜tool▁call▁begin｜>function<｜tool▁sep｜>view\n```json\n{}\n```'
     '<｜tool▁call▁end｜>', '<｜tool▁call▁begin｜>view {}<｜tool▁call▁end｜>'),
    ('deepseek', '<｜tool▁call▁begin｜>view<｜tool▁sep｜>{}<｜tool▁call▁end｜>',
     '<｜tool▁call▁begin｜>view<｜tool▁sep｜>[]<｜tool▁call▁end｜>'),
    ('kimi', '<|tool_call_begin|>functions.view:4<|tool_call_argument_begin|>{}'
     '<|tool_call_end|>', '<|tool_call_begin|>functions.view:4<|tool_call_end|>'),
    ('kimi', '<|tool_call_begin|>view<|tool_call_argument_begin|>{}<|tool_call_end|>',
     '<|tool_call_begin|>view<|tool_call_argument_begin|>{bad}<|tool_call_end|>'),
  ],
)  # fmt: skip
def test_a_bad_call_between_good_ones_is_named_and_takes_none_with_it(way, good, bad):
  got = read(WAYS[way], good + bad + good)
  assert [name for name, _, error in got if not error] == ['view', 'view']
  assert len(got) == 3 and got[1][2] not in ('', tools.CUT)


def test_llama_reads_one_or_several_calls_and_leaves_text_alone():
  call = '{"name": "view", "parameters": {}}'
  one = [('view', {}, '')]
  for text in (call, f' {call}\n', f'<|python_tag|>{call}', f'{call};', f'{call}\nok'):
    assert read(syntax.LLAMA, text) == one
  for text in (f'{call}; {call}', f'{call}\n{call}', f'<|python_tag|>{call};{call}'):
    assert read(syntax.LLAMA, text) == one * 2
  for text in ('', 'No call.', f'I say {call}', '{"answer": 4}', '[1]'):
    assert syntax.LLAMA.parse(text) == tools.Parsed((), '', text)
  bad = read(syntax.LLAMA, '{"name": view}; ' + call)
  assert bad[0][2].startswith('invalid JSON') and bad[1:] == one
  assert read(syntax.LLAMA, '{"name": "view", "parameters": {"a') == [('', {}, 'cut')]
  with_type = '{"type": "function", "name": "view", "parameters": {}}'
  assert read(syntax.LLAMA, with_type) == one


def test_the_id_that_kimi_gives_a_call_is_kept():
  text = syntax.KIMI.write('view', {}, 7) + syntax.KIMI.write('view', {}, 8)
  given = [call.given for call in syntax.KIMI.parse(text).calls]
  assert given == ['functions.view:7', 'functions.view:8']
  assert {call.name for call in syntax.KIMI.parse(text).calls} == {'view'}


@pytest.mark.parametrize('arguments', ['"[]"', 'null', '[]', '"{}"', '3'])
def test_arguments_that_are_no_object_are_an_error(arguments):
  text = f'<tool_call>{{"name": "view", "arguments": {arguments}}}</tool_call>'
  assert read(syntax.HERMES, text) == [('view', {}, 'want "arguments", an object')]
  assert read(syntax.LLAMA, f'{{"name": "view", "parameters": {arguments}}}') == (
    [('view', {}, 'want "arguments", an object')]
  )


@pytest.mark.parametrize('way', WAYS.values(), ids=WAYS)
def test_no_mutation_raises(way):
  rng = random.Random(0)
  whole = written(way, *[('edit', given) for given in ODD[:5]])
  pieces = ['{', '}', '"', '\\', '\ud800', '<', ';', '\n', '```', 'é', ':0', '[']
  pieces += ['<tool_call>', '</tool_call>', '<|tool_call_begin|>', '<｜tool▁sep｜>']
  for _ in range(2_000):
    text = list(whole)
    for _ in range(rng.randrange(1, 6)):
      at = rng.randrange(len(text))
      text[at : at + rng.randrange(4)] = rng.choices(pieces, k=rng.randrange(3))
    parsed = way.parse(''.join(text))
    for call in parsed.calls:
      json.dumps([call.name, call.error])


@pytest.mark.parametrize('way', WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
  'unit',
  [
    '{', '[', '{"a":', '<tool_call>', '<tool_call>{', '\n', ';', ';\n', '\n{"name"',
    '; {"name":', '<|python_tag|>', '<|python_tag|>{', '<｜tool▁call▁begin｜>',
    '<｜tool▁call▁begin｜><｜tool▁sep｜>', '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{',
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>x```json{', '<|tool_call_begin|>',
    '<|tool_call_begin|>a<|tool_call_argument_begin|>{"',
    '<|tool_call_argument_begin|>', ' ', '```',
  ],
)  # fmt: skip
def test_work_is_linear(way, unit):
  """Forty times the text takes less than 400 times the CPU time: 1600 if quadratic.

  The best of several and this thread's own time: a busy machine and a collection of
  the whole session's garbage only add.
  """

  def seconds(size: int) -> float:
    text = '{' + unit * (size // len(unit))
    gc.disable()
    start = time.thread_time()
    way.parse(text)
    spent = time.thread_time() - start
    gc.enable()
    return spent

  small = max(min(seconds(5_000) for _ in range(3)), 1e-3)
  assert any(seconds(200_000) < 400 * small for _ in range(5))


def test_the_way_follows_from_added_tokens_and_template():
  assert syntax.choose({'<tool_call>'}, '') is syntax.HERMES
  assert syntax.choose({'<|python_tag|>', '<|eot_id|>'}, '') is syntax.LLAMA
  assert syntax.choose({'<|tool_call_begin|>'}, '') is syntax.KIMI
  assert syntax.choose({'<｜tool▁call▁begin｜>'}, 'x```json') is syntax.DEEPSEEK
  assert syntax.choose({'<｜tool▁call▁begin｜>'}, 'x') is syntax.DEEPSEEK_V31
