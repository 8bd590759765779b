"""Kept sets on the host: CSR and padded say the same, and parts add up."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from swe17 import kept as kept_sets
from swe17 import types

SETS = st.lists(st.sets(st.integers(0, 99), max_size=6), max_size=12)


def csr(sets) -> types.KeptSets:
  ids = [i for s in sets for i in sorted(s)]
  return types.KeptSets(kept_sets.offsets(np.array([len(s) for s in sets])), ids_(ids))


def ids_(ids) -> np.ndarray:
  return np.array(ids, np.int32).reshape(-1)


def same(a: types.KeptSets, b: types.KeptSets) -> bool:
  return all(
    x.dtype == y.dtype == np.int32 and np.array_equal(x, y)
    for x, y in ((a.offset_T1, b.offset_T1), (a.ids, b.ids))
  )


@settings(deadline=None)
@given(SETS, st.integers(0, 3))
def test_padded_and_back(sets, more):
  ids_TK = kept_sets.padded(csr(sets), 6 + more)
  assert ids_TK.shape == (len(sets), 6 + more) and ids_TK.dtype == np.int32
  assert [{i for i in row if i >= 0} for row in ids_TK.tolist()] == sets
  assert same(kept_sets.from_padded(ids_TK), csr(sets))


@settings(deadline=None)
@given(SETS, st.randoms())
def test_neither_order_nor_place_of_the_padding_matters(sets, random):
  rows = kept_sets.padded(csr(sets), 8).tolist()
  for row in rows:
    random.shuffle(row)
  got = kept_sets.from_padded(np.array(rows, np.int32).reshape(-1, 8))
  assert same(got, csr(sets))


def test_by_hand():
  kept = csr([{5, 1, 2}, set(), {7}])
  assert kept_sets.padded(kept, 4).tolist() == [
    [1, 2, 5, -1],
    [-1] * 4,
    [7, -1, -1, -1],
  ]
  with pytest.raises(ValueError, match='holds 3 ids, want at most 2'):
    kept_sets.padded(kept, 2)


@settings(deadline=None)
@given(st.lists(SETS, max_size=4))
def test_parts_come_out_of_their_whole(parts):
  whole = kept_sets.concat([csr(p) for p in parts])
  assert same(whole, csr([s for p in parts for s in p]))
  back = kept_sets.split(whole, [len(p) for p in parts])
  assert len(back) == len(parts)
  assert all(same(a, csr(p)) for a, p in zip(back, parts, strict=True))


def test_parts_that_do_not_add_up_are_refused():
  with pytest.raises(ValueError, match='got 2 sets, want 3'):
    kept_sets.split(csr([{1}, {2}]), [1, 2])


def test_more_ids_than_an_offset_can_count_are_refused():
  with pytest.raises(ValueError, match=r'below 2\*\*31'):
    kept_sets.offsets(np.array([1 << 30, 1 << 30]))
