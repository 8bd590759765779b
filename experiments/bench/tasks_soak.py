"""Episodes by the hundred, 32 at once: no process, file or memory is left behind.

  python -m experiments.bench.tasks_soak                1,000 episodes, about a minute
  python -m experiments.bench.tasks_soak --episodes=64 --families=retrieval_small

Careful scripted agents and agents that try exploits take turns on training tasks of
several families. What is counted is this process and all below it: processes, open
descriptors, files in the folders for temporary ones, and memory (proportional set
size). Counted twice on the way, once caches are filled, and at the end: a worker that
was just replaced may be missing from one count, and caches of warm processes (a few
for each task of the kernels) fill up to their bound. The bench fails if processes,
descriptors or files are more at the end than ever before; memory may grow by
`--most_mib`. The last line is JSON:

  {"episodes": .., "at_once": .., "processes": [before, after], "descriptors": [..],
   "files": [..], "mib": [..], "seconds": .., "invalid": ..}
"""

import asyncio
from collections.abc import Sequence
import dataclasses
import gc
import itertools
import json
import os
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

from absl import flags

from experiments import program, task_audit
from swe17 import config, types
from swe17.env import families
from swe17.env.audit import subjects
from swe17.env.packages import packages
from swe17.rollout import episodes

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_EPISODES = flags.DEFINE_integer('episodes', 1000, 'episodes', flag_values=FLAGS)
_AT_ONCE = flags.DEFINE_integer('at_once', 32, 'episodes at once', flag_values=FLAGS)
_FAMILIES = flags.DEFINE_list(
  'families',
  ['repair_functions', 'retrieval_small', 'kernels_small'],
  'task families, in turns',
  flag_values=FLAGS,
)
_TASKS = flags.DEFINE_integer('tasks', 6, 'tasks of a family', flag_values=FLAGS)
_MOST = flags.DEFINE_float(
  'most_mib', 64.0, 'growth of memory that is allowed', flag_values=FLAGS
)
_PARTS = (0.3, 0.65)  # shares of the episodes before the first counts
_SETTLE = 5.0  # seconds for what was killed to be gone


@dataclasses.dataclass(frozen=True)
class Count:
  """What this process and all below it hold."""

  processes: int
  descriptors: int
  files: int
  mib: float


def count() -> Count:
  """Counts now. Linux: reads /proc."""
  gc.collect()
  pids = _below(os.getpid())
  descriptors, kib = 0, 0
  for pid in pids:
    try:
      descriptors += len(os.listdir(f'/proc/{pid}/fd'))
      text = pathlib.Path(f'/proc/{pid}/smaps_rollup').read_text('ascii')
    except (FileNotFoundError, ProcessLookupError, PermissionError):
      continue  # gone, or another's
    kib += sum(int(row.split()[1]) for row in text.splitlines() if 'Pss:' in row)
  files = sum(len(names) for _, _, names in os.walk(tempfile.gettempdir()))
  return Count(len(pids), descriptors, files, kib / 1024)


def _below(pid: int) -> list[int]:
  """A process and all its descendants."""
  parents: dict[int, list[int]] = {}
  for name in filter(str.isdigit, os.listdir('/proc')):
    try:
      stat = pathlib.Path(f'/proc/{name}/stat').read_text('ascii', 'replace')
    except (FileNotFoundError, ProcessLookupError):
      continue
    parents.setdefault(int(stat.rpartition(')')[2].split()[1]), []).append(int(name))
  found, waiting = [], [pid]
  while waiting:
    found.append(waiting.pop())
    waiting += parents.get(found[-1], [])
  return found


def highest(counts: Sequence[Count]) -> Count:
  """The most of each that was counted."""
  return Count(*map(max, zip(*map(dataclasses.astuple, counts), strict=True)))


async def settled(want: Count | None = None) -> Count:
  """Counts once nothing more ends, or `_SETTLE` seconds are over."""
  end = time.monotonic() + _SETTLE
  while True:
    await asyncio.sleep(0.2)
    now = count()
    few = want is None or (
      now.processes <= want.processes
      and now.descriptors <= want.descriptors
      and now.files <= want.files
    )
    if (few and want is not None) or time.monotonic() > end:
      return now


@dataclasses.dataclass
class Place:
  """A family that episodes are played in: as a world, and as a subject."""

  world: episodes.World
  about: subjects.subject.Subject
  tasks: list[types.Task]
  name: str


async def open_place(name: str, tasks: int) -> Place:
  """A family with some tasks of its own."""
  sandbox = config.Sandbox()
  cfg = task_audit.settings_of(name)
  read, _ = await asyncio.to_thread(families.get(name).read, cfg.tasks)
  host = await families.get(name).open(sandbox)
  some = [task for task in read if task.split == 'train'][:tasks]
  sound = some if name == packages.FAMILY else (await host.verify(some))[0]
  fmt = episodes.format_of(cfg, families.get(name))
  about = await subjects.SUBJECTS[name](sandbox, cfg.tasks)
  return Place(episodes.World(cfg, [], [], {}, host, fmt), about, sound, name)


async def one(place: Place, number: int) -> bool:
  """One episode, of an agent that works or of one that cheats; whether it is valid."""
  task = place.tasks[number % len(place.tasks)]
  if number % 4 == 3:
    attempts = place.about.attempts(task)
    attempt = attempts[number // 4 % len(attempts)]
    played = await place.about.play(task, attempt.calls)
    return played.outcome.value is not None
  strengths = list(task_audit.STRENGTHS[place.name].values())
  rng = random.Random(f'{place.name}/{number}')
  agent = strengths[number % len(strengths)](place.world.fmt, rng)
  found = await place.world.episode(
    task, agent, f'{place.name}-{number}', 0, types.Sampling()
  )
  return found.status != 'invalid' or found.outcome.cheated


async def soak(
  names: Sequence[str], total: int, at_once: int, tasks: int
) -> tuple[Count, Count, int]:
  """(most that was counted on the way, count at the end, episodes without outcome)."""
  places = [await open_place(name, tasks) for name in names]
  turns = itertools.cycle(places)
  gate, invalid = asyncio.Semaphore(at_once), 0

  async def guarded(place: Place, number: int) -> None:
    nonlocal invalid
    async with gate:
      invalid += not await one(place, number)

  async def part(numbers: range) -> None:
    await asyncio.gather(*(guarded(next(turns), number) for number in numbers))

  first, second = (max(1, int(share * total)) for share in _PARTS)
  try:
    await part(range(first))
    counts = [await settled()]
    await part(range(first, second))
    counts.append(await settled())
    before = highest(counts)
    await part(range(second, total))
    return before, await settled(before), invalid
  finally:
    for place in places:
      await place.world.close()
      await place.about.close()


def main(argv: Sequence[str]) -> None:
  del argv
  began = time.monotonic()
  with tempfile.TemporaryDirectory(prefix='soak-') as scratch:
    tempfile.tempdir = scratch  # ours alone, so that files of others do not count
    os.environ['TMPDIR'] = scratch
    before, after, invalid = asyncio.run(
      soak(_FAMILIES.value, _EPISODES.value, _AT_ONCE.value, _TASKS.value)
    )
    tempfile.tempdir = None
  row: dict[str, Any] = {'episodes': _EPISODES.value, 'at_once': _AT_ONCE.value}
  for field in dataclasses.fields(Count):
    pair = [getattr(before, field.name), getattr(after, field.name)]
    row[field.name] = [round(value, 1) for value in pair]
  row |= {'seconds': round(time.monotonic() - began), 'invalid': invalid}
  print(json.dumps(row))
  if leaked(before, after, _MOST.value) or invalid:
    sys.exit(1)


def leaked(before: Count, after: Count, most_mib: float) -> list[str]:
  """What is more at the end than it may be."""
  found = [
    f'{name}: {getattr(before, name)}, then {getattr(after, name)}'
    for name in ('processes', 'descriptors', 'files')
    if getattr(after, name) > getattr(before, name)
  ]
  if after.mib > before.mib + most_mib:
    found.append(f'memory: {before.mib:.0f} MiB, then {after.mib:.0f}')
  return found


if __name__ == '__main__':
  program.run(main, FLAGS)
