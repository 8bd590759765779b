"""The rollout process: asyncio, no JAX. Draws tasks, runs groups, writes what finished.

  verify tasks -> scripted episodes -> evaluate version 0 -> groups, as the plan
  allows -> evaluate the last version

The plan comes with the weight manifests. A group's start index decides its task, so
what to issue follows from what is finished (in the store) and consumed (in the plan):
nothing else has to survive a crash. Admission keeps the number of groups issued beyond
the learner's within `rollout.ahead` batches, so staleness is bounded by not starting
work rather than by throwing it away.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import random
import signal
import time
import uuid

from swe17 import config, types
from swe17.agent import episode as episodes_
from swe17.agent import scripted
from swe17.env import library
from swe17.metrics import lines, records, status
from swe17.rollout import episodes, evaluation, router
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import follower, manifest

_log = logging.getLogger(__name__)
_POLL = 0.1  # seconds between looks at the plan
_LIST_AFTER = 20  # looks at the next manifest before all are listed
_DISCOVER = 1.0  # seconds between looks at who serves
_SPOILED = 2  # groups that infrastructure spoiled before their task is set aside


@dataclasses.dataclass
class Rollout:
  """Everything alive in this process."""

  cfg: config.Config
  store: kv.Store
  world: episodes.World
  router: router.Router
  says: status.Status
  events: records.EventLog
  attempt: str
  plan: manifest.Manifest | None = None
  issued: set[int] = dataclasses.field(default_factory=set)
  spoiled: dict[str, int] = dataclasses.field(default_factory=dict)
  misses: int = 0  # looks at the plan since it last moved
  lag: float = 0.0  # seconds, longest stall since a group last took it


def run(cfg: config.Config) -> int:
  """Runs the rollout role to its end. Exit code 0: the run is finished."""
  return asyncio.run(_main(cfg))


async def _main(cfg: config.Config) -> int:
  loop = asyncio.get_running_loop()
  main = asyncio.ensure_future(_run(cfg))
  loop.add_signal_handler(signal.SIGTERM, main.cancel)
  try:
    await main
  except asyncio.CancelledError:
    return 1
  return 0


async def _run(cfg: config.Config) -> None:
  says = status.Status(cfg.run_dir, 'rollout')
  world = await episodes.open_world(cfg, lambda text: says.set('verifying tasks', text))
  store = kv.open(cfg.store)
  async with contextlib.AsyncExitStack() as stack:
    stack.push_async_callback(world.close)
    route = router.Router(store, seconds=cfg.agent.episode_seconds)
    await route.open()
    stack.push_async_callback(route.close)
    events = records.EventLog(os.path.join(cfg.run_dir, 'events.jsonl'))
    state = Rollout(cfg, store, world, route, says, events, uuid.uuid4().hex[:8])
    watch = asyncio.ensure_future(_watch_lag(state))
    stack.callback(watch.cancel)
    find = asyncio.ensure_future(_watch_samplers(state))
    stack.callback(find.cancel)
    events.write(
      'tasks',
      train=len(world.train),
      heldout=len(world.heldout),
      set_aside=world.set_aside,
    )
    if follower.read_plan(store) is None:
      await _scripted(state)
    await _first_plan(state)
    await _evaluate(state, 'before')
    await _groups(state)
    await _evaluate(state, 'after')
    says.set('done', '', 1.0)


async def _watch_lag(state: Rollout) -> None:
  """How late the loop wakes: what blocks it delays every episode."""
  loop = asyncio.get_running_loop()
  while True:
    due = loop.time() + 0.05
    await asyncio.sleep(0.05)
    state.lag = max(state.lag, loop.time() - due)


async def _watch_samplers(state: Rollout) -> None:
  """Finds samplers that were started again while others served."""
  while True:
    await asyncio.sleep(_DISCOVER)
    await state.router.discover()


# --- scripted episodes ----------------------------------------------------------


async def _scripted(state: Rollout) -> None:
  """Writes scripted episodes for the warm start, as groups under imitation/."""
  cfg, world = state.cfg, state.world
  store = kv.open(cfg.store.rstrip('/') + '/imitation')
  have = {int(key.rsplit('/', 1)[1]) for key in store.list('groups/')}
  size, total = cfg.rollout.group_size, cfg.imitation.episodes
  want = [start for start in range(-(-total // size)) if start not in have]
  practice: list[types.Task] = []
  if want and cfg.imitation.practice:
    practice = await asyncio.to_thread(library.practice, world.heldout)

  async def one(index: int) -> types.Episode:
    rng = random.Random(f'{cfg.seed}/scripted/{index}')
    practises = rng.random() < cfg.imitation.practice
    task = _task(practice if practises else world.train, cfg.seed, index)
    style = scripted.PRACTICE if practises else scripted.CLUMSY
    agent = scripted.Scripted(world.fmt, rng, style)
    episode = await world.episode(task, agent, 'scripted', index, types.Sampling())
    if not practises:
      return episode
    # However it ended, nothing says whether it was good.
    none = types.Outcome(None, 'a function to practise on')
    return dataclasses.replace(episode, status='invalid', outcome=none)

  for i, start in enumerate(want):
    # Not a group of one task: a record that holds several episodes.
    members = await asyncio.gather(*(one(start * size + m) for m in range(size)))
    group = types.Group(f'scripted-{start}', start, 'scripted', '', tuple(members))
    await asyncio.to_thread(group_store.append, store, group)
    state.says.set(
      'scripted episodes', f'{(i + 1) * size}/{len(want) * size}', (i + 1) / len(want)
    )


# --- groups ---------------------------------------------------------------------


def _task(tasks: list[types.Task], seed: int, start: int) -> types.Task:
  """The task of a start index: seeded epochs, each a permutation of all tasks."""
  epoch, at = divmod(start, len(tasks))
  order = list(range(len(tasks)))
  random.Random(f'{seed}/{epoch}').shuffle(order)
  return tasks[order[at]]


async def _first_plan(state: Rollout) -> None:
  """Waits for a weight version and a sampler that serves it."""
  while state.plan is None:
    state.plan = await asyncio.to_thread(follower.read_plan, state.store)
    if state.plan is None:
      state.says.set('waiting', 'for weight version 0')
      await asyncio.sleep(_POLL)
  while await state.router.discover() < state.cfg.sampler.processes:
    state.says.set('waiting', 'for samplers')
    await asyncio.sleep(_POLL)


async def _next_plan(state: Rollout) -> None:
  """Takes in manifests that are newer than the plan held.

  Looks for the next key; after some misses at the newest of all, since the next one may
  have been damaged or collected meanwhile.
  """
  assert state.plan is not None
  state.misses += 1
  wanted = None if state.misses % _LIST_AFTER == 0 else state.plan.version + 1
  try:
    newer = await asyncio.to_thread(follower.read_plan, state.store, wanted)
  except (ValueError, kv.StoreError) as e:
    _log.warning('the plan stays at version %d: %s', state.plan.version, e)
    return
  if newer is not None and newer.version > state.plan.version:
    state.plan, state.misses = newer, 0


def _due(state: Rollout) -> int | None:
  """The next start index to issue, or None while the learner is far enough ahead."""
  assert state.plan is not None
  below = state.plan.plan['consumed_below']
  consumed = set(state.plan.plan['consumed_rest'])
  done = len([s for s in state.issued if s < below or s in consumed])
  outstanding = len(state.issued) - done
  if outstanding >= state.cfg.rollout.ahead * state.cfg.batch.groups:
    return None
  start = below
  while start in state.issued or start in consumed:
    start += 1
  return start


def _done(state: Rollout) -> bool:
  """Whether the learner has taken all steps that this start of the run asks for.

  A run that is resumed for more steps begins with a plan that was the last one once.
  """
  assert state.plan is not None
  return state.plan.plan['done'] and state.plan.plan['step'] >= state.cfg.steps


async def _groups(state: Rollout) -> None:
  """Keeps groups running until the plan says that training is done."""
  cfg = state.cfg
  # What an earlier process of this run finished is in the store and waits there.
  keys = await asyncio.to_thread(state.store.list, 'groups/')
  state.issued |= {int(key.rsplit('/', 1)[1]) for key in keys}
  at_once = max(1, cfg.sampler.processes * cfg.sampler.slots // cfg.rollout.group_size)
  running: set[asyncio.Task[None]] = set()
  assert state.plan is not None
  try:
    while not _done(state):
      await _next_plan(state)
      while len(running) < at_once and (start := _due(state)) is not None:
        state.issued.add(start)
        running.add(asyncio.ensure_future(_group(state, start)))
      done, running = await _finished(running)
      for task in done:
        task.result()  # a bug in a group must not pass unseen
      state.says.set('rollout', f'{len(running)} groups of {cfg.rollout.group_size}')
  finally:
    for task in running:
      task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _finished(
  running: set[asyncio.Task[None]],
) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
  if not running:
    await asyncio.sleep(_POLL)
    return set(), running
  return await asyncio.wait(running, timeout=_POLL, return_when=asyncio.FIRST_COMPLETED)


async def _group(state: Rollout, start: int) -> None:
  """Runs the group of a start index; again, a few times, if it is spoiled."""
  cfg = state.cfg
  sound = [t for t in state.world.train if state.spoiled.get(t.id, 0) < _SPOILED]
  task = _task(sound or state.world.train, cfg.seed, start)
  attempt = 0
  group = await _attempt(state, task, start, attempt)
  while len([e for e in group.episodes if e.status != 'invalid']) < 2:
    reasons = sorted({e.outcome.reason for e in group.episodes})
    state.events.write(
      'warning', text=f'group {group.id} ({task.id}) spoiled: {reasons[:3]}'
    )
    if attempt == cfg.rollout.retries:
      state.spoiled[task.id] = state.spoiled.get(task.id, 0) + 1
      break
    attempt += 1
    group = await _attempt(state, task, start, attempt)
  lag, state.lag = state.lag, 0.0
  group = dataclasses.replace(group, loop_lag=lag)
  await asyncio.to_thread(group_store.append, state.store, group)
  _keep_to_read(state, group)


async def _attempt(
  state: Rollout, task: types.Task, start: int, attempt: int
) -> types.Group:
  group_id = f'{start:08d}-{state.attempt}.{attempt}'
  members = await asyncio.gather(
    *(_member(state, task, group_id, m) for m in range(state.cfg.rollout.group_size))
  )
  return types.Group(group_id, start, task.id, task.unit, tuple(members))


async def _member(
  state: Rollout, task: types.Task, group_id: str, member: int
) -> types.Episode:
  episode = await state.world.episode(
    task, state.router, group_id, member, state.cfg.sampler.sampling
  )
  _forget(state, episode)
  return episode


def _forget(state: Rollout, episode: types.Episode) -> None:
  """Every segment was a session of its own; one without any may have asked too."""
  for segment in range(max(1, len(episode.segments))):
    state.router.forget(f'{episode.id}.{segment}')


def _keep_to_read(state: Rollout, group: types.Group) -> None:
  """Writes a few episodes of a step as text: of each batch's first groups, one each."""
  cfg = state.cfg
  if group.start % cfg.batch.groups >= cfg.rollout.keep_episodes:
    return
  folder = pathlib.Path(cfg.run_dir) / 'episodes'
  folder.mkdir(exist_ok=True)
  text = episodes_.transcript(group.episodes[0], state.world.fmt)
  (folder / f'{group.start:08d}.md').write_text(text, encoding='utf-8')


# --- evaluation -----------------------------------------------------------------


async def _evaluate(state: Rollout, label: str) -> None:
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
      task, generate, group_id, member, cfg.sampler.sampling
    )
    _forget(state, episode)
    return episode

  began = time.monotonic()
  found = await evaluation.evaluate(
    state.world.heldout,
    one,
    label='heldout',
    samples=cfg.rollout.eval_samples,
    at_once=cfg.sampler.processes * cfg.sampler.slots,
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
