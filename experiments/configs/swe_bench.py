"""Tasks of a SWE-bench table, for a model of one's own.

  python -m experiments.check_env families:swe_bench tasks.table=rows.jsonl \
    tasks.root=repositories tasks.place=local
  python -m experiments.swe17 --config=experiments/configs/swe_bench.py \
    --config.model.source=model --config.tasks.table=rows.jsonl \
    --config.tasks.root=repositories

`repositories` holds clones or bundles named owner__name or name; rows whose tests need
installed packages are set aside, for nothing is installed there. With
--config.tasks.place=container every row runs in its own image instead, under
--config.sandbox.engine. Check first: it says why each row that cannot be used is not.
How long a run takes depends on the model and on the suites; no figure is claimed.
"""

import ml_collections

from swe17 import settings


def get_config() -> ml_collections.ConfigDict:
  """The settings."""
  cfg = settings.default()
  cfg.tasks.family = 'swe_bench'
  cfg.tasks.place = 'local'
  cfg.imitation.steps = 0  # there is no scripted agent: start from a model
  cfg.sandbox.memory_mib = 2048
  cfg.agent.max_turns = 40
  cfg.agent.max_new_tokens = 1024
  cfg.agent.max_context = 16384
  cfg.agent.call_seconds = 120.0
  cfg.agent.episode_seconds = 3600.0
  cfg.agent.on_malformed = 'answer'
  cfg.batch.row_length = 16384
  cfg.rollout.group_size = 8
  return cfg
