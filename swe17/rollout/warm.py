"""Scripted episodes for the warm start, as groups under imitation/ in the store.

A share of them practises, where the family has something to practise on apart from the
held-out tasks; the rest works on training tasks, clumsily, and is verified.
"""

import asyncio
import dataclasses
import random

from swe17 import config, types
from swe17.agent import harness_scripted, scripted
from swe17.env.repair import repair
from swe17.metrics import status
from swe17.rollout import admission, episodes, outbox, scripts
from swe17.store import groups as group_store
from swe17.store import kv


async def write(cfg: config.Config, world: episodes.World, says: status.Status) -> None:
  """Writes the scripted episodes that are not there yet."""
  store = await outbox.insist(lambda: kv.open(cfg.store.rstrip('/') + '/imitation'))
  keys = await outbox.insist(lambda: store.list('groups/'))
  have = {int(key.rsplit('/', 1)[1]) for key in keys}
  size, total = cfg.rollout.group_size, cfg.imitation.episodes
  want = [start for start in range(-(-total // size)) if start not in have]
  for family in {task.family for task in world.train}:
    scripts.get(family)  # a family without one stops the run here
  practice = list[types.Task]()
  if want and cfg.imitation.practice:
    practice = await asyncio.to_thread(scripts.practice, world.heldout)

  templates = harness_scripted.Templates(cfg.agent.harness_settings)

  async def of_harness(
    task: types.Task, rng: random.Random, style: scripted.Style, index: int
  ) -> types.Episode:
    shown = harness_scripted.Scripted(world.fmt, rng, style)
    env = repair.RepairEnv(task, world.verifier())
    return await harness_scripted.episode(
      task, env, shown, world.fmt, templates, cfg.agent, 'scripted', index
    )

  async def one(index: int) -> types.Episode:
    rng = random.Random(f'{cfg.seed}/scripted/{index}')
    practises = rng.random() < cfg.imitation.practice and bool(practice)
    task = admission.task(practice if practises else world.train, cfg.seed, index)
    careful = bool(cfg.imitation.careful) and rng.random() < cfg.imitation.careful
    script = scripts.get(task.family)
    if cfg.agent.harness:
      style = scripted.CAREFUL if careful else scripted.CLUMSY
      style = scripted.PRACTICE if practises else style
      episode = await of_harness(task, rng, style, index)
    else:
      show = script.careful if careful else script.agent
      show = script.practising if practises and script.practising else show
      agent = show(world.fmt, rng)
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
    await outbox.insist(lambda group=group: group_store.append(store, group))
    says.set(
      'scripted episodes', f'{(i + 1) * size}/{len(want) * size}', (i + 1) / len(want)
    )
