"""Routes as they are recorded: engine, agent, wire (CASES 9.2; arXiv:2510.11370).

Row i is of input token i. It belongs to the cache entry that later draws attended to.
"""

import dataclasses

import numpy as np
import pytest

from swe17 import config_model, types, wire
from swe17.agent import record
from swe17.learner import buffer
from swe17.sampler import check, engine
from tests import fixtures, routed
from tests.routed import E, hashed, K, LENGTH, MODEL, N, rows, SAMPLER, serving, Talk, V

compiled_once = routed.compiled_once


# --- the engine and the agent's record ------------------------------------------


def test_row_i_is_of_input_i_and_the_last_drawn_token_has_none():
  with serving() as made:
    for name, read, new in (('a', 7, 5), ('bb', 29, 9), ('ccc', 1, 1), ('d', 40, 24)):
      segment = Talk(made, name).turns((read, new))
      assert segment.token_T.size == read + new
      assert rows(segment).shape == (read + new - 1, N, K)
      assert rows(segment).dtype == np.uint8
      np.testing.assert_array_equal(rows(segment), hashed(segment.token_T[:-1]))


def test_a_turn_that_hits_the_cache_brings_the_missing_tail_and_no_row_twice():
  with serving() as made:
    talk = Talk(made, 'a')
    talk.turn(7, 5)
    second = talk.turn(3, 4)
    assert second.routes_start == 7 + 5 - 1
    assert rows(second).shape[0] == 1 + 3 + 4 - 1  # the tail, what was read, what drawn
    segment = talk.turns((2, 6), (9, 11))
    np.testing.assert_array_equal(rows(segment), hashed(segment.token_T[:-1]))
    # What follows the last draw was never fed either.
    talk.log.given(routed.prompt(4))
    assert rows(talk.log.segment()).shape[0] == segment.token_T.size - 1


def test_a_caller_that_holds_fewer_rows_is_given_them_again():
  with serving() as made:
    talk = Talk(made, 'a')
    talk.turn(7, 5)
    talk.log._open._routes.clear()
    again = talk.turn(3, 4)
    assert again.routes_start == 0
    segment = talk.log.segment()
    np.testing.assert_array_equal(rows(segment), hashed(segment.token_T[:-1]))


def test_a_session_that_lost_its_cache_is_given_all_rows_anew():
  with serving(cfg=dataclasses.replace(SAMPLER, slots=1, kv_pages=4)) as made:
    talk = Talk(made, 'a')
    talk.turn(7, 5)
    Talk(made, 'bb').turn(40, 10)  # takes all the pages
    second = talk.turn(3, 4)
    assert (second.routes_start, len(rows(second))) == (0, 7 + 5 + 3 + 4 - 1)
    segment = talk.log.segment()
    np.testing.assert_array_equal(rows(segment), hashed(segment.token_T[:-1]))


class Publishing:
  """A `swap` that hands over routers turned by one, once it is told to."""

  def __init__(self):
    self.due, self.after = False, 0
    self.made: engine.Engine | None = None

  def __call__(self):
    if not self.due or (self.made is not None and self.made.sampled < self.after):
      return None
    self.due = False
    return routed.hashing(1), 1


def test_tokens_in_the_cache_keep_the_routes_they_were_fed_with_over_a_swap():
  """Routes belong to the cache entries that later draws attend to."""
  swap = Publishing()
  with serving(swap=swap) as made:
    talk = Talk(made, 'a')
    talk.turn(7, 5)
    swap.due = True
    second = talk.turn(3, 4)
    assert set(second.version_T.tolist()) == {1}
    segment, old = talk.log.segment(), 7 + 5 - 1
    fed = segment.token_T[:-1]
    np.testing.assert_array_equal(rows(segment)[:old], hashed(fed[:old]))
    np.testing.assert_array_equal(rows(segment)[old:], hashed(fed[old:], 1))


def test_a_swap_within_a_turn_changes_routes_where_it_changes_the_version():
  swap = Publishing()
  with serving(swap=swap) as made:
    swap.made, swap.after, swap.due = made, 5, True
    segment = Talk(made, 'a').turns((7, 20))
  cut = int(np.argmax(segment.version_T))  # the first token that version 1 drew
  assert segment.version_T[cut] == 1 and cut > 7 + 4
  fed, at = segment.token_T[:-1], cut - 1  # drawn where its predecessor was fed
  np.testing.assert_array_equal(rows(segment)[:at], hashed(fed[:at]))
  np.testing.assert_array_equal(rows(segment)[at:], hashed(fed[at:], 1))


def test_a_context_prefilled_anew_has_the_new_routes_of_old_tokens_too():
  swap = Publishing()
  with serving(
    swap=swap, cfg=dataclasses.replace(SAMPLER, slots=1, kv_pages=4)
  ) as made:
    talk = Talk(made, 'a')
    talk.turn(7, 5)
    Talk(made, 'bb').turn(40, 10)
    swap.due = True
    talk.turn(3, 4)
    segment = talk.log.segment()
  np.testing.assert_array_equal(rows(segment), hashed(segment.token_T[:-1], 1))


def test_more_experts_than_a_byte_holds_are_recorded_in_two():
  experts = 300
  wide = dataclasses.replace(
    MODEL, width=304, moe=dataclasses.replace(MODEL.moe, experts=experts)
  )
  turned = 250  # so that both small and large ids come up
  with serving(routed.hashing(turned, wide), model=wide) as made:
    segment = Talk(made, 'a').turns((7, 5), (3, 4))
  want = hashed(segment.token_T[:-1], turned, experts)
  assert rows(segment).dtype == np.uint16 and want.max() > 255
  np.testing.assert_array_equal(rows(segment), want)


@pytest.mark.parametrize('kind', ['dense', 'off'])
def test_nothing_is_kept_or_sent_where_no_routes_are_recorded(kind):
  moe = dataclasses.replace(MODEL.moe, replay=False)
  moe = config_model.Moe() if kind == 'dense' else moe
  model = dataclasses.replace(MODEL, moe=moe)
  with serving(fixtures.params(cfg=model), model=model) as made:
    assert made._device.cache.routes is None
    talk = Talk(made, 'a')
    result = talk.turn(7, 5)
  assert result.routes_RNK is None and talk.log.segment().routes_RNK is None
  _, arrays = wire.decode(wire.result_to_bytes(result))
  assert not [name for name in arrays if 'routes' in name]
  assert model.routes is None


@pytest.mark.parametrize(
  ('change', 'reason'),
  [
    ({'routes_start': 1}, 'got 9 routes from token 1'),
    ({'routes_RNK': np.zeros((8, N, K), np.uint8)}, 'got 8 routes from token 0'),
    ({'routes_RNK': np.zeros((10, N, K), np.uint8)}, 'up to token 9'),
  ],
)
def test_an_answer_with_a_gap_or_another_number_of_routes_is_refused(change, reason):
  request = types.GenerateRequest(
    'a', np.zeros(7, np.int32), 3, (), types.Sampling(), (0, 0)
  )
  sound = types.GenerateResult(
    token_T=np.zeros(3, np.int32),
    logp_T=np.zeros(3, np.float32),
    entropy_T=np.zeros(3, np.float32),
    version_T=np.zeros(3, np.int32),
    kept=types.KeptSets(np.zeros(4, np.int32), np.zeros(0, np.int32)),
    finish='length',
    routes_RNK=np.zeros((9, N, K), np.uint8),
  )
  record.check_result(sound, request, V)
  with pytest.raises(record.SamplerError, match=reason):
    record.check_result(dataclasses.replace(sound, **change), request, V)


@pytest.mark.parametrize('value', [-1, 8, 1.0, True, '0'])
def test_an_engine_refuses_a_request_that_holds_routes_of_no_context(value):
  request = types.GenerateRequest(
    'a', np.zeros(7, np.int32), 3, (), types.Sampling(), (0, 0), routes_from=value
  )
  with pytest.raises(ValueError, match='routes_from'):
    check.request(request, SAMPLER, length=LENGTH, vocab=V)


# --- the wire --------------------------------------------------------------------


def routed_group(
  experts: int, layers: int, active: int, sampled: int = 20
) -> types.Group:
  """A group whose segments have random routes, in the narrowest dtype."""
  group, rng = fixtures.group(turns=((5, 4), (3, sampled))), np.random.default_rng(0)
  dtype = config_model.Moe(experts=experts, active=1).route_dtype
  episodes = []
  for episode in group.episodes:
    (segment,) = episode.segments
    score = rng.random((segment.token_T.size - 1, layers, experts), np.float32)
    ids = np.argpartition(score, active)[..., :active].astype(dtype)
    segment = dataclasses.replace(segment, routes_RNK=ids)
    episodes.append(dataclasses.replace(episode, segments=(segment,)))
  return dataclasses.replace(group, episodes=tuple(episodes))


@pytest.mark.parametrize('experts', [8, 256, 257, 384])
def test_routes_of_a_group_come_back_bit_for_bit(experts):
  group = routed_group(experts, 3, 5)
  back = wire.bytes_to_group(wire.group_to_bytes(group))
  for a, b in zip(group.episodes, back.episodes, strict=True):
    want, got = rows(a.segments[0]), rows(b.segments[0])
    assert got.dtype == want.dtype == (np.uint8 if experts <= 256 else np.uint16)
    np.testing.assert_array_equal(got, want)
    assert got.flags['C_CONTIGUOUS']


def test_groups_from_before_there_were_routes_are_read():
  group = routed_group(8, 3, 5)
  meta, arrays = wire.decode(wire.group_to_bytes(group))
  old = {name: a for name, a in arrays.items() if not name.endswith('.routes')}
  assert len(old) == len(arrays) - 2
  back = wire.bytes_to_group(wire.encode(meta, old))
  assert [e.segments[0].routes_RNK for e in back.episodes] == [None, None]


@pytest.mark.parametrize(
  'planes',
  [
    np.zeros((3, 3, 5, 4), np.uint8),
    np.zeros((3, 5, 4), np.uint8),
    np.zeros((1, 3, 5, 4), np.int8),
    np.zeros((1, 3, 5, 500), np.uint8),
  ],
)
def test_routes_that_are_no_such_thing_are_refused(planes):
  meta, arrays = wire.decode(wire.group_to_bytes(routed_group(8, 3, 5)))
  with pytest.raises(ValueError, match='routes'):
    wire.bytes_to_group(wire.encode(meta, {**arrays, '0.0.routes': planes}))
  with pytest.raises(ValueError, match='routes'):
    wrong = np.zeros((4, 3, 5), np.int32)
    group = routed_group(8, 3, 5)
    segment = dataclasses.replace(group.episodes[0].segments[0], routes_RNK=wrong)
    episode = dataclasses.replace(group.episodes[0], segments=(segment,))
    wire.group_to_bytes(dataclasses.replace(group, episodes=(episode,)))


def bytes_a_token(group: types.Group) -> float:
  """What the routes add to a group's record, over the tokens that have one."""
  without = [
    dataclasses.replace(
      e, segments=tuple(dataclasses.replace(s, routes_RNK=None) for s in e.segments)
    )
    for e in group.episodes
  ]
  bare = dataclasses.replace(group, episodes=tuple(without))
  more = len(wire.group_to_bytes(group)) - len(wire.group_to_bytes(bare))
  return more / sum(len(rows(e.segments[0])) for e in group.episodes)


def test_routes_of_a_trillion_parameters_take_three_fifths_of_uint16_on_the_wire():
  """61 layers, 8 of 384 experts. Uniform ids are the worst: log2(384) = 8.58 bits."""
  found = bytes_a_token(routed_group(384, 61, 8, sampled=300))
  print(f'routes on the wire: {found:.0f} bytes a token, {61 * 8 * 2} as uint16')
  assert 61 * 8 * np.log2(384) / 8 - 10 < found < 0.6 * 61 * 8 * 2


# --- the learner's door --------------------------------------------------------


def refused(segment: types.Segment, routes: tuple[int, int, int] | None = (N, K, E)):
  reasons = {'newest': 0, 'vocab': V, 'truncates': False, 'top_k': 0}
  return buffer.refuse(fixtures.episode(segment), **reasons, routes=routes)


def test_a_segment_whose_routes_cannot_be_replayed_is_refused_with_its_reason():
  with serving() as made:
    sound = Talk(made, 'a').turns((7, 5), (3, 4))
  assert refused(sound) is None
  bare = dataclasses.replace(sound, routes_RNK=None)
  assert refused(bare, None) is None  # a dense model, or replay is off
  assert refused(bare) == 'a segment lacks its routes'
  right, far, twice = rows(sound), rows(sound).copy(), rows(sound).copy()
  far[3, 0, 0], twice[3, 1] = E, 2
  for wrong, reason in (
    (right[:-1], 'routes do not end at the last draw'),
    (right[:, :1], 'routes are not those of this model'),
    (right[..., :1], 'routes are not those of this model'),
    (far, 'a route leads to no expert'),
    (twice, 'a route leads to one expert twice'),
  ):
    assert refused(dataclasses.replace(sound, routes_RNK=wrong)) == reason


def test_an_episode_nobody_sampled_needs_no_routes():
  read = fixtures.segment(np.random.default_rng(0), (5, 0), width=0, vocab=V)
  assert refused(read) is None
