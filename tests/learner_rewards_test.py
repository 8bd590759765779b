"""From outcomes to rewards: stabilisers, length penalties, phases and budgets."""

import dataclasses

import numpy as np
import pytest

from swe17 import config, types
from swe17.learner import batching, rewards
from tests import fixtures

ALTERNATING = config.Length(
  kind='alternating', w_turns=0, w_tool=0, phase_steps=2, cap=0.4, slope=0.5
)


def group(values, sizes, *, version=0, start=0, **of_episode) -> types.Group:
  """A group whose episodes sampled `sizes` tokens."""
  rng = np.random.default_rng(start)
  made = fixtures.group(start, values)
  episodes = [
    dataclasses.replace(
      e,
      segments=(fixtures.segment(rng, (3, n), version=version),),
      **{k: v[i] for k, v in of_episode.items()},
    )
    for i, (e, n) in enumerate(zip(made.episodes, sizes, strict=True))
  ]
  return dataclasses.replace(made, episodes=tuple(episodes))


def assemble(groups, *, budgets=None, step_of=None, **settings) -> batching.Assembled:
  cfg = config.Loss(**{'baseline': 'mean', **settings})
  return batching.assemble(groups, cfg, budgets=budgets, step_of=step_of)


def adv(assembled: batching.Assembled) -> list[float]:
  return [item.adv for item in assembled.items]


def test_format_earns_nothing_and_a_malformed_call_ends_at_its_outcome():
  # SWE-grep: no format reward; agent.on_malformed='end' makes the outcome 0 elsewhere.
  plain = assemble([group((1.0, 0.0), (4, 4))])
  other = assemble(
    [group((1.0, 0.0), (4, 4), malformed=(3, 0), submitted=(False, True))]
  )
  assert adv(plain) == adv(other) == [0.5, -0.5]


def test_overlong_episodes_are_in_the_statistics_and_outside_the_loss():
  cut = group((1.0, 0.0, 0.0), (4, 4, 4), cut=(False, True, False))
  assert adv(assemble([cut])) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
  got = assemble([cut], mask_overlong=True)
  assert adv(got) == pytest.approx([2 / 3, -1 / 3])
  assert got.denominator_episodes == 3
  assert (got.values['masked_share'], got.values['masked_count']) == (1 / 3, 3)


@pytest.mark.parametrize(
  ('direction', 'want'), [('divide', [0.125, -0.5]), ('multiply', [2.0, -0.5])]
)
def test_advantages_may_be_scaled_by_calls_per_turn(direction, want):
  made = group((1.0, 0.0), (4, 4), calls=(8, 2), turns=(2, 2))
  assert adv(assemble([made], calls_scale=direction)) == want


def test_the_baseline_may_count_tokens_with_signal_only():
  # Both sampled 4 tokens; the first had a choice at one of them.
  made = group((1.0, 0.0), (4, 4))
  lone, free = (e.segments[0] for e in made.episodes)
  sizes = np.array([0, 0, 0, 2, 1, 1, 1])
  kept = types.KeptSets(np.append(0, np.cumsum(sizes)).astype(np.int32), lone.token_T)
  lone = dataclasses.replace(lone, kept=dataclasses.replace(kept, ids=np.arange(5)))
  free = dataclasses.replace(
    free, kept=types.KeptSets(np.zeros(8, np.int32), kept.ids[:0])
  )
  episodes = [
    dataclasses.replace(e, segments=(s,))
    for e, s in zip(made.episodes, (lone, free), strict=True)
  ]
  made = dataclasses.replace(made, episodes=tuple(episodes))
  assert [rewards.tokens(e, 'signal') for e in episodes] == [1, 4]
  settings = {'baseline': 'length_weighted'}
  assert adv(assemble([made], **settings)) == [0.5, -0.5]
  by_signal = assemble([made], baseline_tokens='signal', **settings)
  assert adv(by_signal) == pytest.approx([0.8, -0.2])  # b = 1/5


# The alternating penalty.


def test_the_first_phase_is_unconstrained_and_sets_the_budget():
  made = group((1.0, 1.0, 1.0, 0.0), (4, 8, 12, 30), version=1)
  got = assemble([made], length=ALTERNATING)
  assert got.budgets == {'task/0': 8}
  assert got.values['reward'] == 0.75 and got.values['over_budget_share'] == 0
  assert adv(got) == adv(assemble([made]))


def test_a_budget_phase_penalises_successes_over_budget_only():
  made = group((1.0, 1.0, 0.0), (6, 12, 30), version=2)
  got = assemble([made], length=ALTERNATING, budgets={'task/0': 8.0})
  # The second is half over: 1 - .5 * .5.
  assert got.values['reward'] == pytest.approx((1 + 0.75 + 0) / 3)
  assert adv(got) == pytest.approx(np.array([1, 0.75, 0]) - 1.75 / 3)
  assert got.budgets == {'task/0': 8}
  assert got.values['over_budget_share'] == 1 / 3


def test_without_a_budget_nothing_is_penalised():
  made = group((1.0, 0.0), (6, 30), version=2)
  got = assemble([made], length=ALTERNATING)
  assert got.budgets == {} and got.values['reward'] == 0.5
  nobody = assemble([group((0.0, 0.0), (6, 30))], length=ALTERNATING)
  assert nobody.budgets == {}


def test_the_phase_is_that_of_the_step_of_the_first_tokens_version():
  # Version 1 is of step 2, a budget phase; later tokens of a newer one do not count.
  made = group((1.0, 1.0), (6, 16), version=1)
  s = made.episodes[1].segments[0]
  version_T = np.where(np.arange(19) > 10, 2, s.version_T).astype(np.int32)
  late = dataclasses.replace(
    made.episodes[1], segments=(dataclasses.replace(s, version_T=version_T),)
  )
  made = dataclasses.replace(made, episodes=(made.episodes[0], late))
  budgets = {'task/0': 8.0}
  got = assemble([made], length=ALTERNATING, budgets=budgets, step_of={1: 2, 2: 4})
  assert got.values['over_budget_share'] == 0.5
  got = assemble([made], length=ALTERNATING, budgets=budgets, step_of={1: 0, 2: 2})
  assert got.values['over_budget_share'] == 0


def test_a_group_that_all_solved_trains_on_length_in_a_budget_phase():
  made = group((1.0, 1.0), (4, 16), version=2)
  assert assemble([made]).no_signal == ('0-a',)
  got = assemble([made], length=ALTERNATING, budgets={'task/0': 8.0})
  assert got.trained == ('0-a',)
  assert adv(got) == pytest.approx([0.2, -0.2])


def test_a_group_nobody_solved_is_not_trained_by_length_alone():
  # CASES 2.4: shaping is the only variance, so it must not be blown up, nor used.
  made = group((0.0,) * 4, (1, 11, 21, 31))
  got = assemble([made], length=config.Length(kind='linear'))
  assert (got.items, got.no_signal, got.degenerate) == ((), ('0-a',), ('0-a',))
  assert got.values['groups_degenerate'] == 1
  plain = assemble([made])
  assert plain.no_signal == ('0-a',) and plain.degenerate == ()


# The linear cost.


def test_the_linear_cost_is_taken_off_every_episode_by_effort():
  made = group((1.0, 0.0), (10, 30), turns=(2, 3), tool_seconds=(0.0, 1.0))
  for effort, lam in (('low', 1e-2), ('high', 1e-3)):
    settings = config.Length(
      kind='linear', w_tokens=1, w_turns=5, w_tool=20, effort=effort,
      lambda_low=1e-2, lambda_high=1e-3,
    )  # fmt: skip
    got = assemble([made], length=settings)
    reward = np.array([1 - 20 * lam, -65 * lam])
    assert adv(got) == pytest.approx(reward - reward.mean())


def test_gspo_divides_by_episodes_and_the_others_by_tokens():
  assert batching.denominator(config.Loss(), 8, 448) == 8 * 448
  assert batching.denominator(config.Loss(objective='gspo'), 8, 448) == 8


def test_tool_output_is_in_no_cost_and_no_baseline():
  # CASES 2.10: ten times the model's own text, read and not written.
  made = group((1.0, 0.0), (4, 6))
  loud = made.episodes[1]
  heard = fixtures.segment(np.random.default_rng(9), (3, 4), (60, 2))
  loud = dataclasses.replace(loud, segments=(heard,))
  other = dataclasses.replace(made, episodes=(made.episodes[0], loud))
  for settings in (
    {'length': config.Length(kind='linear')},
    {'baseline': 'length_weighted'},
  ):
    assert adv(assemble([made], **settings)) == adv(assemble([other], **settings))
  assert [rewards.tokens(e) for e in other.episodes] == [4, 6]


def test_a_cut_episode_of_several_segments_has_one_cost():
  # CASES 2.12: however many rows an episode turned into.
  rng = np.random.default_rng(3)
  made = group((1.0, 0.0), (12, 6))
  cut = tuple(fixtures.segment(rng, (3, n)) for n in (5, 4, 3))
  first = dataclasses.replace(made.episodes[0], segments=cut)
  parts = dataclasses.replace(made, episodes=(first, made.episodes[1]))
  settings = {'length': config.Length(kind='linear'), 'baseline': 'length_weighted'}
  one, three = assemble([made], **settings), assemble([parts], **settings)
  assert adv(one) == [adv(three)[0], adv(three)[3]]
  assert adv(three)[:3] == [adv(one)[0]] * 3
  assert [item.episode for item in three.items] == ['0-a.0'] * 3 + ['0-a.1']


# Credit by turn.

TURN = {'credit': 'turn', 'gamma': 0.4}


def scored(scores, sizes, values=None, **of_episode) -> types.Group:
  """A group with a score and so many sampled tokens for each turn of each episode."""
  rng = np.random.default_rng(7)
  made = fixtures.group(0, values or tuple(max(s) for s in scores))
  episodes = [
    dataclasses.replace(
      e,
      segments=(fixtures.segment(rng, *((3, n) for n in size)),),
      turns=len(size),
      turn_scores=tuple(map(float, score)),
      **{k: v[i] for k, v in of_episode.items()},
    )
    for i, (e, score, size) in enumerate(zip(made.episodes, scores, sizes, strict=True))
  ]
  return dataclasses.replace(made, episodes=tuple(episodes))


def by_turn(assembled: batching.Assembled) -> list[list[float]]:
  """The advantage of each turn of each item, read off its tokens."""
  out = []
  for item in assembled.items:
    s, adv_T = item.segment, item.adv_T()
    turns = np.unique(s.turn_T[s.mask_T])
    each = [set(adv_T[(s.mask_T & (s.turn_T == t))[1:]].tolist()) for t in turns]
    assert all(len(values) == 1 for values in each)
    assert not adv_T[~s.mask_T[1:]].any()
    out.append([values.pop() for values in each])
  return out


def test_every_turn_has_the_advantage_of_its_discounted_return():
  # R = (.4, 1) and (.3 + .4 * 0, 0); b = (.4*2 + 1*4 + .3*6 + 0*8) / 20 = .33
  made = scored([(0, 1), (0.3, 0)], [(2, 4), (6, 8)])
  got = by_turn(assemble([made], baseline='length_weighted', **TURN))
  assert got == [pytest.approx([0.07, 0.67]), pytest.approx([-0.03, -0.33])]
  got = by_turn(assemble([made], **TURN))
  assert got == [pytest.approx([-0.025, 0.575]), pytest.approx([-0.125, -0.425])]
  loo = by_turn(assemble([made], baseline='leave_one_out', **TURN))
  assert loo[0] == pytest.approx(np.array([-0.025, 0.575]) * 4 / 3)


def test_an_episode_scored_at_its_end_pays_its_last_turn_and_discounts_to_the_first():
  made = scored([(0, 0, 1), (0, 0)], [(3, 3, 3), (3, 3)])
  plain = [dataclasses.replace(e, turn_scores=None) for e in made.episodes]
  at_end = dataclasses.replace(made, episodes=tuple(plain))
  want = by_turn(assemble([made], **TURN))
  assert want[0] == pytest.approx(np.array([0.16, 0.4, 1]) - 1.56 / 5)
  assert by_turn(assemble([at_end], **TURN)) == want
  whole = assemble([at_end], credit='turn', gamma=1.0)
  assert by_turn(whole) == [pytest.approx([0.4] * 3), pytest.approx([-0.6] * 2)]


@pytest.mark.parametrize('baseline', ['length_weighted', 'mean', 'leave_one_out'])
@pytest.mark.parametrize('scored_by_turn', [True, False])
@pytest.mark.parametrize('tokens', ['sampled', 'signal'])
def test_with_episodes_of_one_turn_credit_by_turn_is_credit_by_episode(
  baseline, scored_by_turn, tokens
):
  values = (1.0, 0.0, 0.7, 0.0)
  made = group(values, (4, 9, 5, 7), calls=(8, 2, 1, 3), turns=(1, 1, 1, 1))
  if scored_by_turn:
    episodes = [
      dataclasses.replace(e, turn_scores=(v,))
      for e, v in zip(made.episodes, values, strict=True)
    ]
    made = dataclasses.replace(made, episodes=tuple(episodes))
  settings = {'baseline': baseline, 'baseline_tokens': tokens, 'calls_scale': 'divide'}
  a, b = assemble([made], **settings), assemble([made], **settings, **TURN)
  assert len(a.items) == len(b.items) == 4
  for x, y in zip(a.items, b.items, strict=True):
    assert x.adv_T().tobytes() == y.adv_T().tobytes()
  assert (a.denominator_episodes, a.values) == (b.denominator_episodes, b.values)


def test_scores_of_turns_that_differ_are_a_signal_and_the_discount_alone_is_none():
  same = (1.0, 1.0)
  differ = scored([(0, 1), (1, 1)], [(3, 3), (3, 3)], same)
  assert assemble([differ]).no_signal == ('0-a',)
  assert assemble([differ], **TURN).trained == ('0-a',)
  # Returns differ by place, (1.4, 1) twice; scores and outcomes do not.
  constant = scored([(1, 1), (1, 1)], [(3, 3), (3, 3)], same)
  assert assemble([constant], **TURN).no_signal == ('0-a',)
  at_end = dataclasses.replace(
    constant,
    episodes=tuple(dataclasses.replace(e, turn_scores=None) for e in constant.episodes),
  )
  assert assemble([at_end], **TURN).no_signal == ('0-a',)
  # One was better earlier: the outcomes, its best turns, are equal.
  early = scored([(1, 0), (0, 1)], [(3, 3), (3, 3)], same)
  assert by_turn(assemble([early], **TURN)) == [
    pytest.approx([0.4, -0.6]), pytest.approx([-0.2, 0.4])
  ]  # fmt: skip


def test_masked_episodes_are_in_the_statistics_of_turns_and_outside_the_loss():
  made = scored([(0, 1), (0, 0)], [(3, 3), (3, 3)], cut=(False, True))
  got = assemble([made], mask_overlong=True, **TURN)
  assert by_turn(got) == [pytest.approx([0.05, 0.65])]
  assert got.denominator_episodes == 2


def test_a_turn_is_one_sample_in_whatever_segments_its_tokens_lie():
  # Compaction: the second turn's tokens are in two segments, the third's in the last.
  made = scored([(0, 1, 0), (0, 0, 0)], [(3, 6, 2), (3, 3, 3)])
  whole = made.episodes[0].segments[0]
  rng = np.random.default_rng(8)
  parts = [fixtures.segment(rng, (4, 3), (3, 2)), fixtures.segment(rng, (5, 4), (2, 2))]
  parts[1] = dataclasses.replace(parts[1], turn_T=parts[1].turn_T + 1)
  first = dataclasses.replace(made.episodes[0], segments=tuple(parts))
  cut = dataclasses.replace(made, episodes=(first, made.episodes[1]))
  settings = {'baseline': 'length_weighted', **TURN}
  one, two = assemble([made], **settings), assemble([cut], **settings)
  assert whole.mask_T.sum() == sum(s.mask_T.sum() for s in parts) == 11
  (a, b, other), (first_two, last_two, same) = by_turn(one)[0], by_turn(two)
  assert first_two == [a, b] and last_two == [b, other]
  assert same == by_turn(one)[1]
