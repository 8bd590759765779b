"""Tells the author of an environment what is wrong with it.

  python -m experiments.check_env experiments.example_env:Guess
  python -m experiments.check_env my_package.my_env:MyEnv

`module:Env` names a class made from a task, with a static `tasks()` that gives a few;
or `families:<name>`, a family of swe17/env/families.py, of which a few tasks are taken.
Families that read other people's tasks want to be told where those are:

  python -m experiments.check_env families:harbor tasks.root=folder tasks.place=local

and then every task that is set aside is a problem too, with its reason.
Every check is played on every task (20 at most). Exit code 1 and one line for each
problem, which says what was seen and what is wanted; 0 and 'no problem' otherwise.

A task's payload may have `gold`, [[tool, arguments], ...]: calls that solve it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import sys
from typing import Any

from absl import app, flags

from experiments import program
from swe17 import config, types
from swe17.env import base, check, families

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_MOST = 20  # tasks
_READ: Mapping[type, Callable[[str], Any]] = {
  bool: lambda text: text == 'true',
  int: int,
  float: float,
  str: str,
}


def find(name: str) -> type[Any]:
  """The class that 'module:Env' names. ValueError says what is not there."""
  module, _, attribute = name.partition(':')
  if not module or not attribute:
    raise ValueError(
      f'got {name!r}, want module:Env, such as experiments.example_env:Guess'
    )
  return base.named(name, module, attribute)


def settings(words: Sequence[str]) -> tuple[config.Tasks, config.Sandbox]:
  """What 'tasks.name=value' and 'sandbox.name=value' make of them. ValueError."""
  given: dict[str, dict[str, Any]] = {'tasks': {}, 'sandbox': {}}
  known = {'tasks': config.Tasks, 'sandbox': config.Sandbox}
  for word in words:
    name, equals, text = word.partition('=')
    section, _, leaf = name.partition('.')
    fields = {f.name: f for f in dataclasses.fields(known.get(section, config.Tasks))}
    if not equals or section not in known or leaf not in fields:
      raise ValueError(f'got {word!r}, want tasks.name=value or sandbox.name=value')
    given[section][leaf] = _READ[type(fields[leaf].default)](text)
  return config.Tasks(**given['tasks']), config.Sandbox(**given['sandbox'])


async def of_family(name: str, words: Sequence[str]) -> list[str]:
  """All that is wrong with the environments of a family, at those settings."""
  family = families.get(name)
  cfg, box = settings(words)
  if not words:
    cfg = config.Tasks(train=_MOST, heldout=1)
  tasks, aside = family.read(dataclasses.replace(cfg, family=family.name))
  host = await family.open(box)
  try:
    sound, unsound = await host.verify(tasks[:_MOST])
    found = [f'{task}: set aside: {why}' for task, why in {**aside, **unsound}.items()]
    played = await check.environment(host.env, sound)
    return [*found, *played] if words or not sound else played
  finally:
    await host.close()


async def problems(name: str, words: Sequence[str] = ()) -> list[str]:
  """All that is wrong with the environment of that name."""
  if name.startswith('families:'):
    return await of_family(name.removeprefix('families:'), words)
  if words:
    raise ValueError(f'got {words[0]!r}: only families have settings')
  made: Callable[[types.Task], Any] = find(name)
  tasks_of = getattr(made, 'tasks', None)
  if not callable(tasks_of):
    return [f'{name} has no static tasks(): it gives a few tasks to check with']
  return await check.environment(made, list(tasks_of())[:_MOST])


def main(argv: Sequence[str]) -> None:
  if len(argv) < 2:
    raise app.UsageError('want module:Env, or families:name with its settings')
  try:
    found = asyncio.run(problems(argv[1], argv[2:]))
  except ValueError as e:
    found = [str(e)]
  for problem in found:
    print(problem)
  if found:
    sys.exit(1)
  print('no problem found')


if __name__ == '__main__':
  program.run(main, FLAGS)
