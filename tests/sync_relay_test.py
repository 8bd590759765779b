"""Relay: weights reach every host through the tree, sound, whatever a node does.

Nodes run on the test's own event loop over real connections. Every node and every
follower is a client of its own of one store, so that each one's reads can be counted.
"""

import asyncio
import dataclasses
import threading

import aiohttp
import pytest

from swe17.sync import (
  manifest,
  relay_cache,
  relay_node,
  relay_source,
)
from tests import relay_fixtures as rf


@pytest.fixture
async def world(tmp_path, monkeypatch):
  monkeypatch.setattr(relay_node, '_LISTED', 0.05)
  async with rf.opened(tmp_path) as made:
    yield made


async def test_followers_at_every_node_hold_every_version_byte_for_byte(world):
  for index in range(7):
    await world.start(index, rf.PATIENT)
  follows = [world.follow(index, rf.PATIENT) for index in range(7)]
  for version in range(6):
    world.publish(version)
    await asyncio.gather(*(rf.settle(follow, version) for follow in follows))
  for follow in follows:
    assert follow.faults.total() == 0
  assert [node.route.faults for node in world.nodes.values()] == [{}] * 7


@pytest.mark.parametrize('nodes', [1, 7])
async def test_store_reads_do_not_grow_with_the_nodes(world, nodes):
  for index in range(nodes):
    await world.start(index, rf.PATIENT)
  follows = [world.follow(index, rf.PATIENT) for index in range(nodes)]
  for version in range(5):
    world.publish(version)
    await asyncio.gather(*(rf.settle(follow, version) for follow in follows))
  there = [key for key in world.reads(0) if world.store.read(key) is not None]
  data = [key for key in there if key.startswith(manifest.DATA)]
  made = [manifest.read(world.store, version) for version in range(5)]
  named = [entry.key for each in made if each for entry in each.objects]
  assert sorted(data) == sorted(named)  # each object of each version, once
  # A question for the next version that found it, and nothing but such questions.
  assert set(there) - set(data) == set(world.store.list(manifest.MANIFESTS))
  for other in set(world.stores) - {0}:
    assert world.reads(other) == []


async def test_sixteen_questions_for_one_object_cost_one_fetch(world, monkeypatch):
  world.publish(0)
  held = threading.Event()
  node = await world.start(0)
  await rf.until(lambda: node.newest == 0 and not node._ahead)
  node._cache = relay_cache.Cache(world._folder / 'fresh', rf.CFG.cache_bytes)
  (key, *_) = world.store.list(manifest.DATA)
  before = len(world.reads(0, key))
  world.stores[0].rule = lambda operation: held.wait(rf.DEADLINE) and None
  async with rf.asking(world, 0) as session:
    asked = [
      asyncio.create_task(session.get(f'/read/{key}?wait=30')) for _ in range(16)
    ]
    await rf.until(lambda: node._held == 16)
    held.set()
    bodies = {await (await reply).read() for reply in asked}
  assert bodies == {world.store.read(key)}
  assert len(world.reads(0, key)) == before + 1


async def test_a_question_for_the_next_version_is_held_until_it_comes(world):
  world.publish(0)
  for index in (0, 1, 3):
    await world.start(index)
  await rf.until(lambda: world.nodes[3].newest == 0)
  key = manifest.key_of(1)
  async with rf.asking(world, 3) as session:
    assert (await session.get(f'/read/{key}')).status == 404
    waiting = asyncio.create_task(session.get(f'/read/{key}?wait=60'))
    await rf.until(lambda: world.nodes[3]._held == 1)
    world.publish(1)
    reply = await asyncio.wait_for(waiting, rf.DEADLINE / 2)
    assert await reply.read() == world.store.read(key)


async def test_a_dead_inner_node_is_routed_round(world):
  for index in (0, 1, 3):
    await world.start(index, rf.NO_BUCKET)
  follow = world.follow(3, rf.NO_BUCKET)
  world.publish(0)
  await rf.settle(follow, 0)
  await world.nodes.pop(1).close()
  for version in (1, 2):
    world.publish(version)
    await rf.settle(follow, version)
  assert set(world.nodes[3].route.faults) == {'node 1'}


class Dying(relay_node.Node):
  """Sends half of an object and ends."""

  async def _send(self, request, data):
    if '/data/' not in request.path:
      return await super()._send(request, data)
    reply = aiohttp.web.StreamResponse()
    reply.content_length = len(data)
    await reply.prepare(request)
    await reply.write(bytes(data[: len(data) // 2]))
    request.transport.abort()
    return reply


class Flipping(relay_node.Node):
  """Sends every object with one bit flipped."""

  async def _send(self, request, data):
    if '/data/' in request.path:
      data = bytearray(data)
      data[len(data) // 2] ^= 4
    return await super()._send(request, memoryview(data))


class FlippingManifests(relay_node.Node):
  async def _send(self, request, data):
    if '/manifest/' in request.path:
      data = bytearray(data)
      data[len(data) // 2] ^= 4
    return await super()._send(request, memoryview(data))


class Endless(relay_node.Node):
  """Sends more than was asked for."""

  async def _send(self, request, data):
    if '/data/' in request.path:
      data = bytes(data) * 3
    return await super()._send(request, memoryview(data))


class Silent(relay_node.Node):
  """Accepts, and says nothing."""

  async def _read(self, request):
    await asyncio.sleep(rf.DEADLINE)


class Forgetful(relay_node.Node):
  """Knows of no version, and says so well."""

  async def _read(self, request):
    return aiohttp.web.Response(status=404)


class Trickling(relay_node.Node):
  """Sends an object byte by byte, never silent for long."""

  async def _send(self, request, data):
    if '/data/' not in request.path:
      return await super()._send(request, data)
    reply = aiohttp.web.StreamResponse()
    reply.content_length = len(data)
    await reply.prepare(request)
    for at in range(len(data)):
      await reply.write(bytes(data[at : at + 1]))
      await asyncio.sleep(0.05)
    return reply


class Busy(relay_node.Node):
  """Is for ever still fetching, and does not get on."""

  async def _read(self, request):
    if '/data/' not in request.path:
      return await super()._read(request)
    return aiohttp.web.Response(status=202, headers={relay_source.PROGRESS: '7'})


@pytest.mark.parametrize(
  'kind',
  [Dying, Flipping, FlippingManifests, Endless, Silent, Trickling, Forgetful, Busy],
)
async def test_a_bad_inner_node_is_routed_round_and_nothing_bad_is_kept(world, kind):
  cfg = dataclasses.replace(rf.NO_BUCKET, stall_seconds=0.4)
  await world.start(0, cfg)
  await world.start(1, cfg, kind)
  await world.start(3, cfg)
  above, below = world.follow(1, cfg), world.follow(3, cfg)
  for version in range(3):
    world.publish(version)
    await asyncio.gather(rf.settle(above, version), rf.settle(below, version))
  if kind is not Forgetful:  # which makes no mistake that can be seen
    assert 'node 1' in world.nodes[3].route.faults
  for index in (0, 1, 3):
    cache = world.nodes[index]._cache
    for key in list(cache.keys()):
      assert cache.read(key) == world.store.read(key)


async def test_a_node_that_is_well_again_is_asked_again(world):
  cfg = dataclasses.replace(rf.NO_BUCKET, stall_seconds=5.0)
  for index in (0, 1, 3):
    await world.start(index, cfg)
  await world.nodes.pop(1).close()
  follow = world.follow(3, cfg)
  world.publish(0)
  await rf.settle(follow, 0)
  again = await world.start(1, cfg)  # at another port
  health = world.nodes[3].route._health['node 1']
  await rf.until(lambda: health.well)
  before = again.served
  world.publish(1)
  await rf.settle(follow, 1)
  assert again.served > before


async def test_without_any_node_the_store_itself_is_read_or_not_as_is_set(world):
  world.publish(0)
  follow, strict = world.follow(3), world.follow(3, rf.NO_BUCKET)
  await rf.settle(follow, 0)
  assert world.reads(1000)
  assert await asyncio.to_thread(strict.poll) is None
  assert strict.faults['store'] == 1 and not world.reads(1001)


async def test_what_is_damaged_in_the_store_is_handed_on_by_nobody(world):
  for index in (0, 1, 3):
    await world.start(index)
  follow = world.follow(3)
  world.publish(0)
  await rf.settle(follow, 0)
  inner = world.store._inner
  create = type(inner).create

  def spoil(key: str, data: bytes) -> bool:
    if key == manifest.key_of(1):
      for name in inner.list(manifest.DATA + '00000001'):
        whole = inner.read(name)
        inner.write(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    return create(inner, key, data)

  inner.create = spoil
  world.publish(1)
  for _ in range(6):
    assert await asyncio.to_thread(follow.poll) is None
  assert follow.version == 0 and follow.faults['missing']
  bad = world.store.list(manifest.DATA + '00000001')
  for node in world.nodes.values():
    assert not set(node._cache.keys()) & set(bad)
  # Nobody but the controller reads it, and that one not for every question.
  assert world.reads(1) == world.reads(3) == world.reads(1000) == []
  assert 2 * len(bad) <= len(world.reads(0, manifest.DATA + '00000001')) <= 8 * len(bad)
  for version in (2, 3, 4):  # 4 is a full snapshot
    world.publish(version)
  await rf.settle(follow, 4)


async def test_a_hole_in_the_versions_is_jumped(world):
  for index in (0, 1):
    await world.start(index)
  world.publish(0)
  await rf.until(lambda: world.nodes[1].newest == 0)
  inner = world.store._inner
  for version in range(1, 6):
    world.publish(version)
    if version in (1, 2):
      inner.delete(manifest.key_of(version))
  await rf.until(lambda: world.nodes[1].newest == 5)
  await rf.settle(world.follow(1), 5)


async def test_a_node_of_another_run_is_no_source(world):
  await world.start(0, rf.NO_BUCKET)
  other = rf.World(world._folder / 'other')
  other.store.url = 'memory://other'
  stranger = await other.start(1, rf.NO_BUCKET)
  world.register(1, stranger._runner.addresses[0][1])
  world.publish(0)
  await rf.settle(world.follow(1, rf.NO_BUCKET), 0)
  async with rf.asking(world, 0, run='f' * 16) as session:
    assert (await session.get(f'/read/{manifest.key_of(0)}')).status == 421
  await other.close()
