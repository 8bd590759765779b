"""A small model learns to repair functions as mini-swe-agent's: another's agent, as is.

  python -m experiments.swe17 --config=experiments/configs/mini_swe_agent.py

The agent comes from PyPI (`pip install mini-swe-agent`), talks to the recording proxy
as to any OpenAI server, and runs bash in the sandbox; its templates are short ones
(swe17/agent/data/mini_swe_agent.yaml). The warm start imitates a scripted agent in its
format. Hardware: 2 cores, 24 GiB, no accelerator. What the warm start alone comes to:
`python -m experiments.bench.mini_swe_agent`.
"""

import ml_collections

from experiments.configs import quickstart
from swe17.agent import programs


def get_config(arg: str = '') -> ml_collections.ConfigDict:
  """The settings; `arg` as of the quickstart."""
  cfg = quickstart.get_config(arg)
  cfg.agent.harness = programs.MINI
  # A command is a tool call of some 45 tokens, the submit one of 70.
  cfg.agent.max_context, cfg.batch.row_length = 640, 640
  cfg.agent.max_new_tokens, cfg.agent.max_turns = 96, 10
  cfg.agent.call_seconds, cfg.agent.episode_seconds = 20.0, 300.0
  # An episode takes a second of a core beside the model: sandboxes, a client.
  cfg.tasks.heldout, cfg.rollout.eval_samples = 20, 1
  cfg.sampler.processes, cfg.sampler.slots = 1, 16
  cfg.rollout.group_size, cfg.batch.groups = 4, 8
  cfg.steps = 12
  return cfg
