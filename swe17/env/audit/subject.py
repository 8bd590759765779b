"""What the pipeline must know of a family to prove its tasks sound.

A solution is whatever the family's verifier judges: the text of a function, an answer,
files. `judge` puts it to the real verifier; `play` is an agent with the real tools.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import random
from typing import Any, Generic, Protocol, TypeVar

from swe17 import types
from swe17.env import base
from swe17.env.audit import cheating

H = TypeVar('H', bound=base.Host)


@dataclasses.dataclass(frozen=True)
class Tried:
  """A solution that is known to be right, or wrong, and why."""

  label: str
  solution: Any


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One exploit of the standing list (exploits.py), as calls of a family's tools."""

  exploit: str
  calls: tuple[cheating.Call, ...]


@dataclasses.dataclass(frozen=True)
class Played:
  """What came of an attempt.

  `raw` is what the verifier alone says, signs of cheating or not; None where it said
  nothing.
  """

  outcome: types.Outcome
  raw: float | None
  flags: tuple[str, ...]
  said: tuple[str, ...]  # the tools' answers


class Subject(Protocol):
  """A family under audit. Close it."""

  family: str

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """(tasks that can be judged, barred id -> reason), as a host's `verify`."""
    ...

  async def judge(self, task: types.Task, solution: Any) -> types.Outcome:
    """The verifier's outcome of a solution."""
    ...

  def gold(self, task: types.Task) -> Any: ...

  def empty(self, task: types.Task) -> Any:
    """The solution of who does nothing."""
    ...

  def right(self, task: types.Task, rng: random.Random) -> Sequence[Tried]:
    """Other solutions that are as right as the gold."""
    ...

  async def wrong(self, task: types.Task, rng: random.Random) -> Sequence[Tried]:
    """Solutions that are wrong: half-fixes, mutants, what does nothing."""
    ...

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    """Calls of who knows the gold (None: tools cannot write it) and of who does
    nothing but end."""
    ...

  def attempts(self, task: types.Task) -> Sequence[Attempt]:
    """The standing list of exploits, as far as the family's tools let one try."""
    ...

  async def play(self, task: types.Task, calls: Sequence[cheating.Call]) -> Played: ...

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    """Image -> what was found in it that should not be there, really looked for."""
    ...

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    """The images that tasks run in, and which."""
    ...

  def text(self, task: types.Task) -> str:
    """What two equal tasks would share: for duplicates and contamination."""
    ...

  async def close(self) -> None: ...


class Hosted(Generic[H]):
  """What subjects of a family with a host share. Its solutions are lists of calls."""

  def __init__(self, family: str, host: H):
    self.family, self._host = family, host

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    return await self._host.verify(tasks)

  async def judge(self, task: types.Task, solution: Any) -> types.Outcome:
    """The verifier's outcome of calls, whatever signs they show."""
    env = self._host.env(task)
    await env.reset()
    try:
      for name, arguments in solution:
        await env.step(name, arguments)
      return await env.verify()
    except base.InfrastructureError as e:
      return types.Outcome(None, f'the verifier failed: {e}')

  async def play(self, task: types.Task, calls: Sequence[cheating.Call]) -> Played:
    """Plays calls with somebody looking on; what the verifier alone says is `raw`."""
    env = self._host.env(task)
    watched = cheating.Watched(env)
    await watched.reset()
    said = []
    for name, arguments in calls:
      if watched.done:
        break
      try:
        said.append(await watched.step(name, arguments))
      except (OSError, base.InfrastructureError) as e:
        said.append(f'{type(e).__name__}: {e}')  # an attempt may well break something
    raw = await env.verify()
    outcome = await watched.verify()
    return Played(outcome, raw.value, watched.flags, tuple(said))

  async def close(self) -> None:
    await self._host.close()


def calls_of(gold: Sequence[Sequence[Any]]) -> list[cheating.Call]:
  """The calls of a payload's `gold`, which JSON has made lists of."""
  return [(name, arguments) for name, arguments in gold]
