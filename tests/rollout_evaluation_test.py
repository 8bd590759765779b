"""Evaluation: who runs when, and a record against numbers counted by hand."""

import asyncio

import numpy as np
import pytest

from swe17 import types
from swe17.rollout import evaluation


def task(name: str, unit: str) -> types.Task:
  return types.Task(name, 'repair_functions', 'heldout', unit, 'Repair.', {})


def episode(of: types.Task, member: int, value: float | None, **changes):
  values = {
    'id': f'g.{member}',
    'task_id': of.id,
    'unit': of.unit,
    'group_id': 'g',
    'member': member,
    'status': 'invalid' if value is None else 'valid',
    'outcome': types.Outcome(value, 'a connection broke' if value is None else ''),
    'solved_at': of.solved_at,
    'segments': (),
    'turns': 4,
    'calls': 5,
    'malformed': 0,
    'tests': 2,
    'submitted': value is not None and value > 0,
    'sampled_tokens': 30,
    'thinking_tokens': 3,
    'tool_seconds': 0.1,
    'seconds': 1.0,
  }
  return types.Episode(**{**values, **changes})


A, B, C = task('f/0', 'f'), task('f/1', 'f'), task('g/0', 'g')


def record(episodes, samples=2):
  return evaluation.record(
    episodes, version=3, split='heldout', samples=samples, seed=0, seconds=9.0
  )


def test_the_record_says_what_is_counted_by_hand():
  found = record(
    [
      episode(A, 0, 1.0, turns=2, sampled_tokens=10, tests=1),
      episode(A, 1, 0.0, turns=4, sampled_tokens=20, tests=2),
      episode(B, 0, 0.0),
      episode(B, 1, 0.0),
      episode(C, 0, 1.0),
      episode(C, 1, 1.0),
    ]
  )
  # Shares: f/0 1/2, f/1 0, g/0 1. pass@2: 1, 0, 1.
  assert found['units'] == {'f': [0.5, 0.0], 'g': [1.0]}
  assert found['tasks'] == {'f/0': 0.5, 'f/1': 0.0, 'g/0': 1.0}
  assert found['task_units'] == {'f/0': 'f', 'f/1': 'f', 'g/0': 'g'}
  assert evaluation.in_short(found) == {
    k: v
    for k, v in found.items()
    if k not in ('units', 'tasks', 'outcomes', 'task_units')
  }
  assert found['pass_at_1'] == pytest.approx(0.5)
  assert found['pass_at_2'] == pytest.approx(2 / 3)
  # Resampled units: (f, f) 1/4, (g, g) 1, else 1/2: both ends are taken.
  assert (found['low'], found['high']) == (0.25, 1.0)
  assert (found['n_tasks'], found['n_functions']) == (3, 2)
  assert (found['missing'], found['samples'], found['version']) == (0, 2, 3)
  assert found['turns'] == pytest.approx((2 + 4 + 4 * 4) / 6)
  assert found['tokens'] == pytest.approx((10 + 20 + 4 * 30) / 6)
  assert found['tests'] == pytest.approx((1 + 2 + 4 * 2) / 6)
  assert found['submitted_share'] == pytest.approx(3 / 6)
  assert (found['seconds'], found['episode_seconds']) == (9.0, 1.0)


def test_missing_episodes_are_counted_and_are_no_failures():
  found = record(
    [
      episode(A, 0, 1.0),
      episode(A, 1, None),
      episode(B, 0, None, sampled_tokens=10**6),
      episode(B, 1, None),
      episode(C, 0, 0.0),
      episode(C, 1, 1.0),
    ]
  )
  assert found['missing'] == 3
  assert found['units'] == {'f': [1.0], 'g': [0.5]}
  assert found['tasks'] == {'f/0': 1.0, 'g/0': 0.5}
  assert found['pass_at_1'] == pytest.approx(0.75)
  assert found['n_tasks'] == 2
  assert found['tokens'] == 30


def test_a_score_below_what_solves_is_no_solution():
  half = [episode(t, m, 0.5) for t in (A, B, C) for m in range(2)]
  assert record(half)['pass_at_1'] == 0


def test_the_order_in_which_episodes_end_does_not_matter():
  episodes = [
    episode(t, m, float((i + m) % 3 == 0))
    for i, t in enumerate((A, B, C))
    for m in range(4)
  ]
  shuffled = [episodes[i] for i in np.random.default_rng(0).permutation(12)]
  assert record(episodes, 4) == record(shuffled, 4)


def test_an_evaluation_without_any_outcome_is_refused():
  with pytest.raises(ValueError, match='units'):
    record([episode(t, 0, None) for t in (A, B, C)], 1)


async def test_every_task_runs_its_samples_under_names_of_its_own():
  asked, progress, running, most = [], [], 0, 0

  async def run(of: types.Task, group_id: str, member: int) -> types.Episode:
    nonlocal running, most
    running += 1
    most = max(most, running)
    asked.append((group_id, member))
    await asyncio.sleep(0.001 * (member + 1))
    running -= 1
    return episode(of, member, 1.0)

  found = await evaluation.evaluate(
    [A, B, C],
    run,
    label='heldout',
    samples=3,
    at_once=4,
    progress=lambda i, n: progress.append((i, n)),
  )
  assert [(e.task_id, e.member) for e in found] == [
    (t.id, m) for t in (A, B, C) for m in range(3)
  ]
  assert len(set(asked)) == 9
  assert sorted(asked)[0] == ('eval-heldout-f/0', 0)
  assert most == 4
  assert progress == [(i, 9) for i in range(1, 10)]
