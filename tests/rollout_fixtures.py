"""What the tests of the rollout share: stand-ins for episodes, samplers and learner."""

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import math
import pathlib
import random

import numpy as np

from swe17 import config, types
from swe17.learner import buffer
from swe17.metrics import records, status
from swe17.rollout import manager, outbox, process
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import manifest, publisher

TASKS = [
  types.Task(f'f{i}/0', 'repair_functions', 'train', f'f{i}', 'Repair.', {})
  for i in range(6)
]
HELDOUT = [dataclasses.replace(t, id=f'h{i}/0') for i, t in enumerate(TASKS[:3])]
WEIGHTS = {'w': np.arange(4, dtype=np.float32)}


class World:
  """Runs stand-in episodes; `spoiled` says at which tasks infrastructure fails."""

  def __init__(self):
    self.train, self.heldout = list(TASKS), list(HELDOUT)
    self.set_aside: dict[str, str] = {}
    self.ran: list[tuple[str, str, int]] = []
    self.allowed: list[float] = []  # seconds an episode
    self.spoiled: dict[str, int] = {}  # task id -> attempts at it yet to be spoiled
    self.seconds = 0.0
    self.began: dict[str, int] = {}
    self.version = lambda: 0
    self.fmt = None

  async def episode(
    self,
    task,
    generate,
    group_id,
    member,
    sampling,
    *,
    seconds=math.inf,
    min_version=0,
  ) -> types.Episode:
    del sampling, min_version
    self.allowed.append(seconds)
    self.began.setdefault(group_id, self.version())
    self.ran.append((task.id, group_id, member))
    if self.seconds:
      await asyncio.sleep(self.seconds * random.random())
    spoiled = self.spoiled.get(task.id, 0) > 0
    if spoiled and member == 3:
      self.spoiled[task.id] -= 1
    value = None if spoiled else float(member == 0)
    return types.Episode(
      id=f'{group_id}.{member}',
      task_id=task.id,
      unit=task.unit,
      group_id=group_id,
      member=member,
      status='invalid' if spoiled else 'valid',
      outcome=types.Outcome(value, 'the grader is gone' if spoiled else ''),
      solved_at=1.0,
      segments=(),
      turns=1,
      calls=1,
      malformed=0,
      tests=0,
      submitted=True,
      sampled_tokens=1,
      thinking_tokens=0,
      tool_seconds=0.0,
      seconds=0.0,
    )


class Router:
  """Nobody asks it for tokens: the stand-in episodes need none."""

  def __init__(self, found=(2,)):
    self.found, self.forgotten, self.asked = list(found), [], []

  async def discover(self) -> int:
    return self.found.pop(0) if len(self.found) > 1 else self.found[0]

  def forget(self, session: str) -> None:
    self.forgotten.append(session)

  async def __call__(self, request):
    self.asked.append(request)


class Learner:
  """Publishes plans and consumes groups in the order of their starts."""

  def __init__(self, store: kv.Store, cfg: config.Config):
    self.store, self.cfg = store, cfg
    self.publisher = publisher.Publisher(store, cfg.sync, attempt='test')
    self.version, self.step, self.consumed = -1, 0, set()
    self.trained: list[types.Group] = []

  def publish(self) -> None:
    below, rest = buffer.cursor(self.consumed)
    self.version += 1
    plan = {
      'step': self.step,
      'consumed_below': below,
      'consumed_rest': rest,
      'done': self.step >= self.cfg.steps,
    }
    self.publisher.publish(self.version, WEIGHTS, step=self.step, plan=plan)

  def take(self, n: int) -> bool:
    """Trains on the oldest `n` groups in the store, if there are as many."""
    seen = {group_store.key_of(s) for s in self.consumed}
    keys = group_store.list_new(self.store, seen)[:n]
    if len(keys) < n:
      return False
    groups = [group_store.load(self.store, key) for key in keys]
    self.trained += groups
    self.consumed |= {g.start for g in groups}
    self.step += 1
    return True


def settings(tmp_path, **changes) -> config.Config:
  cfg = config.Config(
    run_dir=str(tmp_path),
    store=f'file://{tmp_path}/store',
    steps=6,
    rollout=config.Rollout(group_size=4, ahead=2, eval_samples=2, keep_episodes=0),
    batch=config.Batch(groups=2),
    sampler=config.Sampler(slots=8),
  )
  return dataclasses.replace(cfg, **changes)


@contextlib.contextmanager
def maker(tmp_path: pathlib.Path) -> Iterator[Callable[..., process.Rollout]]:
  """Makes a rollout's state as a fresh process has it, with a learner's first plan."""
  with contextlib.ExitStack() as stack:

    def made(
      attempt: str = 'a0',
      plan: bool = True,
      index: int = 0,
      store: kv.Store | None = None,
      **changes,
    ) -> process.Rollout:
      cfg = settings(tmp_path, **changes)
      inner = kv.open(cfg.store)
      events = records.EventLog(str(tmp_path / 'events.jsonl'))
      own = records.EventLog(str(tmp_path / f'rollout-{index}.jsonl'))
      stack.callback(events.close)
      stack.callback(own.close)
      says = status.Status(cfg.run_dir, 'rollout')
      box = outbox.Outbox(
        store or inner,
        str(tmp_path / 'outbox' / str(index)),
        lambda group: own.write('stored', start=group.start, id=group.id),
      )
      state = process.Rollout(
        cfg=cfg,
        store=store or inner,
        world=World(),
        router=Router(),
        outbox=box,
        says=says,
        events=events,
        own=own,
        attempt=attempt,
        index=index,
      )
      if plan and manifest.latest(inner) is None:
        Learner(inner, cfg).publish()
      newest = manifest.latest(inner)
      state.plan = None if newest is None else manifest.read(inner, newest)
      return state

    yield made


async def group(state: process.Rollout, start: int) -> types.Group:
  """Runs the group of a start and waits until it is stored."""
  await manager._group(state, start)
  await state.outbox.flush()
  return group_store.load(state.store, group_store.key_of(start))


def events(state: process.Rollout, kind: str, name: str = 'events') -> list[dict]:
  found = records.read_events(f'{state.cfg.run_dir}/{name}.jsonl')
  return [e for e in found if e['kind'] == kind]
