"""What to start next: which start index, which task, and whether there is room.

With R rollout processes, process r has the start indices that leave r when divided by
R. So they need no word with each other, and a process that is slow or cut off leaves
holes which nobody waits for: the others go on in their own, the learner takes what is
there, oldest start first, and its cursor names what lies beyond the first hole.
"""

from collections.abc import Mapping, Sequence
import random
from typing import Any

from swe17 import config, types


def share(cfg: config.Config) -> int:
  """Groups that one process may have issued beyond what the learner has consumed.

  An R-th of `rollout.ahead` batches; more where a batch could not be formed without any
  one of the processes, so that no step waits for a particular one.
  """
  R, groups = cfg.rollout.processes, cfg.batch.groups
  fair = -(-cfg.rollout.ahead * groups // R)
  return fair if R == 1 else max(fair, -(-groups // (R - 1)))


def due(
  plan: Mapping[str, Any], issued: set[int], cfg: config.Config, index: int
) -> int | None:
  """The next start index of process `index`, or None while it is far enough ahead.

  `issued` holds the starts of this process that are running, stored or consumed.
  """
  below, consumed = plan['consumed_below'], set(plan['consumed_rest'])
  outstanding = sum(not (s < below or s in consumed) for s in issued)
  if outstanding >= share(cfg):
    return None
  R = cfg.rollout.processes
  start = below + (index - below) % R
  while start in issued or start in consumed:
    start += R
  return start


def own(starts: Sequence[int], cfg: config.Config, index: int) -> set[int]:
  """Those of `starts` that are process `index`'s."""
  return {start for start in starts if start % cfg.rollout.processes == index}


def done(plan: Mapping[str, Any], cfg: config.Config) -> bool:
  """Whether the learner has taken all steps that this start of the run asks for.

  A run that is resumed for more steps begins with a plan that was the last one once.
  """
  return plan['done'] and plan['step'] >= cfg.steps


def task(tasks: Sequence[types.Task], seed: int, start: int) -> types.Task:
  """The task of a start index: seeded epochs, each a permutation of all tasks."""
  epoch, at = divmod(start, len(tasks))
  order = list(range(len(tasks)))
  random.Random(f'{seed}/{epoch}').shuffle(order)
  return tasks[order[at]]


def of_region(processes: int, cfg: config.Config, region: int) -> int:
  """How many of `processes` (samplers or rollouts, dealt out in turn) stand there."""
  return len(range(region, processes, cfg.regions))
