"""What is alive in the learner's process, how it starts, and what it commits.

open_jobs: the state, on each of the learner's processes
open_run -> begin: a checkpoint, or the warm start and version 0
publish: one more weight version, with the plan for samplers and rollouts
save: a checkpoint, after which consumed groups are let go

All but the first is for process 0, which decides (learner/jobs.py).
"""

import dataclasses
import os
import threading
import time
from typing import Any
import uuid

import jax
import numpy as np

from swe17 import config
from swe17.agent import formats
from swe17.learner import buffer, imitation, jobs, mesh
from swe17.learner import state as st
from swe17.learner import team as teams
from swe17.metrics import records, status
from swe17.model import load
from swe17.model import params as p
from swe17.ops import length
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import plan as plans
from swe17.sync import publisher

_SAID = 10.0  # seconds after which slow steps are told one by one


@dataclasses.dataclass
class Run:
  """Everything alive in this process."""

  cfg: config.Config
  jobs: jobs.Jobs
  store: kv.Store
  buffer: buffer.Buffer
  publisher: publisher.Publisher
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

  @property
  def state(self) -> st.State:
    return self.jobs.state

  @property
  def step(self) -> int:
    return int(self.state.step)


def open_jobs(cfg: config.Config, team: teams.Team) -> jobs.Jobs:
  """The state that training begins with; a call for all of the learner's processes."""
  devices = mesh.open(cfg, formats.load(cfg.model.source).vocab_size)
  return jobs.Jobs(cfg, team, devices, _values(cfg, devices))


def open_run(cfg: config.Config, team: teams.Team, stop: threading.Event) -> Run:
  """The store, the checkpoints and a state that `begin` fills."""
  store = kv.open(cfg.store)
  return Run(
    cfg=cfg,
    jobs=open_jobs(cfg, team),
    store=store,
    buffer=buffer.Buffer(
      store,
      max_staleness=cfg.rollout.max_staleness,
      vocab=formats.load(cfg.model.source).vocab_size,
      truncates=cfg.sampler.sampling.truncates,
      top_k=cfg.sampler.top_k,
      routes=cfg.model.routes,
    ),
    publisher=publisher.Publisher(store, cfg.sync, attempt=uuid.uuid4().hex[:12]),
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


def begin(run_: Run, resume: bool) -> None:
  """Brings the state to where training starts: a checkpoint, or the warm start."""
  run_.status.set('starting', f'{p.count(run_.state.params):,} parameters')
  newest = publisher.latest(run_.store) if resume else None
  run_.version = -1 if newest is None else newest
  if newest is not None:
    run_.publisher.restore(run_.cfg.sync.restore_seconds)
  run_.step_of = dict.fromkeys(range(run_.version + 1), 0)
  saved = run_.jobs.checkpoints.latest() if resume else None
  if saved is not None:
    extra = run_.jobs.restore(saved)
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
      run_.jobs.load_reference()
    run_.resumed = True
    run_.events.write('resume', text=f'learner resumed at step {run_.step}')
    return
  _imitate(run_)
  if not run_.stop.is_set():
    run_.jobs.begin_policy()
    if run_.cfg.loss.kl_weight:
      run_.jobs.keep_reference()
    publish(run_, run_.jobs.to_host())
    save(run_)


def _imitate(run_: Run) -> None:
  cfg = run_.cfg
  episodes = imitation.Episodes(kv.open(cfg.store.rstrip('/') + '/imitation'), cfg.seed)
  run_.status.set('imitating', 'waiting for scripted episodes')
  episodes.wait(min(cfg.imitation.episodes, 500), run_.stop.is_set)
  if run_.stop.is_set():
    return
  run_.status.set('imitating', f'step 1/{cfg.imitation.steps} (compiling)')
  begun = said = time.monotonic()
  ahead: tuple[int, Any] | None = None  # the step that runs while a batch is made

  def tell(step: int, metrics: Any) -> None:
    nonlocal said
    loss = float(metrics['trained_loss'])  # waits for the step to end
    slow = time.monotonic() - said > _SAID
    if step % 10 == 0 or step == cfg.imitation.steps or slow:
      said = time.monotonic()
      episodes.wait(0, run_.stop.is_set)  # takes in what has arrived since
      run_.status.set(
        'imitating',
        f'step {step}/{cfg.imitation.steps}, loss {loss:.3f} nats',
        step / cfg.imitation.steps,
      )
      run_.events.write('imitation', step=step, loss=loss, seconds=said - begun)

  for i, batch in enumerate(imitation.batches(episodes, cfg), 1):
    metrics = run_.jobs.imitate(batch)
    if ahead:
      tell(*ahead)
    if run_.stop.is_set():
      return
    ahead = i, metrics
  if ahead:
    tell(*ahead)


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
  committed = run_.jobs.save(
    run_.step,
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
