"""Others' agents between the proxy and a shell: mini-swe-agent unmodified, a command.

The sampler is a scripted policy; agent, HTTP, proxy, sandbox and verifier are real.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import random
import sys
import tempfile
from typing import Any

import numpy as np
import pytest

from swe17 import config, types
from swe17.agent import formats, harness_scripted, programs, scripted
from swe17.env.repair import grader, repair
from swe17.rollout import harness

_HERE = importlib.util.find_spec('minisweagent') is not None
needs_mini = pytest.mark.skipif(not _HERE, reason='mini-swe-agent is not installed')
FMT = formats.load()
SHORT = 'colorsys._v/0'  # a task of few lines
CFG = config.Config(
  sandbox=config.Sandbox(workers=1),
  agent=config.Agent(
    harness=programs.MINI,
    max_context=1500,
    max_new_tokens=250,
    max_turns=9,
    call_seconds=60.0,
    episode_seconds=240.0,
  ),
  batch=config.Batch(row_length=1500),
)


class Route:
  """Stands where the router does, before a sampler that is a program."""

  def __init__(self, generate: Callable[..., Awaitable[types.GenerateResult]]):
    self.generate = generate
    self.asked: list[types.GenerateRequest] = []

  async def stream(
    self, request: types.GenerateRequest
  ) -> AsyncGenerator[types.GenerateResult, None]:
    self.asked.append(request)
    yield await self.generate(request)

  def forget(self, session: str) -> None:
    """Nothing is cached."""


def rows(*wanted: str) -> list[types.Task]:
  """Tasks of some rows of the table."""
  lines = repair.TABLE.read_text('utf-8').splitlines()
  some = [line for line in lines if json.loads(line)['id'] in wanted]
  splits = {json.loads(line)['split']: line for line in lines}
  with tempfile.TemporaryDirectory() as scratch:
    table = pathlib.Path(scratch, 'table.jsonl')
    table.write_text('\n'.join(dict.fromkeys([*some, *splits.values()])), 'utf-8')
    tasks, _ = repair.read(config.Tasks(table=str(table)))
  return [task for task in tasks if task.id in wanted]


@contextlib.asynccontextmanager
async def opened(cfg: config.Config, generate, *wanted: str):
  """(harness, verified tasks, verifier, route)."""
  graders = grader.Graders(cfg.sandbox)
  await graders.start()
  verifier = repair.Verifier(graders)
  route = Route(generate)
  made = harness.Harness(cfg, FMT, verifier, route)
  try:
    await made.open()
    sound, _ = await repair.verify(rows(*wanted), graders)
    yield made, sound, verifier, route
  finally:
    await made.close()
    await graders.close()


def careful(seed: int = 0) -> harness_scripted.Scripted:
  style = dataclasses.replace(scripted.CLUMSY, test=0.7, undo=0.8)
  return harness_scripted.Scripted(FMT, random.Random(seed), style)


class Rekeyed:
  """A scripted agent that is given the keys which the proxy gave."""

  def __init__(self, agent: harness_scripted.Scripted, keys: dict[int, tuple]):
    self._agent, self._keys = agent, keys

  async def __call__(self, request: types.GenerateRequest) -> types.GenerateResult:
    key = self._keys[request.token_T.size]
    return await self._agent(dataclasses.replace(request, key=key))


def turn(*calls: str, text: str = '') -> list[int]:
  ids = FMT.tok.encode(text)
  for command in calls:
    ids += FMT.call('bash', command=command)
  return [*ids, FMT.tok.end]


def says(*turns: list[int]) -> Callable[..., Awaitable[types.GenerateResult]]:
  """A sampler that gives these turns one after another, to one episode."""
  left = list(turns)

  async def generate(request: types.GenerateRequest) -> types.GenerateResult:
    ids = left.pop(0)
    n = len(ids)
    return types.GenerateResult(
      token_T=np.asarray(ids, np.int32),
      logp_T=np.full(n, -0.5, np.float32),
      entropy_T=np.full(n, 0.7, np.float32),
      version_T=np.full(n, 3, np.int32),
      kept=types.KeptSets(np.zeros(n + 1, np.int32), np.zeros(0, np.int32)),
      finish='stop',
    )

  return generate


LOST = turn(text='nothing to do <tool_call>{"name": 1}</tool_call>')
TRY = "sed -i 's/zzz/zzz/' solution.py && run_tests"
BRANCHED = (turn('view'), LOST, turn(TRY), turn(harness_scripted.SUBMIT))


@pytest.fixture(scope='module')
def ran() -> dict[str, Any]:
  """What became of a few episodes of mini-swe-agent, in one process of it."""

  async def fails(request: types.GenerateRequest) -> types.GenerateResult:
    raise ConnectionError('no sampler answered in 0 s')

  async def run() -> dict[str, Any]:
    agent = careful()
    async with opened(CFG, agent, SHORT) as (made, (task,), verifier, route):

      def one(member: int) -> Awaitable[types.Episode]:
        return made.episode(task, '0-a.0', member, types.Sampling())

      scripted = await asyncio.gather(one(0), one(1))
      rendered = [await render(task, verifier, agent, route.asked, m) for m in (0, 1)]
      route.generate = says(*BRANCHED)
      branched = await one(2)
      route.generate = says(*[turn(text='hm')] * 3)  # which the agent gives up after
      mumbled = await one(3)
      route.generate = fails
      short = dataclasses.replace(CFG.agent, episode_seconds=3.0)
      made.cfg = dataclasses.replace(CFG, agent=short)
      return {
        'scripted': scripted,
        'rendered': rendered,
        'branched': branched,
        'mumbled': mumbled,
        'failed': await one(4),
      }

  return asyncio.run(run())


async def render(
  task: types.Task,
  verifier: repair.Verifier,
  agent: harness_scripted.Scripted,
  asked: list[types.GenerateRequest],
  member: int,
) -> types.Episode:
  """The conversation that an episode should be: no agent, no HTTP, no sandbox."""
  draws = [r for r in asked if r.session.startswith(f'0-a.0.{member}.')]
  return await harness_scripted.episode(
    task,
    repair.RepairEnv(task, verifier),
    Rekeyed(agent, {r.token_T.size: r.key for r in draws}),
    FMT,
    harness_scripted.Templates(),
    CFG.agent,
    '0-a.0',
    member,
  )


@needs_mini
def test_unmodified_mini_swe_agent_gives_the_ids_of_the_rendered_conversation(ran):
  for one, want in zip(ran['scripted'], ran['rendered'], strict=True):
    assert one.status == 'valid', one.outcome
    assert one.submitted and not one.cut
    assert one.outcome.value in (0.0, 1.0)
    (segment,), (rendered,) = one.segments, want.segments
    assert segment.token_T.tolist() == rendered.token_T.tolist()
    assert segment.mask_T.tolist() == rendered.mask_T.tolist()
    assert (one.outcome, one.turns, one.tests) == (want.outcome, want.turns, want.tests)
    assert one.sampled_tokens == segment.mask_T.sum()
    assert one.turns == one.calls == segment.turn_T.max() + 1
    text = FMT.tok.decode(segment.token_T.tolist())
    assert text.count(harness_scripted.SUBMIT) == 1


@needs_mini
def test_turns_that_the_agent_rejects_branch_and_are_trained_once(ran):
  """mini-swe-agent drops a turn without a call from its history: a branch."""
  one = ran['branched']
  assert one.submitted and one.outcome.value == 0.0
  assert len(one.segments) == 2 and one.malformed == 1
  drawn = [s.token_T[s.mask_T].tolist() for s in one.segments]
  together = sorted(token for ids in drawn for token in ids)
  assert together == sorted(token for ids in BRANCHED for token in ids)
  assert one.sampled_tokens == sum(map(len, BRANCHED))
  assert LOST in drawn or drawn[0][-len(LOST) :] == LOST
  for segment in one.segments:
    assert (segment.version_T[segment.mask_T] == 3).all()


@needs_mini
def test_an_agent_that_never_submits_gets_0_and_one_whose_sampler_fails_gets_none(ran):
  one = ran['mumbled']
  assert (one.status, one.outcome.value, one.submitted) == ('valid', 0.0, False)
  assert 'RepeatedFormatError' in one.outcome.reason
  assert (ran['failed'].status, ran['failed'].outcome.value) == ('invalid', None)


# An agent of twenty lines, with nothing but the standard library.
_AGENT = """
import json, os, urllib.request
def post(url, body):
  asked = urllib.request.Request(url, json.dumps(body).encode(),
                                 {'Content-Type': 'application/json'})
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  return json.load(opener.open(asked))
messages = [{'role': 'user', 'content': os.environ['SWE17_TASK']}]
while True:
  url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'
  body = {'model': 'swe17', 'messages': messages, 'tools': BASH}
  message = post(url, body)['choices'][0]['message']
  messages.append(message)
  for call in message.get('tool_calls') or []:
    command = json.loads(call['function']['arguments'])['command']
    if command == 'exit':
      raise SystemExit(0)
    said = post(os.environ['SWE17_SHELL'], {'command': command})
    messages.append({'role': 'tool', 'tool_call_id': call['id'],
                     'content': said['output']})
"""


def test_any_command_that_speaks_the_api_is_an_agent(tmp_path):
  program = tmp_path / 'agent.py'
  program.write_text(_AGENT.replace('BASH', repr([harness_scripted.BASH])))
  named = f'{programs.COMMAND} {sys.executable} {program}'
  cfg = dataclasses.replace(CFG, agent=dataclasses.replace(CFG.agent, harness=named))
  gold = rows(SHORT)[0].payload['original']
  fix = f"cat > solution.py <<'EOF'\n{gold}\nEOF\nrun_tests"
  script = [turn('view', 'ls'), turn(fix), turn('exit')]

  async def run():
    async with opened(cfg, says(*script), SHORT) as (made, (task,), _, _):
      return await made.episode(task, '0-a.0', 0, types.Sampling())

  one = asyncio.run(run())
  assert one.outcome.value == 1.0 and one.submitted
  assert (one.turns, one.calls, one.tests) == (3, 3, 1)
  (segment,) = one.segments
  drawn = [token for ids in script for token in ids]
  assert segment.token_T[segment.mask_T].tolist() == drawn
  text = FMT.tok.decode(segment.token_T.tolist())
  assert '«1»' in text and 'passed 6 of 6' in text


def test_a_harness_that_is_not_there_stops_the_run_and_is_named():
  with pytest.raises(ValueError, match="got 'nobody'"):
    programs.choose('nobody', '')
