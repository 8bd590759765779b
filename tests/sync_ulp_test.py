"""The ulp codec: every bit pattern comes back, small moves are small, damage shows.

A frame with any one byte changed, or cut anywhere, is refused by `decode` itself with
ValueError or gives the same bytes as before (some bits of a zstd header mean nothing).
What a frame can't know, its base, is left to the hash of the resulting bytes.
"""

import struct

from hypothesis import given, settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest
import zstandard

from swe17.sync import codec, streams, ulp

_BF16 = np.dtype(ml_dtypes.bfloat16)
_ALL = np.arange(1 << 16, dtype=np.uint16)  # every 16-bit pattern there is
_WORD = {'bfloat16': np.uint16, 'float16': np.uint16, 'float32': np.uint32}


def _encode(
  block: np.ndarray, base: np.ndarray, dtype: str, thin: bool
) -> tuple[bytes, int]:
  """`ulp.encode`; with `thin` the form by exponent, even where it is not smaller."""
  word = _WORD[dtype]
  frame, changed = ulp.encode(block, base, dtype)
  if thin and frame:
    new, old = block.view(word), base.view(word)
    frame = ulp._thin(new, old, np.flatnonzero(new != old), dtype)
  return frame, changed


def _round_trip(new: np.ndarray, old: np.ndarray, dtype: str) -> list[bytes]:
  """Codes words on words in both forms: they come back, in place as well."""
  block, base = new.view(np.uint8), old.view(np.uint8)
  frames = []
  for thin in (False, True):
    frame, changed = _encode(block, base, dtype, thin)
    frames.append(frame)
    assert changed == np.count_nonzero(new != old)
    if not changed:
      assert frame == b''
      continue
    kept = base.copy()
    out = np.zeros_like(base)
    ulp.decode(frame, base, out, dtype)
    assert np.array_equal(out, block)
    assert np.array_equal(base, kept)
    ulp.decode(memoryview(frame), kept, kept, dtype)
    assert np.array_equal(kept, block)
  return frames


def _spread(
  new: np.ndarray, old: np.ndarray, every: int
) -> tuple[np.ndarray, np.ndarray]:
  """Puts pairs `every` elements apart, so that the sparse form is taken."""
  base = np.full(new.size * every, 0x3C00, new.dtype)
  block = base.copy()
  base[::every], block[::every] = old, new
  return block, base


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('shift', [1, 0x8000, 0x7FC1, 0xFFFF, 0])
def test_every_16_bit_pattern_to_another(dtype: str, shift: int):
  """-0, infinities, denormals, NaN payloads; next to each other and far between."""
  rng = np.random.default_rng(shift)
  old = rng.permutation(_ALL)
  new = old ^ np.uint16(shift) if shift else rng.permutation(_ALL)
  _round_trip(new, old, dtype)
  _round_trip(*_spread(new, old, 5), dtype)
  _round_trip(*_spread(new[::16], old[::16], 300), dtype)


def test_random_float32_bits():
  rng = np.random.default_rng(0)
  new, old = rng.integers(0, 1 << 32, (2, 20_001), np.uint32)
  odd = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 1], np.uint32)
  new[: odd.size] = odd
  old[1 : odd.size + 1] = odd
  _round_trip(new, old, 'float32')
  _round_trip(*_spread(new, old, 7), 'float32')


def test_distance_counts_the_numbers_between():
  """-2, -1, 0 .. as representable numbers: zig-zag 3, 1, (0), 2, 4; -0 lies below 0."""
  value = np.array([-0.0, 0.0, 1.0, 1.0, -1.0, 1.0], _BF16).view(np.uint16)
  next_ = np.array([0x0000, 0x8000, 0x3F81, 0x3F7E, 0xBF81, 0x3F80], np.uint16)
  z = streams.distances(next_, value)
  assert z.tolist() == [2, 1, 2, 3, 1, 0]


def test_order_of_integers_is_the_order_of_numbers():
  bits = _ALL[np.isfinite(_ALL.view(_BF16).astype(np.float32))]
  order = streams._order(bits)
  value = bits.view(_BF16).astype(np.float32)[np.argsort(order)]
  assert (np.diff(value) >= 0).all()
  assert np.array_equal(streams._unorder(order), bits)
  assert np.unique(streams._order(_ALL)).size == _ALL.size


@settings(max_examples=120, deadline=None)
@given(
  dtype=st.sampled_from(list(ulp.DTYPES)),
  size=st.sampled_from([1, 2, 3, 255, 256, 257, 999, 5000]),
  share=st.sampled_from([0.0, 0.001, 0.05, 0.3, 0.5, 1.0]),
  most=st.sampled_from([1, 3, 1 << 8, 1 << 16]),
  seed=st.integers(0, 2**32 - 1),
)
def test_any_words_survive(dtype: str, size: int, share: float, most: int, seed: int):
  rng = np.random.default_rng(seed)
  word = _WORD[dtype]
  old = rng.integers(0, np.iinfo(word).max, size, word, endpoint=True)
  step = rng.integers(-most, most, size, endpoint=True).astype(word)
  _round_trip(old + step * (rng.random(size) < share).astype(word), old, dtype)


@pytest.mark.parametrize('gap', [0, 1, 253, 254, 255, 256, 509, 510, 511, 70_000])
def test_gaps_around_the_escape(gap: int):
  old = np.zeros(2 * gap + 900, np.uint16)
  new = old.copy()
  new[[gap, 2 * gap + 1]] = 1
  frames = _round_trip(new, old, 'bfloat16')
  assert len(frames[0]) < 100
  new[:] = 0
  new[-1] = 1
  _round_trip(new, old, 'bfloat16')


def test_distances_around_the_escape():
  far = np.array([*range(1, 40), 254, 255, 256, 257, 270, 271, 272, 0x7FFF, 0x8000])
  old = np.full(far.size, 0x3F80, np.uint16)
  for new in (old + far.astype(np.uint16), old - far.astype(np.uint16)):
    _round_trip(new, old, 'bfloat16')
    _round_trip(*_spread(new, old, 9), 'bfloat16')


def _moved(lr: float, size: int) -> tuple[np.ndarray, np.ndarray]:
  """bfloat16 weights before and after an update of up to lr, as bytes."""
  rng = np.random.default_rng(0)
  master = rng.normal(0, 0.02, size).astype(np.float32)
  moved = master + rng.uniform(-lr, lr, size).astype(np.float32)
  return codec.raw(moved.astype(_BF16)), codec.raw(master.astype(_BF16))


@pytest.mark.parametrize('lr,share', [(1e-7, 0.003), (1e-6, 0.015), (1e-5, 0.065)])
def test_small_update_takes_little_over_half_of_xor(lr: float, share: float):
  new, old = _moved(lr, 200_000)
  frame, _ = ulp.encode(new, old, 'bfloat16')
  assert len(frame) < share * new.size
  assert len(frame) < 0.55 * len(codec.encode_delta(new, old))


@pytest.mark.parametrize('lr', [1e-7, 1e-6, 1e-5])
def test_form_by_exponent_is_smaller_still(lr: float):
  """It goes below the order-0 entropy, which knows nothing of exponents."""
  new, old = _moved(lr, 1 << 20)
  plain, _ = ulp.encode(new, old, 'bfloat16')
  thin, _ = ulp.encode(new, old, 'bfloat16', by_exponent=True)
  assert thin[0] == 2
  assert len(thin) < {1e-7: 0.95, 1e-6: 0.8, 1e-5: 0.8}[lr] * len(plain)


def test_form_by_exponent_is_left_where_it_is_larger():
  """Changes that do not depend on the exponent, or too few to pay for classes."""
  rng = np.random.default_rng(0)
  old = rng.normal(0, 0.02, 100_000).astype(_BF16).view(np.uint16)
  for count in (5, 3000):
    new = old.copy()
    new[rng.choice(old.size, count, replace=False)] += np.uint16(1)
    block, base = new.view(np.uint8), old.view(np.uint8)
    plain, _ = ulp.encode(block, base, 'bfloat16')
    assert len(_encode(block, base, 'bfloat16', thin=True)[0]) > len(plain)
    assert ulp.encode(block, base, 'bfloat16', by_exponent=True)[0] == plain


def test_classes_are_every_element_once_and_few():
  rng = np.random.default_rng(0)
  for dtype, word in _WORD.items():
    for words in (
      rng.integers(0, np.iinfo(word).max, 5000, word, endpoint=True),
      np.zeros(7, word),
    ):
      seen = np.zeros(words.size, int)
      count = 0
      for members in ulp._classes(words, dtype):
        seen += members
        count += 1
      assert (seen == 1).all()
      assert count <= 17


def test_signs_of_one_magnitude_are_one_class():
  for dtype, word in _WORD.items():
    top = np.dtype(word).itemsize * 8 - 1
    words = np.full(100, 0x3F80, word)
    words[::2] |= word(1 << top)
    sizes = [int(members.sum()) for members in ulp._classes(words, dtype)]
    assert sizes == [100, 0]


def test_dense_form_is_taken_where_it_is_smaller(monkeypatch: pytest.MonkeyPatch):
  new, old = _moved(1e-4, 100_000)
  frame, changed = ulp.encode(new, old, 'bfloat16')
  assert changed > ulp.DENSE * new.size / 2
  assert frame[0] == 1
  monkeypatch.setattr(ulp, 'DENSE', 2.0)
  sparse, _ = ulp.encode(new, old, 'bfloat16')
  assert sparse[0] == 0
  assert len(frame) < 0.95 * len(sparse)


def test_other_sizes_and_dtypes_are_refused():
  with pytest.raises(ValueError, match='want the same'):
    ulp.encode(np.zeros(4, np.uint8), np.zeros(6, np.uint8), 'bfloat16')
  with pytest.raises(ValueError, match="dtype 'int32'"):
    ulp.encode(np.zeros(4, np.uint8), np.zeros(4, np.uint8), 'int32')


def _frames() -> list[tuple[bytes, np.ndarray, np.ndarray, str]]:
  """Frames of each kind, every stream in use: (frame, block, base, dtype)."""
  rng = np.random.default_rng(3)
  made = []
  for dtype, share, kind in (
    ('bfloat16', 0.02, 0),
    ('bfloat16', 0.9, 1),
    ('float32', 0.1, 0),
    ('bfloat16', 0.05, 2),
    ('float16', 0.1, 2),
    ('float32', 0.1, 2),
  ):
    word = _WORD[dtype]
    old = rng.integers(0, np.iinfo(word).max, 3001, word)
    far = rng.choice(np.array([1, 2, 3, 20, 300, 70_000]).astype(word), old.size)
    new = old + far * (rng.random(old.size) < share).astype(word)
    new[-1] += word(1)
    block, base = new.view(np.uint8), old.view(np.uint8)
    frame, _ = _encode(block, base, dtype, kind == 2)
    assert frame[0] == kind
    made.append((frame, block, base, dtype))
  return made


_FRAMES = _frames()


def _refused_or_same(frame: bytes, block: np.ndarray, base: np.ndarray, dtype: str):
  out = np.full_like(base, 0xA5)
  try:
    ulp.decode(frame, base, out, dtype)
  except ValueError:
    assert (out == 0xA5).all(), 'a refused frame wrote something'
    return
  assert np.array_equal(out, block), 'a damaged frame gave other bytes unnoticed'


def test_every_changed_byte_is_refused_or_means_nothing():
  for frame, block, base, dtype in _FRAMES:
    for at in range(len(frame)):
      for mask in (0x01, 0x90):
        bad = frame[:at] + bytes([frame[at] ^ mask]) + frame[at + 1 :]
        _refused_or_same(bad, block, base, dtype)


def test_frame_cut_anywhere_is_refused():
  for frame, _, base, dtype in _FRAMES:
    out = np.zeros_like(base)
    for at in range(len(frame)):
      with pytest.raises(ValueError):
        ulp.decode(frame[:at], base, out, dtype)
    with pytest.raises(ValueError):
      ulp.decode(frame + b'x', base, out, dtype)
    assert not out.any()


@settings(max_examples=200, deadline=None)
@given(which=st.integers(0, 5), data=st.data())
def test_garbage_is_refused(which: int, data: st.DataObject):
  """Bytes cut out, put in and overwritten, or nothing but noise."""
  frame, block, base, dtype = _FRAMES[which]
  start = data.draw(st.integers(0, len(frame)))
  stop = data.draw(st.integers(start, min(len(frame), start + 40)))
  bad = frame[:start] + data.draw(st.binary(max_size=40)) + frame[stop:]
  _refused_or_same(bad, block, base, dtype)
  with pytest.raises(ValueError):
    ulp.decode(data.draw(st.binary(max_size=60)), base, base.copy(), dtype)


def _forged(kind: int, length: int, *parts: np.ndarray | bytes) -> bytes:
  """A frame whose streams are whole and whose content lies; the highest is absent."""
  made = [s if isinstance(s, bytes) else ulp._compress(s) for s in (*parts, b'')]
  return struct.pack('<BB5I', kind, 1, length, *map(len, made)) + b''.join(made)


def test_forged_frames_are_refused():
  base = np.zeros(2000, np.uint8)  # 1000 elements
  empty, one = np.empty(0, np.uint8), np.zeros(1, np.uint8)

  def gaps(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)

  huge = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 24))  # a bomb
  for why, bad in {
    'positions beyond the block': _forged(0, 4, gaps(*[254] * 4), one + 1, empty),
    'skips beyond the block': _forged(0, 5, gaps(*[255] * 4, 1), one, empty),
    'no changed element': _forged(0, 2, gaps(255, 255), empty, empty),
    'no gaps': _forged(0, 0, empty, one, empty),
    'ends in a skip': _forged(0, 2, gaps(1, 255), one, empty),
    'more gaps than elements': _forged(0, 1 << 24, huge, one, empty),
    'gaps that are more than said': _forged(0, 1, huge, one, empty),
    'too few distances': _forged(0, 3, gaps(1, 1, 1), one, empty),
    'too many distances': _forged(0, 1, gaps(1), np.zeros(2, np.uint8), empty),
    'distances without end': _forged(0, 1, gaps(1), huge, empty),
    'words that nothing asks for': _forged(0, 1, gaps(1), one, one),
    'words without end': _forged(0, 1, gaps(1), one + 15, huge),
    'dense of another size': _forged(1, 0, empty, np.zeros(499, np.uint8), empty),
    'dense with gaps': _forged(1, 1, gaps(1), np.zeros(500, np.uint8), empty),
    'unknown kind': _forged(3, 1, gaps(1), one, empty),
    'classes that the base does not have': _forged(2, 1, gaps(1), one, empty),
  }.items():
    out = base.copy()
    with pytest.raises(ValueError):
      ulp.decode(bad, base, out, 'bfloat16')
      pytest.fail(why)
    assert not out.any(), why
