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


async def test_the_request_that_is_printed_is_answered_and_sigterm_ends_it(capsys):
  behind, application = api.Scripted(api.fmt(), api.says('4')), web.Application()
  application.add_routes(app.routes(behind))
  done = asyncio.ensure_future(serve.serve(application, '127.0.0.1', 0, api.MODEL))
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
  assert json.loads(body)['model'] == api.MODEL


def test_a_model_must_be_named():
  with pytest.raises(serve.flags.Error, match='source'):
    program.parse(['serve'], serve.FLAGS)
