"""A backend whose turns are written down, and a server of the OpenAI routes over it."""

import asyncio
from collections.abc import AsyncGenerator
import contextlib

from aiohttp import test_utils, web
import numpy as np
import openai

from swe17 import types
from swe17.agent import formats
from swe17.api import app, backend
from tests import chat_templates

MODEL = 'org/tiny'


def part(ids, finish: str = '', version: int = 3) -> types.GenerateResult:
  """A part of the given ids; log-probs count down, so that each tells its place."""
  n = len(ids)
  return types.GenerateResult(
    token_T=np.asarray(ids, np.int32),
    logp_T=-np.arange(1, n + 1, dtype=np.float32),
    entropy_T=np.zeros(n, np.float32),
    version_T=np.full(n, version, np.int32),
    kept=types.KeptSets(np.arange(n + 1, dtype=np.int32), np.asarray(ids, np.int32)),
    finish=finish,
  )


class Scripted:
  """Satisfies `backend.Backend`: choice i of a request is the script's turn i."""

  models = (MODEL, 'other')

  def __init__(self, fmt: formats.Format, *turns: list[int], size: int = 3):
    """`size`: tokens of a part."""
    self.fmt, self.turns, self.size = fmt, list(turns), size
    self.max_context = 2_000
    self.asked: list[types.GenerateRequest] = []
    self.told: list[tuple[int, types.GenerateResult, dict]] = []
    self.running = 0
    self.error: Exception | None = None
    self.wait: asyncio.Event | None = None  # after the first part of every choice
    self.after_part: Exception | None = None

  def defaults(self) -> types.Sampling:
    return types.Sampling(top_k=8, top_p=0.9)

  async def context(self, http: web.Request, asked: backend.Asked) -> list[int]:
    if isinstance(asked, backend.request.Completion):
      (prompt,) = asked.prompts
      return self.fmt.raw(prompt) if isinstance(prompt, str) else list(prompt)
    return self.fmt.conversation(asked.messages, asked.tools)

  async def generate(
    self, http: web.Request, asked: backend.Asked, context: list[int], choice: int
  ) -> AsyncGenerator[types.GenerateResult, None]:
    self.running += 1
    try:
      request = backend.ask(self, asked, context, choice, f's{choice}')
      self.asked.append(request)
      if self.error:
        raise self.error
      ids = self.turns[choice % len(self.turns)]
      cut = ids[: request.max_new]
      for at in range(0, len(cut), self.size):
        some, last = cut[at : at + self.size], at + self.size >= len(cut)
        finish = '' if not last else 'stop' if cut[-1] in request.stop_ids else 'length'
        await asyncio.sleep(0)
        yield part(some, finish)
        if self.after_part:
          raise self.after_part
        if self.wait:
          await self.wait.wait()
    finally:
      self.running -= 1

  def served(self, http, asked, context, choice, result, message) -> None:
    self.told.append((choice, result, message))


@contextlib.asynccontextmanager
async def serving(
  behind: backend.Backend,
) -> AsyncGenerator[test_utils.TestServer, None]:
  application = web.Application(client_max_size=app.MAX_BODY)
  application.add_routes(app.routes(behind))
  async with test_utils.TestServer(application) as server:
    yield server


@contextlib.asynccontextmanager
async def client(
  behind: backend.Backend, **settings
) -> AsyncGenerator[openai.AsyncOpenAI, None]:
  """The official client, talking to a server over `behind`."""
  async with (
    serving(behind) as server,
    openai.AsyncOpenAI(
      base_url=f'{server.make_url("/v1")}',
      api_key='none',
      **{'max_retries': 0, 'timeout': 30, **settings},
    ) as made,
  ):
    yield made


def fmt(family: str = 'qwen') -> formats.Format:
  return chat_templates.fmt(family)


def says(text: str, family: str = 'qwen') -> list[int]:
  """A turn of `text` that ends by itself."""
  return [*fmt(family).raw(text), *fmt(family).stop_ids]
