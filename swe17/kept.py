"""Kept sets on the host: CSR (`types.KeptSets`) and the padded form of the device.

CSR holds ascending ids and an offset a token; size 0 = no set. The device form is
int32 [T, K], padded with -1. Both say the same; this file is the only way between them.
"""

from collections.abc import Sequence
import itertools

import numpy as np

from swe17 import types


def padded(kept: types.KeptSets, K: int) -> np.ndarray:
  """CSR sets as int32 [T, K], -1 beyond each set. ValueError if one is wider."""
  size_T = kept.size_T
  if size_T.max(initial=0) > K:
    raise ValueError(f'a kept set holds {size_T.max()} ids, want at most {K}')
  ids_TK = np.full((size_T.size, K), -1, np.int32)
  ids_TK[np.arange(K)[None, :] < size_T[:, None]] = kept.ids
  return ids_TK


def from_padded(ids_TK: np.ndarray) -> types.KeptSets:
  """Padded sets, in any order and with -1 anywhere, as CSR with ascending ids."""
  ids_TK = np.sort(ids_TK, axis=-1)
  real_TK = ids_TK >= 0
  return types.KeptSets(offsets(real_TK.sum(-1)), ids_TK[real_TK].astype(np.int32))


def offsets(size_T: np.ndarray) -> np.ndarray:
  """int32 [T + 1] offsets of sets of these sizes. ValueError if they exceed int32."""
  offset_T1 = np.zeros(size_T.size + 1, np.int64)
  np.cumsum(size_T, out=offset_T1[1:])
  if offset_T1[-1] >= 1 << 31:
    raise ValueError(f'kept sets: got {offset_T1[-1]} ids together, want below 2**31')
  return offset_T1.astype(np.int32)


def concat(parts: Sequence[types.KeptSets]) -> types.KeptSets:
  """The sets of several segments, one after another."""
  sizes = [np.zeros(0, np.int32), *(part.size_T for part in parts)]
  ids = [np.zeros(0, np.int32), *(part.ids for part in parts)]
  return types.KeptSets(offsets(np.concatenate(sizes)), np.concatenate(ids))


def split(kept: types.KeptSets, lengths: Sequence[int]) -> list[types.KeptSets]:
  """Inverse of `concat`, by tokens a segment."""
  at = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
  if at[-1] != kept.offset_T1.size - 1:
    raise ValueError(
      f'kept sets: got {kept.offset_T1.size - 1} sets, want {at[-1]} in all'
    )
  return [cut(kept, int(lo), int(hi)) for lo, hi in itertools.pairwise(at)]


def cut(kept: types.KeptSets, lo: int, hi: int) -> types.KeptSets:
  """The sets of tokens `lo` to `hi` (excluded)."""
  offset_T1 = kept.offset_T1[lo : hi + 1]
  ids = kept.ids[offset_T1[0] : offset_T1[-1]]
  return types.KeptSets(offset_T1 - offset_T1[0], ids)
