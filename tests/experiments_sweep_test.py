"""Sweeps: bad input is refused before anything runs, and every cell ends up somewhere.

Most tests put a scripted run in the place of `experiments.swe17`; it leaves the files a
run leaves. The last ones start real processes.
"""

import itertools
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
from scipy import special

from experiments import seeds, sweep, sweep_grid, sweep_report
from launch import folder
from swe17 import settings

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = str(ROOT / 'experiments' / 'configs' / 'quickstart.py')
GRID = ['--sweep=optim.lr=1e-4,3e-4', '--sweep=sampler.top_p=.9,.95']


class Scripted:
  """Leaves what a run leaves; `codes` says how each start ends, by cell name."""

  def __init__(self, codes=None, rate=lambda cell: 0.2 + 0.1 * cell.seed):
    self.codes, self.rate = dict(codes or {}), rate
    self.started: list[tuple[str, bool]] = []

  def __call__(self, cell, argv, stopped) -> int:
    self.started.append((cell.name, '--resume' in argv))
    for name in ('evals', 'logs'):
      (cell.run_dir / name).mkdir(parents=True, exist_ok=True)
    origin = dict.fromkeys(settings.leaves(), 'flag')
    folder.fill(str(cell.run_dir), settings.to_json(cell.cfg, origin), ['python'])
    folder.add_seconds(str(cell.run_dir), 90)
    code = self.codes.pop(cell.name, 0)
    if code:
      cell.log.write_text('working\nerror: the machine broke\n')
      return code
    rates = {'before': 0.1, 'after': self.rate(cell)}
    for name, rate in rates.items():
      path = cell.run_dir / 'evals' / f'{name}.json'
      path.write_text(json.dumps({'pass_at_1': rate}))
    return 0


def run(tmp_path, *args, runner=None) -> int:
  argv = [f'--config={CONFIG}', f'--dir={tmp_path}/sweep', *args]
  return sweep.main(argv, runner or Scripted())


def summary(tmp_path) -> dict:
  return json.loads((tmp_path / 'sweep' / 'summary.json').read_text())


def test_every_combination_runs_once_for_every_seed_with_its_settings(tmp_path):
  runner = Scripted()
  assert run(tmp_path, *GRID, '--seeds=2', '--config.steps=7', runner=runner) == 0
  assert len(runner.started) == len(set(runner.started)) == 8
  got = set()
  for cell in summary(tmp_path)['cells']:
    cfg = settings.load(cell['run_dir'])
    got.add((cfg.optim.lr, cfg.sampler.top_p, cfg.seed, cfg.steps))
  assert got == set(itertools.product((1e-4, 3e-4), (0.9, 0.95), (0, 1), (7,)))


@pytest.mark.parametrize(
  ('args', 'said'),
  [
    (['--sweep=optim.lrr=1,2'], 'optim.lrr is an unknown setting; the nearest is opti'),
    (['--sweep=optim=1'], 'optim is a section'),
    (['--sweep=optim.lr'], 'want setting=value'),
    (['--sweep=optim.lr=1e-4,,2'], 'none of them empty'),
    (['--sweep=optim.lr=1e-4,.0001'], 'are the same settings'),
    (['--sweep=optim.lr=1', '--sweep=optim.lr=2'], 'optim.lr is swept twice'),
    (['--sweep=optim.lr=abc'], 'optim.lr'),
    (['--sweep=sampler.top_p=.9,1.5'], 'sampler.top_p: got 1.5, want in (0, 1]'),
    (['--sweep=sampler.top_k=8,0'], 'sampler.top_k=0'),
    (['--sweep=seed=1,2'], '--seeds'),
    (['--sweep=run_dir=a,b'], 'run_dir cannot be swept'),
    (['--sweep=optim.lr=1,2', '--config.optim.lr=3'], 'it is swept'),
    (['--config.optim.lrr=3'], 'unknown setting optim.lrr; the nearest is optim.lr'),
    (['--config.seed=3'], '--seeds'),
    (['--seeds=0'], '--seeds: got 0, want >= 1'),
    (['--sed=2'], 'unknown flag --sed; the nearest is --seeds'),
    (['extra'], "unexpected argument 'extra'"),
  ],
)
def test_bad_input_runs_nothing_and_names_the_setting(tmp_path, capsys, args, said):
  runner = Scripted()
  assert run(tmp_path, *args, runner=runner) == 2
  error = capsys.readouterr().err
  assert said in error and error.startswith('error: ') and error.count('\n') == 1
  assert not runner.started and not (tmp_path / 'sweep').exists()


def test_no_config_is_refused(capsys):
  assert sweep.main(['--sweep=optim.lr=1,2']) == 2
  assert '--config' in capsys.readouterr().err


def test_dry_run_prints_commands_that_swe17_understands_and_leaves_no_trace(
  tmp_path, capsys
):
  runner = Scripted()
  assert run(tmp_path, *GRID, '--seeds=3', '--dry_run', runner=runner) == 0
  lines = capsys.readouterr().out.splitlines()
  assert len(lines) == 12 and not runner.started and not (tmp_path / 'sweep').exists()
  for line in lines:
    words = shlex.split(line)
    assert words[:3] == ['python', '-m', 'experiments.swe17']
    assert sweep_grid.options.parse(words[3:]).cfg.optim.lr in (1e-4, 3e-4)


def test_values_with_commas_are_separated_by_semicolons():
  got = sweep_grid.parse(['tasks.kinds=operator,off_by_one;operator'])
  assert got == {'tasks.kinds': ['operator,off_by_one', 'operator']}


def test_what_has_finished_is_not_run_again(tmp_path):
  assert run(tmp_path, '--sweep=optim.lr=1e-4,3e-4') == 0
  again = Scripted()
  assert run(tmp_path, '--sweep=optim.lr=1e-4,3e-4', '--seeds=2', runner=again) == 0
  assert again.started == [
    ('optim.lr=1e-4 seed 1', False),
    ('optim.lr=3e-4 seed 1', False),
  ]


def test_a_failed_cell_is_shown_and_stops_no_other_and_goes_on_with_resume(
  tmp_path, capsys
):
  name = 'optim.lr=1e-4 seed 0'
  runner = Scripted({name: 1})
  assert run(tmp_path, '--sweep=optim.lr=1e-4,3e-4', runner=runner) == 1
  assert len(runner.started) == 2
  bad, good = summary(tmp_path)['cells']
  assert (bad['state'], bad['after'], good['state']) == ('failed', None, 'finished')
  assert 'exit code 1' in bad['why'] and 'the machine broke' in bad['why']
  out = capsys.readouterr().out
  assert 'failed: optim.lr=1e-4 seed 0' in out and bad['log'] in out
  assert '0 of 1, 1 failed' in out
  again = Scripted()
  assert run(tmp_path, '--sweep=optim.lr=1e-4,3e-4', runner=again) == 0
  assert again.started == [(name, True)]
  assert [cell['state'] for cell in summary(tmp_path)['cells']] == ['finished'] * 2


def test_an_exit_code_of_0_without_an_evaluation_is_a_failure(tmp_path):
  def silent(cell, argv, stopped):
    return 0

  assert run(tmp_path, runner=silent) == 1
  assert 'evals/after.json' in summary(tmp_path)['cells'][0]['why']


@pytest.mark.parametrize('text', ['', '{"pass_at_1": ', '{"pass_at_1": null}', '[]'])
def test_a_damaged_evaluation_does_not_count_as_finished(tmp_path, text):
  assert run(tmp_path) == 0
  path = tmp_path / 'sweep' / 'as-configured' / 'seed-0' / 'evals' / 'after.json'
  path.write_text(text)
  again = Scripted()
  assert run(tmp_path, runner=again) == 0
  assert again.started == [('as configured seed 0', True)]


def test_a_folder_with_other_settings_is_refused(tmp_path, capsys):
  assert run(tmp_path, '--config.steps=7') == 0
  again = Scripted()
  assert run(tmp_path, '--config.steps=9', runner=again) == 2
  assert 'steps=9 (the run has 7)' in capsys.readouterr().err
  assert not again.started


def test_the_default_folder_is_found_again_and_differs_between_grids():
  def where(*args):
    chosen, more = sweep._flags([f'--config={CONFIG}', *args])
    return sweep._folder(chosen, sweep_grid.parse(chosen.sweep), more)

  assert where(*GRID) == where(*GRID, '--seeds=5')
  assert len({where(), where(*GRID), where(*GRID, '--config.steps=2')}) == 3


def test_folders_of_different_combinations_never_meet(tmp_path):
  values = ['a/b', 'a:b', 'a b', 'x' * 300, 'x' * 301]
  names = {sweep_grid._folder_name({'tasks.kinds': v}) for v in values}
  assert len(names) == len(values)
  assert all('/' not in name and len(name) < 200 for name in names)


def test_rows_hold_the_mean_and_t_interval_over_the_seeds_that_finished(tmp_path):
  rate = {0: 0.2, 1: 0.3, 2: 0.25}
  failing = {'optim.lr=3e-4 seed 1': 1}
  runner = Scripted(failing, rate=lambda cell: rate[cell.seed])
  assert run(tmp_path, '--sweep=optim.lr=1e-4,3e-4', '--seeds=3', runner=runner) == 1
  first, second = summary(tmp_path)['rows']
  assert (first['finished'], second['finished'], second['failed']) == (3, 2, 1)
  # s = .05, so the half width is t(2) s / sqrt(3) = 4.303 x .0288675.
  assert first['after']['mean'] == pytest.approx(0.25)
  assert first['after']['high'] == pytest.approx(0.25 + 4.303 * 0.0288675, abs=1e-6)
  assert first['gain']['mean'] == pytest.approx(0.15)
  assert second['after']['mean'] == pytest.approx(0.225)
  assert first['minutes']['mean'] == pytest.approx(1.5)


def test_one_picture_is_drawn_with_and_without_numbers(tmp_path):
  assert run(tmp_path, *GRID, '--seeds=2') == 0
  path = tmp_path / 'sweep' / 'sweep.png'
  with_numbers = path.read_bytes()
  assert with_numbers.startswith(b'\x89PNG')
  found = summary(tmp_path)['cells']
  blank = [{**cell, 'after': None, 'before': None} for cell in found]
  assert sweep_report.draw(tmp_path / 'sweep', blank) == path
  assert path.read_bytes() != with_numbers


def test_a_signal_ends_the_sweep_and_the_same_command_goes_on(tmp_path, capsys):
  inner = Scripted({'optim.lr=3e-4 seed 0': 130})
  before = signal.getsignal(signal.SIGINT)  # ignored, where a shell runs this behind

  def interrupted(cell, argv, stopped):
    if '3e-4' in cell.name:
      os.kill(os.getpid(), signal.SIGINT)
      assert stopped()
    return inner(cell, argv, stopped)

  grid = '--sweep=optim.lr=1e-4,3e-4,1e-3'
  assert run(tmp_path, grid, runner=interrupted) == 130
  assert len(inner.started) == 2
  assert 'the same command goes on' in capsys.readouterr().err
  again = Scripted()
  assert run(tmp_path, grid, runner=again) == 0
  assert again.started == [
    ('optim.lr=3e-4 seed 0', True),
    ('optim.lr=1e-3 seed 0', False),
  ]
  assert signal.getsignal(signal.SIGINT) is before


def test_the_t_quantiles_are_those_of_scipy():
  for n, t in enumerate(seeds.T_975, 1):
    assert t == pytest.approx(special.stdtrit(n, 0.975), abs=6e-4)


def test_one_seed_has_no_interval_and_missing_values_are_refused():
  assert seeds.interval([0.5]) == (0.5, None, None)
  for bad in ([], [0.1, float('nan')]):
    with pytest.raises(ValueError, match='finite'):
      seeds.interval(bad)


def test_a_real_run_that_refuses_its_input_is_a_failed_cell_with_its_sentence(tmp_path):
  """The real runner and the real program; the folder of the run cannot be made."""
  cell_dir = tmp_path / 'sweep' / 'as-configured'
  cell_dir.mkdir(parents=True)
  (cell_dir / 'seed-0').mkdir()
  (cell_dir / 'seed-0' / '.lock').mkdir()  # a folder where the lock should be
  assert run(tmp_path, runner=sweep.run_cell) == 1
  (cell,) = summary(tmp_path)['cells']
  assert 'exit code 2' in cell['why'] and 'cannot write to run folder' in cell['why']
  assert 'cannot write' in pathlib.Path(cell['log']).read_text()


def test_ctrl_c_stops_the_real_run_and_leaves_no_process(tmp_path):
  argv = [sys.executable, '-m', 'experiments.sweep', f'--config={CONFIG}']
  argv += [f'--dir={tmp_path}/sweep', '--config.sampler.processes=1']
  running = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  try:
    run_dir = tmp_path / 'sweep' / 'as-configured' / 'seed-0'
    until = time.monotonic() + 60
    while not (run_dir / 'config.json').exists():
      assert running.poll() is None and time.monotonic() < until
      time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
  finally:
    running.kill()
    running.wait()
  assert running.returncode == 130, out
  (cell,) = summary_of(run_dir)
  assert cell['state'] == 'begun' and cell['after'] is None
  holder = (run_dir / '.lock').read_text()
  assert not pathlib.Path(f'/proc/{holder}').exists()


def summary_of(run_dir: pathlib.Path) -> list[dict]:
  return json.loads((run_dir.parent.parent / 'summary.json').read_text())['cells']
