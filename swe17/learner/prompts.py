"""Which segments share a prompt in a packed row. Host side, numpy.

Segments of a group begin with the same prompt. A row holds it once:

  [prefix][tail of a][tail of b] ..      instead of      [prompt, a][prompt, b] ..

A tail sees its prefix and itself, at the positions that it would have by itself, so all
its numbers are those of the whole segment, and the gradient of the prefix is the sum
over its tails. The last common token is the first of every tail and not of the prefix:
what it predicts is what the tails differ in. Nothing of a prefix was sampled, so it has
no target to train.
"""

from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np

from swe17 import types
from swe17.learner import state as st

LEAST = 16  # inputs of a prefix that is worth a segment of its own


@dataclasses.dataclass(frozen=True)
class Shared:
  """Segments that begin with the same `prefix` inputs (0: a segment by itself)."""

  prefix: int
  members: tuple[int, ...]


def alone(count: int) -> list[Shared]:
  """Nobody shares."""
  return [Shared(0, (i,)) for i in range(count)]


def shared(
  segments: Sequence[types.Segment],
  row_length: int,
  routes: tuple[int, int, int] | None = None,
) -> list[Shared]:
  """Sets of segments that share a prefix, so that most inputs are saved.

  Every segment is in one set, a run of the segments in the order of their leading
  unsampled ids. The best cut into runs is found by dynamic programming; a run saves its
  prefix for each member but one in each of the rows that it takes.

  Args:
    segments: of at most `row_length` inputs.
    row_length: inputs of a row.
    routes: (layers, experts a token, experts) of routes that are replayed: those of a
      prefix are equal too.
  """
  keys = [_key(segment, routes) for segment in segments]
  order = sorted(range(len(keys)), key=lambda i: keys[i].astype('>u4').tobytes())
  # common[i]: what the i-th in order could share with the one before it.
  common = [0] + [_common(keys[a], keys[b]) for a, b in itertools.pairwise(order)]
  common = [n if n >= LEAST else 0 for n in common]
  upto = np.cumsum([0] + [segments[i].token_T.size - 1 for i in order])
  best, first = np.zeros(len(order) + 1), np.zeros(len(order) + 1, int)
  for end in range(1, len(order) + 1):
    # Of every run that ends here, by its first segment.
    count = end - np.arange(end)
    prefix = np.append(np.minimum.accumulate(common[end - 1 : 0 : -1])[::-1], 0)
    tails = upto[end] - upto[:end] - count * prefix
    rows = np.ceil(tails / np.maximum(row_length - prefix, 1))
    rows = np.maximum(rows, np.ceil(count / (st.SEGMENTS_A_ROW - 1)))
    total = best[:end] + np.maximum(count - rows, 0) * prefix
    first[end] = end - 1 - int(np.argmax(total[::-1]))  # the shortest of equal ones
    best[end] = total[first[end]]
  return _runs(order, common, first)


def _runs(order: list[int], common: list[int], first: np.ndarray) -> list[Shared]:
  found, end = [], len(order)
  while end:
    start = int(first[end])
    prefix = min(common[start + 1 : end], default=0)
    found.append(Shared(prefix, tuple(sorted(order[start:end]))))
    end = start
  return found


def _key(segment: types.Segment, routes: tuple[int, int, int] | None) -> np.ndarray:
  """The leading tokens that nobody sampled, int64 [tokens, columns], all >= 0.

  Columns are the id and, if they are replayed, the token's routes (0: not recorded).
  """
  mask_T = segment.mask_T
  lead = int(np.argmax(mask_T)) if mask_T.any() else mask_T.size - 1
  width = 0 if routes is None else routes[0] * routes[1]
  key = np.zeros((lead, 1 + width), np.int64)
  key[:, 0] = segment.token_T[:lead]
  if width and segment.routes_RNK is not None:
    fed = segment.routes_RNK[:lead].reshape(-1, width)
    key[: len(fed), 1:] = fed.astype(np.int64) + 1
  return key


def _common(a: np.ndarray, b: np.ndarray) -> int:
  """Inputs that two could share: their common tokens but the last.

  Routes of that last one may differ: it is an input of the tails.
  """
  n = min(len(a), len(b))
  differ = np.flatnonzero(a[:n].reshape(-1) != b[:n].reshape(-1))
  equal = int(differ[0]) if differ.size else n * a.shape[1]
  return max(-(-equal // a.shape[1]) - 1, 0)
