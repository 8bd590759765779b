"""CASES section 2 on the way from groups to a batch: cut rollouts, excluded members."""

import dataclasses

import numpy as np
import pytest

from swe17 import config, types
from swe17.learner import batching
from tests import fixtures

T, K = 48, 4
RUBBISH = [1e4, -1e4, np.inf, -np.inf, np.nan]


def compacted(group: types.Group, member: int, parts: int) -> types.Group:
  """The group with the segment of one episode in several, of as many tokens in all."""
  episodes, rng = list(group.episodes), np.random.default_rng(member)
  (whole,) = episodes[member].segments
  counts = np.diff(np.linspace(0, whole.mask_T.sum(), parts + 1).astype(int))
  cut = tuple(fixtures.segment(rng, (5, int(n)), width=K) for n in counts)
  episodes[member] = dataclasses.replace(episodes[member], segments=cut)
  return dataclasses.replace(group, episodes=tuple(episodes))


def test_a_batch_is_of_groups_whatever_the_number_of_rows_of_a_rollout():
  # CASES 2.12: 64 rollouts, of which three were compacted once or twice.
  rng = np.random.default_rng(1)
  values = [tuple(rng.permutation([1.0] * 3 + [0.0] * 5).tolist()) for _ in range(8)]
  whole = [
    fixtures.group(i, v, turns=((4, 6 + i), (3, 8)), width=K)
    for i, v in enumerate(values)
  ]
  cut = list(whole)
  for i, member, parts in ((0, 2, 2), (3, 7, 3), (6, 0, 2)):
    cut[i] = compacted(cut[i], member, parts)
  plain, got = (batching.assemble(g, config.Loss()) for g in (whole, cut))
  assert (len(plain.items), len(got.items)) == (64, 64 + 1 + 2 + 1)
  assert got.denominator_episodes == plain.denominator_episodes == 64
  assert got.trained == plain.trained == tuple(g.id for g in whole)
  weights = []
  for made in (plain, got):
    cfg = config.Batch(row_length=T, micro_rows=68)
    batch = batching.fill(made.items, micro=1, cfg=cfg, K=K, denominator=1.0)
    weight = np.bincount(
      batch.episode_MBT[batch.mask_MBT],
      weights=batch.adv_MBT[batch.mask_MBT],
      minlength=64,
    )
    weights.append(np.sort(weight))
  np.testing.assert_allclose(weights[0], weights[1], atol=1e-5)
  assert np.abs(weights[0].sum()) < 1e-4  # sum_i L_i (R_i - b) = 0 in every group


@pytest.mark.parametrize('value', RUBBISH)
def test_the_outcome_of_an_invalid_episode_reaches_no_advantage(value):
  # CASES 2.5, for rewards: an excluded one may hold anything.
  group = fixtures.group(0, (1.0, 0.0, None, 1.0))
  bad = dataclasses.replace(group.episodes[2], outcome=types.Outcome(value, 'broken'))
  dirty = dataclasses.replace(
    group, episodes=(*group.episodes[:2], bad, group.episodes[3])
  )
  clean, got = (batching.assemble([g], config.Loss()) for g in (group, dirty))
  assert [i.adv for i in got.items] == [i.adv for i in clean.items]
  assert got.denominator_episodes == clean.denominator_episodes == 3
  assert got.values == clean.values
