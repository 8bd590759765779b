"""Comparisons in tests that an object which equals everything does not pass.

Who returns such an object makes `assert f(x) == 3` true without computing anything. So
in test modules every comparison that an assert rests on (==, in, and unittest's methods
for them) also asks both sides whether they equal an object that nobody knows: then it
is false. Elsewhere, tests run as they are written.

  assert a == b   ->   assert __same__(a, b)     assert a in b -> assert __held__(a, b)

This file runs inside the sandbox and imports the standard library only.
"""

import ast
from collections.abc import Callable, Sequence
import importlib.abc
import importlib.machinery
import sys
from typing import Any

_MOST, _DEPTH = 200, 6  # values of a container that are asked
_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), type, range})
_CONTAINERS = (list, tuple, set, frozenset)
_METHODS = ('assertEqual', 'assertIn', 'assertCountEqual', 'assertAlmostEqual')
_METHODS += ('assertListEqual', 'assertDictEqual', 'assertTupleEqual', 'assertSetEqual')


class _Nobody:
  """Equal to itself only, and leaves the answer to the other side."""

  __hash__ = object.__hash__

  def __eq__(self, other: object) -> Any:
    return NotImplemented


def equals_all(value: Any, depth: int = _DEPTH) -> bool:
  """Whether a value, or one inside it, claims to equal what it cannot know."""
  kind = type(value)
  if kind in _PLAIN:
    return False
  if kind in _CONTAINERS or kind is dict:
    if depth == 0:
      return False
    inner = [*value, *value.values()] if kind is dict else [*value]
    return any(equals_all(each, depth - 1) for each in inner[:_MOST])
  try:
    return bool(value == _Nobody())
  except Exception:  # a comparison may raise anything, and then it does not pass as one
    return False


def same(one: Any, two: Any) -> Any:
  """What `one == two` gives; False where a side equals everything."""
  result = one == two
  return result and not (equals_all(one) or equals_all(two)) and result


def held(one: Any, two: Any) -> Any:
  """What `one in two` gives; False where `one`, or what `two` holds, does so."""
  return one in two and not (equals_all(one) or equals_all(two))


class _Rewrite(ast.NodeTransformer):
  """Puts `__same__` and `__held__` where asserts compare."""

  def visit_Assert(self, node: ast.Assert) -> ast.Assert:
    node.test = self._truth(node.test)
    return node

  def _truth(self, node: ast.expr) -> ast.expr:
    """An expression of which only the truth matters."""
    match node:
      case ast.BoolOp():
        node.values = [self._truth(value) for value in node.values]
      case ast.Compare(left=left, ops=[ast.Eq() | ast.In() as op], comparators=[right]):
        name = '__same__' if isinstance(op, ast.Eq) else '__held__'
        call = ast.Call(ast.Name(name, ast.Load()), [left, right], [])
        return ast.copy_location(call, node)
    return node


class _Loader(importlib.machinery.SourceFileLoader):
  """Loads a test module with its comparisons rewritten."""

  def source_to_code(self, data: Any, path: Any, **options: Any) -> Any:
    tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(data)))
    return compile(tree, path, 'exec', dont_inherit=True)

  def exec_module(self, module: Any) -> None:
    module.__dict__.update(__same__=same, __held__=held)
    super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
  def __init__(self, files: Sequence[str]):
    self._files = frozenset(files)

  def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
    spec = importlib.machinery.PathFinder.find_spec(name, path, target)
    if spec is None or spec.origin not in self._files:
      return None
    spec.loader = _Loader(name, spec.origin)
    return spec


def install(files: Sequence[str]) -> None:
  """Guards test modules of these paths, and unittest, from now on."""
  sys.meta_path.insert(0, _Finder(files))
  import unittest

  for name in _METHODS:
    setattr(unittest.TestCase, name, _asked(getattr(unittest.TestCase, name)))


def _asked(method: Callable[..., None]) -> Callable[..., None]:
  def guarded(self: Any, one: Any, two: Any, *more: Any, **named: Any) -> None:
    method(self, one, two, *more, **named)
    if equals_all(one) or equals_all(two):
      raise AssertionError('a value that equals everything')

  guarded.__name__ = method.__name__
  return guarded
