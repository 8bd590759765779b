"""How a program of experiments/ gets its flags: its own set, joined when it is run.

absl keeps one set of flags a process, and a name is defined in it once: two programs
that both have `--seed` could not be imported side by side, as tests and other programs
do. So each defines its flags in a set of its own.
"""

from collections.abc import Callable, Sequence
import sys

from absl import app, flags

Main = Callable[[list[str]], object]


def run(main: Main, own: flags.FlagValues) -> None:
  """Parses the command line with the flags of `own` beside absl's; calls `main`."""
  flags.FLAGS.append_flag_values(own)
  for name in own:
    # For --help, which lists the flags of the program by where they were defined.
    flags.FLAGS.register_key_flag_for_module(sys.argv[0], own[name])

  def parsed(argv: list[str]) -> object:
    own.mark_as_parsed()
    return main(argv)

  app.run(parsed)


def parse(argv: Sequence[str], own: flags.FlagValues) -> None:
  """Parses `argv` (with the program's name first) for `own` alone, as a test does."""
  own(list(argv))
