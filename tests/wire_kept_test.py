"""Bytes of kept sets: lossless, near the bound, and nothing malformed parses."""

import math
import struct

from hypothesis import example, given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import zstandard

from swe17 import kept as kept_sets
from swe17 import types, wire_kept

V = 151_936


def csr(*sets: list[int]) -> types.KeptSets:
  ids = np.concatenate([np.zeros(0, np.int32), *map(np.int32, sets)])
  offset = np.append(0, np.cumsum([len(s) for s in sets]))
  return types.KeptSets(offset.astype(np.int32), ids.astype(np.int32))


def back(kept: types.KeptSets, token_T: np.ndarray) -> types.KeptSets:
  """Through the bytes, with dtypes and values compared."""
  got = wire_kept.from_bytes(wire_kept.to_bytes(kept, token_T), token_T)
  for a, b in ((got.offset_T1, kept.offset_T1), (got.ids, kept.ids)):
    assert a.dtype == b.dtype == np.int32
    np.testing.assert_array_equal(a, b)
  return got


def drawn(
  size_T: np.ndarray, vocab: int, seed: int = 0, power: float = 0.0
) -> tuple[types.KeptSets, np.ndarray]:
  """Sets of these sizes, ids drawn without replacement as id ** -power, and tokens."""
  rng = np.random.default_rng(seed)
  cdf = np.cumsum((np.arange(vocab) + 2.7) ** -power)
  owner, key = np.repeat(np.arange(size_T.size), size_T), np.zeros(0, np.int64)
  while owner.size:
    ids = np.minimum(np.searchsorted(cdf, rng.random(owner.size) * cdf[-1]), vocab - 1)
    key = np.unique(np.append(key, owner * vocab + ids))
    missing_T = size_T - np.bincount(key // vocab, minlength=size_T.size)
    owner = np.repeat(np.arange(size_T.size), missing_T)
  offset_T1 = kept_sets.offsets(size_T)
  ids = (key % vocab).astype(np.int32)
  at_T = np.minimum(offset_T1[:-1] + rng.integers(0, np.maximum(size_T, 1)), ids.size)
  token_T = np.where(size_T > 0, np.append(ids, 0)[at_T], rng.integers(vocab))
  return types.KeptSets(offset_T1, ids), token_T.astype(np.int32)


def long_tailed(n: int, seed: int = 0) -> np.ndarray:
  """Sizes with 47 % singletons, median 2, mean near 8, at most 512."""
  rng = np.random.default_rng(seed)
  wide_T = 1 + np.ceil(np.exp(rng.normal(1.42, 1.5, n)))
  return np.where(rng.random(n) < 0.47, 1, np.minimum(wide_T, 512)).astype(np.int64)


def bound(size_T: np.ndarray, vocab: int) -> float:
  """Bytes a token: entropy of the sizes, and log2 C(V - 1, s - 1) for the others."""
  total = 0.0
  for s, count in zip(*np.unique(size_T, return_counts=True), strict=True):
    choose = math.lgamma(vocab) - math.lgamma(s) - math.lgamma(vocab - s + 1)
    total += count * (choose / math.log(2) - math.log2(count / size_T.size))
  return total / 8 / size_T.size


@st.composite
def some_sets(draw):
  """(sets, tokens): any sizes in any order, 0 among them, in a vocabulary to 2**20."""
  vocab = draw(st.sampled_from([1, 2, 97, 1000, 49_152, V, 1 << 20]))
  ids = st.integers(0, vocab - 1)
  sets = draw(st.lists(st.sets(ids, max_size=40).map(sorted), max_size=30))
  tokens = [draw(st.sampled_from(s)) if s else draw(ids) for s in sets]
  return csr(*sets), np.int32(tokens)


@settings(deadline=None, max_examples=60)
@given(some_sets())
def test_any_sets_come_back_bit_for_bit(given_sets):
  back(*given_sets)


@settings(deadline=None, max_examples=20)
@given(
  st.lists(st.sampled_from([0, 1, 2, 3, 17, 254, 255, 256, 512]), max_size=30),
  st.sampled_from([1024, 49_152, 1 << 20]),
  st.integers(0, 9),
)
@example([], 1024, 0)
@example([0, 0, 0], 1024, 0)
@example([512] * 30, 1024, 0)
def test_wide_sets_between_empty_ones_come_back(sizes, vocab, seed):
  back(*drawn(np.array(sizes, np.int64), vocab, seed))


def test_a_set_of_the_whole_vocabulary_takes_next_to_nothing():
  kept = csr(list(range(65_535)))
  assert len(wire_kept.to_bytes(kept, np.int32([7]))) < 256
  back(kept, np.int32([7]))


def test_the_first_and_the_last_id_may_be_the_token_or_not():
  top = (1 << 31) - 1
  for token in (0, 5, top):
    back(csr([0, 5, top], [token]), np.int32([token, token]))


def test_a_set_of_one_costs_a_byte_at_most():
  token_T = np.random.default_rng(0).integers(0, V, 500).astype(np.int32)
  kept = types.KeptSets(np.arange(501, dtype=np.int32), token_T)
  some = len(wire_kept.to_bytes(csr([1, 2]), np.int32([1])))
  assert len(wire_kept.to_bytes(kept, token_T)) < 500
  # And beside a wider set, where sizes are too few to be worth a code: exactly one.
  for n in range(1, 8):
    sets = csr([1, 2], *[[t] for t in range(n)])
    assert len(wire_kept.to_bytes(sets, np.int32([1, *range(n)]))) == some + n


def test_tokens_without_a_set_cost_next_to_nothing():
  offset_T1 = np.zeros(10_001, np.int32)
  kept = types.KeptSets(offset_T1, np.zeros(0, np.int32))
  assert len(wire_kept.to_bytes(kept, np.zeros(10_000, np.int32))) < 50


def test_uniform_sets_take_within_three_per_cent_of_the_bound():
  size_T = long_tailed(20_000)
  assert np.median(size_T) == 2 and 0.46 < (size_T == 1).mean() < 0.48
  data = wire_kept.to_bytes(*drawn(size_T, V))
  assert 1.0 < len(data) / 20_000 / bound(size_T, V) < 1.03


def test_ids_that_follow_the_order_of_the_vocabulary_take_less():
  size_T = long_tailed(20_000)
  zipf, uniform = (
    len(wire_kept.to_bytes(*drawn(size_T, V, power=power))) for power in (1.1, 0.0)
  )
  assert zipf < 0.7 * uniform


def test_many_blocks_come_back_as_one(monkeypatch):
  monkeypatch.setattr(wire_kept, '_MAX_SET', 600)
  monkeypatch.setattr(wire_kept, '_BLOCK', 601)
  size_T = long_tailed(2000)
  size_T[700:1500] = 0
  back(*drawn(size_T, V))


def test_a_value_by_hand():
  # Token 5 of {3, 5, 9}: others 3, 9 -> 3, 8; gaps 4, 5 = codes 4 + 0, 4 + 0 with
  # one low bit each, 0 and 1.
  data = wire_kept.to_bytes(csr([], [3, 5, 9], [4]), np.int32([1, 5, 4]))
  assert data == b''.join(
    [
      b'\1',
      struct.pack('<III', 3, 2, 10),
      b'\0' + struct.pack('<I', 3) + bytes([0, 3, 1]),
      b'\0' + struct.pack('<I', 2) + bytes([4, 4]),
      b'\0' + struct.pack('<I', 1) + bytes([0b10]),
    ]
  )


# What the encoder refuses.


@pytest.mark.parametrize(
  'sets, tokens, reason',
  [
    ([[7]], [8], 'does not hold the token'),
    ([[1, 2], [3, 4]], [3, 4], 'does not hold the token'),
    ([[1, 2], []], [3, 1], 'does not hold the token'),
    ([[2, 1, 3]], [3], 'ascending'),
    ([[1, 1, 3]], [3], 'ascending'),
    ([[1, 3, 3]], [3], 'does not hold the token'),  # twice
    ([[-1, 3]], [3], 'id -1'),
    ([[-1]], [-1], 'id -1'),
    ([list(range(65_536))], [0], '65536'),
    ([[1]], [1, 2], '1 sets for 2 tokens'),
  ],
)
def test_what_is_no_kept_set_of_its_token_is_refused(sets, tokens, reason):
  with pytest.raises(ValueError, match=reason):
    wire_kept.to_bytes(csr(*sets), np.int32(tokens))


def test_offsets_that_disagree_with_the_ids_are_refused():
  for offset, ids in (([0, 2], [1]), ([0, 2, 1], [1]), ([0, 0], [1])):
    kept = types.KeptSets(np.int32(offset), np.int32(ids))
    with pytest.raises(ValueError, match='disagree'):
      wire_kept.to_bytes(kept, np.ones(len(offset) - 1, np.int32))


# What the decoder refuses. `sound` has every kind of stream.

TOKENS = np.int32([3, 300, 5, 9])
SOUND = csr([], list(range(300, 600)), [5], [4, 9, 700])


def sound() -> bytes:
  return wire_kept.to_bytes(SOUND, TOKENS)


def test_every_cut_is_noticed_and_so_is_every_byte_too_many():
  data = sound()
  back(SOUND, TOKENS)
  for i in range(len(data)):
    with pytest.raises(ValueError):
      wire_kept.from_bytes(data[:i], TOKENS)
  with pytest.raises(ValueError, match='1 bytes too many'):
    wire_kept.from_bytes(data + b'\0', TOKENS)


def test_every_changed_byte_gives_an_error_or_other_sound_sets():
  # The record around it has a hash; this is what its bytes can do by themselves.
  data = sound()
  for i in range(len(data)):
    for flip in (1, 0x10, 0x80, 0xFF):
      bad = data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :]
      try:
        got = wire_kept.from_bytes(bad, TOKENS, limit=10_000)
      except ValueError:
        continue
      back(got, TOKENS)


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_give_an_error_or_sound_sets(tail):
  for data in (tail, sound()[: 1 + len(tail)] + tail):
    try:
      got = wire_kept.from_bytes(data, TOKENS, limit=10_000)
    except ValueError:
      continue
    back(got, TOKENS)


def test_other_tokens_or_another_number_of_them_are_refused_or_give_sound_sets():
  data = sound()
  with pytest.raises(ValueError, match='block of 4 sets, want 1 to 3'):
    wire_kept.from_bytes(data, TOKENS[:-1])
  with pytest.raises(ValueError, match='cut short'):
    wire_kept.from_bytes(data, np.append(TOKENS, TOKENS))
  with pytest.raises(ValueError, match='outside 0 to'):
    wire_kept.from_bytes(data, TOKENS - 10)
  back(wire_kept.from_bytes(data, TOKENS + 1), TOKENS + 1)


def stream(raw: bytes, kind: int = 0, length: int | None = None) -> bytes:
  body = zstandard.ZstdCompressor().compress(raw) if kind == 1 else raw
  return struct.pack('<BI', kind, len(body) if length is None else length) + body


def block(*streams: bytes, sets=1, others=1, bound=10) -> bytes:
  return b'\1' + struct.pack('<III', sets, others, bound) + b''.join(streams)


SIZE = stream(bytes([2]))


@pytest.mark.parametrize(
  'data, reason',
  [
    (b'', 'version'),
    (b'\2' + block(SIZE, stream(b'\0'))[1:], r"version b'\\x02', want 1"),
    (block(SIZE, stream(b'\0'), sets=0), 'block of 0 sets'),
    (block(stream(bytes([2, 2])), stream(b'\0'), sets=2), 'block of 2 sets'),
    (block(SIZE, stream(b'\0'), others=2), 'sizes add up to 2 ids, 1 of them'),
    (block(SIZE, stream(b'\1')), 'a code that no gap has'),
    (block(SIZE, stream(bytes([62]))), 'a code that no gap has'),
    (block(SIZE, stream(b'\0', length=2)), 'codes: got 1 bytes, want 2'),
    (block(SIZE, stream(b'\0', kind=2)), 'codes: got kind 2'),
    (block(SIZE, stream(b'\0\0')), 'codes: got kind 0 and 2 bytes, want 1'),
    (block(SIZE, stream(b'\0\0', kind=1)), 'codes: unpacks to 2 bytes, want 1'),
    (block(SIZE, b'\1\4\0\0\0wxyz'), 'codes: does not unpack'),
    (block(SIZE, stream(bytes([12])), stream(bytes([0xFF]))), 'behind the last'),
    (block(SIZE, stream(bytes([12])), stream(bytes([0x0]))), 'outside 0 to 9'),
    (block(SIZE, stream(b'\0'), bound=1), 'outside 0 to 0'),
    (block(stream(b'\xff'), stream(b'\7\0'), others=6), 'sizes add up to 7'),
  ],
)
def test_what_is_wrong_is_named(data, reason):
  with pytest.raises(ValueError, match=reason):
    wire_kept.from_bytes(data, np.int32([1]))


def test_a_frame_that_unpacks_to_more_than_it_says_is_refused():
  whole = zstandard.ZstdCompressor().compress(bytes(100))
  told = whole.replace(b'\x20\x64', b'\x20\x01', 1)
  assert told != whole and zstandard.frame_content_size(told) == 1
  body = b'\1' + struct.pack('<I', len(told)) + told
  with pytest.raises(ValueError, match='codes: does not unpack'):
    wire_kept.from_bytes(block(SIZE, body), np.int32([1]))


def test_sizes_are_checked_before_room_is_made_for_their_ids(monkeypatch):
  # 64 sets of 65,535 in 200 bytes: refused over the limit, before any code is read.
  sizes = stream(b'\xff' * 64), stream(b'\xff' * 128, kind=1)
  data = block(*sizes, sets=64, others=64 * 65_534, bound=1 << 20)
  assert len(data) < 200
  monkeypatch.setattr(wire_kept, '_contexts', lambda n: pytest.fail('made room'))
  with pytest.raises(ValueError, match='at most 1000'):
    wire_kept.from_bytes(data, np.ones(64, np.int32), limit=1000)
  with pytest.raises(ValueError, match='at most 262144'):  # of one block
    wire_kept.from_bytes(data, np.ones(64, np.int32))


def test_the_limit_is_on_all_blocks_together(monkeypatch):
  monkeypatch.setattr(wire_kept, '_MAX_SET', 600)
  monkeypatch.setattr(wire_kept, '_BLOCK', 601)
  kept, token_T = drawn(np.full(100, 100), V)
  data = wire_kept.to_bytes(kept, token_T)
  wire_kept.from_bytes(data, token_T, limit=10_000)
  with pytest.raises(ValueError, match='want at most 399'):
    wire_kept.from_bytes(data, token_T, limit=9999)
