"""Relay and full snapshots beside deltas: fetched for those who join, once, sound."""

import asyncio

import pytest

from swe17.sync import manifest, relay_node
from tests import relay_fixtures as rf


@pytest.fixture
async def world(tmp_path, monkeypatch):
  monkeypatch.setattr(relay_node, '_LISTED', 0.05)
  async with rf.opened(tmp_path) as made:
    yield made


def keys_of_full(world: rf.World, version: int) -> list[str]:
  """The keys of a full snapshot beside a delta, its manifest's first."""
  made = manifest.read(world.store, version)
  assert made is not None and made.full is not None
  full = manifest.read_full(world.store, made)
  assert full is not None
  return [made.full.key, *(entry.key for entry in full.objects)]


def reads(world: rf.World, index: int, keys: list[str]) -> list[str]:
  return sorted(key for key in world.reads(index) if key in keys)


async def test_full_snapshot_beside_a_delta_is_read_once_for_all_who_join(world):
  for index in range(7):
    await world.start(index, rf.PATIENT)
  keeping_up = world.follow(5, rf.PATIENT)
  for version in range(6):
    world.publish(version)
    await rf.settle(keeping_up, version)
  keys = keys_of_full(world, 4)
  assert len(keys) > 3
  assert reads(world, 0, keys) == []  # nobody needed it
  late = [world.follow(index, rf.PATIENT) for index in range(7)]
  await asyncio.gather(*(rf.settle(follow, 5) for follow in late))
  assert reads(world, 0, keys) == sorted(keys)
  for other in set(world.stores) - {0}:
    assert world.reads(other) == []
  for follow in (keeping_up, *late):
    assert follow.faults.total() == 0
  assert [node.route.faults for node in world.nodes.values()] == [{}] * 7


async def test_node_that_starts_anew_fetches_no_full_snapshot_by_itself(world):
  for version in range(6):
    world.publish(version)
  for index in (0, 1):
    node = await world.start(index, rf.PATIENT)
    await rf.until(lambda node=node: node.newest == 5 and not node._ahead)
  keys = keys_of_full(world, 4)
  assert reads(world, 0, keys) == []
  # It began at the newest version that followers can begin with.
  assert manifest.data_version(min(world.reads(0, manifest.DATA))) == 4
  follow = world.follow(1, rf.PATIENT)
  await rf.settle(follow, 5)
  assert follow.faults.total() == 0
  assert reads(world, 0, keys) == sorted(keys)


@pytest.mark.parametrize('which', [0, 1])
async def test_damaged_full_snapshot_is_handed_on_by_nobody(world, which):
  """Its manifest or its data: who joins begins with the one before it."""
  for version in range(6):
    world.publish(version)
  bad = keys_of_full(world, 4)[which]
  data = world.store.read(bad)
  world.store.write(bad, data[:-1] + bytes([data[-1] ^ 1]))
  for index in (0, 1):
    await world.start(index, rf.NO_BUCKET)
  follow = world.follow(1, rf.NO_BUCKET)
  await rf.settle(follow, 5)
  assert set(follow.faults) == {'missing'}
  for node in world.nodes.values():
    assert node._cache.read(bad) is None


async def test_keys_that_no_manifest_names_are_not_there(world):
  for version in range(6):
    world.publish(version)
  await world.start(0)
  await rf.until(lambda: world.nodes[0].newest == 5 and not world.nodes[0]._ahead)
  want = {
    'weights/full/00000004-nobody-1.json': 410,
    'weights/full/00000005-nobody-1.json': 410,
    'weights/data/00000004-nobody-1.bin': 410,
    'weights/full/00000009-nobody-1.json': 404,
    'weights/full/00000004.json': 400,
    'weights/full/00000004-a/../x.json': 400,
    'weights/full/00000004-a%2f..%2fx.json': 400,
    'weights/full/': 400,
  }
  async with rf.asking(world, 0) as session:
    for key, status in want.items():
      assert (await session.get(f'/read/{key}')).status == status, key
    key = keys_of_full(world, 4)[0]
    part = await session.get(f'/read/{key}?start=3&stop=40')
    assert await part.read() == world.store.read(key)[3:40]
