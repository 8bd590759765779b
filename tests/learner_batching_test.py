"""From groups to packed rows: advantages by group, every field beside its token."""

import dataclasses

import numpy as np
import pytest

from swe17 import config, types
from swe17.learner import batching, packing
from tests import fixtures

LOSS = config.Loss()
ROWS = config.Batch(groups=2, row_length=32, micro_rows=2)


def fill(items, **changes):
  defaults = {'micro': 2, 'cfg': ROWS, 'K': 4, 'denominator': 1.0}
  return batching.fill(items, **{**defaults, **changes})


def segments(*sizes: tuple[int, int], seed: int = 0) -> list[types.Segment]:
  rng = np.random.default_rng(seed)
  return [fixtures.segment(rng, size) for size in sizes]


def rows_of(batch) -> dict[str, np.ndarray]:
  """Every array of a batch as [rows, T]."""
  arrays = {k: v for k, v in vars(batch).items() if np.ndim(v) > 2}
  return {k: v.reshape(-1, *v.shape[2:]) for k, v in arrays.items()}


def unpacked(batch) -> list[dict[str, np.ndarray]]:
  """The segments of a batch, found by their segment numbers alone."""
  arrays, out = rows_of(batch), []
  for r, segment_T in enumerate(arrays['segment_MBT']):
    for j in range(1, segment_T.max() + 1):
      out.append({k: v[r][segment_T == j] for k, v in arrays.items()})
  return out


def advantages(groups) -> dict[str, float]:
  """Advantage by the first tokens of the item's segment, which are unique."""
  items = batching.assemble(groups, LOSS).items
  return {item.segment.token_T.tobytes(): item.adv for item in items}


# Groups to items.


def test_advantages_are_against_the_groups_length_weighted_baseline():
  group = fixtures.group(0, (1.0, 0.0))
  long = segments((3, 30))[0]
  first = dataclasses.replace(group.episodes[0], segments=(long,))
  group = dataclasses.replace(group, episodes=(first, group.episodes[1]))
  got = batching.assemble([group], LOSS)
  assert [item.adv for item in got.items] == [1 - 30 / 40, -30 / 40]
  assert got.denominator_episodes == 2
  assert got.trained == (group.id,)


def test_groups_go_by_id_and_not_by_position():
  # Task 1 always succeeds, task 2 never: no advantage anywhere.
  constant = [fixtures.group(0, (1.0,) * 4), fixtures.group(1, (0.0,) * 4)]
  got = batching.assemble(constant, LOSS)
  assert got.items == ()
  assert got.no_signal == ('0-a', '1-a')
  assert got.denominator_episodes == 0


def test_the_order_of_delivery_changes_no_advantage():
  rng = np.random.default_rng(0)
  groups = [fixtures.group(i, tuple(rng.integers(0, 2, 4) + 0.0)) for i in range(6)]
  want = advantages(groups)
  assert len(want) > 8
  shuffled = [
    dataclasses.replace(
      groups[i], episodes=tuple(rng.permutation(np.array(groups[i].episodes, object)))
    )
    for i in rng.permutation(6)
  ]
  assert advantages(shuffled) == pytest.approx(want)


def test_an_invalid_episode_is_outside_of_statistics_and_loss():
  with_fault = batching.assemble([fixtures.group(0, (1.0, 0.0, None))], LOSS)
  without = batching.assemble([fixtures.group(0, (1.0, 0.0))], LOSS)
  assert [i.adv for i in with_fault.items] == [i.adv for i in without.items]
  assert with_fault.denominator_episodes == 2


def test_a_masked_episode_is_inside_the_statistics_and_outside_the_loss():
  group = fixtures.group(0, (1.0, 0.0, 0.0))
  masked = dataclasses.replace(group.episodes[2], status='masked')
  group = dataclasses.replace(group, episodes=(*group.episodes[:2], masked))
  got = batching.assemble([group], LOSS)
  assert [item.adv for item in got.items] == pytest.approx([2 / 3, -1 / 3])
  assert got.denominator_episodes == 3


def test_a_group_with_fewer_than_two_valid_members_is_counted_apart():
  got = batching.assemble([fixtures.group(0, (1.0, None)), fixtures.group(1)], LOSS)
  assert (got.too_small, got.trained) == (('0-a',), ('1-a',))


def test_a_group_without_a_trained_token_is_no_signal():
  group = fixtures.group(0, (1.0, 0.0), turns=((9, 0),))
  got = batching.assemble([group], LOSS)
  assert (got.items, got.no_signal) == ((), ('0-a',))


def test_a_segment_without_a_trained_token_takes_no_room():
  group = fixtures.group(0, (1.0, 0.0))
  unsampled = segments((9, 0))[0]
  first = group.episodes[0]
  first = dataclasses.replace(first, segments=(unsampled, *first.segments))
  group = dataclasses.replace(group, episodes=(first, group.episodes[1]))
  got = batching.assemble([group], LOSS)
  assert len(got.items) == 2
  assert all(item.segment.mask_T.any() for item in got.items)


def test_a_group_whose_loss_would_be_zero_is_no_signal():
  # The only difference is in a masked episode without tokens: b = R, and A = 0.
  group = fixtures.group(0, (1.0, 0.0))
  empty = dataclasses.replace(group.episodes[1], status='masked', segments=())
  group = dataclasses.replace(group, episodes=(group.episodes[0], empty))
  got = batching.assemble([group], LOSS)
  assert (got.items, got.no_signal, got.denominator_episodes) == ((), ('0-a',), 0)


def test_every_segment_of_an_episode_carries_its_one_advantage():
  group = fixtures.group(0, (1.0, 0.0))
  first = group.episodes[0]
  three = tuple(segments((3, 4), (2, 3), (4, 3)))
  cut = dataclasses.replace(first, segments=three)
  got = batching.assemble(
    [dataclasses.replace(group, episodes=(cut, group.episodes[1]))], LOSS
  )
  # L = 10 sampled tokens in both, however many segments they lie in.
  assert [item.adv for item in got.items] == [0.5, 0.5, 0.5, -0.5]
  assert got.denominator_episodes == 2


# Packing.


def test_pack_is_first_fit_longest_first():
  assert packing.pack([3, 8, 5, 2, 7], 10) == [[1, 3], [4, 0], [2]]


def test_ties_go_by_index_and_an_exact_fit_fits():
  assert packing.pack([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
  assert packing.pack([], 10) == []


def test_an_item_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match='11 tokens does not fit a row of 10'):
    packing.pack([11], 10)


def test_packing_holds_every_item_once_and_overfills_no_row():
  sizes = np.random.default_rng(0).integers(1, 64, 200).tolist()
  rows = packing.pack(sizes, 64)
  assert sorted(i for row in rows for i in row) == list(range(200))
  assert all(sum(sizes[i] for i in row) <= 64 for row in rows)
  assert len(rows) <= -(-sum(sizes) // 64) * 1.25


def test_every_field_stays_with_its_segment_through_packing():
  # Lengths that packing re-orders; every field holds the item's own marker.
  items = []
  for i, size in enumerate([(2, 4), (9, 13), (3, 17), (1, 9), (6, 6)]):
    s = segments(size, seed=i)[0]
    sampled = s.mask_T.astype(np.float32)
    s = dataclasses.replace(
      s,
      token_T=np.full_like(s.token_T, i),
      mu_logp_T=-(i + 1) * sampled,
      temperature_T=(i + 1) * sampled,
      version_T=i * s.mask_T.astype(np.int32),
      kept=types.KeptSets(
        np.append(0, np.cumsum(s.mask_T)).astype(np.int32),
        np.full(s.mask_T.sum(), i, np.int32),
      ),
    )
    items.append(batching.Item(s, 10.0 + i))
  parts = unpacked(fill(items, version=3))
  assert sorted(int(part['token_MBT'][0]) for part in parts) == list(range(5))
  for part in parts:
    i = int(part['token_MBT'][0])
    want = items[i].segment.mask_T[1:]
    on = part['mask_MBT']
    assert on.tolist() == want.tolist()
    assert (part['token_MBT'] == i).all() and (part['target_MBT'] == i).all()
    assert (part['mu_logp_MBT'] == np.where(want, -(i + 1), 0)).all()
    assert (part['temperature_MBT'] == np.where(want, i + 1, 1)).all()
    assert (part['adv_MBT'] == np.where(want, 10 + i, 0)).all()
    assert (part['kept_ids_MBTK'][on, 0] == i).all()
    assert (part['kept_ids_MBTK'][~on] == -1).all()
    assert (part['fresh_MBT'] == (i == 3)).all()
    assert (part['position_MBT'] == np.arange(on.size)).all()


@pytest.mark.parametrize(
  'turns', [((5, 3),), ((4, 2), (3, 4), (2, 1)), ((5, 0), (2, 2)), ((5, 3), (4, 0))]
)
def test_trained_positions_predict_exactly_the_sampled_ids(turns):
  s = fixtures.segment(np.random.default_rng(0), *turns)
  (part,) = unpacked(fill([batching.Item(s, 1.0)]))
  assert part['target_MBT'][part['mask_MBT']].tolist() == s.token_T[s.mask_T].tolist()
  assert part['token_MBT'].tolist() == s.token_T[:-1].tolist()
  assert part['target_MBT'].tolist() == s.token_T[1:].tolist()
  sets = [
    sorted(s.kept.ids[a:b].tolist())
    for a, b in zip(s.kept.offset_T1[:-1], s.kept.offset_T1[1:], strict=True)
  ]
  for got, want in zip(part['kept_ids_MBTK'], sets[1:], strict=True):
    assert [i for i in got.tolist() if i >= 0] == want


def test_turns_and_episodes_are_numbered_through_packing():
  sizes = [((2, 4), (3, 2)), ((9, 3), (0, 2), (4, 1)), ((1, 4),), ((5, 3),)]
  names = ('a', 'b', 'a', '')  # 'a' has two segments
  rng = np.random.default_rng(0)
  made = [fixtures.segment(rng, *turns) for turns in sizes]
  # A recorder leaves the turn at 0 where nothing was drawn.
  made = [
    dataclasses.replace(s, turn_T=np.where(s.mask_T, s.turn_T + 2, 0)) for s in made
  ]
  items = [batching.Item(s, 1.0, name) for s, name in zip(made, names, strict=True)]
  batch = fill(items)
  episodes = {}
  for part in unpacked(batch):
    i = next(
      i for i, s in enumerate(made) if np.array_equal(s.token_T[1:], part['target_MBT'])
    )
    drawn = part['mask_MBT']
    own = part['turn_MBT'][drawn]
    want = made[i].turn_T[1:][drawn]
    assert (np.diff(own) == np.diff(want)).all()
    assert (np.diff(part['turn_MBT']) >= 0).all()
    episodes.setdefault(names[i], set()).update(part['episode_MBT'].tolist())
  assert episodes == {'a': {0}, 'b': {1}, '': {2}}
  # No two segments of a row share a turn.
  for row in range(4):
    arrays = [x.reshape(4, -1)[row] for x in (batch.segment_MBT, batch.turn_MBT)]
    pairs = {(j, t) for j, t in zip(*arrays, strict=True) if j}
    assert len(pairs) == len({t for _, t in pairs})


def test_more_episodes_than_the_step_can_sum_are_refused():
  items = [batching.Item(s, 1.0) for s in segments(*[(1, 1)] * 9)]
  with pytest.raises(ValueError, match='9 episodes, want at most 8'):
    fill(items, micro=1)
  assert fill(items, micro=1, context_weight=0.1).episode_MBT.max() == 0


def test_a_row_takes_a_bounded_number_of_segments():
  rows = packing.pack([1] * 130, 1000)
  assert [len(row) for row in rows] == [64, 64, 2]


def test_what_is_not_used_is_padding():
  batch = fill([batching.Item(segments((5, 6))[0], 2.0)], micro=3)
  assert (batch.micro, batch.denominator, batch.token_MBT.shape) == (1, 1, (3, 2, 32))
  off = batch.segment_MBT == 0
  assert off.sum() == 3 * 2 * 32 - 10
  for name, value in (('mask', False), ('adv', 0), ('temperature', 1), ('mu_logp', 0)):
    assert (getattr(batch, f'{name}_MBT')[off] == value).all()
  assert (batch.kept_ids_MBTK[off] == -1).all()


def test_rows_beyond_the_batch_are_refused():
  items = [batching.Item(s, 1.0) for s in segments(*[(10, 20)] * 5)]
  with pytest.raises(ValueError, match='got 5 rows, want at most 2 x 2'):
    fill(items)


def test_a_segment_with_one_old_token_is_not_fresh():
  s = segments((4, 6))[0]
  version_T = np.where(s.mask_T, 7, 0).astype(np.int32)
  version_T[-3] = 6
  mixed = dataclasses.replace(s, version_T=version_T)
  assert not fill([batching.Item(mixed, 1.0)], version=7).fresh_MBT.any()


def test_context_weight_reaches_unsampled_tokens_and_no_padding():
  s = segments((4, 3))[0]
  batch = fill([batching.Item(s, 1.0)], context_weight=0.25)
  (part,) = unpacked(batch)
  assert part['adv_MBT'].tolist() == [0.25] * 3 + [1.0] * 3
  assert batch.adv_MBT.sum() == 3.75


def test_advantages_of_turns_lie_beside_their_tokens_over_segments():
  # An episode of three turns in two segments, as after a compaction.
  rng = np.random.default_rng(0)
  parts = [fixtures.segment(rng, (4, 5), (3, 2)), fixtures.segment(rng, (6, 4), (1, 3))]
  parts[1] = dataclasses.replace(parts[1], turn_T=parts[1].turn_T + 1)
  turn_adv = np.array([0.5, -1.25, 3.0])
  items = [batching.Item(s, 9.0, 'a', turn_adv) for s in parts]
  batch = fill(items)
  seen = {got['target_MBT'].tobytes(): got for got in unpacked(batch)}
  assert len(seen) == 2
  for s in parts:
    got = seen[s.token_T[1:].tobytes()]
    want = np.where(s.mask_T, turn_adv[s.turn_T], 0)[1:]
    assert got['adv_MBT'].tolist() == want.tolist()
  # A turn's number counts where a token was sampled, and may be anything elsewhere.
  odd = [
    dataclasses.replace(i, segment=dataclasses.replace(
      i.segment, turn_T=np.where(i.segment.mask_T, i.segment.turn_T, -99)
    ))
    for i in items
  ]  # fmt: skip
  assert fixtures.same_bits(fill(odd).adv_MBT, batch.adv_MBT)
