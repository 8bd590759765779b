"""Blocks, frames, hashes, manifests: exact, and damage never parses."""

from concurrent import futures
import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from swe17.sync import codec, manifest
from tests import sync_fixtures

_BF16 = np.dtype(ml_dtypes.bfloat16)


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
  out = np.full(5, 7, np.uint8)
  with pytest.raises(ValueError, match='frame'):
    codec.decode_delta(frame, np.zeros(5, np.uint8), out)
  assert (out == 7).all()


def test_delta_can_be_applied_in_place():
  rng = np.random.default_rng(0)
  base, block = rng.integers(0, 256, (2, 999), np.uint8)
  frame = codec.encode_delta(block, base)
  out = base.copy()
  codec.decode_delta(frame, out, out)
  assert np.array_equal(out, block)
  assert codec.encode_delta(block, block) == b''


def test_frames_are_the_same_from_any_thread_and_after_any_use():
  """zstd contexts are kept per thread: what they did before must not show."""
  rng = np.random.default_rng(0)
  sizes = [1, 10, 1000, 70_000]
  made = [rng.integers(0, 4, n, np.uint8) for n in sizes * 4]
  alone = [codec.encode_full(block) for block in made]
  with futures.ThreadPoolExecutor(4) as pool:
    shuffled = list(pool.map(codec.encode_full, made[::-1]))[::-1]
    back = list(pool.map(codec.decode_full, shuffled, [b.size for b in made]))
  assert shuffled == alone
  assert all(np.array_equal(a, b) for a, b in zip(back, made, strict=True))


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
def packed() -> tuple[manifest.Manifest, manifest.Manifest]:
  """A full version and a delta on it, of two tensors in several blocks."""
  rng = np.random.default_rng(1)
  old = {
    'a': rng.normal(size=(9, 11)).astype(_BF16),
    'b': rng.normal(size=40).astype(_BF16),
  }
  new = {n: (a.astype(np.float32) * 1.01).astype(_BF16) for n, a in old.items()}
  rows, objects, _ = sync_fixtures.packed(old)
  full = sync_fixtures.manifest_of(rows, objects)
  delta_rows, delta, _ = sync_fixtures.packed(new, old, rows)
  return full, sync_fixtures.manifest_of(delta_rows, delta, full)


def test_manifest_survives_its_json(packed):
  for made in packed:
    assert manifest.parse(manifest.to_bytes(made)) == made


def test_every_damaged_byte_of_a_manifest_is_found(packed):
  data = manifest.to_bytes(packed[1])
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
    manifest.parse(_rewritten(packed[1], change))


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
