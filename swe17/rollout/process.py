"""What is alive in a rollout process, how it is opened, and how it follows the plan."""

import asyncio
from collections.abc import Mapping
import contextlib
import dataclasses
import logging
import pathlib
from typing import Any

from swe17 import config
from swe17.env.audit import difficulty
from swe17.metrics import records, status
from swe17.rollout import admission, episodes, harness, outbox, router
from swe17.store import kv
from swe17.sync import follower, manifest

_log = logging.getLogger(__name__)
POLL = 0.1  # seconds between looks at the plan
_LIST_AFTER = 20  # looks at the next manifest before all are listed


@dataclasses.dataclass
class Stop:
  """What SIGTERM says: `asked`; while groups run (`drains`) they may end first."""

  asked: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
  drains: bool = False


@dataclasses.dataclass
class Rollout:
  """Everything alive in this process."""

  cfg: config.Config
  store: kv.Store
  world: episodes.World
  router: router.Router
  outbox: outbox.Outbox
  says: status.Status
  events: records.EventLog
  own: records.EventLog  # of this process alone: its groups, by start
  attempt: str
  index: int = 0
  plan: manifest.Manifest | None = None
  issued: set[int] = dataclasses.field(default_factory=set)
  spoiled: dict[str, int] = dataclasses.field(default_factory=dict)
  estimates: dict[str, difficulty.Estimate] = dataclasses.field(default_factory=dict)
  dead: list[str] = dataclasses.field(default_factory=list)  # why, group by group
  misses: int = 0  # looks at the plan since it last moved
  lag: float = 0.0  # seconds, longest stall since a group last took it
  stop: Stop = dataclasses.field(default_factory=Stop)

  @property
  def region(self) -> int:
    return self.index % self.cfg.regions

  @property
  def slots(self) -> int:
    """Episodes that the samplers of its region can decode at once."""
    cfg = self.cfg
    samplers = admission.of_region(cfg.sampler.processes, cfg, self.region)
    return samplers * cfg.sampler.slots

  @property
  def planned(self) -> Mapping[str, Any]:
    """The plan of the newest version known. `first_plan` comes first."""
    assert self.plan is not None
    return self.plan.plan


async def open_rollout(
  cfg: config.Config,
  index: int,
  world: episodes.World,
  says: status.Status,
  stack: contextlib.AsyncExitStack,
  stop: Stop,
) -> Rollout:
  """The state of this process; the stack closes what is open in it."""
  store = await outbox.insist(lambda: kv.open(cfg.store))
  region = index % cfg.regions if cfg.regions > 1 else None
  route = router.Router(
    store,
    seconds=cfg.rollout.request_seconds,
    turn_seconds=cfg.rollout.turn_seconds,
    region=region,
  )
  await route.open()
  stack.push_async_callback(route.close)
  if cfg.agent.harness:
    world.harness = harness.Harness(cfg, world.fmt, world.verifier(), route)
    stack.push_async_callback(world.harness.close)
    await world.harness.open()
  folder = pathlib.Path(cfg.run_dir)
  log = str(folder / f'rollout-{index}.jsonl')
  estimates = difficulty.read(cfg.tasks.difficulty)
  estimates = difficulty.replayed(estimates, records.read_events(log))
  own = records.EventLog(log)
  stack.callback(own.close)
  box = outbox.Outbox(
    store,
    str(folder / 'outbox' / str(index)),
    lambda group: own.write('stored', start=group.start, id=group.id),
  )
  stack.push_async_callback(box.close)
  return Rollout(
    cfg=cfg,
    store=store,
    world=world,
    router=route,
    outbox=box,
    says=says,
    events=records.EventLog(str(folder / 'events.jsonl')),
    own=own,
    estimates=estimates,
    attempt=await _attempt(store, index),
    index=index,
    stop=stop,
  )


async def _attempt(store: kv.Store, index: int) -> str:
  """Names this start of the process: '<index>.<starts before it>'.

  It enters the keys of every draw, so it is counted in the store rather than drawn:
  equal runs draw alike (CASES 1.9), and no two processes ever have one name.
  """
  prefix = f'rollouts/starts/{index}/'
  n = len(await outbox.insist(lambda: store.list(prefix)))
  while not await outbox.insist(lambda n=n: store.create(f'{prefix}{n:06d}', b'-')):
    n += 1
  return f'{index}.{n}'


async def first_plan(state: Rollout) -> None:
  """Waits for a weight version and a sampler that serves it."""
  cfg = state.cfg
  while state.plan is None:
    state.plan = await outbox.insist(lambda: follower.read_plan(state.store))
    if state.plan is None:
      state.says.set('waiting', 'for weight version 0')
      await asyncio.sleep(POLL)
  wanted = admission.of_region(cfg.sampler.processes, cfg, state.region)
  while await state.router.discover() < wanted:
    state.says.set('waiting', 'for samplers')
    await asyncio.sleep(POLL)


async def next_plan(state: Rollout) -> None:
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
    if isinstance(e, kv.StoreError):
      state.misses = -1  # it may have moved far meanwhile: look at the newest
    return
  if newer is not None and newer.version > state.plan.version:
    state.plan, state.misses = newer, 0


async def watch_plan(state: Rollout) -> None:
  """Keeps the plan new. Apart from the groups: a store may take long to answer."""
  while True:
    held = state.plan
    await next_plan(state)
    if state.plan is held:
      await asyncio.sleep(POLL)
