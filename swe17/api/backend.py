"""What stands behind the OpenAI routes: one engine, or a proxy that records.

  context -> generate (once a choice) -> served (once a choice)

All three run on the server's event loop. They say no by raising `errors.Refused`, or
ValueError (400; 'field: got .., want ..' names the field), or ConnectionError (503).
"""

from collections.abc import AsyncGenerator, Sequence
import secrets
from typing import Any, Protocol

from aiohttp import web
import numpy as np

from swe17 import types
from swe17.agent import formats
from swe17.api import request

Asked = request.Chat | request.Completion


class Backend(Protocol):
  """Serves one format; `models` are the names that it answers to."""

  @property
  def fmt(self) -> formats.Format: ...

  @property
  def models(self) -> tuple[str, ...]: ...

  @property
  def max_context(self) -> int:
    """Tokens of a context and its turn together."""
    ...

  def defaults(self) -> types.Sampling:
    """How tokens are drawn where a request does not say."""
    ...

  async def context(self, http: web.Request, asked: Asked) -> list[int]:
    """Ids of the prompt, up to where the turn begins.

    `asked` is a Chat, or a Completion with exactly one prompt. Whatever takes long
    (a template, a tokeniser) belongs on another thread.
    """
    ...

  def generate(
    self, http: web.Request, asked: Asked, context: list[int], choice: int
  ) -> AsyncGenerator[types.GenerateResult, None]:
    """Parts of one choice, the last with its `finish`. Closing it cancels the job.

    `ask` makes the engine's request of it.
    """
    ...

  def served(
    self,
    http: web.Request,
    asked: Asked,
    context: list[int],
    choice: int,
    result: types.GenerateResult,
    message: dict[str, Any],
  ) -> None:
    """Told what the client is given, before the last byte of it leaves.

    Of a stream, each choice when it has ended; else all of them, once all have.

    `result` is all that was drawn for it: where a stop string ended the turn, up to the
    token that completed the string (`finish` is 'stop' then, and `token_T` ends in none
    of the stop ids). `message` is the assistant's message of a Chat (content,
    tool_calls), {'role', 'content': text} of a Completion. A client that went away
    first was given nothing: no call.
    """
    ...


def ask(
  backend: Backend, asked: Asked, context: Sequence[int], choice: int, session: str
) -> types.GenerateRequest:
  """The engine's request of one choice. `errors.Refused` if it has no room.

  The key is of (seed, choice), so that equal seeds draw equal tokens in any session;
  without a seed it is random.
  """
  seed = secrets.randbits(64) if asked.seed is None else asked.seed
  high, low = np.random.SeedSequence([seed & (1 << 64) - 1, choice]).generate_state(2)
  return types.GenerateRequest(
    session=session,
    token_T=np.asarray(context, np.int32),
    max_new=request.max_new(asked, len(context), backend.max_context),
    stop_ids=tuple(backend.fmt.stop_ids),
    sampling=request.sampling(asked, backend.defaults()),
    key=(int(high), int(low)),
  )
