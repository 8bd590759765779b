"""What an agent loop sees of an environment: its tools, one episode, its outcome."""

from collections.abc import Mapping
import dataclasses
from typing import Any, Protocol

from swe17 import types


@dataclasses.dataclass(frozen=True)
class Tool:
  """One tool as the agent is told of it."""

  name: str
  description: str  # one imperative line
  parameters: Mapping[str, str]  # name -> 'int' or 'str', all required, in order
  writes: bool  # reads between two writes may run side by side


class Env(Protocol):
  """One episode's environment. `step` calls that write must not overlap others."""

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
