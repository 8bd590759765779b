"""What is alive in the learner's process, how it starts, and what it commits.

open_run -> begin: a checkpoint, or the warm start and version 0
publish: one more weight version, with the plan for samplers and rollouts
save: a checkpoint, after which consumed groups are let go
"""

import dataclasses
import os
import threading
import time
from typing import Any
import uuid

import jax
import numpy as np
import optax

from swe17 import config
from swe17.agent import formats
from swe17.learner import buffer, checkpoint, imitation, mesh, optimizer, reference
from swe17.learner import state as st
from swe17.metrics import records, status
from swe17.model import load
from swe17.model import params as p
from swe17.ops import length
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import plan as plans
from swe17.sync import publisher


@dataclasses.dataclass
class Run:
  """Everything alive in this process."""

  cfg: config.Config
  devices: mesh.Devices
  store: kv.Store
  state: st.State
  buffer: buffer.Buffer
  publisher: publisher.Publisher
  checkpoints: checkpoint.Checkpoints
  status: status.Status
  events: records.EventLog
  stop: threading.Event
  version: int = -1
  step_of: dict[int, int] = dataclasses.field(default_factory=dict)
  skipped: int = 0
  dead_batches: int = 0
  uncommitted: list[str] = dataclasses.field(default_factory=list)
  budgets: dict[str, float] = dataclasses.field(default_factory=dict)  # by task id
  resumed: bool = False
  reference: p.Params | None = None  # of the KL penalty, if it is on

  @property
  def step(self) -> int:
    return int(self.state.step)


def open_run(cfg: config.Config, stop: threading.Event) -> Run:
  """The store, the checkpoints and a state that `begin` fills."""
  store = kv.open(cfg.store)
  vocab = formats.load(cfg.model.source).vocab_size
  devices = mesh.open(cfg, vocab)
  tx = optimizer.make(cfg.optim, imitation.schedule(cfg.imitation))
  return Run(
    cfg=cfg,
    devices=devices,
    store=store,
    state=mesh.state(devices, _values(cfg, devices), tx),
    buffer=buffer.Buffer(
      store,
      max_staleness=cfg.rollout.max_staleness,
      vocab=vocab,
      truncates=cfg.sampler.sampling.truncates,
      top_k=cfg.sampler.top_k,
      routes=cfg.model.routes,
    ),
    publisher=publisher.Publisher(store, cfg.sync, attempt=uuid.uuid4().hex[:12]),
    checkpoints=checkpoint.Checkpoints(cfg.run_dir, cfg.checkpoint),
    status=status.Status(cfg.run_dir, 'learner'),
    events=records.EventLog(os.path.join(cfg.run_dir, 'events.jsonl')),
    stop=stop,
  )


def _values(cfg: config.Config, devices: mesh.Devices) -> p.Params:
  """What training begins with: the weights of the model's files, or random ones."""
  if not cfg.model.source:
    return mesh.init(devices, jax.random.key(cfg.seed))
  split = None if devices.mesh is None else mesh.shardings(devices)
  return load.load(cfg.model.source, cfg.model, split, jax.random.key(cfg.seed))


def policy_optimiser(cfg: config.Config) -> optax.GradientTransformationExtraArgs:
  """The optimiser of the policy's own steps, not of the warm start."""
  return optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))


def begin(run_: Run, resume: bool) -> None:
  """Brings the state to where training starts: a checkpoint, or the warm start."""
  run_.status.set('starting', f'{p.count(run_.state.params):,} parameters')
  tx = policy_optimiser(run_.cfg)
  newest = publisher.latest(run_.store) if resume else None
  run_.version = -1 if newest is None else newest
  if newest is not None:
    run_.publisher.restore(run_.cfg.sync.restore_seconds)
  run_.step_of = dict.fromkeys(range(run_.version + 1), 0)
  if resume and run_.checkpoints.latest() is not None:
    like = mesh.state(run_.devices, run_.state.params, tx)
    run_.state, extra = run_.checkpoints.restore(like)
    run_.buffer.consumed = buffer.uncursor(extra['below'], extra['rest'])
    # What was set aside since the checkpoint is in the store no longer.
    run_.buffer.consumed |= group_store.quarantined(run_.store)
    run_.buffer.dropped.update(extra['dropped'])
    run_.skipped, run_.budgets = extra['skipped'], extra.get('budgets', {})
    run_.step_of = {int(v): s for v, s in extra['step_of'].items()}
    # Versions after the checkpoint are of steps that are lost: they count as its own.
    for version in range(run_.version + 1):
      run_.step_of.setdefault(version, run_.step)
    if run_.cfg.loss.kl_weight:
      run_.reference = reference.load(run_.cfg.run_dir, run_.state.params)
    run_.resumed = True
    run_.events.write('resume', text=f'learner resumed at step {run_.step}')
    return
  _imitate(run_)
  if not run_.stop.is_set():
    # The optimiser starts afresh: momentum of the imitation is not the policy's.
    run_.state = mesh.state(run_.devices, run_.state.params, tx)
    if run_.cfg.loss.kl_weight:
      run_.reference = reference.keep(run_.cfg.run_dir, run_.state.params)
    publish(run_, mesh.to_host(run_.devices, run_.state.params))
    save(run_)


def _imitate(run_: Run) -> None:
  cfg = run_.cfg
  episodes = imitation.Episodes(kv.open(cfg.store.rstrip('/') + '/imitation'), cfg.seed)
  run_.status.set('imitating', 'waiting for scripted episodes')
  episodes.wait(min(cfg.imitation.episodes, 500), run_.stop.is_set)
  if run_.stop.is_set():
    return
  begun = time.monotonic()
  steps = imitation.run(run_.state, episodes, cfg, run_.devices)
  for i, (state, metrics) in enumerate(steps, 1):
    run_.state = state
    if run_.stop.is_set():
      return
    if i % 10 == 0 or i == cfg.imitation.steps:
      episodes.wait(0, run_.stop.is_set)  # takes in what has arrived since
      loss = float(metrics['trained_loss'])
      run_.status.set(
        'imitating',
        f'step {i}/{cfg.imitation.steps}, loss {loss:.3f} nats',
        i / cfg.imitation.steps,
      )
      run_.events.write(
        'imitation', step=i, loss=loss, seconds=time.monotonic() - begun
      )


def _plan(run_: Run) -> dict[str, Any]:
  """What samplers and rollouts must know."""
  below, rest = buffer.cursor(run_.buffer.consumed)
  return plans.make(
    step=run_.step,
    consumed_below=below,
    consumed_rest=rest,
    done=run_.step >= run_.cfg.steps,
    sampling=run_.cfg.sampler.sampling,
    max_staleness=run_.cfg.rollout.max_staleness,
    penalty_phase=_penalty_phase(run_),
    tasks=[plans.task(run_.cfg.tasks.family, run_.cfg.tasks.kinds)],
  )


def _penalty_phase(run_: Run) -> str:
  """The alternating penalty's phase at this step: none, unconstrained or budget."""
  cfg = run_.cfg.loss.length
  if cfg.kind != 'alternating':
    return 'none'
  budget = length.in_budget_phase(run_.step, cfg.phase_steps)
  return 'budget' if budget else 'unconstrained'


def publish(run_: Run, host: dict[str, np.ndarray]) -> publisher.Published:
  """Publishes `host` as the next version, with the plan."""
  version = run_.version + 1
  published = run_.publisher.publish(version, host, step=run_.step, plan=_plan(run_))
  run_.version = version
  run_.step_of[version] = run_.step
  run_.events.write(
    'version',
    version=version,
    digest=published.digest,
    bytes=published.bytes,
    full=published.full,
    step=run_.step,
  )
  return published


def save(run_: Run) -> float:
  """Commits the state and cursors, then lets go of consumed groups. Seconds."""
  began = time.monotonic()
  below, rest = buffer.cursor(run_.buffer.consumed)
  committed = run_.checkpoints.save(
    run_.step,
    run_.state,
    {
      'below': below,
      'rest': rest,
      'dropped': dict(run_.buffer.dropped),
      'skipped': run_.skipped,
      'budgets': run_.budgets,
      'version': run_.version,
      'step_of': {str(v): s for v, s in run_.step_of.items()},
    },
  )
  if committed:
    group_store.discard(run_.store, run_.uncommitted)
    run_.uncommitted = []
  return time.monotonic() - began
