"""A rollout process: asyncio, no JAX. Draws tasks, runs groups, writes what finished.

  verify tasks -> scripted episodes -> evaluate version 0 -> groups, as the plan
  allows -> evaluate the last version

The plan comes with the weight manifests. A group's start index decides its task, so
what to issue follows from what is finished (in the store) and consumed (in the plan):
nothing else has to survive a crash. Admission keeps the number of groups issued beyond
the learner's within `rollout.ahead` batches, so staleness is bounded by not starting
work rather than by throwing it away.

Of several processes each has its own start indices, and stands in one region, whose
samplers are the only ones that it asks. Only process 0 writes scripted episodes and
evaluates; the others begin with the groups, once it says so in the store. A store that
does not answer for minutes stops nothing: episodes go on under the plan that is known,
and what they finish waits (`outbox`).
"""

import asyncio
import collections
from concurrent import futures
import contextlib
import dataclasses
import json
import pathlib
import signal
import time

from swe17 import config, types
from swe17.agent import episode as episodes_
from swe17.env.audit import difficulty
from swe17.metrics import lines, status
from swe17.rollout import admission, episodes, evaluation, outbox, process, warm
from swe17.sync import follower

_DISCOVER = 1.0  # seconds between looks at who serves
_THREADS = 24  # for calls to the store, each of which may hang while a line is cut
_BEGUN = 'rollouts/begun.json'  # process 0 has evaluated version 0
_MOMENT = 0.01  # seconds, of an episode whose group has none left
_CHEATS = 200  # transcripts in cheating/
_SPOILED = 2  # groups that infrastructure spoiled before their task is set aside


def run(cfg: config.Config, index: int) -> int:
  """Runs rollout process `index` to its end. Exit code 0: the run is finished."""
  return asyncio.run(_main(cfg, index))


async def _main(cfg: config.Config, index: int) -> int:
  loop = asyncio.get_running_loop()
  loop.set_default_executor(futures.ThreadPoolExecutor(_THREADS))
  stop = process.Stop()
  loop.add_signal_handler(signal.SIGTERM, stop.asked.set)
  main = asyncio.ensure_future(_run(cfg, index, stop))
  await ended(main, stop, cfg.rollout.drain_seconds)
  try:
    await main
  except asyncio.CancelledError:
    return 1
  return 1 if stop.asked.is_set() else 0


async def ended(main: asyncio.Future[None], stop: process.Stop, seconds: float) -> None:
  """Waits for `main`; once it is to stop it has `seconds` if it drains, else none."""
  asked = asyncio.ensure_future(stop.asked.wait())
  await asyncio.wait({main, asked}, return_when=asyncio.FIRST_COMPLETED)
  asked.cancel()
  if not main.done():
    if stop.drains:
      await asyncio.wait({main}, timeout=seconds)
    main.cancel()
    await asyncio.wait({main})


async def _run(cfg: config.Config, index: int, stop: process.Stop) -> None:
  name = 'rollout' if index == 0 else f'rollout-{index}'
  says = status.Status(cfg.run_dir, name)
  world = await episodes.open_world(cfg, lambda text: says.set('verifying tasks', text))
  async with contextlib.AsyncExitStack() as stack:
    stack.push_async_callback(world.close)
    state = await process.open_rollout(cfg, index, world, says, stack, stop)
    watch = asyncio.ensure_future(_watch_lag(state))
    stack.callback(watch.cancel)
    find = asyncio.ensure_future(_watch_samplers(state))
    stack.callback(find.cancel)
    if index > 0:
      await process.first_plan(state)
      await _until_begun(state)
      await _groups(state)
    else:
      await _whole(state)
    if not stop.asked.is_set():
      says.set('done', '', 1.0)


async def _whole(state: process.Rollout) -> None:
  """Process 0: the run from scripted episodes to the last evaluation."""
  cfg, world, store = state.cfg, state.world, state.store
  state.events.write(
    'tasks',
    train=len(world.train),
    heldout=len(world.heldout),
    set_aside=world.set_aside,
  )
  if await outbox.insist(lambda: follower.read_plan(store)) is None:
    await warm.write(cfg, world, state.says)
  await process.first_plan(state)
  await _evaluate(state, 'before')
  if cfg.rollout.processes > 1:
    await outbox.insist(lambda: store.write(_BEGUN, b'{}'))
  await _groups(state)
  if not state.stop.asked.is_set():
    await _evaluate(state, 'after')


async def _watch_lag(state: process.Rollout) -> None:
  """How late the loop wakes: what blocks it delays every episode."""
  loop = asyncio.get_running_loop()
  while True:
    due = loop.time() + 0.05
    await asyncio.sleep(0.05)
    state.lag = max(state.lag, loop.time() - due)


async def _watch_samplers(state: process.Rollout) -> None:
  """Finds samplers that were started again while others served."""
  while True:
    await asyncio.sleep(_DISCOVER)
    await state.router.discover()


# --- groups ---------------------------------------------------------------------


async def _until_begun(state: process.Rollout) -> None:
  """Waits for process 0: until version 0 is evaluated nothing may train on it."""
  while await outbox.insist(lambda: state.store.read(_BEGUN)) is None:
    state.says.set('waiting', 'for the evaluation of version 0')
    await asyncio.sleep(_DISCOVER)


async def _groups(state: process.Rollout) -> None:
  """Keeps groups running until the plan says that training is done.

  Told to stop, it begins none, and ends with those that run.
  """
  cfg, index = state.cfg, state.index
  # What an earlier process of this run finished is in the store and waits there.
  keys = await outbox.insist(lambda: state.store.list('groups/'))
  starts = [int(key.rsplit('/', 1)[1]) for key in keys]
  state.issued |= admission.own(starts, cfg, index) | state.outbox.pick_up()
  beside = admission.of_region(cfg.rollout.processes, cfg, state.region)
  at_once = max(1, state.slots // cfg.rollout.group_size // beside)
  running: set[asyncio.Task[None]] = set()
  watch = asyncio.ensure_future(process.watch_plan(state))
  state.stop.drains, asked = True, state.stop.asked
  try:
    while not admission.done(state.planned, cfg) and (running or not asked.is_set()):
      while len(running) < at_once and not asked.is_set():
        start = admission.due(state.planned, state.issued, cfg, index)
        if start is None:
          break
        state.issued.add(start)
        state.own.write('started', start=start)
        running.add(asyncio.ensure_future(_group(state, start)))
      done, running = await _finished(running)
      # A bug in any of these must not pass unseen, nor a store that is out of reach.
      for task in [*done, *([watch] if watch.done() else [])]:
        task.result()
      state.outbox.check()
      wait = f', {state.outbox.waiting} to store' if state.outbox.waiting else ''
      state.says.set(
        'rollout', f'{len(running)} groups of {cfg.rollout.group_size}{wait}'
      )
  finally:
    state.stop.drains = False
    for task in (watch, *running):
      task.cancel()
    await asyncio.gather(watch, *running, return_exceptions=True)
  await state.outbox.flush()


async def _finished(
  running: set[asyncio.Task[None]],
) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
  if not running:
    await asyncio.sleep(process.POLL)
    return set(), running
  return await asyncio.wait(
    running, timeout=process.POLL, return_when=asyncio.FIRST_COMPLETED
  )


async def _group(state: process.Rollout, start: int) -> None:
  """Runs the group of a start index; again, a few times, if it is spoiled."""
  cfg = state.cfg
  sound = [t for t in state.world.train if state.spoiled.get(t.id, 0) < _SPOILED]
  drawn = difficulty.draw_from(
    sound or state.world.train, state.estimates, cfg.tasks, cfg.seed, start
  )
  task = admission.task(drawn, cfg.seed, start)
  attempt, until = 0, time.monotonic() + cfg.rollout.group_seconds
  group = await _attempt(state, task, start, attempt, until)
  while _spoiled(group):
    reasons = sorted({e.outcome.reason for e in group.episodes})
    state.events.write(
      'warning', text=f'group {group.id} ({task.id}) spoiled: {reasons[:3]}'
    )
    if state.stop.asked.is_set():
      return  # whoever comes after this process runs it anew
    if attempt == cfg.rollout.retries or time.monotonic() >= until:
      state.spoiled[task.id] = state.spoiled.get(task.id, 0) + 1
      break
    attempt += 1
    group = await _attempt(state, task, start, attempt, until)
  _count_dead(state, group)
  lag, state.lag = state.lag, 0.0
  group = dataclasses.replace(group, loop_lag=lag)
  told = difficulty.told(group)
  state.estimates = difficulty.replayed(state.estimates, [told])
  state.own.write('finished', start=start, id=group.id, **told)
  state.outbox.put(group)
  _keep_to_read(state, group)
  _keep_cheating(state, group)


def _spoiled(group: types.Group) -> bool:
  """Whether infrastructure left too little of a group to compare."""
  return len([e for e in group.episodes if e.status != 'invalid']) < 2


def _count_dead(state: process.Rollout, group: types.Group) -> None:
  """ValueError, with the reasons, once too many groups in a row have no outcomes.

  Every task fails then, so that no attempt is of use: somebody has to look.
  """
  if not _spoiled(group):
    state.dead.clear()
    return
  reasons = collections.Counter(
    e.outcome.reason for e in group.episodes if e.status == 'invalid'
  )
  state.dead.append(reasons.most_common(1)[0][0])
  if 0 < state.cfg.rollout.dead_groups <= len(state.dead):
    often = collections.Counter(state.dead).most_common(3)
    said = '; '.join(f'{n} times: {reason}' for reason, n in often)
    raise ValueError(
      f'{len(state.dead)} groups in a row had no outcome '
      f'(rollout.dead_groups={state.cfg.rollout.dead_groups}): {said}'
    )


async def _attempt(
  state: process.Rollout, task: types.Task, start: int, attempt: int, until: float
) -> types.Group:
  """All members of a group, each until `until` at most; none is cut out of it."""
  group_id = f'{start:08d}-{state.attempt}.{attempt}'
  members = await asyncio.gather(
    *(
      _member(state, task, group_id, m, until)
      for m in range(state.cfg.rollout.group_size)
    )
  )
  return types.Group(group_id, start, task.id, task.unit, tuple(members))


async def _member(
  state: process.Rollout, task: types.Task, group_id: str, member: int, until: float
) -> types.Episode:
  episode = await state.world.episode(
    task,
    state.router,
    group_id,
    member,
    state.cfg.sampler.sampling,
    seconds=max(until - time.monotonic(), _MOMENT),
  )
  _forget(state, episode)
  return episode


def _forget(state: process.Rollout, episode: types.Episode) -> None:
  """Every segment was a session of its own; one without any may have asked too."""
  for segment in range(max(1, len(episode.segments))):
    state.router.forget(f'{episode.id}.{segment}')


def _keep_to_read(state: process.Rollout, group: types.Group) -> None:
  """Writes a few episodes of a step as text: of each batch's first groups, one each."""
  cfg = state.cfg
  if group.start % cfg.batch.groups >= cfg.rollout.keep_episodes:
    return
  folder = pathlib.Path(cfg.run_dir) / 'episodes'
  folder.mkdir(exist_ok=True)
  text = episodes_.transcript(group.episodes[0], state.world.fmt)
  (folder / f'{group.start:08d}.md').write_text(text, encoding='utf-8')


def _keep_cheating(state: process.Rollout, group: types.Group) -> None:
  """Writes every episode that lost its outcome by cheating, the first of a run."""
  cheats = [e for e in group.episodes if e.outcome.cheated]
  if not cheats:
    return
  folder = pathlib.Path(state.cfg.run_dir) / 'cheating'
  folder.mkdir(exist_ok=True)
  kept = sum(1 for _ in folder.iterdir())
  for episode in cheats[: max(0, _CHEATS - kept)]:
    text = episodes_.transcript(episode, state.world.fmt)
    (folder / f'{episode.id}.md').write_text(text, encoding='utf-8')
  reasons = sorted({e.outcome.reason for e in cheats})
  state.events.write('cheating', id=group.id, episodes=len(cheats), reasons=reasons)


# --- evaluation -----------------------------------------------------------------


async def _evaluate(state: process.Rollout, label: str) -> None:
  """Evaluates the plan's version on the held-out tasks, unless a record is there.

  An `after` of an earlier version does not count: the run was resumed for more steps.
  """
  assert state.plan is not None
  cfg, version = state.cfg, state.plan.version
  folder = pathlib.Path(cfg.run_dir) / 'evals'
  folder.mkdir(exist_ok=True)
  path = folder / f'{label}.json'
  old = json.loads(path.read_bytes()) if path.exists() else None
  if old is not None and (label == 'before' or old['version'] == version):
    return

  async def generate(request: types.GenerateRequest) -> types.GenerateResult:
    return await state.router(dataclasses.replace(request, min_version=version))

  async def one(task: types.Task, group_id: str, member: int) -> types.Episode:
    episode = await state.world.episode(
      task, generate, group_id, member, cfg.sampler.sampling, min_version=version
    )
    _forget(state, episode)
    return episode

  began = time.monotonic()
  found = await evaluation.evaluate(
    state.world.heldout,
    one,
    label='heldout',
    samples=cfg.rollout.eval_samples,
    at_once=state.slots,
    progress=lambda i, n: state.says.set(
      'evaluating', f'{i}/{n} held-out episodes at version {version}', i / n
    ),
  )
  record = evaluation.record(
    found,
    version=version,
    split='heldout',
    samples=cfg.rollout.eval_samples,
    seed=cfg.seed,
    seconds=time.monotonic() - began,
  )
  lines.replace(str(path), json.dumps(record, indent=1).encode())
  state.events.write('evaluation', **evaluation.in_short(record))
