"""The learner's process: drain groups, step, publish, checkpoint; nothing else.

  imitate -> version 0 -> [take a batch -> update -> publish -> record]*

The store is all it talks to. A version is published every `sync.publish_every` steps
with the plan: what samplers and rollouts must know. SIGTERM ends it between two steps,
with a checkpoint.
"""

from collections.abc import Callable
import dataclasses
import functools
import logging
import os
import signal
import sys
import threading
import time
from typing import Any
import uuid

import jax
import numpy as np
import optax

from swe17 import config
from swe17.agent import tokenizer
from swe17.learner import (
  batching,
  buffer,
  checkpoint,
  imitation,
  optimizer,
  summary,
  update,
)
from swe17.learner import state as st
from swe17.metrics import alarms, records, status
from swe17.model import params as p
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import apply, publisher

_log = logging.getLogger(__name__)
# (state, batch) -> (state, metrics), jitted
Step = Callable[[st.State, st.Batch], tuple[st.State, dict[str, jax.Array]]]
DEAD_BATCHES = 5  # batches in a row without any signal that stop the run


class Dead(RuntimeError):
  """Training cannot go on; the sentence says why."""


@dataclasses.dataclass
class Run:
  """Everything alive in this process."""

  cfg: config.Config
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
  resumed: bool = False

  @property
  def step(self) -> int:
    return int(self.state.step)


def run(cfg: config.Config, resume: bool) -> int:
  """Runs the learner role to its end. Exit code 0 done, 1 stopped, 2 cannot go on."""
  stop = threading.Event()
  signal.signal(signal.SIGTERM, lambda *_: stop.set())
  run_ = _open(cfg, stop)
  try:
    _begin(run_, resume)
    if stop.is_set():
      return 1
    return _train(run_)
  except Dead as e:
    run_.events.write('alarm', text=str(e))
    print(f'error: {e}', file=sys.stderr)
    return 2
  finally:
    run_.checkpoints.close()


def _open(cfg: config.Config, stop: threading.Event) -> Run:
  store = kv.open(cfg.store)
  vocab = tokenizer.load().vocab_size
  shapes = p.abstract(cfg.model, vocab)
  values = p.init(shapes, jax.random.key(cfg.seed))
  tx = optimizer.make(cfg.optim, imitation.schedule(cfg.imitation))
  return Run(
    cfg=cfg,
    store=store,
    state=st.init(values, tx),
    buffer=buffer.Buffer(
      store,
      max_staleness=cfg.rollout.max_staleness,
      vocab=vocab,
      truncates=cfg.sampler.sampling.truncates,
      top_k=cfg.sampler.top_k,
    ),
    publisher=publisher.Publisher(store, cfg.sync, attempt=uuid.uuid4().hex[:12]),
    checkpoints=checkpoint.Checkpoints(cfg.run_dir, cfg.checkpoint),
    status=status.Status(cfg.run_dir, 'learner'),
    events=records.EventLog(os.path.join(cfg.run_dir, 'events.jsonl')),
    stop=stop,
  )


def _optimiser(cfg: config.Config) -> optax.GradientTransformationExtraArgs:
  return optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))


def _begin(run_: Run, resume: bool) -> None:
  """Brings the state to where training starts: a checkpoint, or the warm start."""
  run_.status.set('starting', f'{p.count(run_.state.params):,} parameters')
  tx = _optimiser(run_.cfg)
  newest = publisher.latest(run_.store) if resume else None
  run_.version = -1 if newest is None else newest
  run_.step_of = dict.fromkeys(range(run_.version + 1), 0)
  if resume and run_.checkpoints.latest() is not None:
    like = st.init(run_.state.params, tx)
    run_.state, extra = run_.checkpoints.restore(like)
    run_.buffer.consumed = buffer.uncursor(extra['below'], extra['rest'])
    # What was set aside since the checkpoint is in the store no longer.
    run_.buffer.consumed |= group_store.quarantined(run_.store)
    run_.buffer.dropped.update(extra['dropped'])
    run_.skipped = extra['skipped']
    run_.step_of = {int(v): s for v, s in extra['step_of'].items()}
    # Versions after the checkpoint are of steps that are lost: they count as its own.
    for version in range(run_.version + 1):
      run_.step_of.setdefault(version, run_.step)
    run_.resumed = True
    run_.events.write('resume', text=f'learner resumed at step {run_.step}')
    return
  _imitate(run_)
  if not run_.stop.is_set():
    # The optimiser starts afresh: momentum of the imitation is not the policy's.
    run_.state = st.init(run_.state.params, tx)
    _publish(run_, apply.to_host(run_.state.params))
    _checkpoint(run_)


def _imitate(run_: Run) -> None:
  cfg = run_.cfg
  episodes = imitation.Episodes(kv.open(cfg.store.rstrip('/') + '/imitation'), cfg.seed)
  run_.status.set('imitating', 'waiting for scripted episodes')
  episodes.wait(min(cfg.imitation.episodes, 500), run_.stop.is_set)
  if run_.stop.is_set():
    return
  begun = time.monotonic()
  for i, (state, metrics) in enumerate(imitation.run(run_.state, episodes, cfg), 1):
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
  return {
    'step': run_.step,
    'consumed_below': below,
    'consumed_rest': rest,
    'sampling': dataclasses.asdict(run_.cfg.sampler.sampling),
    'max_staleness': run_.cfg.rollout.max_staleness,
    'done': run_.step >= run_.cfg.steps,
  }


def _publish(run_: Run, host: dict[str, np.ndarray]) -> publisher.Published:
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


def _checkpoint(run_: Run) -> float:
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
      'version': run_.version,
      'step_of': {str(v): s for v, s in run_.step_of.items()},
    },
  )
  if committed:
    group_store.discard(run_.store, run_.uncommitted)
    run_.uncommitted = []
  return time.monotonic() - began


def _train(run_: Run) -> int:
  cfg = run_.cfg
  tx = _optimiser(cfg)
  step_fn = jax.jit(
    functools.partial(update.update, model=cfg.model, loss=cfg.loss, tx=tx),
    donate_argnums=0,
  )
  resumed = run_.step if run_.resumed else None
  if run_.resumed:
    # The base of the next delta is gone with the old process: publish a full snapshot.
    _publish(run_, apply.to_host(run_.state.params))
  began = time.monotonic()
  with records.Writer(cfg.run_dir, resume_step=resumed) as writer:
    while run_.step < cfg.steps:
      row = _one_step(run_, step_fn, began)
      if row is None:
        break
      writer.write(row)
      for text in alarms.alarms(
        row, records.read(cfg.run_dir)[:-1], alarms.limits(cfg)
      ):
        run_.events.write('alarm', text=text, step=row['step'])
  _checkpoint(run_)
  if run_.stop.is_set() and run_.step < cfg.steps:
    return 1
  run_.status.set('done', f'{run_.step} steps', 1.0)
  return 0


def _take(run_: Run) -> buffer.Taken | None:
  """Waits for a batch of groups; None when told to stop."""
  while not run_.stop.is_set():
    waiting = run_.buffer.poll(run_.version)
    taken = run_.buffer.take(
      run_.cfg.batch.groups, step=run_.step, step_of=run_.step_of
    )
    if taken is not None:
      return taken
    run_.status.set(
      'training',
      f'step {run_.step}/{run_.cfg.steps}, waiting: '
      f'{waiting} of {run_.cfg.batch.groups} groups',
      run_.step / run_.cfg.steps,
    )
    run_.stop.wait(0.05)
  return None


def _one_step(run_: Run, step_fn: Step, began: float) -> dict[str, Any] | None:
  """One batch with signal, one update, one version, one row. None: told to stop."""
  cfg, start = run_.cfg, time.monotonic()
  consumed, ages, dropped = [], [], 0
  while True:
    taken = _take(run_)
    if taken is None:
      return None
    run_.uncommitted += [group_store.key_of(g.start) for g in taken.groups]
    run_.uncommitted += [group_store.key_of(g.start) for g, _ in taken.dropped]
    consumed, ages = consumed + taken.groups, ages + taken.staleness
    dropped += len(taken.dropped)
    assembled = batching.assemble(consumed, cfg.loss)
    if assembled.items:
      break
    _no_signal(run_, assembled)
  waited = time.monotonic() - start
  run_.dead_batches = 0
  run_.status.set(
    'training',
    f'step {run_.step + 1}/{cfg.steps}, updating on {len(assembled.items)} episodes',
    run_.step / cfg.steps,
  )
  values = summary.of_groups(consumed, ages, cfg.sampler.top_k)
  batch = _batch(run_, assembled)
  updating = time.monotonic()
  run_.state, metrics = step_fn(run_.state, batch)
  # The published copy is fetched to the host before the state is donated again, and
  # with it the metrics: at one version a step both wait for the same computation.
  host, metrics = apply.to_host(run_.state.params), jax.device_get(metrics)
  updated = time.monotonic() - updating
  run_.skipped += int(metrics['skipped_steps'])
  if not np.isfinite(metrics['grad_norm']) and cfg.optim.on_nonfinite == 'stop':
    raise Dead(
      f'step {run_.step}: the gradient is not finite (optim.on_nonfinite=stop)'
    )
  values |= _publish_values(run_, host)
  saved = _checkpoint(run_) if run_.step % cfg.checkpoint.every == 0 else 0.0
  seconds = time.monotonic() - start
  sampled = values['token_count']
  return records.row(
    **values,
    **_of_update(metrics, values, run_),
    step=run_.step,
    time=time.monotonic() - began,
    groups_trained=len(assembled.trained),
    groups_no_signal=len(assembled.no_signal),
    groups_dropped=dropped + len(assembled.too_small),
    step_seconds=seconds,
    wait_seconds=waited,
    checkpoint_seconds=saved,
    tokens_per_second=sampled / seconds,
    learner_tokens_per_second=float(metrics['trained_tokens']) / updated,
  )


def _no_signal(run_: Run, assembled: batching.Assembled) -> None:
  """Counts a batch that cannot train; too many in a row stop the run, with reasons.

  A version with the same weights carries the cursor, so that rollouts go on.
  """
  run_.dead_batches += 1
  _publish(run_, apply.to_host(run_.state.params))
  if run_.dead_batches >= DEAD_BATCHES:
    reasons = dict(run_.buffer.dropped.most_common(3))
    raise Dead(
      f'{run_.dead_batches} batches in a row gave no training signal: '
      f'{len(assembled.no_signal)} groups without a difference in outcome, '
      f'{len(assembled.too_small)} with fewer than 2 valid episodes; '
      f'refused and dropped so far: {reasons}. Look at episodes/ and logs/'
    )


def _batch(run_: Run, assembled: batching.Assembled) -> st.Batch:
  cfg = run_.cfg
  sizes = [item.segment.token_T.size - 1 for item in assembled.items]
  rows = len(batching.pack(sizes, cfg.batch.row_length))
  # A static size for the usual batch; a larger one (several batches without signal
  # before it) costs one more compilation.
  usual = -(-cfg.batch.groups * cfg.rollout.group_size // cfg.batch.micro_rows)
  return batching.fill(
    assembled.items,
    micro=max(usual, -(-rows // cfg.batch.micro_rows)),
    cfg=cfg.batch,
    K=cfg.sampler.top_k if cfg.sampler.sampling.truncates else 1,
    denominator=cfg.agent.max_context * assembled.denominator_episodes,
    # With several steps a version, the learner may be ahead of the newest one.
    version=run_.version if run_.step_of[run_.version] == run_.step else -1,
  )


def _publish_values(run_: Run, host: dict[str, np.ndarray]) -> dict[str, Any]:
  """Publishes if a version is due, and what that came to."""
  due = run_.step % run_.cfg.sync.publish_every == 0 or run_.step >= run_.cfg.steps
  if not due:
    return {'version': run_.version, 'publish_seconds': 0.0}
  published = _publish(run_, host)
  return {
    'version': run_.version,
    'publish_seconds': published.seconds,
    'delta_bytes': published.bytes,
    'delta_share': published.bytes / published.raw_bytes,
    'delta_changed_share': published.changed_share,
  }


def _of_update(
  metrics: dict[str, np.ndarray], values: dict[str, Any], run_: Run
) -> dict[str, Any]:
  """The update's metrics under their recorded names; a mean over nothing is None."""
  got = {k: float(v) if np.isfinite(v) else None for k, v in metrics.items()}
  got['skipped_steps'] = run_.skipped
  got['lr'] = float(np.asarray(optimizer.schedule(run_.cfg.optim)(run_.step - 1)))
  got['kept_mass_count'] = got['trained_tokens']
  return {k: v for k, v in got.items() if k in records.NAMES and k not in values}
