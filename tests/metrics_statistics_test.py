"""Intervals by units and pass@k, against hand-made values and repeated sampling."""

import itertools

import numpy as np
import pytest

from swe17.metrics import statistics


def test_mean_is_over_tasks_and_not_over_units():
  mean, low, high = statistics.mean_interval({'f': [1, 1, 1], 'g': [0]}, seed=0)
  assert mean == 0.75
  # The resamples are (f, f), (f, g), (g, f), (g, g): 1, .75, .75, 0.
  assert (low, high) == (0.0, 1.0)


def test_equal_units_leave_no_width():
  per_unit = {f'f{i}': [0.25, 0.75] for i in range(9)}
  assert statistics.mean_interval(per_unit, seed=1) == (0.5, 0.5, 0.5)


def test_interval_of_two_valued_units_is_the_binomial_one():
  # 100 units of one task, 40 solved: the resampled mean is Binomial(100, .4) / 100,
  # whose 2.5 % and 97.5 % points are 31 and 50.
  per_unit = {f'f{i}': [float(i < 40)] for i in range(100)}
  mean, low, high = statistics.mean_interval(per_unit, seed=0)
  assert mean == 0.4
  assert low == pytest.approx(0.31, abs=0.011)
  assert high == pytest.approx(0.50, abs=0.011)


def test_interval_depends_on_the_seed_only_and_not_on_the_order_of_units():
  rng = np.random.default_rng(3)
  per_unit = {f'f{i}': rng.random(3).tolist() for i in range(20)}
  turned = dict(reversed(per_unit.items()))
  a = statistics.mean_interval(per_unit, seed=7)
  assert a == statistics.mean_interval(turned, seed=7)
  assert a != statistics.mean_interval(per_unit, seed=8)


def test_tasks_of_one_unit_do_not_count_as_independent():
  alone = {f'f{i}': [float(i % 2)] for i in range(20)}
  copied = {unit: values * 10 for unit, values in alone.items()}
  assert statistics.mean_interval(alone, seed=0) == pytest.approx(
    statistics.mean_interval(copied, seed=0)
  )


def test_coverage_of_the_true_mean_is_near_95_percent():
  rng = np.random.default_rng(0)
  hits = 0
  for trial in range(400):
    # 40 functions, each with its own pass rate (mean .4), 3 tasks, 4 samples a task.
    rate = rng.beta(2, 3, size=40)
    passed = rng.binomial(4, rate[:, None], size=(40, 3)) / 4
    per_unit = {str(i): row.tolist() for i, row in enumerate(passed)}
    _, low, high = statistics.mean_interval(per_unit, seed=trial, samples=500)
    hits += low <= 0.4 <= high
  # 400 trials at 95 % have a standard deviation of 1.1 points.
  assert 0.91 <= hits / 400 <= 0.985


def test_paired_difference_removes_what_both_sides_share():
  rng = np.random.default_rng(1)
  base = rng.random(30)
  before = {str(i): [b * 0.5] for i, b in enumerate(base)}
  after = {str(i): [b * 0.5 + 0.3] for i, b in enumerate(base)}
  assert statistics.paired_interval(before, after, seed=0) == pytest.approx(
    (0.3, 0.3, 0.3)
  )
  _, low, high = statistics.mean_interval(after, seed=0)
  assert high - low > 0.05


def test_paired_difference_of_equal_sides_includes_zero():
  sides = {'f': [0.5, 1.0], 'g': [0.0], 'h': [0.25]}
  assert statistics.paired_interval(sides, sides, seed=0) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
  'after, said',
  [({'f': [1.0]}, 'one side only'), ({'f': [1.0], 'g': [1.0, 0.0]}, "unit 'g' has 1")],
)
def test_sides_that_do_not_pair_are_refused(after, said):
  with pytest.raises(ValueError, match=said):
    statistics.paired_interval({'f': [1.0], 'g': [0.0]}, after, seed=0)


def test_records_pair_on_the_tasks_that_both_have():
  unit = {'f/0': 'f', 'f/1': 'f', 'g/0': 'g', 'h/0': 'h'}
  before = {'tasks': {'g/0': 0.0, 'f/0': 0.5, 'f/1': 0.25}, 'task_units': unit}
  after = {'tasks': {'f/1': 1.0, 'g/0': 0.5, 'h/0': 1.0}, 'task_units': unit}
  pairs, alone = statistics.pairs(before, after)
  assert pairs == ({'f': [0.25], 'g': [0.0]}, {'f': [1.0], 'g': [0.5]})
  assert alone == 2
  difference, low, high = statistics.paired_interval(*pairs, seed=0)
  assert (difference, low, high) == (0.625, 0.5, 0.75)


def test_records_of_equal_tasks_pair_as_their_units():
  unit = {f'{u}/{i}': u for u in 'abc' for i in range(3)}
  rates = [
    dict(zip(unit, np.random.default_rng(s).random(9), strict=True)) for s in (0, 1)
  ]
  sides = [{'tasks': r, 'task_units': unit} for r in rates]
  pairs, alone = statistics.pairs(*sides)
  assert alone == 0
  for side, rate in zip(pairs, rates, strict=True):
    assert side == {u: [rate[f'{u}/{i}'] for i in range(3)] for u in 'abc'}


def test_records_without_tasks_pair_on_nothing():
  assert statistics.pairs({}, {'tasks': {}}) == (({}, {}), 0)


@pytest.mark.parametrize(
  'per_unit, said',
  [
    ({}, 'got 0 units'),
    ({'f': [1.0]}, 'got 1 units'),
    ({'f': [1.0], 'g': []}, "unit 'g'"),
    ({'f': [1.0], 'g': [float('nan')]}, "unit 'g'"),
  ],
)
def test_interval_from_too_little_is_refused(per_unit, said):
  with pytest.raises(ValueError, match=said):
    statistics.mean_interval(per_unit, seed=0)


def test_pass_at_k_equals_counting_all_draws():
  n, c = 6, 2
  solved = [i < c for i in range(n)]
  for k in range(1, n + 1):
    draws = list(itertools.combinations(solved, k))
    share = sum(map(any, draws)) / len(draws)
    assert statistics.pass_at_k(n, c, k) == pytest.approx(share)


def test_pass_at_k_by_hand():
  assert statistics.pass_at_k(4, 1, 1) == 0.25
  assert statistics.pass_at_k(4, 1, 2) == 0.5  # 1 - C(3, 2) / C(4, 2)
  assert statistics.pass_at_k(4, 0, 4) == 0.0
  assert statistics.pass_at_k(4, 4, 1) == 1.0


@pytest.mark.parametrize('n, c, k', [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
  with pytest.raises(ValueError, match='pass@k'):
    statistics.pass_at_k(n, c, k)
