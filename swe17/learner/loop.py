"""The learner's process: drain groups, step, publish, checkpoint; nothing else.

  imitate -> version 0 -> [take a batch -> update -> publish -> record]*

The store is all it talks to. A version is published every `sync.publish_every` steps
with the plan: what samplers and rollouts must know. SIGTERM ends it between two steps,
with a checkpoint. Of several learner processes this is process 0, and the others do
what it says (learner/jobs.py); a SIGTERM to any of them is one to all.
"""

from collections.abc import Sequence
import signal
import sys
import threading
import time
from typing import Any

import jax
import numpy as np

from swe17 import config
from swe17.learner import batching, buffer, optimizer, packing, process, summary
from swe17.learner import state as st
from swe17.learner import team as teams
from swe17.metrics import alarms, records
from swe17.store import groups as group_store
from swe17.sync import publisher

_SETTLE = 2.0  # s in which a process that is gone is noticed
DEAD_BATCHES = 5  # batches in a row without any signal that stop the run


class Dead(RuntimeError):
  """Training cannot go on; the sentence says why."""


def run(cfg: config.Config, resume: bool, index: int = 0, coordinator: str = '') -> int:
  """Runs the learner role to its end. Exit code 0 done, 1 stopped, 2 cannot go on.

  Args:
    cfg: all settings.
    resume: go on from the newest checkpoint.
    index: which of the learner's processes this is.
    coordinator: host:port of process 0, if there are several.
  """
  stop = threading.Event()
  team = teams.join(cfg.mesh, index, coordinator, stop)
  signal.signal(signal.SIGTERM, lambda *_: stop.set())
  try:
    code, text = _lead(cfg, team, resume, stop) if index == 0 else _follow(cfg, team)
    team.end(code, text)
  except Exception as e:
    # A collective fails, by whatever exception, when another process is gone.
    team.settle(_SETTLE)
    team.fail(f'{type(e).__name__}: {e}')
    raise
  if text:
    print(f'error: {text}', file=sys.stderr)
  return code


def _follow(cfg: config.Config, team: teams.Team) -> tuple[int, str]:
  """What process 0 says, to its end."""
  job = process.open_jobs(cfg, team)
  try:
    return job.follow()
  finally:
    job.close()


def _lead(
  cfg: config.Config, team: teams.Team, resume: bool, stop: threading.Event
) -> tuple[int, str]:
  """The whole run: its exit code, and why if it cannot go on."""
  run_ = process.open_run(cfg, team, stop)
  try:
    process.begin(run_, resume)
    return (1 if stop.is_set() else _train(run_)), ''
  except (Dead, publisher.PublishConflict) as e:
    run_.events.write('alarm', text=str(e))
    return 2, str(e)
  finally:
    run_.jobs.close()


def _train(run_: process.Run) -> int:
  cfg = run_.cfg
  resumed = run_.step if run_.resumed else None
  if run_.resumed:
    # Versions of the steps that are lost may be out: samplers go on from these weights.
    process.publish(run_, run_.jobs.to_host())
  if run_.step < cfg.steps:
    run_.jobs.compile(_fill(run_, [], 1))  # while the first groups are sampled
  began = time.monotonic()
  with records.Writer(cfg.run_dir, resume_step=resumed) as writer:
    while run_.step < cfg.steps:
      row = _one_step(run_, began)
      if row is None:
        break
      writer.write(row)
      for text in alarms.alarms(
        row, records.read(cfg.run_dir)[:-1], alarms.limits(cfg)
      ):
        run_.events.write('alarm', text=text, step=row['step'])
  process.save(run_)
  if run_.stop.is_set() and run_.step < cfg.steps:
    return 1
  run_.status.set('done', f'{run_.step} steps', 1.0)
  return 0


def _take(run_: process.Run) -> buffer.Taken | None:
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


def _one_step(run_: process.Run, began: float) -> dict[str, Any] | None:
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
    if taken.dropped:
      starts = {str(group.start): reason for group, reason in taken.dropped}
      run_.events.write('dropped', starts=starts)
    consumed.sort(key=lambda group: group.start)  # a late one may have started earlier
    assembled = batching.assemble(
      consumed, cfg.loss, step_of=run_.step_of, budgets=run_.budgets
    )
    if assembled.items:
      break
    _no_signal(run_, assembled)
  waited = time.monotonic() - start
  run_.dead_batches, run_.budgets = 0, dict(assembled.budgets)
  run_.status.set(
    'training',
    f'step {run_.step + 1}/{cfg.steps}, updating on {len(assembled.items)} episodes',
    run_.step / cfg.steps,
  )
  values = summary.of_groups(consumed, ages, cfg.sampler.top_k)
  batch = _fill(run_, assembled.items, assembled.denominator_episodes)
  updating = time.monotonic()
  metrics = run_.jobs.update(batch)
  due = run_.step % cfg.sync.publish_every == 0 or run_.step >= cfg.steps
  # The published copy is fetched to the host before the state is donated again, and
  # with it the metrics: at one version a step both wait for the same computation.
  host = run_.jobs.to_host() if due else None
  metrics = jax.device_get(metrics)
  updated = time.monotonic() - updating
  run_.skipped += int(metrics['skipped_steps'])
  if not np.isfinite(metrics['grad_norm']) and cfg.optim.on_nonfinite == 'stop':
    raise Dead(
      f'step {run_.step}: the gradient is not finite (optim.on_nonfinite=stop)'
    )
  values |= _publish_values(run_, host)
  saved = process.save(run_) if run_.step % cfg.checkpoint.every == 0 else 0.0
  seconds = time.monotonic() - start
  sampled = values['token_count']
  return records.row(
    **values,
    **_of_update(metrics, values, run_),
    **assembled.values,
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


def _no_signal(run_: process.Run, assembled: batching.Assembled) -> None:
  """Counts a batch that cannot train; too many in a row stop the run, with reasons.

  A version with the same weights carries the cursor, so that rollouts go on.
  """
  run_.dead_batches += 1
  process.publish(run_, run_.jobs.to_host())
  if run_.dead_batches >= DEAD_BATCHES:
    reasons = dict(run_.buffer.dropped.most_common(3))
    raise Dead(
      f'{run_.dead_batches} batches in a row gave no training signal: '
      f'{len(assembled.no_signal)} groups without a difference in outcome, '
      f'{len(assembled.too_small)} with fewer than 2 valid episodes; '
      f'refused and dropped so far: {reasons}. Look at episodes/ and logs/'
    )


def _fill(run_: process.Run, items: Sequence[batching.Item], episodes: int) -> st.Batch:
  """The batch of `items`, on the host; `episodes` of them count in the denominator."""
  cfg = run_.cfg
  segments = [item.segment for item in items]
  rows = len(packing.layout(segments, cfg.batch, cfg.model.routes)[0])
  # A static size for the usual batch; a larger one (several batches without signal
  # before it) costs one more compilation.
  usual = -(-cfg.batch.groups * cfg.rollout.group_size // cfg.batch.micro_rows)
  return batching.fill(
    items,
    micro=max(usual, -(-rows // cfg.batch.micro_rows)),
    cfg=cfg.batch,
    K=cfg.sampler.top_k if cfg.sampler.sampling.truncates else 1,
    denominator=batching.denominator(cfg.loss, episodes, cfg.agent.max_context),
    # With several steps a version, the learner may be ahead of the newest one.
    version=run_.version if run_.step_of[run_.version] == run_.step else -1,
    routes=cfg.model.routes,
  )


def _publish_values(
  run_: process.Run, host: dict[str, np.ndarray] | None
) -> dict[str, Any]:
  """Publishes `host` if a version is due, and what that came to."""
  if host is None:
    return {'version': run_.version, 'publish_seconds': 0.0}
  published = process.publish(run_, host)
  return {
    'version': run_.version,
    'publish_seconds': published.seconds,
    'delta_bytes': published.bytes,
    'delta_share': published.bytes / published.raw_bytes,
    'delta_changed_share': published.changed_share,
  }


def _of_update(
  metrics: dict[str, np.ndarray], values: dict[str, Any], run_: process.Run
) -> dict[str, Any]:
  """The update's metrics under their recorded names; a mean over nothing is None."""
  got = {k: float(v) if np.isfinite(v) else None for k, v in metrics.items()}
  got['skipped_steps'] = run_.skipped
  got['lr'] = float(np.asarray(optimizer.schedule(run_.cfg.optim)(run_.step - 1)))
  return {k: v for k, v in got.items() if k in records.NAMES and k not in values}
