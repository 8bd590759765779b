"""Relay: one controller for a cluster reads the store, its hosts pass the weights on.

  store ── controller (node 0) ── nodes 1 .. k ── nodes k+1 .. k+k² ── …

The parent of node i is (i - 1) // k. Each node runs as a process of its own on its
host (`--role=controller`, `--role=relay --index=i`), follows the versions through its
parent, fetches every object once however many ask for it, verifies it, keeps it in a
bounded folder and serves its children and the followers of its host, manifests at once
and objects while others are still on their way. Only the controller polls the store;
a question for the next version is held (long polling) until that version is there, so
it runs down the tree without a polling interval at each level.

Routing (`relay_route`): whoever gets no sound answer from its parent asks the
grandparent, and so on to the controller and, if `bucket_last`, the store. Membership
is the simplest that survives a restart at another port: each node writes its address
to `relays/<cluster>/<index>.json` in the store, and reads an ancestor's at the start
and after that one failed. With `relay.nodes` the addresses are fixed and no node
writes. The controller acknowledges for its cluster (`collect`) what it still needs;
followers behind it, which read from folders that the collector cannot empty, do not.

What is trusted: nothing on the way. Data is checked against the sha256 in its
manifest, by every node and by the follower. The manifests themselves carry a checksum,
which shows damage but is no signature: a malicious node could make up a version. Nodes
listen at loopback unless told otherwise; if they share a secret (the environment
variable SWE17_RELAY_TOKEN) requests without it are refused. Traffic is not encrypted.
"""

import asyncio
from collections.abc import Sequence
from concurrent import futures
import contextlib
import json
import logging
import math
import os
import pathlib
import signal
import socket
import time

from swe17 import config
from swe17.metrics import status
from swe17.store import kv
from swe17.sync import (
  collect,
  relay_cache,
  relay_client,
  relay_node,
  relay_route,
  relay_source,
)

_log = logging.getLogger(__name__)
_THREADS = 32
_ACK_EVERY = 5.0  # seconds between two acknowledgements, at least


def directory(cfg: config.Relay, store: kv.Store) -> relay_source.Directory:
  """Where nodes are: by the settings, or as they registered in the store."""
  fixed = _fixed(cfg)

  def find(index: int) -> str | None:
    if fixed:
      return f'http://{fixed[index]}' if index < len(fixed) else None
    data = store.read(_key(cfg, index))
    said = json.loads(data) if data else None
    url = said.get('url') if isinstance(said, dict) else None
    return url if isinstance(url, str) else None

  return find


def sources(
  cfg: config.Relay, store: kv.Store, nodes: Sequence[int], *, bucket: bool
) -> list[relay_source.Source]:
  """The given nodes in this order and, with `bucket`, the store after them."""
  where, run = directory(cfg, store), relay_source.run_name(store.url, cfg.cluster)
  peers = [relay_source.Peer(index, where, run, cfg) for index in nodes]
  last = [relay_source.Bucket(store, cfg.poll_seconds)] if bucket else []
  return [*peers, *last]


def open(cfg: config.Relay, store: kv.Store, index: int) -> relay_client.Client:
  """The weights in `store` as the followers on the host of node `index` read them."""
  nodes = [index, *relay_route.ancestors(index, cfg.fanout)]
  found = sources(cfg, store, nodes, bucket=cfg.bucket_last)
  return relay_client.Client(f'relay+{store.url}', found, cfg.wait_seconds)


def for_sampler(cfg: config.Config, store: kv.Store, sampler: int) -> kv.Store:
  """What a sampler follows: the store itself or, with a relay, its host's node."""
  if not cfg.relay.enabled:
    return store
  return open(cfg.relay, store, cfg.relay.node_of(sampler))


def build(
  cfg: config.Relay, store: kv.Store, index: int, folder: pathlib.Path
) -> relay_node.Node:
  """Node `index`, not started yet; it keeps its objects in `folder`."""
  nodes = relay_route.ancestors(index, cfg.fanout)
  found = sources(cfg, store, nodes, bucket=index == 0 or cfg.bucket_last)
  cache = relay_cache.Cache(folder, cfg.cache_bytes)
  run = relay_source.run_name(store.url, cfg.cluster)
  return relay_node.Node(cfg, relay_route.Route(found), cache, run=run)


def run(cfg: config.Config, index: int) -> int:
  """Runs node `index` until SIGTERM; 0 is the controller. Exit code 0."""
  asyncio.run(_run(cfg, index))
  return 0


async def _run(cfg: config.Config, index: int) -> None:
  stopped = asyncio.Event()
  loop = asyncio.get_running_loop()
  # Reads of a store that is slow to answer must not keep the cache from being read.
  loop.set_default_executor(futures.ThreadPoolExecutor(_THREADS))
  loop.add_signal_handler(signal.SIGTERM, stopped.set)
  says = status.Status(cfg.run_dir, f'relay-{index}' if index else 'controller')
  store = kv.open(cfg.store)
  fixed = _fixed(cfg.relay)
  if fixed and index >= len(fixed):
    raise ValueError(f'relay.nodes: got {len(fixed)} places, none for node {index}')
  folder = pathlib.Path(cfg.run_dir) / 'relay' / str(index)
  node = build(cfg.relay, store, index, folder)
  port = int(fixed[index].rpartition(':')[2]) if fixed else 0
  port = await node.start(cfg.relay.host, port)
  url = f'http://{_reached_at(cfg.relay.host)}:{port}'
  _log.info('node %d listens at %s', index, url)
  beside = [] if fixed else [asyncio.create_task(_register(cfg, store, index, url))]
  if index == 0:
    beside.append(asyncio.create_task(_acknowledge(cfg, store, node)))
  try:
    while not stopped.is_set():
      node.check()
      says.set('serving', f'version {node.newest}')
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stopped.wait(), 0.5)
  finally:
    for task in beside:
      task.cancel()
    await node.close()


async def _register(cfg: config.Config, store: kv.Store, index: int, url: str) -> None:
  """Writes down where a node is, as often as it takes."""
  data = json.dumps({'url': url, 'pid': os.getpid()}).encode()
  while True:
    try:
      await asyncio.to_thread(store.write, _key(cfg.relay, index), data)
      return
    except kv.StoreError as e:
      _log.warning('not registered yet: %s', e)
    await asyncio.sleep(cfg.relay.stall_seconds)


async def _acknowledge(
  cfg: config.Config, store: kv.Store, node: relay_node.Node
) -> None:
  """Tells the learner's collector which versions this cluster still has to fetch."""
  name, every = f'relay-{cfg.relay.cluster}', cfg.sync.ack_seconds / 4
  said, at = -1, -math.inf
  while True:
    age = time.monotonic() - at
    new = node.needed != said and age > min(_ACK_EVERY, every)
    if node.needed >= 0 and (new or age > every):
      said, at = node.needed, time.monotonic()
      try:
        await asyncio.to_thread(collect.acknowledge, store, name, said)
      except kv.StoreError as e:
        _log.warning('version %d was not acknowledged: %s', said, e)
    await asyncio.sleep(min(0.5, every))


def _reached_at(host: str) -> str:
  """The name by which others reach a node that listens at `host`."""
  host = socket.gethostname() if host in ('0.0.0.0', '::') else host
  return f'[{host}]' if ':' in host else host


def _key(cfg: config.Relay, index: int) -> str:
  return f'relays/{cfg.cluster}/{index}.json'


def _fixed(cfg: config.Relay) -> list[str]:
  return [place.strip() for place in cfg.nodes.split(',') if place.strip()]
