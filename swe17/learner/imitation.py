"""The warm start: cross-entropy on a scripted agent's episodes, through the same batch.

The episodes come as groups through a store of their own, written by the rollout
process; the state after the last step is weight version 0. Tokens that the agent did
not write (prompt, code, results) count with a small weight: reading code helps to copy
it.
"""

from collections.abc import Callable, Iterator
import functools
import logging
import time
from typing import Any

import numpy as np
import optax

from swe17 import config, types
from swe17.learner import batching, mesh, optimizer, update
from swe17.learner import state as st
from swe17.store import groups as group_store
from swe17.store import kv

_log = logging.getLogger(__name__)
FILLED = 0.94  # share of a batch's room that is aimed at: first fit leaves gaps


class Episodes:
  """Scripted episodes as they arrive, drawn in seeded epochs over those present."""

  def __init__(self, store: kv.Store, seed: int):
    self._store, self._rng = store, np.random.default_rng(seed)
    self._seen: set[str] = set()
    self._segments: list[types.Segment] = []
    self._order: list[int] = []

  def wait(self, count: int, stopped: Callable[[], bool]) -> int:
    """Loads until `count` episodes are here or `stopped()`; how many there are."""
    while not stopped():
      for key in group_store.list_new(self._store, self._seen):
        self._seen.add(key)
        try:
          group = group_store.load(self._store, key)
        except ValueError as e:
          _log.warning('scripted group left out: %s', e)
          continue
        self._segments += [s for e in group.episodes for s in e.segments]
      if len(self._segments) >= count:
        break
      time.sleep(0.1)
    return len(self._segments)

  def take(self, tokens: int, longest: int) -> list[batching.Item]:
    """Items of about `tokens` tokens in all, none longer than `longest`.

    ValueError if no episode is as short as that.
    """
    items: list[batching.Item] = []
    while True:
      if not self._order:
        if not any(s.token_T.size - 1 <= longest for s in self._segments):
          raise ValueError(
            f'imitation: none of {len(self._segments)} scripted episodes fits a row of '
            f'{longest} tokens; raise batch.row_length or lower agent.max_context'
          )
        self._order = self._rng.permutation(len(self._segments)).tolist()
      segment = self._segments[self._order[-1]]
      size = segment.token_T.size - 1
      if size > tokens and items:
        return items
      self._order.pop()
      if size <= longest:
        items.append(batching.Item(segment, 1.0))
        tokens -= size


def schedule(cfg: config.Imitation) -> optax.Schedule:
  """Warm-up over a tenth of the steps, then cosine decay to a tenth of the peak."""
  warmup = max(1, cfg.steps // 10)
  return optax.warmup_cosine_decay_schedule(
    0.0, cfg.lr, warmup, max(cfg.steps, warmup + 1), cfg.lr / 10
  )


def step(cfg: config.Config, devices: mesh.Devices, like: st.State) -> Any:
  """(state, batch) -> (state, metrics): one imitation step, jitted, the state donated.

  `like` is a state whose optimiser part is of `optimizer.make(cfg.optim, schedule)`.
  """
  tx = optimizer.make(cfg.optim, schedule(cfg.imitation))
  one = functools.partial(
    update.imitate, model=cfg.model, tx=tx, exact=cfg.optim.exact_sum
  )
  return mesh.jit(devices, one, like)


def batches(episodes: Episodes, cfg: config.Config) -> Iterator[st.Batch]:
  """The batches of the warm start, on the host: one a step."""
  batch_cfg, rows = cfg.batch, cfg.imitation.rows
  micro = -(-rows // batch_cfg.micro_rows)
  room = int(FILLED * micro * batch_cfg.micro_rows * batch_cfg.row_length)
  for _ in range(cfg.imitation.steps):
    yield _fill(episodes, room, micro + 1, cfg)


def _fill(episodes: Episodes, room: int, micro: int, cfg: config.Config) -> st.Batch:
  items = episodes.take(room, cfg.batch.row_length)
  weight = cfg.imitation.context_weight
  total = sum(
    float(np.where(item.segment.mask_T[1:], 1.0, weight).sum()) for item in items
  )
  return batching.fill(
    items,
    micro=micro,
    cfg=cfg.batch,
    K=1,
    denominator=total,
    context_weight=weight,
  )
