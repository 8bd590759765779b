"""The pipeline that proves the tasks of a family sound before one may give a reward.

  tasks -> duplicates, contamination -> gold, nothing, right, wrong -> exploits -> leaks
        -> difficulty, where it is known -> report

Every answer is a line of a ledger, so that a run that was stopped goes on; the report
is made of the ledger and the tasks alone.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import random
import time
from typing import Any

from swe17 import config, types
from swe17.env.audit import contamination, difficulty, ledger, soundness, subject

_EXAMPLES = 12


@dataclasses.dataclass(frozen=True)
class Plan:
  """How much of a family is looked at. 0: all of it.

  Attributes:
    repeats: runs of gold and of nothing, each; the builder may have made five already.
  """

  seed: int = 0
  sample: int = 0  # tasks whose right and wrong solutions are tried
  exploited: int = 0  # tasks that every exploit is played on, beside one an image kind
  scanned: int = 0  # tasks whose images are scanned
  repeats: int = soundness.REPEATS
  at_once: int = 4


async def run(
  about: subject.Subject,
  tasks: Sequence[types.Task],
  answers: ledger.Ledger,
  plan: Plan,
  says: Callable[[str], None] = print,
) -> dict[str, Any]:
  """Everything about a family's tasks, JSON-able: what report.py shows."""
  began = time.monotonic()
  says(f'{about.family}: {len(tasks)} tasks; duplicates and contamination')
  copies = contamination.check(tasks, {task.id: about.text(task) for task in tasks})
  some = drawn(tasks, plan.sample, f'{plan.seed}/sample')
  says(f'{about.family}: {len(some)} tasks, right and wrong solutions')
  found = await soundness.examine_all(
    about,
    some,
    answers,
    seed=plan.seed,
    at_once=plan.at_once,
    repeats=plan.repeats,
    says=says,
  )
  judged = time.monotonic() - began
  played = await exploits(about, exploited(about, tasks, plan), answers, plan, says)
  fit = [task for task in some if not found[task.id]['reason']]
  known = await players(about, fit, answers, plan)
  leaks = await scan(about, drawn(tasks, plan.scanned, f'{plan.seed}/scan'), answers)
  fresh = sum(each['judged'] for each in found.values() if not each.get('kept'))
  return {
    'family': about.family,
    'tasks': len(tasks),
    'train': sum(task.split == 'train' for task in tasks),
    'units': len({task.unit for task in tasks}),
    'examined': len(found),
    'barred': {i: each['reason'] for i, each in found.items() if each['reason']},
    'duplicates': copies.duplicates,
    'contaminated': copies.contaminated,
    'units_on_both_sides': list(copies.units),
    **soundness.rates(found),
    'accepted_wrong': _told(found, 'wrong', True),
    'rejected_right': _told(found, 'right', False),
    **played,
    **known,
    'images': len(leaks),
    'leaks': {image: what for image, what in leaks.items() if what},
    'verifications': sum(each['judged'] for each in found.values()),
    'judged': fresh,  # of them in this run, which took
    'judged_seconds': round(judged, 1),
    'verifications_a_minute': round(60 * fresh / judged, 1) if fresh else None,
    'seconds': round(time.monotonic() - began, 1),
  }


def drawn(tasks: Sequence[types.Task], count: int, seed: str) -> list[types.Task]:
  """A seeded sample in table order, with as many units as there may be; 0: all."""
  if not count or count >= len(tasks):
    return list(tasks)
  order = list(tasks)
  random.Random(seed).shuffle(order)
  rounds: Counter[str] = Counter()
  keyed = []
  for task in order:
    keyed.append((rounds[task.unit], len(keyed), task))
    rounds[task.unit] += 1
  taken = {task.id for _, _, task in sorted(keyed, key=lambda k: k[:2])[:count]}
  return [task for task in tasks if task.id in taken]


def exploited(
  about: subject.Subject, tasks: Sequence[types.Task], plan: Plan
) -> list[types.Task]:
  """A seeded sample, and for packages one task of each, since their images differ."""
  some = drawn(tasks, plan.exploited, f'{plan.seed}/exploits') if plan.exploited else []
  units = {task.unit for task in some}
  for image, of_it in about.images(tasks).items():
    if image.startswith('suite/') and of_it[0].unit not in units:
      some.append(of_it[0])
      units.add(of_it[0].unit)
  return some or list(tasks[:1])


async def exploits(
  about: subject.Subject,
  tasks: Sequence[types.Task],
  answers: ledger.Ledger,
  plan: Plan,
  says: Callable[[str], None],
) -> dict[str, Any]:
  """Plays the standing list on every one of some tasks."""
  gate, rows = asyncio.Semaphore(plan.at_once), []
  says(f'{about.family}: the standing list of exploits on {len(tasks)} tasks')

  async def one(task: types.Task, attempt: subject.Attempt) -> None:
    async def make() -> dict[str, Any]:
      played = await about.play(task, attempt.calls)
      return {
        'value': played.outcome.value,
        'alone': played.raw,  # the verifier without signs
        'solved_alone': played.raw is not None and played.raw >= task.solved_at,
        'flags': list(played.flags),
      }

    async with gate:
      key = f'exploit/{task.id}/{attempt.exploit}'
      row = await answers.once(key, make)
    rows.append({'task': task.id, 'exploit': attempt.exploit, **row})

  work = [(task, each) for task in tasks for each in about.attempts(task)]
  await asyncio.gather(*(one(*each) for each in work))
  rows.sort(key=lambda row: (row['task'], row['exploit']))
  return {
    'exploited_tasks': len(tasks),
    'exploits': len({row['exploit'] for row in rows}),
    'exploits_tried': len(rows),
    'exploits_scored': [row for row in rows if row['value']],
    'exploits_unflagged': [row for row in rows if not row['flags']],
    'exploits_solved_alone': [row for row in rows if row['solved_alone']],
    'signs': dict(Counter(f.split(' (')[0] for row in rows for f in row['flags'])),
    'exploit_examples': rows[:: max(1, len(rows) // _EXAMPLES)][:_EXAMPLES],
  }


async def players(
  about: subject.Subject,
  tasks: Sequence[types.Task],
  answers: ledger.Ledger,
  plan: Plan,
) -> dict[str, Any]:
  """Plays who knows the gold, and who does nothing, through the tools themselves."""
  gate = asyncio.Semaphore(plan.at_once)

  async def one(task: types.Task, who: str, calls: Sequence[Any]) -> dict[str, Any]:
    async def make() -> dict[str, Any]:
      played = await about.play(task, calls)
      value = played.outcome.value
      solved = value is not None and value >= task.solved_at
      return {'value': value, 'solved': solved, 'flags': list(played.flags)}

    async with gate:
      return await answers.once(f'player/{who}/{task.id}', make)

  both = [(task, *about.players(task)) for task in tasks]
  gold = await asyncio.gather(
    *(one(task, 'gold', calls) for task, calls, _ in both if calls is not None)
  )
  null = await asyncio.gather(*(one(task, 'null', calls) for task, _, calls in both))
  names = [task.id for task, calls, _ in both if calls is not None]
  return {
    'gold_played': len(gold),
    'gold_solved': sum(each['solved'] for each in gold),
    'gold_failed': {n: e for n, e in zip(names, gold, strict=True) if not e['solved']},
    'null_played': len(null),
    'null_solved': sum(each['solved'] for each in null),
  }


async def scan(
  about: subject.Subject, tasks: Sequence[types.Task], answers: ledger.Ledger
) -> dict[str, list[str]]:
  """Image -> findings, of the images of some tasks; [] where there was nothing."""
  images = about.images(tasks)
  left = {
    image: some for image, some in images.items() if f'leak/{image}' not in answers
  }
  if left:
    asked = {task.id: task for some in left.values() for task in some}
    for image, what in (await about.leaks(list(asked.values()))).items():
      if f'leak/{image}' not in answers:
        answers.put(f'leak/{image}', what)
  return {image: answers.get(f'leak/{image}') for image in images}


def _told(
  found: Mapping[str, Mapping[str, Any]], kind: str, bad: bool
) -> list[dict[str, str]]:
  """The solutions that the verifier was wrong about."""
  return [
    {'task': name, 'label': label}
    for name, each in found.items()
    for label, solved in each[kind].items()
    if solved is bad
  ]


def sound(
  tasks: Sequence[types.Task], report: Mapping[str, Any]
) -> tuple[list[types.Task], dict[str, str]]:
  """(tasks that may give rewards, barred id -> reason), by a family's report."""
  barred = dict(report['barred'])
  for other, name in (
    ('duplicates', 'the same as'),
    ('contaminated', 'a near-copy of the training task'),
  ):
    barred |= {i: f'{name} {first}' for i, first in report[other].items()}
  return [task for task in tasks if task.id not in barred], barred


def banded(
  tasks: Sequence[types.Task],
  estimates: Mapping[str, difficulty.Estimate],
  cfg: config.Tasks,
) -> dict[str, int]:
  """How many tasks are in the band, beside it, or not tried enough.

  By the plain share that was solved: the prior that training begins with would have all
  tasks in the band after a few tries.
  """
  counts: Counter[str] = Counter()
  for task in tasks:
    estimate = estimates.get(task.id, difficulty.Estimate())
    if not estimate.tries or estimate.tries < cfg.band_tries:
      counts['not tried'] += 1
      continue
    share = estimate.solved / estimate.tries
    hard, easy = share < cfg.band_low, share > cfg.band_high
    counts['hard' if hard else 'easy' if easy else 'in the band'] += 1
  return dict(counts)
