"""`verifiers` under audit: rows whose own answer must be worth the full score.

A row has no calls that solve it. Its answer, said at once, is its gold where the rubric
gives that as much as solves the row; any other row is barred, with what it scored. What
sandboxes there are belong to the environments, so no image is looked through.
"""

from collections.abc import Sequence
import random
from typing import Any

from swe17 import config, types
from swe17.env.audit import cheating, of_any, subject
from swe17.env.formats import verifiers_env

_NONSENSE = 'I do not know.'


class Subject(of_any.Subject):
  """A solution is a list of calls; those that are made up here say one thing."""

  def __init__(self, host: verifiers_env.Host):
    super().__init__(verifiers_env.FAMILY, host)
    self._answers: list[str] = []  # of all rows

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    self._answers = sorted({_answer(task) for task in tasks} - {''})
    return await super().ready(tasks)

  async def _no_gold(self, task: types.Task) -> str:
    if not _answer(task).strip():
      return 'the row has no answer'
    outcome = await self.judge(task, self.gold(task))
    if outcome.value is None:
      return outcome.reason
    if outcome.value < task.solved_at:
      return f'its answer scores {outcome.value:g}, want {task.solved_at:g}'
    return ''

  def gold(self, task: types.Task) -> Sequence[Any]:
    return self._saying(task, _answer(task))

  def _end(self, task: types.Task) -> list[cheating.Call]:
    """Saying nothing."""
    return self._saying(task, '')

  def _saying(self, task: types.Task, text: str) -> list[cheating.Call]:
    return [(self._host.env(task).tools[-1].name, {'text': text})]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    """The answer of another row, and none."""
    texts = {'no answer': _NONSENSE}
    others = [text for text in self._answers if text != _answer(task)]
    if others:
      texts['the answer of another row'] = rng.choice(others)
    return [subject.Tried(k, self._saying(task, text)) for k, text in texts.items()]


def _answer(task: types.Task) -> str:
  return str(task.payload['row'].get('answer', ''))


async def open_subject(cfg: config.Sandbox, tasks: config.Tasks) -> Subject:
  """Opens a host; the rows' own environments were named when they were read."""
  del tasks
  return Subject(await verifiers_env.open_host(cfg))
