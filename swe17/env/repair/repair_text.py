"""The family `repair_text`: the tasks of repair_functions, edited as text.

For models that can already copy: the code stands in the first message, and an edit
quotes the text it replaces. Tasks, cases and verdicts are those of repair.py.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from swe17 import config, types
from swe17.env import base
from swe17.env.repair import grader, repair

FAMILY = 'repair_text'
TOOLS = (
  base.Tool(
    'edit',
    'Replace text that stands in the code once.',
    {'old': 'str', 'new': 'str'},
    writes=True,
  ),
  base.Tool('undo', 'Take back the last edit.', {}, writes=True),
  base.Tool('view', 'Show the code as it is now.', {}, writes=False),
  base.Tool('test', 'Run the visible tests.', {}, writes=False),
  base.Tool('submit', 'Hand in the code as it is.', {}, writes=True),
)


class TextEnv(repair.RepairEnv):
  """One episode on one task that `verify` found sound."""

  tools: tuple[base.Tool, ...] = TOOLS

  def __init__(self, task: types.Task, verifier: repair.Verifier):
    super().__init__(task, verifier)
    self._versions = [task.payload['source']]

  async def reset(self) -> str:
    self._versions, self.done = [self._task.payload['source']], False
    return f'{self._task.prompt}\n```python\n{self.source.rstrip()}\n```'

  @property
  def source(self) -> str:
    """The agent's present version of the function."""
    return self._versions[-1]

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one well-formed call. GraderError: the infrastructure failed in a test."""
    match name:
      case 'edit' if not self.done:
        return self._replace(arguments['old'], arguments['new'])
      case 'undo' if not self.done:
        return self._take_back()
      case 'view' if not self.done:
        return self.source
    return await super().step(name, arguments)

  def _replace(self, old: str, new: str) -> str:
    count = self.source.count(old) if old else 0
    if count != 1:
      return f'old stands there {count} times, want once'
    if old == new:
      return 'nothing changed'
    edited = self.source.replace(old, new)
    if len(edited) > repair.MAX_CHARACTERS:
      return 'the code would be too long'
    self._versions.append(edited)
    return 'edited'

  def _take_back(self) -> str:
    if len(self._versions) == 1:
      return 'nothing to undo'
    self._versions.pop()
    return 'undone'


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """`repair.read` of this family's name."""
  tasks, set_aside = repair.read(dataclasses.replace(cfg, family=repair.FAMILY))
  return tuple(dataclasses.replace(t, family=FAMILY) for t in tasks), set_aside


class Host(repair.Host):
  """`repair.Host` whose environments take text."""

  def env(self, task: types.Task) -> TextEnv:
    return TextEnv(task, self.verifier)


async def open_host(cfg: config.Sandbox) -> Host:
  """Starts graders. GraderError if the sandbox does not start."""
  graders = grader.Graders(cfg)
  await graders.start()
  return Host(graders)
