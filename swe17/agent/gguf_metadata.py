"""The metadata at the head of a GGUF file, version 2 and 3, little endian.

  'GGUF' version u32, tensors u64, pairs u64, {key string, type u32, value} * pairs
  string = length u64, bytes;  array = type u32, length u64, values

Read here because a tokeniser needs nothing else of a file, and needs it in every
process: the head of a file of any size takes a fraction of a second.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import pathlib
import struct
from typing import Any, BinaryIO

_SCALARS = {0: 'B', 1: 'b', 2: 'H', 3: 'h', 4: 'I', 5: 'i', 6: 'f', 7: '?', 10: 'Q'}
_SCALARS |= {11: 'q', 12: 'd'}
_STRING, _ARRAY = 8, 9
_MOST = 1 << 26  # elements or bytes of one value: more says that this is no metadata


def read(path: pathlib.Path) -> dict[str, Any]:
  """All pairs: numbers, strings, and lists of them. ValueError if it is no GGUF."""
  with path.open('rb') as file:
    if file.read(4) != b'GGUF':
      raise ValueError(f'{path}: no GGUF file')
    version, _, pairs = _unpack(file, 'I'), _unpack(file, 'Q'), _unpack(file, 'Q')
    if version not in (2, 3):
      raise ValueError(f'{path}: got GGUF version {version}, want 2 or 3')
    try:
      return {_string(file): _value(file, _unpack(file, 'I')) for _ in range(pairs)}
    except (struct.error, KeyError, UnicodeDecodeError, OverflowError) as e:
      raise ValueError(f'{path}: its metadata are damaged or cut off ({e})') from e


def _unpack(file: BinaryIO, kind: str) -> Any:
  (value,) = struct.unpack(f'<{kind}', file.read(struct.calcsize(f'<{kind}')))
  return value


def _string(file: BinaryIO) -> str:
  return _bytes(file, _length(file)).decode()


def _length(file: BinaryIO) -> int:
  length = _unpack(file, 'Q')
  if length > _MOST:
    raise OverflowError(f'a length of {length}')
  return length


def _bytes(file: BinaryIO, size: int) -> bytes:
  data = file.read(size)
  if len(data) < size:
    raise struct.error('the file ends early')
  return data


def _value(file: BinaryIO, kind: int) -> Any:
  if kind == _STRING:
    return _string(file)
  if kind != _ARRAY:
    return _unpack(file, _SCALARS[kind])
  element, length = _unpack(file, 'I'), _length(file)
  if element in (_STRING, _ARRAY):
    return [_value(file, element) for _ in range(length)]
  code = f'<{length}{_SCALARS[element]}'
  return list(struct.unpack(code, _bytes(file, struct.calcsize(code))))
