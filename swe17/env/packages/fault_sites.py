"""Where a fault may sit in a module: edits of its text, by kind and function.

  operator    + -, * //, == !=, in / not in, is / is not, and / or
  boundary    < <=, > >=, n -> n + 1 or n - 1
  arguments   two neighbouring positional arguments of a call change places
  branch      an if with its body is gone, or only its else is left
  default     another default of a parameter: True False, n + 1, '' for a text
  removed     a function's body is gone
  reverted    if c -> if not c; a or b's order; return of a condition turned round

Offsets are in bytes, as syntax trees count columns.
"""

import ast
from collections.abc import Iterator
import dataclasses
import itertools
import re

KINDS = (
  'operator',
  'boundary',
  'arguments',
  'branch',
  'default',
  'removed',
  'reverted',
)
_SWAPS: dict[type[ast.AST], tuple[bytes, bytes, str]] = {
  ast.Add: (b'+', b'-', 'operator'),
  ast.Sub: (b'-', b'+', 'operator'),
  ast.Mult: (b'*', b'//', 'operator'),
  ast.FloorDiv: (b'//', b'*', 'operator'),
  ast.Mod: (b'%', b'//', 'operator'),
  ast.BitAnd: (b'&', b'|', 'operator'),
  ast.BitOr: (b'|', b'&', 'operator'),
  ast.And: (b'and', b'or', 'operator'),
  ast.Or: (b'or', b'and', 'operator'),
  ast.Eq: (b'==', b'!=', 'operator'),
  ast.NotEq: (b'!=', b'==', 'operator'),
  ast.In: (b'in', b'not in', 'operator'),
  ast.NotIn: (b'not in', b'in', 'operator'),
  ast.Is: (b'is', b'is not', 'operator'),
  ast.IsNot: (b'is not', b'is', 'operator'),
  ast.Lt: (b'<', b'<=', 'boundary'),
  ast.LtE: (b'<=', b'<', 'boundary'),
  ast.Gt: (b'>', b'>=', 'boundary'),
  ast.GtE: (b'>=', b'>', 'boundary'),
}
_MOST_LINES = 14  # of what is dropped or removed
_LARGEST = 99  # integer that is a bound rather than a code
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Site:
  """Bytes [start, end) of a module to be replaced."""

  kind: str
  start: int
  end: int
  new: bytes
  function: str  # dotted name in its module
  line: int  # where its code begins, decorators included


class _Module:
  """A module's bytes and where its lines begin."""

  def __init__(self, data: bytes):
    self.data = data
    self.starts = [0, *(m.end() for m in re.finditer(rb'\r\n|\n|\r', data))]

  def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    first = self.starts[node.lineno - 1] + node.col_offset
    return first, self.starts[node.end_lineno - 1] + node.end_col_offset

  def text(self, node: ast.expr | ast.stmt) -> bytes:
    start, end = self.span(node)
    return self.data[start:end]


def find(data: bytes) -> list[Site]:
  """All sites of a module, in order; [] for one that does not parse."""
  try:
    tree = ast.parse(data)
  except (SyntaxError, ValueError):
    return []
  module = _Module(data)
  if len(module.starts) < data.count(b'\n'):
    return []
  found = [
    dataclasses.replace(site, function=name, line=line)
    for name, line, function in functions(tree, '')
    for site in _of_function(module, function)
  ]
  return sorted(set(found), key=lambda s: (s.start, s.end, s.kind, s.new))


def functions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int, Function]]:
  """(dotted name, first line, node) of functions, those inside others included."""
  for node in ast.iter_child_nodes(parent):
    if isinstance(node, Function):
      first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
      yield prefix + node.name, first, node
      yield from functions(node, f'{prefix}{node.name}.')
    elif isinstance(node, ast.ClassDef):
      yield from functions(node, f'{prefix}{node.name}.')
    elif not isinstance(node, ast.expr):
      yield from functions(node, prefix)


def _of_function(module: _Module, function: Function) -> Iterator[Site]:
  yield from _defaults(module, function)
  yield from _removed(module, function)
  waiting: list[ast.AST] = list(_body(function))
  while waiting:
    node = waiting.pop()
    if isinstance(node, Function | ast.ClassDef | ast.JoinedStr):
      continue  # they have sites of their own, or columns that count otherwise
    yield from _of_node(module, node)
    waiting += ast.iter_child_nodes(node)


def _body(function: Function) -> list[ast.stmt]:
  """Its statements without the docstring."""
  has = ast.get_docstring(function, clean=False) is not None
  return function.body[1:] if has else function.body


def _of_node(module: _Module, node: ast.AST) -> Iterator[Site]:
  match node:
    case ast.BinOp(left=left, op=op, right=right):
      yield from _between(module, left, op, right)
    case ast.BoolOp(op=op, values=values):
      yield from _between(module, values[0], op, values[1])
    case ast.Compare(left=left, ops=ops, comparators=rights):
      for a, op, b in zip([left, *rights], ops, rights, strict=False):
        yield from _between(module, a, op, b)
    case ast.AugAssign(target=target, op=op, value=value):
      yield from _between(module, target, op, value)
    case ast.Constant(value=int() as n) if type(n) is int and 0 <= n <= _LARGEST:
      if module.text(node).isdigit():
        yield from (_site('boundary', module, node, str(m)) for m in _near(n))
    case ast.Call(args=args):
      yield from _arguments(module, args)
    case ast.If():
      yield from _branch(module, node)
      yield _negated(module, node.test)
    case ast.IfExp(test=test) | ast.While(test=test):
      yield _negated(module, test)
    case ast.Return(value=ast.Compare() | ast.BoolOp() as value):
      yield _negated(module, value)


def _site(kind: str, module: _Module, node: ast.expr | ast.stmt, new: str) -> Site:
  start, end = module.span(node)
  return Site(kind, start, end, new.encode(), '', 0)


def _near(n: int) -> tuple[int, ...]:
  return (n + 1, n - 1) if n > 0 else (1,)


def _negated(module: _Module, test: ast.expr) -> Site:
  start, end = module.span(test)
  if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
    return Site('reverted', start, end, module.text(test.operand), '', 0)
  return Site('reverted', start, end, b'not (' + module.text(test) + b')', '', 0)


def _between(
  module: _Module, left: ast.expr, op: ast.AST, right: ast.expr
) -> Iterator[Site]:
  """The operator between two operands, once brackets and comments are no question."""
  swap = _SWAPS.get(type(op))
  if swap is None:
    return
  old, new, kind = swap
  start, end = module.span(left)[1], module.span(right)[0]
  middle = module.data[start:end]
  found = re.fullmatch(rb'[\s)]*(' + re.escape(old) + rb'=?)[\s(]*', middle)
  if found is None:
    return
  at = start + found.start(1)
  yield Site(kind, at, at + len(old), new, '', 0)


def _arguments(module: _Module, arguments: list[ast.expr]) -> Iterator[Site]:
  for a, b in itertools.pairwise(arguments):
    starred = isinstance(a, ast.Starred) or isinstance(b, ast.Starred)
    one, two = module.text(a), module.text(b)
    if starred or one == two or b'\n' in one + two:
      continue
    start, end = module.span(a)[0], module.span(b)[1]
    middle = module.data[module.span(a)[1] : module.span(b)[0]]
    yield Site('arguments', start, end, two + middle + one, '', 0)


def _branch(module: _Module, node: ast.If) -> Iterator[Site]:
  start, end = module.span(node)
  if module.data[start : start + 2] != b'if':  # an elif: its if is dropped with it
    return
  if module.data[start:end].count(b'\n') >= _MOST_LINES:
    return
  if not node.orelse:
    yield Site('branch', start, end, b'pass', '', 0)
  elif not (len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If)):
    first, _ = module.span(node.body[0])
    last = module.span(node.body[-1])[1]
    yield Site('branch', first, last, b'pass', '', 0)


def _defaults(module: _Module, function: Function) -> Iterator[Site]:
  given = function.args
  for default in (*given.defaults, *given.kw_defaults):
    if not isinstance(default, ast.Constant):
      continue
    match default.value:
      case bool():
        yield _site('default', module, default, str(not default.value))
      case int() if default.value >= 0:
        yield _site('default', module, default, str(default.value + 1))
      case str() if default.value:
        yield _site('default', module, default, "''")


def _removed(module: _Module, function: Function) -> Iterator[Site]:
  body = _body(function)
  if not body or isinstance(body[0], ast.Raise | ast.Pass):
    return
  start, end = module.span(body[0])[0], module.span(body[-1])[1]
  trivial = len(body) == 1 and len(ast.dump(body[0])) < 80
  if not trivial and module.data[start:end].count(b'\n') < _MOST_LINES:
    yield Site('removed', start, end, b'raise NotImplementedError', '', 0)
