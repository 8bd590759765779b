"""How hard tasks are, from outcomes of a policy, and which of them to rest.

  share solved of a task, with a prior of one solved and one not, against a band:
  above it nothing is left to learn, below it nothing is learnt from

An estimate is a count (tries, solved). It halves its past as it goes on, since the
policy changes: what was too hard comes into the band later, so that a resting task is
tried again now and then (`tasks.band_retry`).
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
import random
from typing import Any

from swe17 import config, types

_MEMORY = 32.0  # tries after which older ones count half


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Tries and how many of them solved, both as weights."""

  tries: float = 0.0
  solved: float = 0.0

  @property
  def rate(self) -> float:
    """Expected share solved, with one of each as a prior."""
    return (self.solved + 1.0) / (self.tries + 2.0)


def updated(estimate: Estimate, tries: int, solved: int) -> Estimate:
  """After some more tries."""
  keep = 0.5 ** (tries / _MEMORY)
  return Estimate(estimate.tries * keep + tries, estimate.solved * keep + solved)


def told(group: types.Group) -> dict[str, Any]:
  """What a group says of its task; episodes without an outcome say nothing."""
  solved = [e.solved for e in group.episodes if e.status != 'invalid']
  return {'task': group.task_id, 'tried': len(solved), 'solved': sum(solved)}


def replayed(
  estimates: Mapping[str, Estimate], groups: Iterable[Mapping[str, Any]]
) -> dict[str, Estimate]:
  """The estimates after groups, each as `told`; other rows of a log are passed over."""
  out = dict(estimates)
  for row in groups:
    if 'tried' in row:
      old = out.get(row['task'], Estimate())
      out[row['task']] = updated(old, row['tried'], row['solved'])
  return out


def read(path: str) -> dict[str, Estimate]:
  """The estimates of a file that the build wrote; {} of ''. ValueError: not one."""
  if not path:
    return {}
  out = {}
  for number, line in enumerate(pathlib.Path(path).read_text('utf-8').splitlines(), 1):
    try:
      row = json.loads(line)
      out[row['id']] = Estimate(float(row['tries']), float(row['solved']))
    except (json.JSONDecodeError, KeyError, TypeError) as e:
      raise ValueError(f'tasks.difficulty: {path}, line {number}: {e}') from e
  return out


def write(path: str, estimates: Mapping[str, Estimate]) -> None:
  """Writes what `read` reads, in order of the tasks' ids."""
  rows = [
    json.dumps({'id': name, 'tries': e.tries, 'solved': e.solved})
    for name, e in sorted(estimates.items())
  ]
  pathlib.Path(path).write_text('\n'.join([*rows, '']), encoding='utf-8')


def side(estimate: Estimate, cfg: config.Tasks) -> str:
  """'hard', 'easy', or '' for in the band or not tried often enough."""
  if estimate.tries < cfg.band_tries:
    return ''
  if estimate.rate < cfg.band_low:
    return 'hard'
  return 'easy' if estimate.rate > cfg.band_high else ''


def draw_from(
  tasks: Sequence[types.Task],
  estimates: Mapping[str, Estimate],
  cfg: config.Tasks,
  seed: int,
  start: int,
) -> Sequence[types.Task]:
  """What a start index draws from: the tasks in the band, or once in a while all.

  All of them where fewer than a handful are in the band: a few tasks over and over are
  worse than tasks that teach little.
  """
  if cfg.band_low <= 0.0 and cfg.band_high >= 1.0:
    return tasks
  if random.Random(f'{seed}/{start}/band').random() < cfg.band_retry:
    return tasks
  kept = [t for t in tasks if not side(estimates.get(t.id, Estimate()), cfg)]
  return kept if len(kept) >= min(len(tasks), cfg.band_least) else tasks


def of_record(record: Mapping[str, Any]) -> dict[str, Estimate]:
  """Estimates from an evaluation's record (evals/*.json), of whatever model it was."""
  n = float(record['samples'])
  return {name: Estimate(n, n * share) for name, share in record['tasks'].items()}


def table(outcomes: Iterable[tuple[str, bool]]) -> dict[str, Estimate]:
  """Estimates from (task id, solved) pairs, every one counting alike."""
  counts: dict[str, list[int]] = {}
  for task_id, solved in outcomes:
    mine = counts.setdefault(task_id, [0, 0])
    mine[0] += 1
    mine[1] += solved
  return {name: Estimate(float(n), float(k)) for name, (n, k) in counts.items()}
