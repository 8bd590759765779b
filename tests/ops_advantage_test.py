"""Advantages of a group, and which groups train."""

import itertools

import hypothesis
from hypothesis import strategies
from hypothesis.extra import numpy as arrays
import numpy as np
import pytest

from swe17.ops import advantage

BASELINES = list(advantage.BASELINES.values())


def adv(reward, length=None, baseline=advantage.length_weighted) -> np.ndarray:
  reward = np.asarray(reward)
  length = np.ones(reward.size) if length is None else np.asarray(length)
  return advantage.advantages(reward, length, baseline)


def signal(outcome, reward=None, solved=None) -> bool:
  outcome = np.asarray(outcome)
  reward = outcome if reward is None else np.asarray(reward)
  solved = outcome >= 1 if solved is None else np.asarray(solved)
  return advantage.has_signal(outcome, reward, solved)


def test_by_hand():
  # b = (1 * 30 + 0 * 10) / 40
  assert adv([1.0, 0.0], [30, 10]).tolist() == [0.25, -0.75]
  assert adv([1.0, 0.0, 0.0, 0.0], baseline=advantage.mean).tolist() == (
    [0.75, -0.25, -0.25, -0.25]
  )
  assert adv([1.0, 0.0, 0.0], baseline=advantage.leave_one_out).tolist() == (
    [1.0, -0.5, -0.5]
  )


def test_length_weighted_advantages_sum_to_zero_over_tokens():
  rng = np.random.default_rng(0)
  for _ in range(50):
    reward, length = rng.normal(size=8), rng.integers(1, 500, 8)
    assert abs((length * adv(reward, length)).sum()) < 1e-9


def test_equal_lengths_make_it_the_mean():
  reward = np.random.default_rng(1).normal(size=6)
  want = adv(reward, baseline=advantage.mean)
  np.testing.assert_allclose(adv(reward, np.full(6, 17)), want, atol=1e-12)


def test_leave_one_out_is_the_mean_scaled():
  reward = np.random.default_rng(2).normal(size=5)
  want = adv(reward, baseline=advantage.mean) * 5 / 4
  got = adv(reward, baseline=advantage.leave_one_out)
  np.testing.assert_allclose(got, want, atol=1e-12)


def test_leave_one_out_of_one_is_refused():
  with pytest.raises(ValueError, match='got 1'):
    advantage.leave_one_out(np.ones(1), np.ones(1))


def test_an_episode_without_tokens_does_not_move_the_baseline():
  assert adv([1.0, 0.0, 0.0], [10, 10, 0]).tolist() == [0.5, -0.5, -0.5]


def test_no_tokens_at_all_falls_back_to_the_mean():
  assert adv([1.0, 0.0], [0, 0]).tolist() == [0.5, -0.5]


@pytest.mark.parametrize('baseline', BASELINES)
@pytest.mark.parametrize('value', [0.1, 0.7, 1 / 3, 0.0, 1.0])
def test_a_constant_group_gives_exactly_zero_in_float32_too(baseline, value):
  reward = np.full(8, value, np.float32)
  length = np.random.default_rng(0).integers(1, 99, 8)
  assert not adv(reward, length, baseline).any()
  assert not signal(reward, solved=np.zeros(8, bool))


@pytest.mark.parametrize('baseline', BASELINES)
def test_every_zero_one_group_is_finite_and_bounded_by_its_rewards(baseline):
  for n in range(2, 9):
    for reward in itertools.product([0.0, 1.0], repeat=n):
      got = adv(reward, np.arange(1, n + 1), baseline)
      assert np.isfinite(got).all()
      assert np.abs(got).max() <= 1.0  # no division by a deviation blows it up
      assert (len(set(reward)) == 1) == (not got.any())


@pytest.mark.parametrize('baseline', BASELINES)
def test_the_order_of_delivery_does_not_matter(baseline):
  rng = np.random.default_rng(3)
  reward, length, order = rng.random(8), rng.integers(1, 99, 8), rng.permutation(8)
  got = adv(reward[order], length[order], baseline)
  np.testing.assert_allclose(got, adv(reward, length, baseline)[order], atol=1e-12)


@pytest.mark.parametrize('baseline', BASELINES)
def test_a_constant_added_to_the_rewards_changes_nothing(baseline):
  reward, length = np.array([0.2, 0.9, 0.4]), np.array([3, 5, 9])
  got = adv(reward + 7, length, baseline)
  np.testing.assert_allclose(got, adv(reward, length, baseline), atol=1e-12)


def test_shaping_alone_does_not_train_a_group_that_nobody_solved():
  assert not signal([0.0] * 4, reward=[0.0, -0.01, -0.02, -0.03])


def test_shaping_trains_a_group_that_everybody_solved():
  assert signal([1.0] * 3, reward=[1.0, 0.9, 1.0])
  assert not signal([1.0] * 3, reward=[0.9] * 3)


def test_different_outcomes_train_even_if_none_solved():
  assert signal([0.2, 0.4], solved=[False, False])
  assert signal([0.0, 1.0])


def test_fewer_than_two_episodes_do_not_train():
  assert not signal([1.0])
  assert not signal([])


quick = hypothesis.settings(max_examples=60, deadline=None, derandomize=True)


@quick
@hypothesis.given(
  arrays.arrays(np.float64, 7, elements=strategies.floats(-10, 10)),
  arrays.arrays(np.int64, 7, elements=strategies.integers(0, 10**5)),
)
def test_length_weighted_advantages_of_any_group_sum_to_zero_over_tokens(
  reward, length
):
  got = (length * adv(reward, length)).sum()
  assert abs(got) <= 1e-9 * max(1, length.sum()) * np.abs(reward).max(initial=1)


@quick
@hypothesis.given(
  arrays.arrays(np.float64, 5, elements=strategies.floats(-5, 5)),
  strategies.floats(0, 1),
)
def test_discounted_returns_equal_the_double_sum(reward, gamma):
  want = [
    sum(gamma ** (i - t) * reward[i] for i in range(t, 5)) if gamma else reward[t]
    for t in range(5)
  ]
  got = advantage.discounted_returns(reward, gamma)
  np.testing.assert_allclose(got, want, atol=1e-12)


def test_kevins_returns_by_hand():
  # Only the third turn is right: earlier turns share in it, the later one does not.
  got = advantage.discounted_returns(np.array([0, 0, 1.3, 0]), 0.4)
  assert got.tolist() == pytest.approx([0.208, 0.52, 1.3, 0])
  assert advantage.discounted_returns(np.zeros(0), 0.4).size == 0
  with pytest.raises(ValueError, match=r'gamma=1\.5'):
    advantage.discounted_returns(np.ones(2), 1.5)


@pytest.mark.parametrize(
  ('direction', 'want'),
  [('none', [2, -1, -1]), ('divide', [0.5, -1, -1]), ('multiply', [8, -1, -1])],
)
def test_advantages_are_scaled_by_calls_per_turn_of_one_at_least(direction, want):
  got = advantage.scaled_by_calls(
    np.array([2.0, -1, -1]), np.array([8, 1, 0]), np.array([2, 4, 0]), direction
  )
  assert got.tolist() == want


def test_an_unknown_direction_is_refused():
  with pytest.raises(ValueError, match="direction='up'"):
    advantage.scaled_by_calls(np.ones(1), np.ones(1), np.ones(1), 'up')


# Every turn a sample.


def turns64(reward_GT, length_GT, gamma: float, name: str) -> list[list[float]]:
  """Kevin's advantages from the formula, one sample at a time."""
  samples = []
  for i, reward_T in enumerate(reward_GT):
    for t in range(len(reward_T)):
      returned = sum(gamma ** (k - t) * reward_T[k] for k in range(t, len(reward_T)))
      samples.append((i, returned, float(length_GT[i][t])))
  out: list[list[float]] = [[] for _ in reward_GT]
  for j, (i, returned, _) in enumerate(samples):
    rest = samples[:j] + samples[j + 1 :] if name == 'leave_one_out' else samples
    weight = [n if name == 'length_weighted' else 1.0 for _, _, n in rest]
    base = sum(w * r for w, (_, r, _) in zip(weight, rest, strict=True)) / sum(weight)
    out[i].append(returned - base)
  return out


@pytest.mark.parametrize('name', list(advantage.BASELINES))
@pytest.mark.parametrize('gamma', [0.0, 0.4, 1.0])
def test_advantages_of_turns_are_against_all_turns_of_the_group(name, gamma):
  rng = np.random.default_rng(0)
  sizes = [4, 1, 3, 4]
  reward_GT = [rng.normal(size=n) for n in sizes]
  length_GT = [rng.integers(1, 90, n).astype(float) for n in sizes]
  got = advantage.turn_advantages(
    reward_GT, length_GT, gamma, advantage.BASELINES[name]
  )
  want = turns64(reward_GT, length_GT, gamma, name)
  assert [adv_T.size for adv_T in got] == sizes
  for adv_T, want_T in zip(got, want, strict=True):
    np.testing.assert_allclose(adv_T, want_T, atol=1e-12)


@pytest.mark.parametrize('baseline', BASELINES)
def test_episodes_of_one_turn_have_the_advantages_of_episodes_bit_for_bit(baseline):
  rng = np.random.default_rng(4)
  reward_G, length_G = rng.normal(size=8), rng.integers(1, 99, 8).astype(float)
  got = advantage.turn_advantages(
    np.split(reward_G, 8), np.split(length_G, 8), 0.4, baseline
  )
  want = advantage.advantages(reward_G, length_G, baseline)
  assert np.concatenate(got).tobytes() == want.tobytes()


def test_without_a_discount_of_later_turns_each_has_its_own_reward():
  reward_GT = [np.array([0.0, 1.3]), np.array([0.3, 0.0])]
  length_GT = [np.ones(2), np.ones(2)]
  got = advantage.turn_advantages(reward_GT, length_GT, 0.0, advantage.mean)
  assert np.concatenate(got) == pytest.approx([-0.4, 0.9, -0.1, -0.4])
  undiscounted = advantage.turn_advantages(reward_GT, length_GT, 1.0, advantage.mean)
  assert np.concatenate(undiscounted) == pytest.approx([0.575, 0.575, -0.425, -0.725])


def test_turns_without_a_length_each_are_refused():
  with pytest.raises(ValueError, match=r'got rewards of \[2\] and lengths of \[1\]'):
    advantage.turn_advantages([np.ones(2)], [np.ones(1)], 0.4, advantage.mean)
