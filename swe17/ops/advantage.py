"""Advantages of the episodes of one group, on the host, in numpy.

  A_i = R_i - b,   b = sum_i R_i L_i / sum_i L_i      (length_weighted)

with L_i the trained tokens of episode i: "used since SWE-1.6" (SWE-2 post, Cognition,
2026-09). Its property: sum_i L_i (R_i - b) = 0. Alternatives: `mean`, and
`leave_one_out` (each against the mean of the others, RLOO, arXiv:2402.14740). No
division by a standard deviation (Dr. GRPO, arXiv:2503.20783).
"""

from collections.abc import Callable

import numpy as np

Baseline = Callable[[np.ndarray, np.ndarray], np.ndarray]


def length_weighted(reward_G: np.ndarray, length_G: np.ndarray) -> np.ndarray:
  """Baseline weighted by trained tokens, float64 [G]; plain mean if no tokens."""
  total = length_G.sum()
  if total == 0:
    return mean(reward_G, length_G)
  return np.full(reward_G.shape, (reward_G * length_G).sum() / total)


def mean(reward_G: np.ndarray, length_G: np.ndarray) -> np.ndarray:
  """The group's mean reward, float64 [G]. `length_G` is not used."""
  del length_G
  return np.full(reward_G.shape, reward_G.mean())


def leave_one_out(reward_G: np.ndarray, length_G: np.ndarray) -> np.ndarray:
  """Each episode's baseline is the mean of the others, float64 [G]; needs G >= 2."""
  del length_G
  if reward_G.size < 2:
    raise ValueError(f'leave_one_out needs 2 episodes or more, got {reward_G.size}')
  return (reward_G.sum() - reward_G) / (reward_G.size - 1)


BASELINES: dict[str, Baseline] = {
  'length_weighted': length_weighted,
  'mean': mean,
  'leave_one_out': leave_one_out,
}


def has_signal(
  outcome_G: np.ndarray, reward_G: np.ndarray, solved_G: np.ndarray
) -> bool:
  """Whether a group trains: outcomes differ, or all solved and rewards differ.

  Decided on raw numbers, never on a computed deviation, so that rounding cannot turn a
  constant group into noise, and shaping alone cannot train a group nobody solved
  (DESIGN.md 12.4).
  """
  if outcome_G.size < 2:
    return False
  if np.any(outcome_G != outcome_G[0]):
    return True
  return bool(solved_G.all() and np.any(reward_G != reward_G[0]))


def advantages(
  reward_G: np.ndarray, length_G: np.ndarray, baseline: Baseline
) -> np.ndarray:
  """Rewards minus baseline, float64 [G]; exactly zero for equal rewards."""
  reward_G = np.asarray(reward_G, np.float64)
  if np.all(reward_G == reward_G[0]):
    return np.zeros_like(reward_G)
  return reward_G - baseline(reward_G, np.asarray(length_G, np.float64))
