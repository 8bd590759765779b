"""Evaluation: seeded episodes of every task, as one record with intervals."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from swe17 import types
from swe17.metrics import records, statistics

# (task, group id, member) -> the episode, with the filters of training
RunEpisode = Callable[[types.Task, str, int], Awaitable[types.Episode]]


async def evaluate(
  tasks: Sequence[types.Task],
  run_episode: RunEpisode,
  *,
  label: str,
  samples: int,
  at_once: int,
  progress: Callable[[int, int], None],
) -> list[types.Episode]:
  """Runs `samples` episodes of every task, `at_once` together, in task order.

  `label` names the draws: equal label, seed and weights give equal episodes.
  """
  gate, done = asyncio.Semaphore(at_once), 0

  async def one(task: types.Task, member: int) -> types.Episode:
    nonlocal done
    async with gate:
      episode = await run_episode(task, f'eval-{label}-{task.id}', member)
    done += 1
    progress(done, samples * len(tasks))
    return episode

  return list(
    await asyncio.gather(*(one(task, m) for task in tasks for m in range(samples)))
  )


def record(
  episodes: Sequence[types.Episode],
  *,
  version: int,
  split: str,
  samples: int,
  seed: int,
  seconds: float,
) -> dict[str, Any]:
  """What `evals/*.json` holds: pass@1, pass@k, outcome, costs, and rates by function.

  `tasks` gives the share solved by task id, `task_units` the function of each, and
  `units` the shares by function, in order of task id. `outcome` is the mean of raw
  scores, `outcomes` that of each task: more than pass@1 says where a score is no 0 or
  1. Episodes without an outcome are counted as `missing` and are in no rate.
  """
  by_task: dict[str, list[types.Episode]] = {}
  for episode in episodes:
    by_task.setdefault(episode.task_id, []).append(episode)
  units: dict[str, list[float]] = {}
  scores: dict[str, list[float]] = {}
  outcomes: dict[str, float] = {}
  tasks: dict[str, float] = {}
  unit_of: dict[str, str] = {}
  passes: list[float] = []
  for task_id in sorted(by_task):
    valid = [e for e in by_task[task_id] if e.status != 'invalid']
    if not valid:
      continue
    solved = sum(e.solved for e in valid)
    tasks[task_id], unit_of[task_id] = solved / len(valid), valid[0].unit
    units.setdefault(unit_of[task_id], []).append(tasks[task_id])
    score = [e.outcome.value for e in valid if e.outcome.value is not None]
    outcomes[task_id] = sum(score) / len(score)
    scores.setdefault(unit_of[task_id], []).append(outcomes[task_id])
    passes.append(statistics.pass_at_k(len(valid), solved, min(samples, len(valid))))
  mean, low, high = statistics.mean_interval(units, seed=seed)
  outcome, outcome_low, outcome_high = statistics.mean_interval(scores, seed=seed)
  turns = sum(e.turns for e in episodes if e.status != 'invalid')
  valid = [e for e in episodes if e.status != 'invalid']
  return {
    'version': version,
    'split': split,
    'pass_at_1': mean,
    'low': low,
    'high': high,
    f'pass_at_{samples}': records.mean(passes),
    'outcome': outcome,
    'outcome_low': outcome_low,
    'outcome_high': outcome_high,
    'n_tasks': len(passes),
    'n_functions': len(units),
    'samples': samples,
    'missing': len(episodes) - len(valid),
    'tokens': records.mean([e.sampled_tokens for e in valid]),
    'turns': records.mean([e.turns for e in valid]),
    'tests': records.mean([e.tests for e in valid]),
    'calls_per_turn': sum(e.calls for e in valid) / turns if turns else None,
    'duplicate_calls': records.mean([e.duplicate_calls for e in valid]),
    'submitted_share': records.mean([e.submitted for e in valid]),
    'episode_seconds': records.mean([e.seconds for e in valid]),
    'seconds': seconds,
    'units': units,
    'tasks': tasks,
    'outcomes': outcomes,
    'task_units': unit_of,
  }


def in_short(record: Mapping[str, Any]) -> dict[str, Any]:
  """A record without its lists: what an event or a line of output holds."""
  return {k: v for k, v in record.items() if not isinstance(v, Mapping)}
