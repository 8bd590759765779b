"""Relay: what it refuses, what it holds, and its roles as processes."""

import asyncio
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest

from experiments import options
from launch import local
from swe17 import config, settings
from swe17.metrics import records
from swe17.store import faults, kv
from swe17.sync import (
  follower,
  manifest,
  publisher,
  relay,
  relay_cache,
  relay_client,
  relay_node,
  relay_route,
  relay_source,
)
from tests import relay_fixtures as rf


@pytest.fixture
async def world(tmp_path, monkeypatch):
  monkeypatch.setattr(relay_node, '_LISTED', 0.05)
  async with rf.opened(tmp_path) as made:
    yield made


async def test_with_a_secret_only_those_who_have_it_are_served(world, monkeypatch):
  monkeypatch.setenv(relay_source.TOKEN_VARIABLE, 'open sesame')
  world.publish(0)
  for index in (0, 1):
    await world.start(index, rf.NO_BUCKET)
  await rf.settle(world.follow(1, rf.NO_BUCKET), 0)
  path = f'/read/{manifest.key_of(0)}'
  for token, status in (('', 401), ('open', 401), ('open sesame', 200)):
    async with rf.asking(world, 0, token=token) as session:
      assert (await session.get(path)).status == status


HOSTILE = {
  'samplers/0.json': 400,
  'groups/00000000': 400,
  'weights/ack/a.json': 400,
  'weights/manifest/../../../etc/passwd': 400,
  '%2e%2e/%2e%2e/etc/passwd': 400,
  'weights/data/..%2f..%2fx.bin': 400,
  'weights/data/00000000-a/../../x.bin': 400,
  'weights/data/00000000-a/x.bin': 400,
  'weights/data/00000000-%00.bin': 400,
  'weights/manifest/0.json': 400,
  'weights/manifest/-0000001.json': 400,
  'weights/manifest/' + '9' * 2000 + '.json': 400,
  'weights/manifest/99999999.json': 404,
  'weights/data/00000000-nobody-1.bin': 410,
  'weights/manifest/00000000.json?wait=nan': 400,
  'weights/manifest/00000000.json?wait=1e9': 400,
  'weights/manifest/00000000.json?wait=-1': 400,
  'weights/manifest/00000000.json?start=-5': 400,
  'weights/manifest/00000000.json?start=9&stop=3': 400,
  'weights/manifest/00000000.json?start=x': 400,
  'weights/manifest/00000000.json?start=0&stop=99999999999999999999': 200,
}


async def test_hostile_requests_get_an_answer_and_nothing_else(world):
  world.publish(0)
  await world.start(0)
  await rf.until(lambda: world.nodes[0].newest == 0 and not world.nodes[0]._ahead)
  url = json.loads(world.store.read('relays/main/0.json'))['url']
  before = sorted(world._folder.rglob('*'))
  run = relay_source.run_name(world.store.url, 'main')
  for path, want in HOSTILE.items():
    host, _, port = url.removeprefix('http://').partition(':')
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f'GET /read/{path} HTTP/1.1\r\nHost: x\r\n{relay_source.RUN}: {run}\r\n'
    writer.write(f'{head}Connection: close\r\n\r\n'.encode())
    status = (await asyncio.wait_for(reader.read(), rf.DEADLINE)).split(b' ')[1]
    assert int(status) == want, path
    writer.close()
  async with rf.asking(world, 0) as session:
    key = manifest.key_of(0)
    for verb in ('post', 'put', 'delete'):
      assert (await getattr(session, verb)(f'/read/{key}', data=b'x')).status == 405
    part = await session.get(f'/read/{key}?start=2&stop=9')
    assert await part.read() == world.store.read(key)[2:9]
  assert sorted(world._folder.rglob('*')) == before
  assert set(world.reads(0)) <= {*world.store.list('weights/'), manifest.key_of(1)}


async def test_a_client_that_goes_away_or_reads_nothing_does_no_harm(world):
  world.publish(0)
  node = await world.start(0)
  await rf.until(lambda: node.newest == 0 and not node._ahead)
  huge = 'weights/data/00000000-huge-1.bin'
  node._cache.put(huge, 0, bytes(64 << 20))
  port = node._runner.addresses[0][1]
  run = relay_source.run_name(world.store.url, 'main')
  for wait in (False, True):
    reader, writer = await asyncio.open_connection('127.0.0.1', port, limit=1024)
    head = f'GET /read/{huge} HTTP/1.1\r\nHost: x\r\n{relay_source.RUN}: {run}\r\n\r\n'
    writer.write(head.encode())
    await reader.readexactly(64)
    if wait:  # reads no further: after `stall_seconds` it is let go
      await rf.until(lambda: node._held == 0)
    writer.transport.abort()
  await rf.until(lambda: node._held == 0)
  assert node.served < 100 << 20
  await rf.settle(world.follow(0), 0)


async def test_ranges_through_the_tree_are_those_of_the_store(world):
  world.publish(0)
  for index in (0, 1):
    await world.start(index, rf.NO_BUCKET)
  await rf.settle(world.follow(1, rf.NO_BUCKET), 0)
  client = world.clients[0]
  for key in world.store.list(manifest.DATA) + [manifest.key_of(0)]:
    whole = world.store.read(key)
    for start, stop in ((None, None), (0, 5), (7, None), (3, 10**9), (10**9, None)):
      got = await asyncio.to_thread(client.read, key, start, stop)
      assert got == whole[start:stop]
  assert await asyncio.to_thread(client.list, manifest.MANIFESTS) == [
    manifest.key_of(0)
  ]
  for key in ('groups/00000000', 'weights/ack/x.json'):
    with pytest.raises(ValueError, match='want weights'):
      await asyncio.to_thread(client.read, key)
  with pytest.raises(kv.StoreError, match='read-only'):
    client.write(manifest.key_of(1), b'')


async def test_closing_a_client_ends_a_question_that_is_held(world):
  world.publish(0)
  cfg = dataclasses.replace(rf.NO_BUCKET, wait_seconds=60.0)
  node = await world.start(0, cfg)
  await rf.settle(world.follow(0, cfg), 0)  # it asked for the next one too
  (client,) = world.clients
  waiting = asyncio.create_task(asyncio.to_thread(client.read, manifest.key_of(1)))
  await rf.until(lambda: node._held == 1)
  await asyncio.to_thread(client.close)
  with pytest.raises(kv.StoreError, match='closed'):
    await asyncio.wait_for(waiting, rf.DEADLINE)


def test_the_cache_is_bounded_and_what_its_disk_damages_is_dropped(tmp_path):
  (tmp_path / 'left.object').write_bytes(b'of an earlier process')
  cache = relay_cache.Cache(tmp_path, 1000)
  assert not list(tmp_path.iterdir())
  for version in range(10):
    assert cache.put(
      f'weights/data/{version:08d}-a-1.bin', version, bytes([version] * 300)
    )
  assert cache.keys() == [f'weights/data/{v:08d}-a-1.bin' for v in (7, 8, 9)]
  assert cache.size == 900 == sum(p.stat().st_size for p in tmp_path.iterdir())
  cold = cache._hot
  cold.clear()
  path = cache._entries[cache.keys()[0]].path
  path.write_bytes(b'\x07' * 299 + b'\x06')
  first, *others = cache.keys()
  assert cache.read(first) is None and cache.keys() == others
  assert cache.read(others[0]) == bytes([8] * 300)
  path = cache._entries[others[1]].path
  path.unlink()
  assert cache.read(others[1]) is None


def test_a_full_disk_costs_the_cache_and_not_the_object(tmp_path):
  cache = relay_cache.Cache(tmp_path, 1000)
  key = 'weights/data/00000000-a-1.bin'
  name = hashlib.sha256(key.encode()).hexdigest()[:40]
  (tmp_path / f'{name}.object').symlink_to('/dev/full')
  assert not cache.put(key, 0, b'abc')
  assert cache.keys() == [] and cache.read(key) is None
  assert not list(tmp_path.iterdir())


def test_data_is_covered_by_its_blocks_to_the_last_byte():
  def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

  key, data = 'weights/data/00000000-a-1.bin', b'abcdefgh'
  rows = [(0, 3, sha(b'abc')), (3, 8, sha(b'defgh'))]
  held = relay_route.Contents(0, True, {key: 8}, {key: rows})
  whole = relay_source.Span(key, 8, 0, 8)
  relay_route.check(held, whole, data)
  relay_route.check(held, relay_source.Span(key, 8, 2, 8), data[2:])
  for bad in (b'abcdefgH', b'Abcdefgh', b'abcdefg', b'abcdefghi', b''):
    with pytest.raises(ValueError, match=key):
      relay_route.check(held, whole, bad)
  for hole in ([rows[0]], [rows[1]], []):
    held = relay_route.Contents(0, True, {key: 8}, {key: hole})
    with pytest.raises(ValueError, match='no block names'):
      relay_route.check(held, whole, data)


@pytest.mark.parametrize('fanout', [1, 2, 3, 4])
def test_every_node_has_one_way_up_to_the_controller(fanout):
  children: dict[int, int] = {}
  for index in range(1, 50):
    way = relay_route.ancestors(index, fanout)
    assert way[-1] == 0 and list(way) == sorted(way, reverse=True)
    children[way[0]] = children.get(way[0], 0) + 1
    assert relay_route.ancestors(way[0], fanout) == way[1:]
  assert max(children.values()) == fanout
  assert relay_route.ancestors(0, fanout) == ()


def test_fixed_places_need_no_store(tmp_path):
  cfg = dataclasses.replace(rf.CFG, nodes='a:1, [::1]:2')
  store = faults.FaultStore(kv.open('memory://'))
  where = relay.directory(cfg, store)
  assert [where(i) for i in range(3)] == ['http://a:1', 'http://[::1]:2', None]
  assert store.log == []
  with pytest.raises(ValueError, match=r'relay\.nodes.*host:port'):
    config.Relay(nodes='a')


@pytest.mark.parametrize(
  ('samplers', 'per_node', 'want'), [(1, 1, 1), (4, 1, 4), (5, 2, 3), (3, 8, 1)]
)
def test_a_fleet_has_a_controller_and_a_relay_for_each_host(
  samplers, per_node, want, tmp_path
):
  values = {'run_dir': str(tmp_path), 'sampler': {'processes': samplers}}

  def names(**relayed) -> list[str]:
    cfg = settings.resolve({**values, 'relay': relayed})
    events = records.EventLog(str(tmp_path / 'events.jsonl'))
    fleet = local.Fleet(cfg, local.role_command(str(tmp_path)), events)
    events.close()
    assert {cfg.relay.node_of(i) for i in range(samplers)} == set(range(1, want + 1))
    return [c.name for c in fleet.children if c.role in ('controller', 'relay')]

  relays = [f'relay-{i}' for i in range(1, want + 1)]
  on = names(enabled=True, samplers_per_node=per_node)
  assert on == ['controller', *relays]
  assert names(samplers_per_node=per_node) == []


def test_relay_roles_need_a_run_with_a_relay(tmp_path):
  def parse(role: str, index: int, enabled: bool) -> options.Options:
    cfg = settings.resolve({'relay': {'enabled': enabled}})
    document = settings.to_json(cfg, settings.origins({}, {}))
    (tmp_path / 'config.json').write_text(json.dumps(document))
    argv = [f'--role={role}', f'--run_dir={tmp_path}', f'--index={index}']
    return options.parse(argv)

  assert parse('controller', 0, True).role == 'controller'
  assert parse('relay', 2, True).index == 2
  for role, index in (('controller', 0), ('relay', 1)):
    with pytest.raises(ValueError, match=r'relay\.enabled=False'):
      parse(role, index, False)
  for role, index in (('controller', 1), ('relay', 0), ('relay', 3), ('relay', -1)):
    with pytest.raises(ValueError, match='--index'):
      parse(role, index, True)


def test_controller_and_relays_are_roles_and_a_killed_one_is_routed_round(tmp_path):
  run_dir = tmp_path / 'run'
  run_dir.mkdir()
  values = settings.default().to_dict()
  values |= {'run_dir': str(run_dir), 'store': f'file://{tmp_path}/store'}
  values['sampler']['processes'] = 2
  values['relay'] |= {'enabled': True, 'fanout': 1, 'bucket_last': False}
  values['relay'] |= {'poll_seconds': 0.05, 'wait_seconds': 1.0}
  cfg = settings.resolve(values)
  document = settings.to_json(cfg, settings.origins({}, {}))
  (run_dir / 'config.json').write_text(json.dumps(document))
  assert cfg.relay_nodes == 3
  plain = settings.resolve({'run_dir': str(run_dir)})
  assert relay.for_sampler(plain, kv.open('memory://'), 1).url == 'memory://'
  store = kv.open(cfg.store)
  pub = publisher.Publisher(store, rf.SYNC, attempt='a')
  nodes = []
  for role, index in (('controller', 0), ('relay', 1), ('relay', 2)):
    argv = [sys.executable, '-m', 'experiments.swe17', f'--role={role}']
    argv += [f'--run_dir={run_dir}', f'--index={index}']
    env = {**os.environ, 'PYTHONPATH': str(rf.ROOT)}
    with open(tmp_path / f'{index}.log', 'wb') as log:
      nodes.append(subprocess.Popen(argv, cwd=rf.ROOT, env=env, stdout=log, stderr=log))
  client = relay.for_sampler(cfg, store, 1)
  assert isinstance(client, relay_client.Client)
  follow = follower.Follower(client)
  try:
    for version in range(4):
      if version == 2:
        nodes[1].kill()
      pub.publish(version, rf.weights(version), step=version, plan={})
      asyncio.run(rf.settle(follow, version))
    acks = ['weights/ack/relay-main.json']
    asyncio.run(rf.until(lambda: store.list('weights/ack/') == acks))
    for node in (nodes[0], nodes[2]):
      node.send_signal(signal.SIGTERM)
      assert node.wait(rf.DEADLINE) == 0, (tmp_path / '2.log').read_text()
  finally:
    client.close()
    for node in nodes:
      node.kill()
      node.wait()
