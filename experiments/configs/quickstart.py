"""The main job: a small agent learns to repair functions, end to end, on two cores.

  bash quickstart.sh                 (or, in an environment that has the package:)
  python -m experiments.swe17 --config=experiments/configs/quickstart.py

Hardware: 2 cores, 24 GiB, no accelerator. Wall time: 6 to 8 minutes, evaluation
included. Number to expect: the held-out solve rate rises from 11-22 % to 47-53 % (three
seeds, `python -m experiments.bench.quickstart`).

Arguments, after a colon, are the two ablations:
  no_replay   the learner scores tokens over the whole vocabulary, not the kept sets
  no_top_p    the sampler filters nothing, so there are no kept sets to replay
"""

import ml_collections

from swe17 import settings


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """The settings. `arg` is '' or the name of an ablation; ValueError on others."""
  cfg = settings.default()
  # Faults in an operator, a number, a condition's word or a short constant: what so
  # small a model can find by trying. The table's other kinds ('' takes them all) are
  # wrong names and dropped lines.
  cfg.tasks.kinds = 'comparison,off_by_one,operator,negated_condition,wrong_constant'
  if arg == 'no_replay':
    cfg.loss.replay = False
  elif arg == 'no_top_p':
    cfg.sampler.top_p, cfg.sampler.top_k, cfg.sampler.min_p = 1.0, 0, 0.0
  elif arg:
    raise ValueError(
      f"argument {arg!r}: want '' (the main job), 'no_replay' or 'no_top_p'"
    )
  return cfg
