"""Evaluate a checkpoint or a running sampler on a task set.

  python -m experiments.evaluate --run_dir=runs/mine
      the newest checkpoint of a run on its held-out tasks
  ... --step=20 --split=train --samples=8 --seed=1
      another checkpoint, split, episodes a task, seed
  ... --endpoint=http://127.0.0.1:8000
      a sampler that is already running (its native /generate route)

Prints pass@1 and pass@k with 95 % intervals (bootstrap over functions), tokens, turns
and seconds an episode; the last line is the record as JSON. Filters are those of
training.
"""

import asyncio
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

from experiments import program
from swe17 import config, settings, types
from swe17.agent import episode as transcripts
from swe17.rollout import episodes, evaluation, router
from swe17.store import kv

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_RUN = flags.DEFINE_string(
  'run_dir', None, 'run folder', required=True, flag_values=FLAGS
)
_STEP = flags.DEFINE_integer(
  'step', -1, 'checkpoint step; -1: the newest', flag_values=FLAGS
)
_ENDPOINT = flags.DEFINE_string(
  'endpoint', '', 'URL of a running sampler', flag_values=FLAGS
)
_SPLIT = flags.DEFINE_enum(
  'split', 'heldout', ['heldout', 'train'], 'task set', flag_values=FLAGS
)
_SAMPLES = flags.DEFINE_integer('samples', 4, 'episodes a task', flag_values=FLAGS)
_SEED = flags.DEFINE_integer('seed', 0, 'seeds draws and intervals', flag_values=FLAGS)
_TASKS = flags.DEFINE_integer('tasks', 0, 'tasks evaluated, 0 = all', flag_values=FLAGS)
_SHOW = flags.DEFINE_integer('show', 0, 'episodes printed, to read', flag_values=FLAGS)


def publish(run_dir: str, step: int, store: str) -> int:
  """Publishes a checkpoint's weights to a store of its own; its step.

  In a process of its own: this one stays without JAX.
  """
  code = 'import sys; from swe17.learner import export; export.main(*sys.argv[1:])'
  done = subprocess.run(
    [sys.executable, '-c', code, run_dir, str(step), store],
    check=True,
    capture_output=True,
    text=True,
  )
  return int(done.stdout.split()[-1])


async def evaluate(cfg: config.Config, store: kv.Store) -> dict[str, Any]:
  """Runs the episodes against the samplers registered in `store`."""
  world = await episodes.open_world(cfg, lambda text: print(text, flush=True))
  route = router.Router(store, seconds=cfg.agent.episode_seconds)
  await route.open()
  tasks = world.heldout if _SPLIT.value == 'heldout' else world.train
  began = time.monotonic()
  shown: list[str] = []

  async def one(task: types.Task, group_id: str, member: int) -> types.Episode:
    sampling = cfg.sampler.sampling
    episode = await world.episode(task, route, group_id, member, sampling)
    route.forget(f'{group_id}.{member}.0')
    shown.append(episode.id)
    if len(shown) <= _SHOW.value:
      print(transcripts.transcript(episode, world.fmt), flush=True)
    return episode

  try:
    while not await route.discover():
      await asyncio.sleep(0.2)
    found = await evaluation.evaluate(
      tasks[: _TASKS.value or None],
      one,
      label=_SPLIT.value,
      samples=_SAMPLES.value,
      at_once=cfg.sampler.processes * cfg.sampler.slots,
      progress=lambda done, total: None,
    )
  finally:
    await route.close()
    await world.close()
  return evaluation.record(
    found,
    version=0,
    split=_SPLIT.value,
    samples=_SAMPLES.value,
    seed=_SEED.value,
    seconds=time.monotonic() - began,
  )


def with_samplers(cfg: config.Config, folder: str) -> dict[str, Any]:
  """Evaluates a checkpoint: publishes it, starts samplers on it, and stops them."""
  step = publish(_RUN.value, _STEP.value, cfg.store)
  print(f'checkpoint of step {step}', flush=True)
  (pathlib.Path(folder) / 'config.json').write_text(
    json.dumps(settings.to_json(cfg, dict.fromkeys(settings.leaves(), 'flag')))
  )
  command = [sys.executable, '-m', 'experiments.swe17', '--role=sampler']
  samplers = []
  try:
    for index in range(cfg.sampler.processes):
      with open(pathlib.Path(folder) / f'sampler-{index}.log', 'wb') as log:
        argv = [*command, f'--run_dir={folder}', f'--index={index}']
        samplers.append(subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT))
    return {**asyncio.run(evaluate(cfg, kv.open(cfg.store))), 'step': step}
  finally:
    for process in samplers:
      process.terminate()
    for process in samplers:
      process.wait()


def show(record: dict[str, Any]) -> None:
  """Prints the record for a person, then as one JSON line."""
  samples = record['samples']
  mean, low, high = (100 * record[key] for key in ('pass_at_1', 'low', 'high'))
  print(f'pass@1 {mean:.1f} % [{low:.1f}, {high:.1f}] (95 %, functions resampled)')
  if samples > 1:
    print(f'pass@{samples} {100 * record[f"pass_at_{samples}"]:.1f} %')
  print(
    f'{record["n_tasks"]} tasks of {record["n_functions"]} functions, {samples} '
    f'episodes each, {record["missing"]} without an outcome'
  )
  print(
    f'{record["tokens"]:.0f} sampled tokens, {record["turns"]:.1f} turns, '
    f'{record["episode_seconds"]:.1f} s an episode; {record["seconds"]:.0f} s in all'
  )
  print(json.dumps(evaluation.in_short(record)), flush=True)


def main(argv: Sequence[str]) -> None:
  del argv
  cfg = dataclasses.replace(settings.load(_RUN.value), seed=_SEED.value)
  with tempfile.TemporaryDirectory() as folder:
    store = f'file://{folder}/store'
    cfg = dataclasses.replace(cfg, run_dir=folder, store=store)
    if _ENDPOINT.value:
      where = {'url': _ENDPOINT.value.rstrip('/'), 'slots': cfg.sampler.slots}
      kv.open(store).write('samplers/0.json', json.dumps(where).encode())
      show(asyncio.run(evaluate(cfg, kv.open(store))))
    else:
      show(with_samplers(cfg, folder))


if __name__ == '__main__':
  program.run(main, FLAGS)
