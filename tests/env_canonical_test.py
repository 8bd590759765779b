"""The text of plain data: equal where the data are, and only there."""

import collections
import decimal
import fractions

import hypothesis
from hypothesis import strategies as st
import pytest

from swe17.env import canonical


def test_text_of_each_kind_of_plain_data():
  point = collections.namedtuple('point', 'x y')
  ordered = collections.OrderedDict(a=1, b=2)
  ordered.move_to_end('a')

  def broken():
    yield 1
    raise KeyError

  rows = [
    (
      (None, True, 1, 1.0, -0.0, float('nan'), 1j),
      '(None, True, 1, 1.0, -0.0, nan, 1j,)',
    ),
    ('é\ud800', r"'\xe9\ud800'"),
    ({3, 1, 2}, 'set(1, 2, 3)'),
    (frozenset('ba'), "frozenset('a', 'b')"),
    ({2: 1, 1: 2}, '{(2, 1,), (1, 2,)}'),
    (ordered, "OrderedDict(('b', 2,), ('a', 1,))"),
    (point(1, [2]), "point('x', 'y')(1, [2])"),
    (fractions.Fraction(1, 3), 'Fraction(1, 3,)'),
    (decimal.Decimal('1.0'), "Decimal('1.0')"),
    (range(3), 'range(0, 3)'),
    (iter([1, 2]), 'iter[1, 2]'),
    ((x for x in 'ab'), "iter['a', 'b']"),
    (broken(), 'iter[1, raise KeyError]'),
    (bytearray(b'x'), "bytearray(b'x')"),
    (1 << 9000, hex(1 << 9000)),
  ]
  for value, want in rows:
    assert canonical.encode(value, 10_000) == want


def test_endless_iterator_is_cut_and_says_so():
  text = canonical.encode(iter(int, 1), 100_000)
  assert text.endswith(', ...]') and text.count('0') == canonical.ITEMS


PLAIN = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(), inner, max_size=3)
  ),
  max_leaves=8,
)


def identical(x, y) -> bool:
  """Equality that tells 1 from True, 0.0 from -0.0, and knows nan."""
  return repr(x) == repr(y)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(PLAIN, PLAIN)
def test_text_is_equal_exactly_where_data_are(x, y):
  same = canonical.encode(x, 10_000) == canonical.encode(y, 10_000)
  assert same == identical(x, y)


def test_subclasses_and_liars_are_unserialisable():
  class Text(str):
    def __repr__(self) -> str:
      return '1'

  class Liar:
    __class__ = int

  class Sneaky(list):
    pass

  for value in (Text('x'), Liar(), Sneaky(), object(), int, len, [Text('x')]):
    with pytest.raises(canonical.Unserialisable):
      canonical.encode(value, 1000)


def test_named_tuple_is_read_past_its_own_methods():
  class Point(collections.namedtuple('Point', 'x y')):
    def __iter__(self):
      return iter((7, 7))

    def __eq__(self, other):
      return True

    __hash__ = None

  assert canonical.encode(Point(1, 2), 1000) == "Point('x', 'y')(1, 2)"


def test_length_is_bounded():
  for value in ('x' * 2000, [[]] * 2000, [0] * 2000, {i: () for i in range(500)}):
    with pytest.raises(canonical.Unserialisable):
      canonical.encode(value, 1000)
  assert len(canonical.encode([[0]] * 20, 1000)) <= 1000
