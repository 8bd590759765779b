"""Puts families of tasks through the pipeline of env/audit, and writes its report.

  <work>/<family>.audit.jsonl   one line an answer: what is there is not done again
  <work>/<family>.audit.json    the family's report
  <work>/<family>.difficulty.jsonl   estimates, for tasks.difficulty (if rollouts ran)
  <work>/report.html            all families

Used by build_tasks and by bench.tasks.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import pathlib
import random
from typing import Any

from swe17 import config, types
from swe17.agent import (
  episode,
  formats,
  kernels_scripted,
  packages_scripted,
  scripted,
  searcher,
)
from swe17.env import families
from swe17.env.audit import difficulty, ledger, pipeline, report, subjects
from swe17.env.kernels import kernels_small
from swe17.env.packages import packages
from swe17.env.repair import repair
from swe17.env.retrieval import retrieval
from swe17.metrics import lines
from swe17.rollout import episodes

_EXAMPLES = 3
_EPISODES = 8  # at once, of a policy
# A task that is solved a low but non-zero share of the time has something to teach.
BAND = config.Tasks(band_low=0.05, band_high=0.9)
Agent = Callable[[formats.Format, random.Random], episode.Generate]


def _repairing(style: scripted.Style) -> Agent:
  return lambda fmt, rng: scripted.Scripted(fmt, rng, style)


def _searching(style: searcher.Style) -> Agent:
  return lambda fmt, rng: searcher.Searcher(fmt, rng, style)


def _mending(style: packages_scripted.Style) -> Agent:
  return lambda fmt, rng: packages_scripted.Mender(fmt, rng, style)


def _editing(style: kernels_scripted.Style) -> Agent:
  return lambda fmt, rng: kernels_scripted.Editor(fmt, rng, style)


# Scripted agents of three strengths, for difficulty where no model is asked.
STRENGTHS: Mapping[str, Mapping[str, Agent]] = {
  repair.FAMILY: {k: _repairing(s) for k, s in scripted.STRENGTHS.items()},
  packages.FAMILY: {k: _mending(s) for k, s in packages_scripted.STRENGTHS.items()},
  retrieval.FAMILY: {k: _searching(s) for k, s in searcher.STRENGTHS.items()},
  retrieval.SMALL: {k: _searching(s) for k, s in searcher.STRENGTHS.items()},
  kernels_small.FAMILY: {k: _editing(s) for k, s in kernels_scripted.STRENGTHS.items()},
}


# What the scripted agents need of room and turns, as the families' configs have it.
AGENT: Mapping[str, config.Agent] = {
  repair.FAMILY: config.Agent(),
  packages.FAMILY: config.Agent(
    max_turns=60, max_new_tokens=900, max_context=60_000, episode_seconds=1800.0
  ),
  retrieval.FAMILY: config.Agent(
    max_turns=4, max_new_tokens=1024, max_context=16384, episode_seconds=600.0
  ),
  retrieval.SMALL: config.Agent(max_turns=4, max_new_tokens=96, max_context=512),
  kernels_small.FAMILY: config.Agent(
    max_turns=5, max_new_tokens=72, max_context=320, thoughts='strip'
  ),
}


async def family(
  name: str,
  work: pathlib.Path,
  plan: pipeline.Plan,
  *,
  sandbox: config.Sandbox,
  tasks: config.Tasks | None = None,
  rollouts: int = 0,
  rejected: Mapping[str, int] | None = None,
  says: Callable[[str], None] = print,
) -> dict[str, Any]:
  """The report of a family; written to `work` too.

  `rollouts` are episodes a task of each scripted strength; `rejected` is why its
  builder left candidates out. The last answers of a stopped run are kept. ValueError
  where its tasks are not to be had, or what they run on.
  """
  cfg = dataclasses.replace(tasks or config.Tasks(), family=name)
  open_subject = subjects.get(name)
  # Here and not in a thread: environments of `verifiers` take over signals.
  read, left_out = families.get(name).read(cfg)
  about = await open_subject(sandbox, cfg)
  answers = ledger.Ledger(work / f'{stem(name)}.audit.jsonl')
  try:
    ready, aside = await about.ready(read)
    found = await pipeline.run(about, ready, answers, plan, says)
  finally:
    answers.close()
    await about.close()
  found['set_aside'] = {**left_out, **aside}  # tasks that the pipeline has not seen
  found['rejected'] = dict(rejected or {})
  found['examples'] = [
    {'id': task.id, 'split': task.split, 'prompt': task.prompt[:2000]}
    for task in pipeline.drawn(ready, _EXAMPLES, f'{plan.seed}/examples')
  ]
  if rollouts and name in STRENGTHS:
    found['difficulty'] = await _difficulty(name, ready, work, plan, rollouts, says)
  file = work / f'{stem(name)}.audit.json'
  lines.replace(str(file), json.dumps(found, indent=1).encode())
  return found


def settings_of(name: str) -> config.Config:
  """Those that the scripted agents of a family play under."""
  agent = AGENT[name]
  row = max(config.Batch().row_length, agent.max_context)  # nothing is trained here
  return config.Config(
    tasks=config.Tasks(family=name),
    agent=agent,
    batch=config.Batch(row_length=row),
  )


def stem(name: str) -> str:
  """A family's name as part of a file's."""
  return name.replace(':', '-')


async def _difficulty(
  name: str,
  tasks: Sequence[types.Task],
  work: pathlib.Path,
  plan: pipeline.Plan,
  rollouts: int,
  says: Callable[[str], None],
) -> dict[str, Any]:
  """Estimates from scripted agents of three strengths, on the tasks of the sample."""
  cfg = settings_of(name)
  host = await families.get(name).open(cfg.sandbox)
  fmt = episodes.format_of(cfg, families.get(name))
  world = episodes.World(cfg, [], [], {}, host, fmt)
  some = pipeline.drawn(tasks, plan.sample, f'{plan.seed}/sample')
  answers = ledger.Ledger(work / f'{name}.rollouts.jsonl')
  gate = asyncio.Semaphore(_EPISODES)
  solved: list[tuple[str, bool]] = []
  by: dict[str, list[bool]] = {strength: [] for strength in STRENGTHS[name]}

  async def one(task: types.Task, strength: str, member: int) -> None:
    key = f'{strength}/{task.id}/{member}'
    agent = STRENGTHS[name][strength](fmt, random.Random(f'{plan.seed}/{key}'))

    async def play() -> bool | None:
      found = await world.episode(task, agent, key, member, types.Sampling())
      return None if found.status == 'invalid' else found.solved

    async with gate:
      value = await answers.once(key, play)
    if value is not None:
      solved.append((task.id, value))
      by[strength].append(value)

  says(f'{name}: {rollouts} episodes of each strength on {len(some)} tasks')
  try:
    sound, _ = await host.verify(some)
    await asyncio.gather(
      *(one(t, s, m) for t in sound for s in by for m in range(rollouts))
    )
  finally:
    answers.close()
    await world.close()
  estimates = difficulty.table(solved)
  difficulty.write(str(work / f'{name}.difficulty.jsonl'), estimates)
  band = dataclasses.replace(BAND, band_tries=len(by) * rollouts)
  shares = {strength: round(sum(v) / len(v), 3) for strength, v in by.items() if v}
  return {
    'policy': f'scripted agents of three strengths, share solved {shares}',
    'band': [band.band_low, band.band_high],
    'counts': pipeline.banded(some, estimates, band),
  }


def write(work: pathlib.Path, command: str) -> dict[str, Any]:
  """Writes report.html of all families whose reports are in `work`; the totals."""
  files = sorted(work.glob('*.audit.json'))
  found = [json.loads(file.read_text(encoding='utf-8')) for file in files]
  html = report.render(found, command)
  lines.replace(str(work / 'report.html'), html.encode())
  return report.totals(found)
