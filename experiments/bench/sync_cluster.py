"""The cluster of the sync bench: a controller, relay nodes, and light followers.

  python -m experiments.bench.sync_cluster <store url> <followers> <fanout> <folder>

Node 0 is the controller, nodes 1 to n are hosts with one follower each. All of them are
the real thing (`sync.relay`) over loopback, on one event loop. Followers are light:
they read every manifest and every object of a version through `relay.open`, which
verifies each block's sha256, and drop what they read. Started by
`experiments.bench.sync`. Says what happens on stdout in lines of JSON, and for each
line on stdin how often the controller, and how often the others, read the store so far;
ends when its stdin does.
"""

import asyncio
from collections.abc import Sequence
from concurrent import futures
import contextlib
import json
import pathlib
import socket
import sys
import threading
import time

from swe17 import config
from swe17.store import kv
from swe17.sync import manifest, relay

_THREADS = 128
_saying = threading.Lock()


def say(kind: str, **values: object) -> None:
  """One line of JSON, in one piece whichever thread says it."""
  with _saying:
    print(json.dumps({'kind': kind, 'at': time.time(), **values}), flush=True)


class Counted:
  """A store that counts reads: of what was there, and questions for what was not."""

  def __init__(self, inner: kv.Store, sums: dict[str, int]):
    self.url = inner.url
    self._inner, self._sums = inner, sums
    self._lock = threading.Lock()

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    data = self._inner.read(key, start, stop)
    with self._lock:
      self._sums['absent' if data is None else 'reads'] += 1
      self._sums['bytes'] += len(data or b'')
    return data

  def list(self, prefix: str) -> list[str]:
    with self._lock:
      self._sums['lists'] += 1
    return self._inner.list(prefix)

  def write(self, key: str, data: bytes) -> None:
    self._inner.write(key, data)

  def create(self, key: str, data: bytes) -> bool:
    return self._inner.create(key, data)

  def delete(self, key: str) -> None:
    self._inner.delete(key)


def follow(store: kv.Store, index: int, ended: threading.Event) -> None:
  """Reads version after version, from the newest full snapshot on, and drops it."""
  version: int | None = None
  while not ended.is_set():
    try:
      if version is None:
        known = manifest.versions(store)
        fulls = (v for v in reversed(known) if _full(store, v))
        version = next(fulls, None)
        if version is None:
          time.sleep(0.2)
          continue
      made = manifest.read(store, version)
      if made is None:
        continue  # the relay held the question for `wait_seconds`
      for entry in made.objects:
        data = store.read(entry.key)
        if data is None:
          raise ValueError(f'follower {index}: {entry.key} is gone')
      say('followed', follower=index, version=version)
      version += 1
    except kv.StoreError as e:
      if ended.is_set():
        return
      say('fault', follower=index, text=str(e))
      time.sleep(0.2)


def _full(store: kv.Store, version: int) -> bool:
  made = manifest.read(store, version)
  return made is not None and made.base is None


async def run(
  url: str, followers: int, fanout: int, folder: str, ended: threading.Event
) -> None:
  """Runs the cluster until `ended`."""
  pool = futures.ThreadPoolExecutor(_THREADS)
  asyncio.get_running_loop().set_default_executor(pool)
  with contextlib.ExitStack() as stack:
    held = [socket.create_server(('127.0.0.1', 0)) for _ in range(followers + 1)]
    ports = [stack.enter_context(s).getsockname()[1] for s in held]
  places = ','.join(f'127.0.0.1:{port}' for port in ports)
  # Patient: one loop does what as many hosts would.
  cfg = config.Relay(enabled=True, fanout=fanout, nodes=places, stall_seconds=30.0)
  inner = kv.open(url)
  sums = [dict.fromkeys(('reads', 'absent', 'lists', 'bytes'), 0) for _ in range(2)]
  nodes, clients = [], []
  for index, port in enumerate(ports):
    store = Counted(inner, sums[min(index, 1)])
    node = relay.build(cfg, store, index, pathlib.Path(folder) / str(index))
    await node.start('127.0.0.1', port)
    nodes.append(node)
    if index:
      clients.append(relay.open(cfg, store, index))
  # At most as many as there are threads, and each ends soon after `ended`.
  work = [
    asyncio.to_thread(follow, client, index, ended)
    for index, client in enumerate(clients, start=1)
  ]
  tasks = [asyncio.create_task(each) for each in work]
  await _marks(sums, ended)
  for client in clients:
    await asyncio.to_thread(client.close)
  await asyncio.gather(*tasks)
  for node in reversed(nodes):  # children first: nobody is missed
    await node.close()


async def _marks(sums: list[dict[str, int]], ended: threading.Event) -> None:
  """Says, line by line from stdin, what was read so far; sets `ended` at its end."""
  while line := await asyncio.to_thread(sys.stdin.readline):
    say('reads', mark=line.strip(), controller=dict(sums[0]), others=dict(sums[1]))
  ended.set()


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` to its end."""
  url, followers, fanout, folder = argv
  asyncio.run(run(url, int(followers), int(fanout), folder, threading.Event()))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
