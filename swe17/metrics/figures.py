"""The pictures of a run's report, from its rows of metrics.

Faint dots are the rows as recorded, lines their exponential average. A value that was
not recorded leaves a gap; a picture without any recorded value is not drawn.
"""

from collections.abc import Mapping, Sequence
import io
from typing import Any

import matplotlib
from matplotlib import figure, ticker
import numpy as np

from swe17.metrics import pictures

# Okabe and Ito's palette: told apart with the common colour-vision deficiencies.
BLUE, ORANGE, GREEN, PINK = '#0072B2', '#D55E00', '#009E73', '#CC79A7'
_COLOURS = (BLUE, ORANGE, GREEN, PINK)
_GREY = '#6b7280'
_STYLE = {
  'font.size': 10,
  'axes.edgecolor': '#9ca3af',
  'axes.labelcolor': '#374151',
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'axes.axisbelow': True,
  'grid.color': '#e5e7eb',
  'grid.linewidth': 0.8,
  'xtick.color': '#4b5563',
  'ytick.color': '#4b5563',
  'legend.frameon': False,
  'svg.hashsalt': 'swe17',
}


def column(rows: Sequence[Mapping[str, Any]], line: pictures.Line) -> np.ndarray:
  """A column as floats [rows], NaN where it was not recorded."""
  values = [row.get(line.column) for row in rows]
  return np.array([np.nan if v is None else v * line.scale for v in values], np.float64)


def smooth(values: np.ndarray, half_life: float) -> np.ndarray:
  """Exponential average over recorded values, unbiased at the start; NaN stays NaN."""
  decay = 0.5 ** (1 / half_life)
  total = weight = 0.0
  out = np.full(values.shape, np.nan)
  for i, value in enumerate(values):
    total, weight = total * decay, weight * decay
    if np.isfinite(value):
      total, weight = total + value, weight + 1
      out[i] = total / weight
  return out


def half_life(rows: Sequence[Mapping[str, Any]]) -> float:
  """Half-life of the drawn average in steps: a twentieth of the run, 1.5 at least."""
  return max(1.5, len(rows) / 20)


def claim(picture: pictures.Picture, rows: Sequence[Mapping[str, Any]]) -> str:
  """What its first line did: mean of the first and of the last steps recorded."""
  line = picture.parts_of or picture.lines[0]
  values = column(rows, line)
  values = values[np.isfinite(values)]
  if not values.size:
    return 'not recorded'
  n = max(1, min(5, values.size // 2))
  what = 'whole step' if picture.parts_of else line.label
  unit = picture.ylabel.partition('[')[2].rstrip(']').removesuffix(' a token')
  form = '.4f' if unit == '1' else ',.0f' if abs(values).max() >= 1000 else '.3g'
  unit = ' ' + unit if unit not in ('', '1') else ''
  first, last = (format(v.mean(), form) for v in (values[:n], values[-n:]))
  steps = f'{n} steps' if n > 1 else 'step'
  return f'{what}: {first}{unit} (first {steps}) to {last}{unit} (last {steps})'


def draw(
  picture: pictures.Picture,
  rows: Sequence[Mapping[str, Any]],
  settings: Mapping[str, Any],
  points: Sequence[tuple[float, float, float, float]] = (),
  kind: str = 'svg',
) -> bytes | None:
  """One picture as bytes of an SVG or PNG, or None where nothing was recorded.

  `settings` maps dotted names to values, for guides. `points` are (step, mean, low,
  high) in axis units, drawn as squares with bars.
  """
  with matplotlib.rc_context(_STYLE):
    fig = figure.Figure(figsize=(6.4, 3.5), layout='constrained')
    ax = fig.add_subplot()
    step = np.array([row['step'] for row in rows], np.float64)
    if picture.parts_of is not None:
      drawn = _stack(ax, picture, picture.parts_of, step, rows)
    else:
      drawn = _lines(ax, picture, step, rows)
    if points:
      x, y, low, high = np.array(points, np.float64).T
      bars = np.maximum([y - low, high - y], 0)
      style = {'fmt': 's', 'color': ORANGE, 'capsize': 4, 'markersize': 6}
      ax.errorbar(x, y, yerr=bars, label='held-out tasks', zorder=4, **style)
      drawn = True
    if not drawn:
      return None
    for guide in picture.guides:
      _guide(ax, guide, settings)
    _axes(ax, picture)
    buffer = io.BytesIO()
    meta = {'Date': None} if kind == 'svg' else None
    fig.savefig(buffer, format=kind, metadata=meta, dpi=110)
    return buffer.getvalue()


def _lines(
  ax: Any, picture: pictures.Picture, step: np.ndarray, rows: Sequence[Any]
) -> bool:
  drawn = False
  for line, colour in zip(picture.lines, _COLOURS, strict=False):
    values = column(rows, line)
    if picture.log:  # no place on a log axis; the caption counts them
      values = np.where(values > 0, values, np.nan)
    if not np.isfinite(values).any():
      continue
    drawn = True
    ax.plot(step, values, 'o', color=colour, alpha=0.28, markersize=3.5, mew=0)
    if picture.log:
      mean = np.exp(smooth(np.log(values), half_life(rows)))
    else:
      mean = smooth(values, half_life(rows))
    seen = np.isfinite(mean)
    ax.plot(step[seen], mean[seen], color=colour, linewidth=2, label=line.label)
  return drawn


def _stack(
  ax: Any,
  picture: pictures.Picture,
  whole: pictures.Line,
  step: np.ndarray,
  rows: Sequence[Any],
) -> bool:
  """Bars of the parts, and of what they leave of the whole."""
  total = column(rows, whole)
  if not np.isfinite(total).any():
    return False
  base = np.zeros(step.shape)
  for line, colour in zip(picture.lines, _COLOURS, strict=False):
    values = column(rows, line)
    if np.isfinite(values).any():
      height = np.nan_to_num(values)
      ax.bar(step, height, 0.85, base, color=colour, label=line.label)
      base = base + height
  rest = np.maximum(np.nan_to_num(total) - base, 0)
  ax.bar(step, rest, 0.85, base, color='#d1d5db', label=whole.label)
  return True


def _guide(ax: Any, guide: pictures.Guide, settings: Mapping[str, Any]) -> None:
  at = settings.get(guide.at) if isinstance(guide.at, str) else guide.at
  if not isinstance(at, (int, float)):
    return
  ax.axhline(at * guide.scale, color=_GREY, linewidth=1.2, linestyle=(0, (5, 3)))
  ax.annotate(
    f'{guide.label} {at:g}',
    (1, at * guide.scale),
    xycoords=('axes fraction', 'data'),
    xytext=(-2, 3),
    textcoords='offset points',
    ha='right',
    color=_GREY,
    fontsize=9,
  )


def _axes(ax: Any, picture: pictures.Picture) -> None:
  ax.set_xlabel('learner step')
  ax.set_ylabel(picture.ylabel)
  ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
  if picture.log:
    ax.set_yscale('log')
  elif picture.name != 'ratio':
    ax.set_ylim(bottom=0)
  if picture.ylabel == 'episodes solved [%]':
    ax.set_ylim(0, 100)
  handles, labels = ax.get_legend_handles_labels()
  if len(labels) > 1:
    ax.legend(
      handles,
      labels,
      loc='lower left',
      bbox_to_anchor=(0, 1),
      ncols=min(len(labels), 4),
      borderaxespad=0.2,
      handlelength=1.2,
      columnspacing=1.0,
      handletextpad=0.5,
    )


def undrawn(picture: pictures.Picture, rows: Sequence[Mapping[str, Any]]) -> str:
  """Says what a picture had to leave out or take together; '' where nothing."""
  said = []
  if picture.log:
    for line in picture.lines:
      n = int((column(rows, line) <= 0).sum())
      if n:
        said.append(f'{n} steps of {line.label} are at or below 0 and not drawn')
  if picture.parts_of is not None:
    parts = np.array([column(rows, line) for line in picture.lines])
    n = int(np.isnan(parts).any(axis=0).sum())
    if n:
      said.append(f'in {n} steps a part was not recorded and is within the rest')
    n = int((np.nansum(parts, axis=0) > column(rows, picture.parts_of) * 1.01).sum())
    if n:
      said.append(f'in {n} steps the parts are longer than the step')
  return '; '.join(said)
