"""Difficulty: estimates from outcomes, the band, and what a group is drawn from."""

import pytest

from swe17 import config, types
from swe17.agent import record
from swe17.env.audit import difficulty, pipeline

BAND = config.Tasks(band_low=0.1, band_high=0.8, band_tries=8, band_least=2)


def tasks(count: int) -> list[types.Task]:
  return [types.Task(f't{i}', 'f', 'train', f'u{i}', 'p', {}) for i in range(count)]


def episode(value: float | None) -> types.Episode:
  known = dict.fromkeys(('turns', 'calls', 'malformed', 'tests', 'sampled_tokens'), 1)
  outcome = types.Outcome(value, '' if value is not None else 'the sandbox died')
  return record.episode(
    tasks(1)[0],
    'g',
    0,
    outcome,
    segments=(),
    submitted=True,
    thinking_tokens=0,
    tool_seconds=0.0,
    seconds=0.0,
    **known,
  )


def after(*groups: tuple[int, int]) -> difficulty.Estimate:
  estimate = difficulty.Estimate()
  for tries, solved in groups:
    estimate = difficulty.updated(estimate, tries, solved)
  return estimate


def test_an_estimate_has_a_prior_and_counts():
  assert difficulty.Estimate().rate == 0.5
  assert after((8, 0)).rate == pytest.approx(1 / 10)
  assert after((8, 8)).rate == pytest.approx(9 / 10)


def test_what_a_policy_does_now_outweighs_what_it_did():
  once = after(*[(8, 0)] * 8)
  assert once.rate < 0.05
  learnt = after(*[(8, 0)] * 8, *[(8, 8)] * 8)
  assert learnt.rate > 0.7
  assert learnt.tries < 64  # the past fades, so that it can be overcome


def test_a_task_rests_only_when_it_was_tried_and_is_outside_of_the_band():
  assert difficulty.side(after((4, 4)), BAND) == ''
  assert difficulty.side(after((16, 16)), BAND) == 'easy'
  assert difficulty.side(after((16, 0)), BAND) == 'hard'
  assert difficulty.side(after((16, 6)), BAND) == ''


def test_a_draw_leaves_out_what_rests_but_for_some_groups():
  some = tasks(6)
  estimates = {'t0': after((16, 16)), 't1': after((16, 0)), 't2': after((16, 8))}
  drawn = [difficulty.draw_from(some, estimates, BAND, 0, s) for s in range(200)]
  whole = sum(len(d) == 6 for d in drawn)
  assert {tuple(t.id for t in d) for d in drawn} == {
    ('t2', 't3', 't4', 't5'),
    ('t0', 't1', 't2', 't3', 't4', 't5'),
  }
  assert 5 <= whole <= 40  # a tenth of them


def test_no_band_and_an_empty_band_draw_from_all():
  some = tasks(4)
  easy = {t.id: after((16, 16)) for t in some}
  assert difficulty.draw_from(some, easy, config.Tasks(), 0, 1) is some
  assert all(difficulty.draw_from(some, easy, BAND, 0, s) == some for s in range(9))


def test_a_band_that_is_none_is_refused():
  with pytest.raises(ValueError, match=r'tasks.band_low to tasks.band_high'):
    config.Tasks(band_low=0.5, band_high=0.5)


def test_estimates_come_back_from_the_log_and_from_a_file(tmp_path):
  group = types.Group(
    'g', 3, 'task/3', 'u', tuple(episode(v) for v in (1.0, 0.0, None))
  )
  told = difficulty.told(group)
  assert told == {'task': 'task/3', 'tried': 2, 'solved': 1}
  log = [{'kind': 'started', 'start': 1}, {'kind': 'finished', **told}]
  estimates = difficulty.replayed({}, log)
  assert estimates == {'task/3': difficulty.Estimate(2.0, 1.0)}
  path = str(tmp_path / 'd.jsonl')
  difficulty.write(path, estimates)
  assert difficulty.read(path) == estimates
  (tmp_path / 'd.jsonl').write_text('{"id": "x"}\n')
  with pytest.raises(ValueError, match=r'd.jsonl, line 1'):
    difficulty.read(path)
  assert difficulty.read('') == {}


def test_the_report_counts_by_the_plain_share():
  """Three tries tell who is never solved, which the prior of training would hide."""
  tried = [('t0', False)] * 3 + [('t1', True)] * 3 + [('t2', False), ('t2', True)]
  estimates = difficulty.table([*tried, ('t2', True)])
  cfg = config.Tasks(band_low=0.05, band_high=0.9, band_tries=3)
  assert pipeline.banded(tasks(4), estimates, cfg) == {
    'hard': 1,
    'easy': 1,
    'in the band': 1,
    'not tried': 1,
  }
  assert difficulty.side(estimates['t0'], cfg) == ''  # training waits for more tries
