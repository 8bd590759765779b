"""What the tests of the relay share: a store, nodes in it, followers behind them."""

import asyncio
from collections.abc import AsyncGenerator
from concurrent import futures
import contextlib
import dataclasses
import functools
import json
import pathlib
import time

import aiohttp
import ml_dtypes
import numpy as np

from swe17 import config
from swe17.store import faults, kv
from swe17.sync import (
  codec,
  follower,
  publisher,
  relay,
  relay_client,
  relay_node,
  relay_source,
)

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEADLINE = 60.0  # s; only a hang takes that long
SYNC = config.Sync(full_every=4, block_bytes=256, object_bytes=2000)
CFG = config.Relay(
  enabled=True, fanout=2, poll_seconds=0.02, wait_seconds=0.3, stall_seconds=1.0
)
PATIENT = dataclasses.replace(CFG, stall_seconds=10.0)  # nothing fails there
NO_BUCKET = dataclasses.replace(CFG, bucket_last=False)


@functools.cache
def weights(version: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  tensors = {
    'embed': rng.normal(size=(60, 40)).astype(ml_dtypes.bfloat16),
    'layer/w': rng.normal(size=(500,)).astype(ml_dtypes.bfloat16),
    'fixed': rng.normal(size=(8, 8)).astype(ml_dtypes.bfloat16),
  }
  for name in ('embed', 'layer/w'):
    bits = tensors[name].view(np.uint16).reshape(-1)
    for v in range(1, version + 1):
      bits[np.random.default_rng(v).integers(0, bits.size, 40)] ^= v & 7
  return tensors


class World:
  """A store, a publisher, and nodes that are started in it."""

  def __init__(self, folder: pathlib.Path):
    self.store = faults.FaultStore(kv.open('memory://'))
    self.stores: dict[int, faults.FaultStore] = {}  # each node's own client
    self.nodes: dict[int, relay_node.Node] = {}
    self.clients: list[relay_client.Client] = []
    self._folder = folder
    self._publisher = publisher.Publisher(self.store, SYNC, attempt='a')

  def publish(self, version: int) -> None:
    self._publisher.publish(version, weights(version), step=version, plan={})

  async def start(self, index: int, cfg=CFG, kind=relay_node.Node) -> relay_node.Node:
    store = self.stores.setdefault(index, self.store.beside())
    folder = self._folder / str(index)
    node = relay.build(cfg, store, index, folder)
    node.__class__ = kind
    self.register(index, await node.start('127.0.0.1'))
    self.nodes[index] = node
    return node

  def register(self, index: int, port: int) -> None:
    url = json.dumps({'url': f'http://127.0.0.1:{port}'})
    self.store.write(f'relays/main/{index}.json', url.encode())

  def follow(self, index: int, cfg=CFG) -> follower.Follower:
    """A follower on the host of a node; a client of the store of its own too."""
    store = self.stores.setdefault(1000 + len(self.clients), self.store.beside())
    self.clients.append(relay.open(cfg, store, index))
    return follower.Follower(self.clients[-1])

  def reads(self, index: int, prefix: str = 'weights/') -> list[str]:
    """Keys of what a node (or the n-th follower, 1000 + n) read from the store."""
    log = self.stores[index].log
    return [o.key for o, _ in log if o.kind == 'read' and o.key.startswith(prefix)]

  async def close(self) -> None:
    for client in self.clients:
      await asyncio.to_thread(client.close)
    await asyncio.gather(*(node.close() for node in self.nodes.values()))


@contextlib.asynccontextmanager
async def opened(folder: pathlib.Path) -> AsyncGenerator[World]:
  """A world, closed in the end."""
  # Nodes and followers, which are processes elsewhere, share this loop's threads.
  pool = futures.ThreadPoolExecutor(64)
  asyncio.get_running_loop().set_default_executor(pool)
  made = World(folder)
  yield made
  await made.close()


async def settle(follow: follower.Follower, version: int) -> None:
  """Polls until the follower holds a version; what it holds is what was published."""

  def work() -> None:
    until = time.monotonic() + DEADLINE
    while follow.version != version:
      assert time.monotonic() < until, (follow.version, follow.faults)
      staged = follow.poll()
      if staged is not None:
        follow.commit(staged)
        want = codec.digest(weights(staged.version), SYNC.block_bytes)
        assert staged.manifest.digest == want
        assert codec.digest(follow.tensors, SYNC.block_bytes) == want
      else:
        time.sleep(0.01)

  await asyncio.to_thread(work)


async def until(condition) -> None:
  end = time.monotonic() + DEADLINE
  while not condition():
    assert time.monotonic() < end, 'waited too long'
    await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def asking(world: World, index: int, run: str = '', token: str = ''):
  """A session that asks a node as any program could."""
  url = json.loads(world.store.read(f'relays/main/{index}.json'))['url']
  run = run or relay_source.run_name(world.store.url, 'main')
  named = {relay_source.RUN: run, relay_source.TOKEN: token}
  async with aiohttp.ClientSession(url, headers=named) as session:
    yield session
