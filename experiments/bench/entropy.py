"""Does the entropy last? Three ways to sample and score, one small policy.

  python -m experiments.bench.entropy [--seeds=5 --steps=300 --figure=runs/entropy.png]

Trains the policy of `experiments.bench.bandit` without top-p (`none`), with top-p at
the sampler alone (`naive`) and with top-p and kept-set replay (`replay`): same starting
logits, learning rate, rewards and number of samples, weights published in bfloat16 and
sampled one step late. Prints for each the slope of the full-vocabulary entropy (Theil
and Sen's robust line, nats a step), the mismatch k3 and the mean ratio, with 95 %
intervals over seeds, draws them, and ends with a line of JSON:

  {"slope": {"none": .., "naive": .., "replay": ..}, "mismatch_k3": {..}, "seeds": 5}

Exit code 1 unless replay's slope is flatter than both others' in the mean of the paired
differences (its interval excludes 0) and its k3 stays below .05, where a run is said to
fail. Hardware: any CPU, a minute or less.

The baseline is the group's mean. `--baseline=length_weighted` makes the advantages of a
group's tokens add up to 0, which takes the naive arm's drift (see `bandit`) out of the
sum over turns: there replay is flatter than `none` alone (measured -.0023 a step for
naive and replay both, -.0057 without top-p), and the mismatch tells the two apart.
"""

from collections.abc import Mapping, Sequence
import functools
import json
import pathlib
import sys

from absl import flags
import jax
from matplotlib import figure
import numpy as np
from rich import box, console, table

from experiments import seeds as seed_statistics
from experiments.bench import bandit

FAILING_K3 = 0.05  # above it a run is failing
COLOURS = {'none': '#D55E00', 'naive': '#CC79A7', 'replay': '#0072B2'}
LABELS = {'none': 'no top-p', 'naive': 'top-p, naive', 'replay': 'top-p with replay'}

Records = dict[str, dict[str, np.ndarray]]  # arm -> record -> [seeds, steps]


def measure(seeds: int, cfg: bandit.Train, task: bandit.Task) -> Records:
  """Trains every arm on the same `seeds` keys."""
  keys = jax.random.split(jax.random.key(0), seeds)
  records: Records = {}
  for name, arm in bandit.ARMS.items():
    one = functools.partial(bandit.train, task=task, arm=arm, cfg=cfg)
    _, record = jax.jit(jax.vmap(one))(keys)
    records[name] = {key: np.asarray(value) for key, value in record.items()}
  return records


def slope(values: np.ndarray) -> float:
  """Theil and Sen's slope, the median over all pairs of points, per step.

  values: [steps], one a step. A few wild steps do not move it.
  """
  x = np.arange(values.size)
  i, j = np.triu_indices(values.size, k=1)
  return float(np.median((values[j] - values[i]) / (x[j] - x[i])))


def summary(records: Records) -> dict[str, dict[str, list[float]]]:
  """Per arm: entropy slope, mean k3 and mean ratio, one value a seed."""
  return {
    arm: {
      'slope': [slope(values) for values in record['entropy']],
      'k3': record['k3'].mean(axis=1).tolist(),
      'ratio': record['ratio_mean'].mean(axis=1).tolist(),
    }
    for arm, record in records.items()
  }


def verdict(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
  """What is not as the recipe promises, one sentence each; empty if all is."""
  wrong = []
  for arm in ('none', 'naive'):
    pairs = zip(found['replay']['slope'], found[arm]['slope'], strict=True)
    gain, low, _ = seed_statistics.interval([a - b for a, b in pairs])
    if low is None or low <= 0:
      wrong.append(
        f"replay's slope is not flatter than {arm}'s beyond chance: {gain:+.1e} a "
        f'step, interval from {low:+.1e}'
      )
  worst = float(np.max(found['replay']['k3']))  # NaN, if any is
  if not worst < FAILING_K3:
    wrong.append(f"replay's mismatch k3 is {worst:.3g}, want below {FAILING_K3}")
  return wrong


def show(found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
  """Prints the table of means and intervals."""
  columns = {'slope': '[nats a step]', 'k3': '[nats a token]', 'ratio': '[1]'}
  rows = table.Table(box=box.SIMPLE)
  rows.add_column('', no_wrap=True)
  for name, unit in columns.items():
    rows.add_column(f'{name} {unit}', justify='right', no_wrap=True)
  for arm, values in found.items():
    cells = []
    for name in columns:
      mean, low, high = seed_statistics.interval(values[name])
      cells.append(f'{mean:.3g} [{low:.3g}, {high:.3g}]'.replace('[', r'\['))
    rows.add_row(LABELS[arm], *cells)
  console.Console(width=120).print(rows)


def draw(records: Records, path: str) -> None:
  """Entropy and mismatch by step: mean and 95 % interval over seeds, as one file."""
  fig = figure.Figure(figsize=(9, 3.6), layout='constrained')
  left, right = fig.subplots(1, 2)
  panels = ((left, 'entropy', 'entropy [nats]'), (right, 'k3', 'k3 [nats a token]'))
  for ax, name, label in panels:
    for arm, record in records.items():
      found = [seed_statistics.interval(column) for column in record[name].T.tolist()]
      mean, low, high = np.array(found, np.float64).T
      ax.plot(mean, color=COLOURS[arm], label=LABELS[arm])
      ax.fill_between(
        np.arange(mean.size), low, high, color=COLOURS[arm], alpha=0.2, lw=0
      )
    ax.set_xlabel('optimiser step')
    ax.set_ylabel(label)
    ax.spines[['top', 'right']].set_visible(False)
  left.set_ylim(bottom=0)
  right.set_ylim(bottom=0)
  left.set_title('Entropy of the policy, full vocabulary')
  right.set_title('Mismatch of sampler and learner')
  right.legend(frameon=False)
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  fig.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> int:
  """Runs the command line `argv` (without the program's name) to its exit code."""
  chosen = flags.FlagValues()
  flags.DEFINE_integer(
    'seeds', 5, 'seeds, trained side by side', lower_bound=2, flag_values=chosen
  )
  flags.DEFINE_integer(
    'steps', 300, 'optimiser steps', lower_bound=2, flag_values=chosen
  )
  flags.DEFINE_enum(
    'baseline', 'mean', bandit.BASELINES, "a group's baseline", flag_values=chosen
  )
  flags.DEFINE_string(
    'figure', 'runs/entropy.png', 'the picture; empty: none', flag_values=chosen
  )
  try:
    chosen(['entropy', *argv])
  except flags.Error as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  jax.config.update('jax_default_matmul_precision', 'highest')
  jax.config.update('jax_numpy_rank_promotion', 'raise')
  cfg = bandit.Train(steps=chosen.steps, baseline=chosen.baseline)
  records = measure(chosen.seeds, cfg, bandit.Task())
  found = summary(records)
  show(found)
  if chosen.figure:
    draw(records, chosen.figure)
    print(f'drawn in {chosen.figure}')
  wrong = verdict(found)
  for sentence in wrong:
    print(f'not as promised: {sentence}', file=sys.stderr)
  means = {
    name: {arm: float(f'{np.mean(v[name]):.4g}') for arm, v in found.items()}
    for name in ('slope', 'k3')
  }
  document = {'slope': means['slope'], 'mismatch_k3': means['k3']}
  print(json.dumps({**document, 'seeds': chosen.seeds}), flush=True)
  return 1 if wrong else 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
