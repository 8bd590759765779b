"""Length: costs, phases, budgets, penalties, and the Pareto slope."""

import itertools
import subprocess
import sys

import hypothesis
from hypothesis import strategies
from hypothesis.extra import numpy as arrays
import numpy as np
import pytest

from swe17.ops import length

quick = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
costs = arrays.arrays(np.float64, 6, elements=strategies.floats(0, 1e6))
bools = arrays.arrays(bool, 6)


def test_cost_by_hand():
  got = length.cost(
    np.array([100, 0]), np.array([3, 1]), np.array([2.5, 0]),
    w_tokens=1, w_turns=10, w_tool=4,
  )  # fmt: skip
  assert got.tolist() == [140, 10]


def test_phases_alternate_and_the_first_is_unconstrained():
  got = [length.in_budget_phase(step, 3) for step in range(12)]
  assert got == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 3


def percentile64(values: list[float], q: float) -> float:
  """Linear interpolation between closest ranks."""
  values = sorted(values)
  at = (len(values) - 1) * q / 100
  below = int(at)
  above = min(below + 1, len(values) - 1)
  return values[below] + (at - below) * (values[above] - values[below])


@quick
@hypothesis.given(costs, bools, strategies.floats(0, 100))
def test_the_budget_is_a_percentile_of_successful_costs_only(cost, solved, q):
  got = length.budget(cost, solved, q)
  if not solved.any():
    assert got is None
  else:
    assert got == pytest.approx(percentile64(cost[solved].tolist(), q), abs=1e-9)


def test_a_budget_is_fixed_once_and_only_by_a_success():
  cost, none, some = np.array([10.0, 30.0]), np.zeros(2, bool), np.array([True, True])
  assert length.calibrate({}, 'a', cost, none, 50) == {}
  first = length.calibrate({}, 'a', cost, some, 50)
  assert first == {'a': 20}
  assert length.calibrate(first, 'a', cost / 2, some, 50) == first
  assert length.calibrate(first, 'b', cost / 2, some, 50) == {'a': 20, 'b': 10}


def off(excess, solved, **changes) -> list[float]:
  settings = {'form': 'linear', 'slope': 0.5, 'cap': 0.4, **changes}
  return length.penalty(np.array(excess), np.array(solved, bool), **settings).tolist()


def test_the_linear_form_rises_with_the_excess_up_to_its_cap():
  assert off([0, 0.5, 0.8, 3, np.inf], [1] * 5) == [0, 0.25, 0.4, 0.4, 0.4]


def test_the_hard_form_takes_the_cap_at_once():
  assert off([0, 1e-9, 5], [1] * 3, form='hard') == [0, 0.4, 0.4]


def test_a_group_that_seldom_solves_is_let_off():
  assert off([1, 1, 1, 1], [1, 0, 0, 0], gate=0.5) == [0] * 4
  assert off([1, 1, 1, 1], [1, 1, 0, 0], gate=0.5) == [0.4, 0.4, 0, 0]


@quick
@hypothesis.given(
  costs,
  bools,
  strategies.floats(0, 1e6),
  strategies.sampled_from(['hard', 'linear']),
  strategies.floats(0, 10),
  strategies.floats(0, 0.99),
)
def test_only_successes_are_penalised_and_stay_worth_more_than_failures(
  cost, solved, limit, form, slope, cap
):
  excess = length.excess(cost, limit)
  got = length.penalty(excess, solved, form=form, slope=slope, cap=cap)
  assert np.isfinite(got).all() and (got >= 0).all() and (got <= cap).all()
  assert not got[~solved].any() and not got[cost <= limit].any()
  assert (solved - got)[solved].min(initial=1) > 0
  # Longer is never better.
  order = np.argsort(cost[solved], kind='stable')
  assert (np.diff(got[solved][order]) >= 0).all()


@pytest.mark.parametrize('cap', [1.0, -0.1, np.nan])
def test_a_cap_of_a_whole_success_is_refused(cap):
  with pytest.raises(ValueError, match='0 <= cap < 1'):
    off([1], [1], cap=cap)


def test_an_unknown_form_is_refused():
  with pytest.raises(ValueError, match="got form='soft'"):
    off([1], [1], form='soft')


def test_the_linear_cost_is_paid_by_failures_too():
  got = length.linear(np.array([1.0, 0.0]), np.array([100.0, 50.0]), 1e-3)
  assert got.tolist() == [0.9, -0.05]


# The frontier.


def best_by_mixing(cost: np.ndarray, score: np.ndarray, at: float) -> float:
  """The best score of one setting or a mixture of two that costs at most `at`."""
  best = max(s for c, s in zip(cost, score, strict=True) if c <= at)
  for i, j in itertools.permutations(range(cost.size), 2):
    if cost[i] <= at < cost[j]:
      share = (at - cost[i]) / (cost[j] - cost[i])
      best = max(best, score[i] + share * (score[j] - score[i]))
  return best


@quick
@hypothesis.given(strategies.integers(0, 10**6))
def test_the_frontier_is_the_best_that_mixing_reaches(seed):
  rng = np.random.default_rng(seed)
  cost, score = rng.uniform(1, 10, 7), rng.uniform(0, 1, 7)
  at_cost, at_score = length.frontier(cost, score)
  assert (np.diff(at_cost) > 0).all() and (np.diff(at_score) > 0).all()
  assert (np.diff(np.diff(at_score) / np.diff(at_cost)) < 0).all()
  for at in np.linspace(cost.min(), 10, 20):
    # Beyond its best point the frontier is flat.
    got = np.interp(at, at_cost, at_score)
    assert got == pytest.approx(best_by_mixing(cost, score, at), abs=1e-9)


@quick
@hypothesis.given(strategies.integers(0, 10**6))
def test_lambda_makes_its_own_point_of_the_frontier_the_best(seed):
  rng = np.random.default_rng(seed)
  cost, score = rng.uniform(1, 10, 7), rng.uniform(0, 1, 7)
  at_cost, _ = length.frontier(cost, score)
  for at in at_cost[1:-1]:
    lam = length.pareto_slope(cost, score, at)
    assert lam > 0
    assert cost[np.argmax(length.linear(score, cost, lam))] == at


def test_the_slope_by_hand():
  cost, score = np.array([1.0, 2, 4, 3, 4]), np.array([0.0, 0.5, 0.7, 0.4, 0.6])
  assert length.frontier(cost, score)[0].tolist() == [1, 2, 4]
  slope = [length.pareto_slope(cost, score, c) for c in (0.5, 1, 1.5, 2, 3, 4, 9)]
  assert slope == pytest.approx([0.5, 0.5, 0.5, 0.3, 0.1, 0.1, 0.1])
  assert length.pareto_slope(np.array([2.0, 3]), np.array([0.5, 0.4]), 2) == 0
  with pytest.raises(ValueError, match='two equal'):
    length.frontier(np.zeros(2), np.zeros(3))


def test_nothing_here_imports_jax():
  code = (
    "import sys; sys.modules['jax'] = None\nfrom swe17.ops import advantage, length"
  )
  subprocess.run([sys.executable, '-c', code], check=True)
