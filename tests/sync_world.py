"""Weights, publishers and a record of what was published: the tests of sync/ share it.

The record is the tests' own; a follower may only ever serve a version with the digest
on record.
"""

import collections
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swe17 import config
from swe17.store import kv
from swe17.sync import codec, follower, upload
from swe17.sync import publisher as publishing

CFG = config.Sync(full_every=4, block_bytes=64, keep_fulls=2)
BF16 = np.dtype(ml_dtypes.bfloat16)


class Killed(BaseException):
  """A process that ends without a word."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(upload, '_BACKOFF', 0.0)


@pytest.fixture(params=['file', 'memory'])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> kv.Store:
  return kv.open('memory://' if request.param == 'memory' else f'file://{tmp_path}/s')


def weights(version: int) -> dict[str, np.ndarray]:
  """Weights of a version: some leaves change, one never does, one is empty."""
  return {name: array.copy() for name, array in _made(version).items()}


@functools.cache
def _made(version: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  tensors = {
    'embed': rng.normal(size=(9, 8)).astype(BF16),
    'layer/w': rng.normal(size=(50,)).astype(BF16),
    'layer/fixed': rng.normal(size=(4, 4)).astype(BF16),
    'scale': np.array(1.5, BF16),
    'empty': np.zeros((0, 3), BF16),
  }
  for name in ('embed', 'layer/w'):
    bits = tensors[name].view(np.uint16).reshape(-1)
    for v in range(1, version + 1):
      bits[np.random.default_rng(v).integers(0, bits.size, 5)] ^= v & 7
  return tensors


def publisher(store: kv.Store, attempt: str = 'a', cfg=CFG) -> publishing.Publisher:
  return publishing.Publisher(store, cfg, attempt=attempt)


def publish(pub: publishing.Publisher, version: int, **kw) -> publishing.Published:
  return pub.publish(version, weights(version), step=version, plan={'v': version}, **kw)


class Record:
  """What was published as which version, and the check that a follower obeys it."""

  def __init__(self, follow: follower.Follower):
    self.follow = follow
    self.digests: dict[int, set[str]] = collections.defaultdict(set)

  def add(self, version: int, tensors: dict[str, np.ndarray] | None = None) -> None:
    tensors = weights(version) if tensors is None else tensors
    self.digests[version].add(codec.digest(tensors, CFG.block_bytes))

  def poll(self) -> follower.Staged | None:
    """Polls, checks that staging changed nothing, commits, checks what is served."""
    held = self.follow.version
    before = codec.digest(self.follow.tensors, CFG.block_bytes)
    staged = self.follow.poll()
    assert self.follow.version == held
    assert codec.digest(self.follow.tensors, CFG.block_bytes) == before
    if staged is None:
      return None
    assert held is None or staged.version > held
    self.follow.commit(staged)
    assert self.follow.version == staged.version
    digest = codec.digest(self.follow.tensors, CFG.block_bytes)
    assert digest in self.digests[staged.version]
    assert self.follow.manifest is not None
    assert digest == self.follow.manifest.digest
    return staged

  def settle(self, version: int) -> None:
    """Polls until the follower holds `version`, at most as often as its pauses ask."""
    for _ in range(3 * follower._MAX_PAUSE + follower._LIST_AFTER):
      if self.follow.version == version:
        return
      self.poll()
    assert self.follow.version == version, self.follow.faults


def params(dtype=jnp.bfloat16) -> dict:
  keys = iter(jax.random.split(jax.random.key(0), 4))

  def leaf(*shape: int) -> jax.Array:
    return jax.random.normal(next(keys), shape).astype(jnp.bfloat16).astype(dtype)

  return {
    'embed': leaf(9, 8),
    'layer': {'w': leaf(3, 8, 8), 'scale': leaf(8)},
    'count': jnp.arange(3),
    'bias': leaf(),
  }
