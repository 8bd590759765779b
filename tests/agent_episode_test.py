"""The episode loop: tokens as served, every ending, and the scripted agents."""

import asyncio
import dataclasses
import pathlib
import re

import numpy as np
import pytest

from swe17 import config, types, wire
from swe17.agent import chat, episode, formats, record, tokenizer, tools
from swe17.env.repair import anchors, faults, grader, repair

TOK = tokenizer.load()
FMT = formats.Own(TOK)
SOURCE = """\
def bisect_left(a, x, lo=0, hi=None):
    if lo < 0:
        raise ValueError('lo must be non-negative')
    if hi is None:
        hi = len(a)
    while lo < hi:
        mid = (lo + hi) // 2
        if a[mid] < x:
            lo = mid + 1
        else:
            hi = mid
    return lo"""
FAULT = faults.candidates(SOURCE)[-3]
TASK = types.Task('t/1', 'toy', 'train', 't', repair.prompt('bisect_left'), {})
NUCLEUS = types.Sampling(temperature=0.5, top_k=8, top_p=0.9)
VIEW, TEST, SUBMIT = (chat.call(TOK, name) for name in ('view', 'test', 'submit'))


class Toy:
  """The repair tools over a source; solved when its text is the original's again."""

  tools = repair.TOOLS

  def __init__(self, source=''):
    source = source or faults.apply(SOURCE, FAULT.line, FAULT.old, FAULT.new)
    self.pieces = anchors.split(source)
    self.anchors = anchors.names(self.pieces)
    self.earlier: list[list[str]] = []
    self.ran: list[str] = []
    self.done = False
    self.verified = 0

  @property
  def view(self):
    return anchors.view(self.pieces, self.anchors)

  async def step(self, name, arguments):
    self.ran.append(name)
    match name:
      case 'view':
        return self.view
      case 'edit':
        self.earlier.append(list(self.pieces))
        index = self.anchors[arguments['at'].strip('«»')]
        self.pieces[index] = arguments['new'].strip(' ')
        return 'edited'
      case 'undo':
        self.pieces = self.earlier.pop() if self.earlier else self.pieces
        return 'undone'
      case 'test':
        return 'passed 6 of 6' if self.solved else 'failed 3 of 6'
    self.done = True
    return 'submitted'

  @property
  def solved(self):
    return ''.join(self.pieces) == SOURCE

  async def verify(self):
    self.verified += 1
    return types.Outcome(float(self.solved))


class Sampler:
  """Serves the given turns; log-probs, versions and sets tell each draw from others."""

  def __init__(self, *turns, spoil=None):
    self.turns = list(turns)
    self.spoil = spoil or (lambda result: result)
    self.requests: list[types.GenerateRequest] = []
    self.served: list[types.GenerateResult] = []

  async def __call__(self, request):
    self.requests.append(request)
    ids = self.turns.pop(0)[: request.max_new]
    n = len(ids)
    token_T = np.asarray(ids, np.int32)
    position_T = np.arange(n) + request.token_T.size
    sets = [{int(t), (int(t) + 7) % 1024} for t in ids]
    kept = types.KeptSets(
      np.arange(n + 1, dtype=np.int32) * 2,
      np.asarray([i for s in sets for i in sorted(s)], np.int32),
    )
    result = types.GenerateResult(
      token_T=token_T,
      logp_T=(-position_T / 512).astype(np.float32),
      entropy_T=(position_T / 256).astype(np.float32),
      version_T=np.full(n, len(self.requests), np.int32),
      kept=kept,
      finish='stop' if ids[-1] == TOK.end else 'length',
    )
    result = self.spoil(result)
    self.served.append(result)
    return result


def run(sampler, env=None, cfg=None, **kwargs):
  arguments = {
    'task': TASK,
    'env': env or Toy(),
    'generate': sampler,
    'fmt': FMT,
    'cfg': cfg or config.Agent(),
    'sampling': NUCLEUS,
    'seed': 3,
    'group_id': '0-a',
    'member': 1,
  }
  return episode.run(**{**arguments, **kwargs})


def ended(*ids: int) -> list[int]:
  return [*ids, TOK.end]


def through_disk(done: types.Episode) -> types.Episode:
  group = types.Group(done.group_id, 0, done.task_id, done.unit, (done,))
  return wire.bytes_to_group(wire.group_to_bytes(group)).episodes[0]


def assert_as_served(done: types.Episode, sampler: Sampler) -> None:
  """The sampled ids and all that they carry are what the sampler served, in order."""
  (segment,) = through_disk(done).segments
  mask_T = segment.mask_T
  for name, served in (
    ('token_T', 'token_T'),
    ('mu_logp_T', 'logp_T'),
    ('entropy_T', 'entropy_T'),
    ('version_T', 'version_T'),
  ):
    want = np.concatenate([getattr(result, served) for result in sampler.served])
    np.testing.assert_array_equal(getattr(segment, name)[mask_T], want)
  turns = np.repeat(
    np.arange(len(sampler.served)), [len(r.token_T) for r in sampler.served]
  )
  np.testing.assert_array_equal(segment.turn_T[mask_T], turns)
  np.testing.assert_array_equal(segment.temperature_T[mask_T], 0.5)
  np.testing.assert_array_equal(segment.kept.size_T, 2 * mask_T)
  ids = np.concatenate([result.kept.ids for result in sampler.served])
  np.testing.assert_array_equal(segment.kept.ids, ids)
  for name in ('mu_logp_T', 'entropy_T', 'temperature_T', 'version_T', 'turn_T'):
    assert not getattr(segment, name)[~mask_T].any()


async def test_context_is_prompt_turns_as_served_and_results_and_only_grows():
  think = [TOK.think, *TOK.encode('look'), TOK.think_end]
  turns = [ended(*think, *VIEW), ended(*think, *VIEW, *TEST), ended(*SUBMIT)]
  sampler, env = Sampler(*turns), Toy()
  done = await run(sampler, env)
  code = env.view
  want = chat.open_prompt(TOK, TASK.prompt) + turns[0]
  want += chat.tool_results(TOK, [code]) + turns[1]
  want += chat.tool_results(TOK, [code, 'failed 3 of 6']) + turns[2]
  assert done.segments[0].token_T.tolist() == want
  for request in sampler.requests:
    assert request.token_T.tolist() == want[: request.token_T.size]
    assert request.session == '0-a.1.0'
    assert request.key == episode.draw_key(3, '0-a', 1, 0)
    assert request.stop_ids == (TOK.end,)
  assert_as_served(done, sampler)
  assert (done.status, done.submitted, done.cut) == ('valid', True, False)
  assert (done.turns, done.calls, done.tests, done.malformed) == (3, 4, 1, 0)
  assert (done.sampled_tokens, done.thinking_tokens) == (5 + 6 + 2, 2)
  assert done.outcome.value == 0.0
  assert env.verified == 1


def test_no_file_of_the_loop_encodes_text():
  for module in (episode, record, tools):
    text = pathlib.Path(str(module.__file__)).read_text()
    assert not re.search(r'tok\w*\.encode', text)


async def test_random_ids_reach_the_learner_unchanged():
  rng = np.random.default_rng(0)
  for _ in range(30):
    junk = rng.integers(0, 1024, size=(3, 12))
    junk[junk == TOK.end] = TOK.pad
    # Halves of a character, and a name in letters that the encoder would merge.
    junk[0, :3] = [*TOK.encode('\u00e9')[:1], *TOK.encode('r'), *TOK.encode('e')]
    turns = [ended(*row.tolist(), TOK.call_end, *VIEW) for row in junk]
    sampler = Sampler(*turns, ended(*SUBMIT))
    done = await run(sampler, cfg=config.Agent(on_malformed='answer'))
    assert_as_served(done, sampler)


@pytest.mark.parametrize(
  'special',  # <|end|> ends the turn and <tool_call> makes a call: tested elsewhere
  [i for i in range(len(tokenizer.SPECIAL)) if i not in (TOK.end, TOK.call)],
)
@pytest.mark.parametrize('at', [0, 1, 2])
async def test_a_stray_special_id_does_not_shift_the_results(special, at):
  turn = [*TOK.encode('x'), *VIEW]
  turn.insert(at, special)
  if special == TOK.think:
    turn.insert(at + 1, TOK.think_end)
  env = Toy()
  done = await run(Sampler(ended(*turn), ended(*SUBMIT)), env)
  given = done.segments[0].token_T[~done.segments[0].mask_T].tolist()
  want = chat.open_prompt(TOK, TASK.prompt)
  assert given == want + chat.tool_results(TOK, [env.view])


async def test_a_sampler_that_sends_a_nan_makes_the_episode_invalid_and_is_named():
  def spoil(result):
    return dataclasses.replace(result, logp_T=result.logp_T * np.nan)

  done = await run(Sampler(ended(*VIEW, *TEST), spoil=spoil))
  assert (done.status, done.outcome.value) == ('invalid', None)
  assert done.outcome.reason == 'SamplerError: sampler: bad log-prob at token 0'
  assert done.calls == 0
  assert not done.segments[0].mask_T.any()


def bad_json() -> list[int]:
  return [TOK.call, *TOK.encode('{bad}'), TOK.call_end]


async def test_a_malformed_call_ends_the_episode_and_none_of_the_turn_runs():
  env = Toy()
  done = await run(Sampler(ended(*VIEW, *bad_json(), *SUBMIT)), env)
  assert env.ran == []
  assert (done.status, done.outcome.value, done.malformed) == ('valid', 0.0, 1)
  assert done.outcome.reason.startswith('malformed call: invalid JSON')
  assert (env.verified, done.submitted, done.cut) == (0, False, False)


async def test_the_edit_that_takes_the_fault_back_is_run_and_scores():
  edit = chat.call(TOK, 'edit', at='«13»', new=' + ')
  env, wrong = Toy(), chat.call(TOK, 'edit', at='«14»', new='5')
  turns = (ended(*VIEW), ended(*wrong, *TEST), ended(*chat.call(TOK, 'undo'), *edit))
  done = await run(Sampler(*turns, ended(*TEST), ended(*SUBMIT)), env)
  assert env.ran == ['view', 'edit', 'test', 'undo', 'edit', 'test', 'submit']
  assert (done.outcome.value, done.solved, done.tests) == (1.0, True, 2)
  results = [
    text
    for role, text in chat.messages(TOK, done.segments[0].token_T.tolist())
    if role == 'tool'
  ]
  tested = ['edited', 'failed 3 of 6', 'undone', 'edited', 'passed 6 of 6']
  assert results[1:] == tested


async def test_a_malformed_call_is_answered_and_the_good_ones_run():
  env = Toy(SOURCE)
  unknown = chat.call(TOK, 'look')
  turns = (ended(*VIEW, *unknown, *bad_json(), *TEST), ended(*SUBMIT))
  done = await run(Sampler(*turns), env, config.Agent(on_malformed='answer'))
  assert env.ran == ['view', 'test', 'submit']
  assert (done.outcome.value, done.malformed, done.calls) == (1.0, 2, 3)
  results = [
    text
    for role, text in chat.messages(TOK, done.segments[0].token_T.tolist())
    if role == 'tool'
  ]
  assert results[1] == "error: unknown tool 'look'"
  assert results[2].startswith('error: invalid JSON')
  assert results[3] == 'passed 6 of 6'


async def test_a_call_cut_by_the_length_limit_is_malformed_and_reported_as_cut():
  edit = chat.call(TOK, 'edit', at='«2»', new=' <= ')
  env = Toy()
  cfg = config.Agent(max_new_tokens=4)
  done = await run(Sampler(ended(*TEST, *edit)), env, cfg)
  assert (done.outcome.value, done.malformed, done.cut) == (0.0, 1, True)
  assert done.outcome.reason == 'malformed call: cut'
  assert env.ran == []


async def test_a_turn_cut_after_its_call_is_closed_by_a_token_that_is_not_trained():
  sampler = Sampler([*TOK.encode('abc' * 9)[:3], *VIEW], ended(*SUBMIT))
  done = await run(sampler, cfg=config.Agent(max_new_tokens=4))
  (segment,) = done.segments
  at = int(np.flatnonzero(segment.mask_T)[3])
  assert segment.token_T[at + 1] == TOK.end
  assert not segment.mask_T[at + 1]
  assert done.submitted
  assert_as_served(done, sampler)


async def test_an_unsubmitted_end_scores_0_and_is_not_verified():
  solved = Toy(SOURCE)
  done = await run(Sampler(ended(*TOK.encode('done'))), solved)
  assert done.outcome.value == 0.0
  assert done.outcome.reason == 'not submitted: a turn without a call'
  assert (solved.verified, done.submitted, done.status) == (0, False, 'valid')
  done = await run(Sampler(*[ended(*TEST)] * 3), solved, config.Agent(max_turns=3))
  assert done.outcome == types.Outcome(0.0, 'not submitted: turn limit')
  assert (done.cut, done.turns, done.tests, solved.verified) == (True, 3, 3, 0)
  assert done.segments[0].token_T[-1] == TOK.end  # results nobody reads are left out


@pytest.mark.parametrize('bound', range(14, 240))
async def test_no_request_and_no_episode_exceeds_the_context(bound):
  sampler = Sampler(*[ended(*VIEW, *TEST)] * 14)
  cfg = config.Agent(max_context=bound, on_malformed='answer')
  done = await run(sampler, cfg=cfg)
  assert done.segments[0].token_T.size <= bound
  for request in sampler.requests:
    assert request.token_T.size + request.max_new <= bound
    assert request.max_new >= 1
  assert done.status == 'valid'
  assert done.cut
  assert_as_served(done, sampler)


async def test_a_prompt_that_leaves_no_room_is_no_reward():
  done = await run(Sampler(), cfg=config.Agent(max_context=5))
  assert (done.status, done.outcome.value) == ('invalid', None)
  assert 'agent.max_context is 5' in done.outcome.reason


@pytest.mark.parametrize(
  'error',
  [ConnectionError('no sampler'), TimeoutError('late'), OSError('disk'),
   grader.GraderError('died')],
)  # fmt: skip
@pytest.mark.parametrize('where', ['generate', 'step', 'verify'])
async def test_an_infrastructure_fault_is_never_a_reward(error, where):
  async def fail(*_):
    raise error

  env, sampler = Toy(SOURCE), Sampler(ended(*VIEW), ended(*SUBMIT))
  if where == 'generate':
    done = await run(fail, env)
  else:
    setattr(env, where, fail)
    done = await run(sampler, env)
  assert (done.status, done.outcome.value) == ('invalid', None)
  assert done.outcome.reason == f'{type(error).__name__}: {error}'
  assert not done.solved
  assert through_disk(done).outcome == done.outcome


async def test_a_verifier_without_a_verdict_makes_the_episode_invalid():
  class Silent(Toy):
    async def verify(self):
      return types.Outcome(None, 'the verifier failed')

  done = await run(Sampler(ended(*SUBMIT)), Silent())
  assert (done.status, done.outcome.reason) == ('invalid', 'the verifier failed')


async def test_a_bug_is_passed_on():
  async def bug(_):
    raise KeyError('bug')

  with pytest.raises(KeyError, match='bug'):
    await run(bug)


async def test_wall_time_ends_the_episode_without_a_reward_and_keeps_what_was_served():
  async def hang(request):
    if request.token_T.size > 60:
      await asyncio.sleep(60)
    return await sampler(request)

  sampler = Sampler(ended(*VIEW))
  done = await run(hang, cfg=config.Agent(episode_seconds=0.2))
  assert done.outcome == types.Outcome(None, 'episode took over 0.2 s')
  assert done.turns == 1
  assert_as_served(done, sampler)


async def test_cancelling_an_episode_cancels_it():
  async def hang(_):
    await asyncio.sleep(60)

  running = asyncio.ensure_future(run(hang))
  await asyncio.sleep(0.01)
  running.cancel()
  with pytest.raises(asyncio.CancelledError):
    await running


def test_draw_keys_are_two_uint32_and_differ_by_every_part():
  parts = [
    (0, 'g', 0, 0),
    (1, 'g', 0, 0),
    (0, 'h', 0, 0),
    (0, 'g', 1, 0),
    (0, 'g', 0, 1),
  ]
  keys = {episode.draw_key(*part) for part in parts}
  assert len(keys) == len(parts)
  assert all(0 <= half < 1 << 32 for key in keys for half in key)


async def test_transcript_reads_turn_by_turn():
  sampler = Sampler(ended(*VIEW), ended(*SUBMIT))
  env = Toy()
  text = episode.transcript(await run(sampler, env), FMT)
  assert '# t/1, episode 0-a.1' in text
  assert '- outcome 0, not solved, valid' in text
  assert '## turn 1: 2 sampled, mean entropy' in text
  assert '## turn 2: 2 sampled, mean entropy' in text
  assert ', version 2' in text
  assert '- segment: ' in text
  assert 'versions 1 to 2' in text
  assert f'    {env.view.splitlines()[3]}' in text
