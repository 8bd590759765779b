"""A server without a run: what it prints can be tried, and it ends when told to."""

import asyncio
import json
import os
import shlex
import signal

import aiohttp
from aiohttp import web
import pytest

from experiments import program, serve
from swe17.api import app
from tests import api_fixtures as api


class Engine:
  """One answer is under way once it drains."""

  error: BaseException | None = None

  def __init__(self, left: int):
    self._left, self.drained = left, False

  def drain(self) -> None:
    self.drained = True

  @property
  def busy(self) -> int:
    self._left -= self.drained
    return max(self._left, 0)


async def test_a_second_signal_does_not_wait_for_answers(capsys):
  engine = Engine(1 << 30)
  done = asyncio.ensure_future(
    serve.serve(web.Application(), engine, ('127.0.0.1', 0), api.MODEL, 60.0)
  )
  for said in 'serving', 'finishing':
    while said not in capsys.readouterr().out:
      assert not done.done()
      await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
  await asyncio.wait_for(done, 10)
  assert engine.drained


async def test_the_request_that_is_printed_is_answered_and_sigterm_ends_it(capsys):
  behind, application = api.Scripted(api.fmt(), api.says('4')), web.Application()
  application.add_routes(app.routes(behind))
  engine = Engine(3)
  done = asyncio.ensure_future(
    serve.serve(application, engine, ('127.0.0.1', 0), api.MODEL, 60.0)
  )
  said = ''
  while 'curl' not in said:
    assert not done.done()
    await asyncio.sleep(0.01)
    said += capsys.readouterr().out
  curl, url, header, kind, data, body = shlex.split(said.split('\n\n')[1])
  assert (curl, header, data) == ('curl', '-H', '-d')
  async with (
    aiohttp.ClientSession() as http,
    http.post(url, data=body, headers=[kind.split(': ')]) as response,
  ):
    assert response.status == 200
    assert (await response.json())['choices'][0]['message']['content'] == '4'
  assert f'serving {api.MODEL} at {url.removesuffix("/chat/completions")}\n' in said
  os.kill(os.getpid(), signal.SIGTERM)
  await asyncio.wait_for(done, 30)
  assert engine.drained and engine.busy == 0
  assert json.loads(body)['model'] == api.MODEL


def test_a_model_must_be_named():
  with pytest.raises(serve.flags.Error, match='source'):
    program.parse(['serve'], serve.FLAGS)
