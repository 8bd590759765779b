"""The live screen of a run, fed by its files; plain lines where there is no terminal.

The supervisor says in which phase the run is (`update`) and what happened (`event`);
rows come from `metrics.jsonl` (`poll`) or by hand (`step`). A value that was not
recorded shows as '-'. The cursor is given back by `close`, which also runs at exit,
so that an interrupted run leaves a sane terminal.
"""

import atexit
from collections.abc import Mapping, Sequence
import os
import statistics
import sys
import threading
import time
from typing import Any

from rich import box, live, markup, panel, progress_bar, table
from rich import console as rich_console

from swe17.metrics import lines, records

_BARS = '▁▂▃▄▅▆▇█'
_ASCII_BARS = '_.-~=+*#'
_EVENTS = 4
_WIDTH = 24  # steps in a sparkline
_RECENT = 8  # steps that the time left is judged by


class Screen:
  """Shows a run of `total_steps` learner steps; safe to call from several threads."""

  def __init__(
    self,
    run_dir: str,
    total_steps: int,
    console: rich_console.Console | None = None,
  ):
    self._path = os.path.join(run_dir, records.FILE)
    self._run_dir = run_dir
    self._total = total_steps
    # isatty and not rich's own guess, which colour variables can talk into escapes.
    self._console = console or rich_console.Console(
      force_terminal=sys.stdout.isatty(), highlight=False
    )
    self._lock = threading.RLock()
    self._events: list[str] = []
    self._phase, self._detail = 'starting', ''
    self._fraction: float | None = None
    self._seconds_left: float | None = None
    self._started = self._phase_started = time.monotonic()
    self._inode, self._offset = -1, 0
    self._rows: list[Mapping[str, Any]] = []
    self._rows += self._fresh()  # of a run that is resumed: known, not news
    self._live: live.Live | None = None
    if self._console.is_terminal and not self._console.is_dumb_terminal:
      self._live = live.Live(
        console=self._console, get_renderable=self._render, refresh_per_second=4
      )
      self._live.start()
    atexit.register(self.close)

  def update(
    self,
    phase: str,
    detail: str = '',
    fraction: float | None = None,
    *,
    seconds_left: float | None = None,
  ) -> None:
    """Says what the run does: its phase, a detail ('step 3/300'), the share done.

    `seconds_left` is the caller's estimate; without one it follows from the share
    done, and while training from the time of the last steps.
    """
    with self._lock:
      new = phase != self._phase
      if new:
        self._phase_started = time.monotonic()
      self._phase, self._detail = phase, detail
      self._fraction, self._seconds_left = fraction, seconds_left
      if new and self._live is None:
        self._print(f'phase: {phase}' + (f' ({detail})' if detail else ''))

  def poll(self) -> int:
    """Shows the rows that `metrics.jsonl` gained since the last call; says how many.

    A line that is still being written is left for the next call. Where a resume has
    cut the file, the rows that were cut are forgotten and only new ones are shown.
    """
    fresh = self._fresh()
    for row in fresh:
      self.step(row)
    return len(fresh)

  def _fresh(self) -> list[dict[str, Any]]:
    """Whole rows of the file that are not among `_rows`."""
    try:
      with open(self._path, 'rb') as f:
        stat = os.fstat(f.fileno())
        # A resume puts another file in its place.
        cut = stat.st_ino != self._inode or stat.st_size < self._offset
        if cut:
          self._inode, self._offset = stat.st_ino, 0
        f.seek(self._offset)
        data = f.read()
    except FileNotFoundError:
      return []
    whole = data[: data.rfind(b'\n') + 1]
    self._offset += len(whole)
    found = [value for value in map(lines.parse, whole.split(b'\n')) if value]
    fresh = [{**dict.fromkeys(records.NAMES), **v} for v in found if 'step' in v]
    if not cut:
      return fresh
    with self._lock:
      same = 0
      for old, new in zip(self._rows, fresh, strict=False):
        if old != new:
          break
        same += 1
      del self._rows[same:]
    return fresh[same:]

  def step(self, row: Mapping[str, Any]) -> None:
    """Shows one row of metrics."""
    with self._lock:
      self._rows.append(row)
      if self._live is None:
        self._print(line(row, self._total, self._left()))

  def event(self, text: str) -> None:
    """Shows what happened, e.g. that a sampler died and was started again."""
    with self._lock:
      self._events.append(f'{clock(time.monotonic() - self._started)}  {text}')
      if self._live is None:
        self._print(f'event: {text}')

  def close(self) -> None:
    """Leaves the last picture on the terminal and gives the cursor back."""
    atexit.unregister(self.close)
    # Not under our lock: the refreshing thread may wait for it while we join in.
    screen, self._live = self._live, None
    if screen is not None:
      screen.stop()

  def __enter__(self) -> 'Screen':
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _print(self, text: str) -> None:
    print(text, file=self._console.file, flush=True)

  def _last(self, name: str, missing: Any = None) -> Any:
    value = self._rows[-1][name] if self._rows else None
    return missing if value is None else value

  def _left(self) -> float | None:
    """Seconds left of the phase, or None where nothing tells."""
    if self._seconds_left is not None:
      return self._seconds_left
    if self._phase == 'training':
      recent = [row['step_seconds'] for row in self._rows[-_RECENT:]]
      recent = [s for s in recent if s is not None]
      if not recent:
        return None
      return statistics.median(recent) * max(0, self._total - self._last('step', 0))
    if self._fraction is None or self._fraction < 0.03:
      return None
    spent = time.monotonic() - self._phase_started
    return spent * (1 - self._fraction) / self._fraction

  def _render(self) -> rich_console.RenderableType:
    with self._lock:
      return self._panel()

  def _panel(self) -> panel.Panel:
    plain = not self._console.encoding.lower().startswith('utf')
    bars = _ASCII_BARS if plain else _BARS
    done = self._fraction
    if done is None and self._phase == 'training':
      done = self._last('step', 0) / max(1, self._total)
    head = table.Table.grid(padding=(0, 2), expand=True)
    head.add_column(ratio=3)
    head.add_column(ratio=2)
    head.add_column(justify='right', no_wrap=True)
    doing = f'[bold]{markup.escape(self._phase)}[/]  {markup.escape(self._detail)}'
    head.add_row(
      doing,
      progress_bar.ProgressBar(
        total=1.0, completed=min(1.0, done or 0.0), pulse=done is None
      ),
      f'{clock(self._left())} left',
    )
    body = table.Table(box=None, show_header=False, expand=True, padding=(0, 2, 0, 0))
    body.add_column(width=18, no_wrap=True)
    body.add_column(ratio=1, no_wrap=True)
    body.add_column(width=_WIDTH, no_wrap=True)
    for label, value, name in _cells(self._rows, self._total):
      spark = sparkline([row[name] for row in self._rows], bars) if name else ''
      body.add_row(f'[dim]{label}[/]', value, f'[cyan]{spark}[/]')
    whole = table.Table.grid(expand=True)
    whole.add_row(head)
    whole.add_row(body)
    for text in self._events[-_EVENTS:]:
      whole.add_row(f'[yellow]{markup.escape(text)}[/]')
    spent = clock(time.monotonic() - self._started)
    return panel.Panel(
      whole,
      title=f'swe17  {markup.escape(self._run_dir)}',
      subtitle=f'{spent} so far',
      box=box.ASCII if plain else box.ROUNDED,
    )


def _cells(rows: Sequence[Mapping[str, Any]], total: int) -> list[tuple[str, str, str]]:
  """(label, value with unit, column of the sparkline) of the newest row."""
  row = rows[-1] if rows else dict.fromkeys(records.NAMES)
  recent = [r['solve_rate'] for r in rows[-5:] if r['solve_rate'] is not None]
  solved = _percent(row['solve_rate'])
  if len(recent) > 1:
    solved += f' (last {len(recent)}: {_percent(statistics.fmean(recent))})'
  return [
    ('step', f'{_number(row["step"] or 0, "d")} of {total}', ''),
    ('solve rate', solved, 'solve_rate'),
    ('entropy', f'{_number(row["entropy"], ".3f")} nats', 'entropy'),
    ('mismatch k3', f'{_number(row["k3"], ".2g")} nats', 'k3'),
    ('staleness', _staleness(row), 'staleness_mean'),
    ('tokens an episode', _tokens(row), 'total_tokens'),
    ('speed', f'{_number(row["tokens_per_second"], ",.0f")} tokens/s', ''),
  ]


def line(row: Mapping[str, Any], total: int, left: float | None) -> str:
  """One plain ASCII line of a row, with units."""
  return ' | '.join(
    [
      f'step {row["step"]}/{total}',
      f'solve {_percent(row["solve_rate"])} of {_number(row["solve_rate_count"], "d")}',
      f'entropy {_number(row["entropy"], ".3f")} nats',
      f'k3 {_number(row["k3"], ".2g")} nats',
      f'staleness {_staleness(row)}',
      f'{_tokens(row)} tokens/episode',
      f'{_number(row["tokens_per_second"], ".0f")} tokens/s',
      f'{clock(left)} left',
    ]
  )


def sparkline(values: Sequence[float | None], bars: str = _BARS) -> str:
  """The newest values as bars between their least and largest; a gap where None."""
  values = values[-_WIDTH:]
  known = [v for v in values if v is not None]
  if not known:
    return ''
  low, span = min(known), max(known) - min(known)
  top = len(bars) - 1
  return ''.join(
    ' ' if v is None else bars[round((v - low) / span * top) if span else 0]
    for v in values
  )


def clock(seconds: float | None) -> str:
  """Seconds as m:ss or h:mm:ss; '-' where unknown."""
  if seconds is None:
    return '-'
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{rest:02d}' if hours else f'{minutes}:{rest:02d}'


def _percent(value: float | None) -> str:
  return '-' if value is None else f'{100 * value:.1f} %'


def _number(value: float | None, form: str) -> str:
  return '-' if value is None else format(value, form)


def _staleness(row: Mapping[str, Any]) -> str:
  mean, most = row['staleness_mean'], row['staleness_max']
  return f'{_number(mean, ".1f")} (max {_number(most, "g")}) steps'


def _tokens(row: Mapping[str, Any]) -> str:
  thinking, total = row['thinking_tokens'], row['total_tokens']
  return f'{_number(thinking, ".0f")} thinking, {_number(total, ".0f")} total'
