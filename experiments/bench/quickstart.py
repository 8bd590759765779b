"""The main job, several seeds: does the held-out solve rate rise, every time?

  python -m experiments.bench.quickstart --seeds=0,1,2

Runs `experiments.swe17` once a seed, one after another, and compares the held-out solve
rate at version 0 (the warm start) with that at the last version. `low` is the lower end
of the 95 % bootstrap over functions of the paired difference. The last line is JSON:

  {"before": [...], "after": [...], "low": [...], "minutes": [...]}

and, of families whose score is no 0 or 1 (`--config=experiments/configs/retrieval.py`),
also the mean held-out score before and after with both intervals, the lower end of
the paired difference, and the calls of a turn on both sides.
"""

from collections.abc import Sequence
import json
import pathlib
import subprocess
import sys
import time

from absl import flags

from experiments import program
from swe17.metrics import statistics

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_SEEDS = flags.DEFINE_list(
  'seeds', ['0', '1', '2'], 'seeds, one run each', flag_values=FLAGS
)
_CONFIG = flags.DEFINE_string(
  'config', 'experiments/configs/quickstart.py', 'what to run', flag_values=FLAGS
)
_DIR = flags.DEFINE_string(
  'dir', '', 'folder of the runs; empty: runs/bench-<time>', flag_values=FLAGS
)


def one(seed: int, folder: pathlib.Path, more: Sequence[str]) -> dict[str, float]:
  """Runs one seed to its end; its numbers. RuntimeError if the run failed."""
  run_dir = folder / f'seed-{seed}'
  command = [sys.executable, '-m', 'experiments.swe17', f'--config={_CONFIG.value}']
  command += [f'--run_dir={run_dir}', f'--config.seed={seed}', *more]
  began = time.monotonic()
  code = subprocess.run(command, check=False).returncode
  if code:
    raise RuntimeError(f'seed {seed} ended with exit code {code}: see {run_dir}/logs')
  minutes = (time.monotonic() - began) / 60
  before, after = (
    json.loads((run_dir / 'evals' / f'{name}.json').read_text())
    for name in ('before', 'after')
  )
  pairs, _ = statistics.pairs(before, after)
  _, low, _ = statistics.paired_interval(*pairs, seed=seed)
  out = {
    'before': before['pass_at_1'],
    'after': after['pass_at_1'],
    'low': low,
    'minutes': minutes,
  }
  if before['outcome'] != before['pass_at_1']:
    for name, record in (('before', before), ('after', after)):
      for key in ('outcome', 'outcome_low', 'outcome_high', 'calls_per_turn'):
        out[f'{key}_{name}'] = record[key]
    _, out['outcome_gain_low'], _ = statistics.score_gain(before, after, seed=seed)
  return out


def main(argv: Sequence[str]) -> None:
  folder = pathlib.Path(_DIR.value or f'runs/bench-{time.strftime("%Y%m%d-%H%M%S")}')
  rows = [one(int(seed), folder, argv[1:]) for seed in _SEEDS.value]
  print(
    json.dumps({key: [round(row[key], 4) for row in rows] for key in rows[0]}),
    flush=True,
  )


if __name__ == '__main__':
  program.run(main, FLAGS)
