"""Rebuilds the report of a run: python -m experiments.report --run_dir=runs/...

Reads the files of the run folder only, so it works during a run and after a crash.
"""

from collections.abc import Sequence
import sys

from absl import app, flags

from experiments import program
from swe17.metrics import report

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_RUN_DIR = flags.DEFINE_string(
  'run_dir', None, 'folder of the run', required=True, flag_values=FLAGS
)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got stray argument {argv[1]!r}, want --run_dir=...')
  try:
    print(report.write(_RUN_DIR.value))
  except (ValueError, OSError) as e:
    print(f'report: {e}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  program.run(main, FLAGS)
