"""mini-swe-agent, as installed, between the recording proxy and a sandboxed shell.

  python -m experiments.bench.mini_swe_agent

A small model imitates a scripted agent in mini-swe-agent's format, then 20 episodes of
the real agent run with it on held-out repair tasks, those of the shortest functions:
real proxy, engine, sandbox and verifier. From them the learner takes one step. Checked
before that step: what the segments train is what the engine drew, id by id and turn by
turn; each drawn token is trained exactly once. Below `--submitted` own submits the
bench fails.

Two quiet cores: about 7 minutes, most of them imitation. The last line is JSON:

  {"episodes": 20, "submitted": .., "solved": .., "trained_tokens": ..,
   "sampled_tokens": ..}

`trained_tokens` is what the step itself counted, `sampled_tokens` what the engine drew
in the groups that the step was on (groups whose outcomes do not differ train nothing).
"""

import asyncio
import collections
from collections.abc import AsyncGenerator, Sequence
import functools
import json
import logging
import pathlib
import sys
import tempfile
import time
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments import program
from experiments.configs import mini_swe_agent
from swe17 import config, settings, types
from swe17.agent import episode as episodes
from swe17.learner import batching, imitation, mesh, optimizer, packing, update
from swe17.metrics import status
from swe17.model import params as p
from swe17.rollout import episodes as worlds
from swe17.rollout import harness, warm
from swe17.sampler import engine
from swe17.store import kv

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_SEED = flags.DEFINE_integer('seed', 0, 'seeds everything', flag_values=FLAGS)
_STEPS = flags.DEFINE_integer('steps', 400, 'imitation steps', flag_values=FLAGS)
_SCRIPTED = flags.DEFINE_integer(
  'scripted', 1600, 'scripted episodes to imitate', flag_values=FLAGS
)
_TASKS = flags.DEFINE_integer(
  'tasks', 5, 'held-out tasks; 20 episodes in all', flag_values=FLAGS
)
_SUBMITTED = flags.DEFINE_integer(
  'submitted', 16, 'own submits below which the bench fails', flag_values=FLAGS
)
_DIR = flags.DEFINE_string(
  'dir', '', 'folder for scripted episodes and transcripts', flag_values=FLAGS
)
EPISODES = 20


class Route:
  """Stands where the router does, before one engine of this process.

  `drawn` has what was drawn under each session, the results by length of context.
  """

  def __init__(self, serving: engine.Engine):
    self._engine = serving
    self.drawn: dict[str, dict[int, list[types.GenerateResult]]] = (
      collections.defaultdict(lambda: collections.defaultdict(list))
    )

  async def stream(
    self, request: types.GenerateRequest
  ) -> AsyncGenerator[types.GenerateResult, None]:
    loop = asyncio.get_running_loop()
    parts: asyncio.Queue[types.GenerateResult | None] = asyncio.Queue()

    def told(part: types.GenerateResult | None) -> None:
      loop.call_soon_threadsafe(parts.put_nowait, part)

    future = self._engine.submit(request, told)
    future.add_done_callback(lambda _: told(None))
    try:
      while (part := await parts.get()) is not None:
        if part.finish:
          whole = future.result(timeout=10)
          self.drawn[request.session][request.token_T.size].append(whole)
        yield part
        if part.finish:
          return
      raise ConnectionError(f'the engine gave up: {future.exception(timeout=10)}')
    finally:
      self._engine.cancel(future)

  def forget(self, session: str) -> None:
    """An idle slot is taken when it is needed."""


def settings_of(folder: pathlib.Path) -> config.Config:
  """The config file's settings, for this bench."""
  cfg = mini_swe_agent.get_config()
  cfg.run_dir, cfg.seed = str(folder), _SEED.value
  cfg.store = f'file://{folder}/store'
  cfg.imitation.steps, cfg.imitation.episodes = _STEPS.value, _SCRIPTED.value
  cfg.rollout.group_size = EPISODES // _TASKS.value
  cfg.batch.groups = _TASKS.value
  return settings.resolve(cfg)


def imitate(cfg: config.Config, devices: mesh.Devices) -> p.Params:
  """Parameters after the warm start on the scripted episodes in the store."""
  shown = imitation.Episodes(kv.open(f'{cfg.store}/imitation'), cfg.seed)
  count = shown.wait(cfg.imitation.episodes, lambda: False)
  tx = optimizer.make(cfg.optim, imitation.schedule(cfg.imitation))
  state = mesh.state(devices, mesh.init(devices, jax.random.key(cfg.seed)), tx)
  began, losses = time.monotonic(), []
  step = imitation.step(cfg, devices, state)
  for i, batch in enumerate(imitation.batches(shown, cfg), 1):
    with mesh.scope(devices):
      state, metrics = step(state, mesh.put(devices, batch))
    losses.append(metrics['trained_loss'])
    if i % 50 == 0 or i == cfg.imitation.steps:
      mean = float(np.mean(jax.device_get(losses[-50:])))
      spent = time.monotonic() - began
      print(f'imitation {i}: {mean:.3f} nats, {count} episodes, {spent:.0f} s')
  return state.params


async def rollouts(
  cfg: config.Config, world: worlds.World, route: Route
) -> list[types.Group]:
  """Groups of held-out tasks: of the shortest functions, one task each."""
  by_unit = {task.unit: task for task in reversed(world.heldout)}
  shortest = sorted(by_unit.values(), key=lambda task: len(task.payload['source']))
  tasks = shortest[: _TASKS.value]
  if len(tasks) < _TASKS.value:
    raise ValueError(f'got {len(tasks)} held-out functions, want {_TASKS.value}')
  agents = harness.Harness(cfg, world.fmt, world.verifier(), route)
  try:
    await agents.open()
    members = await asyncio.gather(
      *(
        agents.episode(task, f'{i:08d}-a.0', m, cfg.sampler.sampling)
        for i, task in enumerate(tasks)
        for m in range(cfg.rollout.group_size)
      )
    )
  finally:
    await agents.close()
  G = cfg.rollout.group_size
  return [
    types.Group(f'{i:08d}-a.0', i, t.id, t.unit, tuple(members[i * G : i * G + G]))
    for i, t in enumerate(tasks)
  ]


def same_tokens(group: types.Group, route: Route) -> int:
  """Tokens drawn for a group. ValueError unless they are what its segments train.

  Turns are compared as (ids, log-probs, versions); each must be there exactly once.
  """
  total = 0
  for one in group.episodes:
    trained = collections.Counter(
      _turn(segment.token_T, segment.mu_logp_T, segment.version_T, own)
      for segment in one.segments
      for turn in np.unique(segment.turn_T[segment.mask_T])
      for own in [segment.mask_T & (segment.turn_T == turn)]
    )
    drawn = collections.Counter(
      _turn(result.token_T, result.logp_T, result.version_T, slice(None))
      for session, results in route.drawn.items()
      if session.startswith(f'{one.id}.')
      for some in results.values()
      for result in some
    )
    if trained != drawn:
      raise ValueError(
        f'episode {one.id}: {(trained - drawn).total()} trained turns that were not '
        f'drawn, {(drawn - trained).total()} drawn turns that are not trained'
      )
    count = sum(int(segment.mask_T.sum()) for segment in one.segments)
    if count != one.sampled_tokens:
      raise ValueError(f'episode {one.id}: {count=}, sampled {one.sampled_tokens}')
    total += count
  return total


def _turn(token_T: Any, logp_T: Any, version_T: Any, own: Any) -> tuple[bytes, ...]:
  return tuple(np.asarray(x)[own].tobytes() for x in (token_T, logp_T, version_T))


def learn(
  cfg: config.Config,
  devices: mesh.Devices,
  params: p.Params,
  groups: Sequence[types.Group],
) -> tuple[dict[str, float], frozenset[str]]:
  """One policy step: (its metrics, ids of the groups that train)."""
  made = batching.assemble(groups, cfg.loss)
  if not made.items:
    print('no group has members with different outcomes: nothing to learn from')
    return {'trained_tokens': 0.0}, frozenset()
  rows, _ = packing.layout([item.segment for item in made.items], cfg.batch)
  batch = batching.fill(
    made.items,
    micro=-(-len(rows) // cfg.batch.micro_rows),
    cfg=cfg.batch,
    K=cfg.sampler.top_k,
    denominator=batching.denominator(
      cfg.loss, made.denominator_episodes, cfg.agent.max_context
    ),
    version=0,
  )
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  state = mesh.state(devices, params, tx)
  step = functools.partial(update.update, model=cfg.model, loss=cfg.loss, tx=tx)
  jitted = mesh.jit(devices, step, state)
  with mesh.scope(devices):
    _, metrics = jitted(state, mesh.put(devices, batch), None)
  return {k: float(v) for k, v in metrics.items()}, frozenset(made.trained)


def main(argv: Sequence[str]) -> None:
  del argv
  with tempfile.TemporaryDirectory(prefix='bench-') as scratch:
    folder = pathlib.Path(_DIR.value or scratch).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    run(folder)


def run(folder: pathlib.Path) -> None:
  """The bench in a folder. SystemExit below the submits that were asked for."""
  cfg = settings_of(folder)
  loop = asyncio.new_event_loop()
  world = loop.run_until_complete(worlds.open_world(cfg, print))
  try:
    _bench(cfg, world, loop, folder)
  finally:
    loop.run_until_complete(world.close())
    loop.close()


def _bench(
  cfg: config.Config,
  world: worlds.World,
  loop: asyncio.AbstractEventLoop,
  folder: pathlib.Path,
) -> None:
  began = time.monotonic()
  loop.run_until_complete(warm.write(cfg, world, status.Status(cfg.run_dir, 'bench')))
  print(f'scripted episodes: {time.monotonic() - began:.0f} s')
  devices = mesh.open(cfg, world.fmt.vocab_size)
  params = imitate(cfg, devices)
  serving = engine.Engine(
    p.rounded(params, cfg.model.dtype),
    0,
    model=cfg.model,
    cfg=cfg.sampler,
    length=cfg.agent.max_context,
    swap=lambda: None,
  )
  serving.start()
  began, route = time.monotonic(), Route(serving)
  try:
    groups = loop.run_until_complete(rollouts(cfg, world, route))
  finally:
    serving.close()
  print(f'{EPISODES} episodes: {time.monotonic() - began:.0f} s')
  _report(groups, world, folder)
  drawn = {group.id: same_tokens(group, route) for group in groups}
  metrics, trained = learn(cfg, devices, params, groups)
  sampled = sum(drawn[name] for name in trained)
  names = ('loss', 'grad_norm', 'k3', 'skipped_steps')
  said = ', '.join(f'{k} {metrics[k]:.3g}' for k in names if k in metrics)
  print(f'one step on {len(trained)} groups: {said}')
  members = [one for group in groups for one in group.episodes]
  submitted = sum(one.submitted for one in members)
  row = {
    'episodes': len(members),
    'submitted': submitted,
    'solved': sum(one.solved for one in members),
    'trained_tokens': int(metrics['trained_tokens']),
    'sampled_tokens': sampled,
  }
  print(json.dumps(row), flush=True)
  if not sampled or row['trained_tokens'] != sampled or submitted < _SUBMITTED.value:
    sys.exit(1)


def _report(
  groups: Sequence[types.Group], world: worlds.World, folder: pathlib.Path
) -> None:
  for group in groups:
    for one in group.episodes:
      text = episodes.transcript(one, world.fmt)
      (folder / f'{one.id}.md').write_text(text, encoding='utf-8')
      end = 'submitted' if one.submitted else 'not submitted'
      print(
        f'{one.id} {one.task_id}: {end}, outcome {one.outcome.value} '
        f'{one.outcome.reason}, {one.turns} turns, {one.sampled_tokens} tokens, '
        f'{one.seconds:.0f} s'
      )


if __name__ == '__main__':
  logging.getLogger('swe17.rollout.episodes').setLevel(logging.ERROR)
  program.run(main, FLAGS)
