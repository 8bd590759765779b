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


def has_signal(
  members: Sequence[types.Episode], reward_G: np.ndarray, cfg: config.Loss
) -> bool:
  """Whether a group trains: by its outcomes and rewards, or by its turns' scores.

  With `cfg.credit='turn'` scores that differ, within an episode or between two, are a
  signal too. The discount alone is none: it sets turns apart by their place only.
  """
  outcome_G = np.array([e.outcome.value for e in members], np.float64)
  solved_G = np.array([e.solved for e in members])
  if advantage.has_signal(outcome_G, reward_G, solved_G):
    return True
  return cfg.credit == 'turn' and len({x for e in members for x in _scores(e)}) > 1


def turn_advantages(
  members: Sequence[types.Episode], cfg: config.Loss
) -> list[np.ndarray]:
  """Advantages of the turns of a group's valid members, float64 [turns] each.

  Credit by turn (Kevin, arXiv:2507.11948): a turn's reward is its raw score. An episode
  that is scored once, at its end, has its outcome as the reward of its last turn and 0
  before that, R_t = gamma^(n - 1 - t) outcome: with a small gamma the first turns of a
  long success then lie below the baseline, so that 'episode' suits such families.
  """
  reward_GT, length_GT = [], []
  for episode in members:
    length_T = _turn_tokens(episode, cfg.baseline_tokens)
    reward_GT.append(_turn_rewards(episode, length_T.size))
    length_GT.append(length_T)
  adv_GT = advantage.turn_advantages(
    reward_GT, length_GT, cfg.gamma, advantage.BASELINES[cfg.baseline]
  )
  return [
    advantage.scaled_by_calls(
      adv_T, np.array([e.calls]), np.array([e.turns]), cfg.calls_scale
    )
    for e, adv_T in zip(members, adv_GT, strict=True)
  ]


def _scores(episode: types.Episode) -> tuple[float, ...]:
  return () if episode.turn_scores is None else episode.turn_scores


def _turn_tokens(episode: types.Episode, which: str) -> np.ndarray:
  """L_it: trainable tokens by turn, float64, over all segments; `which` as `tokens`.

  As many turns as have a score, else up to the last that sampled a token; at least 1.
  """
  counted, last = [np.zeros(0, np.int64)], len(_scores(episode)) - 1
  for s in episode.segments:
    last = max(last, int(s.turn_T[s.mask_T].max(initial=0)))
    on_T = s.mask_T if which == 'sampled' else s.mask_T & (s.kept.size_T != 1)
    counted.append(s.turn_T[on_T].astype(np.int64))
  count_T = np.bincount(np.concatenate(counted), minlength=max(last, 0) + 1)
  return count_T.astype(np.float64)


def _turn_rewards(episode: types.Episode, turns: int) -> np.ndarray:
  if episode.turn_scores is not None:
    return np.array(episode.turn_scores, np.float64)
  reward_T = np.zeros(turns)
  reward_T[-1] = episode.outcome.value
  return reward_T
