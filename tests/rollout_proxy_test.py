"""The recording proxy, under the official client, over samplers that draw at random."""

import asyncio
import contextlib
import dataclasses
import itertools
import json

import aiohttp
import numpy as np
import openai
import pytest

from swe17 import config, types
from swe17.agent import formats
from swe17.rollout import proxy, recorded
from tests import rollout_fixtures

FMT = formats.load()
USER = {'role': 'user', 'content': 'Repair this.'}
TOOLS = [
  {
    'type': 'function',
    'function': {'name': 'edit', 'description': 'Edit.', 'parameters': {}},
  }
]
LIMITS = recorded.Limits(
  turns=50,
  tokens=0,
  new_tokens=64,
  context=400,
  at_once=8,
  turn_seconds=20.0,
  seconds=60.0,
)
TASK = rollout_fixtures.TASKS[0]


class Router:
  """Draws a text of the key's own, unless the test says what; a few tokens a part."""

  def __init__(self):
    self.asked: list[types.GenerateRequest] = []
    self.forgotten: list[str] = []
    self.says: list[list[int] | Exception] = []
    self.count, self.running = 0, 0
    self.hold: asyncio.Event | None = None  # before the last part

  async def stream(self, request: types.GenerateRequest):
    self.asked.append(request)
    self.running += 1
    try:
      ids = self.says.pop(0) if self.says else self._any(request)
      if isinstance(ids, Exception):
        raise ids
      ids = ids[: request.max_new]
      for at in range(0, len(ids), 3):
        await asyncio.sleep(0)
        last = at + 3 >= len(ids)
        if last and self.hold is not None:
          await self.hold.wait()
        finish = ('stop' if ids[-1] in request.stop_ids else 'length') if last else ''
        yield self._part(ids[at : at + 3], finish)
    finally:
      self.running -= 1

  def _any(self, request: types.GenerateRequest) -> list[int]:
    rng = np.random.default_rng([*request.key, request.token_T.size])
    letters = ''.join(rng.choice(list('abcdefgh '), 9))
    # Each letter on its own: ids that encoding the text would never give.
    ids = [token for letter in letters for token in FMT.raw(letter)]
    return [*ids, *FMT.stop_ids]

  def _part(self, ids: list[int], finish: str) -> types.GenerateResult:
    n = len(ids)
    logp_T = -np.arange(self.count, self.count + n, dtype=np.float32)
    self.count += n
    return types.GenerateResult(
      token_T=np.asarray(ids, np.int32),
      logp_T=logp_T,
      entropy_T=np.ones(n, np.float32),
      version_T=np.full(n, self.count % 7, np.int32),
      kept=types.KeptSets(np.arange(n + 1, dtype=np.int32), np.asarray(ids, np.int32)),
      finish=finish,
    )

  def forget(self, session: str) -> None:
    self.forgotten.append(session)


class Rig:
  """A proxy, its router, and clients of open episodes."""

  def __init__(self, cfg: config.Config, stack: contextlib.AsyncExitStack):
    self.router, self._stack = Router(), stack
    self.proxy = proxy.Proxy(cfg, FMT, self.router)

  def client(self, opened: proxy.Opened) -> openai.AsyncOpenAI:
    made = openai.AsyncOpenAI(
      base_url=opened.base_url, api_key='none', max_retries=0, timeout=20
    )
    self._stack.push_async_callback(made.close)
    return made

  def agent(self, group: str = 'g', member: int = 0, **limits) -> tuple[str, 'Chats']:
    opened = self.proxy.open_episode(
      group, member, limits=dataclasses.replace(LIMITS, **limits)
    )
    return opened.key, Chats(self.client(opened))


class Chats:
  """An agent's way to ask; `ask` gives the messages of all choices."""

  def __init__(self, client: openai.AsyncOpenAI):
    self.client = client

  async def ask(self, messages, **fields):
    made = await self.client.chat.completions.create(
      model='swe17', messages=messages, **fields
    )
    return [c.message.model_dump(exclude_none=True) for c in made.choices]


@pytest.fixture
async def rig():
  async with contextlib.AsyncExitStack() as stack:
    made = Rig(config.Config(seed=5), stack)
    await made.proxy.open()
    stack.push_async_callback(made.proxy.close)
    yield made


def call_turn(text: str) -> list[int]:
  return [*FMT.raw(text), *FMT.call('edit', at='a', new='b'), *FMT.stop_ids]


# --- what is recorded -----------------------------------------------------------


async def test_turns_are_extended_by_their_exact_ids_and_become_one_segment(rig):
  key, agent = rig.agent()
  history = [USER]
  for i in range(3):
    history += await agent.ask(history)
    history.append({'role': 'user', 'content': f'more {i}'})
  served = rig.proxy.close_episode(key)
  (segment,) = served.segments
  asked = rig.router.asked
  for before, after in itertools.pairwise(asked):
    n = before.token_T.size
    np.testing.assert_array_equal(after.token_T[:n], before.token_T)
    np.testing.assert_array_equal(after.token_T, segment.token_T[: after.token_T.size])
  assert served.turns == 3
  assert served.sampled_tokens == segment.mask_T.sum() == rig.router.count
  np.testing.assert_array_equal(
    segment.mu_logp_T[segment.mask_T], -np.arange(rig.router.count)
  )
  # Encoded again the turns would have had other ids.
  assert FMT.conversation(history)[: segment.token_T.size] != segment.token_T.tolist()
  assert rig.router.forgotten == ['g.0.0']


async def test_tool_calls_and_their_results_go_by_the_ids_that_were_told(rig):
  rig.router.says = [call_turn('Now. ')]
  key, agent = rig.agent()
  (told,) = await agent.ask([USER], tools=TOOLS)
  (call,) = told['tool_calls']
  assert json.loads(call['function']['arguments']) == {'at': 'a', 'new': 'b'}
  result = {'role': 'tool', 'tool_call_id': call['id'], 'content': 'done'}
  await agent.ask([USER, told, result], tools=TOOLS)
  first, second = rig.router.asked
  drawn = call_turn('Now. ')
  want = [*first.token_T, *drawn, *FMT.after(drawn, [result], TOOLS)]
  assert second.token_T.tolist() == want
  served = rig.proxy.close_episode(key)
  assert (served.turns, served.calls, len(served.segments)) == (2, 1, 1)


async def test_a_streamed_answer_is_recorded_as_a_whole_one_is(rig):
  key, agent = rig.agent()
  text = ''
  stream = await agent.client.chat.completions.create(
    model='swe17', messages=[USER], stream=True
  )
  async for chunk in stream:
    text += chunk.choices[0].delta.content or ''
  told = {'role': 'assistant', 'content': text}
  await agent.ask([USER, told, USER])
  served = rig.proxy.close_episode(key)
  assert (served.turns, len(served.segments)) == (2, 1)


async def test_n_choices_are_branches_of_one_context_with_draws_of_their_own(rig):
  key, agent = rig.agent()
  told = await agent.ask([USER], n=4)
  assert len({r.key for r in rig.router.asked}) == 4
  assert len({r.session for r in rig.router.asked}) == 4
  assert len({m['content'] for m in told}) == 4
  await agent.ask([USER, told[2], USER])
  served = rig.proxy.close_episode(key)
  assert (served.turns, len(served.segments)) == (5, 4)
  assert served.sampled_tokens == rig.router.count
  assert sorted(rig.router.forgotten) == [f'g.0.{i}' for i in range(4)]


async def test_a_history_that_was_rewritten_begins_another_segment(rig):
  key, agent = rig.agent()
  (told,) = await agent.ask([USER])
  await agent.ask([USER, {**told, 'content': 'I never said that'}, USER])
  served = rig.proxy.close_episode(key)
  assert [s.mask_T.sum() for s in served.segments] == [10, 10]


async def test_equal_episodes_draw_equal_tokens_and_members_do_not(rig):
  for group, member in (('g', 0), ('g', 0), ('g', 1), ('h', 0)):
    key, agent = rig.agent(group, member)
    await agent.ask([USER])
    rig.proxy.close_episode(key)
  keys = [r.key for r in rig.router.asked]
  assert keys[0] == keys[1]
  assert len(set(keys)) == 3


async def test_a_client_that_goes_away_frees_its_draw_and_leaves_no_trace(rig):
  key, agent = rig.agent()
  rig.router.hold = asyncio.Event()
  waiting = asyncio.ensure_future(agent.ask([USER]))
  while not rig.router.running:
    await asyncio.sleep(0.01)
  waiting.cancel()
  while rig.router.running:
    await asyncio.sleep(0.01)
  rig.router.hold.set()
  await agent.ask([USER])  # the retry draws what nobody was given
  first, second = rig.router.asked
  assert (first.key, first.session) == (second.key, second.session)
  served = rig.proxy.close_episode(key)
  assert (served.turns, served.replaced) == (1, 0)


async def test_a_retried_request_that_was_answered_leaves_the_first_answer_out(rig):
  key, agent = rig.agent()
  await agent.ask([USER])
  (told,) = await agent.ask([USER])
  await agent.ask([USER, told, USER])
  served = rig.proxy.close_episode(key)
  assert (served.turns, served.replaced, served.sampled_tokens) == (2, 1, 20)


async def test_a_stop_string_ends_a_turn_and_what_was_drawn_is_trained(rig):
  ids = [t for letter in 'say STOP it' for t in FMT.raw(letter)]
  rig.router.says = [[*ids, *FMT.stop_ids]]
  key, agent = rig.agent()
  (told,) = await agent.ask([USER], stop=['STOP'])
  assert told['content'] == 'say '
  await agent.ask([USER, told, USER])
  n = len(ids) - len('it') - 1
  context = rig.router.asked[1].token_T.tolist()
  first = rig.router.asked[0].token_T.size
  assert context[first : first + n] == ids[:n]
  served = rig.proxy.close_episode(key)
  assert served.segments[0].mask_T.sum() == n + 10
  assert not served.cut


async def test_bare_texts_are_completed_and_recorded(rig):
  key, agent = rig.agent()
  made = await agent.client.completions.create(
    model='swe17', prompt='once', max_tokens=30
  )
  text = 'once' + made.choices[0].text
  await agent.client.completions.create(model='swe17', prompt=text + ' more')
  served = rig.proxy.close_episode(key)
  assert (served.turns, len(served.segments)) == (2, 1)


# --- the run's settings ---------------------------------------------------------


async def test_how_tokens_are_drawn_is_the_runs_business(rig, caplog):
  key, agent = rig.agent()
  await agent.ask([USER], temperature=0.1, top_p=0.5, seed=1)
  await agent.ask([USER, {'role': 'user', 'content': 'b'}], temperature=0.2)
  assert {r.sampling for r in rig.router.asked} == {config.Sampler().sampling}
  ignored = [r.message for r in caplog.records if 'is ignored' in r.message]
  assert len(ignored) == 3
  (a, b) = rig.proxy.close_episode(key).segments
  assert set(a.temperature_T[a.mask_T]) == set(b.temperature_T[b.mask_T]) == {1.0}


async def test_a_run_may_allow_clients_their_sampling_but_not_argmax():
  cfg = config.Config(rollout=config.Rollout(client_sampling=True))
  async with contextlib.AsyncExitStack() as stack:
    rig = Rig(cfg, stack)
    await rig.proxy.open()
    stack.push_async_callback(rig.proxy.close)
    key, agent = rig.agent()
    await agent.ask([USER], temperature=0.5)
    assert rig.router.asked[0].sampling.temperature == 0.5
    with pytest.raises(openai.BadRequestError, match='temperature'):
      await agent.ask([USER], temperature=0)
    (segment,) = rig.proxy.close_episode(key).segments
    assert set(segment.temperature_T[segment.mask_T]) == {0.5}


# --- limits ---------------------------------------------------------------------


async def refused(agent: Chats, messages, **fields) -> openai.APIStatusError:
  with pytest.raises(openai.APIStatusError) as e:
    await agent.ask(messages, **fields)
  return e.value


async def test_a_full_context_is_told_in_the_words_that_agents_know(rig):
  key, agent = rig.agent(context=60)
  e = await refused(agent, [{'role': 'user', 'content': 'word ' * 80}])
  assert (e.status_code, e.code) == (400, 'context_length_exceeded')
  assert 'maximum context length is 60 tokens' in e.message
  assert rig.proxy.close_episode(key).cut


async def test_a_turn_gets_what_is_left_of_the_context(rig):
  key, agent = rig.agent(context=len(FMT.conversation([USER])) + 4)
  await agent.ask([USER])
  assert rig.router.asked[0].max_new == 4
  served = rig.proxy.close_episode(key)
  assert served.cut and served.sampled_tokens == 4


@pytest.mark.parametrize(
  ('limits', 'code'),
  [
    ({'turns': 2}, 'turn_limit_exceeded'),
    ({'tokens': 15}, 'token_limit_exceeded'),
  ],
)
async def test_over_a_limit_an_episode_is_told_so_once_and_for_all(rig, limits, code):
  key, agent = rig.agent(**limits)
  for i in range(2):
    await agent.ask([USER, {'role': 'user', 'content': str(i)}])
  e = await refused(agent, [USER])
  assert (e.status_code, e.code) == (400, code)
  served = rig.proxy.close_episode(key)
  assert served.cut and served.fault == ''
  assert served.sampled_tokens <= 20


async def test_the_last_turn_gets_the_tokens_that_are_left(rig):
  key, agent = rig.agent(tokens=15)
  await agent.ask([USER])
  await agent.ask([USER, USER])
  assert [r.max_new for r in rig.router.asked] == [15, 5]
  assert rig.proxy.close_episode(key).sampled_tokens == 15


async def test_more_at_once_than_allowed_is_asked_to_come_again(rig):
  key, agent = rig.agent(at_once=2)
  rig.router.hold = asyncio.Event()
  both = [asyncio.ensure_future(agent.ask([USER, USER], n=2))]
  while rig.router.running < 2:
    await asyncio.sleep(0.01)
  e = await refused(agent, [USER])
  assert e.status_code == 429
  assert int(e.response.headers['retry-after']) >= 1
  assert (await refused(agent, [USER], n=3)).status_code == 400
  rig.router.hold.set()
  await asyncio.gather(*both)
  await agent.ask([USER])
  assert rig.proxy.close_episode(key).turns == 3


async def test_an_episode_that_takes_too_long_has_no_outcome(rig):
  key, agent = rig.agent(seconds=0.3)
  await agent.ask([USER])
  rig.router.hold = asyncio.Event()
  e = await refused(agent, [USER, USER])
  assert e.code == 'episode_time_exceeded'
  assert (await refused(agent, [USER])).code == 'episode_time_exceeded'
  served = rig.proxy.close_episode(key)
  assert 'took over 0.3 s' in served.fault
  made = served.episode(TASK, 'g', 0, types.Outcome(0.0, 'gave up'))
  assert (made.status, made.outcome.value) == ('invalid', None)
  assert made.turns == 1


# --- faults ---------------------------------------------------------------------


async def test_samplers_that_are_gone_make_no_reward(rig):
  rig.router.says = [ConnectionError('no sampler answered')]
  key, agent = rig.agent()
  assert (await refused(agent, [USER])).status_code == 503
  served = rig.proxy.close_episode(key)
  made = served.episode(TASK, 'g', 0, types.Outcome(0.0, 'the agent ended'))
  assert (made.status, made.outcome.value) == ('invalid', None)
  assert 'no sampler answered' in made.outcome.reason


async def test_a_fault_that_the_agent_got_over_counts_no_longer(rig):
  rig.router.says = [ConnectionError('no sampler answered')]
  key, agent = rig.agent()
  await refused(agent, [USER])
  await agent.ask([USER])
  served = rig.proxy.close_episode(key)
  made = served.episode(TASK, 'g', 0, types.Outcome(0.0, 'the agent ended'))
  assert (made.status, made.outcome.value, made.turns) == ('valid', 0.0, 1)


async def test_an_answer_that_lacks_what_a_token_must_carry_is_never_told(rig):
  key, agent = rig.agent()
  good = rig.router._part

  def bad(ids, finish):
    return dataclasses.replace(
      good(ids, finish), logp_T=np.full(len(ids), np.nan, np.float32)
    )

  rig.router._part = bad
  assert (await refused(agent, [USER])).status_code == 503
  served = rig.proxy.close_episode(key)
  assert served.turns == 0 and 'log-prob' in served.fault


async def test_a_bug_behind_the_proxy_is_passed_on(rig):
  rig.router.says = [ValueError('key: got 7')]
  key, agent = rig.agent()
  assert (await refused(agent, [USER])).status_code == 503
  with pytest.raises(ValueError, match='key: got 7'):
    rig.proxy.close_episode(key)


async def test_a_turn_that_is_slow_may_be_asked_again(rig):
  key, agent = rig.agent(turn_seconds=0.2)
  rig.router.hold = asyncio.Event()
  assert (await refused(agent, [USER])).status_code == 503
  assert rig.proxy._open[key]._fault == 'a turn took over 0.2 s'
  rig.router.hold.set()
  await agent.ask([USER])
  assert rig.proxy.close_episode(key).fault == ''


# --- keys -----------------------------------------------------------------------


@pytest.mark.parametrize('path', ['chat/completions', 'models', 'nothing', 'models/x'])
async def test_without_the_key_of_an_open_episode_there_is_nothing(rig, path):
  key, _ = rig.agent()
  base = rig.proxy.open_episode('h', 0).base_url
  rig.proxy.close_episode(base.split('/')[-2])
  others = [base, base.replace(base.split('/')[-2], 'guess')]
  others.append(base.replace(base.split('/')[-2], f'../e/{key}x'))
  async with aiohttp.ClientSession() as http:
    for url in others:
      async with http.post(f'{url}/{path}', json={'model': 'swe17'}) as response:
        said = await response.json()
        assert response.status == 404
        assert said['error']['type'] == 'not_found_error'
        assert key not in json.dumps(said)
    for url in (base.split('/e/')[0], base.split('/v1')[0]):
      async with http.get(url) as response:
        assert response.status == 404
  rig.proxy.close_episode(key)
  with pytest.raises(KeyError):
    rig.proxy.close_episode(key)


async def test_keys_cannot_be_guessed_from_one_another(rig):
  keys = [rig.proxy.open_episode('g', i).key for i in range(50)]
  assert len({key[:8] for key in keys}) == 50
  assert min(map(len, keys)) >= 32


async def test_one_agents_history_is_nothing_to_another(rig):
  a, first = rig.agent('g', 0)
  b, second = rig.agent('g', 1)
  (told,) = await first.ask([USER])
  await second.ask([USER, told, USER])
  assert rig.router.asked[1].token_T.tolist() == FMT.conversation([USER, told, USER])
  assert rig.proxy.close_episode(a).turns == rig.proxy.close_episode(b).turns == 1


async def test_closing_an_episode_ends_what_it_has_under_way(rig):
  key, agent = rig.agent()
  rig.router.hold = asyncio.Event()
  waiting = asyncio.ensure_future(agent.ask([USER]))
  while not rig.router.running:
    await asyncio.sleep(0.01)
  assert rig.proxy.close_episode(key).turns == 0
  with pytest.raises(openai.APIError):
    await waiting
  assert rig.router.running == 0


async def test_an_episode_is_what_a_group_holds(rig):
  key, agent = rig.agent()
  await agent.ask([USER], n=2)
  made = rig.proxy.close_episode(key).episode(
    TASK, 'g', 0, types.Outcome(1.0), submitted=True, tests=2
  )
  assert (made.status, made.solved, made.tests, made.id) == ('valid', True, 2, 'g.0')
  assert made.sampled_tokens == sum(int(s.mask_T.sum()) for s in made.segments)
