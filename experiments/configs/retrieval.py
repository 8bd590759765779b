"""A small agent learns to search source trees: SWE-grep on two cores.

  pip install "swe17[retrieval]"     (the packages that the questions are about)
  python -m experiments.swe17 --config=experiments/configs/retrieval.py

Who calls a function that calls X? The trees are cut-down copies of real packages, the
held-out ones are of packages never trained on. The agent has 4 turns of at most 8
calls: it must grep the callers of X side by side. Scripted searchers score .21 (weak),
.35 (clumsy: what the warm start imitates) and .80 (careful); one grep alone .12.

Hardware: 2 cores, 24 GiB, no accelerator. The model is the quickstart's, with a
tokeniser of its own.
"""

import ml_collections

from swe17 import settings


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """The settings. `arg`: '' or 'whole', the whole packages for a model of your own."""
  cfg = settings.default()
  cfg.tasks.family = 'retrieval_small'
  cfg.tasks.kinds = ''
  cfg.agent.max_turns = 4
  cfg.agent.max_calls = 8
  cfg.agent.max_new_tokens = 96
  cfg.agent.max_context = 512
  cfg.batch.row_length = 512
  # Nine of ten on new cuts under invented names: on the training trees alone a small
  # model learns trees by heart, and finds nothing in others.
  cfg.imitation.practice, cfg.imitation.careful = 0.9, 0.3
  cfg.imitation.episodes, cfg.imitation.steps = 7000, 900
  cfg.model.layers = 4  # to copy what the last search found takes more than two
  cfg.optim.lr, cfg.steps = 1e-3, 100
  cfg.rollout.eval_samples = 4
  if arg == 'whole':
    cfg.imitation.practice = cfg.imitation.careful = 0.0
    cfg.tasks.family = 'retrieval'
    cfg.agent.max_new_tokens, cfg.agent.max_context = 1024, 16384
    cfg.batch.row_length, cfg.batch.micro_rows = 16384, 1
  elif arg:
    raise ValueError(f"argument {arg!r}: want '' or 'whole'")
  return cfg
