"""What is told of a turn while it is drawn: never too much, in the end all of it."""

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from swe17.agent import formats, history, syntax, template, templated
from swe17.api import request, text, turn
from tests import api_fixtures as api
from tests import chat_templates

FAMILIES = [*chat_templates.SOURCES, 'own']
GOOD = '<tool_call>{"name": "view", "arguments": {"a": 1}}</tool_call>'


def fmt_of(family: str) -> formats.Format:
  if family == 'own':
    return formats.load()
  if family == 'opens':  # the prompt of every turn opens a thought
    return _opening(
      'qwen', chat_templates.QWEN, "'<|im_start|>assistant\\n' }}{%- endif %}",
      "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}",
    )  # fmt: skip
  if family == 'first':  # the first prompt alone does
    opens = "{{- '<｜Assistant｜>' }}{%- endif %}\n"
    return _opening(
      'deepseek', chat_templates.DEEPSEEK, opens, opens.replace('｜>', '｜><think>\\n')
    )
  return chat_templates.fmt(family)


def _opening(family: str, source: str, old: str, new: str) -> formats.Format:
  tok = chat_templates.fmt(family)._tok
  assert old in source
  made = template.Template(source.replace(old, new))
  return templated.Templated(tok, made, syntax.choose(tok.markup, source))


def asked(**given) -> request.Chat:
  return request.Chat(api.MODEL, ({'role': 'user', 'content': 'a'},), **given)


def read(fmt, ids, sizes, **given) -> tuple[turn.Turn, list[turn.Delta]]:
  """The deltas of a turn in parts of the given sizes."""
  done, told, at = turn.Turn(fmt, asked(**given), 'salt'), [], 0
  while not done.finish:
    size = sizes[len(told) % len(sizes)]
    last = at + size >= len(ids)
    finish = '' if not last else 'stop' if ids[-1] in fmt.stop_ids else 'length'
    told.append(done.take(api.part(ids[at : at + size], finish)))
    at += size
  return done, told


def check(fmt, ids, sizes, **given) -> str:
  """Reads a turn; what was told must be its message. Returns its content."""
  done, told = read(fmt, ids, sizes, **given)
  message = done.message
  assert ''.join(d.thought for d in told) == message.get('reasoning_content', '')
  assert ''.join(d.content for d in told) == (message['content'] or '')
  whole, _ = read(fmt, ids, [len(ids)], **given)
  assert whole.message == message
  return message['content'] or ''


@pytest.mark.parametrize('family', [*FAMILIES, 'opens', 'first'])
@pytest.mark.parametrize('calls', [False, True])
def test_random_ids_told_in_pieces_are_the_whole_text(family, calls):
  fmt, rng = fmt_of(family), np.random.default_rng(1)
  stop = fmt.stop_ids[0]
  for i in range(60):
    ids = rng.integers(0, fmt.vocab_size, rng.integers(1, 60)).tolist()
    ids = [9 if token == stop else token for token in ids] + [stop] * (i % 2)
    content = check(fmt, ids, rng.integers(1, 6, 8).tolist(), calls=calls)
    message = fmt.message(ids, calls=calls, salt='salt')
    assert (message['content'] or '') == content


PIECES = [
  '<think>', '</think>', '<think', '>', '\n', ' ', 'é', '🙂', 'word', '<tool_call>',
  '</tool_call>', GOOD, '<tool', '{', '}', '{"name": "f", "parameters": {}}', '; ',
  '<|python_tag|>', '<｜tool▁calls▁begin｜>', '<｜tool▁calls▁end｜>', '\x0b',
  '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>', '```json\n{}',
  '<|tool_calls_section_begin|>', '<|tool_calls_section_end|>',
  '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>',
]  # fmt: skip


@pytest.mark.parametrize('family', ['qwen', 'llama', 'deepseek', 'kimi', 'opens'])
@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  st.lists(st.sampled_from(PIECES), max_size=9), st.integers(1, 5), st.booleans()
)
def test_thoughts_tags_and_calls_in_any_order_are_told_as_they_end(
  family, pieces, size, calls
):
  fmt = fmt_of(family)
  check(fmt, [*fmt.raw(''.join(pieces)), *fmt.stop_ids], [size], calls=calls)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
  st.text('abé🙂', max_size=30),
  st.lists(st.text('abé🙂', min_size=1, max_size=5), min_size=1, max_size=3),
  st.integers(1, 4),
)
def test_a_stop_string_is_found_wherever_tokens_end(said, stops, size):
  fmt = fmt_of('qwen')
  ids = [*fmt.raw(said), *fmt.stop_ids]
  done, told = read(fmt, ids, [size], stop=tuple(stops))
  content = ''.join(d.content for d in told)
  assert content == done.message['content']
  assert not any(stop in content for stop in stops)
  if not any(stop in said for stop in stops):
    assert content == said and done.result.token_T.size == len(ids)
  else:
    drawn = fmt.to_bytes(done.result.token_T.tolist()).decode('utf-8', 'replace')
    assert said.startswith(content) and done.finish == 'stop'
    # It ends with the token that completed the first string to be complete.
    assert sum(stop in drawn for stop in stops) >= 1
    assert not any(stop in drawn[:-1] for stop in stops)


def test_the_first_of_two_stop_strings_in_one_part_counts():
  stops = text.Stops(('cd', 'b'))
  assert (stops.add('a'), stops.add('bcd'), stops.found) == ('a', '', True)
  late = text.Stops(('abX', 'zz'))
  assert (late.add('ab'), late.add('ab'), late.end()) == ('', 'ab', 'ab')


def test_nothing_is_told_that_may_be_taken_back():
  split = text.Splitter(history.Marks(('<tool_call>',)), calls=True)
  assert split.add(' Look <tool') == ('', 'Look')
  assert split.add('_box> ') == ('', ' <tool_box>')
  assert split.add('<tool_call>{') == ('', '')
  assert split.add(' more ') == ('', '')
  split = text.Splitter(history.Marks(('<tool_call>',)), calls=False)
  assert split.add('<thi') == ('', '')
  assert split.add('nk>\nso</thin') == ('so', '')
  assert split.add('k>\n\n') == ('', '')
  assert split.add('Yes <tool_call> ') == ('', 'Yes <tool_call> ')


def test_text_that_only_looks_like_a_thought_is_told_at_last():
  fmt = fmt_of('qwen')
  assert check(fmt, fmt.raw('<thi'), [1]) == '<thi'
  assert check(fmt, fmt.raw(' <b>'), [1]) == ' <b>'


def test_the_end_is_no_text_and_has_no_logprob_but_is_counted():
  fmt = fmt_of('qwen')
  done, told = read(fmt, api.says('ab'), [2], logprobs=True)
  assert [len(d.logprobs) for d in told] == [2, 0]
  assert done.result.token_T.size == 3 and done.message['content'] == 'ab'


def test_routes_and_sets_of_a_turn_that_a_stop_string_ended_are_those_of_its_tokens():
  fmt = fmt_of('qwen')
  ids = fmt.raw('abcdef')
  part = api.part(ids, 'length')
  routed = dataclasses.replace(
    part, routes_RNK=np.arange(9)[:, None, None], routes_start=2, topk_bound=6
  )
  done = turn.Turn(fmt, asked(stop=('cd',)), '')
  done.take(routed)
  result = done.result
  assert result.token_T.tolist() == ids[:4] and result.finish == 'stop'
  assert result.routes_RNK[:, 0, 0].tolist() == list(range(7))
  assert result.kept.size_T.tolist() == [1] * 4


def test_a_log_prob_of_minus_infinity_is_a_number():
  fmt = fmt_of('qwen')
  part = dataclasses.replace(
    api.part(fmt.raw('a'), 'length'), logp_T=np.array([-np.inf], np.float32)
  )
  done = turn.Turn(fmt, asked(logprobs=True), '')
  assert done.take(part).logprobs == (('a', b'a', -9999.0),)
