"""Whether a task's verifier tells right from wrong: gold, nothing, near-right, other.

  gold passes, nothing fails, in each of several runs (any wavering bars a task);
  solutions known to be wrong fail     -> share accepted: accept_wrong
  solutions known to be right pass     -> share rejected: reject_right

What is known to be right or wrong comes from the family (subject.py).
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
import random
from typing import Any

from swe17 import types
from swe17.env import base
from swe17.env.audit import ledger, subject

REPEATS = 5


async def examine(
  about: subject.Subject, task: types.Task, seed: int, repeats: int = REPEATS
) -> dict[str, Any]:
  """Everything about one task, JSON-able; `reason` is '' if it may give rewards.

  `wrong` and `right` map a label to whether that solution solved the task.
  """
  rng = random.Random(f'{seed}/{task.id}/soundness')
  found: dict[str, Any] = {'wrong': {}, 'right': {}, 'judged': 0}

  async def solved(solution: Any) -> bool | None:
    found['judged'] += 1
    outcome = await about.judge(task, solution)
    return None if outcome.value is None else outcome.value >= task.solved_at

  gold = [await solved(about.gold(task)) for _ in range(repeats)]
  empty = [await solved(about.empty(task)) for _ in range(repeats)]
  found['reason'] = _reason(gold, empty)
  if found['reason']:
    return found
  for kind, some in (
    ('wrong', await about.wrong(task, rng)),
    ('right', about.right(task, rng)),
  ):
    for tried in some:
      found[kind][tried.label] = await solved(tried.solution)
  return found


def _reason(gold: Sequence[bool | None], empty: Sequence[bool | None]) -> str:
  """Why a task is barred; '' if it is not."""
  for who, runs in (('the gold', gold), ('nothing', empty)):
    if None in runs:
      return f'{who}: the verifier failed'
    if len(set(runs)) > 1:
      return f'{who} wavers: {sum(map(bool, runs))} of {len(runs)} runs solved'
  if not gold[0]:
    return 'the gold does not solve it'
  return 'nothing solves it' if empty[0] else ''


async def examine_all(
  about: subject.Subject,
  tasks: Iterable[types.Task],
  answers: ledger.Ledger,
  *,
  seed: int,
  at_once: int,
  repeats: int = REPEATS,
  says: Callable[[str], None] | None = None,
) -> dict[str, dict[str, Any]]:
  """`examine` of every task, by id; those that the ledger has are not examined anew."""
  tasks, gate, done = list(tasks), asyncio.Semaphore(at_once), 0

  async def one(task: types.Task) -> dict[str, Any]:
    nonlocal done
    key = f'sound/{task.id}'
    kept = key in answers
    async with gate:
      try:
        found = await answers.once(key, lambda: examine(about, task, seed, repeats))
      except (OSError, base.InfrastructureError) as e:  # not kept: asked anew next time
        why = f'the verifier failed: {type(e).__name__}'
        found = {'wrong': {}, 'right': {}, 'judged': 0, 'reason': why}
    done += 1
    found = {**found, 'kept': kept}  # of an earlier start: not timed now
    if says is not None and done % 100 == 0:
      says(f'{done} of {len(tasks)} tasks examined')
    return found

  found = await asyncio.gather(*(one(task) for task in tasks))
  return {task.id: each for task, each in zip(tasks, found, strict=True)}


def rates(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  """Both error rates over all tasks, with counts, and by label.

  `accept_wrong` is the share of wrong solutions that solved their task, `reject_right`
  that of right ones that did not; None over nothing. A solution that the verifier gave
  no outcome is in neither.
  """
  out: dict[str, Any] = {}
  for kind, name, bad in (
    ('wrong', 'accept_wrong', True),
    ('right', 'reject_right', False),
  ):
    count = errors = missing = 0
    labels: dict[str, list[int]] = {}
    for each in found.values():
      for label, solved in each[kind].items():
        if solved is None:
          missing += 1
          continue
        count += 1
        errors += solved is bad
        mine = labels.setdefault(label.partition(':')[0], [0, 0])
        mine[0] += solved is bad
        mine[1] += 1
    out |= {
      name: errors / count if count else None,
      f'{name}_count': count,
      f'{name}_missing': missing,
      f'{name}_labels': dict(sorted(labels.items())),
    }
  return out
