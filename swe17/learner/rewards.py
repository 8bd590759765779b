"""From raw outcomes to rewards and advantages of the episodes of a group. Host side.

Rollouts write outcomes and costs; rewards are shaped here, when a batch is formed, by
the penalty phase of the weights that drew an episode's first token. There is no reward
for format (SWE-grep post, Cognition): nothing but outcome and length enters.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from swe17 import config, types
from swe17.ops import advantage, length


@dataclasses.dataclass(frozen=True)
class Shaped:
  """A group's rewards, float64 [G], and what the alternating penalty learnt from it."""

  reward_G: np.ndarray
  over_G: np.ndarray  # bool: penalised for its length
  budgets: dict[str, float]  # by task id, with this group's own if it set one


def tokens(episode: types.Episode, which: str = 'sampled') -> int:
  """L_i: trainable tokens of an episode, over all of its segments.

  `which`: 'sampled' counts all that were drawn, 'signal' those whose kept set is larger
  than one (a token without a recorded set was drawn from the whole vocabulary).
  """
  if which == 'sampled':
    return int(sum(s.mask_T.sum() for s in episode.segments))
  return int(sum((s.mask_T & (s.kept.size_T != 1)).sum() for s in episode.segments))


def first_version(episode: types.Episode) -> int | None:
  """The weight version that drew the episode's first token; None without tokens."""
  for segment in episode.segments:
    if segment.mask_T.any():
      return int(segment.version_T[segment.mask_T.argmax()])
  return None


def shape(
  group: types.Group,
  members: Sequence[types.Episode],
  cfg: config.Length,
  *,
  step_of: Mapping[int, int],
  budgets: Mapping[str, float],
) -> Shaped:
  """Rewards of the valid `members` of a group, by `cfg.kind`.

  Args:
    group: whose task the budget is of.
    members: the episodes that have an outcome.
    cfg: length settings.
    step_of: learner step of each weight version; read for the alternating penalty only.
    budgets: budgets so far, by task id.
  """
  outcome_G = np.array([e.outcome.value for e in members], np.float64)
  none_G, same = np.zeros(outcome_G.shape, bool), dict(budgets)
  if cfg.kind == 'none':
    return Shaped(outcome_G, none_G, same)
  cost_G = length.cost(
    np.array([tokens(e) for e in members]),
    np.array([e.turns for e in members]),
    np.array([e.tool_seconds for e in members]),
    w_tokens=cfg.w_tokens,
    w_turns=cfg.w_turns,
    w_tool=cfg.w_tool,
  )
  if cfg.kind == 'linear':
    return Shaped(length.linear(outcome_G, cost_G, cfg.lam), none_G, same)
  solved_G = np.array([e.solved for e in members])
  budgeted_G = np.array([_budgeted(e, cfg, step_of) for e in members])
  if not budgeted_G.any():
    same = length.calibrate(same, group.task_id, cost_G, solved_G, cfg.percentile)
  if group.task_id not in same or not budgeted_G.any():
    return Shaped(outcome_G, none_G, same)
  off_G = length.penalty(
    length.excess(cost_G, same[group.task_id]),
    solved_G,
    form=cfg.form,
    slope=cfg.slope,
    cap=cfg.cap,
    gate=cfg.gate,
  )
  off_G = np.where(budgeted_G, off_G, 0.0)
  return Shaped(outcome_G - off_G, off_G > 0, same)


def _budgeted(
  episode: types.Episode, cfg: config.Length, step_of: Mapping[int, int]
) -> bool:
  """Whether the episode began in a budget phase."""
  version = first_version(episode)
  if version is None:
    return False
  return length.in_budget_phase(step_of[version], cfg.phase_steps)


def advantages(
  members: Sequence[types.Episode], reward_G: np.ndarray, cfg: config.Loss
) -> np.ndarray:
  """Advantages of the valid members of a group, float64 [G]."""
  length_G = np.array([tokens(e, cfg.baseline_tokens) for e in members], np.float64)
  adv_G = advantage.advantages(reward_G, length_G, advantage.BASELINES[cfg.baseline])
  return advantage.scaled_by_calls(
    adv_G,
    np.array([e.calls for e in members]),
    np.array([e.turns for e in members]),
    cfg.calls_scale,
  )
