"""Pages on the host: who holds them, who may share, what is copied, what goes first."""

import hypothesis
from hypothesis import strategies as st
import pytest

from swe17.sampler import pages

S = 4


def begin(pool: pages.Pool, token: list[int], version: int = 0) -> pages.Row:
  """A row with entries for all of `token`, sharing what it can."""
  row = pool.open(pool.find(token, version), version)
  assert pool.reserve(row, len(token))
  pool.fill(row, token[row.size :], version)
  return row


def ids(row: pages.Row) -> list[int]:
  return [page.id for page in row.pages]


def test_full_pages_are_shared_by_reference_and_the_rest_is_copied():
  pool, token = pages.Pool(8, S), list(range(10))
  first = begin(pool, token)
  found = pool.find(token, 0)
  assert (len(found.pages), found.size) == (2, 10)
  second = pool.open(found, 0)
  assert ids(second)[:2] == ids(first)[:2] and ids(second)[2] != ids(first)[2]
  assert pool.copies() == [(ids(first)[2], ids(second)[2])]
  assert pool.copies() == []
  assert pool.used == 4
  # Each writes into its own copy.
  assert pool.reserve(first, 12) and pool.reserve(second, 12)
  pool.fill(first, [70, 71], 0)
  pool.fill(second, [80, 81], 0)
  assert first.token == [*token, 70, 71] and second.token == [*token, 80, 81]


def test_a_context_that_leaves_in_the_middle_of_a_full_page_gets_a_copy_of_its_part():
  pool = pages.Pool(8, S)
  first = begin(pool, list(range(8)))
  found = pool.find([0, 1, 2, 3, 4, 5, 99], 0)
  assert (ids(first)[:1], found.size) == ([p.id for p in found.pages], 6)
  row = pool.open(found, 0)
  assert row.token == [0, 1, 2, 3, 4, 5]
  assert pool.copies() == [(ids(first)[1], ids(row)[1])]


def test_a_copy_of_a_copy_that_was_not_made_yet_is_of_the_first():
  pool = pages.Pool(8, S)
  first = begin(pool, [1, 2])
  second, third = begin(pool, [1, 2, 3]), begin(pool, [1, 2, 4])
  origin = ids(first)[0]
  assert pool.copies() == [(origin, ids(second)[0]), (origin, ids(third)[0])]


def test_a_page_nobody_holds_is_gone_on_with_where_it_ends():
  pool = pages.Pool(8, S)
  first = begin(pool, list(range(6)))
  pool.close(first)
  again = pool.open(pool.kept(first, 6), first.version)
  assert ids(again) == ids(first) and pool.copies() == []
  # While somebody holds it, others copy.
  other = pool.open(pool.find(list(range(6)), 0), 0)
  assert ids(other)[1] != ids(first)[1]


def test_other_weights_find_nothing_and_a_row_of_two_versions_is_its_owners_alone():
  pool, token = pages.Pool(8, S), list(range(8))
  row = begin(pool, token)
  assert pool.find(token, 1).size == 0
  pool.renew()
  assert pool.find(token, 0).size == 0
  assert pool.reserve(row, 12)
  pool.fill(row, [8, 9, 10, 11], 1)
  assert row.version is None
  assert pool.find([*token, 8, 9, 10, 11], 1).size == 0
  pool.close(row)
  assert pool.kept(row, 12).size == 12


def test_pages_go_least_recently_used_first_and_the_end_of_a_context_before_its_start():
  pool = pages.Pool(4, S)
  old, new = begin(pool, list(range(8))), begin(pool, list(range(50, 58)))
  pool.close(old)
  pool.close(new)
  taken = begin(pool, [90])
  assert pool.find(list(range(8)), 0).size == 4
  assert pool.find(list(range(50, 58)), 0).size == 8
  assert ids(taken)[0] == ids(old)[1]
  assert pool.kept(old, 8).size == 4  # what is left of it, and no more
  begin(pool, list(range(60, 72)))
  assert pool.kept(old, 8).size == 0
  assert pool.kept(new, 8).size == 0


def test_a_row_gets_all_the_pages_it_asks_for_or_none():
  pool = pages.Pool(3, S)
  row = begin(pool, [1])
  assert not pool.reserve(row, 13) and len(row.pages) == 1
  assert pool.reserve(row, 12) and pool.available == 0
  pool.close(row)
  assert pool.available == 3


Step = tuple[str, int, list[int]]
steps = st.lists(
  st.tuples(
    st.sampled_from(['begin', 'grow', 'close', 'renew', 'again']),
    st.integers(0, 5),
    st.lists(st.integers(0, 2), min_size=1, max_size=11),
  ),
  max_size=40,
)


class World:
  """A pool, and a device whose pages hold (id, version) pairs, all of them checked."""

  def __init__(self):
    self.pool = pages.Pool(9, S)
    self.memory = [[None] * S for _ in range(9)]
    self.rows: dict[int, tuple[pages.Row, list]] = {}
    self.closed: dict[int, tuple[pages.Row, list]] = {}
    self.version = 0

  def do(self, what: str, name: int, token: list[int]) -> None:
    if what == 'renew':
      self.version += 1
      self.pool.renew()
    elif what == 'close' and name in self.rows:
      self.closed[name] = self.rows.pop(name)
      self.pool.close(self.closed[name][0])
    elif what == 'grow' and name in self.rows:
      self.write(*self.rows[name], token)
    elif what == 'begin' and name not in self.rows:
      found = self.pool.find(token, self.version)
      if self.pool.wants(found, len(token)) <= self.pool.available:
        row = self.pool.open(found, self.version)
        held = [(i, self.version) for i in token[: row.size]]
        self.take(name, row, held, token[row.size :])
    elif what == 'again' and name in self.closed and name not in self.rows:
      row, held = self.closed.pop(name)
      found = self.pool.kept(row, len(held))
      if self.pool.wants(found, found.size + len(token)) <= self.pool.available:
        self.take(name, self.pool.open(found, row.version), held[: found.size], token)

  def take(self, name, row, held, token) -> None:
    for origin, to in self.pool.copies():
      self.memory[to] = list(self.memory[origin])
    assert self.pool.reserve(row, row.size + len(token))
    self.rows[name] = row, held
    self.write(row, held, token)

  def write(self, row: pages.Row, held: list, token: list[int]) -> None:
    if not self.pool.reserve(row, row.size + len(token)):
      return
    for at, i in enumerate(token, row.size):
      self.memory[row.pages[at // S].id][at % S] = (i, self.version)
    self.pool.fill(row, token, self.version)
    held += [(i, self.version) for i in token]

  def check(self) -> None:
    for row, held in self.rows.values():
      stored = [entry for page in row.pages for entry in self.memory[page.id]]
      assert stored[: row.size] == held
      assert row.token == [i for i, _ in held]
      assert len({v for _, v in held}) <= 1 or row.version is None
    holders = [page for row, _ in self.rows.values() for page in row.pages]
    for page in self.pool.all:
      assert page.refs == holders.count(page)
      assert (page.refs == 0) == (page.id in self.pool._idle)


@hypothesis.given(steps)
@hypothesis.settings(max_examples=150, deadline=None)
def test_whatever_is_done_every_row_reads_its_own_entries(todo: list[Step]):
  world = World()
  for what, name, token in todo:
    world.do(what, name, token)
    world.check()


def test_letting_go_twice_is_a_bug():
  pool = pages.Pool(2, S)
  row = begin(pool, [1])
  pool.close(row)
  with pytest.raises(AssertionError, match='held by nobody'):
    pool.close(row)
