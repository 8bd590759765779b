"""What an agent loop sees of an environment, and what a family of them brings.

One episode is `reset`, then `step` for every tool call, then `verify`. A family brings
tasks (`read`) and, in each process that runs episodes, a host (`open`) that makes an
environment for a task and holds what they share. families.py is the table of them;
`python -m experiments.check_env module:Env` tells an author what is wrong.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import importlib
from typing import Any, Literal, Protocol

from swe17 import config, types

Rules = Literal['strict', 'repository', 'machine']


class InfrastructureError(RuntimeError):
  """What an environment runs on failed, more than once. Says nothing of the agent."""


@dataclasses.dataclass(frozen=True)
class Tool:
  """One tool as the agent is told of it."""

  name: str
  description: str  # one imperative line
  parameters: Mapping[str, str]  # name -> 'int' or 'str', all required, in order
  writes: bool  # reads between two writes may run side by side


class Env(Protocol):
  """One episode's environment. `step` calls that write must not overlap others.

  It may have more, see `flags`, `figures`, `given` and `turn_score` below.
  """

  async def reset(self) -> str:
    """Begins the episode anew; the first user message. May raise an OSError."""
    ...

  @property
  def tools(self) -> tuple[Tool, ...]: ...

  @property
  def done(self) -> bool:
    """Whether the agent has submitted: no further step is taken."""
    ...

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one well-formed call; a call that fails is an ordinary result text."""
    ...

  async def verify(self) -> types.Outcome:
    """Scores the episode's final state; value None with a reason if it cannot."""
    ...


def flags(env: Env) -> tuple[str, ...]:
  """Signs of cheating that an environment has seen, if it looks for any."""
  return tuple(getattr(env, 'flags', ()))


def figures(env: Env) -> Mapping[str, float]:
  """What an environment measured of its episode beside the outcome."""
  return dict(getattr(env, 'figures', {}))


def given(env: Env) -> str | Mapping[str, str]:
  """The source that a task is about, as a text or path -> text: what stands in it is no
  sign of cheating (of who writes the same file)."""
  found: str | Mapping[str, str] = getattr(env, 'given', '')
  return found


def rules(env: Env) -> Rules:
  """How much is the agent's own (audit/patterns.py): what counts as a sign."""
  found: Rules = getattr(env, 'rules', 'strict')
  return found


async def turn_score(env: Env) -> float | None:
  """The raw score of the turn that just ended; None of who is scored at its end only.

  An environment that has it is asked once after every turn's calls.
  """
  score = getattr(env, 'turn_score', None)
  return None if score is None else await score()


def named(setting: str, module: str, attribute: str) -> Any:
  """What a module holds under a name. ValueError, in the name of a setting."""
  try:
    found = getattr(importlib.import_module(module), attribute, None)
  except ImportError as e:
    raise ValueError(f'{setting}: {module} cannot be imported: {e}') from e
  if not callable(found):
    raise ValueError(f'{setting}: {module} has no function or class {attribute!r}')
  return found


class Host(Protocol):
  """What the environments of one process share. Close it: it may hold processes."""

  async def verify(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Examines every task once: (sound tasks, set-aside id -> reason)."""
    ...

  def env(self, task: types.Task) -> Env:
    """A fresh environment for a task that `verify` found sound."""
    ...

  async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Family:
  """One row of the table in families.py.

  Attributes:
    read: the tasks that settings ask for, and set-aside id -> reason. ValueError if
      there are too few.
    open: starts a host. Its errors are of the infrastructure.
    kinds: of task, which `tasks.kinds` may choose from.
    tokenizer: file in agent/data of our own small models' tokeniser.
  """

  name: str
  read: Callable[[config.Tasks], tuple[tuple[types.Task, ...], dict[str, str]]]
  open: Callable[[config.Sandbox], Awaitable[Host]]
  kinds: tuple[str, ...] = ()
  tokenizer: str = 'tokenizer.json'
