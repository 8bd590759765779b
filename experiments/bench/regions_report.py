"""What became of a run over regions: its groups, its pauses, its curves.

A group is *finished* when its episodes are graded, and then *stored*. It is accounted
for if it was consumed by the learner (trained, without signal, or dropped for a reason
that the learner counted), waits in the store, or waits in a file of its region's
outbox. A finished one that is nowhere among these is lost; so is one that the learner
consumed and has in no column of its rows.

A pause of the learner is a stall if it is longer than `STALL` times the usual time
between its steps. While one of three equal regions is away the others bring two thirds
of the groups, so a step waits 1.5 times as long; twice that is left to chance. A step
that took more groups, because its first batch gave no signal, is allowed that much
more. A region stalls if it stores no group after the line is whole again, and one that
is not cut off if it stores none while another is.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import io
import itertools
import json
import pathlib
import statistics
from typing import Any

from matplotlib import figure
import numpy as np

from swe17.metrics import figures, records
from swe17.store import groups as group_store
from swe17.store import kv
from swe17.sync import follower

STALL = 3.0


@dataclasses.dataclass(frozen=True)
class Cut:
  """When the line of a region was cut, in seconds since 1970."""

  region: int
  began: float
  ended: float


@dataclasses.dataclass(frozen=True)
class Groups:
  """Start indices by what became of them."""

  started: set[int]
  finished: set[int]
  stored: dict[int, list[float]]  # rollout index -> when, in seconds since 1970
  consumed: set[int]
  waiting: set[int]  # in the store or in an outbox
  trained: int
  no_signal: int
  dropped: int

  @property
  def lost(self) -> int:
    """Finished and nowhere, or consumed and in no column of the learner's rows."""
    nowhere = self.finished - self.consumed - self.waiting
    uncounted = len(self.consumed) - self.trained - self.no_signal - self.dropped
    return len(nowhere) + max(0, uncounted)


def groups(run_dir: pathlib.Path, store: kv.Store) -> Groups:
  """Reads what became of every group of a run that has ended.

  ValueError if the run published no version.
  """
  plan = follower.read_plan(store)
  if plan is None:
    raise ValueError(f'the run in {run_dir} has no weight version in {store.url}')
  below, rest = plan.plan['consumed_below'], plan.plan['consumed_rest']
  consumed = set(range(below)) | set(rest)
  in_store = {group_store.start_of(k) for k in group_store.list_new(store, ())}
  boxes = (run_dir / 'outbox').glob('*/*.group')
  starts: dict[str, set[int]] = {'started': set(), 'finished': set()}
  stored: dict[int, list[float]] = {}
  for path in sorted(run_dir.glob('rollout-*.jsonl')):
    index = int(path.stem.rsplit('-', 1)[1])
    for event in records.read_events(str(path)):
      if event['kind'] in starts:
        starts[event['kind']].add(event['start'])
      elif event['kind'] == 'stored':
        stored.setdefault(index, []).append(event['time'])
  rows = records.read(str(run_dir))
  return Groups(
    started=starts['started'],
    finished=starts['finished'],
    stored=stored,
    consumed=consumed,
    waiting=(in_store | {int(path.stem) for path in boxes}) - consumed,
    trained=sum(row['groups_trained'] for row in rows),
    no_signal=sum(row['groups_no_signal'] for row in rows),
    dropped=sum(row['groups_dropped'] for row in rows),
  )


def learner_stalls(rows: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
  """(step, seconds) of every step that came later than it should have.

  The first step is left out: it waits for the first evaluation.
  """
  spans = []
  for before, row in itertools.pairwise(rows):
    taken = row['groups_trained'] + row['groups_no_signal']
    spans.append((row['step'], row['time'] - before['time'], taken))
  usual = statistics.median(s for _, s, _ in spans) if spans else 0.0
  batch = statistics.median(taken for _, _, taken in spans) if spans else 0
  return [
    (step, seconds)
    for step, seconds, taken in spans
    if seconds > STALL * usual * max(1.0, taken / max(batch, 1))
  ]


def region_stalls(
  stored: Mapping[int, Sequence[float]], regions: int, cut: Cut
) -> list[str]:
  """What a region should have done after the cut, or beside it, and did not."""
  said = []
  for region in range(regions):
    times = [t for index, ts in stored.items() if index % regions == region for t in ts]
    if not any(t > cut.ended for t in times):
      said.append(f'region {region} stored nothing after the cut')
    if region != cut.region and not any(cut.began < t < cut.ended for t in times):
      said.append(f'region {region} stored nothing while {cut.region} was cut off')
  return said


def curve(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Solve rate of the last third of the steps; staleness and pace over all."""
  last = rows[-max(1, len(rows) // 3) :]
  known = [row for row in rows if row['staleness_count']]
  weights = [row['staleness_count'] for row in known]
  ages = [row['staleness_mean'] for row in known]
  spans = [b['time'] - a['time'] for a, b in itertools.pairwise(rows)]
  return {
    'solve_last_third': records.mean([r['solve_rate'] for r in last]),
    'staleness_mean': float(np.average(ages, weights=weights)) if known else None,
    'staleness_max': max((row['staleness_max'] for row in known), default=None),
    'seconds': rows[-1]['time'] if rows else None,
    'step_seconds_median': statistics.median(spans) if spans else None,
    'step_seconds_max': max(spans, default=None),
  }


def heldout(run_dir: pathlib.Path) -> dict[str, list[float]]:
  """{before, after: [mean, low, high]} of the evaluations that are there."""
  found = {}
  for label in ('before', 'after'):
    path = run_dir / 'evals' / f'{label}.json'
    if path.exists():
      e = json.loads(path.read_bytes())
      found[label] = [e['pass_at_1'], e['low'], e['high']]
  return found


def draw(
  runs: Mapping[str, Sequence[Mapping[str, Any]]], cut_steps: tuple[float, float] | None
) -> bytes:
  """A PNG: solve rate and staleness of each run by step, the cut shaded."""
  fig = figure.Figure(figsize=(7.0, 6.0), layout='constrained')
  upper, lower = fig.subplots(2, 1, sharex=True)
  colours = (figures.BLUE, figures.ORANGE, figures.GREEN)
  for (name, rows), colour in zip(runs.items(), colours, strict=False):
    step = np.array([row['step'] for row in rows], np.float64)

    def column(key: str, scale: float, rows=rows) -> np.ndarray:
      values = [row[key] for row in rows]
      return np.array([np.nan if v is None else scale * v for v in values], np.float64)

    solved = column('solve_rate', 100)
    upper.plot(step, solved, 'o', color=colour, alpha=0.3, markersize=4, mew=0)
    mean = figures.smooth(solved, figures.half_life(rows))
    upper.plot(step, mean, color=colour, linewidth=2, label=name)
    lower.plot(step, column('staleness_mean', 1), color=colour, label=f'{name}, mean')
    lower.plot(
      step,
      column('staleness_max', 1),
      color=colour,
      linestyle=(0, (4, 3)),
      label=f'{name}, max',
    )
  for ax in (upper, lower):
    if cut_steps is not None:
      ax.axvspan(*cut_steps, color='#d1d5db', alpha=0.6, label='a region cut off')
    ax.grid(color='#e5e7eb')
    ax.set_ylim(bottom=0)
    place = {'loc': 'lower left', 'bbox_to_anchor': (0, 1), 'borderaxespad': 0.2}
    ax.legend(frameon=False, fontsize=9, ncols=3, **place)
  upper.set_ylabel('episodes solved [%]')
  lower.set_ylabel('age of the oldest token [steps]')
  lower.set_xlabel('learner step (equal groups a step)')
  buffer = io.BytesIO()
  fig.savefig(buffer, format='png', dpi=110)
  return buffer.getvalue()
