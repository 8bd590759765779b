"""The main job in small: real processes, a real model, real kills and Ctrl-C.

One run is made from the start, with a sampler killed on the way; what resumes or
changes a run works on copies of its folder, so the warm start is paid for once. The
tasks are the shipped ones with the fewest possible edits: a model of 100,000 weights
learns their format in seconds and then solves some by luck, which is all the signal
that these tests need.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from launch import process
from swe17 import config
from swe17.metrics import records
from tests.system import runs


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run to its end, one of whose samplers was killed after the first step."""
  folder = tmp_path_factory.mktemp('system')
  table = folder / 'tasks.jsonl'
  runs.easy_table(table)
  settings = {**runs.SETTINGS, 'tasks.table': table}
  run = runs.Run(folder / 'run')
  run.start(
    '--config=experiments/configs/quickstart.py',
    *(f'--config.{name}={value}' for name, value in settings.items()),
  )
  run.wait_for('step 1', lambda: run.step() >= 1)
  run.killed = run.kill('--role=sampler', '--index=0')
  run.code, run.text = run.end()
  return run


# --- a run ----------------------------------------------------------------------


def test_the_run_ends_well_and_leaves_its_folder(finished):
  assert finished.code == 0, finished.text
  for name in ('config.json', 'metrics.jsonl', 'events.jsonl', 'report.html'):
    assert (finished.folder / name).stat().st_size > 0
  for name in ('tensorboard/events.*', 'episodes/*.md', 'evals/before.json'):
    assert list(finished.folder.glob(name))
  before, after = (
    json.loads((finished.folder / f'evals/{name}.json').read_text())
    for name in ('before', 'after')
  )
  assert before['version'] == 0
  assert after['version'] == finished.rows()[-1]['version']
  assert before['missing'] == after['missing'] == 0
  assert 'held-out solve rate at version 0' in finished.text
  assert str(finished.folder) in finished.text
  origin = json.loads((finished.folder / 'config.json').read_text())
  assert origin['model.width']['value'] == 64
  assert origin['model.width']['origin'] == 'flag'


def test_no_process_is_left(finished):
  assert finished.processes() == []


def test_rows_are_complete_and_steps_rise_by_one(finished):
  runs.check_rows(finished, runs.STEPS)
  times = [row['time'] for row in finished.rows()]
  assert times == sorted(times)


def test_every_version_a_sampler_held_has_the_published_digest(finished):
  assert runs.check_digests(finished) >= runs.STEPS


def test_at_equal_versions_the_mismatch_is_at_the_numeric_floor(finished):
  same = [row['k3_same_version'] for row in finished.rows()]
  same = [k3 for k3 in same if k3 is not None]
  assert same
  assert max(same) < 1e-6


def test_no_group_is_trained_twice(finished):
  runs.check_groups(finished)


def test_staleness_stays_within_its_bound(finished):
  bound = config.Rollout().max_staleness
  assert all(0 <= row['staleness_max'] <= bound for row in finished.rows())


def test_the_killed_sampler_is_named_and_started_again(finished):
  (event,) = finished.events('restart')
  assert event['role'] == 'sampler-0'
  assert f'pid {finished.killed}' in event['text']
  assert 'SIGKILL' in event['text']
  assert 'error:' not in finished.text


def test_the_last_checkpoint_evaluated_by_hand_gives_the_runs_own_numbers(finished):
  argv = [sys.executable, '-m', 'experiments.evaluate', f'--run_dir={finished.folder}']
  done = subprocess.run(
    [*argv, '--samples=1'],
    check=False,
    cwd=runs.ROOT,
    env=runs.compiled_as_in_production(),
    capture_output=True,
    text=True,
    timeout=runs.DEADLINE,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert f'checkpoint of step {runs.STEPS}' in done.stdout
  found = json.loads(done.stdout.splitlines()[-1])
  own = json.loads((finished.folder / 'evals/after.json').read_text())
  # Equal weights, tasks, filters and seeds: equal draws.
  for name in ('pass_at_1', 'n_tasks', 'n_functions', 'samples', 'tokens', 'turns'):
    assert found[name] == own[name], name
  assert (found['split'], found['step']) == ('heldout', runs.STEPS)


# --- on copies of its folder ----------------------------------------------------


@pytest.fixture(scope='module')
def stopped(finished, tmp_path_factory):
  """The run gone on with as the ablation `no_replay`, and Ctrl-C after a step of it."""
  run = finished.copy(tmp_path_factory.mktemp('stopped') / 'run')
  runs.change(run, **{'loss.replay': False})
  shutil.rmtree(run.folder / 'store' / 'groups')  # drawn by earlier versions
  run.start('--resume', f'--config.steps={runs.STEPS + runs.MORE}')
  run.wait_for('a further step', lambda: run.step() > runs.STEPS)
  run.descended = run.descendants()
  os.kill(run.process.pid, signal.SIGINT)
  began = time.monotonic()
  run.code, run.text = run.end()
  run.seconds = time.monotonic() - began
  run.left = [pid for pid in run.descended if pathlib.Path(f'/proc/{pid}').exists()]
  run.left += run.processes()
  run.stopped_at = run.step()
  return run


def test_ctrl_c_leaves_no_process_within_five_seconds(stopped):
  """Five of a machine that is not busy: what has not ended by `GRACE` is killed."""
  assert stopped.code == 130, stopped.text
  assert len(stopped.descended) >= 6  # supervisor, learner, samplers, rollout, grader
  assert stopped.left == []
  assert process.GRACE < 5
  assert stopped.seconds < 60
  assert '--resume' in stopped.text


def test_without_replay_the_mean_ratio_is_the_mean_kept_mass(stopped):
  """Its first step trains on groups of its own version only."""
  row = stopped.rows()[runs.STEPS]
  assert (row['step'], row['staleness_max']) == (runs.STEPS + 1, 0)
  assert row['kept_mass'] < 0.998
  # Far closer than the 1 % that is promised: with a mass near 1 that says little.
  assert abs(row['ratio_mean'] - row['kept_mass']) < 0.02 * (1 - row['kept_mass'])


def test_a_resumed_run_outlives_a_killed_learner_without_a_repeat_or_a_gap(stopped):
  run, at = stopped, stopped.stopped_at
  assert runs.STEPS < at < runs.STEPS + runs.MORE
  resumes = len(run.events('resume'))
  run.start('--resume')
  run.wait_for('the next step', lambda: run.step() > at)
  killed = run.kill('--role=learner')
  code, text = run.end()
  assert code == 0, text
  runs.check_rows(run, runs.STEPS + runs.MORE)
  runs.check_groups(run)
  runs.check_digests(run)
  assert len(run.events('resume')) == resumes + 2
  first, second = run.events('resume')[-2:]
  assert first['text'] == f'learner resumed at step {at}'
  assert second['text'].startswith('learner resumed at step ')
  (event,) = [e for e in run.events('restart') if e['role'] == 'learner']
  assert f'pid {killed}' in event['text']
  after = json.loads((run.folder / 'evals/after.json').read_text())
  assert after['version'] == run.rows()[-1]['version']
  assert run.processes() == []


def test_a_learner_killed_before_its_first_checkpoint_makes_its_start_anew(
  finished, tmp_path
):
  """Version 0 was out already: the new warm start is published as the next one."""
  run = finished.copy(tmp_path / 'run')
  shutil.rmtree(run.folder / 'checkpoints')
  (run.folder / records.FILE).unlink()
  runs.change(run, **{'imitation.steps': 1, 'steps': 0})
  newest = run.events('version')[-1]['version']
  code, text = run.start('--role=learner', '--resume').end()
  assert code == 0, text
  made = [e for e in run.events('version') if e['version'] > newest]
  assert [e['version'] for e in made][:1] == [newest + 1]
  assert made[0]['step'] == 0


def test_two_learner_processes_go_on_with_a_run_and_outlive_one_that_is_killed(
  finished, tmp_path
):
  """The same weights, split in two; then Ctrl-C."""
  # Each start of the second process compiles: what it compiles is not kept on CPUs.
  run = finished.copy(tmp_path / 'run')
  flags = {'steps': runs.STEPS + 4, 'sampler.processes': 1, 'tasks.verify': False}
  flags |= {'mesh.fsdp': 2, 'mesh.processes': 2}
  changes = [f'--config.{name}={value}' for name, value in flags.items()]
  run.start('--resume', *changes, quick=True)
  run.wait_for('a step of two processes', lambda: run.step() > runs.STEPS)
  killed = run.kill('--role=learner', '--index=1')
  run.wait_for('a restart', lambda: len(run.events('restart')) > 1)
  at = run.step()
  run.wait_for('another step', lambda: run.step() > at)
  os.kill(run.process.pid, signal.SIGINT)
  code, text = run.end()
  assert code == 130, text
  assert run.processes() == []
  runs.check_rows(run, run.step())
  runs.check_digests(run)
  event = run.events('restart')[-1]
  assert event['role'] == 'learner-1'
  assert f'pid {killed}' in event['text']
  assert 'starting all 2 learner processes again with --resume' in event['text']
