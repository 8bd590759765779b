"""What a function returned, as bytes: told by type, read without trust, compared."""

import numpy as np
import pytest

from swe17.env.kernels import values


def again(value):
  return values.decode(values.encode(value))


@pytest.mark.parametrize(
  'value',
  [
    *(0, -(1 << 80), 1.5, float('inf'), True, None, 'a\ud800"\n', '', [], {}, set()),
    [1, [2.5, 'x', [True]], {'k': [1, 2], 3: None}],
    {1, 2, 3},
  ],
)
def test_plain_values_come_back_as_they_were(value):
  got = again(value)
  assert got == value and type(got) is type(value)


def test_arrays_keep_dtype_shape_and_bytes():
  for array in (
    np.arange(6.0).reshape(2, 3).T,
    np.zeros((0, 4), np.int32),
    np.array([True, False]),
    np.array(2 + 1j),
  ):
    got = again([array, 1])[0]
    assert got.dtype == array.dtype and got.shape == array.shape
    assert np.array_equal(got, array)


def test_a_numpy_scalar_is_a_number_and_a_tuple_a_list():
  assert again((np.float64(1.5), np.int32(3), np.bool_(True))) == [1.5, 3, True]


class Equal:
  def __eq__(self, other):
    return True

  __hash__ = object.__hash__


class Lazy(np.ndarray):
  pass


class Sub(float):
  pass


@pytest.mark.parametrize(
  'value',
  [
    *(Equal(), [Equal()], {1: Equal()}, {Equal: 1}, Sub(1.0), iter([1]), lambda: 1),
    *(np.zeros(3).view(Lazy), np.array([object()]), np.array(['text']), b'x'),
  ],
)
def test_what_is_no_plain_value_is_refused(value):
  with pytest.raises(values.Unserialisable):
    values.encode(value)


def test_a_cycle_is_refused():
  cycle: list = [1]
  cycle.append(cycle)
  with pytest.raises(values.Unserialisable):
    values.encode(cycle)


def test_bytes_that_encode_never_writes_are_refused():
  whole = values.encode([np.arange(4), 'x'])
  for bad in (b'', b'\0\0', whole[:-1], whole + b'x', b'\xff' * 9, whole[:4] + b'{}'):
    with pytest.raises(ValueError):
      values.decode(bad)
  for head in (b'{"a":["O",[1],false]}', b'{"a":["<f8",[-1],false]}', b'{"q":1}'):
    with pytest.raises(ValueError):
      values.decode(len(head).to_bytes(4, 'big') + head + bytes(8))
  deep = b'[[' * 40 + b']]' * 40
  with pytest.raises(ValueError):
    values.decode(len(deep).to_bytes(4, 'big') + deep)


def test_integers_must_be_equal_and_floats_near():
  x = np.array([1.0, 1e-9, np.nan, np.inf])
  assert values.differs(x, x * (1 + 1e-12), 1e-9) == ''
  assert values.differs(x, x * (1 + 1e-6), 1e-9)
  assert values.differs(np.array([1, 2]), np.array([1, 3]), 1e-2)
  assert values.differs(1, 1.0, 1.0) and values.differs(1, True, 1.0)
  assert values.differs(float('nan'), float('nan'), 1e-9) == ''


def test_another_shape_dtype_length_or_key_differs():
  x = np.zeros((2, 3))
  assert values.differs(x, x.T, 1.0) == 'want shape 2x3, got 3x2'
  assert values.differs(x, x.astype(np.float32), 1.0) == 'want float64, got float32'
  assert values.differs(x, x.tolist(), 1.0) == 'want an array, got list'
  assert values.differs([1], [1, 1], 1.0) == 'want a list of 1'
  assert values.differs({1: 1}, {2: 1}, 1.0) == 'other keys'
