"""Intervals that respect how tasks were made: several tasks come from one function.

Tasks of one function (a *unit*) resemble each other, so the units are resampled, not
the tasks: a cluster bootstrap with percentile ends (Efron and Tibshirani, An
Introduction to the Bootstrap, 1993, chapter 13). The statistic is the mean over all
tasks, sum_u s_u / sum_u n_u. With few units (under ~20) the intervals are too narrow.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

import numpy as np

Units = dict[str, list[float]]  # unit -> pass rates of its tasks


def mean_interval(
  per_unit: Mapping[str, Sequence[float]], *, seed: int, samples: int = 10_000
) -> tuple[float, float, float]:
  """Mean over all values and its 95 % interval, units resampled.

  `per_unit` maps a unit to its values, e.g. one pass rate a task. Returns (mean, low,
  high). ValueError on fewer than 2 units (one unit says nothing of the next), an
  empty unit, or a value that is not finite.
  """
  units = sorted(per_unit)
  if len(units) < 2:
    raise ValueError(f'an interval over units: got {len(units)} units, want >= 2')
  for unit in units:
    values = np.asarray(per_unit[unit], np.float64)
    if values.ndim != 1 or not values.size or not np.isfinite(values).all():
      raise ValueError(
        f'unit {unit!r}: got {per_unit[unit]!r}, want a non-empty list of finite values'
      )
  total = np.array([np.sum(per_unit[unit], dtype=np.float64) for unit in units])
  count = np.array([len(per_unit[unit]) for unit in units], np.float64)
  # How often each unit is drawn, for all resamples at once: [samples, units].
  n = len(units)
  rng = np.random.default_rng(seed)
  drawn = rng.multinomial(n, np.full(n, 1 / n), size=samples).astype(np.float64)
  low, high = np.percentile((drawn @ total) / (drawn @ count), [2.5, 97.5])
  return float(total.sum() / count.sum()), float(low), float(high)


def paired_interval(
  before: Mapping[str, Sequence[float]],
  after: Mapping[str, Sequence[float]],
  *,
  seed: int,
  samples: int = 10_000,
) -> tuple[float, float, float]:
  """Mean of after - before per task and its 95 % interval, units resampled.

  Both map a unit to its tasks' pass rates *in the same order of tasks*. Returns
  (difference, low, high). ValueError where units or their sizes differ.
  """
  if before.keys() != after.keys():
    odd = sorted(before.keys() ^ after.keys())
    raise ValueError(
      f'paired interval: {len(odd)} units are on one side only, e.g. {odd[0]!r}'
    )
  difference = {}
  for unit in before:
    b, a = (np.asarray(side[unit], np.float64) for side in (before, after))
    if b.shape != a.shape:
      raise ValueError(
        f'paired interval: unit {unit!r} has {b.size} tasks before, {a.size} after'
      )
    difference[unit] = (a - b).tolist()
  return mean_interval(difference, seed=seed, samples=samples)


def pairs(
  before: Mapping[str, Any], after: Mapping[str, Any]
) -> tuple[tuple[Units, Units], int]:
  """Pass rates by unit on the tasks that two evaluation records share.

  A task is in both if an episode of it has an outcome on both sides. Returns what
  `paired_interval` takes, and how many tasks are on one side only.
  """
  sides = before.get('tasks') or {}, after.get('tasks') or {}
  units: tuple[Units, Units] = {}, {}
  for task_id in sorted(sides[0].keys() & sides[1].keys()):
    unit = before['task_units'][task_id]
    for side, rates in zip(units, sides, strict=True):
      side.setdefault(unit, []).append(rates[task_id])
  return units, len(sides[0].keys() ^ sides[1].keys())


def score_gain(
  before: Mapping[str, Any], after: Mapping[str, Any], *, seed: int
) -> tuple[float, float, float]:
  """Mean difference of raw scores per task and its 95 % interval, units resampled.

  Both are evaluation records with `outcomes`. ValueError as `paired_interval`.
  """
  sides = [{**record, 'tasks': record['outcomes']} for record in (before, after)]
  (first, last), _ = pairs(*sides)
  return paired_interval(first, last, seed=seed)


def pass_at_k(n: int, c: int, k: int) -> float:
  """Chance that one of k samples solves a task of which c of n did, without bias.

  1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374, equation 1). ValueError
  unless 0 <= c <= n and 1 <= k <= n.
  """
  if not 0 <= c <= n:
    raise ValueError(f'pass@k: got c={c} solved of n={n}, want 0 <= c <= n')
  if not 1 <= k <= n:
    raise ValueError(f'pass@k: got k={k} with n={n} samples, want 1 <= k <= n')
  return 1.0 - math.comb(n - c, k) / math.comb(n, k)
