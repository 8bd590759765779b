"""The official OpenAI client against the routes, over turns that are written down."""

import asyncio
import json
import logging

import numpy as np
import openai
import pytest

from swe17 import types
from swe17.api import errors, request
from tests import api_fixtures as api

U = {'role': 'user', 'content': 'Mend it.'}
TOOLS = [
  {'type': 'function', 'function': {'name': name, 'parameters': {'type': 'object'}}}
  for name in ('view', 'edit')
]


def call(name: str, arguments: dict) -> str:
  body = json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)
  return f'<tool_call>\n{body}\n</tool_call>'


FOUR = [('view', {}), ('edit', {'at': 'é', 'n': 3}), ('view', {'x': '</tool_call>'})]
FOUR += [('edit', {'at': ''})]


async def ask(behind, **given):
  async with api.client(behind) as client:
    return await client.chat.completions.create(
      **{'model': api.MODEL, 'messages': [U], **given}
    )


async def stream(behind, **given):
  """The chunks of a stream."""
  async with api.client(behind) as client:
    chunks = await client.chat.completions.create(
      **{'model': api.MODEL, 'messages': [U], 'stream': True, **given}
    )
    return [chunk async for chunk in chunks]


def said(chunks, i: int = 0, name: str = 'content') -> str:
  deltas = [c.delta for ch in chunks for c in ch.choices if c.index == i]
  return ''.join(getattr(delta, name, None) or '' for delta in deltas)


async def test_a_chat_gives_the_text_its_end_and_what_was_used():
  behind = api.Scripted(api.fmt(), api.says('Dóne. 🙂'))
  done = await ask(behind)
  (choice,) = done.choices
  assert (choice.message.content, choice.finish_reason) == ('Dóne. 🙂', 'stop')
  assert choice.message.role == 'assistant' and choice.message.tool_calls is None
  prompt = len(behind.fmt.conversation([U]))
  assert done.usage.prompt_tokens == prompt
  assert done.usage.completion_tokens == len(behind.turns[0])
  assert done.usage.total_tokens == prompt + len(behind.turns[0])
  assert (done.model, done.system_fingerprint) == (api.MODEL, 'v3')
  assert done.id.startswith('chatcmpl-') and done.object == 'chat.completion'


@pytest.mark.parametrize('size', [1, 2, 3, 100])
async def test_a_stream_is_the_answer_in_pieces(size):
  text = 'Dóne. 🙂 so\n\n\nmuch '
  turn = api.says(text)
  chunks = await stream(api.Scripted(api.fmt(), turn, size=size))
  assert said(chunks) == text
  first, last = chunks[0].choices[0], chunks[-1].choices[0]
  assert (first.delta.role, last.finish_reason) == ('assistant', 'stop')
  assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
  assert all('�' not in (c.choices[0].delta.content or '') for c in chunks)
  assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks)
  assert size == 100 or len(chunks) > 4


async def test_a_stream_tells_what_was_used_where_it_is_asked_to():
  behind = api.Scripted(api.fmt(), api.says('Yes.'), api.says('No, no.'))
  chunks = await stream(behind, n=2, stream_options={'include_usage': True})
  assert chunks[-1].choices == []
  assert chunks[-1].usage.completion_tokens == sum(map(len, behind.turns))
  assert [said(chunks, i) for i in (0, 1)] == ['Yes.', 'No, no.']


@pytest.mark.parametrize('streamed', [False, True])
async def test_four_parallel_calls_come_as_calls(streamed):
  turn = api.says('<think>\nhm\n</think>\n\nSo: ' + '\n'.join(call(*c) for c in FOUR))
  behind = api.Scripted(api.fmt(), turn)
  if streamed:
    chunks = await stream(behind, tools=TOOLS)
    made: dict[int, dict] = {}
    for chunk in chunks:
      for piece in chunk.choices[0].delta.tool_calls or ():
        at = made.setdefault(piece.index, {'id': '', 'name': '', 'arguments': ''})
        at['id'] += piece.id or ''
        at['name'] += piece.function.name or ''
        at['arguments'] += piece.function.arguments or ''
    calls = [made[i] for i in range(4)]
    content, finish = said(chunks), chunks[-1].choices[0].finish_reason
    thought = said(chunks, name='reasoning_content')
  else:
    (choice,) = (await ask(behind, tools=TOOLS)).choices
    calls = [
      {'id': c.id, 'name': c.function.name, 'arguments': c.function.arguments}
      for c in choice.message.tool_calls
    ]
    content, finish = choice.message.content, choice.finish_reason
    thought = choice.message.reasoning_content
  got = [(c['name'], json.loads(c['arguments'])) for c in calls]
  assert got == FOUR and len({c['id'] for c in calls}) == 4
  assert (content, thought, finish) == ('So:', 'hm', 'tool_calls')


async def test_the_client_s_own_assembly_of_a_stream_is_the_whole_answer():
  turn = api.says('So: ' + ''.join(call(*c) for c in FOUR))
  async with (
    api.client(api.Scripted(api.fmt(), turn)) as client,
    client.chat.completions.stream(
      model=api.MODEL, messages=[U], tools=TOOLS
    ) as events,
  ):
    final = await events.get_final_completion()
  (choice,) = final.choices
  calls = choice.message.tool_calls
  got = [(c.function.name, json.loads(c.function.arguments)) for c in calls]
  assert (choice.message.content, got) == ('So:', FOUR)


async def test_calls_and_results_go_back_as_they_came():
  """A second request of the history is what the template writes of it."""
  behind = api.Scripted(api.fmt(), api.says(''.join(call(*c) for c in FOUR)))
  async with api.client(behind) as client:
    first = await client.chat.completions.create(
      model=api.MODEL, messages=[U], tools=TOOLS
    )
    message = first.choices[0].message
    results = [
      {'role': 'tool', 'tool_call_id': c.id, 'content': [{'type': 'text', 'text': 'x'}]}
      for c in message.tool_calls
    ]
    again = [U, message.model_dump(exclude_none=True), *results]
    await client.chat.completions.create(model=api.MODEL, messages=again, tools=TOOLS)
  got = behind.asked[1].token_T.tolist()
  text = behind.fmt.to_bytes(got).decode()
  assert text.count('<tool_call>') == 4 and text.count('<tool_response>') == 4
  assert '{"at": "é", "n": 3}' in text


async def test_without_tools_or_with_none_wanted_a_call_is_text():
  text = 'So: ' + call('view', {}) + ' '
  for given in ({}, {'tools': TOOLS, 'tool_choice': 'none'}):
    behind = api.Scripted(api.fmt(), api.says(text))
    (choice,) = (await ask(behind, **given)).choices
    assert (choice.message.content, choice.finish_reason) == (text, 'stop')
    assert choice.message.tool_calls is None
    assert said(await stream(behind, **given)) == text
    assert b'"view"' not in behind.fmt.to_bytes(behind.asked[0].token_T.tolist())


async def test_eight_choices_have_keys_of_their_own_and_seeds_repeat_them():
  turns = [api.says(f'answer {i}') for i in range(8)]
  behind = api.Scripted(api.fmt(), *turns)
  done = await ask(behind, n=8, seed=7)
  assert [c.index for c in done.choices] == list(range(8))
  assert [c.message.content for c in done.choices] == [f'answer {i}' for i in range(8)]
  keys = {r.session: r.key for r in behind.asked}
  assert len(set(keys.values())) == 8
  await ask(behind, n=8, seed=7)
  assert {r.session: r.key for r in behind.asked[8:]} == keys
  await ask(behind, n=8, seed=8)
  assert not {r.key for r in behind.asked[16:]} & set(keys.values())
  await ask(behind)
  await ask(behind)
  assert behind.asked[-1].key != behind.asked[-2].key


@pytest.mark.parametrize('streamed', [False, True])
async def test_logprobs_are_those_of_the_drawn_tokens(streamed):
  behind = api.Scripted(api.fmt(), api.says('é the'), size=2)
  given = {'logprobs': True}
  if streamed:
    chunks = await stream(behind, **given)
    content = [
      t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content
    ]
  else:
    content = (await ask(behind, **given)).choices[0].logprobs.content
  drawn = behind.turns[0][:-1]
  assert [bytes(t.bytes) for t in content] == [
    behind.fmt.to_bytes([token]) for token in drawn
  ]
  assert [t.logprob for t in content] == [-1, -2, -1, -2, -1][: len(drawn)]
  assert b''.join(bytes(t.bytes) for t in content).decode() == 'é the'


@pytest.mark.parametrize('size', [1, 3, 100])
@pytest.mark.parametrize('streamed', [False, True])
async def test_a_stop_string_over_several_tokens_ends_the_text_before_it(
  size, streamed
):
  behind = api.Scripted(api.fmt(), api.says('one\nOBSERVATION: two'), size=size)
  given = {'stop': ['zzz', '\nOBSERVATION:']}
  if streamed:
    chunks = await stream(behind, **given)
    text, finish = said(chunks), chunks[-1].choices[0].finish_reason
  else:
    (choice,) = (await ask(behind, **given)).choices
    text, finish = choice.message.content, choice.finish_reason
  assert (text, finish) == ('one', 'stop')
  ((_, result, message),) = behind.told
  assert message['content'] == 'one'
  drawn = result.token_T.tolist()
  assert behind.fmt.to_bytes(drawn) == b'one\nOBSERVATION:'
  assert drawn == behind.turns[0][: len(drawn)] and result.finish == 'stop'
  assert result.kept.ids.tolist() == drawn and result.logp_T.size == len(drawn)
  assert behind.running == 0


async def test_what_a_stop_string_began_is_told_if_it_does_not_come():
  behind = api.Scripted(api.fmt(), api.says('one\nOBS'), size=1)
  assert said(await stream(behind, stop='\nOBSERVATION:')) == 'one\nOBS'


async def test_a_cut_answer_says_length_and_nobody_gets_more_than_there_is_room():
  behind = api.Scripted(api.fmt(), api.says('abcdefgh'))
  (choice,) = (await ask(behind, max_tokens=5)).choices
  assert choice.finish_reason == 'length' and choice.message.content == 'abcde'
  (choice,) = (await ask(behind, max_completion_tokens=4, max_tokens=9)).choices
  assert choice.message.content == 'abcd'
  behind.max_context = len(behind.fmt.conversation([U])) + 2
  (choice,) = (await ask(behind, max_tokens=100)).choices
  assert choice.message.content == 'ab'
  behind.max_context -= 2
  with pytest.raises(openai.BadRequestError) as refused:
    await ask(behind)
  assert refused.value.code == 'context_length_exceeded'


async def test_sampling_is_what_was_asked_for_over_the_defaults():
  behind = api.Scripted(api.fmt(), api.says('a'))
  await ask(behind)
  await ask(behind, temperature=0, top_p=0.5, extra_body={'top_k': 3, 'min_p': 0.1})
  await ask(behind, extra_body={'top_k': -1})
  assert [r.sampling for r in behind.asked] == [
    types.Sampling(1.0, 0.0, 8, 0.9),
    types.Sampling(0.0, 0.1, 3, 0.5),
    types.Sampling(1.0, 0.0, 0, 0.9),
  ]


async def test_what_was_served_is_told_once_for_each_choice():
  turns = [api.says('a'), api.says(call('view', {}))]
  behind = api.Scripted(api.fmt(), *turns)
  done = await ask(behind, n=2, tools=TOOLS)
  assert [i for i, _, _ in sorted(behind.told, key=lambda t: t[0])] == [0, 1]
  for i, result, message in behind.told:
    np.testing.assert_array_equal(result.token_T, turns[i])
    given = done.choices[i].message.model_dump(exclude_none=True)
    assert given == {k: v for k, v in message.items() if v is not None}


@pytest.mark.parametrize('streamed', [False, True])
async def test_a_whole_answer_is_served_or_not_at_all(streamed):
  """Of a stream the choices that had ended were given."""

  class Breaks(api.Scripted):
    async def generate(self, http, asked, context, choice):
      if choice == 0:
        async for part in super().generate(http, asked, context, choice):
          yield part
        return
      yield api.part([9])
      while not self.asked or self.running:
        await asyncio.sleep(0.01)
      raise ConnectionError('stopping')

  behind = Breaks(api.fmt(), api.says('a'))
  with pytest.raises(openai.APIError, match='stopping'):
    await (stream if streamed else ask)(behind, n=2)
  assert [i for i, _, _ in behind.told] == ([0] if streamed else [])


async def test_a_client_that_goes_away_frees_what_draws_for_it():
  behind = api.Scripted(api.fmt(), api.says('one two three'))
  behind.wait = asyncio.Event()
  async with api.client(behind) as client:
    chunks = await client.chat.completions.create(
      model=api.MODEL, messages=[U], stream=True, n=3
    )
    await anext(aiter(chunks))
    assert behind.running == 3
    await chunks.close()
    await until(lambda: behind.running == 0)
    whole = asyncio.ensure_future(
      client.chat.completions.create(model=api.MODEL, messages=[U], n=2)
    )
    await until(lambda: behind.running == 2)
    whole.cancel()
    await until(lambda: behind.running == 0)
  assert behind.told == []


async def until(true) -> None:
  async with asyncio.timeout(20):
    while not true():
      await asyncio.sleep(0.01)


@pytest.mark.parametrize('streamed', [False, True])
@pytest.mark.parametrize(
  ('error', 'kind'),
  [
    (errors.full(7.2), openai.RateLimitError),
    (ValueError('top_k: got 99, want at most 8'), openai.BadRequestError),
    (ConnectionError('stopping'), openai.InternalServerError),
    (errors.Refused('no such key', status=401), openai.AuthenticationError),
  ],
)
async def test_errors_are_the_client_s_own(error, kind, streamed):
  behind = api.Scripted(api.fmt(), api.says('a'))
  behind.error = error
  with pytest.raises(kind) as raised:
    await ask(behind, stream=streamed, n=2)
  assert behind.running == 0
  if kind is openai.RateLimitError:
    assert raised.value.response.headers['Retry-After'] == '8'
  if kind is openai.BadRequestError:
    assert (raised.value.param, raised.value.type) == ('top_k', 'invalid_request_error')


async def test_an_error_in_mid_stream_is_raised_there():
  behind = api.Scripted(api.fmt(), api.says('one two three'))
  behind.after_part = ConnectionError('stopping')
  with pytest.raises(openai.APIError, match='stopping'):
    await stream(behind)
  assert behind.told == [] and behind.running == 0


async def test_models_are_listed_and_others_are_not_found():
  async with api.client(api.Scripted(api.fmt(), api.says('a'))) as client:
    assert [m.id for m in (await client.models.list()).data] == [api.MODEL, 'other']
    assert (await client.models.retrieve(api.MODEL)).id == api.MODEL
    for lost in (
      client.models.retrieve('gpt-9'),
      client.chat.completions.create(model='gpt-9', messages=[U]),
      client.completions.create(model='gpt-9', prompt='a'),
      client.embeddings.create(model=api.MODEL, input='a'),
    ):
      with pytest.raises(openai.NotFoundError):
        await lost


async def test_completions_take_text_and_ids_and_several_of_them():
  behind = api.Scripted(api.fmt(), api.says('one'), api.says('two'))
  ids = behind.fmt.raw('<|im_start|>b')
  async with api.client(behind) as client:
    done = await client.completions.create(
      model=api.MODEL, prompt=['<|im_start|>a', 'c'], n=2, logprobs=0
    )
    await client.completions.create(model=api.MODEL, prompt=ids, max_tokens=2)
    chunks = [
      chunk
      async for chunk in await client.completions.create(
        model=api.MODEL, prompt='a', stream=True, n=2, logprobs=0,
        stream_options={'include_usage': True},
      )
    ]  # fmt: skip
  assert [(c.index, c.text, c.finish_reason) for c in done.choices] == [
    (0, 'one', 'stop'), (1, 'two', 'stop'), (2, 'one', 'stop'), (3, 'two', 'stop'),
  ]  # fmt: skip
  assert done.choices[1].logprobs.text_offset == [0, 1, 2]
  assert done.choices[1].logprobs.tokens == ['t', 'w', 'o']
  assert behind.asked[0].token_T.tolist() == behind.fmt.raw('<|im_start|>a')
  assert behind.asked[0].max_new == 16
  assert behind.asked[4].token_T.tolist() == ids and behind.asked[4].max_new == 2
  texts = ['', '']
  for chunk in chunks[:-1]:
    texts[chunk.choices[0].index] += chunk.choices[0].text
  assert texts == ['one', 'two'] and chunks[-1].usage.completion_tokens == 8


async def test_fields_that_nobody_knows_are_logged_once(caplog):
  request._warned.clear()
  behind = api.Scripted(api.fmt(), api.says('a'))
  with caplog.at_level(logging.WARNING):
    for _ in range(3):
      await ask(behind, extra_body={'beam_width': 4, 'nothing': None})
  assert [r.getMessage() for r in caplog.records] == [
    "request field 'beam_width' is not known here: ignored"
  ]
