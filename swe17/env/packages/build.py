"""Builds the table of repair_packages: which faults of which packages are tasks.

  <work>/<package>.suite.json    what the suite does      (made once a tree)
  <work>/candidates.jsonl        one line a candidate     (appended)

Each candidate (faults.py) is judged by verdicts.py. A build that is started again goes
on after the last line. Same seed, same verdicts: same table.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import json
import logging
import pathlib
import random
import time
from typing import Any

from swe17 import config
from swe17.env import sandbox
from swe17.env.packages import faults, rows, sources, suite, verdicts


@dataclasses.dataclass(frozen=True)
class Report:
  """What was accepted, and why the rest was not."""

  tasks: int
  candidates: int
  rejected: dict[str, int]  # reason -> how many
  kinds: dict[str, dict[str, int]]  # split -> kind -> tasks
  packages: dict[str, int]  # package -> tasks
  tests: dict[str, int]  # package -> tests that can be relied on
  cpu_seconds: float  # of all verdicts


class Build:
  """A build with what it has done so far. Run it again to go on."""

  def __init__(
    self,
    cfg: config.Sandbox,
    work: pathlib.Path,
    *,
    seed: int = 0,
    cache: str = '',
    packages: Sequence[str] = (),
    per_function: int = 6,
    say: Callable[[str], None] = logging.info,
  ):
    self._cfg, self._work, self._seed, self._cache = cfg, work, seed, cache
    self._names = tuple(packages) or tuple(sources.SOURCES)
    self._per_function = per_function
    self._say = say
    self._file = work / 'candidates.jsonl'
    work.mkdir(parents=True, exist_ok=True)
    self._done = {(v.package, v.fault): v for v in read(self._file)}

  async def run(self, wanted: int, seconds: float = float('inf')) -> None:
    """Judges candidates until `wanted` are accepted, none is left or time is over.

    Every package gives about as many tasks as every other, as far as it has them.
    """
    self._backend = await asyncio.to_thread(sandbox.choose_backend, self._cfg)
    end = time.monotonic() + seconds
    idle = [_Line(self, name) for name in self._names]

    async def work() -> None:
      while idle and time.monotonic() < end and self.accepted < wanted:
        line = min(idle, key=lambda line: line.accepted)
        idle.remove(line)
        if not await line.step():
          idle.append(line)

    await asyncio.gather(*(work() for _ in range(self._cfg.workers)))

  @property
  def accepted(self) -> int:
    return sum(verdict.row is not None for verdict in self._done.values())

  async def suite_of(self, tree: sources.Tree) -> verdicts.Suite | None:
    """What the package's suite does, from the work folder if it is there."""
    file = self._work / f'{tree.name}.suite.json'
    if file.is_file():
      known = verdicts.Suite(**json.loads(file.read_text(encoding='utf-8')))
      if known.sha == tree.sha:
        return known
    try:
      known, cpu = await verdicts.examine(self._cfg, self._backend, tree)
    except ValueError as e:
      self._say(str(e))
      return None
    part = file.with_suffix('.part')
    part.write_text(json.dumps(dataclasses.asdict(known)), encoding='utf-8')
    part.replace(file)
    self._say(
      f'{tree.name}: {len(known.tests)} tests, {len(known.rejected)} of no use, '
      f'{len(known.runs)} functions, {cpu:.1f} s of CPU'
    )
    return known

  def verdict_of(self, package: str, fault: faults.Fault) -> verdicts.Verdict | None:
    return self._done.get((package, verdicts.short(fault)))

  async def judge(
    self, tree: sources.Tree, known: verdicts.Suite, fault: faults.Fault
  ) -> verdicts.Verdict:
    name = verdicts.short(fault)
    try:
      verdict = await verdicts.judge(
        self._cfg, self._backend, tree, known, fault, self._seed
      )
    except suite.SuiteError as e:
      self._say(f'{tree.name}/{name}: {e}')
      return verdicts.Verdict(tree.name, name, fault.kind, str(e), None, 0.0)
    if verdict.reason == verdicts.UNFINISHED:
      return verdict  # that says nothing of the fault: a later build tries it again
    self._done[verdict.package, verdict.fault] = verdict
    with self._file.open('a', encoding='utf-8') as file:
      file.write(json.dumps(_to_json(verdict), ensure_ascii=False) + '\n')
    return verdict

  def result(self) -> tuple[list[rows.Row], Report]:
    """Rows in table order, and the report."""
    found = [
      verdict for verdict in self._done.values() if verdict.package in self._names
    ]
    return table([v.row for v in found if v.row], self._seed), self._report(found)

  def _report(self, found: Sequence[verdicts.Verdict]) -> Report:
    accepted = [verdict.row for verdict in found if verdict.row]
    tests = {}
    for name in self._names:
      file = self._work / f'{name}.suite.json'
      if file.is_file():
        tests[name] = len(json.loads(file.read_text(encoding='utf-8'))['tests'])
    return Report(
      tasks=len(accepted),
      candidates=len(found),
      rejected=dict(Counter(v.reason for v in found if v.reason).most_common()),
      kinds={
        split: dict(Counter(row.kind for row in accepted if row.split == split))
        for split in ('train', 'heldout')
      },
      packages=dict(Counter(row.package for row in accepted)),
      tests=tests,
      cpu_seconds=round(sum(verdict.cpu_seconds for verdict in found), 1),
    )


class _Line:
  """The candidates of one package, in their order."""

  def __init__(self, build: Build, name: str):
    self._build, self._name = build, name
    self.accepted = 0
    self._functions: Counter[str] = Counter()
    self._left: Any = None
    self._tree: sources.Tree | None = None
    self._known: verdicts.Suite | None = None

  async def step(self) -> bool:
    """Goes on to the next accepted candidate; whether there are no more."""
    if self._left is None and not await self._begin():
      return True
    assert self._tree is not None and self._known is not None
    for fault in self._left:
      most = self._build._per_function
      if any(self._functions[place] >= most for place in fault.functions):
        continue
      verdict = self._build.verdict_of(self._name, fault)
      fresh = verdict is None
      if verdict is None:
        verdict = await self._build.judge(self._tree, self._known, fault)
      if verdict.row is not None:
        self.accepted += 1
        self._functions.update(fault.functions)
      if fresh:
        return False
    return True

  async def _begin(self) -> bool:
    build = self._build
    self._tree = sources.fetch(self._name, build._cache)
    self._known = await build.suite_of(self._tree)
    if self._known is None:
      return False
    places = frozenset(
      p for p, tests in self._known.runs.items() if len(tests) >= verdicts.FEWEST
    )
    self._left = faults.candidates(self._tree, build._seed, places)
    return True


def table(found: Sequence[rows.Row], seed: int) -> list[rows.Row]:
  """Rows in table order: split by split in rounds, one task of every package a round,
  so that the first n rows are of as many packages and kinds as there are."""
  made = []
  for split in ('train', 'heldout'):
    units: dict[str, list[rows.Row]] = {}
    for row in sorted((r for r in found if r.split == split), key=lambda r: r.id):
      units.setdefault(row.package, []).append(row)
    for name, unit in units.items():
      random.Random(f'{seed}/{name}/order').shuffle(unit)
    for number in range(max(map(len, units.values()), default=0)):
      made += [unit[number] for unit in units.values() if number < len(unit)]
  return made


def read(file: pathlib.Path) -> list[verdicts.Verdict]:
  """What a build's file holds. A last line that was cut off is taken away."""
  if not file.is_file():
    return []
  data = file.read_bytes()
  whole = data[: data.rfind(b'\n') + 1]
  if whole != data:
    file.write_bytes(whole)
  found = []
  for line in whole.decode().splitlines():
    values = json.loads(line)
    row = values.pop('row')
    found.append(verdicts.Verdict(**values, row=rows.from_json(row) if row else None))
  return found


def _to_json(verdict: verdicts.Verdict) -> dict[str, Any]:
  row = rows.to_json(verdict.row) if verdict.row else None
  return {**dataclasses.asdict(dataclasses.replace(verdict, row=None)), 'row': row}
