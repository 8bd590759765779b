"""Length: what an episode costs, and how that enters its reward. Host side, numpy.

  cost C = w_tokens * sampled tokens + w_turns * turns + w_tool * tool seconds

Two forms, both applied to raw outcomes before the baseline, never with a division by a
standard deviation:

- Alternating penalty (its source: Toggle, Kimi K2.5, arXiv:2602.02276): unconstrained
  phases optimise success only; budget phases lower the reward of *successes* over their
  task's budget. The budget is a percentile of the costs of successes at calibration, in
  an unconstrained phase; a task that nobody solved has none (DESIGN.md 12.8).
- Linear cost R = S - lambda_e C (SWE-2 post, Cognition, 2026-09), for every episode;
  lambda_e is the slope dS/dC of the Pareto frontier at effort level e.

A turn is an assistant message. Weights, percentile, phase length, cap and lambdas of
the published runs are undisclosed: the settings' defaults are ours.
"""

from collections.abc import Mapping

import numpy as np


def cost(
  tokens_G: np.ndarray,
  turns_G: np.ndarray,
  tool_seconds_G: np.ndarray,
  *,
  w_tokens: float,
  w_turns: float,
  w_tool: float,
) -> np.ndarray:
  """Weighted cost of episodes, float64 [G]; tokens are the sampled ones."""
  parts = zip(
    (w_tokens, w_turns, w_tool), (tokens_G, turns_G, tool_seconds_G), strict=True
  )
  return np.sum([w * np.asarray(x, np.float64) for w, x in parts], axis=0)


def in_budget_phase(step: int, phase_steps: int) -> bool:
  """Whether the weights of learner step `step` belong to a budget phase.

  Phases of `phase_steps` optimiser steps alternate; the first is unconstrained.
  """
  return bool(step // phase_steps % 2)


def budget(cost_G: np.ndarray, solved_G: np.ndarray, percentile: float) -> float | None:
  """Linear-interpolated percentile of successful costs; None where nobody solved."""
  won = np.asarray(cost_G, np.float64)[np.asarray(solved_G, bool)]
  return float(np.percentile(won, percentile, method='linear')) if won.size else None


def calibrate(
  budgets: Mapping[str, float],
  task_id: str,
  cost_G: np.ndarray,
  solved_G: np.ndarray,
  percentile: float,
) -> dict[str, float]:
  """`budgets` with the task's own, if it has none yet and somebody solved it now.

  A budget is fixed once, from the first unconstrained group with a success: measured
  again under a penalty, it would shrink with the episodes it shortens.
  """
  new = None if task_id in budgets else budget(cost_G, solved_G, percentile)
  return dict(budgets) if new is None else {**budgets, task_id: new}


def excess(cost_G: np.ndarray, limit: float) -> np.ndarray:
  """Relative excess over a budget, max(0, C / budget - 1), float64 [G].

  A budget of 0 (successes were free) makes every cost above it infinitely over.
  """
  over_G = np.maximum(np.asarray(cost_G, np.float64) - limit, 0.0)
  if limit > 0:
    with np.errstate(over='ignore'):  # a budget next to 0 is as a budget of 0
      return over_G / limit
  return np.where(over_G > 0, np.inf, 0.0)


def penalty(
  excess_G: np.ndarray,
  solved_G: np.ndarray,
  *,
  form: str,
  slope: float,
  cap: float,
  gate: float = 0.0,
) -> np.ndarray:
  """What a budget phase takes off the rewards of a group, float64 [G]; 0 for failures.

  Args:
    excess_G: relative excess over the budget.
    solved_G: successes; only they are penalised.
    form: 'hard': `cap` for every success over budget (Toggle's gate, bounded);
      'linear': slope * excess, at most `cap`.
    slope: of the linear form.
    cap: in [0, 1): below 1, so that a success never becomes worth a failure.
    gate: a group that solved a smaller share than this is let off (Toggle's lambda:
      what is still hard is not made shorter).
  """
  if not 0 <= cap < 1:
    raise ValueError(f'penalty: got cap={cap}, want 0 <= cap < 1')
  if form not in ('hard', 'linear'):
    raise ValueError(f"penalty: got form={form!r}, want 'hard' or 'linear'")
  over_G, solved_G = np.asarray(excess_G, np.float64), np.asarray(solved_G, bool)
  if form == 'hard':
    size_G = np.full(over_G.shape, cap)
  else:
    size_G = np.minimum(slope * np.minimum(over_G, 1e9), cap)  # never 0 x infinity
  off = solved_G.size == 0 or solved_G.mean() < gate
  return np.where(solved_G & (over_G > 0) & (not off), size_G, 0.0)


def linear(score_G: np.ndarray, cost_G: np.ndarray, lam: float) -> np.ndarray:
  """R = S - lambda C for every episode, solved or not, float64 [G] (SWE-2 post)."""
  return np.asarray(score_G, np.float64) - lam * np.asarray(cost_G, np.float64)


def frontier(cost_N: np.ndarray, score_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Upper concave hull of (cost, score) points: (costs, scores), costs ascending.

  N settings of effort, each with its mean cost and score. The hull starts at the
  cheapest point (the best of equally cheap ones) and ends at the best score; a mixture
  of two settings reaches every point between.
  """
  cost_N, score_N = np.asarray(cost_N, np.float64), np.asarray(score_N, np.float64)
  if cost_N.shape != score_N.shape or cost_N.ndim != 1 or cost_N.size == 0:
    raise ValueError(
      f'frontier: got shapes {cost_N.shape} and {score_N.shape}, want two equal [N]'
    )
  hull: list[tuple[float, float]] = []
  for c, s in sorted(zip(cost_N.tolist(), score_N.tolist(), strict=True)):
    if hull and c == hull[-1][0]:
      hull.pop()  # as cheap, and not worse
    if hull and s <= hull[-1][1]:
      continue  # dearer, and not better
    while len(hull) > 1 and not _concave(hull[-2], hull[-1], (c, s)):
      hull.pop()
    hull.append((c, s))
  points = np.array(hull)
  return points[:, 0], points[:, 1]


def _concave(a: tuple, b: tuple, c: tuple) -> bool:
  """Whether the slope falls at b between a and c."""
  return (b[1] - a[1]) * (c[0] - b[0]) > (c[1] - b[1]) * (b[0] - a[0])


def pareto_slope(cost_N: np.ndarray, score_N: np.ndarray, at: float) -> float:
  """dS/dC of the Pareto frontier at cost `at`: the lambda of that effort level.

  R = S - lambda C then has its maximum on the frontier at that cost. At a corner it is
  the mean of the slopes on both sides; beyond the cheapest or best point the slope of
  the nearest edge, and 0 where the frontier is a single point.
  """
  cost, score = frontier(cost_N, score_N)
  if cost.size < 2:
    return 0.0
  edge = np.diff(score) / np.diff(cost)
  left = int(np.clip(np.searchsorted(cost, at, 'left') - 1, 0, edge.size - 1))
  right = int(np.clip(np.searchsorted(cost, at, 'right') - 1, 0, edge.size - 1))
  return float((edge[left] + edge[right]) / 2)
