"""Alarms fire at the bound, say numbers, and stay silent on a healthy or empty row."""

import re

import pytest

from swe17 import config
from swe17.metrics import alarms, records

LIMITS = alarms.Limits(top_p=0.97, max_staleness=3)


def _row(step=10, **values):
  counts = {m.count: 100 for m in records.METRICS if m.count}
  return records.row(step=step, **{**counts, **values})


def _healthy(step=10, **values):
  well = {
    'k3': 5e-4,
    'k3_signal': 8e-4,
    'entropy': 0.4,
    'kept_mass': 0.99,
    'staleness_max': 2,
    'ess': 0.95,
    'groups_trained': 5,
    'groups_no_signal': 3,
    'topk_bound_share': 0.01,
    'skipped_steps': 0,
    'delta_changed_share': 0.1,
    'malformed_share': 0.01,
    'invalid_share': 0.0,
    'cut_share': 0.1,
    'loop_lag': 0.01,
  }
  return _row(step, **{**well, **values})


HISTORY = [_healthy(step) for step in range(1, 10)]


def test_healthy_row_raises_nothing():
  assert alarms.alarms(_healthy(), HISTORY, LIMITS) == []


def test_row_without_values_raises_nothing():
  assert alarms.alarms(records.row(step=1), [], LIMITS) == []
  assert alarms.alarms(records.row(step=10), HISTORY, LIMITS) == []


@pytest.mark.parametrize(
  'name, bad, said',
  [
    ('k3_signal', 0.051, '0.051 nats, over 0.05'),
    ('kept_mass', 0.969, '0.9690 of its mass'),
    ('staleness_max', 4, '4 steps old, over the bound of 3'),
    ('ess', 0.4, '40.0%'),
    ('entropy', 0.079, r'fell to 0.079 nats, under 20% of its start \(0.4\)'),
    ('topk_bound_share', 0.3, '30.0%'),
    ('invalid_share', 0.2, '20.0% of the episodes'),
    ('malformed_share', 0.6, '60.0% of the episodes'),
    ('cut_share', 0.6, '60.0% of the episodes'),
    ('loop_lag', 0.7, '0.70 s'),
    ('delta_changed_share', 0.0, 'changed no published weight'),
    ('skipped_steps', 1, 'step 10 was skipped, 1 so far'),
  ],
)
def test_each_condition_raises_one_sentence_with_its_numbers(name, bad, said):
  found = alarms.alarms(_healthy(**{name: bad}), HISTORY, LIMITS)
  assert len(found) == 1
  assert re.search(said, found[0]), found[0]


@pytest.mark.parametrize(
  'name, good',
  [('k3_signal', 0.05), ('kept_mass', 0.97), ('staleness_max', 3), ('entropy', 0.081)],
)
def test_value_at_the_bound_raises_nothing(name, good):
  assert alarms.alarms(_healthy(**{name: good}), HISTORY, LIMITS) == []


def test_alarm_is_given_when_it_begins_and_not_while_it_lasts():
  bad = _healthy(k3_signal=0.1)
  assert len(alarms.alarms(bad, HISTORY, LIMITS)) == 1
  assert alarms.alarms(bad, [*HISTORY, bad], LIMITS) == []
  assert len(alarms.alarms(bad, [*HISTORY, bad, _healthy()], LIMITS)) == 1


def test_every_skipped_step_is_given():
  one, two = _healthy(skipped_steps=1), _healthy(skipped_steps=2)
  assert len(alarms.alarms(two, [*HISTORY, one], LIMITS)) == 1
  assert alarms.alarms(one, [*HISTORY, one], LIMITS) == []


def test_no_signal_needs_five_steps_in_a_row():
  dry = _healthy(groups_trained=0, groups_no_signal=8)
  assert alarms.alarms(dry, [*HISTORY, dry, dry, dry], LIMITS) == []
  (text,) = alarms.alarms(dry, [*HISTORY, dry, dry, dry, dry], LIMITS)
  assert '90%' in text and '5 steps' in text and '100.0%' in text


def test_mismatch_at_equal_weights_is_held_to_the_numeric_floor():
  off = _healthy(k3=2e-6, staleness_max=0)
  (text,) = alarms.alarms(off, HISTORY, LIMITS)
  assert '2e-06 nats at staleness 0' in text
  assert alarms.alarms(_healthy(k3=9e-7, staleness_max=0), HISTORY, LIMITS) == []


def test_limits_follow_the_settings():
  cfg = config.Config()
  assert alarms.limits(cfg).top_p == cfg.sampler.top_p
  assert alarms.limits(cfg).max_staleness == cfg.rollout.max_staleness
  bare = config.Config(loss=config.Loss(replay=False))
  assert alarms.limits(bare).top_p is None and alarms.limits(bare).k3_equal is None
