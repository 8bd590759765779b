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
    self._prompt_T: np.ndarray | None = None  # what all of them begin with

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
        for segment in (s for e in group.episodes for s in e.segments):
          self._segments.append(segment)
          self._prompt_T = _common(self._prompt_T, segment)
      if len(self._segments) >= count:
        break
      time.sleep(0.1)
    return len(self._segments)

  @property
  def prompt(self) -> int:
    """Inputs that all episodes begin with, and may share (`batch.share_prompts`)."""
    return 0 if self._prompt_T is None else max(self._prompt_T.size - 1, 0)

  def take(self, tokens: int, longest: int, shared: int = 0) -> list[batching.Item]:
    """Items of about `tokens` tokens in all, none longer than `longest`.

    The first `shared` of each do not count. ValueError if no episode is short enough.
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
      if size - shared > tokens and items:
        return items
      self._order.pop()
      if size <= longest:
        items.append(batching.Item(segment, 1.0))
        tokens -= size - shared


def _common(prompt_T: np.ndarray | None, segment: types.Segment) -> np.ndarray:
  """The ids before anything sampled that are those of `prompt_T` too."""
  own_T = segment.token_T[: int(np.argmax(segment.mask_T))]
  if prompt_T is None:
    return own_T
  n = min(prompt_T.size, own_T.size)
  differ = np.flatnonzero(prompt_T[:n] != own_T[:n])
  return own_T[: int(differ[0]) if differ.size else n]


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
  micro = -(-cfg.imitation.rows // cfg.batch.micro_rows)
  for _ in range(cfg.imitation.steps):
    yield _fill(episodes, micro, cfg)


def _fill(episodes: Episodes, micro: int, cfg: config.Config) -> st.Batch:
  """A batch that fills `micro` micro-batches; one more is there for what is left."""
  weight, of = cfg.imitation.context_weight, cfg.batch
  shared = episodes.prompt if of.share_prompts and not weight else 0
  room = int(FILLED * micro * of.micro_rows * (of.row_length - shared))
  items = episodes.take(room, of.row_length, shared)
  total = sum(
    float(np.where(item.segment.mask_T[1:], 1.0, weight).sum()) for item in items
  )
  return batching.fill(
    items,
    micro=micro + 1,
    cfg=of,
    K=1,
    denominator=total,
    context_weight=weight,
  )
