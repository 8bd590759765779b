"""A family under audit of which no more is known than its tools and its golds.

  gold        the calls of a task's payload (`gold`, as check_env plays it)
  exploits    the standing list as text, in every parameter that takes text: commands
              where it is called `command`, else what stands in code

So it is for families that somebody else's `module:factory` gives; those of formats/ add
what they know. Nothing is known here of right and wrong solutions, and of images.
"""

from collections.abc import Mapping, Sequence
import random
from typing import Any

from swe17 import config, types
from swe17.env import base, families
from swe17.env.audit import cheating, contamination, exploits, subject

COMMAND = 'command'
NAMES: Mapping[str, str] = {'module': 'solution', 'function': 'solve'}
# Parameters that tell where, not what.
_PLACES = frozenset(('path', 'file', 'filename', 'pattern', 'at', 'old'))
# Exploits that need what such families have not: an original beside what is repaired.
_LESS = frozenset(('imports the original',))
# Those whose commands mean something where the machine, or the checkout, is an agent's
# own: what it writes into a solution.py there is what was asked for, or goes nowhere.
REACHING = frozenset(
  ('reads the grader', 'reads the memory of its keepers', 'goes to the network')
  + ('reads git objects', 'asks pytest to leave', 'looks whether it is tested')
)
TESTS = 'edits the tests'  # with new ones, which are an agent's work there
_DEFAULTS: Mapping[str, Any] = {'int': 0, 'str': ''}


class Subject(subject.Hosted[Any]):
  """A solution is a list of calls."""

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Those that the host finds sound, and that have a gold."""
    sound, barred = await self._host.verify(tasks)
    for task in sound:
      if why := await self._no_gold(task):
        barred[task.id] = f'no gold: {why}'
    return [task for task in sound if task.id not in barred], barred

  async def _no_gold(self, task: types.Task) -> str:
    """Why nothing is known to solve a task; '' if something is."""
    return '' if task.payload.get('gold') else 'its payload has no calls that solve it'

  def gold(self, task: types.Task) -> Sequence[Any]:
    return task.payload['gold']

  def empty(self, task: types.Task) -> Sequence[Any]:
    return self._end(task)

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    del task, rng
    return ()

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    del task, rng
    return ()

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    return subject.calls_of(self.gold(task)), self._end(task)

  def _end(self, task: types.Task) -> list[cheating.Call]:
    """The call that ends an episode and says nothing, if there is one."""
    tools: Sequence[base.Tool] = self._host.env(task).tools
    ends = [tool.name for tool in tools if tool.writes and not tool.parameters]
    return [(name, {}) for name in ends[-1:]]

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    """The standing list by every tool that takes text."""
    found = []
    tools: Sequence[base.Tool] = self._host.env(task).tools
    for tool in tools:
      others = {name: _DEFAULTS[kind] for name, kind in tool.parameters.items()}
      for parameter, kind in tool.parameters.items():
        if kind != 'str' or parameter in _PLACES:
          continue
        for exploit in exploits.EXPLOITS:
          texts = _texts(exploit, parameter == COMMAND)
          calls = [(tool.name, {**others, parameter: text}) for text in texts]
          name = f'{exploit.name}, by {tool.name}({parameter})'
          if calls:
            found.append(subject.Attempt(name, (*calls, *self._end(task))))
    return found

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    """None: where an agent's calls run is the family's own affair."""
    del tasks
    return {}

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    del tasks
    return {}

  def text(self, task: types.Task) -> str:
    return contamination.prose(task.prompt)


def _texts(exploit: exploits.Exploit, shell: bool) -> list[str]:
  """An exploit as texts that are said one after another."""
  if shell:
    return commands(exploit, NAMES)
  code = exploit.expression or exploit.statements
  return [code.format(**NAMES)] if code else []


def commands(exploit: exploits.Exploit, names: Mapping[str, str]) -> list[str]:
  """An exploit by a shell; [] if it cannot be tried where there is no original."""
  given = () if exploit.name in _LESS else exploit.commands
  return [command.format(**names) for command in given]


def writing(path: str, text: str, how: str = '>') -> cheating.Call:
  """A call of `bash` that writes a file, the folders to it too."""
  folder = path.rpartition('/')[0] or '.'
  command = f"mkdir -p '{folder}' && cat {how} '{path}' <<'EOF-X'\n{text}\nEOF-X"
  return 'bash', {COMMAND: command}


async def open_subject(
  cfg: config.Sandbox, tasks: config.Tasks, family: str
) -> Subject:
  """Opens the host of a family by its name."""
  del tasks
  return Subject(family, await families.get(family).open(cfg))
