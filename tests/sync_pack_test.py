"""Packing: exact for every bit pattern and any number of threads; damage is named."""

from collections.abc import Mapping, Sequence
import dataclasses
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from swe17.sync import codec, manifest, pack
from tests import sync_fixtures

_BF16 = np.dtype(ml_dtypes.bfloat16)
_ALL = np.arange(1 << 16, dtype=np.uint16).view(_BF16)  # every bfloat16 there is

_bits, _frames, _manifest = (
  sync_fixtures.bits,
  sync_fixtures.frames,
  sync_fixtures.manifest_of,
)


def _round_trip(
  old, new, block_bytes: int, codec_name: str = 'ulp', object_bytes: int = 1 << 28
) -> tuple[manifest.Manifest, list[bytes], float]:
  """Packs `old` in full and `new` as a delta, and checks that both come back."""
  cut = {'block_bytes': block_bytes, 'object_bytes': object_bytes}
  rows, objects, _ = sync_fixtures.packed(old, **cut)
  full = _manifest(rows, objects, block_bytes=block_bytes)
  full = manifest.parse(manifest.to_bytes(full))
  held = pack.unpack(full, _frames(objects), None)
  assert _bits(held) == _bits(old)
  assert full.digest == codec.digest(old, block_bytes)
  delta_rows, delta, share = sync_fixtures.packed(
    new, old, rows, codec=codec_name, **cut
  )
  made = _manifest(delta_rows, delta, full, block_bytes=block_bytes)
  made = manifest.parse(manifest.to_bytes(made))
  got = pack.unpack(made, _frames(delta), held)
  assert _bits(got) == _bits(new)
  assert _bits(held) == _bits(old)
  assert made.digest == codec.digest(new, block_bytes)
  return made, delta, share


def _codings(made: manifest.Manifest) -> dict[str, set[str]]:
  return {row.name: {block.coding for block in row.blocks} for row in made.tensors}


@pytest.mark.parametrize('codec_name', list(pack.CODECS))
def test_every_bfloat16_pattern_survives_both_ways(codec_name: str):
  rng = np.random.default_rng(0)
  for shift in (1, 0x8000, 0x7FC1):
    old = {'w': rng.permutation(_ALL)}
    new = {'w': (old['w'].view(np.uint16) ^ np.uint16(shift)).view(_BF16)}
    _, _, share = _round_trip(old, new, 4096, codec_name)
    assert share == 1.0


@pytest.mark.parametrize('codec_name', list(pack.CODECS))
def test_change_of_bits_alone_is_a_change(codec_name: str):
  """-0 equals 0 and NaN equals nothing: neither may decide what is sent."""
  old = {'w': np.array([0x0000, 0x7FC0, 0x7FC1, 0x0001], np.uint16).view(_BF16)}
  new = {'w': np.array([0x8000, 0x7FC1, 0x7FC1, 0x0001], np.uint16).view(_BF16)}
  _, _, share = _round_trip(old, new, 64, codec_name)
  assert share == 0.5


_SHAPES = st.sampled_from([(), (0,), (1,), (3,), (7, 5), (2, 0, 3), (64,), (129,)])


@settings(max_examples=60, deadline=None)
@given(
  shapes=st.lists(_SHAPES, min_size=1, max_size=4),
  dtype=st.sampled_from(['bfloat16', 'float32', 'uint8', 'int32', 'float16']),
  codec_name=st.sampled_from(list(pack.CODECS)),
  block_bytes=st.sampled_from([1, 7, 64, 1000]),
  object_bytes=st.sampled_from([1, 100, 1 << 20]),
  change=st.sampled_from([0.0, 0.02, 1.0]),
  seed=st.integers(0, 2**32 - 1),
)
def test_any_bytes_in_any_shape_survive(
  shapes, dtype, codec_name, block_bytes, object_bytes, change, seed
):
  rng = np.random.default_rng(seed)
  old, new = {}, {}
  for i, shape in enumerate(shapes):
    size = int(np.prod(shape)) * codec.DTYPES[dtype].itemsize
    data = rng.integers(0, 256, size, np.uint8)
    flips = rng.integers(0, 256, size, np.uint8) * (rng.random(size) < change)
    old[f'l{i}'] = codec.from_raw(data, dtype, shape)
    new[f'l{i}'] = codec.from_raw(data ^ flips.astype(np.uint8), dtype, shape)
  _round_trip(old, new, block_bytes, codec_name, object_bytes)


def test_transposed_and_strided_tensors_are_sent_in_c_order():
  base = np.arange(24, dtype=np.float32).reshape(4, 6)
  old = {'t': base.astype(_BF16).T, 's': base.astype(_BF16)[:, ::2]}
  new = {'t': (base + base).astype(_BF16).T, 's': (base * 3).astype(_BF16)[:, ::2]}
  _round_trip(old, new, 16)


def test_no_change_stores_nothing_and_shares_the_arrays():
  old = {'w': _ALL, 'e': np.zeros((0, 4), _BF16)}
  rows, objects, _ = sync_fixtures.packed(old, block_bytes=4096)
  full = _manifest(rows, objects, block_bytes=4096)
  held = pack.unpack(full, _frames(objects), None)
  made, delta, share = _round_trip(old, {n: a.copy() for n, a in old.items()}, 4096)
  assert (delta, share) == ([], 0.0)
  got = pack.unpack(made, _frames(delta), held)
  assert got['w'] is held['w']


def test_unchanged_tensor_is_checked_all_the_same():
  """A base that rotted in memory must not pass as the next version."""
  old = {'w': _ALL, 'v': _ALL}
  rows, objects, _ = sync_fixtures.packed(old, block_bytes=4096)
  full = _manifest(rows, objects, block_bytes=4096)
  made, delta, _ = _round_trip(old, {**old, 'v': old['v'][::-1].copy()}, 4096)
  rotten = old['w'].copy()
  rotten.view(np.uint16)[77] ^= 1
  with pytest.raises(pack.Damaged) as e:
    pack.unpack(made, _frames(delta), {**old, 'w': rotten})
  assert e.value.reason == 'raw_hash'
  assert full.tensors[1].digest == made.tensors[1].digest


def test_decoded_tensors_cannot_be_written_to():
  rows, objects, _ = sync_fixtures.packed({'w': _ALL, 'e': _ALL[:0]})
  held = pack.unpack(_manifest(rows, objects), _frames(objects), None)
  with pytest.raises(ValueError, match='read-only'):
    held['w'][0] = 1
  assert not any(array.flags.writeable for array in held.values())


def _sparse(share: float) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """100,000 bfloat16 weights, and the same with some one step up or down."""
  rng = np.random.default_rng(0)
  old = rng.normal(0, 0.02, 100_000).astype(_BF16)
  word = old.view(np.uint16).copy()
  at = rng.choice(word.size, int(share * word.size), replace=False)
  word[at] += rng.choice(np.array([1, -1]), at.size).astype(np.uint16)
  return {'w': old}, {'w': word.view(_BF16)}


def test_sparse_delta_is_small():
  """CASES 4.12: 2 % changed elements of 100,000 take less than 5 % of the bytes."""
  old, new = _sparse(0.02)
  size = {}
  for name in pack.CODECS:
    _, objects, share = _round_trip(old, new, 1 << 22, name)
    assert share == pytest.approx(0.02)
    size[name] = sum(map(len, objects))
  assert size['ulp_ctx'] <= size['ulp'] < 0.55 * size['xor'] < 0.05 * old['w'].nbytes


def test_coding_of_a_block_fits_its_dtype_and_its_change():
  rng = np.random.default_rng(0)
  old, new = _sparse(0.02)
  size = 10_000
  old |= {
    'ids': np.arange(size, dtype=np.int32),
    'reset': rng.normal(size=size).astype(_BF16),
    'same': rng.normal(size=size).astype(_BF16),
    'float32': rng.normal(size=size).astype(np.float32),
  }
  new |= {
    'ids': old['ids'] + 1,
    'reset': np.ones(size, _BF16),  # by itself shorter than the way from the old one
    'same': old['same'],
    'float32': old['float32'] + np.float32(1e-6),
  }
  made, _, _ = _round_trip(old, new, 1 << 22)
  assert _codings(made) == {
    'w': {'ulp'},
    'ids': {'xor'},
    'reset': {'full'},
    'same': {'same'},
    'float32': {'ulp'},
  }
  made, _, _ = _round_trip(old, new, 1 << 22, 'xor')
  assert _codings(made)['w'] == {'xor'}


def _many(seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {
    f'l{i}': rng.integers(0, 300, (i + 1) * 500, np.uint16).view(_BF16)
    for i in range(9)
  }


@pytest.mark.parametrize('codec_name', list(pack.CODECS))
def test_number_of_threads_changes_nothing(codec_name: str):
  old, new = _many(0), _many(1)
  new['l3'] = old['l3']
  seen = []
  for threads in (1, 2, 5):
    options = {'threads': threads, 'object_bytes': 5000}
    rows, objects, _ = sync_fixtures.packed(old, **options)
    delta = sync_fixtures.packed(new, old, rows, codec=codec_name, **options)
    full = _manifest(rows, objects)
    held = pack.unpack(full, _frames(objects), None, threads=threads)
    made = _manifest(delta[0], delta[1], full)
    got = pack.unpack(made, _frames(delta[1]), held, threads=threads)
    assert _bits(got) == _bits(new)
    assert list(got) == sorted(new)
    seen.append((rows, objects, *delta))
  assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize('threads', [1, 4])
def test_first_damaged_block_is_named_whatever_the_threads(threads: int):
  old = _many(0)
  rows, objects, _ = sync_fixtures.packed(old)
  bad = bytearray(objects[0])
  bad[rows[2].blocks[5].start] ^= 1
  bad[rows[7].blocks[0].start] ^= 1
  with pytest.raises(pack.Damaged, match='version 0: l2 block 5: stored') as e:
    pack.unpack(_manifest(rows, objects), _frames([bytes(bad)]), None, threads=threads)
  assert e.value.reason == 'sha256'


@pytest.mark.parametrize('object_bytes', [1, 700, 3000, 10**9])
def test_objects_are_closed_when_full_and_blocks_lie_in_order(object_bytes: int):
  tensors = _many(0)
  rows, objects, _ = sync_fixtures.packed(tensors, object_bytes=object_bytes)
  made = manifest.parse(manifest.to_bytes(_manifest(rows, objects)))
  assert [row.name for row in rows] == sorted(tensors)
  blocks = [block for row in rows for block in row.blocks]
  biggest = max(block.stop - block.start for block in blocks)
  for data in objects[:-1]:
    assert object_bytes <= len(data) < object_bytes + biggest
  assert all(objects)
  end = (0, 0)
  for block in blocks:
    start = (block.object, block.start)
    assert start in (end, (end[0] + 1, 0))
    end = (block.object, block.stop)
  assert end == (len(objects) - 1, len(objects[-1]))
  assert _bits(pack.unpack(made, _frames(objects), None)) == _bits(tensors)


def test_only_the_frames_of_wanted_tensors_are_asked_for():
  old = _many(0)
  new = {name: a.view(np.uint16) + np.uint16(1) for name, a in old.items()}
  new = {name: a.view(_BF16) for name, a in new.items()}
  rows, objects, _ = sync_fixtures.packed(old)
  delta_rows, delta, _ = sync_fixtures.packed(new, old, rows)
  full = _manifest(rows, objects)
  made = _manifest(delta_rows, delta, full)
  names = ['l7', 'l2']
  asked = []

  def frame_of(block: manifest.Block) -> memoryview:
    asked.append(block)
    return _frames(delta)(block)

  part = pack.unpack(full, _frames(objects), None, names=names)
  assert _bits(part) == _bits({name: old[name] for name in names})
  want = [b for row in delta_rows if row.name in names for b in row.blocks]
  for base in (part, old):  # others' bases do no harm
    asked.clear()
    got = pack.unpack(made, frame_of, base, names=names)
    assert _bits(got) == _bits({name: new[name] for name in names})
    assert asked == want
  for wrong, base in ((['l2', 'l99'], old), (['l2', 'l3'], part)):
    with pytest.raises(pack.Damaged) as e:
      pack.unpack(made, frame_of, base, names=wrong)
    assert e.value.reason == 'names'
  assert pack.unpack(made, frame_of, {}, names=()) == {}


def test_blocks_are_fetched_side_by_side():
  """With threads, one slow frame does not hold up the next."""
  old = _many(0)
  rows, objects, _ = sync_fixtures.packed(old)
  meeting = threading.Barrier(2)
  first = rows[0].blocks[:2]

  def frame_of(block: manifest.Block) -> memoryview:
    if block in first:
      meeting.wait(timeout=60)
    return _frames(objects)(block)

  got = pack.unpack(_manifest(rows, objects), frame_of, None, threads=2)
  assert _bits(got) == _bits(old)


Version = tuple[manifest.Manifest, list[bytes], dict[str, np.ndarray]]


@pytest.fixture
def full() -> Version:
  rng = np.random.default_rng(1)
  old = {
    'a': rng.normal(size=(9, 11)).astype(_BF16),
    'b': rng.normal(size=40).astype(_BF16),
  }
  rows, objects, _ = sync_fixtures.packed(old)
  return _manifest(rows, objects), objects, old


@pytest.fixture(params=list(pack.CODECS))
def delta(request: pytest.FixtureRequest, full: Version) -> Version:
  """A delta on `full`, and the tensors it is taken on."""
  base, _, old = full
  new = {n: (a.astype(np.float32) * 1.01).astype(_BF16) for n, a in old.items()}
  rows, objects, _ = sync_fixtures.packed(new, old, base.tensors, codec=request.param)
  return _manifest(rows, objects, base), objects, old


def _reason(
  made: manifest.Manifest,
  objects: Sequence[bytes],
  base: Mapping[str, np.ndarray] | None,
) -> str:
  with pytest.raises(pack.Damaged) as e:
    pack.unpack(made, _frames(objects), base)
  return e.value.reason


def test_every_flipped_byte_of_an_object_is_found(delta: Version):
  made, (data,), old = delta
  for at in range(len(data)):
    bad = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
    assert _reason(made, [bad], old) == 'sha256'


def test_flipped_byte_that_its_sha256_agrees_with_is_found_all_the_same(delta: Version):
  """What the frame's own checks let through, the hash of the result does not."""
  made, (data,), old = delta
  for at in range(len(data)):
    bad = data[:at] + bytes([data[at] ^ 0x08]) + data[at + 1 :]
    tensors = tuple(
      dataclasses.replace(
        row,
        blocks=tuple(
          dataclasses.replace(b, sha256=codec.stored_hash(bad[b.start : b.stop]))
          for b in row.blocks
        ),
      )
      for row in made.tensors
    )
    forged = dataclasses.replace(made, tensors=tensors)
    try:
      got = pack.unpack(forged, _frames([bad]), old)
    except pack.Damaged as e:
      assert e.reason in ('frame', 'raw_hash')
    else:
      assert _bits(got) == _bits(pack.unpack(made, _frames([data]), old))


def test_short_frame_is_found(delta: Version):
  made, (data,), old = delta
  assert _reason(made, [data[:-1]], old) == 'truncated'


def test_delta_on_other_bytes_is_found(delta: Version):
  made, objects, old = delta
  other = {**old, 'b': old['b'] * old['b']}
  assert _reason(made, objects, other) == 'raw_hash'


def test_delta_applied_twice_is_found(delta: Version):
  made, objects, old = delta
  once = pack.unpack(made, _frames(objects), old)
  assert _reason(made, objects, once) == 'raw_hash'


def test_delta_on_other_names_or_shapes_is_found(delta: Version):
  made, objects, old = delta
  for base in (
    {'a': old['a']},
    {**old, 'c': old['a']},
    {'a': old['a'].T, 'b': old['b']},
    {},
    None,
  ):
    assert _reason(made, objects, base) == 'names'


def test_codec_nobody_knows_is_refused(full: Version):
  with pytest.raises(ValueError, match="codec: got 'zip'"):
    sync_fixtures.packed(full[2], codec='zip')


@pytest.mark.parametrize('threads', [1, 3])
def test_base_written_to_after_packing_is_refused(full: Version, threads: int):
  made, _, old = full
  changed = {**old, 'a': old['a'] + old['a']}
  with pytest.raises(ValueError, match=r"'a' was written to .*publish copies"):
    sync_fixtures.packed(old, changed, made.tensors, threads=threads)
