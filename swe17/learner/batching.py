"""From groups to a batch: rewards, advantages, and packed rows. Host side, numpy.

A group's rewards are shaped by `rewards`, from raw outcomes; its baseline is over
episodes, never rows. Segments are packed into rows of a fixed length, so that one
compiled shape serves every step (learner/packing.py); those that begin alike share what
they have in common (learner/prompts.py).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import Any

import numpy as np

from swe17 import config, types
from swe17 import kept as kept_sets
from swe17.learner import packing, prompts, rewards
from swe17.learner import state as st
from swe17.metrics import records

# What the step fills in, if it is asked for.
_MEASURED = ('prox_logp', 'ref_logp', 'turn_log_ratio', 'episode_log_ratio')
_MEASURED += ('episode_tokens',)


@dataclasses.dataclass(frozen=True)
class Item:
  """One segment to train on. `adv` is its episode's advantage (a weight, imitating).

  Segments with the same `episode` are parts of one; '' makes an episode of its own.
  `turn_adv`, if there, is what counts instead: an advantage for each turn of the
  episode, float64, by the numbers of `segment.turn_T`.
  """

  segment: types.Segment
  adv: float
  episode: str = ''
  turn_adv: np.ndarray | None = None

  def adv_T(self) -> np.ndarray:
    """Advantage of every sampled target, float64 [T - 1]; 0 of the others."""
    mask_T, turn_T = self.segment.mask_T[1:], self.segment.turn_T[1:]
    if self.turn_adv is None:
      return np.where(mask_T, self.adv, 0.0)
    return np.where(mask_T, self.turn_adv[np.where(mask_T, turn_T, 0)], 0.0)


@dataclasses.dataclass(frozen=True)
class Assembled:
  """What a step trains on, and what the groups said."""

  items: tuple[Item, ...]
  # Valid episodes, masked ones included, of the groups that train.
  denominator_episodes: int
  trained: tuple[str, ...]  # group ids with signal
  no_signal: tuple[str, ...]
  too_small: tuple[str, ...]  # fewer than 2 valid members
  # Of those without signal: rewards differ, but only by shaping, and not all solved.
  degenerate: tuple[str, ...] = ()
  budgets: Mapping[str, float] = dataclasses.field(default_factory=dict)
  values: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for a row


def lengths(episode: types.Episode) -> int:
  """L_i: all sampled tokens of the episode."""
  return rewards.tokens(episode)


def denominator(cfg: config.Loss, episodes: int, T_max: int) -> float:
  """What a batch's summed loss is divided by, once: T_max times `episodes`.

  `episodes` is `Assembled.denominator_episodes` and T_max a constant (Dr. GRPO,
  arXiv:2503.20783). GSPO has its paper's mean over sequences (arXiv:2507.18071).
  """
  return float(episodes if cfg.objective == 'gspo' else T_max * episodes)


def assemble(
  groups: Sequence[types.Group],
  cfg: config.Loss,
  *,
  step_of: Mapping[int, int] | None = None,
  budgets: Mapping[str, float] | None = None,
) -> Assembled:
  """Turns groups into items with advantages; groups without signal give none.

  Args:
    groups: in the order in which they started.
    cfg: objective, baseline, stabilisers and length.
    step_of: learner step of each weight version; None: version v is of step v.
    budgets: length budgets so far, by task id; `Assembled.budgets` has the new ones.
  """
  items, trained, no_signal, too_small, degenerate = [], [], [], [], []
  count, reward, over, masked = 0, [], [], []
  budgets = dict(budgets or {})
  for group in groups:
    members = [e for e in group.episodes if e.status in ('valid', 'masked')]
    if len(members) < 2:
      too_small.append(group.id)
      continue
    steps = _every_version(members) if step_of is None else step_of
    shaped = rewards.shape(group, members, cfg.length, step_of=steps, budgets=budgets)
    budgets, reward_G = shaped.budgets, shaped.reward_G
    reward, over = [*reward, *reward_G], [*over, *shaped.over_G]
    mine = _items(members, reward_G, cfg)
    if not mine:
      no_signal.append(group.id)
      if len(set(reward_G.tolist())) > 1 and not _differ(members):
        degenerate.append(group.id)
      continue
    trained.append(group.id)
    count += len(members)
    masked += [not _inside(e, cfg) for e in members]
    items += mine
  values = {
    'groups_degenerate': len(degenerate),
    'reward': records.mean(reward),
    'reward_count': len(reward),
    'over_budget_share': records.mean(over),
    'masked_share': records.mean(masked),
    'masked_count': len(masked),
  }
  return Assembled(
    tuple(items),
    count,
    tuple(trained),
    tuple(no_signal),
    tuple(too_small),
    tuple(degenerate),
    budgets,
    values,
  )


def _differ(members: Sequence[types.Episode]) -> bool:
  return len({e.outcome.value for e in members}) > 1


def _inside(episode: types.Episode, cfg: config.Loss) -> bool:
  """Whether an episode is in the loss, and not in the statistics only."""
  return episode.status == 'valid' and not (cfg.mask_overlong and episode.cut)


def _items(
  members: Sequence[types.Episode], reward_G: np.ndarray, cfg: config.Loss
) -> list[Item]:
  """What a group's valid members give to train on; [] where the loss would be 0."""
  if not rewards.has_signal(members, reward_G, cfg):
    return []
  adv_G = rewards.advantages(members, reward_G, cfg)
  by_turn = [None] * len(members)
  if cfg.credit == 'turn':
    by_turn = rewards.turn_advantages(members, cfg)
  items = [
    Item(segment, float(adv), episode.id, turn_adv)
    for episode, adv, turn_adv in zip(members, adv_G, by_turn, strict=True)
    if _inside(episode, cfg)
    for segment in episode.segments
    if segment.mask_T[1:].any()
  ]
  # What differs may be masked, or without a token.
  return items if any(item.adv_T().any() for item in items) else []


def _every_version(members: Sequence[types.Episode]) -> dict[int, int]:
  """Version v is of step v: what a publish after every step makes true."""
  versions = {rewards.first_version(e) for e in members} - {None}
  return {v: v for v in versions if v is not None}


def fill(
  items: Sequence[Item],
  *,
  micro: int,
  cfg: config.Batch,
  K: int,
  denominator: float,
  version: int = -1,
  context_weight: float | None = None,
  routes: tuple[int, int, int] | None = None,
) -> st.Batch:
  """Packs items into a batch of `micro` micro-batches of `cfg.micro_rows` rows.

  Args:
    items: segments with advantages.
    micro: static number of micro-batches; ValueError if the rows need more.
    cfg: row length and rows of a micro-batch.
    K: width of the padded kept sets; at least 1.
    denominator: what the summed loss is divided by.
    version: the learner's present weight version.
    context_weight: for imitation: the weight of tokens nobody sampled; above 0 prompts
      are not shared, since theirs count too. None: only sampled tokens count.
    routes: (layers, experts a token, experts) of the routes to replay
      (`config.Model.routes`); None: the batch has none.
  """
  B, T = cfg.micro_rows, cfg.row_length
  if context_weight:
    cfg = dataclasses.replace(cfg, share_prompts=False)
  rows, sets = packing.layout([item.segment for item in items], cfg, routes)
  shared = {i: s for s in sets for i in s.members}
  if len(rows) > micro * B:
    raise ValueError(f'got {len(rows)} rows, want at most {micro} x {B}')
  M = micro
  # Nothing is asked by episode of scripted ones.
  names = [item.episode for item in items] if context_weight is None else []
  episodes = _numbered(names, M * B * st.EPISODES_A_ROW) or [0] * len(items)
  a = _blank(M * B, T, max(K, 1), routes, cfg.share_prompts)
  for r, row in enumerate(rows):
    at = turns = place = 0
    held: dict[prompts.Shared, int] = {}  # places of prefixes
    for i in row:
      of, size = shared[i], items[i].segment.token_T.size - 1
      cuts = [of.prefix, size] if of in held or not of.prefix else [0, of.prefix, size]
      for start, end in itertools.pairwise(cuts):
        to = slice(at, at + end - start)
        put = {k: v[r, to] for k, v in a.items()}  # views: what is written lands in `a`
        turns = _put(put, items[i], start, turns, version, context_weight)
        at, place = to.stop, place + 1
        put['segment_MBT'][:], put['episode_MBT'][:] = place, episodes[i]
        if start:
          put['prefix_MBT'][:] = held[of]
        elif of.prefix:
          held[of] = place
  fields: dict[str, Any] = {k: v.reshape(M, B, *v.shape[1:]) for k, v in a.items()}
  for name in _MEASURED:
    fields[f'{name}_MBT'] = np.zeros((M, B, T), np.float32)
  fields['micro'] = np.int32(-(-len(rows) // B))
  fields['denominator'] = np.float32(denominator)
  return st.Batch(**fields)


def _blank(
  R: int, T: int, K: int, routes: tuple[int, int, int] | None, prefixes: bool
) -> dict[str, np.ndarray]:
  """Padding, `R` rows of it: the fields of a batch before anything is put in."""
  ids = ('token', 'position', 'segment', 'target', 'turn', 'episode')
  a: dict[str, np.ndarray] = {}
  a |= {f'{name}_MBT': np.zeros((R, T), np.int32) for name in ids}
  a |= {f'{name}_MBT': np.zeros((R, T), bool) for name in ('mask', 'fresh')}
  a |= {f'{name}_MBT': np.zeros((R, T), np.float32) for name in ('mu_logp', 'adv')}
  a['temperature_MBT'] = np.ones((R, T), np.float32)
  a['kept_ids_MBTK'] = np.full((R, T, K), -1, np.int32)
  if routes is not None:
    a['routes_MBTNK'] = np.full((R, T, *routes[:2]), -1, np.int16)
  if prefixes:
    a['prefix_MBT'] = np.zeros((R, T), np.int32)
  return a


def _put(
  put: dict[str, np.ndarray],
  item: Item,
  start: int,
  turns: int,
  version: int,
  context_weight: float | None,
) -> int:
  """Writes a segment's inputs from `start` on to their places in a row.

  `turns` stand before them in the row; returns their number with them.
  """
  segment, size = item.segment, put['token_MBT'].size
  of, to = slice(start, start + size), slice(start + 1, start + 1 + size)
  mask = segment.mask_T[to]
  put['token_MBT'][:] = segment.token_T[of]
  put['position_MBT'][:] = np.arange(start, start + size)
  put['target_MBT'][:] = segment.token_T[to]
  put['mask_MBT'][:] = mask
  put['mu_logp_MBT'][:] = segment.mu_logp_T[to]
  put['fresh_MBT'][:] = bool((segment.version_T[segment.mask_T] == version).all())
  other = 0.0 if context_weight is None else context_weight
  put['adv_MBT'][:] = np.where(mask, item.adv_T()[of], other)
  put['temperature_MBT'][:] = np.where(mask, segment.temperature_T[to], 1.0)
  kept = put['kept_ids_MBTK']
  kept[:] = kept_sets.padded(segment.kept, kept.shape[-1])[to]
  if 'routes_MBTNK' in put and segment.routes_RNK is not None:
    # Row i is of input i; the last token is no input, and the end was never fed.
    fed = segment.routes_RNK[of]
    put['routes_MBTNK'][: len(fed)] = fed
  turn_T = _turns(segment)[of] + turns
  put['turn_MBT'][:] = turn_T
  return int(turn_T.max(initial=turns))


def _numbered(names: Sequence[str], most: int) -> list[int]:
  """Numbers from 0, in order of appearance; '' is a new one each. At most `most`."""
  number: dict[Any, int] = {}
  of = [number.setdefault(name or i, len(number)) for i, name in enumerate(names)]
  if len(number) > most:
    raise ValueError(
      f'a batch of {len(number)} episodes, want at most {most}: '
      f'{st.EPISODES_A_ROW} a row; raise batch.micro_rows or lower batch.row_length'
    )
  return of


def _turns(segment: types.Segment) -> np.ndarray:
  """Turns of a segment's targets, int32 [T - 1], numbered from 1 within it.

  A turn goes on until the first token drawn in the next; what comes before the first
  turn belongs to it.
  """
  mask_T, turn_T = segment.mask_T[1:], segment.turn_T[1:]
  drawn = np.flatnonzero(mask_T)
  new_T = np.zeros(mask_T.shape, np.int32)
  new_T[drawn[1:][turn_T[drawn][1:] != turn_T[drawn][:-1]]] = 1
  return 1 + np.cumsum(new_T, dtype=np.int32)
