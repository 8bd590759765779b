"""Builds the table of repair_functions: which faults of which functions are tasks.

Kept is a fault only if, in `REPEATS` runs out of `REPEATS`, the original runs on all
cases, the fault is caught by the visible and by the hidden ones, nothing times out or
dies, and no verdict wavers. Everything is drawn from the seed: the same command on the
same library gives the same table.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
import dataclasses
import platform
import random

from swe17.env import splits
from swe17.env.repair import faults, functions, grader, inputs, repair

REPEATS = 3
MIN_CANDIDATES, MAX_CANDIDATES = 8, 40  # of a function neither too easy nor too hard
DROPPED = 0.08  # share of functions that try one dropped line


@dataclasses.dataclass(frozen=True)
class Report:
  """What was accepted, and why the rest was not."""

  functions: int
  accepted: int
  rejected_functions: dict[str, int]  # reason -> how many
  rejected_faults: dict[str, int]
  kinds: dict[str, dict[str, int]]  # split -> kind -> tasks
  units: dict[str, int]  # split -> functions


async def build(
  graders: grader.Graders, *, per_function: int, heldout: float, seed: int
) -> tuple[list[repair.Row], Report]:
  """Returns the rows in table order, and the report.

  Rows of a split come in rounds, one task of each function a round, so that the first
  n rows are of as many functions as there are.
  """
  bad_functions: Counter[str] = Counter()
  bad_faults: Counter[str] = Counter()
  sources: dict[str, str] = {}
  for name, entry in functions.catalogue().items():
    source = functions.source_of(entry.module, entry.function)
    reason = _unfit(source)
    if source is None or reason:
      bad_functions[reason] += 1
    else:
      sources[name] = source
  split = splits.assign(splits.clusters(sources), heldout, seed)
  catalogue = functions.catalogue()
  gate = asyncio.Semaphore(8)

  async def one(name: str) -> list[repair.Row]:
    async with gate:
      search = _Search(graders, catalogue[name], sources[name], seed, bad_faults)
      reason = await search.prepare()
      if reason:
        bad_functions[reason] += 1
        return []
      accepted = await search.choose(per_function)
    if not accepted:
      bad_functions['no fault accepted'] += 1
    return [
      _row(catalogue[name], sources[name], fault, number, split[name], seed)
      for number, fault in enumerate(accepted)
    ]

  found = await asyncio.gather(*(one(name) for name in sorted(sources)))
  rows = _rounds(found, seed)
  return rows, _report(rows, len(catalogue), bad_functions, bad_faults)


def _unfit(source: str | None) -> str:
  if source is None:
    return 'not in this Python'
  if reason := functions.misfit(source):
    return reason
  count = len(faults.candidates(source))
  if count < MIN_CANDIDATES:
    return 'too few candidates'
  return 'too many candidates' if count > MAX_CANDIDATES else ''


class _Search:
  """The search for faults in one function."""

  def __init__(
    self,
    graders: grader.Graders,
    entry: inputs.Entry,
    source: str,
    seed: int,
    rejected: Counter[str],
  ):
    self._graders = graders
    self._entry = entry
    self._source = source
    self._rng = random.Random(f'{entry.name}/{seed}/faults')
    self._rejected = rejected
    visible, hidden = functions.cases(entry, seed)
    self._cases = (*visible, *hidden)
    self._expected: tuple[str, ...] = ()

  async def prepare(self) -> str:
    """Runs the original; why the function is no material, or ''."""
    if len(self._cases) < functions.VISIBLE + functions.MIN_HIDDEN:
      return 'too few inputs'
    runs = [await self._run(self._source) for _ in range(REPEATS)]
    if not all(map(repair.final, runs[0])):
      return 'the original does not run'
    if len(set(runs)) > 1:
      return 'the original wavers'
    self._expected = runs[0]
    return '' if len(set(runs[0][: functions.VISIBLE])) > 1 else 'constant'

  async def choose(self, wanted: int) -> list[faults.Fault]:
    """At most `wanted` accepted faults, of many kinds; a dropped line comes last."""
    left = list(faults.candidates(self._source))
    self._rng.shuffle(left)
    last: list[faults.Fault] = []
    lines = faults.dropped_lines(self._source)
    if lines and self._rng.random() < DROPPED:
      last = [self._rng.choice(lines)]
    last = [fault for fault in last if await self._accepts(fault)]
    accepted: list[faults.Fault] = []
    kinds: Counter[str] = Counter()
    while left and len(accepted) + len(last) < wanted:
      fault = min(left, key=lambda f: kinds[f.kind])  # the first of the rarest kind
      left.remove(fault)
      if await self._accepts(fault):
        kinds[fault.kind] += 1
        accepted.append(fault)
    return accepted + last

  async def _accepts(self, fault: faults.Fault) -> bool:
    reason = await self._examine(fault)
    if reason:
      self._rejected[reason] += 1
    return not reason

  async def _examine(self, fault: faults.Fault) -> str:
    source = faults.apply(self._source, fault.line, fault.old, fault.new)
    first = await self._run(source)
    reason = repair.unsound(self._expected, first, functions.VISIBLE)
    if reason:
      return reason
    for _ in range(REPEATS - 1):
      if await self._run(source) != first:
        return 'wavers'
    return ''

  async def _run(self, source: str) -> tuple[str, ...]:
    entry = self._entry
    check = grader.Check(entry.module, entry.function, source, self._cases)
    return await self._graders.run(check)


def _row(
  entry: inputs.Entry,
  source: str,
  fault: faults.Fault,
  number: int,
  split: str,
  seed: int,
) -> repair.Row:
  return repair.Row(
    id=f'{entry.name}/{number}',
    python='.'.join(platform.python_version_tuple()[:2]),
    module=entry.module,
    function=entry.function,
    source_sha=functions.sha(source),
    **dataclasses.asdict(fault),
    split=split,
    seed=seed,
  )


def _rounds(found: Sequence[list[repair.Row]], seed: int) -> list[repair.Row]:
  rng = random.Random(f'{seed}/order')
  rows = []
  for split in ('train', 'heldout'):
    units = [rows for rows in found if rows and rows[0].split == split]
    for number in range(max(map(len, units), default=0)):
      rng.shuffle(units)
      rows += [unit[number] for unit in units if number < len(unit)]
  return rows


def _report(
  rows: Sequence[repair.Row],
  total: int,
  bad_functions: Counter[str],
  bad_faults: Counter[str],
) -> Report:
  kinds: dict[str, dict[str, int]] = {}
  units: dict[str, int] = {}
  for split in ('train', 'heldout'):
    mine = [row for row in rows if row.split == split]
    kinds[split] = dict(sorted(Counter(row.kind for row in mine).items()))
    units[split] = len({(row.module, row.function) for row in mine})
  return Report(
    functions=total,
    accepted=len(rows),
    rejected_functions=dict(bad_functions.most_common()),
    rejected_faults=dict(bad_faults.most_common()),
    kinds=kinds,
    units=units,
  )
