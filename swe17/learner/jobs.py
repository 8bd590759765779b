"""What the learner's processes do together, each with its own shards and rows.

  process 0    jobs.update(batch)   tells the others 'update', with their rows; does it
  the others   jobs.follow()        do what they are told, in that order, to the end

Every step is decided by process 0 and by nothing else: it alone reads the store, packs
the batch, counts, publishes and says when to stop. The others get packed rows, not the
names of groups: what to refuse, what did not decode and how rows are packed is then
found out once, and the store is read once. On one process all of this is plain calls.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from swe17 import config
from swe17.learner import (
  checkpoint,
  gather,
  imitation,
  mesh,
  optimizer,
  reference,
  update,
)
from swe17.learner import state as st
from swe17.learner import team as teams
from swe17.model import params as p

Metrics = dict[str, jax.Array]


def policy_optimiser(cfg: config.Config) -> optax.GradientTransformationExtraArgs:
  """The optimiser of the policy's own steps, not of the warm start."""
  return optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))


class Jobs:
  """The state and what is done to it. Process 0 calls, the others `follow`."""

  def __init__(
    self,
    cfg: config.Config,
    team: teams.Team,
    devices: mesh.Devices,
    params: p.Params,
  ):
    self.team, self.devices, self._cfg = team, devices, cfg
    tx = optimizer.make(cfg.optim, imitation.schedule(cfg.imitation))
    self.state = mesh.state(devices, params, tx)
    self.reference: p.Params | None = None  # of the KL penalty, if it is on
    self.checkpoints = checkpoint.Checkpoints(cfg.run_dir, cfg.checkpoint)
    self._policy_tx = policy_optimiser(cfg)
    self._imitation: Any = None  # a compiled step of the warm start
    self._steps: dict[int, Any] = {}  # compiled updates, by number of micro-batches

  def follow(self) -> tuple[int, str]:
    """Does what process 0 says until it ends: its exit code, and its last words."""
    while True:
      order = self.team.take(0)
      if order.name == 'end':
        return order.values['code'], order.values['text']
      self._obey(order)
      # One order after the other: collectives of two must not meet.
      jax.block_until_ready(self.state)

  def _obey(self, order: teams.Message) -> None:
    match order.name:
      case 'update':
        self.update(_batch(order.arrays))
      case 'publish':
        self.to_host()
      case 'save':
        self.save(order.values['step'], {})
      case 'imitate':
        self.imitate(_batch(order.arrays))
      case 'compile':
        self.compile(_batch(order.arrays))
      case 'begin_policy':
        self.begin_policy()
      case 'restore':
        self.restore(order.values['step'])
      case 'keep_reference':
        self.keep_reference()
      case 'load_reference':
        self.load_reference()
      case _:
        raise RuntimeError(f'order of process 0: got {order.name!r}, which is none')

  # --- the warm start -------------------------------------------------------------

  def imitate(self, batch: st.Batch) -> Metrics:
    """One step of the warm start on a batch of the host's."""
    batch = self._own('imitate', batch)
    if self._imitation is None:
      # Compiled by hand: called as it is, a step on a mesh is traced a second time.
      step = imitation.step(self._cfg, self.devices, self.state)
      with mesh.scope(self.devices):
        self._imitation = step.lower(self.state, batch).compile()
    self.state, metrics = self._imitation(self.state, batch)
    return metrics

  def begin_policy(self) -> None:
    """The optimiser afresh: momentum of the imitation is not the policy's."""
    self.team.tell('begin_policy')
    self._imitation = None
    self.state = mesh.state(self.devices, self.state.params, self._policy_tx)

  # --- training -------------------------------------------------------------------

  def compile(self, batch: st.Batch) -> None:
    """Compiles the update for batches of this shape."""
    self._compiled(self._own('compile', batch))

  def update(self, batch: st.Batch) -> Metrics:
    """One step of the policy on a batch of the host's."""
    batch = self._own('update', batch)
    step = self._compiled(batch)
    self.state, metrics = step(self.state, batch, self.reference)
    return metrics

  def to_host(self) -> dict[str, np.ndarray]:
    """The parameters as they are published, on process 0; see learner/gather.py."""
    self.team.tell('publish')
    return gather.to_host(self.state.params, self.team)

  # --- what lasts -----------------------------------------------------------------

  def save(self, step: int, extra: Mapping[str, Any]) -> bool:
    """Commits a checkpoint, each process its shards. False if there is one of `step`.

    `extra` is written by process 0.
    """
    if self.team.index == 0 and self.checkpoints.has(step):
      return False
    self.team.tell('save', {'step': step})
    saved = self.checkpoints.save(step, self.state, extra)
    assert saved or self.team.index == 0, f'step {step} is on this process only'
    return saved

  def restore(self, step: int) -> dict[str, Any]:
    """Takes up the checkpoint of `step`, from any mesh; returns its extra."""
    self.team.tell('restore', {'step': step})
    like = mesh.state(self.devices, self.state.params, self._policy_tx)
    self.state, extra = self.checkpoints.restore(like, step)
    return extra

  def keep_reference(self) -> None:
    """Commits the present policy as the reference of the KL penalty."""
    self.team.tell('keep_reference')
    self.reference = reference.keep(self._cfg.run_dir, self.state.params)

  def load_reference(self) -> None:
    """Takes up the reference that was kept when the run started."""
    self.team.tell('load_reference')
    self.reference = reference.load(self._cfg.run_dir, self.state.params)

  def close(self) -> None:
    """Closes what is this process's own."""
    self.checkpoints.close()

  # --------------------------------------------------------------------------------

  def _own(self, name: str, batch: st.Batch) -> st.Batch:
    """Tells the others `name` with their rows; this process's rows, on its devices."""
    self.team.tell(name, arrays=lambda i: _arrays(mesh.part(self.devices, batch, i)))
    if self.team.others:
      batch = mesh.part(self.devices, batch, 0)
    return mesh.put(self.devices, batch)

  def _compiled(self, batch: st.Batch) -> Any:
    """The update, compiled for a batch's shape: once for each number of them."""
    cfg, M = self._cfg, batch.token_MBT.shape[0]
    if M not in self._steps:
      step = functools.partial(
        update.update,
        model=cfg.model,
        loss=cfg.loss,
        tx=self._policy_tx,
        exact=cfg.optim.exact_sum,
        mesh=self.devices.replicas,
      )
      jitted = mesh.jit(self.devices, step, self.state)
      with mesh.scope(self.devices):
        lowered = jitted.lower(self.state, batch, self.reference)
        self._steps[M] = lowered.compile()
    return self._steps[M]


def _arrays(batch: st.Batch) -> dict[str, np.ndarray]:
  """A batch's arrays by name; those that it does not have are left out."""
  fields = dataclasses.fields(batch)
  named = {field.name: getattr(batch, field.name) for field in fields}
  return {name: x for name, x in named.items() if x is not None}


def _batch(arrays: Mapping[str, Any]) -> st.Batch:
  """Inverse of `_arrays`."""
  return st.Batch(**arrays)
