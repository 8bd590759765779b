"""Plain data as text: equal data give equal text, and nothing else can pass for it.

The text is made inside the sandbox and compared outside. Types are told apart by
identity (`type(x) is list`), never by a method of the value, so an object that claims
to equal everything, or a `str` with a `__repr__` of its own, is `Unserialisable`.
Iterators are run and told by what they yield.

This file runs inside the sandbox and imports the standard library only.
"""

import array
import collections
from collections.abc import Callable, Iterable
import datetime
import decimal
import fractions
import itertools
import re
from typing import Any

ITEMS = 1000  # items read from an iterator
DEPTH = 60  # nesting; a cycle ends here

_SINGLETONS = (type(None), bool, type(Ellipsis), type(NotImplemented))
_BY_REPR = (
  float,
  complex,
  bytes,
  bytearray,
  range,
  decimal.Decimal,
  datetime.date,
  datetime.timedelta,
)
_SEQUENCES = {list: '[{}]', tuple: '({},)', collections.deque: 'deque([{}])'}
_SETS = {set: 'set({})', frozenset: 'frozenset({})'}
_MAPPINGS = {
  dict: '{{{}}}',
  collections.OrderedDict: 'OrderedDict({})',
  collections.defaultdict: 'defaultdict({})',
  collections.Counter: 'Counter({})',
}
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_ITERATORS = (
  type(x for x in ()),
  map,
  filter,
  zip,
  enumerate,
  reversed,
  type(iter([])),
  type(iter(())),
  type(iter('')),
  type(iter('é')),
  type(iter(b'')),
  type(iter({})),
  type(iter({}.values())),
  type(iter({}.items())),
  type(iter(set())),
  type(iter(range(0))),
  type(iter(range(1 << 70))),
  type(reversed([])),
  type(reversed({})),
  type(iter(int, 0)),
  type(iter(collections.deque())),
  type(re.finditer('', '')),
  *(t for t in vars(itertools).values() if type(t) is type and hasattr(t, '__next__')),
)


class Unserialisable(Exception):
  """A value that is not plain data, is nested too deep, or is too large."""


def encode(value: object, limit: int) -> str:
  """Return the text of `value`, at most `limit` characters, or raise Unserialisable.

  Running an iterator runs code under test: what it raises becomes part of the text.
  """
  spent = 0

  def spend(text: str) -> str:
    nonlocal spent
    spent += len(text) + 2  # and a separator
    if spent > limit:
      raise Unserialisable('too large')
    return text

  return _encode(value, spend, 0)


def name_of(error: BaseException) -> str:
  """Return the exception's type name, whatever its metaclass says of it."""
  name = type.__dict__['__name__'].__get__(type(error))
  plain = type(name) is str and name.isascii() and name.isidentifier()
  return name if plain else 'Exception'


def _encode(value: Any, spend: Callable[[str], str], depth: int) -> str:
  if depth > DEPTH:
    raise Unserialisable('nested too deep')
  kind = type(value)
  if kind is int:
    # Beyond a few thousand digits decimal is slow, and refused by the interpreter.
    return spend(int.__repr__(value) if value.bit_length() < 8192 else hex(value))
  if kind is str:
    return spend(ascii(value))
  if kind in _SINGLETONS or kind in _BY_REPR:
    return spend(repr(value))
  spend('OrderedDict({})')  # the longest dressing; empty containers count too
  inner = depth + 1
  if kind in _SEQUENCES:
    return _SEQUENCES[kind].format(_join(value, spend, inner))
  if kind in _MAPPINGS:
    return _MAPPINGS[kind].format(_join(kind.items(value), spend, inner))
  if kind in _SETS:
    return _SETS[kind].format(
      ', '.join(sorted(_encode(v, spend, inner) for v in value))
    )
  if kind in _ITERATORS:
    return f'iter[{_run(value, spend, inner)}]'
  if kind in _VIEWS:
    return f'{kind.__name__}[{_join(value, spend, inner)}]'
  return _encode_rare(value, kind, spend, inner)


def _encode_rare(
  value: Any, kind: type, spend: Callable[[str], str], depth: int
) -> str:
  if kind is fractions.Fraction:
    parts = (value._numerator, value._denominator)
    return 'Fraction' + _encode(parts, spend, depth)
  if kind is array.array:
    return f'array({value.typecode}[{_join(value, spend, depth)}])'
  if kind is slice:
    parts = (value.start, value.stop, value.step)
    return 'slice' + _encode(parts, spend, depth)
  if kind is memoryview:
    return 'memoryview' + _encode(value.tobytes(), spend, depth)
  if kind is datetime.timezone:
    return spend(repr(value))
  if kind is datetime.datetime or kind is datetime.time:
    # repr() would call a foreign tzinfo's own.
    zone = _encode(value.tzinfo, spend, depth)
    return spend(repr(value.replace(tzinfo=None))) + zone
  if kind is re.Match:
    parts = (value.re.pattern, value.string, value.regs)
    return 'Match' + _encode(parts, spend, depth)
  fields = _fields(kind)
  if fields is not None:
    body = _join(tuple.__iter__(value), spend, depth)
    return spend(name_of_type(kind) + repr(fields)) + f'({body})'
  raise Unserialisable(f'a {name_of_type(kind)} is not plain data')


def name_of_type(kind: type) -> str:
  """Return a type's name, whatever its metaclass says of it."""
  name = type.__dict__['__name__'].__get__(kind)
  return name if type(name) is str else '?'


def _fields(kind: type) -> tuple[str, ...] | None:
  """A named tuple's fields, None for any other type. Its values are read as a tuple's,
  so no method of the subclass has a say."""
  mro = type.__dict__['__mro__'].__get__(kind)
  if tuple not in mro:
    return None
  for base in mro:
    fields = type.__dict__['__dict__'].__get__(base).get('_fields')
    if type(fields) is tuple and all(type(name) is str for name in fields):
      return fields
  return None


def _join(values: Iterable, spend: Callable[[str], str], depth: int) -> str:
  return ', '.join(_encode(value, spend, depth) for value in values)


def _run(values: Iterable, spend: Callable[[str], str], depth: int) -> str:
  """The items of an iterator, then how it ended: '...' if it went on, or raised."""
  items = []
  try:
    for value in itertools.islice(values, ITEMS):
      items.append(_encode(value, spend, depth))
  except (Unserialisable, MemoryError):
    raise
  except BaseException as error:
    # Whatever the code under test raises is its answer.
    items.append(f'raise {name_of(error)}')
  else:
    if len(items) == ITEMS:
      items.append('...')
  return ', '.join(items)
