"""From groups to a batch: rewards, advantages, and packed rows. Host side, numpy.

A group's rewards are shaped here, from raw outcomes; its baseline is over episodes,
never rows. Segments are packed first-fit, longest first, into rows of a fixed length,
so that one compiled shape serves every step.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from swe17 import config, types
from swe17.learner import state as st
from swe17.ops import advantage


@dataclasses.dataclass(frozen=True)
class Item:
  """One segment to train on. `adv` is its episode's advantage (a weight, imitating)."""

  segment: types.Segment
  adv: float


@dataclasses.dataclass(frozen=True)
class Assembled:
  """What a step trains on, and what the groups said."""

  items: tuple[Item, ...]
  # Valid episodes, masked ones included, of the groups that train.
  denominator_episodes: int
  trained: tuple[str, ...]  # group ids with signal
  no_signal: tuple[str, ...]
  too_small: tuple[str, ...]  # fewer than 2 valid members


def lengths(episode: types.Episode) -> int:
  """L_i: all sampled tokens of the episode."""
  return int(sum(segment.mask_T.sum() for segment in episode.segments))


def assemble(groups: Sequence[types.Group], cfg: config.Loss) -> Assembled:
  """Turns groups into items with advantages; groups without signal give none."""
  items, trained, no_signal, too_small, count = [], [], [], [], 0
  baseline = advantage.BASELINES[cfg.baseline]
  for group in groups:
    members = [e for e in group.episodes if e.status in ('valid', 'masked')]
    if len(members) < 2:
      too_small.append(group.id)
      continue
    outcome_G = np.array([e.outcome.value for e in members], np.float64)
    reward_G = outcome_G  # no shaping: the quickstart rewards success alone
    solved_G = np.array([e.solved for e in members])
    if not advantage.has_signal(outcome_G, reward_G, solved_G):
      no_signal.append(group.id)
      continue
    length_G = np.array([lengths(e) for e in members], np.float64)
    adv_G = advantage.advantages(reward_G, length_G, baseline)
    mine = [
      Item(segment, float(adv))
      for episode, adv in zip(members, adv_G, strict=True)
      if episode.status == 'valid'
      for segment in episode.segments
      if segment.mask_T[1:].any()
    ]
    # What differs may be masked, or without a token: then the loss would be 0.
    if not any(item.adv for item in mine):
      no_signal.append(group.id)
      continue
    trained.append(group.id)
    count += len(members)
    items += mine
  return Assembled(
    tuple(items), count, tuple(trained), tuple(no_signal), tuple(too_small)
  )


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
  """Rows of item indices: first fit, longest first, ties by index.

  Raises:
    ValueError: an item is longer than a row.
  """
  rows: list[list[int]] = []
  room: list[int] = []
  for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    if lengths[i] > row_length:
      raise ValueError(
        f'a segment of {lengths[i]} tokens does not fit a row of {row_length}; '
        'raise batch.row_length or lower agent.max_context'
      )
    at = next((r for r, free in enumerate(room) if free >= lengths[i]), len(rows))
    if at == len(rows):
      rows.append([])
      room.append(row_length)
    rows[at].append(i)
    room[at] -= lengths[i]
  return rows


def fill(
  items: Sequence[Item],
  *,
  micro: int,
  cfg: config.Batch,
  K: int,
  denominator: float,
  version: int = -1,
  context_weight: float | None = None,
) -> st.Batch:
  """Packs items into a batch of `micro` micro-batches of `cfg.micro_rows` rows.

  Args:
    items: segments with advantages.
    micro: static number of micro-batches; ValueError if the rows need more.
    cfg: row length and rows of a micro-batch.
    K: width of the padded kept sets; at least 1.
    denominator: what the summed loss is divided by.
    version: the learner's present weight version.
    context_weight: for imitation: the weight of tokens nobody sampled; None: only
      sampled tokens count.
  """
  B, T = cfg.micro_rows, cfg.row_length
  rows = pack([item.segment.token_T.size - 1 for item in items], T)
  if len(rows) > micro * B:
    raise ValueError(f'got {len(rows)} rows, want at most {micro} x {B}')
  M = micro
  a = {
    'token': np.zeros((M * B, T), np.int32),
    'position': np.zeros((M * B, T), np.int32),
    'segment': np.zeros((M * B, T), np.int32),
    'target': np.zeros((M * B, T), np.int32),
    'mask': np.zeros((M * B, T), bool),
    'mu_logp': np.zeros((M * B, T), np.float32),
    'adv': np.zeros((M * B, T), np.float32),
    'temperature': np.ones((M * B, T), np.float32),
    'fresh': np.zeros((M * B, T), bool),
  }
  kept = np.full((M * B, T, max(K, 1)), -1, np.int32)
  for r, row in enumerate(rows):
    at = 0
    for j, i in enumerate(row):
      segment, adv = items[i].segment, items[i].adv
      n = segment.token_T.size - 1
      to = slice(at, at + n)
      a['token'][r, to] = segment.token_T[:-1]
      a['position'][r, to] = np.arange(n)
      a['segment'][r, to] = j + 1
      a['target'][r, to] = segment.token_T[1:]
      mask = segment.mask_T[1:]
      a['mask'][r, to] = mask
      a['mu_logp'][r, to] = segment.mu_logp_T[1:]
      a['fresh'][r, to] = bool((segment.version_T[segment.mask_T] == version).all())
      other = 0.0 if context_weight is None else context_weight
      a['adv'][r, to] = np.where(mask, adv, other)
      a['temperature'][r, to] = np.where(mask, segment.temperature_T[1:], 1.0)
      kept[r, to] = padded_sets(segment.kept, max(K, 1))[1:]
      at += n
  fields: dict[str, Any] = {f'{k}_MBT': v.reshape(M, B, T) for k, v in a.items()}
  fields['kept_ids_MBTK'] = kept.reshape(M, B, T, -1)
  fields['micro'] = np.int32(-(-len(rows) // B))
  fields['denominator'] = np.float32(denominator)
  return st.Batch(**fields)


def padded_sets(kept: types.KeptSets, K: int) -> np.ndarray:
  """CSR kept sets as int32 [T, K], -1 beyond each set. ValueError if one is wider."""
  size_T = kept.size_T
  if size_T.size and size_T.max() > K:
    raise ValueError(f'a kept set holds {size_T.max()} ids, want at most {K}')
  out_TK = np.full((size_T.size, K), -1, np.int32)
  out_TK[np.arange(K)[None, :] < size_T[:, None]] = kept.ids
  return out_TK
