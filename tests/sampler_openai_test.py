"""A real engine behind HTTP: parts, back-pressure, and clients that go away."""

import asyncio
from collections.abc import AsyncGenerator
import contextlib
import json
import struct

import aiohttp
from aiohttp import test_utils
import jax
import numpy as np
import openai
from prometheus_client import parser
import pytest

from swe17 import config, types, wire
from swe17.agent import formats
from swe17.model import params as p
from swe17.sampler import engine, http

MODEL = config.Model(
  layers=1, width=32, ffn=64, heads=2, kv_heads=1, head_dim=16, rotary_dim=8
)
FMT = formats.load()
LENGTH = 1024
CFG = config.Sampler(
  slots=4, decode_steps=4, prefill_rows=2, prefill_chunk=16, top_k=8, queue=8,
  poll_seconds=0.01,
)  # fmt: skip
U = {'role': 'user', 'content': 'Mend it.'}


@pytest.fixture(scope='module')
def started():
  abstract = p.abstract(MODEL, FMT.vocab_size)
  weights = p.rounded(p.init(abstract, jax.random.key(0)))
  made = engine.Engine(
    weights, 4, model=MODEL, cfg=CFG, length=LENGTH, swap=lambda: None
  )
  made.start()
  yield made
  made.close()


@contextlib.asynccontextmanager
async def served(
  serving: engine.Engine,
) -> AsyncGenerator[tuple[str, openai.AsyncOpenAI]]:
  """(address, the official client)."""
  chat = http.Direct(serving, FMT, CFG, LENGTH, ('swe17', 'org/tiny'))
  async with test_utils.TestServer(http.app(serving, chat)) as server:
    url = str(server.make_url('')).rstrip('/')
    async with openai.AsyncOpenAI(
      base_url=url + '/v1', api_key='none', max_retries=0, timeout=60
    ) as client:
      yield url, client


def ask(**changes) -> types.GenerateRequest:
  values = {
    'session': 'a',
    'token_T': np.arange(9, 29, dtype=np.int32),
    'max_new': 30,
    'stop_ids': (1,),
    'sampling': CFG.sampling,
    'key': (1, 2),
  }
  return types.GenerateRequest(**{**values, **changes})


async def frames(url: str, request: types.GenerateRequest) -> list[bytes]:
  async with (
    aiohttp.ClientSession() as session,
    session.post(
      f'{url}/generate?stream=1', data=wire.request_to_bytes(request)
    ) as response,
  ):
    assert response.status == 200, await response.text()
    data, made = await response.read(), []
  while data:
    (n,) = struct.unpack_from('<I', data)
    made.append(data[4 : 4 + n])
    data = data[4 + n :]
  return made


async def until(true) -> None:
  async with asyncio.timeout(60):
    while not true():
      await asyncio.sleep(0.01)


@pytest.mark.parametrize('pause', [0.0, 0.005, 10.0])
async def test_parts_joined_are_the_whole_answer(started, pause, monkeypatch):
  monkeypatch.setattr(http, '_PAUSE', pause)
  async with served(started) as (url, _):
    parts = [wire.bytes_to_result(data) for data in await frames(url, ask())]
  assert pause or len(parts) > 1
  assert pause < 10 or len(parts) == 1
  assert [part.finish for part in parts[:-1]] == [''] * (len(parts) - 1)
  got, want = types.join(parts), started.submit(ask()).result(60)
  np.testing.assert_array_equal(got.token_T, want.token_T)
  np.testing.assert_array_equal(got.kept.ids, want.kept.ids)
  np.testing.assert_allclose(got.logp_T, want.logp_T, atol=1e-5)
  assert got.finish == want.finish


async def test_beyond_the_queue_callers_are_sent_away_and_told_when_to_come(started):
  waiting = [
    started.submit(ask(session=f's{i}', min_version=9)) for i in range(CFG.queue)
  ]
  await until(lambda: not started.room())
  async with served(started) as (url, client), aiohttp.ClientSession() as session:
    for query in ('', '?stream=1'):
      async with session.post(
        f'{url}/generate{query}', data=wire.request_to_bytes(ask())
      ) as response:
        assert response.status == 429
        assert 1 <= int(response.headers['Retry-After']) <= 60
    for stream in (False, True):
      with pytest.raises(openai.RateLimitError) as full:
        await client.chat.completions.create(model='swe17', messages=[U], stream=stream)
      assert int(full.value.response.headers['Retry-After']) >= 1
    async with session.get(f'{url}/health') as response:
      got = await response.json()
      assert (got['room'], got['waiting']) == (False, CFG.queue)
    for future in waiting:
      assert started.cancel(future)
    await until(started.room)
    done = await client.chat.completions.create(
      model='swe17', messages=[U], max_tokens=4
    )
    assert done.usage.completion_tokens <= 4


@pytest.mark.parametrize('streamed', [False, True])
async def test_a_client_that_goes_away_frees_its_slots(started, streamed):
  await until(lambda: started.busy == 0)
  async with served(started) as (url, client):
    body = wire.request_to_bytes(ask(max_new=1000, stop_ids=()))
    async with aiohttp.ClientSession() as session:
      query = '?stream=1' if streamed else ''
      asked = asyncio.ensure_future(session.post(f'{url}/generate{query}', data=body))
      await until(lambda: started.busy == 1)
      asked.cancel()
    await until(lambda: started.busy == 0)
    drawn = started.sampled
    asked = asyncio.ensure_future(
      client.chat.completions.create(
        model='swe17', messages=[U], n=6, stream=streamed, max_tokens=900
      )
    )
    await until(lambda: started.busy == 6)
    if streamed:
      chunks = await asked
      await anext(aiter(chunks))
      await chunks.close()
    else:
      asked.cancel()
    await until(lambda: started.busy == 0)
  assert started.sampled - drawn < 6 * 900


async def test_equal_seeds_give_equal_text_streamed_or_not(started):
  given = {'model': 'swe17', 'messages': [U], 'seed': 3, 'n': 8, 'max_tokens': 12}
  async with served(started) as (_, client):
    first, again = [await client.chat.completions.create(**given) for _ in range(2)]
    texts = [choice.message.content for choice in first.choices]
    assert [choice.message.content for choice in again.choices] == texts
    assert len(set(texts)) > 1 and first.system_fingerprint == 'v4'
    told = [''] * 8
    async for chunk in await client.chat.completions.create(**given, stream=True):
      for choice in chunk.choices:
        told[choice.index] += choice.delta.content or ''
    assert told == texts
    other = await client.chat.completions.create(**{**given, 'seed': 4})
    assert [choice.message.content for choice in other.choices] != texts


async def test_logprobs_are_the_engine_s(started):
  async with served(started) as (_, client):
    done = await client.chat.completions.create(
      model='swe17', messages=[U], seed=1, max_tokens=10, logprobs=True
    )
  (choice,) = done.choices
  context = FMT.conversation([U])
  assert done.usage.prompt_tokens == len(context)
  # The engine itself, asked for the same key.
  high, low = np.random.SeedSequence([1, 0]).generate_state(2)
  want = started.submit(
    ask(
      token_T=np.array(context, np.int32),
      max_new=10,
      stop_ids=FMT.stop_ids,
      key=(int(high), int(low)),
    )
  ).result(60)
  got = choice.logprobs.content
  n = len(want.token_T) - (want.finish == 'stop')
  assert [bytes(t.bytes) for t in got] == [
    FMT.to_bytes([token]) for token in want.token_T[:n].tolist()
  ]
  np.testing.assert_allclose([t.logprob for t in got], want.logp_T[:n], atol=1e-5)


async def test_temperature_0_is_served_and_always_the_same(started):
  async with served(started) as (_, client):
    texts = {
      (
        await client.chat.completions.create(
          model='swe17', messages=[U], temperature=0, max_tokens=8, seed=seed
        )
      ).choices[0].message.content
      for seed in (1, 2, 3)
    }  # fmt: skip
  assert len(texts) == 1


async def test_what_the_engine_refuses_is_400_and_names_its_field(started):
  async with served(started) as (_, client):
    for field, value in (('top_k', 99), ('prompt', [FMT.vocab_size])):
      given = {'prompt': 'a', field: value}
      extra = {'top_k': given.pop('top_k')} if 'top_k' in given else {}
      with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model='swe17', **given, extra_body=extra)
      assert refused.value.param == field
    with pytest.raises(openai.BadRequestError, match='at most 8'):
      await client.chat.completions.create(model='swe17', messages=[U], n=9)
    with pytest.raises(openai.BadRequestError) as refused:
      await client.completions.create(model='swe17', prompt='a ' * 2 * LENGTH)
    assert refused.value.code == 'context_length_exceeded'
    with pytest.raises(openai.NotFoundError):
      await client.completions.create(model='gpt-9', prompt='a')


async def test_prometheus_reads_what_was_done_and_nothing_was_compiled(started):
  async with served(started) as (url, client), aiohttp.ClientSession() as session:

    async def read() -> dict[str, float]:
      async with session.get(f'{url}/metrics') as response:
        assert response.headers['Content-Type'].startswith('text/plain')
        text = await response.text()
      families = parser.text_string_to_metric_families(text)
      return {
        s.name + ''.join(f'|{v}' for v in s.labels.values()): s.value
        for family in families
        for s in family.samples
      }

    before = await read()
    await client.chat.completions.create(model='swe17', messages=[U], max_tokens=5)
    async with session.post(f'{url}/generate', data=b'x') as response:
      assert response.status == 400
    async with session.get(f'{url}/nowhere/{id(read)}') as response:
      assert response.status == 404
    after = await read()
  name = 'swe17_sampler_'
  assert after[name + 'requests_total'] == before.get(name + 'requests_total', 0) + 1
  assert after[name + 'tokens_drawn_total'] > before[name + 'tokens_drawn_total']
  assert after[name + 'compilations_total'] == 0
  assert after[name + 'weight_version'] == 4 and after[name + 'busy_slots'] == 0
  assert after[name + 'http_answers_total|/v1/chat/completions|200'] == 1
  assert after[name + 'http_answers_total|/generate|400'] == 1
  assert after[name + 'http_answers_total|none|404'] == 1
  assert after[name + 'http_seconds_count|/v1/chat/completions'] == 1


async def test_an_engine_that_stops_in_mid_stream_says_so_in_the_stream(started):
  """The last test of this file: the engine is no more after it."""
  async with served(started) as (url, client):
    asked = asyncio.ensure_future(frames(url, ask(max_new=1000, stop_ids=())))
    chunks = await client.chat.completions.create(
      model='swe17', messages=[U], stream=True, max_tokens=900
    )
    await anext(aiter(chunks))
    await until(lambda: started.sampled > 20)
    started.close()
    *parts, empty, error = await asked
    assert parts and empty == b'' and 'stopped' in json.loads(error)['error']
    with pytest.raises(openai.APIError, match='stopped'):
      async for _ in chunks:
        pass
    with pytest.raises(openai.InternalServerError):
      await client.chat.completions.create(model='swe17', messages=[U])
