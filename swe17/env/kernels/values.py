"""What a function returned, as bytes: made in the sandbox, read and compared outside.

  uint32 length, JSON, then the bytes of the arrays one after another

Types are told apart by identity, so that no object has a say in how it is written: one
that claims to equal everything, an array of a subclass, a value that would be computed
later, is `Unserialisable`. What is read is not trusted: `decode` refuses all that
`encode` does not write. A tuple is read as a list, a numpy scalar as a number.

This file runs inside the sandbox too and imports numpy and the standard library only.
"""

from collections.abc import Sequence
import json
import math
import struct
from typing import Any

import numpy as np

DEPTH = 8  # nesting
_KINDS = 'biufc'  # of arrays: bool, int, unsigned, float, complex
_PLAIN = frozenset((int, float, str, bool, type(None)))


class Unserialisable(Exception):
  """A value that is no number, text, array, or list, dict or set of them."""


def encode(value: object) -> bytes:
  """Bytes of a value. Unserialisable says what is wrong with it."""
  blobs: list[bytes] = []
  try:
    head = json.dumps(_tree(value, blobs, 0)).encode()
  except (ValueError, RecursionError) as e:  # an int of too many digits, a cycle
    raise Unserialisable(str(e)) from e
  return b''.join([struct.pack('>I', len(head)), head, *blobs])


def _tree(value: Any, blobs: list[bytes], depth: int) -> Any:
  kind = type(value)
  if kind in _PLAIN:
    return value
  if depth > DEPTH:
    raise Unserialisable('nested too deep')
  if kind is list or kind is tuple:
    if _PLAIN.issuperset(map(type, value)):
      return list(value)
    return [_tree(item, blobs, depth + 1) for item in value]
  if kind is dict:
    items = [[k, _tree(v, blobs, depth + 1)] for k, v in dict.items(value)]
    if not _PLAIN.issuperset(type(k) for k, _ in items):
      raise Unserialisable('a key that is no number or text')
    return {'d': items}
  if kind is set or kind is frozenset:
    if not _PLAIN.issuperset(map(type, value)):
      raise Unserialisable('a set of other things than numbers and text')
    return {'s': sorted(value, key=lambda item: (str(type(item)), item))}
  if kind is np.ndarray or np.generic in type.__dict__['__mro__'].__get__(kind)[1:]:
    array = np.asarray(value)
    if array.dtype.kind not in _KINDS:
      raise Unserialisable(f'an array of {array.dtype}')
    blobs.append(array.tobytes())
    scalar = kind is not np.ndarray
    return {'a': [array.dtype.str, list(array.shape), scalar]}
  raise Unserialisable(f'a {type.__dict__["__name__"].__get__(kind)}')


def decode(data: bytes) -> Any:
  """The value behind bytes that nobody vouches for. ValueError if there is none."""
  if len(data) < 4:
    raise ValueError(f'value: got {len(data)} bytes, want at least 4')
  size = struct.unpack_from('>I', data)[0]
  if 4 + size > len(data):
    raise ValueError(f'value: got {len(data) - 4} bytes, want a head of {size}')
  try:
    tree = json.loads(data[4 : 4 + size])
    value, end = _value(tree, data, 4 + size, 0)
  except (RecursionError, TypeError, KeyError) as e:
    raise ValueError(f'value: {type(e).__name__}') from e
  if end != len(data):
    raise ValueError(f'value: {len(data) - end} bytes are left over')
  return value


def _value(tree: Any, data: bytes, at: int, depth: int) -> tuple[Any, int]:
  """(value, end of the bytes that were used)."""
  if depth > DEPTH + 1:
    raise ValueError('value: nested too deep')
  if isinstance(tree, list):
    items = []
    for part in tree:
      item, at = (
        (part, at) if type(part) in _PLAIN else _value(part, data, at, depth + 1)
      )
      items.append(item)
    return items, at
  if not isinstance(tree, dict):
    return tree, at
  if 'a' in tree:
    dtype, shape, scalar = tree['a']
    return _array(dtype, shape, scalar, data, at)
  if 's' in tree:
    return set(tree['s']), at
  found = {}
  for key, part in tree['d']:
    found[key], at = _value(part, data, at, depth + 1)
  return found, at


def _array(
  dtype: str, shape: list[int], scalar: bool, data: bytes, at: int
) -> tuple[Any, int]:
  kind = np.dtype(dtype)
  if kind.kind not in _KINDS or not all(type(n) is int and n >= 0 for n in shape):
    raise ValueError(f'value: got an array of {dtype!r:.20}, {shape!r:.40}')
  end = at + kind.itemsize * math.prod(shape)
  if end > len(data):
    raise ValueError('value: an array is longer than its bytes')
  array = np.frombuffer(data[at:end], kind).reshape(shape)
  return (array.item() if scalar else array), end


def differs(want: Any, got: Any, rtol: float) -> str:
  """Why `got` is not what is wanted, a few words; '' if it is.

  Integers, truth values and text must be equal, floats and complex numbers within
  `rtol` of the larger of the wanted one and 1e-3 of the largest wanted in its array.
  """
  if isinstance(want, np.ndarray):
    return _differ(want, got, rtol)
  if isinstance(want, list):
    if not isinstance(got, list) or len(got) != len(want):
      return f'want a list of {len(want)}'
    return _first(zip(want, got, strict=True), rtol)
  if isinstance(want, dict):
    if not isinstance(got, dict) or got.keys() != want.keys():
      return 'other keys'
    return _first(((value, got[key]) for key, value in want.items()), rtol)
  if type(want) is not type(got):
    return f'want {type(want).__name__}, got {type(got).__name__}'
  if isinstance(want, float | complex):
    return _differ(np.array(want), np.array(got), rtol)
  return '' if want == got else 'other values'


def _first(pairs: Any, rtol: float) -> str:
  for want, got in pairs:
    if reason := differs(want, got, rtol):
      return reason
  return ''


def _differ(want: np.ndarray, got: Any, rtol: float) -> str:
  if not isinstance(got, np.ndarray):
    return f'want an array, got {type(got).__name__}'
  if got.shape != want.shape:
    return f'want shape {_shape(want.shape)}, got {_shape(got.shape)}'
  if got.dtype != want.dtype:
    return f'want {want.dtype}, got {got.dtype}'
  if want.dtype.kind not in 'fc':
    return '' if np.array_equal(want, got) else 'other values'
  finite = np.abs(want[np.isfinite(want)])
  atol = rtol * 1e-3 * float(finite.max()) if finite.size else 0.0
  same = np.allclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
  return '' if same else 'other values'


def _shape(shape: Sequence[int]) -> str:
  return 'x'.join(map(str, shape)) or 'none'
