"""What the soak is made of: weights that move, a store that fails, a follower.

See `sync_soak`, which starts all of it.
"""

import collections
from collections.abc import Mapping
import ctypes
import hashlib
import json
import os
import pathlib
import random
import time

import ml_dtypes
import numpy as np

from swe17 import config
from swe17.store import faults, kv
from swe17.sync import follower, manifest

CFG = config.Sync(
  full_every=8,
  block_bytes=64 << 10,
  object_bytes=256 << 10,
  keep_fulls=2,
  keep_most=24,
  ack_seconds=5.0,
  restore_seconds=30.0,
)
_REMEMBERED = 400  # keys
_ARENA_MAX = -8  # M_ARENA_MAX of mallopt(3)
_BF16 = np.dtype(ml_dtypes.bfloat16)
_KINDS = {
  'read': ('drop_before', 'truncate', 'flip', 'stale', 'splice', 'delay'),
  'write': ('drop_before', 'drop_after', 'full', 'truncate', 'flip', 'delay'),
  'create': ('drop_before', 'drop_after', 'full', 'truncate', 'flip', 'delay'),
  'list': ('drop_before', 'drop_after', 'stale', 'delay'),
  'delete': ('drop_before', 'drop_after', 'delay'),
}


class Weights:
  """Masters that move a little with each version, and their bfloat16 cast."""

  def __init__(self, seed: int):
    self._rng = np.random.default_rng(seed)
    shapes = {'embed': (512, 256), 'layer/w': (4, 256, 256), 'head': (512, 200)}
    self._masters = {
      name: self._rng.normal(0, 0.02, shape).astype(np.float32)
      for name, shape in shapes.items()
    }
    self._fixed = self._rng.normal(size=64).astype(_BF16)

  def step(self) -> dict[str, np.ndarray]:
    """Moves them by up to 1e-6 an element; new arrays."""
    for array in self._masters.values():
      array += self._rng.uniform(-1e-6, 1e-6, array.shape).astype(np.float32)
    cast = {name: array.astype(_BF16) for name, array in self._masters.items()}
    return {**cast, 'fixed': self._fixed, 'empty': np.zeros((0, 3), _BF16)}


def sha(tensors: Mapping[str, np.ndarray]) -> str:
  """Of names, dtypes, shapes and bytes; nothing of sync/ has a part in it."""
  total = hashlib.sha256()
  for name in sorted(tensors):
    array = tensors[name]
    total.update(f'{name} {array.dtype.name} {array.shape} '.encode())
    total.update(array.tobytes())
  return total.hexdigest()


class Lagging:
  """A store that may answer as if the newest manifest were not there yet."""

  def __init__(self, inner: kv.Store):
    self.url, self._inner, self.stale = inner.url, inner, False

  def write(self, key: str, data: bytes) -> None:
    self._inner.write(key, data)

  def create(self, key: str, data: bytes) -> bool:
    return self._inner.create(key, data)

  def delete(self, key: str) -> None:
    self._inner.delete(key)

  def read(
    self, key: str, start: int | None = None, stop: int | None = None
  ) -> bytes | None:
    stale, self.stale = self.stale, False
    hidden = stale and key.startswith(manifest.MANIFESTS)
    return None if hidden else self._inner.read(key, start, stop)

  def list(self, prefix: str) -> list[str]:
    stale, self.stale = self.stale, False
    return self._inner.list(prefix)[: -1 if stale else None]


class Bounded(faults.FaultStore):
  """A fault store that does not remember for ever."""

  def trim(self) -> None:
    """Forgets the log, and what keys held before that were written long ago."""
    self.log.clear()
    with self._history.lock:
      before = self._history.before
      while len(before) > _REMEMBERED:
        del before[next(iter(before))]


class Client:
  """One process's way to the store, on which every n-th operation fails.

  Stale answers are the fault store's own for what this client wrote; for what others
  did, `Lagging` gives them.
  """

  def __init__(self, url: str, seed: str, every: int, writes: bool):
    self.injected: collections.Counter[str] = collections.Counter()
    self._behind = Lagging(kv.open(url))
    self._rng, self._writes, self._asked = random.Random(seed), writes, 0
    self._every = every
    self.store = Bounded(self._behind, self._rule)

  def _rule(self, operation: faults.Operation) -> faults.Fault | None:
    self._asked += 1
    if self._asked % self._every:
      return None
    kind = self._rng.choice(_KINDS[operation.kind])
    self.injected[kind] += 1
    if kind == 'stale' and not self._writes:
      self._behind.stale = True
      return None
    return faults.Fault(kind, seconds=0.02 * self._rng.random())


def share_one_heap() -> None:
  """Makes threads to come allocate from the heap of the first; no effect but on glibc.

  Each thread otherwise gets a heap of its own, up to eight a core, and pieces of memory
  that are free in one of them are of no use to another.
  """
  limit = getattr(ctypes.CDLL(None), 'mallopt', None)
  if limit is not None:
    limit(_ARENA_MAX, 1)


def memory() -> float:
  """Resident memory of this process [MB]."""
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def follow(role: str, folder: pathlib.Path, seed: int, every: int) -> None:
  """Serves what it holds until `stop` is there; one line a version, one at the end."""
  rng = random.Random(f'{seed}/{role}/{os.getpid()}')
  client = Client(
    f'file://{folder}/store', f'{role}/{os.getpid()}', every, writes=False
  )
  made = follower.Follower(
    client.store, ack=f'{role}-{os.getpid()}', ack_seconds=CFG.ack_seconds
  )
  torn, held, polls = 0, sha({}), 0
  with (folder / f'{role}-{os.getpid()}.jsonl').open('w', buffering=1) as out:

    def say(**values) -> None:
      values |= {
        'version': made.version,
        'rss': memory(),
        'injected': dict(client.injected),
        'faults': dict(made.faults),
        'torn': torn,
        'polls': polls,
      }
      out.write(json.dumps(values) + '\n')

    while not (folder / 'stop').exists():
      staged, polls = made.poll(), polls + 1
      torn += sha(made.tensors) != held  # staging must leave alone what is served
      if staged is not None:
        made.commit(staged)
        held = sha(made.tensors)
        say(sha=held, bytes=staged.bytes)
        client.store.trim()
      if role == 'napping' and rng.random() < 0.02:
        time.sleep(3 * rng.random())
      time.sleep(0.02)
    say(end=True)
