"""Weights as bytes: blocks, frames, hashes. Lossless for every bit pattern.

A tensor is its raw bytes, little-endian, C order, cut into blocks of `block_bytes`
(rounded down to whole elements). bfloat16 tensors are arrays of `ml_dtypes.bfloat16`,
which is what numpy gets from a JAX array.

  full    zstd-3 of the block
  xor     zstd-3 of (block XOR the same block of the base version)
  ulp     positions and distances of the floats that changed (`sync.ulp`)
  same    nothing: the block equals the base's

Nothing is computed with values: `ulp` reads bits as integers, the others as bytes. Each
frame carries zstd's checksum. A block is known by the xxh3-128 of its raw bytes, a
tensor by the hash of its block hashes, a version by the hash of (name, dtype, shape,
tensor hash) sorted by name. `checksum` is the sum that a device can compute too.

After SWE-1.7 (XOR against the previous weights, then zstd).
"""

from collections.abc import Iterable, Mapping
import hashlib
import json
import threading

import ml_dtypes
import numpy as np
import xxhash
import zstandard

DTYPES: dict[str, np.dtype] = {
  'bfloat16': np.dtype(ml_dtypes.bfloat16),
  'float32': np.dtype('<f4'),
  'float16': np.dtype('<f2'),
  'int32': np.dtype('<i4'),
  'uint32': np.dtype('<u4'),
  'int16': np.dtype('<i2'),
  'uint16': np.dtype('<u2'),
  'int8': np.dtype('i1'),
  'uint8': np.dtype('u1'),
}
Bytes = bytes | bytearray | memoryview
_LEVEL = 3
_LOCAL = threading.local()  # zstd contexts: costly to make, one call at a time
ODD = (2654435761, 2246822519)  # odd multipliers: one changed bit always shows


def raw(array: np.ndarray) -> np.ndarray:
  """Views an array's bytes as uint8 [nbytes], copying only if it is not contiguous."""
  if array.dtype.name not in DTYPES or array.dtype != DTYPES[array.dtype.name]:
    raise ValueError(f'tensor dtype: got {array.dtype!r}, want one of {list(DTYPES)}')
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def from_raw(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
  """Inverse of `raw`; the result can't be written to."""
  array = data.view(DTYPES[dtype]).reshape(shape)
  array.flags.writeable = False
  return array


def blocks(nbytes: int, itemsize: int, block_bytes: int) -> list[slice]:
  """Cuts a tensor of `nbytes` into slices of its raw bytes. An empty one has none."""
  step = max(itemsize, block_bytes // itemsize * itemsize)
  return [slice(at, min(at + step, nbytes)) for at in range(0, nbytes, step)]


def encode_full(block: np.ndarray) -> bytes:
  """Compresses a block by itself. `block`: uint8 [n]."""
  if not hasattr(_LOCAL, 'compressor'):
    _LOCAL.compressor = zstandard.ZstdCompressor(
      level=_LEVEL, write_checksum=True, write_content_size=True
    )
  return _LOCAL.compressor.compress(block.data)


def decode_full(frame: Bytes, size: int) -> np.ndarray:
  """Inverse of `encode_full`. ValueError unless it holds exactly `size` bytes."""
  if not hasattr(_LOCAL, 'decompressor'):
    _LOCAL.decompressor = zstandard.ZstdDecompressor()
  try:
    # The size in the header decides what zstd allocates, so it is checked first.
    found = zstandard.frame_content_size(frame)
    if found != size:
      raise ValueError(f'frame holds {found} bytes, want {size}')
    data = _LOCAL.decompressor.decompress(frame, allow_extra_data=False)
  except zstandard.ZstdError as e:
    raise ValueError(f'frame does not decompress: {e}') from e
  return np.frombuffer(data, np.uint8)


def encode_delta(block: np.ndarray, base: np.ndarray) -> bytes:
  """Compresses the XOR of a block and its base, both uint8 [n]; b'' if they are equal.

  ValueError if the sizes differ.
  """
  if block.shape != base.shape:
    raise ValueError(f'delta: got {block.size} bytes on a base of {base.size}')
  difference = np.bitwise_xor(block, base, out=scratch(block.size))
  return encode_full(difference) if difference.any() else b''


def decode_delta(frame: Bytes, base: np.ndarray, out: np.ndarray) -> None:
  """Inverse of `encode_delta`: writes to `out`, uint8 [n]; it may be `base` itself.

  ValueError, with `out` untouched, if the frame does not hold `n` bytes.
  """
  np.bitwise_xor(decode_full(frame, base.size), base, out=out)


def scratch(size: int) -> np.ndarray:
  """This thread's own buffer, uint8 [size], until it asks again.

  Fresh memory of a block's size costs as much in page faults as a pass over it.
  """
  if not hasattr(_LOCAL, 'scratch') or _LOCAL.scratch.size < size:
    _LOCAL.scratch = np.empty(size, np.uint8)
  return _LOCAL.scratch[:size]


def changed(array: np.ndarray, base: np.ndarray) -> int:
  """Counts elements whose bits differ."""
  word = np.dtype(f'u{array.dtype.itemsize}')
  return int(np.count_nonzero(raw(array).view(word) != raw(base).view(word)))


def raw_hash(block: np.ndarray) -> str:
  """xxh3-128 of a block's raw bytes, 32 hex digits."""
  return xxhash.xxh3_128_hexdigest(block.data)


def stored_hash(data: Bytes) -> str:
  """sha256 of bytes as they lie in the store, 64 hex digits."""
  return hashlib.sha256(data).hexdigest()


def tensor_digest(block_hashes: Iterable[str]) -> str:
  """The hash of a tensor's block hashes, in order."""
  return xxhash.xxh3_128_hexdigest(''.join(block_hashes).encode())


def version_digest(rows: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
  """The hash over (name, dtype, shape, tensor digest), sorted by name."""
  text = json.dumps([[n, t, list(s), d] for n, t, s, d in sorted(rows)])
  return xxhash.xxh3_128_hexdigest(text.encode())


def digest(tensors: Mapping[str, np.ndarray], block_bytes: int) -> str:
  """The digest of a set of tensors: of their names, dtypes, shapes and bytes.

  It depends on how tensors are cut too: take `block_bytes` from the manifest.
  """
  rows = []
  for name, array in tensors.items():
    data = raw(array)
    cuts = blocks(data.size, array.dtype.itemsize, block_bytes)
    rows.append(
      (
        name,
        array.dtype.name,
        array.shape,
        tensor_digest(raw_hash(data[cut]) for cut in cuts),
      )
    )
  return version_digest(rows)


def checksum(array: np.ndarray, block_bytes: int) -> np.ndarray:
  """Position-weighted sums of a tensor's words, uint32 [blocks, 2], modulo 2**32.

  Word i of a block (an element's bits as an unsigned integer) counts (i m | 1) times,
  once for each of two odd multipliers m. Integer sums do not depend on their order, so
  a device gets the same number however it reduces.
  """
  width = array.dtype.itemsize
  word = raw(array).view(np.dtype(f'<u{width}'))
  rows = []
  for cut in blocks(array.nbytes, width, block_bytes):
    part = word[cut.start // width : cut.stop // width].astype(np.uint32)
    i = np.arange(part.size, dtype=np.uint32)
    rows.append(
      [np.sum(part * (i * np.uint32(m) | np.uint32(1)), dtype=np.uint32) for m in ODD]
    )
  return np.array(rows, np.uint32).reshape(-1, 2)
