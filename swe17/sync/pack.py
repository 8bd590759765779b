"""A whole version to bytes and back: `pack` for the publisher, `unpack` for followers.

The frames of all blocks lie one after another in one object, tensors sorted by name.
`unpack` trusts nothing: the stored range must hash to its sha256, decompress to the
right size, and give, on the base at hand, bytes that hash to what the learner had.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from swe17.sync import codec, manifest


class Damaged(ValueError):
  """Stored weights that are not what their manifest says; `reason` is one word."""

  def __init__(self, reason: str, text: str):
    super().__init__(text)
    self.reason = reason


def pack(
  tensors: Mapping[str, np.ndarray],
  base: Mapping[str, np.ndarray] | None,
  base_rows: Sequence[manifest.Tensor],
  block_bytes: int,
) -> tuple[tuple[manifest.Tensor, ...], bytes, float]:
  """Encodes a version: its rows (all blocks in object 0), the bytes, changed share.

  base: tensors of the same names and shapes that `base_rows` was packed from, or None
  for a full snapshot. ValueError if they were written to since.
  """
  data = bytearray()
  known = {row.name: row for row in base_rows}
  rows, changed, total = [], 0, 0
  for name in sorted(tensors):
    array, old = tensors[name], None if base is None else base[name]
    if old is not None:
      _check_base(known[name], old, block_bytes)
      changed += codec.changed(array, old)
    rows.append(_pack_tensor(name, array, old, block_bytes, data))
    total += array.size
  share = 1.0 if base is None else changed / max(total, 1)
  return tuple(rows), bytes(data), share


def unpack(
  made: manifest.Manifest,
  objects: Sequence[bytes],
  base: Mapping[str, np.ndarray] | None,
) -> dict[str, np.ndarray]:
  """Decodes a version into new, read-only arrays and checks every byte.

  Tensors that did not change are the base's own arrays. Damaged, with the reason, if
  anything differs from the manifest; the base is left as it is in any case.
  """
  for entry, data in zip(made.objects, objects, strict=True):
    if len(data) != entry.size:
      raise Damaged('truncated', f'{entry.key}: got {len(data)} bytes of {entry.size}')
  if made.base is not None:
    rows = {row.name: (row.dtype, row.shape) for row in made.tensors}
    held = {n: (a.dtype.name, a.shape) for n, a in (base or {}).items()}
    if rows != held:
      odd = sorted(n for n in rows.keys() | held.keys() if rows.get(n) != held.get(n))
      raise Damaged(
        'names', f'version {made.version}: tensors differ from its base: {odd}'
      )
  old = base if made.base is not None and base is not None else {}
  return {
    row.name: _unpack_tensor(row, objects, old.get(row.name), made)
    for row in made.tensors
  }


def _pack_tensor(
  name: str,
  array: np.ndarray,
  base: np.ndarray | None,
  block_bytes: int,
  data: bytearray,
) -> manifest.Tensor:
  """Appends a tensor's frames to `data` and returns its row."""
  raw = codec.raw(array)
  rows = []
  for cut in codec.blocks(raw.size, array.dtype.itemsize, block_bytes):
    if base is None:
      coding, frame = 'full', codec.encode_full(raw[cut])
    else:
      frame = codec.encode_delta(raw[cut], codec.raw(base)[cut])
      coding = 'xor' if frame else 'same'
    rows.append(
      manifest.Block(
        coding=coding,
        object=0,
        start=len(data),
        stop=len(data) + len(frame),
        sha256=codec.stored_hash(frame),
        raw_hash=codec.raw_hash(raw[cut]),
      )
    )
    data += frame
  return manifest.Tensor(
    name=name,
    dtype=array.dtype.name,
    shape=array.shape,
    digest=codec.tensor_digest(row.raw_hash for row in rows),
    blocks=tuple(rows),
  )


def _check_base(row: manifest.Tensor, base: np.ndarray, block_bytes: int) -> None:
  raw = codec.raw(base)
  cuts = codec.blocks(raw.size, base.dtype.itemsize, block_bytes)
  if [codec.raw_hash(raw[cut]) for cut in cuts] != [b.raw_hash for b in row.blocks]:
    raise ValueError(
      f'tensor {row.name!r} was written to after it was published; publish copies'
    )


def _unpack_tensor(
  row: manifest.Tensor,
  objects: Sequence[bytes],
  base: np.ndarray | None,
  made: manifest.Manifest,
) -> np.ndarray:
  data = np.empty(row.nbytes, np.uint8)
  cuts = codec.blocks(row.nbytes, row.itemsize, made.block_bytes)
  old = None if base is None else codec.raw(base)
  for i, (cut, block) in enumerate(zip(cuts, row.blocks, strict=True)):
    at = f'version {made.version}: {row.name} block {i}'
    size = cut.stop - cut.start
    frame = b''
    if block.coding != 'same':
      frame = objects[block.object][block.start : block.stop]
      if codec.stored_hash(frame) != block.sha256:
        raise Damaged('sha256', f'{at}: stored bytes do not match their sha256')
    try:
      if block.coding == 'full':
        data[cut] = codec.decode_full(frame, size)
      elif old is not None:
        data[cut] = codec.decode_delta(frame, old[cut])
    except ValueError as e:
      raise Damaged('frame', f'{at}: {e}') from e
    if codec.raw_hash(data[cut]) != block.raw_hash:
      raise Damaged('raw_hash', f'{at}: resulting bytes do not match their hash')
  if base is not None and all(block.coding == 'same' for block in row.blocks):
    return base
  return codec.from_raw(data, row.dtype, row.shape)
