"""What a step's groups say about the rollouts, as values for a row of metrics."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swe17 import types
from swe17.metrics import records


def of_groups(
  groups: Sequence[types.Group], staleness: Sequence[int], top_k: int
) -> dict[str, Any]:
  """Values by metric name; a mean over nothing is None.

  Args:
    groups: the groups a step consumed.
    staleness: age of each, in optimiser steps.
    top_k: the bound of a kept set, 0 = none.
  """
  every = [e for group in groups for e in group.episodes]
  valid = [e for e in every if e.status != 'invalid']
  mean = records.mean
  turns = sum(e.turns for e in valid)
  return {
    'episodes': len(every),
    'solve_rate': mean([e.solved for e in valid]),
    'solve_rate_count': len(valid),
    'invalid_share': mean([e.status == 'invalid' for e in every]),
    'malformed_share': mean([e.malformed > 0 for e in valid]),
    'cheating_share': mean([e.outcome.cheated for e in valid]),
    'submitted_share': mean([e.submitted for e in valid]),
    'cut_share': mean([e.cut for e in valid]),
    'thinking_tokens': mean([e.thinking_tokens for e in valid]),
    'sampled_tokens': mean([e.sampled_tokens for e in valid]),
    'total_tokens': mean([sum(s.token_T.size for s in e.segments) for e in valid]),
    'turns': mean([e.turns for e in valid]),
    'calls_per_turn': sum(e.calls for e in valid) / turns if turns else None,
    'duplicate_calls': mean([e.duplicate_calls for e in valid]),
    'tests': mean([e.tests for e in valid]),
    'tool_seconds': mean([e.tool_seconds for e in valid]),
    'episode_seconds': mean([e.seconds for e in valid]),
    'turn_seconds': sum(e.seconds for e in valid) / turns if turns else None,
    'loop_lag': max(
      (g.loop_lag for g in groups if g.loop_lag is not None), default=None
    ),
    'staleness_mean': mean(staleness),
    'staleness_max': max(staleness, default=None),
    'staleness_count': len(staleness),
    **_of_alike(groups),
    **_of_tokens(valid, top_k),
  }


def _of_alike(groups: Sequence[types.Group]) -> dict[str, Any]:
  """Share of groups whose members all sampled the same tokens: one draw, not many.

  Invalid members count where they sampled; a key that all members share shows there
  too.
  """
  alike = []
  for group in groups:
    texts = [_sampled(e) for e in group.episodes]
    texts = [text for text in texts if text]
    if len(texts) > 1:
      alike.append(len(set(texts)) == 1)
  return {'identical_share': records.mean(alike), 'identical_count': len(alike)}


def _sampled(episode: types.Episode) -> bytes:
  return b''.join(s.token_T[s.mask_T].tobytes() for s in episode.segments)


def _of_tokens(valid: Sequence[types.Episode], top_k: int) -> dict[str, Any]:
  """Statistics over the sampled tokens of valid episodes."""
  segments = [s for e in valid for s in e.segments]
  entropy = [s.entropy_T[s.mask_T] for s in segments]
  sizes = [s.kept.size_T[s.mask_T] for s in segments]
  count = int(sum(s.size for s in sizes))
  values: dict[str, Any] = {'token_count': count}
  if count == 0:
    return values
  size = np.concatenate(sizes)
  values['entropy'] = records.mean(np.concatenate(entropy))
  if np.any(size > 0):  # sets were recorded
    values['kept_size_mean'] = records.mean(size)
    values['singleton_share'] = records.mean(size == 1)
    if top_k:
      values['topk_bound_share'] = sum(e.topk_bound for e in valid) / count
  return values
