"""Advantages of the episodes of one group, on the host, in numpy.

  A_i = R_i - b,   b = sum_i R_i L_i / sum_i L_i      (length_weighted)

with L_i the trained tokens of episode i: "used since SWE-1.6" (SWE-2 post, Cognition,
2026-09). Its property: sum_i L_i (R_i - b) = 0. Alternatives: `mean`, and
`leave_one_out` (each against the mean of the others, RLOO, arXiv:2402.14740). No
division by a standard deviation (Dr. GRPO, arXiv:2503.20783).
"""

from collections.abc import Callable, Sequence

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


def discounted_returns(reward_T: np.ndarray, gamma: float) -> np.ndarray:
  """Returns of an episode's turns, R_t = sum_{i >= t} gamma^(i - t) r_i, float64 [T].

  Kevin, arXiv:2507.11948: every turn is a sample of its own, with gamma = .4 over the
  rewards of the turns; T counts turns here.
  """
  if not 0 <= gamma <= 1:
    raise ValueError(f'discounted_returns: got gamma={gamma}, want 0 <= gamma <= 1')
  return_T = np.array(reward_T, np.float64)
  for t in range(return_T.size - 2, -1, -1):
    return_T[t] += gamma * return_T[t + 1]
  return return_T


def turn_advantages(
  reward_GT: Sequence[np.ndarray],
  length_GT: Sequence[np.ndarray],
  gamma: float,
  baseline: Baseline,
) -> list[np.ndarray]:
  """Advantages with every turn a sample of its own; float64 [turns] an episode.

    A_it = R_it - b,   R_it = sum_{k >= t} gamma^(k - t) r_ik

  Kevin, arXiv:2507.11948: the group's statistics are over all turns of all of its
  trajectories (16 x 4 there). b is the episode baseline over these samples, with L_it
  the trained tokens of the turn: no division by a standard deviation here either.

  Args:
    reward_GT: rewards of each episode's turns, one array [turns] an episode.
    length_GT: trained tokens of the same turns.
    gamma: discount of later turns; 0: a turn's own reward only.
    baseline: of `BASELINES`.

  Raises:
    ValueError: an episode has rewards and lengths of different numbers of turns.
  """
  turns = [r_T.size for r_T in reward_GT], [n_T.size for n_T in length_GT]
  if turns[0] != turns[1]:
    raise ValueError(f'turns: got rewards of {turns[0]} and lengths of {turns[1]}')
  return_X = np.concatenate([discounted_returns(r_T, gamma) for r_T in reward_GT])
  adv_X = advantages(return_X, np.concatenate(length_GT), baseline)
  return np.split(adv_X, np.cumsum(turns[0])[:-1])


def scaled_by_calls(
  adv_G: np.ndarray, calls_G: np.ndarray, turns_G: np.ndarray, direction: str
) -> np.ndarray:
  """Advantages scaled by the episode's average tool calls per turn, float64 [G].

  A stabiliser of SWE-grep (post, Cognition). Its direction is not stated; the stated
  aim, to learn a small budget first, implies 'divide'. The average is taken as at least
  1 (ours), so that an episode without a call neither divides by 0 nor drops out. The
  advantages then no longer sum to zero over tokens.
  """
  rate_G = np.maximum(np.asarray(calls_G) / np.maximum(turns_G, 1), 1.0)
  if direction == 'none':
    return adv_G
  if direction not in ('divide', 'multiply'):
    raise ValueError(f'got direction={direction!r}, want none, divide or multiply')
  return adv_G / rate_G if direction == 'divide' else adv_G * rate_G
