"""Tells the author of an environment what is wrong with it.

  python -m experiments.check_env experiments.example_env:Guess
  python -m experiments.check_env my_package.my_env:MyEnv

`module:Env` names a class made from a task, with a static `tasks()` that gives a few;
or `families:<name>`, a family of swe17/env/families.py, of which a few tasks are taken.
Every check is played on every task (20 at most). Exit code 1 and one line for each
problem, which says what was seen and what is wanted; 0 and 'no problem' otherwise.

A task's payload may have `gold`, [[tool, arguments], ...]: calls that solve it.
"""

import asyncio
from collections.abc import Callable, Sequence
import importlib
import sys
from typing import Any

from absl import app, flags

from experiments import program
from swe17 import config, types
from swe17.env import check, families

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_MOST = 20  # tasks


def find(name: str) -> type[Any]:
  """The class that 'module:Env' names. ValueError says what is not there."""
  module, _, attribute = name.partition(':')
  if not module or not attribute:
    raise ValueError(
      f'got {name!r}, want module:Env, such as experiments.example_env:Guess'
    )
  try:
    found = getattr(importlib.import_module(module), attribute, None)
  except ImportError as e:
    raise ValueError(f'{module} cannot be imported: {e}') from e
  if found is None:
    raise ValueError(f'{module} has no {attribute}')
  return found


async def problems(name: str) -> list[str]:
  """All that is wrong with the environment of that name."""
  if name.startswith('families:'):
    family = families.get(name.removeprefix('families:'))
    tasks, _ = family.read(config.Tasks(family=family.name, train=_MOST, heldout=1))
    host = await family.open(config.Sandbox())
    try:
      sound, _ = await host.verify(tasks[:_MOST])
      return await check.environment(host.env, sound)
    finally:
      await host.close()
  made: Callable[[types.Task], Any] = find(name)
  tasks_of = getattr(made, 'tasks', None)
  if not callable(tasks_of):
    return [f'{name} has no static tasks(): it gives a few tasks to check with']
  return await check.environment(made, list(tasks_of())[:_MOST])


def main(argv: Sequence[str]) -> None:
  if len(argv) != 2:
    raise app.UsageError('want one argument, module:Env')
  try:
    found = asyncio.run(problems(argv[1]))
  except ValueError as e:
    found = [str(e)]
  for problem in found:
    print(problem)
  if found:
    sys.exit(1)
  print('no problem found')


if __name__ == '__main__':
  program.run(main, FLAGS)
