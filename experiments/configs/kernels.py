"""A small agent learns to make functions faster: Kevin on two cores.

  python -m experiments.swe17 --config=experiments/configs/kernels.py
  python -m experiments.bench.quickstart --config=experiments/configs/kernels.py

Functions with two to four wasteful places among look-alikes (env/kernels/small.py). An
episode is 4 candidates, each answered with its class (parse, run, wrong, correct) and
its speedup; a candidate scores .3 + its speedup, at most 5, if it is right. The
held-out functions have sets of kinds of waste that were never trained on. Scripted
agents score .8 (weak), 1.2 (clumsy: what the warm start imitates) and 3.8 (careful).

Every turn is a sample with a reward of its own, the scores of later turns discounted by
.4; thoughts of earlier turns are dropped from the context.

Arguments, after a colon:
  single      one turn, one candidate
  episode     4 candidates, but one reward for all turns: the best score
  whole       the functions of the family `kernels`, whole modules as candidates, for a
              model of your own (model.source)

Hardware: 2 cores, 24 GiB, no accelerator. The model is the quickstart's, with a
tokeniser of its own.
"""

import ml_collections

from swe17 import settings


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """The settings. `arg`: '', 'single', 'episode' or 'whole'; ValueError on others."""
  cfg = settings.default()
  cfg.tasks.family = 'kernels_small'
  cfg.tasks.attempts = 4
  cfg.tasks.train, cfg.tasks.heldout = 240, 64
  cfg.agent.max_turns = 5  # one to spare: a turn may end without a candidate
  cfg.agent.max_new_tokens, cfg.agent.max_context = 72, 320
  cfg.agent.thoughts = 'strip'
  cfg.loss.credit, cfg.loss.gamma = 'turn', 0.4
  # Each candidate of a scripted episode is timed too: fewer of them, none practised.
  cfg.imitation.practice, cfg.imitation.episodes = 0.0, 1200
  cfg.steps, cfg.rollout.eval_samples = 40, 4
  if arg == 'single':
    cfg.tasks.attempts, cfg.agent.max_turns = 1, 1
    cfg.loss.credit = 'episode'
  elif arg == 'episode':
    cfg.loss.credit = 'episode'
  elif arg == 'whole':
    cfg.tasks.family = 'kernels'
    cfg.tasks.train = cfg.tasks.heldout = 0
    # Time of numpy code, not of a line: a candidate may be slower than its reference.
    cfg.sandbox.cpu_seconds, cfg.sandbox.memory_mib = 0.5, 1024
    cfg.agent.max_new_tokens, cfg.agent.max_context = 4096, 24576
    cfg.agent.episode_seconds = 1200.0
    cfg.agent.on_malformed = 'answer'
    cfg.batch.row_length, cfg.batch.micro_rows = 24576, 1
    cfg.sampler.temperature = 0.9
    cfg.imitation.steps = 0
  elif arg:
    raise ValueError(f"argument {arg!r}: want '', 'single', 'episode' or 'whole'")
  return cfg
