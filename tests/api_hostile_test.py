"""Requests that mean harm, or nothing: an answer of 4xx, and nobody else is hurt."""

import asyncio
import json
import zlib

import aiohttp
import pytest

from swe17.api import app, door
from tests import api_fixtures as api

U = {'role': 'user', 'content': 'a'}
CHAT, COMPLETION = '/v1/chat/completions', '/v1/completions'
TOOL = {'type': 'function', 'function': {'name': 'f'}}


def deep(n: int, inner: object = 1) -> object:
  value = inner
  for _ in range(n):
    value = {'a': value}
  return value


def of(**given) -> bytes:
  return json.dumps({'model': api.MODEL, 'messages': [U], **given}).encode()


def said(**message) -> bytes:
  return of(messages=[{'role': 'user', 'content': 'a', **message}])


BODIES = {
  'nothing': b'',
  'no json': b'hello',
  'cut': of()[:-3],
  'broken utf-8': of()[:-1] + b',"user":"\xff\xfe"}',
  'utf-16': of().decode().encode('utf-16'),
  'a number': b'3',
  'a list': b'[]',
  'null': b'null',
  'deep': b'[' * 200_000,
  'deep objects': b'{"a":' * 100_000,
  'a constant': of()[:-1] + b',"temperature":NaN}',
  'infinity': of()[:-1] + b',"temperature":-Infinity}',
  'many digits': of()[:-1] + b',"n":' + b'9' * 100_000 + b'}',
}
FIELDS = {
  'model': [of(model=3), of(model=None), of(model={'a': 1})],
  'messages': [of(messages=[]), of(messages=None), of(messages='a'), of(messages={})],
  'messages[0]': [of(messages=[3]), of(messages=[[]])],
  'messages[0].role': [said(role=3), said(role='root'), said(role=None), said(role={})],
  'messages[0].content': [
    said(content=None), said(content=3), said(content={}), said(content='\ud800'),
  ],
  'messages[0].content[0]': [said(content=['a'])],
  'messages[0].content[0].type': [
    said(content=[{'type': 'image_url', 'image_url': {'url': 'http://x/'}}]),
    said(content=[{'type': []}]),
  ],
  'messages[0].content[0].text': [said(content=[{'type': 'text', 'text': 3}])],
  'messages[0].tool_calls': [said(role='assistant', tool_calls=3)],
  'messages[0].tool_calls[0]': [
    said(role='assistant', tool_calls=['a']),
    said(role='assistant', tool_calls=[{'id': 'a', 'function': 3}]),
  ],
  'messages[0].tool_calls[0].function.name': [
    said(role='assistant', tool_calls=[{'id': 'a', 'function': {}}])
  ],
  'messages[0].tool_calls[0].function.arguments': [
    said(role='assistant', tool_calls=[
      {'id': 'a', 'function': {'name': 'f', 'arguments': 3}}
    ])
  ],
  'messages[0].tool_call_id': [said(role='tool'), said(role='tool', tool_call_id=3)],
  'tools': [of(tools=3), of(tools={'a': 1}), of(tools=[TOOL] * 600)],
  'tools[0]': [
    of(tools=[3]), of(tools=[{'type': 'retrieval'}]),
    of(tools=[{**TOOL, 'function': {'name': 'f', 'parameters': deep(70)}}]),
    of(tools=[{**TOOL, 'function': {'name': 'f', 'description': '\udfff'}}]),
  ],
  'tools[0].function.name': [of(tools=[{'type': 'function', 'function': {}}])],
  'tools[0].function.parameters': [
    of(tools=[{**TOOL, 'function': {'name': 'f', 'parameters': []}}])
  ],
  'tool_choice': [of(tool_choice='required'), of(tool_choice=TOOL), of(tool_choice=[])],
  'n': [of(n=0), of(n=-1), of(n=10**9), of(n=1.5), of(n='2'), of(n=True)],
  'max_tokens': [of(max_tokens=0), of(max_tokens=-5), of(max_tokens='all')],
  'max_completion_tokens': [of(max_completion_tokens=0), of(max_completion_tokens=[])],
  'temperature': [of(temperature=-1), of(temperature='hot'), of(temperature=1e300)],
  'top_p': [of(top_p=2), of(top_p=-0.1), of(top_p=[1])],
  'top_k': [of(top_k=-2), of(top_k=1.0), of(top_k=True)],
  'min_p': [of(min_p=-1), of(min_p=7)],
  'seed': [of(seed='x'), of(seed=1 << 80), of(seed=1.5)],
  'stop': [of(stop=3), of(stop=['']), of(stop=['a'] * 99), of(stop='x' * 999)],
  'stream': [of(stream='yes'), of(stream=1)],
  'stream_options': [of(stream_options=3), of(stream_options={'include_usage': True})],
  'logprobs': [of(logprobs=1)],
  'top_logprobs': [of(logprobs=True, top_logprobs=2), of(top_logprobs='a')],
  'response_format': [of(response_format={'type': 'json_object'})],
  'parallel_tool_calls': [of(parallel_tool_calls=False)],
  'logit_bias': [of(logit_bias={'3': 5})],
  'presence_penalty': [of(presence_penalty=0.5)],
  'functions': [of(functions=[{'name': 'f'}])],
}  # fmt: skip
PROMPTS = [None, 3, {}, [], [[]], [['a']], ['a', 3], [-1], [1 << 40], '\ud800']
PROMPTS += [[True], ['a'] * 999, [[1], ['b']]]


@pytest.fixture
async def served():
  behind = api.Scripted(api.fmt(), api.says('fine'))
  async with api.serving(behind) as server, aiohttp.ClientSession() as http:
    yield behind, server, http


async def post(served, body: bytes, path: str = CHAT, **given):
  """(status, error) of a request, once it is known that others are still served."""
  _, server, http = served
  async with http.post(server.make_url(path), data=body, **given) as response:
    status, text = response.status, await response.text()
  async with http.post(server.make_url(CHAT), data=of()) as response:
    good = await response.json()
    assert response.status == 200
    assert good['choices'][0]['message']['content'] == 'fine'
  return status, json.loads(text)


@pytest.mark.parametrize('name', BODIES)
@pytest.mark.parametrize('path', [CHAT, COMPLETION])
async def test_bodies_that_are_no_request_are_400(served, name, path):
  status, got = await post(served, BODIES[name], path)
  assert status == 400 and got['error']['type'] == 'invalid_request_error'
  assert len(got['error']['message']) < 400


@pytest.mark.parametrize('field', FIELDS)
async def test_a_bad_value_is_400_and_names_its_field(served, field):
  for body in FIELDS[field]:
    status, got = await post(served, body)
    assert (status, got['error']['param']) == (400, field), got
    assert len(got['error']['message']) < 400


async def test_a_bad_prompt_is_400_and_names_it(served):
  for prompt in PROMPTS:
    body = json.dumps({'model': api.MODEL, 'prompt': prompt}).encode()
    status, got = await post(served, body, COMPLETION)
    assert (status, got['error']['param']) == (400, 'prompt'), prompt
  many = {'model': api.MODEL, 'prompt': ['a'] * 100, 'n': 100}
  status, got = await post(served, json.dumps(many).encode(), COMPLETION)
  assert (status, got['error']['param']) == (400, 'n')
  asked = {'model': api.MODEL, 'prompt': 'a'}
  for field, value in (('echo', True), ('best_of', 4), ('suffix', 'x')):
    status, got = await post(
      served, json.dumps({**asked, field: value}).encode(), COMPLETION
    )
    assert (status, got['error']['param']) == (400, field)


async def test_deep_arguments_of_a_call_are_taken_as_text(served):
  arguments = json.dumps(deep(400))
  call = {'id': 'a', 'type': 'function', 'function': {'name': 'f'}}
  for text in (arguments, '{"a":' * 5_000, '[' * 100_000):
    call['function']['arguments'] = text
    message = {'role': 'assistant', 'content': None, 'tool_calls': [call]}
    status, got = await post(served, of(messages=[U, message]))
    # Too long for the context at most.
    assert status == 200 or got['error']['code'] == 'context_length_exceeded'


async def test_an_oversize_body_is_413(served):
  status, got = await post(served, b'x' * (app.MAX_BODY + 1))
  assert status == 413 and str(app.MAX_BODY) in got['error']['message']

  async def endless():
    for _ in range(20):
      yield b'{"messages": [' * 100_000

  status, _ = await post(served, endless())
  assert status == 413


async def test_a_compressed_body_of_gigabytes_or_of_nonsense_is_4xx(served):
  squeeze = zlib.compressobj()
  bomb = squeeze.compress(bytes(64 << 20)) + squeeze.flush()
  _, server, http = served
  for data in (bomb, b'nonsense'):
    headers = {'Content-Encoding': 'deflate', 'Connection': 'close'}
    async with http.post(server.make_url(CHAT), data=data, headers=headers) as response:
      assert 400 <= response.status < 500
  await post(served, of())


async def test_a_client_that_sends_slowly_is_408(served, monkeypatch):
  monkeypatch.setattr(door, 'PATIENCE', 0.2)

  async def slow():
    yield of()[:20]
    await asyncio.sleep(3)

  status, _ = await post(served, slow())
  assert status == 408


async def test_a_client_that_does_not_read_is_dropped(served, monkeypatch):
  """Half a gigabyte of answer does not wait here for somebody to fetch it."""
  monkeypatch.setattr(door, 'PATIENCE', 0.3)
  behind, server, _ = served
  behind.max_context, behind.size = 1 << 20, 4096
  behind.turns = [behind.fmt.raw('abcdefgh' * 2_000) * 30]
  reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**10)
  body = of(stream=True, logprobs=True, n=4)
  head = f'POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n'
  writer.write(head.encode() + body)
  async with asyncio.timeout(30):
    while not behind.running:
      await asyncio.sleep(0.01)
    while behind.running:
      await asyncio.sleep(0.05)
  assert behind.told == []
  writer.close()
  del reader


async def test_a_client_that_leaves_before_its_body_is_there_hurts_nobody(served):
  behind, server, _ = served
  for data in (
    b'POST ',
    b'POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{',
  ):
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(data)
    await writer.drain()
    writer.close()
  await post(served, of())
  assert behind.running == 0


async def test_more_requests_than_may_be_open_are_429(served, monkeypatch):
  monkeypatch.setattr(app, '_MOST_OPEN', 2)
  behind, server, http = served
  behind.wait = asyncio.Event()
  url = server.make_url(CHAT)
  open_ones = [asyncio.ensure_future(http.post(url, data=of())) for _ in range(2)]
  while behind.running < 2:
    await asyncio.sleep(0.01)
  async with http.post(url, data=of()) as response:
    assert (response.status, response.headers['Retry-After']) == (429, '1')
    assert (await response.json())['error']['type'] == 'rate_limit_error'
  behind.wait.set()
  assert [(await one).status for one in open_ones] == [200, 200]
  await post(served, of())


async def test_other_routes_and_methods_are_404_in_the_same_form(served):
  _, server, http = served
  for method, path in (
    ('GET', CHAT), ('PUT', CHAT), ('POST', '/v1/embeddings'), ('GET', '/v1/'),
    ('GET', '/v1/models/%00/../../etc/passwd'), ('DELETE', '/v1/models'),
  ):  # fmt: skip
    async with http.request(method, server.make_url(path)) as response:
      assert response.status == 404, (method, path)
