"""Finished groups, from the store to a batch.

The buffer polls the store, refuses what cannot be trained on at its door, and forms a
batch from the waiting groups that *started* first, so that short, fast rollouts are not
over-represented. Age is derived when the batch is formed, never counted: learner step
minus the step of the oldest token's version. What is dropped is counted by reason and
by task.
"""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import logging

import numpy as np

from swe17 import types
from swe17.store import groups as group_store
from swe17.store import kv

_log = logging.getLogger(__name__)


def refuse(
  episode: types.Episode,
  *,
  newest: int,
  vocab: int,
  truncates: bool,
  top_k: int,
  routes: tuple[int, int, int] | None = None,
) -> str | None:
  """Why an episode cannot be trained on, or None.

  `top_k` bounds the kept sets, `routes` is `config.Model.routes`. Written as 'keep if
  inside', so that NaN is refused.
  """
  if episode.status not in ('valid', 'masked', 'invalid'):
    return f'unknown status {episode.status!r}'
  if episode.status == 'invalid':
    return None
  value = episode.outcome.value
  if value is None or not np.isfinite(value):
    return 'a valid episode without an outcome'
  scores = episode.turn_scores
  if scores is not None and not np.all(np.isfinite(scores)):
    return 'the score of a turn is not finite'
  for segment in episode.segments:
    mask_T = segment.mask_T
    if any(x.shape != segment.token_T.shape for x in _per_token(segment)):
      return 'the arrays of a segment differ in length'
    logp_T = segment.mu_logp_T[mask_T]
    if not np.all((logp_T <= 1e-6) & (logp_T > -np.inf)):
      return 'a log-probability is missing, not finite or positive'
    if not np.all((segment.entropy_T >= -1e-6) & (segment.entropy_T < np.inf)):
      return 'an entropy is not finite'
    if not np.all((segment.token_T >= 0) & (segment.token_T < vocab)):
      return 'a token id is outside the vocabulary'
    if not np.all(segment.temperature_T[mask_T] > 0):
      return 'a temperature is not positive'
    turn_T = segment.turn_T[mask_T]
    if not np.all(turn_T >= 0):
      return 'a sampled token is of no turn'
    if scores is not None and not np.all(turn_T < len(scores)):
      return 'a turn has no score'
    version_T = segment.version_T[mask_T]
    if not np.all((version_T >= 0) & (version_T <= newest)):
      return f'a token claims a weight version outside 0..{newest}'
    if not np.all((segment.kept.ids >= 0) & (segment.kept.ids < vocab)):
      return 'a kept id is outside the vocabulary'
    reason = _refuse_sets(segment, truncates, top_k) or _refuse_routes(segment, routes)
    if reason:
      return reason
  return None


def _per_token(segment: types.Segment) -> list[np.ndarray]:
  return [array for name, array in vars(segment).items() if name.endswith('_T')]


def _refuse_sets(segment: types.Segment, truncates: bool, top_k: int) -> str | None:
  """Kept sets belong to sampled tokens, one each under filters, and hold them."""
  size_T, mask_T = segment.kept.size_T, segment.mask_T
  if size_T.shape != mask_T.shape or np.any(size_T[~mask_T] > 0):
    return 'kept sets do not match the sampled tokens'
  if np.any((size_T[mask_T] > 0) != truncates):
    return 'a sampled token lacks its kept set' if truncates else 'an unasked kept set'
  if truncates:
    if not np.all(size_T <= top_k):
      return f'a kept set holds {size_T.max()} ids, sampler.top_k is {top_k}'
    at = np.repeat(np.arange(size_T.size), size_T)
    hit_T = np.zeros(size_T.size, bool)
    np.logical_or.at(hit_T, at, segment.kept.ids == segment.token_T[at])
    if not np.all(hit_T[mask_T]):
      return 'a sampled token lies outside its kept set'
  return None


def _refuse_routes(
  segment: types.Segment, routes: tuple[int, int, int] | None
) -> str | None:
  """Where routes are replayed, every input up to the last draw has one, in range."""
  if routes is None or not segment.mask_T.any():
    return None
  layers, active, experts = routes
  routes_RNK = segment.routes_RNK
  if routes_RNK is None:
    return 'a segment lacks its routes'
  if routes_RNK.shape[1:] != (layers, active):
    return 'routes are not those of this model'
  if not np.flatnonzero(segment.mask_T)[-1] <= len(routes_RNK) <= segment.token_T.size:
    return 'routes do not end at the last draw'
  if routes_RNK.max(initial=0) >= experts:
    return 'a route leads to no expert'
  if np.any(np.diff(np.sort(routes_RNK, axis=-1), axis=-1) == 0):
    return 'a route leads to one expert twice'
  return None


def oldest_version(group: types.Group) -> int | None:
  """The oldest weight version that drew a token of the group; None without tokens."""
  versions = [
    int(segment.version_T[segment.mask_T].min())
    for episode in group.episodes
    for segment in episode.segments
    if segment.mask_T.any()
  ]
  return min(versions, default=None)


@dataclasses.dataclass
class Taken:
  """A batch's groups, with ages, and what was dropped on the way."""

  groups: list[types.Group]
  staleness: list[int]  # optimiser steps, one a group
  dropped: list[tuple[types.Group, str]]


class Buffer:
  """Waiting groups of one run. Consumed starts and counters are its state."""

  def __init__(
    self,
    store: kv.Store,
    *,
    max_staleness: int,
    vocab: int,
    truncates: bool,
    top_k: int,
    routes: tuple[int, int, int] | None = None,
  ):
    self._store, self._max_staleness = store, max_staleness
    self._vocab, self._truncates, self._top_k = vocab, truncates, top_k
    self._routes = routes
    self._waiting: dict[int, types.Group] = {}
    self._seen: set[str] = set()
    self.consumed: set[int] = set()
    self.dropped: collections.Counter[str] = collections.Counter()
    self.dropped_tasks: collections.Counter[str] = collections.Counter()
    self._overdue: list[tuple[types.Group, str]] = []

  def poll(self, newest: int) -> int:
    """Loads what has arrived; `newest` is the newest published version. Its size."""
    for key in group_store.list_new(self._store, self._seen):
      self._seen.add(key)
      try:
        group = group_store.load(self._store, key)
      except ValueError as e:
        where = group_store.quarantine(self._store, key)
        _log.warning('group set aside as %s: %s', where, e)
        self._lost(key)
        continue
      if group.start in self.consumed or group.start in self._waiting:
        self.dropped['duplicate of a group already taken'] += 1
        continue
      self._waiting[group.start] = self._checked(group, newest)
    return len(self._waiting)

  def _lost(self, key: str) -> None:
    """Consumes the start of a group that did not decode: nobody waits for it again."""
    self.dropped['corrupt group record'] += 1
    start = group_store.start_of(key)
    if start not in self.consumed:
      self.consumed.add(start)
      group = types.Group(key, start, task_id='', unit='', episodes=())
      self._overdue.append((group, 'corrupt group record'))

  def _checked(self, group: types.Group, newest: int) -> types.Group:
    """The group with refused episodes made invalid, counted and named."""
    episodes = []
    for episode in group.episodes:
      reason = refuse(
        episode,
        newest=newest,
        vocab=self._vocab,
        truncates=self._truncates,
        top_k=self._top_k,
        routes=self._routes,
      )
      if reason:
        self.dropped[reason] += 1
        episode = dataclasses.replace(
          episode,
          status='invalid',
          outcome=types.Outcome(None, f'{episode.id}: {reason}'),
        )
      episodes.append(episode)
    return dataclasses.replace(group, episodes=tuple(episodes))

  def take(self, n: int, *, step: int, step_of: Mapping[int, int]) -> Taken | None:
    """Forms a batch of `n` groups, oldest start first; None while there are too few.

    Args:
      n: groups of a batch.
      step: the learner's step, before the one to take.
      step_of: the learner step of each published version.
    """
    fit, stale = [], []
    for start in sorted(self._waiting):
      age = self._age(self._waiting[start], step, step_of)
      (fit if age <= self._max_staleness else stale).append((start, age))
    dropped = [(self._pop(start), f'{age} steps old') for start, age in stale]
    for group, _ in dropped:
      self.dropped['over the staleness bound'] += 1
      self.dropped_tasks[group.task_id] += 1
    self._overdue += dropped
    if len(fit) < n:
      return None
    taken = Taken([self._pop(s) for s, _ in fit[:n]], [a for _, a in fit[:n]], [])
    taken.dropped, self._overdue = self._overdue, []
    return taken

  def _age(self, group: types.Group, step: int, step_of: Mapping[int, int]) -> int:
    version = oldest_version(group)
    return 0 if version is None else step - step_of[version]

  def _pop(self, start: int) -> types.Group:
    self.consumed.add(start)
    return self._waiting.pop(start)


def cursor(consumed: set[int]) -> tuple[int, list[int]]:
  """(b, rest): every start below b is consumed, and `rest` lists the others."""
  below = 0
  while below in consumed:
    below += 1
  return below, sorted(s for s in consumed if s >= below)


def uncursor(below: int, rest: Sequence[int]) -> set[int]:
  """Inverse of `cursor`."""
  return set(range(below)) | set(rest)
