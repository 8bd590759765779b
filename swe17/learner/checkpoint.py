"""Checkpoints: one commit over weights, optimiser state and cursors, by orbax.

A checkpoint is complete or it does not exist: orbax writes to a temporary folder and
renames it, and an older one is deleted only after that. The cursors (consumed groups,
versions) travel in the same commit, so nothing is trained twice or lost.

On several processes each writes its own shards: `save` and `restore` are calls for all
of them, on one folder that all of them see. A checkpoint names no process: it comes
back on any number of them, and on any mesh.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from swe17 import config
from swe17.learner import state as st


class Checkpoints:
  """The checkpoints of a run, under `<run_dir>/checkpoints`."""

  def __init__(self, run_dir: str, cfg: config.Checkpoint):
    options = ocp.CheckpointManagerOptions(
      max_to_keep=cfg.keep, enable_async_checkpointing=False
    )
    folder = (pathlib.Path(run_dir) / 'checkpoints').absolute()
    self._manager = ocp.CheckpointManager(folder, options=options)

  def save(self, step: int, state: st.State, extra: Mapping[str, Any]) -> bool:
    """Commits `state` and JSON-able `extra` as `step`; returns once it is on disk.

    False, and nothing done, if there is a checkpoint of `step`: its `extra` stays.
    """
    if self.has(step):
      return False
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(dict(extra))
      ),
    )
    self._manager.wait_until_finished()
    return True

  def has(self, step: int) -> bool:
    """Whether there is a complete checkpoint of `step`."""
    return step in self._manager.all_steps()

  def latest(self) -> int | None:
    """The newest complete step."""
    return self._manager.latest_step()

  def restore(
    self, like: st.State, step: int | None = None
  ) -> tuple[st.State, dict[str, Any]]:
    """The state (shaped as `like`) and extra of `step` (newest if None).

    Raises:
      FileNotFoundError: there is no such checkpoint.
    """
    step = self.latest() if step is None else step
    if step is None or not self.has(step):
      raise FileNotFoundError(
        f'no checkpoint of step {step} in {self._manager.directory}'
      )
    shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    got = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(shapes), extra=ocp.args.JsonRestore()
      ),
    )
    return got['state'], got['extra']

  def close(self) -> None:
    self._manager.close()
