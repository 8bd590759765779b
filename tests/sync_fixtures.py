"""What the tests of codec, packing and manifests share."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np

from swe17.sync import manifest, pack

Tensors = Mapping[str, np.ndarray]


def packed(
  tensors: Tensors,
  base: Tensors | None = None,
  base_rows: Sequence[manifest.Tensor] = (),
  *,
  codec: str = 'ulp',
  block_bytes: int = 64,
  object_bytes: int = 1 << 28,
  threads: int = 1,
) -> tuple[tuple[manifest.Tensor, ...], list[bytes], float]:
  """`pack.pack` with this module's usual settings."""
  return pack.pack(
    tensors,
    base,
    base_rows,
    codec=codec,
    block_bytes=block_bytes,
    object_bytes=object_bytes,
    threads=threads,
  )


def manifest_of(
  rows: tuple[manifest.Tensor, ...],
  objects: Sequence[bytes],
  base: manifest.Manifest | None = None,
  **changes,
) -> manifest.Manifest:
  """The manifest of a packed version: version 0, or the one after `base`."""
  version = 0 if base is None else base.version + 1
  made = manifest.Manifest(
    version=version,
    base=None if base is None else base.version,
    base_digest='' if base is None else base.digest,
    codec='full' if base is None else 'ulp',
    step=version,
    created=1.5,
    attempt='a',
    block_bytes=64,
    objects=tuple(
      manifest.Object(f'weights/data/{version:08d}-a-{i + 1}.bin', len(data))
      for i, data in enumerate(objects)
    ),
    tensors=rows,
    digest=manifest.digest(rows),
    changed_share=1.0,
    plan={'phase': 0, 'mix': {'x': 0.1}},
  )
  return dataclasses.replace(made, **changes)


def frames(objects: Sequence[bytes]) -> Callable[[manifest.Block], memoryview]:
  """Ranges of whole objects, as a follower that read them all gives them."""
  return lambda b: memoryview(objects[b.object])[b.start : b.stop]


def bits(tensors: Tensors) -> dict[str, tuple]:
  """All that must come back: dtype, shape and every byte."""
  return {n: (a.dtype.name, a.shape, a.tobytes()) for n, a in tensors.items()}
