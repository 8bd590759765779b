"""What a candidate may not be, found by reading it: each rule has a name.

  copies_reference   a function of it is the reference under other names
  try_except         it catches what goes wrong, to fall back on something else
  stub               it returns a constant, raises or does nothing, whatever it is given
  reaches_out        it imports, opens, evaluates or looks into frames and modules
  timer              it looks at a clock
  patches            it changes a module that it imported
  disguised          a class that compares, or stands in for an array or a number

A candidate that breaks one scores nothing, whatever it computes (Kevin,
arXiv:2507.11948, for the first three). What these miss still runs where there is
nothing to gain: no expected value, no clock, no file and no network is in the sandbox.
"""

import ast
from collections.abc import Iterator
import functools

RULES = ('reaches_out', 'timer', 'patches', 'disguised', 'try_except', 'stub')
RULES += ('copies_reference',)
CHEATS = frozenset(RULES) - {'copies_reference', 'stub'}  # not just poor work

_MODULES = frozenset(
  ('numpy', 'math', 'cmath', 'itertools', 'functools', 'operator', 'collections')
  + ('bisect', 'heapq', 'string', 're', 'statistics', 'array', 'fractions', 'typing')
  + ('numpy.fft', 'numpy.linalg', 'numpy.polynomial', 'numpy.lib.stride_tricks')
  + ('collections.abc', '__future__')
)
_CLOCKS = frozenset(
  ('time', 'timeit', 'datetime', 'perf_counter', 'process_time', 'monotonic')
)
_NAMES = frozenset(
  ('__import__', 'importlib', 'eval', 'exec', 'compile', 'open', 'globals', 'locals')
  + ('vars', 'sys', 'os', 'builtins', 'inspect', 'gc', 'ctypes', 'getattr', 'setattr')
  + ('delattr', 'breakpoint', 'input', '__builtins__', '__loader__', '__spec__')
)
_ATTRIBUTES = frozenset(
  ('sys', 'os', 'builtins', 'ctypes', 'ctypeslib', 'f2py', 'testing', 'load', 'save')
  + ('savez', 'savez_compressed', 'savetxt', 'loadtxt', 'genfromtxt', 'fromfile')
  + ('tofile', 'memmap', 'dump', 'dumps', 'DataSource', 'fromregex', 'open_memmap')
  + ('gi_frame', 'cr_frame', 'ag_frame', 'tb_frame', 'f_back', 'f_globals', 'f_locals')
)
_COMPARES = frozenset(
  ('__eq__', '__ne__', '__lt__', '__gt__', '__le__', '__ge__', '__bool__', '__class__')
  + ('__array__', '__array_ufunc__', '__array_interface__', '__reduce__', '__float__')
  + ('__getattribute__', '__getattr__', '__instancecheck__', '__init_subclass__')
)
_BASES = frozenset(('ndarray', 'generic', 'int', 'float', 'list', 'dict', 'tuple'))


def broken(
  source: str, reference: str, function: str, allowed: frozenset[str] = frozenset()
) -> str:
  """The first rule that a candidate breaks, '' if none.

  `allowed` are modules that it may import beside the usual ones.
  SyntaxError, ValueError, RecursionError or MemoryError: it does not parse.
  """
  tree = ast.parse(source)
  compile(tree, '<kernel>', 'exec', dont_inherit=True)  # `return` outside and the like
  given, shape = _of_reference(reference, function, allowed)
  found = set(_found(tree, allowed)) - given
  functions = _functions(tree)
  if function in functions and _stub(functions[function]):
    found.add('stub')
  if any(_shape(each) == shape for each in functions.values()):
    found.add('copies_reference')
  return next((rule for rule in RULES if rule in found), '')


@functools.lru_cache(maxsize=1024)
def _of_reference(
  reference: str, function: str, allowed: frozenset[str]
) -> tuple[frozenset[str], str]:
  """(rules that the reference breaks itself, its shape)."""
  tree = ast.parse(reference)
  return frozenset(_found(tree, allowed)), _shape(_functions(tree)[function])


def _functions(tree: ast.AST) -> dict[str, ast.FunctionDef]:
  return {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def _found(tree: ast.AST, allowed: frozenset[str]) -> Iterator[str]:
  """Rules that single nodes break."""
  modules = set(_bound(tree))
  for node in ast.walk(tree):
    match node:
      case ast.Import():
        yield from (_import(alias.name, allowed) for alias in node.names)
      case ast.ImportFrom():
        yield _import(node.module or '', allowed) if not node.level else 'reaches_out'
        yield from ('timer' for a in node.names if a.name in _CLOCKS)
        yield from ('reaches_out' for a in node.names if _hidden(a.name))
      case ast.Name():
        yield 'timer' if node.id in _CLOCKS else ''
        yield 'reaches_out' if node.id in _NAMES else ''
      case ast.Attribute():
        yield 'timer' if node.attr in _CLOCKS else ''
        yield 'reaches_out' if _hidden(node.attr) else ''
        changes = isinstance(node.ctx, ast.Store | ast.Del)
        yield 'patches' if changes and _root(node) in modules else ''
      case ast.Try() | ast.TryStar():
        yield 'try_except'
      case ast.ClassDef():
        names = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & _COMPARES
        bases = {ast.unparse(base).rpartition('.')[2] for base in node.bases}
        yield 'disguised' if names & _COMPARES or bases & _BASES else ''


def _import(name: str, allowed: frozenset[str]) -> str:
  if name in _CLOCKS:
    return 'timer'
  known = name in _MODULES or name.partition('.')[0] in allowed
  return '' if known else 'reaches_out'


def _hidden(name: str) -> bool:
  if name == '__init__':  # of a class's own base
    return False
  return name.startswith('_') or name in _ATTRIBUTES or name in _NAMES


def _bound(tree: ast.AST) -> Iterator[str]:
  """Names that stand for modules, or for what is in them."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      for alias in node.names:
        yield alias.asname or alias.name.partition('.')[0]


def _root(node: ast.expr) -> str:
  while isinstance(node, ast.Attribute | ast.Subscript):
    node = node.value
  return node.id if isinstance(node, ast.Name) else ''


def _stub(function: ast.FunctionDef) -> bool:
  """Whether nothing of what it is given has a part in what it does."""
  arguments = function.args
  every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
  names = {a.arg for a in [*every, arguments.vararg, arguments.kwarg] if a is not None}
  used = {
    node.id
    for statement in function.body
    for node in ast.walk(statement)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
  }
  return bool(names) and not names & used


def _shape(function: ast.FunctionDef) -> str:
  """A function without its names, annotations and docstring."""
  body = function.body
  first = body[0]
  if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
    body = body[1:]
  order = {a.arg: f'v{i}' for i, a in enumerate(function.args.args)}
  parts: list[str] = []
  for statement in body:
    _tell(statement, order, parts)
  return ' '.join(parts)


def _tell(node: ast.AST, order: dict[str, str], parts: list[str]) -> None:
  """Writes a node down: names that are stored are numbered as they come."""
  if isinstance(node, ast.Name):
    if isinstance(node.ctx, ast.Store):
      order.setdefault(node.id, f'v{len(order)}')
    parts.append(order.get(node.id, node.id))
    return
  annotated = isinstance(node, ast.AnnAssign)
  if isinstance(node, ast.AnnAssign) and node.value is None:
    return
  parts.append('Assign' if annotated else type(node).__name__)
  for field in node._fields:
    value = getattr(node, field)
    if field in ('ctx', 'annotation', 'type_comment', 'returns', 'simple', 'kind'):
      continue
    for item in value if isinstance(value, list) else (value,):
      if isinstance(item, ast.AST):
        _tell(item, order, parts)
      elif item is not None:
        parts.append(repr(item))
  parts.append(';')
