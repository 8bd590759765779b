"""The scripted agents of kernels: what they read, what they write, that skill pays."""

import functools
import itertools
import random

import pytest

from experiments.configs import kernels as kernels_config
from swe17 import config, settings, types
from swe17.agent import episode, formats, kernels_scripted, tokenizer
from swe17.env import base
from swe17.env.kernels import bench, judge, kernels_small, small
from swe17.rollout import scripts

FMT = formats.Own(tokenizer.load(tokenizer.PATH.parent / 'tokenizer_kernels.json'))
AGENT = config.Agent(max_turns=5, max_context=320, max_new_tokens=72, thoughts='strip')


class Counted:
  """A judge that counts edits of the gold instead of timing: 1 + one for each."""

  async def judge(self, problem: bench.Problem, source: str) -> bench.Verdict:
    if source == problem.reference:
      return bench.Verdict('barred', 'copies_reference', flag='copies_reference')
    done = right(int(problem.name.rpartition('/')[2])).get(source)
    return (
      bench.Verdict('wrong')
      if done is None
      else bench.Verdict('correct', speedup=1.0 + done)
    )


@functools.cache
def right(seed: int) -> dict[str, int]:
  """Versions of a function with some edits of its gold -> how many."""
  function = small.make(seed)
  found = {}
  for n in range(len(function.gold) + 1):
    for some in itertools.combinations(function.gold.items(), n):
      found[small.source(small.edited(function, dict(some)))] = n
  return found


def task(seed: int, attempts: int = 4) -> types.Task:
  function = small.make(seed)
  unit = kernels_small.unit(function)
  row = kernels_small.Row(
    f'{unit}/{seed}', seed, unit, 'train', 4.0, kernels_small.sha(function)
  )
  return kernels_small.task_of(row, function, config.Tasks(attempts=attempts))


async def play(
  style: kernels_scripted.Style, seed: int, attempts: int = 4
) -> types.Episode:
  asked = task(seed, attempts)
  env = kernels_small.SmallEnv(asked, Counted())
  await env.reset()
  return await episode.run(
    task=asked,
    env=env,
    generate=kernels_scripted.Editor(FMT, random.Random(seed), style),
    fmt=FMT,
    cfg=AGENT,
    sampling=types.Sampling(),
    seed=0,
    group_id='g',
    member=seed,
  )


def test_judging_finds_the_gold_and_leaves_decoys_alone():
  for seed in range(150):
    function = small.make(seed)
    view = small.view(function.pieces)
    for place in range(1, len(function.pieces) // 2 + 1):
      want = [function.gold[place]] if place in function.gold else []
      assert kernels_scripted.judged(view, str(place)) == want, (view, place)
      assert set(want) <= set(kernels_scripted.options(view, str(place)))


async def test_the_careful_one_writes_all_edits_in_its_first_turn():
  for seed in range(10):
    done = await play(kernels_scripted.CAREFUL, seed)
    edits = len(small.make(seed).gold)
    assert done.outcome.value == 0.3 + min(1.0 + edits, 5.0)
    assert done.turn_scores is not None
    assert done.turn_scores[0] == done.outcome.value and done.turns == 4


async def test_strength_is_score():
  mean = {}
  for name, style in kernels_scripted.STRENGTHS.items():
    found = [(await play(style, seed)).outcome.value or 0.0 for seed in range(16)]
    mean[name] = sum(found) / len(found)
  assert mean['weak'] < mean['clumsy'] < 0.6 * mean['careful']


async def test_a_bad_test_is_undone_before_the_next_edit():
  sure = kernels_scripted.Style(more=0.0, undo=1.0, judge=0.0, test=1.0)
  for seed in range(12):
    done = await play(sure, seed)
    calls = [
      [call.name for call in FMT.read(text).calls]
      for role, text in FMT.messages(done.segments[0].token_T.tolist())
      if role == 'assistant'
    ]
    assert done.turn_scores is not None
    for i, names in enumerate(calls[1:]):
      if done.turn_scores[i] == 0.0:
        assert names[0] == 'undo'


async def test_episodes_fit_the_context_and_are_well_formed():
  for seed in range(30):
    done = await play(kernels_scripted.CLUMSY, seed)
    assert done.malformed == 0 and done.status == 'valid'
    assert done.outcome.reason in ('', 'not submitted: turn limit')
    assert sum(s.token_T.size for s in done.segments) < AGENT.max_context
    assert len(done.turn_scores or ()) == done.turns


async def test_a_thought_is_dropped_from_the_next_context():
  thinking = kernels_scripted.Style(think=1.0)
  done = await play(thinking, 1)
  assert len(done.segments) > 1 and done.thinking_tokens > 0
  first, second = (FMT.text(s.token_T.tolist()) for s in done.segments[:2])
  assert tokenizer.THINK in first
  before = second.rpartition(tokenizer.ASSISTANT)[0]
  assert tokenizer.THINK not in before.partition(tokenizer.THINK_END)[0]


async def test_members_draw_their_own_episodes_and_replay_alike():
  drawn = [await play(kernels_scripted.CLUMSY, seed) for seed in (3, 3, 4)]
  tokens = [[s.token_T.tolist() for s in e.segments] for e in drawn]
  assert tokens[0] == tokens[1] != tokens[2]


async def test_one_attempt_is_one_turn():
  done = await play(kernels_scripted.CAREFUL, 2, attempts=1)
  assert done.turns == 1 and done.submitted and len(done.turn_scores or ()) == 1


def test_the_family_has_scripts_for_the_warm_start():
  script = scripts.get(kernels_small.FAMILY)
  assert script.practice is None
  with pytest.raises(ValueError, match=r'imitation\.steps=0'):
    scripts.get('kernels')


async def test_the_scores_of_turns_are_zero_where_nothing_was_handed_in():
  asked = task(0)
  env = kernels_small.SmallEnv(asked, Counted())
  await env.reset()
  assert await base.turn_score(env) == 0.0
  for name, arguments in asked.payload['gold'][:-4]:
    await env.step(name, arguments)
  assert await base.turn_score(env) == 0.0  # edits alone are not handed in
  await env.step('test', {})
  assert await base.turn_score(env) == (await env.verify()).value
  assert await base.turn_score(env) == 0.0  # told once
  assert judge.Account(4, 5.0).outcome() == types.Outcome(0.0)


def test_settings_of_every_form_resolve_and_fit_what_is_played():
  forms = {arg: resolved(arg) for arg in ('', 'single', 'episode', 'whole')}
  multi, single = forms[''], forms['single']
  assert (multi.loss.credit, multi.loss.gamma) == ('turn', 0.4)
  assert multi.agent.thoughts == 'strip' and multi.tasks.attempts == 4
  assert multi.agent.max_context == AGENT.max_context
  assert single.tasks.attempts == single.agent.max_turns == 1
  assert forms['episode'].loss.credit == 'episode'
  assert forms['whole'].tasks.family == 'kernels'
  with pytest.raises(ValueError, match="want '', 'single', 'episode' or 'whole'"):
    kernels_config.get_config('double')


def resolved(arg: str) -> config.Config:
  return settings.resolve(kernels_config.get_config(arg))
