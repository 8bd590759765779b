"""How the bench over regions judges a run: what is lost, what is a stall."""

import json
import pathlib

import pytest

from experiments import program
from experiments.bench import regions, regions_report
from launch import emulator
from swe17 import config, types
from swe17.metrics import records
from swe17.store import groups as group_store
from swe17.store import kv
from tests import rollout_fixtures as rig

CUT = regions_report.Cut(1, 100.0, 160.0)


def row(step: int, time: float, trained: int = 4, **values) -> dict:
  made = {'step': step, 'time': time, 'groups_trained': trained}
  made |= {
    'groups_no_signal': 0,
    'groups_dropped': 0,
    'solve_rate': 0.25,
    'solve_rate_count': 8,
  }
  made |= {'staleness_mean': 1.0, 'staleness_max': 2, 'staleness_count': 4}
  return records.row(**{**made, **values})


@pytest.fixture
def ended(tmp_path):
  """A run of six steps of two groups whose rollouts ended: folder, store, learner."""
  cfg = rig.settings(tmp_path)
  store = kv.open(cfg.store)
  learner = rig.Learner(store, cfg)
  learner.consumed = {0, 1, 2, 3, 5}
  learner.publish()
  with records.Writer(str(tmp_path), resume_step=None) as writer:
    writer.write(row(1, 5.0, trained=2))
    writer.write(row(2, 9.0, trained=1, groups_no_signal=1, groups_dropped=1))
  for r, starts in enumerate([(0, 3), (1, 4), (2, 5)]):
    with records.EventLog(str(tmp_path / f'rollout-{r}.jsonl')) as log:
      for start in starts:
        log.write('started', start=start)
        if start != 4:
          log.write('finished', start=start, id=str(start))
          log.write('stored', start=start, id=str(start))
  return tmp_path, store


def finish(folder: pathlib.Path, start: int) -> None:
  with records.EventLog(str(folder / 'rollout-1.jsonl')) as log:
    log.write('finished', start=start, id=str(start))


def test_a_group_that_was_in_flight_at_the_end_is_not_lost(ended):
  folder, store = ended
  seen = regions_report.groups(folder, store)
  assert (seen.started, seen.finished) == ({0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 5})
  assert (seen.trained, seen.no_signal, seen.dropped) == (3, 1, 1)
  assert seen.lost == 0
  assert {r: len(times) for r, times in seen.stored.items()} == {0: 2, 1: 1, 2: 2}


def test_a_finished_group_that_is_nowhere_is_lost(ended):
  folder, store = ended
  finish(folder, 4)
  assert regions_report.groups(folder, store).lost == 1


@pytest.mark.parametrize('where', ['store', 'outbox'])
def test_a_finished_group_that_waits_is_not_lost(ended, where):
  folder, store = ended
  finish(folder, 4)
  if where == 'store':
    group_store.append(store, types.Group('4-a', 4, 't', 'u', ()))
  else:
    (folder / 'outbox' / '1').mkdir(parents=True)
    (folder / 'outbox' / '1' / '00000004.group').write_bytes(b'')
  seen = regions_report.groups(folder, store)
  assert (seen.lost, seen.waiting) == (0, {4})


def test_a_group_that_was_consumed_and_counted_nowhere_is_lost(ended):
  folder, store = ended
  learner = rig.Learner(store, rig.settings(folder))
  learner.version, learner.consumed = 0, {0, 1, 2, 3, 4, 5}
  learner.publish()
  assert regions_report.groups(folder, store).lost == 1


def test_a_step_that_waits_three_times_as_long_as_usual_is_a_stall():
  times = [100.0, 110.0, 120.0, 135.0, 145.0, 176.0, 186.0]  # the first waits anyhow
  rows = [row(i + 1, t) for i, t in enumerate(times)]
  assert regions_report.learner_stalls(rows) == [(6, 31.0)]
  assert regions_report.learner_stalls(rows[:5]) == []
  # It took four batches' groups: nothing stood still.
  rows[5] = row(6, 176.0, trained=3, groups_no_signal=13)
  assert regions_report.learner_stalls(rows) == []
  assert regions_report.learner_stalls(rows[:1]) == []


def test_a_region_that_does_not_come_back_or_waits_for_another_is_a_stall():
  sound = {0: [90.0, 130.0, 170.0], 1: [90.0, 161.0], 2: [150.0, 165.0]}
  assert regions_report.region_stalls(sound, 3, CUT) == []
  lazy = {**sound, 1: [90.0, 99.0], 2: [99.0, 161.0]}
  said = regions_report.region_stalls(lazy, 3, CUT)
  assert said == [
    'region 1 stored nothing after the cut',
    'region 2 stored nothing while 1 was cut off',
  ]
  # Two processes a region: one of them is enough.
  spread = {0: [130.0], 3: [170.0], 1: [161.0], 2: [150.0, 165.0]}
  assert regions_report.region_stalls(spread, 3, CUT) == []


def test_the_curve_weighs_ages_by_groups():
  rows = [row(i, 5.0 * i, solve_rate=i / 10) for i in range(1, 7)]
  rows[0] |= {'staleness_mean': 3.0, 'staleness_count': 12, 'staleness_max': 3}
  got = regions_report.curve(rows)
  assert got['solve_last_third'] == pytest.approx(0.55)
  assert got['staleness_mean'] == pytest.approx((3 * 12 + 5 * 4) / 32)
  assert (got['staleness_max'], got['seconds']) == (3, 30.0)
  assert (got['step_seconds_median'], got['step_seconds_max']) == (5.0, 5.0)


def test_the_figure_is_drawn_from_rows_with_gaps():
  rows = [row(i, 5.0 * i) for i in range(1, 7)]
  rows[2] |= {'solve_rate': None, 'staleness_mean': None, 'staleness_max': None}
  for cut in (None, (2.0, 4.0)):
    png = regions_report.draw({'three regions': rows, 'one region': rows[:3]}, cut)
    assert png.startswith(b'\x89PNG')


def test_both_runs_put_the_same_load_on_the_machine(tmp_path):
  program.parse(['regions'], regions.FLAGS)
  cfgs = [
    regions.prepare(tmp_path / str(R), f'file://{tmp_path}/s{R}', R) for R in (1, 3)
  ]
  places = [cfg.sampler.processes * cfg.sampler.slots for cfg in cfgs]
  workers = [cfg.rollout.processes * cfg.sandbox.workers for cfg in cfgs]
  assert places[0] == places[1] and workers[0] == workers[1]
  assert [cfg.regions for cfg in cfgs] == [1, 3]
  stored = json.loads((tmp_path / '3' / 'config.json').read_text())
  assert stored['rollout.processes']['value'] == 3


def test_samplers_and_rollouts_take_the_line_of_their_region(monkeypatch, tmp_path):
  made, asked = [], {}

  class Line:
    def __init__(self, target, *, latency, rate):
      self.address = f'http://line-{len(made)}'
      self.up = self.down = type('Pipe', (), {'bytes': 7})
      made.append((target, latency, rate))

    def close(self) -> None:
      pass

  def run(cfg, *, resume, env_of):
    for role, index in (('learner', 0), ('sampler', 4), ('rollout', 2)):
      asked[role] = env_of(role, index)['STORAGE_EMULATOR_HOST']
    return 1

  monkeypatch.setattr(regions.link, 'Link', Line)
  monkeypatch.setattr(regions.local, 'run', run)
  program.parse(['regions'], regions.FLAGS)
  server = emulator.Server('gs', 'http://127.0.0.1:9', emulator.gcs_env('direct'), None)
  with pytest.raises(RuntimeError, match='exit code 1'):
    regions.run_regions(config.Config(run_dir=str(tmp_path)), server)
  assert asked == {
    'learner': 'direct',
    'sampler': 'http://line-1',
    'rollout': 'http://line-2',
  }
  assert [round(1e3 * 2 * latency) for _, latency, _ in made] == [20, 150, 250]
