"""Records survive the wire bit for bit, and nothing damaged or foreign parses."""

import dataclasses

import numpy as np
import pytest

from swe17 import types, wire
from tests import fixtures


def equal(a, b) -> bool:
  """Same values, dtypes and shapes, through dataclasses and tuples."""
  if dataclasses.is_dataclass(a):
    names = [f.name for f in dataclasses.fields(a)]
    return type(a) is type(b) and all(
      equal(getattr(a, n), getattr(b, n)) for n in names
    )
  if isinstance(a, tuple):
    return len(a) == len(b) and all(map(equal, a, b))
  if isinstance(a, np.ndarray):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
  return type(a) is type(b) and a == b


def a_result() -> types.GenerateResult:
  kept = types.KeptSets(np.int32([0, 1, 1, 4]), np.int32([7, 2, 5, 9]))
  return types.GenerateResult(
    token_T=np.int32([7, 3, 5]),
    logp_T=np.float32([0.0, -1.5, -0.25]),
    entropy_T=np.float32([0.1, 2.0, 1.0]),
    version_T=np.int32([3, 3, 4]),
    kept=kept,
    finish='length',
    topk_bound=2,
  )


def test_a_group_comes_back_bit_for_bit():
  group = fixtures.group(3, (1.0, 0.0, None), width=5)
  two = (group.episodes[0].segments[0], group.episodes[1].segments[0])
  cut = dataclasses.replace(group.episodes[0], segments=two, status='masked', cut=True)
  none = dataclasses.replace(group.episodes[2], segments=())
  group = dataclasses.replace(
    group, episodes=(cut, group.episodes[1], none), loop_lag=0.125
  )
  assert equal(wire.bytes_to_group(wire.group_to_bytes(group)), group)


def test_an_absent_outcome_stays_absent():
  back = wire.bytes_to_group(wire.group_to_bytes(fixtures.group(0, (None, 0.0))))
  assert back.episodes[0].outcome == types.Outcome(None, 'the sandbox died')
  assert back.episodes[1].outcome.value == 0.0


def test_a_request_comes_back_bit_for_bit():
  request = types.GenerateRequest(
    session='0-a.1/0',
    token_T=np.int32([1, 2, 3]),
    max_new=8,
    stop_ids=(4, 5),
    sampling=types.Sampling(0.7, 0.01, 64, 0.97),
    key=(2**32 - 1, 0),
    min_version=2,
  )
  assert equal(wire.bytes_to_request(wire.request_to_bytes(request)), request)


def test_a_result_comes_back_bit_for_bit():
  back = wire.bytes_to_result(wire.result_to_bytes(a_result()))
  assert equal(back, a_result())


def test_special_values_of_a_log_probability_are_not_altered():
  bits = np.uint32([0x80000000, 0x7FC00001, 0xFF800000]).view(np.float32)
  result = dataclasses.replace(a_result(), logp_T=bits)
  assert wire.bytes_to_result(wire.result_to_bytes(result)).logp_T.tobytes() == (
    bits.tobytes()
  )


def test_the_sets_of_a_group_share_their_code_tables():
  """A group's kept sets are one array, whichever episodes and segments they are of."""
  group = fixtures.group(3, (1.0, 0.0, 0.0), width=5)
  _, arrays = wire.decode(wire.group_to_bytes(group))
  assert [name for name in arrays if 'kept' in name] == ['kept']
  _, arrays = wire.decode(wire.result_to_bytes(a_result()))
  assert arrays['kept'].dtype == np.uint8 and arrays['kept'].size < 40


def test_a_group_without_a_segment_comes_back():
  group = fixtures.group(3, (None, None))
  none = tuple(dataclasses.replace(e, segments=()) for e in group.episodes)
  group = dataclasses.replace(group, episodes=none)
  assert equal(wire.bytes_to_group(wire.group_to_bytes(group)), group)


@pytest.mark.parametrize(
  'changes, reason',
  [
    ({'0.0.token': np.zeros((2, 3), np.int32)}, '0.0.token'),
    ({'1.0.token': np.zeros(11, np.float64)}, '1.0.token'),
    ({'kept': np.zeros(3, np.uint8)}, 'kept sets: got version'),
    ({'kept': np.ones(1, np.uint8)}, 'kept sets: cut short'),
  ],
)
def test_a_group_whose_tokens_or_sets_are_no_such_thing_is_refused(changes, reason):
  meta, arrays = wire.decode(wire.group_to_bytes(fixtures.group()))
  with pytest.raises(ValueError, match=reason):
    wire.bytes_to_group(wire.encode(meta, {**arrays, **changes}))


def test_a_group_that_claims_a_world_of_segments_is_refused_at_the_first():
  meta, arrays = wire.decode(wire.group_to_bytes(fixtures.group()))
  meta['episodes'][0]['segments'] = 10**15
  with pytest.raises(ValueError, match=r'0\.1\.token'):
    wire.bytes_to_group(wire.encode(meta, arrays))


def test_every_flipped_byte_and_every_cut_is_noticed():
  data = wire.result_to_bytes(a_result())
  for i in range(len(data)):
    with pytest.raises(ValueError):
      wire.decode(data[:i])
    with pytest.raises(ValueError):
      wire.decode(data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :])
  with pytest.raises(ValueError):
    wire.decode(data + b'\0')


def test_arrays_of_objects_are_refused_before_they_are_written():
  with pytest.raises(ValueError, match='logp'):
    wire.encode({}, {'logp': np.array([-0.5, None])})


def test_one_kind_of_record_is_not_read_as_another():
  group = wire.group_to_bytes(fixtures.group())
  result = wire.result_to_bytes(a_result())
  for read, data in (
    (wire.bytes_to_group, result),
    (wire.bytes_to_request, result),
    (wire.bytes_to_result, group),
    (wire.bytes_to_request, group),
  ):
    with pytest.raises(ValueError):
      read(data)


def test_a_segment_whose_arrays_differ_in_length_is_refused():
  group = fixtures.group()
  first = group.episodes[0].segments[0]
  short = dataclasses.replace(first, mu_logp_T=first.mu_logp_T[:-1])
  bad = dataclasses.replace(group.episodes[0], segments=(short,))
  group = dataclasses.replace(group, episodes=(bad, group.episodes[1]))
  with pytest.raises(ValueError, match='mu_logp'):
    wire.bytes_to_group(wire.group_to_bytes(group))


def test_big_endian_arrays_arrive_as_the_same_numbers():
  array = np.array([1, -2, 300], '>i4')
  _, arrays = wire.decode(wire.encode({}, {'x': array}))
  assert arrays['x'].tolist() == [1, -2, 300]


def test_scores_of_turns_come_back_and_groups_from_before_there_were_any_are_read():
  group = fixtures.group(3, (1.0, 0.0))
  scores = (0.1 + 0.2, 0.0, -1e-300)
  scored = dataclasses.replace(group.episodes[0], turn_scores=scores)
  mixed = dataclasses.replace(group, episodes=(scored, group.episodes[1]))
  assert equal(wire.bytes_to_group(wire.group_to_bytes(mixed)), mixed)
  meta, arrays = wire.decode(wire.group_to_bytes(mixed))
  assert [row.get('turn_scores', 'none') for row in meta['episodes']] == [
    list(scores), 'none'
  ]  # fmt: skip
  del meta['episodes'][0]['turn_scores']
  assert equal(wire.bytes_to_group(wire.encode(meta, arrays)), group)


@pytest.mark.parametrize('scores', ['0.5', [[0.5]], [None], {'0': 1.0}, [True], 3])
def test_scores_of_turns_that_are_no_list_of_numbers_are_refused(scores):
  meta, arrays = wire.decode(wire.group_to_bytes(fixtures.group()))
  meta['episodes'][1]['turn_scores'] = scores
  with pytest.raises(ValueError, match='turn_scores'):
    wire.bytes_to_group(wire.encode(meta, arrays))
