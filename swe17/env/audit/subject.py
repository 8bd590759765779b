"""What the pipeline must know of a family to prove its tasks sound.

A solution is whatever the family's verifier judges: the text of a function, an answer,
files. `judge` puts it to the real verifier; `play` is an agent with the real tools.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import random
from typing import Any, Protocol

from swe17 import types
from swe17.env import base
from swe17.env.audit import cheating


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


async def play(
  env: base.Env, calls: Sequence[cheating.Call], solved: Callable[[], Awaitable[Any]]
) -> Played:
  """Plays calls through the watched environment; `solved` asks the verifier alone."""
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
  raw = await solved()
  outcome = await watched.verify()
  return Played(outcome, raw.value, watched.flags, tuple(said))
