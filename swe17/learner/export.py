"""Publishes a checkpoint's weights as version 0 of a store, for samplers to serve."""

import jax

from swe17 import settings
from swe17.agent import formats
from swe17.learner import checkpoint, optimizer
from swe17.learner import state as st
from swe17.model import params as p
from swe17.store import kv
from swe17.sync import apply, publisher


def main(run_dir: str, step: str, store: str) -> None:
  """Restores `step` ('-1': the newest) of `run_dir`, publishes it, prints its step.

  FileNotFoundError if the run has no such checkpoint.
  """
  cfg = settings.load(run_dir)
  shapes = p.abstract(cfg.model, formats.load(cfg.model.source).vocab_size)
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  like = st.init(p.init(shapes, jax.random.key(0)), tx)
  found = checkpoint.Checkpoints(run_dir, cfg.checkpoint)
  state, _ = found.restore(like, None if step == '-1' else int(step))
  found.close()
  made = publisher.Publisher(kv.open(store), cfg.sync, attempt='export')
  made.publish(0, apply.to_host(state.params), step=int(state.step), plan={})
  print(int(state.step))
