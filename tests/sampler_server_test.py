"""The sampler's HTTP interface: sound requests, hostile ones, health, and its end."""

import asyncio
from collections.abc import AsyncIterator
import dataclasses
import json
import struct
import threading

from aiohttp import test_utils
import jax
import numpy as np
import pytest
import xxhash
import zstandard

from swe17 import config, types, wire
from swe17.metrics import records, status
from swe17.model import params as p
from swe17.sampler import engine, http, server
from swe17.sampler import weights as following
from swe17.store import kv

MODEL = config.Model(
  layers=2, width=64, ffn=128, heads=4, kv_heads=2, head_dim=16, rotary_dim=8
)
V, LENGTH = 97, 64
CFG = config.Sampler(
  slots=4, decode_steps=4, prefill_rows=2, prefill_chunk=8, top_k=8, poll_seconds=0.01
)


@pytest.fixture(scope='module')
def params() -> p.Params:
  return p.rounded(p.init(p.abstract(MODEL, V), jax.random.key(0)))


@pytest.fixture(scope='module')
def started(params):
  made = engine.Engine(
    params, 4, model=MODEL, cfg=CFG, length=LENGTH, swap=lambda: None
  )
  made.start()
  yield made
  made.close()


@pytest.fixture
async def client(started) -> AsyncIterator[test_utils.TestClient]:
  async with test_utils.TestClient(test_utils.TestServer(http.app(started))) as made:
    yield made


def ask(**changes) -> types.GenerateRequest:
  values = {
    'session': 'a',
    'token_T': np.arange(9, dtype=np.int32),
    'max_new': 6,
    'stop_ids': (3,),
    'sampling': CFG.sampling,
    'key': (1, 2),
  }
  return types.GenerateRequest(**{**values, **changes})


def frame(raw: bytes) -> bytes:
  """A record with a right magic and hash around any bytes."""
  body = zstandard.ZstdCompressor().compress(raw)
  return b'S17\x01' + xxhash.xxh3_64_digest(body) + body


def record(meta, arrays=()) -> bytes:
  header = json.dumps({'meta': meta, 'arrays': list(arrays)}).encode()
  return frame(struct.pack('<I', len(header)) + header)


def changed(**changes) -> bytes:
  """A request whose meta was tampered with."""
  meta, arrays = wire.decode(wire.request_to_bytes(ask()))
  return wire.encode({**meta, **changes}, arrays)


async def refused(client, body: bytes) -> str:
  response = await client.post('/generate', data=body)
  assert response.status == 400, await response.text()
  return (await response.json())['error']


async def test_tokens_go_in_and_come_out_with_all_that_they_carry(client, started):
  request = ask()
  response = await client.post('/generate', data=wire.request_to_bytes(request))
  assert response.status == 200
  got = wire.bytes_to_result(await response.read())
  want = started.submit(request).result(60)
  np.testing.assert_array_equal(got.token_T, want.token_T)
  np.testing.assert_array_equal(got.kept.ids, want.kept.ids)
  np.testing.assert_array_equal(got.version_T, 4)
  np.testing.assert_allclose(got.logp_T, want.logp_T, atol=1e-5)


async def test_health_tells_the_version_and_the_tokens_drawn(client, started):
  before = await (await client.get('/health')).json()
  await client.post('/generate', data=wire.request_to_bytes(ask(stop_ids=())))
  after = await (await client.get('/health')).json()
  assert after == {
    'version': 4,
    'busy': 0,
    'sampled': before['sampled'] + 6,
    'waiting': 0,
    'room': True,
    'stopping': False,
  }


sound = wire.request_to_bytes(ask())
HOSTILE = {
  'empty': b'',
  'text': b'{"prompt": "hello"}',
  'cut': sound[:-7],
  'flipped': sound[:-1] + bytes([sound[-1] ^ 1]),
  'no frame': b'S17\x01' + xxhash.xxh3_64_digest(b'zz') + b'zz',
  'no header': frame(b''),
  'long header': frame(struct.pack('<I', 1 << 31) + b'{}'),
  'no json': frame(struct.pack('<I', 2) + b'{]'),
  'deep json': frame(struct.pack('<I', 100_000) + b'[' * 100_000),
  'list for a header': frame(struct.pack('<I', 2) + b'[]'),
  'no meta': record({}),
  'meta is a list': record([1, 2]),
  'huge shape': record({}, [['token', '<i4', [1 << 70]]]),
  'negative shape': record({}, [['token', '<i4', [-1]]]),
  'objects': record({}, [['token', '|O', [1]]]),
  'unknown dtype': record({}, [['token', 'nonsense', [1]]]),
  'another record': wire.encode({'finish': 'stop'}, {}),
  'sampling is a number': changed(sampling=3),
  'unknown filter': changed(sampling={'beam': 4}),
  'stop_ids is a number': changed(stop_ids=3),
  'key is null': changed(key=None),
}
NAMED = {
  'max_new': changed(max_new=1 << 40),
  'key': changed(key=[1, 'x']),
  'temperature': changed(sampling={'temperature': 'hot', 'top_k': 3}),
  'top_k': changed(sampling={'top_k': 1 << 40}),
  'min_version': changed(min_version='newest'),
  'session': changed(session=['a']),
  'stop_ids': changed(stop_ids=[1 << 40]),
  'token': wire.request_to_bytes(ask(token_T=np.array([V], np.int32))),
}


@pytest.mark.parametrize('name', HOSTILE)
async def test_bytes_that_are_no_request_get_400_and_hurt_nobody(client, name):
  assert await refused(client, HOSTILE[name])
  response = await client.post('/generate', data=sound)
  assert response.status == 200


@pytest.mark.parametrize('field', NAMED)
async def test_a_bad_value_gets_400_with_the_name_of_its_field(client, field):
  assert (await refused(client, NAMED[field])).startswith(field)
  response = await client.post('/generate', data=sound)
  assert response.status == 200


async def test_a_body_over_the_limit_gets_413(client):
  response = await client.post('/generate', data=bytes((8 << 20) + 1))
  assert response.status == 413


async def test_a_small_body_that_unpacks_to_gigabytes_gets_400(client):
  squeeze = zstandard.ZstdCompressor(level=1).compressobj(size=4 << 30)
  body = squeeze.compress(bytes(1 << 20)) + squeeze.flush(
    zstandard.COMPRESSOBJ_FLUSH_BLOCK
  )
  bomb = b'S17\x01' + xxhash.xxh3_64_digest(body) + body
  assert str(4 << 30) in await refused(client, bomb)
  nobody_knows = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(99))
  bomb = b'S17\x01' + xxhash.xxh3_64_digest(nobody_knows) + nobody_knows
  assert 'unpacks' in await refused(client, bomb)


async def test_other_paths_and_methods_are_not_served(client):
  assert (await client.get('/')).status == 404
  assert (await client.get('/generate')).status == 405


class Follower:
  """Gives nothing new, until it breaks."""

  def __init__(self):
    self.broken = False

  def poll(self):
    if self.broken:
      raise ZeroDivisionError('a bug')


async def test_a_sampler_whose_follower_dies_stops_instead_of_serving_old_weights(
  params, tmp_path, monkeypatch
):
  died = []
  monkeypatch.setattr(threading, 'excepthook', lambda args: died.append(args.thread))
  cfg = config.Config(run_dir=str(tmp_path), store=f'file://{tmp_path}/s', sampler=CFG)
  events = records.EventLog(str(tmp_path / 'sampler-0.jsonl'))
  weights = following.Weights(cfg, events)
  weights._follower = follower = Follower()
  weights._thread.start()
  made = engine.Engine(
    params, 3, model=MODEL, cfg=CFG, length=LENGTH, swap=weights.swap
  )
  made.start()
  says = status.Status(cfg.run_dir, 'sampler-0')
  serving = asyncio.ensure_future(server._serve(made, cfg, 0, threading.Event(), says))
  assert (await asyncio.to_thread(made.submit(ask()).result, 60)).version_T[0] == 3
  late = made.submit(dataclasses.replace(ask(), min_version=4))
  follower.broken = True
  await asyncio.wait_for(serving, 60)  # nobody told it to stop
  with pytest.raises(ConnectionError, match='no newer weights can arrive'):
    await asyncio.wrap_future(late)
  assert isinstance(made.error, RuntimeError)  # so `run` returns 1
  assert isinstance(made.error.__cause__, ZeroDivisionError)
  assert kv.open(cfg.store).list('samplers/') == []
  assert {thread.name for thread in died} == {'follow', 'engine'}
  events.close()


async def test_a_sampler_that_is_told_to_stop_ends_what_is_open_and_takes_no_more(
  params, tmp_path
):
  cfg = config.Config(run_dir=str(tmp_path), store=f'file://{tmp_path}/s', sampler=CFG)
  made = engine.Engine(
    params, 0, model=MODEL, cfg=CFG, length=LENGTH, swap=lambda: None
  )
  made.start()
  says = status.Status(cfg.run_dir, 'sampler-0')
  stopped = threading.Event()
  serving = asyncio.ensure_future(server._serve(made, cfg, 0, stopped, says))
  drawn = threading.Event()
  ask_long = ask(max_new=50, stop_ids=())
  late = made.submit(ask_long, lambda part: drawn.set())
  await asyncio.to_thread(drawn.wait, 60)
  stopped.set()
  await asyncio.wait_for(serving, 60)
  assert made.stopping
  assert (await asyncio.wrap_future(late)).token_T.size == 50
  with pytest.raises(ConnectionError, match='stopping'):
    made.submit(ask())
  assert kv.open(cfg.store).list('samplers/') == []


async def test_what_has_not_ended_in_time_is_given_up(params, tmp_path):
  short = dataclasses.replace(CFG, drain_seconds=0.2)
  cfg = config.Config(
    run_dir=str(tmp_path), store=f'file://{tmp_path}/s', sampler=short
  )
  made = engine.Engine(
    params, 0, model=MODEL, cfg=short, length=LENGTH, swap=lambda: None
  )
  made.start()
  says = status.Status(cfg.run_dir, 'sampler-0')
  late = made.submit(dataclasses.replace(ask(), min_version=9))
  stopped = threading.Event()
  stopped.set()
  await asyncio.wait_for(server._serve(made, cfg, 0, stopped, says), 60)
  with pytest.raises(ConnectionError, match='stopped'):
    await asyncio.wrap_future(late)


async def test_open_requests_get_503_when_the_engine_ends(params):
  made = engine.Engine(
    params, 0, model=MODEL, cfg=CFG, length=LENGTH, swap=lambda: None
  )
  served = test_utils.TestServer(http.app(made))
  async with test_utils.TestClient(served) as client:
    made.start()
    late = dataclasses.replace(ask(), min_version=9)
    post = client.post('/generate', data=wire.request_to_bytes(late))
    waiting = asyncio.ensure_future(post)
    while not made.busy:
      await asyncio.sleep(0.01)
    made.close()
    assert (await waiting).status == 503
    after = await client.post('/generate', data=sound)
    assert after.status == 503
