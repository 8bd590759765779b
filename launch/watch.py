"""What a run says of itself: to the screen while it runs, and in words at its end."""

import pathlib
import subprocess
import sys
from typing import Any

from launch import process
from swe17 import config
from swe17.metrics import lines, report, statistics
from swe17.metrics import screen as screens

_SHOWN = ('restart', 'alarm', 'warning')  # kinds of events that a person should see


class Feed:
  """Carries status files, new rows of metrics and new events to the screen."""

  def __init__(self, run_dir: str, screen: screens.Screen):
    self._folder, self._screen = pathlib.Path(run_dir), screen
    events = self._folder / 'events.jsonl'
    self._at = events.stat().st_size if events.exists() else 0  # bytes already seen

  def pump(self) -> None:
    """One round: what the roles do now, then rows and events that are new."""
    status = phase(self._folder)
    if status is not None:
      self._screen.update(status['phase'], status['detail'], status['fraction'])
    self._screen.poll()
    for event in self._events():
      if event.get('kind') in _SHOWN and 'text' in event:
        self._screen.event(event['text'])

  def _events(self) -> list[dict[str, Any]]:
    path = self._folder / 'events.jsonl'
    if not path.exists():
      return []
    with open(path, 'rb') as f:
      f.seek(self._at)
      text = f.read()
    whole = text[: text.rfind(b'\n') + 1]  # the last line may be half written
    self._at += len(whole)
    return [e for e in map(lines.parse, whole.splitlines()) if e is not None]


def phase(run_folder: pathlib.Path) -> dict[str, Any] | None:
  """What the run is doing: the learner's status, with the rollout's beside it.

  Once the learner is done it is the rollout's alone (the last evaluation). Returns
  {'phase', 'detail', 'fraction', 'time'}, or None while nobody has said anything.
  """
  found = {}
  more = sorted(path.stem for path in (run_folder / 'status').glob('rollout-*.json'))
  for role in ('learner', 'rollout', *more):
    path = run_folder / 'status' / f'{role}.json'
    status = lines.parse(path.read_bytes()) if path.exists() else None
    if status is not None:
      found[role] = status
  if 'learner' not in found or 'rollout' not in found:
    return next(iter(found.values()), None)
  if found['learner']['phase'] == 'done':
    return found['rollout']
  said = [found['learner']['detail']]
  for role in ('rollout', *more):
    if role in found:
      beside = f'{found[role]["phase"]} {found[role]["detail"]}'.strip()
      said.append(beside and f'{role}: {beside}')
  return {**found['learner'], 'detail': '; '.join(s for s in said if s)}


def write_report(run_dir: str) -> None:
  """Writes report.html; what keeps it from being written is said, not raised."""
  # Imported here: it brings matplotlib, which nobody needs while the roles start.

  try:
    report.write(run_dir)
  except (OSError, ValueError) as e:
    print(f'no report.html: {e}', file=sys.stderr)


def write_report_within(run_dir: str, seconds: float) -> None:
  """Writes report.html in a process of its own, or says that time was too short."""
  # Below a second it would not even get through its imports.
  if seconds < 1 or not _report_process(run_dir, seconds):
    again = f'python -m experiments.report --run_dir={run_dir}'
    print(f'report.html was not brought up to date: {again}', file=sys.stderr)


def _report_process(run_dir: str, seconds: float) -> bool:
  try:
    subprocess.run(
      [sys.executable, '-m', 'experiments.report', f'--run_dir={run_dir}'],
      cwd=process.ROOT,
      timeout=seconds,
      stdin=subprocess.DEVNULL,
      capture_output=True,
      start_new_session=True,
      check=True,
    )
  except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
    return False
  return True


def summary(cfg: config.Config, seconds: float) -> str:
  """The held-out solve rate before and after, the minutes, and the run folder."""
  minutes = f'{seconds / 60:.1f} minutes'
  return '\n'.join([*_solve_rates(cfg), minutes, f'run folder: {cfg.run_dir}'])


def _solve_rates(cfg: config.Config) -> list[str]:
  paths = sorted((pathlib.Path(cfg.run_dir) / 'evals').glob('*.json'))
  found = [e for e in (lines.parse(path.read_bytes()) for path in paths) if e]
  held = [e for e in found if e['split'] == 'heldout']
  evals = sorted(held, key=lambda e: e['version'])
  if not evals:
    return ['held-out solve rate: not evaluated']
  before, after = evals[0], evals[-1]
  said = [f'held-out solve rate at version {before["version"]}: {_rate(before)}']
  if len(evals) == 1:
    return said
  said.append(f'held-out solve rate at version {after["version"]}: {_rate(after)}')
  try:
    pairs, alone = statistics.pairs(before, after)
    found = statistics.paired_interval(*pairs, seed=cfg.seed)
  except ValueError as e:  # too few tasks with an outcome on both sides
    return [*said, f'paired difference: not computed: {e}']
  difference, low, high = (100 * x for x in found)
  without = f'; {alone} tasks are without an outcome on one side' if alone else ''
  said.append(
    f'paired difference: {difference:+.1f} points [{low:+.1f}, {high:+.1f}] '
    f'(95 %, {len(pairs[0])} functions resampled{without})'
  )
  return said


def _rate(e: dict[str, Any]) -> str:
  mean, low, high = (100 * e[key] for key in ('pass_at_1', 'low', 'high'))
  return f'{mean:.1f} % [{low:.1f}, {high:.1f}]'
