"""What the groups of a step say about the rollouts."""

import dataclasses

import numpy as np
import pytest

from swe17 import types
from swe17.learner import summary
from tests import fixtures


def with_bound(group: types.Group, *counts: int) -> types.Group:
  episodes = zip(group.episodes, counts, strict=True)
  return dataclasses.replace(
    group,
    episodes=tuple(dataclasses.replace(e, topk_bound=n) for e, n in episodes),
  )


def test_what_top_k_decided_is_a_share_of_the_sampled_tokens_of_valid_episodes():
  group = with_bound(fixtures.group(0, (1.0, 0.0, None)), 3, 2, 9)  # 10 tokens each
  got = summary.of_groups([group], [0], top_k=4)
  assert got['token_count'] == 20
  assert got['topk_bound_share'] == pytest.approx(5 / 20)


def test_without_a_bound_on_the_set_nothing_is_said_of_top_k():
  got = summary.of_groups([fixtures.group()], [0], top_k=0)
  assert 'topk_bound_share' not in got and 'kept_size_mean' in got
  without = summary.of_groups([fixtures.group(width=0)], [0], top_k=4)
  assert 'topk_bound_share' not in without and 'kept_size_mean' not in without


def test_sizes_of_sets_are_over_sampled_tokens_only():
  group = fixtures.group(0, (1.0, 0.0))
  size = np.concatenate(
    [s.kept.size_T[s.mask_T] for e in group.episodes for s in e.segments]
  )
  got = summary.of_groups([group], [0], top_k=4)
  assert got['kept_size_mean'] == pytest.approx(size.mean())
  assert got['singleton_share'] == pytest.approx((size == 1).mean())


def same_text(group: types.Group, *members: int) -> types.Group:
  """The group with the segments of its first member in `members` too."""
  episodes = list(group.episodes)
  for i in members:
    episodes[i] = dataclasses.replace(episodes[i], segments=episodes[0].segments)
  return dataclasses.replace(group, episodes=tuple(episodes))


def test_groups_whose_members_all_sampled_the_same_are_a_share_of_groups():
  # CASES 1.9: a seed that is not mixed with the member makes all advantages 0.
  every = [fixtures.group(i, (1.0, 0.0, 1.0)) for i in range(4)]
  got = summary.of_groups(every, [0] * 4, top_k=0)
  assert (got['identical_share'], got['identical_count']) == (0, 4)
  every[1], every[2] = same_text(every[1], 1, 2), same_text(every[2], 1)
  got = summary.of_groups(every, [0] * 4, top_k=0)
  assert (got['identical_share'], got['identical_count']) == (0.25, 4)


def test_one_member_that_sampled_is_alike_to_nobody():
  group = fixtures.group(0, (1.0, None))
  lost = dataclasses.replace(group.episodes[1], segments=())
  group = dataclasses.replace(group, episodes=(group.episodes[0], lost))
  got = summary.of_groups([group], [0], top_k=0)
  assert (got['identical_share'], got['identical_count']) == (None, 0)
