"""What a sweep found: a table, one picture, one JSON file, with intervals over seeds.

A row is a combination of swept values; its intervals are Student's t over the seeds
that finished. A cell that failed or has not run is counted and shown, never as 0.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Any

from matplotlib import figure, ticker
from rich import box, console, table

from experiments import seeds as seed_statistics
from experiments import sweep_grid
from swe17.metrics import lines

NOT_KNOWN = '-'
_NUMBERS = ('before', 'after', 'gain', 'minutes')
BLUE, ORANGE, GREY = '#0072B2', '#D55E00', '#9ca3af'


def collect(
  cells: Sequence[sweep_grid.Cell], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
  """One plain record a cell, its numbers None unless it has finished.

  failed: why, by the name of each cell that was tried and failed.
  """
  found = []
  for cell in cells:
    state: str = sweep_grid.state(cell)
    out: dict[str, Any] = {
      'settings': dict(cell.values),
      'seed': cell.seed,
      'state': 'failed' if cell.name in failed else state,
      'why': failed.get(cell.name),
      'log': str(cell.log),
      'run_dir': str(cell.run_dir),
      **dict.fromkeys(_NUMBERS),
    }
    after, before = (sweep_grid.record(cell, name) for name in ('after', 'before'))
    if out['state'] == 'finished' and after is not None:
      out['after'] = after['pass_at_1']
      if before is not None:
        out['before'] = before['pass_at_1']
        out['gain'] = after['pass_at_1'] - before['pass_at_1']
      path = cell.run_dir / 'run.json'
      run = lines.parse(path.read_bytes()) if path.exists() else None
      seconds = (run or {}).get('seconds')
      out['minutes'] = None if seconds is None else seconds / 60
    found.append(out)
  return found


def rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """One record a combination: counts, and {mean, low, high} of each number or None."""
  groups: dict[str, list[Mapping[str, Any]]] = {}
  for cell in found:
    groups.setdefault(sweep_grid.combination(cell['settings']), []).append(cell)
  out = []
  for group in groups.values():
    row: dict[str, Any] = {'settings': group[0]['settings'], 'seeds': len(group)}
    for state in ('finished', 'failed'):
      row[state] = sum(cell['state'] == state for cell in group)
    for name in _NUMBERS:
      known = [cell[name] for cell in group if cell[name] is not None]
      row[name] = None
      if known:
        ends = seed_statistics.interval(known)
        row[name] = dict(zip(('mean', 'low', 'high'), ends, strict=True))
    out.append(row)
  return out


def write(
  folder: pathlib.Path, head: Mapping[str, Any], found: Sequence[Mapping[str, Any]]
) -> None:
  """Writes `summary.json` whole or not at all: the sweep, its rows, its cells."""
  document = {**head, 'rows': rows(found), 'cells': list(found)}
  text = json.dumps(document, indent=1) + '\n'
  lines.replace(str(folder / 'summary.json'), text.encode())


def show(found: Sequence[Mapping[str, Any]], out: console.Console) -> None:
  """Prints the table, and below it every cell that failed with its log."""
  names = list(found[0]['settings'])
  shown = table.Table(
    box=box.SIMPLE, title='Held-out solve rate [%], 95 % intervals over seeds'
  )
  for name in names or ['settings']:
    shown.add_column(name, no_wrap=True)
  for name in ('seeds', 'before', 'after', 'gain', 'minutes'):
    shown.add_column(name, justify='right', no_wrap=True)
  for row in rows(found):
    first = [row['settings'][name] for name in names] or ['as configured']
    done = f'{row["finished"]} of {row["seeds"]}'
    done += f', {row["failed"]} failed' if row['failed'] else ''
    rates = [_rate(row[name]) for name in ('before', 'after', 'gain')]
    minutes = row['minutes'] and f'{row["minutes"]["mean"]:.1f}'
    shown.add_row(*first, done, *rates, minutes or NOT_KNOWN)
  out.print(shown)
  for cell in found:
    if cell['state'] == 'failed':
      name = sweep_grid.combination(cell['settings'])
      text = f'failed: {name} seed {cell["seed"]}: {cell["why"]}; see {cell["log"]}'
      out.print(text, markup=False, highlight=False, soft_wrap=True)


def _rate(number: Mapping[str, Any] | None) -> str:
  if number is None:
    return NOT_KNOWN
  if number['low'] is None:
    return f'{100 * number["mean"]:.1f}'
  mean, low, high = (100 * number[key] for key in ('mean', 'low', 'high'))
  return rf'{mean:.1f} \[{low:.1f}, {high:.1f}]'


def draw(folder: pathlib.Path, found: Sequence[Mapping[str, Any]]) -> pathlib.Path:
  """Draws `sweep.png`: a line a combination, dots its seeds, bars its intervals."""
  summary = rows(found)
  fig = figure.Figure(figsize=(8, 1.4 + 0.45 * len(summary)), layout='constrained')
  ax = fig.add_subplot()
  for y, row in enumerate(summary):
    cells = [cell for cell in found if cell['settings'] == row['settings']]
    dots = [100 * cell['after'] for cell in cells if cell['after'] is not None]
    ax.plot(dots, [y] * len(dots), '|', color=GREY, ms=9, label='a seed, after')
    _bar(ax, row['before'], y + 0.15, color=GREY, fmt='o', label='before')
    _bar(ax, row['after'], y, color=BLUE, fmt='s', label='after')
    if not dots:
      ax.text(0.01, y, 'no seed finished', color=ORANGE, va='center',
              transform=ax.get_yaxis_transform())  # fmt: skip
  names = [sweep_grid.combination(row['settings']) for row in summary]
  ax.set_yticks(range(len(names)), names)
  ax.set_ylim(len(names) - 0.5, -0.5)
  ax.set_xlabel('held-out tasks solved [%]')
  ax.xaxis.set_major_locator(ticker.MaxNLocator(8))
  ax.grid(axis='x', color='#e5e7eb')
  ax.set_axisbelow(True)
  ax.spines[['top', 'right']].set_visible(False)
  handles, labels = ax.get_legend_handles_labels()
  once = dict(zip(labels, handles, strict=True))
  if once:
    ax.legend(once.values(), once.keys(), frameon=False, loc='best')
  ax.set_title('Held-out solve rate, mean and 95 % interval over seeds')
  path = folder / 'sweep.png'
  fig.savefig(path, dpi=120)
  return path


def _bar(ax: Any, number: Mapping[str, Any] | None, y: float, **style: Any) -> None:
  if number is None:
    return
  mean = 100 * number['mean']
  error = None
  if number['low'] is not None:
    error = [[mean - 100 * number['low']], [100 * number['high'] - mean]]
  ax.errorbar([mean], [y], xerr=error, capsize=3, ms=6, **style)
