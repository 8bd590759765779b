"""Codec, packing, manifests: exact for every bit pattern, and damage never parses."""

import dataclasses
import json

from hypothesis import given, settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from swe17.sync import codec, manifest, pack

_BF16 = np.dtype(ml_dtypes.bfloat16)
_ALL = np.arange(1 << 16, dtype=np.uint16).view(_BF16)  # every bfloat16 there is


def _manifest(rows, data: bytes, base=None, **changes) -> manifest.Manifest:
  version = 0 if base is None else base.version + 1
  objects = (manifest.Object(f'weights/data/{version:08d}-a-1.bin', len(data)),)
  made = manifest.Manifest(
    version=version,
    base=None if base is None else base.version,
    base_digest='' if base is None else base.digest,
    codec='full' if base is None else 'xor',
    step=version,
    created=1.5,
    attempt='a',
    block_bytes=64,
    objects=objects if data else (),
    tensors=rows,
    digest=manifest.digest(rows),
    changed_share=1.0,
    plan={'phase': 0, 'mix': {'x': 0.1}},
  )
  return dataclasses.replace(made, **changes)


def _bits(tensors) -> dict[str, tuple]:
  return {n: (a.dtype.name, a.shape, a.tobytes()) for n, a in tensors.items()}


def _round_trip(old, new, block_bytes: int) -> tuple[manifest.Manifest, bytes, float]:
  """Packs `old` in full and `new` as a delta, and checks that both come back."""
  rows, data, _ = pack.pack(old, None, (), block_bytes)
  full = _manifest(rows, data, block_bytes=block_bytes)
  full = manifest.parse(manifest.to_bytes(full))
  held = pack.unpack(full, [data] if data else [], None)
  assert _bits(held) == _bits(old)
  assert full.digest == codec.digest(old, block_bytes)
  delta_rows, delta, share = pack.pack(new, old, rows, block_bytes)
  made = _manifest(delta_rows, delta, full, block_bytes=block_bytes)
  made = manifest.parse(manifest.to_bytes(made))
  got = pack.unpack(made, [delta] if delta else [], held)
  assert _bits(got) == _bits(new)
  assert _bits(held) == _bits(old)
  assert made.digest == codec.digest(new, block_bytes)
  return made, delta, share


def test_every_bfloat16_pattern_survives_both_ways():
  rng = np.random.default_rng(0)
  for shift in (1, 0x8000, 0x7FC1):
    old = {'w': rng.permutation(_ALL)}
    new = {'w': (old['w'].view(np.uint16) ^ np.uint16(shift)).view(_BF16)}
    _, _, share = _round_trip(old, new, 4096)
    assert share == 1.0


def test_change_of_bits_alone_is_a_change():
  """-0 equals 0 and NaN equals nothing: neither may decide what is sent."""
  old = {'w': np.array([0x0000, 0x7FC0, 0x7FC1, 0x0001], np.uint16).view(_BF16)}
  new = {'w': np.array([0x8000, 0x7FC1, 0x7FC1, 0x0001], np.uint16).view(_BF16)}
  _, _, share = _round_trip(old, new, 64)
  assert share == 0.5


_SHAPES = st.sampled_from([(), (0,), (1,), (3,), (7, 5), (2, 0, 3), (64,), (129,)])


@settings(max_examples=40, deadline=None)
@given(
  shapes=st.lists(_SHAPES, min_size=1, max_size=4),
  dtype=st.sampled_from(['bfloat16', 'float32', 'uint8', 'int32', 'float16']),
  block_bytes=st.sampled_from([1, 7, 64, 1000]),
  change=st.sampled_from([0.0, 0.02, 1.0]),
  seed=st.integers(0, 2**32 - 1),
)
def test_any_bytes_in_any_shape_survive(shapes, dtype, block_bytes, change, seed):
  rng = np.random.default_rng(seed)
  old, new = {}, {}
  for i, shape in enumerate(shapes):
    size = int(np.prod(shape)) * codec.DTYPES[dtype].itemsize
    data = rng.integers(0, 256, size, np.uint8)
    flips = rng.integers(0, 256, size, np.uint8) * (rng.random(size) < change)
    old[f'l{i}'] = codec.from_raw(data, dtype, shape)
    new[f'l{i}'] = codec.from_raw(data ^ flips.astype(np.uint8), dtype, shape)
  _round_trip(old, new, block_bytes)


def test_transposed_and_strided_tensors_are_sent_in_c_order():
  base = np.arange(24, dtype=np.float32).reshape(4, 6).astype(_BF16)
  old = {'t': base.T, 's': base[:, ::2]}
  new = {'t': base.T + base.T, 's': base[:, ::2] * 3}
  _round_trip(old, new, 16)


def test_no_change_stores_nothing_and_shares_the_arrays():
  old = {'w': _ALL, 'e': np.zeros((0, 4), _BF16)}
  rows, data, _ = pack.pack(old, None, (), 4096)
  held = pack.unpack(_manifest(rows, data, block_bytes=4096), [data], None)
  made, delta, share = _round_trip(old, {n: a.copy() for n, a in old.items()}, 4096)
  assert (delta, share) == (b'', 0.0)
  got = pack.unpack(made, [], held)
  assert got['w'] is held['w']


def test_decoded_tensors_cannot_be_written_to():
  rows, data, _ = pack.pack({'w': _ALL}, None, (), 4096)
  held = pack.unpack(_manifest(rows, data, block_bytes=4096), [data], None)
  with pytest.raises(ValueError, match='read-only'):
    held['w'][0] = 1


def test_sparse_delta_is_small():
  """CASES 4.12: 2 % changed elements of 100,000 take less than 5 % of the bytes."""
  rng = np.random.default_rng(0)
  old = rng.normal(0, 0.02, 100_000).astype(_BF16)
  bits = old.view(np.uint16).copy()
  at = rng.choice(bits.size, 2000, replace=False)
  bits[at] += rng.choice(np.array([1, -1]), 2000).astype(np.uint16)
  _, delta, share = _round_trip({'w': old}, {'w': bits.view(_BF16)}, 1 << 22)
  assert share == pytest.approx(0.02)
  assert len(delta) < 0.05 * old.nbytes


def test_blocks_hold_whole_elements_and_cover_the_tensor():
  assert codec.blocks(10, 2, 5) == [slice(0, 4), slice(4, 8), slice(8, 10)]
  assert codec.blocks(8, 4, 1) == [slice(0, 4), slice(4, 8)]
  assert codec.blocks(0, 2, 64) == []


def test_dtype_the_wire_does_not_know_is_refused():
  for array in (np.zeros(2, np.complex64), np.zeros(2, '>f4'), np.array(['a'])):
    with pytest.raises(ValueError, match='tensor dtype'):
      codec.raw(array)


def test_digest_knows_name_dtype_shape_and_every_bit():
  base = {'a': np.zeros((2, 3), np.uint16), 'b': np.zeros(4, np.uint16)}
  flipped = base['a'].copy()
  flipped[1, 2] = 1
  others = [
    {'a': base['a'], 'c': base['b']},
    {'a': base['a'].view(np.int16), 'b': base['b']},
    {'a': base['a'].reshape(3, 2), 'b': base['b']},
    {'a': flipped, 'b': base['b']},
    {'a': base['a']},
  ]
  digests = [codec.digest(tensors, 4) for tensors in [base, *others]]
  assert len(set(digests)) == len(digests)
  assert codec.digest(dict(reversed(base.items())), 4) == digests[0]


def test_frame_of_the_wrong_size_or_damaged_is_refused():
  block = np.arange(256, dtype=np.uint8)
  frame = codec.encode_full(block)
  assert np.array_equal(codec.decode_full(frame, 256), block)
  for bad, size in (
    (frame, 255),
    (frame[:-1], 256),
    (frame + b'x', 256),
    (b'', 256),
    (b'plain text, no frame', 256),
  ):
    with pytest.raises(ValueError, match='frame'):
      codec.decode_full(bad, size)
  for at in range(len(frame)):
    flipped = frame[:at] + bytes([frame[at] ^ 0x04]) + frame[at + 1 :]
    try:
      got = codec.decode_full(flipped, 256)
    except ValueError:
      continue
    assert np.array_equal(got, block), f'a flip at {at} gave other bytes unnoticed'


def test_delta_on_a_base_of_another_size_is_refused():
  with pytest.raises(ValueError, match='delta'):
    codec.encode_delta(np.zeros(3, np.uint8), np.zeros(4, np.uint8))
  frame = codec.encode_delta(np.ones(4, np.uint8), np.zeros(4, np.uint8))
  with pytest.raises(ValueError, match='frame'):
    codec.decode_delta(frame, np.zeros(5, np.uint8))


def test_checksum_sees_one_bit_and_the_order():
  array = np.arange(1, 101, dtype=np.uint16)
  base = codec.checksum(array, 64)
  assert base.shape == (4, 2)
  for i in (0, 31, 32, 99):
    for bit in (0, 15):
      other = array.copy()
      other[i] ^= 1 << bit
      differs = np.any(codec.checksum(other, 64) != base, axis=1)
      assert list(np.flatnonzero(differs)) == [i // 32]
  swapped = array.copy()
  swapped[[3, 4]] = swapped[[4, 3]]
  assert not np.array_equal(codec.checksum(swapped, 64), base)
  assert codec.checksum(np.zeros((0,), np.uint16), 64).shape == (0, 2)


@pytest.fixture
def packed() -> tuple[manifest.Manifest, bytes, dict, manifest.Manifest, bytes]:
  """A full version and a delta on it, of two tensors in several blocks."""
  rng = np.random.default_rng(1)
  old = {
    'a': rng.normal(size=(9, 11)).astype(_BF16),
    'b': rng.normal(size=40).astype(_BF16),
  }
  new = {n: (a.astype(np.float32) * 1.01).astype(_BF16) for n, a in old.items()}
  rows, data, _ = pack.pack(old, None, (), 64)
  full = _manifest(rows, data)
  delta_rows, delta, _ = pack.pack(new, old, rows, 64)
  return full, data, old, _manifest(delta_rows, delta, full), delta


def test_every_flipped_byte_of_an_object_is_found(packed):
  _, _, old, made, delta = packed
  for at in range(len(delta)):
    bad = delta[:at] + bytes([delta[at] ^ 0x20]) + delta[at + 1 :]
    with pytest.raises(pack.Damaged) as e:
      pack.unpack(made, [bad], old)
    assert e.value.reason == 'sha256'


def test_truncated_object_is_found(packed):
  full, data, _, _, _ = packed
  with pytest.raises(pack.Damaged) as e:
    pack.unpack(full, [data[:-1]], None)
  assert e.value.reason == 'truncated'


def test_delta_on_other_bytes_is_found(packed):
  _, _, old, made, delta = packed
  other = dict(old)
  other['b'] = old['b'] * old['b']
  with pytest.raises(pack.Damaged) as e:
    pack.unpack(made, [delta], other)
  assert e.value.reason == 'raw_hash'


def test_delta_applied_twice_is_found(packed):
  _, _, old, made, delta = packed
  once = pack.unpack(made, [delta], old)
  with pytest.raises(pack.Damaged) as e:
    pack.unpack(made, [delta], once)
  assert e.value.reason == 'raw_hash'


def test_delta_on_other_names_or_shapes_is_found(packed):
  _, _, old, made, delta = packed
  for base in (
    {'a': old['a']},
    {**old, 'c': old['a']},
    {'a': old['a'].T, 'b': old['b']},
    {},
  ):
    with pytest.raises(pack.Damaged) as e:
      pack.unpack(made, [delta], base)
    assert e.value.reason == 'names'


def test_base_written_to_after_packing_is_refused(packed):
  full, _, old, _, _ = packed
  changed = {**old, 'a': old['a'] + old['a']}
  with pytest.raises(ValueError, match='publish copies'):
    pack.pack(old, changed, full.tensors, 64)


def test_manifest_survives_its_json(packed):
  for made in (packed[0], packed[3]):
    assert manifest.parse(manifest.to_bytes(made)) == made


def test_every_damaged_byte_of_a_manifest_is_found(packed):
  data = manifest.to_bytes(packed[3])
  for at in range(0, len(data), 3):
    bad = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
    with pytest.raises(ValueError):
      manifest.parse(bad)
  for bad in (data[: len(data) // 2], b'', b'null', b'[]', b'3', b'\xff\xfe'):
    with pytest.raises(ValueError):
      manifest.parse(bad)


def _rewritten(made: manifest.Manifest, change) -> bytes:
  """A manifest with its JSON edited and its checksum made right again."""
  body = json.loads(manifest.to_bytes(made))
  del body['checksum']
  change(body)
  return json.dumps({**body, 'checksum': manifest._checksum(body)}).encode()


@pytest.mark.parametrize(
  'change,want',
  [
    (lambda b: b.update(schema=2), 'schema: got 2'),
    (lambda b: b.pop('schema'), 'schema: got None'),
    (lambda b: b.pop('plan'), r"missing=\['plan'\]"),
    (lambda b: b.update(more=1), r"unknown=\['more'\]"),
    (lambda b: b.update(base=None), 'got base None'),
    (lambda b: b.update(base=3), 'got base 3'),
    (lambda b: b.update(base_digest=''), 'with its digest'),
    (lambda b: b.update(digest='0' * 32), 'digest does not match'),
    (lambda b: b['objects'][0].update(key='../x'), 'store key'),
    (lambda b: b['objects'][0].update(key='groups/1'), 'not its own'),
    (lambda b: b['objects'][0].update(size=3), 'not in its object'),
    (lambda b: b['tensors'][0].update(dtype='object'), 'object'),
    (lambda b: b['tensors'][0].update(shape=[-1]), '-1'),
    (lambda b: b['tensors'][0].update(shape=[900]), 'blocks'),
    (lambda b: b['tensors'][0]['blocks'].pop(), 'blocks'),
    (lambda b: b['tensors'][0]['blocks'][0].pop(), 'does not parse'),
    (lambda b: b['tensors'][0]['blocks'][0].__setitem__(0, 'gzip'), "'gzip'"),
    (lambda b: b['tensors'][0]['blocks'][0].__setitem__(1, -1), 'not in its object'),
    (lambda b: b['tensors'][0]['blocks'][0].__setitem__(5, '0'), 'match its blocks'),
    (lambda b: b['tensors'].append(b['tensors'][0]), 'not unique'),
    (lambda b: b.update(tensors=[]), 'absent'),
    (lambda b: b.update(tensors=3), 'does not parse'),
  ],
)
def test_unsound_manifest_is_refused_in_words(packed, change, want: str):
  with pytest.raises(ValueError, match=want):
    manifest.parse(_rewritten(packed[3], change))


def test_full_snapshot_may_not_lean_on_a_base(packed):
  data = _rewritten(
    packed[0], lambda b: b['tensors'][0]['blocks'][0].__setitem__(0, 'xor')
  )
  with pytest.raises(ValueError, match="coding 'xor' with base None"):
    manifest.parse(data)


def test_plan_that_is_not_json_is_refused(packed):
  for plan in ({'x': float('nan')}, {'x': object()}, {'x': np.float32(1)}):
    with pytest.raises(ValueError, match='plan is not JSON'):
      manifest.to_bytes(dataclasses.replace(packed[0], plan=plan))


def test_plan_with_number_keys_reads_as_json_does(packed):
  made = dataclasses.replace(packed[0], plan={10: 'a', 9: 'b'})
  assert manifest.parse(manifest.to_bytes(made)).plan == {'10': 'a', '9': 'b'}
