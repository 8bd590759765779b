"""A grid of runs, one after another, with intervals over seeds at the end.

  python -m experiments.sweep --config=experiments/configs/quickstart.py \\
      --sweep=optim.lr=1e-4,3e-4 --sweep=sampler.top_p=.9,.95 --seeds=3
      12 runs of experiments.swe17: every combination, seeds 0, 1 and 2
  ... --dry_run
      print the commands, run nothing
  ... --config.steps=20
      a setting for every run
  ... --dir=runs/mine
      where the runs go (default: a folder named by the grid, so that the same command
      finds it again)

The same command goes on where it stopped: what has finished (`evals/after.json`) is
kept, what was begun goes on with --resume. A run that fails does not stop the others.
Ctrl-C stops the running one cleanly. Ends with a table, `sweep.png` and `summary.json`.
Values that hold commas are separated by semicolons: --sweep='tasks.kinds=a,b;c'.

Exit codes: 0 all finished, 1 a run failed, 2 bad input (nothing was run), 130 Ctrl-C.
"""

from collections.abc import Callable, Sequence
import difflib
import hashlib
import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

from absl import flags
from rich import console

from experiments import sweep_grid, sweep_report
from launch import folder as run_folder

# Runs one cell with the arguments of experiments.swe17, to its exit code, or until the
# function says that a signal came.
Run = Callable[[sweep_grid.Cell, Sequence[str], Callable[[], bool]], int]

_HELP = {'-h', '--help', '--helpshort', '--helpfull'}
_SECONDS_TO_STOP = 10.0  # a run ends within 5 of its signal


def main(argv: Sequence[str], run: Run | None = None) -> int:
  """Runs the command line `argv` (without the program's name) to its exit code."""
  if _HELP.intersection(argv):
    print(__doc__)
    return 0
  try:
    chosen, more = _flags(argv)
    grid = sweep_grid.parse(chosen.sweep)
    folder = pathlib.Path(chosen.dir or _folder(chosen, grid, more)).absolute()
    cells = sweep_grid.cells(chosen.config, more, grid, chosen.seeds, folder)
    if not chosen.dry_run:
      folder.mkdir(parents=True, exist_ok=True)
  except (ValueError, OSError, flags.Error) as e:
    print(f'error: {" ".join(str(e).split())}', file=sys.stderr)
    return 2
  if chosen.dry_run:
    for cell in cells:
      print(_line(cell))
    return 0
  head = {
    'command': shlex.join(['python', '-m', 'experiments.sweep', *argv]),
    'config': chosen.config,
    'sweep': grid,
    'seeds': chosen.seeds,
  }
  failed: dict[str, str] = {}
  with _Signals() as signals:
    _run_all(cells, run or run_cell, signals, folder, head, failed)
  _finish(folder, head, cells, failed)
  if signals.number:
    print('stopped: the same command goes on from here', file=sys.stderr)
    return 128 + signals.number
  return 1 if failed else 0


def _flags(argv: Sequence[str]) -> tuple[Any, list[str]]:
  """The sweep's own flags, and the settings for every cell. ValueError on others."""
  parsed = flags.FlagValues()
  parsed.set_gnu_getopt(True)
  flags.DEFINE_string('config', '', 'config file[:argument]', flag_values=parsed)
  flags.DEFINE_multi_string('sweep', [], 'setting=value,value', flag_values=parsed)
  flags.DEFINE_integer('seeds', 1, 'how many seeds', flag_values=parsed)
  flags.DEFINE_string('dir', '', 'folder of the runs', flag_values=parsed)
  flags.DEFINE_bool('dry_run', False, 'print the commands', flag_values=parsed)
  own = [f'--{name}' for name in ('config', 'sweep', 'seeds', 'dir', 'dry_run')]
  more = parsed(['sweep', *argv], known_only=True)[1:]
  for arg in more:
    name = arg.partition('=')[0]
    if not name.startswith('-'):
      raise ValueError(f'unexpected argument {arg!r}: settings are --config.name=value')
    if not name.lstrip('-').removeprefix('no').startswith('config.'):
      near = difflib.get_close_matches(name, own, 1, cutoff=0.5)
      said = f'the nearest is {near[0]}' if near else f'want one of {", ".join(own)}'
      raise ValueError(f'unknown flag {name}; {said}')
  if not parsed.config:
    raise ValueError('nothing to run: give --config=<config file> (see --help)')
  if parsed.seeds < 1:
    raise ValueError(f'--seeds: got {parsed.seeds}, want >= 1')
  return parsed, more


def _folder(chosen: Any, grid: dict[str, list[str]], more: Sequence[str]) -> str:
  """The same for the same grid (whatever the number of seeds), so that it resumes."""
  text = json.dumps([chosen.config, grid, sorted(more)])
  stem = pathlib.Path(chosen.config.partition(':')[0]).stem
  return f'runs/sweep-{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}'


def arguments(cell: sweep_grid.Cell) -> list[str]:
  """What a cell's run is started with now: with --resume if it has begun."""
  resumed = ['--resume'] if sweep_grid.state(cell) == 'begun' else []
  return [*cell.argv, *resumed]


def _line(cell: sweep_grid.Cell) -> str:
  if sweep_grid.state(cell) == 'finished':
    return f'# finished: {cell.run_dir}'
  return shlex.join(['python', '-m', 'experiments.swe17', *arguments(cell)])


def _run_all(
  cells: Sequence[sweep_grid.Cell],
  run: Run,
  signals: '_Signals',
  folder: pathlib.Path,
  head: dict[str, Any],
  failed: dict[str, str],
) -> None:
  """Runs what has not finished until a signal; `failed` is filled as runs fail."""
  for number, cell in enumerate(cells, 1):
    where = f'[{number}/{len(cells)}] {cell.name}'
    state = sweep_grid.state(cell)
    if state == 'finished':
      print(f'{where}: finished before', flush=True)
      continue
    how = 'goes on' if state == 'begun' else 'runs'
    print(f'{where}: {how}, log in {cell.log}', flush=True)
    code = run(cell, arguments(cell), lambda: bool(signals.number))
    if signals.number:
      return
    if sweep_grid.state(cell) != 'finished':
      last = run_folder.last_line(cell.log)
      failed[cell.name] = _why(code) + (f' ({last})' if last else '')
      print(f'{where}: failed, {failed[cell.name]}', flush=True)
    sweep_report.write(folder, head, sweep_report.collect(cells, failed))


def _why(code: int) -> str:
  if code == 0:
    return 'ended without evals/after.json'
  if code < 0:
    return f'killed by {signal.Signals(-code).name}'
  return f'exit code {code}'


def run_cell(
  cell: sweep_grid.Cell, argv: Sequence[str], stopped: Callable[[], bool]
) -> int:
  """Runs one cell as a process of its own, its output into its log, to its exit code.

  Once `stopped()` it is told to end, and killed if it does not.
  """
  cell.run_dir.mkdir(parents=True, exist_ok=True)
  with open(cell.log, 'ab') as log:
    # A session of its own: Ctrl-C reaches it once, from here.
    running = subprocess.Popen(
      [sys.executable, '-m', 'experiments.swe17', *argv],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  while running.poll() is None and not stopped():
    time.sleep(0.1)
  if running.poll() is None:
    running.send_signal(signal.SIGINT)
    try:
      running.wait(_SECONDS_TO_STOP)
    except subprocess.TimeoutExpired:
      running.kill()
  return running.wait()


def _finish(
  folder: pathlib.Path,
  head: dict[str, Any],
  cells: Sequence[sweep_grid.Cell],
  failed: dict[str, str],
) -> None:
  """Writes and shows what there is, finished or not."""
  found = sweep_report.collect(cells, failed)
  sweep_report.write(folder, head, found)
  sweep_report.show(found, console.Console(width=None if sys.stdout.isatty() else 160))
  print(f'drawn in {sweep_report.draw(folder, found)}')
  print(f'numbers in {folder / "summary.json"}', flush=True)


class _Signals:
  """While entered, remembers the first signal that asks for an end."""

  def __init__(self) -> None:
    self.number = 0

  def __enter__(self) -> '_Signals':
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    self._before = {kind: signal.signal(kind, self._stop) for kind in kinds}
    return self

  def __exit__(self, *_: object) -> None:
    for kind, handler in self._before.items():
      signal.signal(kind, handler)

  def _stop(self, number: int, _: object) -> None:
    self.number = self.number or number


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
