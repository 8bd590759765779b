"""An example environment in under 60 lines: guess a number between 1 and 100.

  python -m experiments.check_env experiments.example_env:Guess

An episode is `reset`, then `step` for every tool call, then `verify`. Copy this file,
change what it says, and let check_env tell you what is missing. To train on it, give it
a host and a row in swe17/env/families.py, and a scripted agent in rollout/scripts.py.
"""

from collections.abc import Mapping
from typing import Any

from swe17 import types
from swe17.env import base


class Guess:
  """One episode on one task. All that is random comes with the task."""

  # What the model is told. Those with writes=False may run side by side.
  tools = (
    base.Tool('ask', 'Compare a number with the secret.', {'number': 'int'}, False),
    base.Tool('submit', 'Say what the secret is.', {'number': 'int'}, writes=True),
  )

  def __init__(self, task: types.Task):
    self._task = task
    self._answer: int | None = None
    self.done = False

  @staticmethod
  def tasks() -> list[types.Task]:
    """Some tasks to check the environment with; `gold` is a solution's calls."""
    return [
      types.Task(
        f'guess/{n}', 'guess', 'train', f'guess/{n}', 'Which number is it? 1 to 100.',
        {'secret': n, 'gold': [['submit', {'number': n}]]},
      )
      for n in (7, 42, 99)
    ]  # fmt: skip

  async def reset(self) -> str:
    self._answer, self.done = None, False
    return self._task.prompt

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """A result is text, whatever was asked: only a fault of the machine may raise."""
    number, secret = arguments['number'], self._task.payload['secret']
    if name == 'ask':
      return 'equal' if number == secret else 'less' if secret < number else 'more'
    self._answer, self.done = number, True
    return 'submitted'

  async def verify(self) -> types.Outcome:
    """A number, or None with a reason where there is none. Nothing is not solved."""
    return types.Outcome(float(self._answer == self._task.payload['secret']))
