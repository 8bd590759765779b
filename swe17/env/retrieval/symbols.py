"""An index of a tree's Python files: what is defined where, who calls what.

Names are resolved only where there is no doubt. A name that is defined twice, bound to
something else as well, or could be an attribute of a common built-in type is not
`sure`, and no question is asked about it: an answer that misses a caller would punish
who finds it.

What owns a statement is the outermost function or the method around it; functions
within functions belong to that one. Ranges are lines, decorators included.
"""

import ast
import builtins
import collections
from collections.abc import Iterator
import dataclasses
import functools
import io
import logging
import pathlib
import re
import socket
import threading
import unittest

from swe17.env.retrieval import trees

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ('body', 'orelse', 'finalbody', 'handlers', 'cases')
_EMPTY = frozenset({ast.Constant, ast.Load, ast.Store, ast.Del, ast.Pass, ast.Break})
_HOPS = 6  # re-exports followed
_WORD = re.compile(r'\w+')
_COMMON_TYPES = (
  *(str, bytes, bytearray, list, dict, set, tuple, int, float, complex, object, type),
  *(io.TextIOWrapper, io.BytesIO, io.StringIO, re.Pattern, re.Match, pathlib.Path),
  *(logging.Logger, logging.Handler, threading.Thread, threading.Condition),
  *(collections.OrderedDict, collections.deque, collections.Counter, socket.socket),
  *(unittest.TestCase, Exception, property, ast.NodeVisitor),
)


@functools.cache
def common() -> frozenset[str]:
  """Names that a built-in function, or an attribute of a common type, has."""
  names = set(dir(builtins))
  for kind in _COMMON_TYPES:
    names |= set(dir(kind))
  return frozenset(names)


@dataclasses.dataclass(frozen=True)
class Def:
  """A function, method or class that is not inside a function."""

  path: str
  name: str  # 'f', 'C', 'C.m'
  kind: str  # 'function' | 'method' | 'class'
  first: int
  last: int
  defaults: tuple[tuple[str, str], ...]  # (parameter, name that is its default)
  bases: tuple[str, ...] = ()  # last parts of a class's bases
  plain: bool = True  # no property: it is called to be used

  @property
  def leaf(self) -> str:
    return self.name.rpartition('.')[2]

  @property
  def holder(self) -> str:
    """The class of a method."""
    return self.name.rpartition('.')[0].rpartition('.')[2]


@dataclasses.dataclass(frozen=True)
class Use:
  """A call, or an exception that is raised."""

  path: str
  line: int
  owner: Def | None  # None: at the level of a module or class
  name: str  # the last part of what is called
  receiver: str  # 'x' of `x.f()`; '' of `f()`; '?' of anything longer
  raised: bool = False


@dataclasses.dataclass
class Index:
  """All of a tree."""

  tree: trees.Tree
  defs: list[Def]
  uses: list[Use]
  bound: collections.Counter[str]  # names bound to anything but a `Def`
  imports: dict[str, dict[str, tuple[str, str]]]  # path -> name -> (path, name)
  constants: dict[tuple[str, str], list[tuple[int, int]]]  # (path, name) -> ranges

  @functools.cached_property
  def by_leaf(self) -> dict[str, list[Def]]:
    found: dict[str, list[Def]] = {}
    for definition in self.defs:
      found.setdefault(definition.leaf, []).append(definition)
    return found

  @functools.cached_property
  def by_place(self) -> dict[tuple[str, str], list[Def]]:
    found: dict[tuple[str, str], list[Def]] = {}
    for definition in self.defs:
      found.setdefault((definition.path, definition.name), []).append(definition)
    return found

  @functools.cached_property
  def by_owner(self) -> dict[Def | None, list[Use]]:
    found: dict[Def | None, list[Use]] = {}
    for use in self.uses:
      found.setdefault(use.owner, []).append(use)
    return found

  @functools.cached_property
  def by_name(self) -> dict[str, list[Use]]:
    found: dict[str, list[Use]] = {}
    for use in self.uses:
      found.setdefault(use.name, []).append(use)
    return found

  def text(self, definition: Def) -> str:
    """The lines of a definition."""
    lines = self.tree.lines[definition.path]
    return '\n'.join(lines[definition.first - 1 : definition.last])

  @functools.cached_property
  def words(self) -> dict[Def, frozenset[str]]:
    """Every word in the text of a definition, comments included."""
    return {d: frozenset(_WORD.findall(self.text(d))) for d in self.defs}

  def sure(self, definition: Def) -> bool:
    """Whether every call by its name is a call of it, and none is by another name."""
    leaf = definition.leaf
    alone = len(self.by_leaf[leaf]) == 1 and not self.bound[leaf]
    if not alone or leaf in common() or leaf.startswith('__') or not definition.plain:
      return False
    for use in self.by_name.get(leaf, ()):
      if definition.kind == 'method' and not use.receiver:
        return False
      modules = self.imports.get(use.path, {})
      if definition.kind != 'method' and use.receiver and use.receiver not in modules:
        return False
    return True

  def callers(self, definition: Def) -> list[Def]:
    """Functions and methods that call a `sure` definition, itself left out."""
    uses = self.by_name.get(definition.leaf, ())
    found = {u.owner: None for u in uses if u.owner and not u.raised}
    return [owner for owner in found if owner != definition]

  def descendants(self, name: str) -> list[Def] | None:
    """Classes below the one called `name`; None if one of them is not sure."""
    found: dict[str, Def] = {}
    todo = [name]
    while todo:
      above = todo.pop()
      for cls in self.children.get(above, ()):
        if len(self.by_leaf[cls.leaf]) > 1 or self.bound[cls.leaf]:
          return None
        if cls.leaf not in found and cls.leaf != name:
          found[cls.leaf] = cls
          todo.append(cls.leaf)
    return sorted(found.values(), key=lambda d: (d.path, d.first))

  @functools.cached_property
  def children(self) -> dict[str, list[Def]]:
    found: dict[str, list[Def]] = {}
    for definition in self.defs:
      for base in definition.bases:
        found.setdefault(base, []).append(definition)
    return found

  def constant(self, path: str, name: str) -> tuple[str, int, int] | None:
    """(path, first, last) of the one assignment behind a name used in a file."""
    for _ in range(_HOPS):
      ranges = self.constants.get((path, name))
      if ranges is not None:
        return (path, *ranges[0]) if len(ranges) == 1 else None
      if name not in self.imports.get(path, {}):
        return None
      path, name = self.imports[path][name]
    return None


def index(tree: trees.Tree) -> Index:
  """Reads every Python file that parses; others hold nothing to ask about."""
  found = Index(tree, [], [], collections.Counter(), {}, {})
  for path in sorted(tree.files):
    if not path.endswith('.py'):
      continue
    try:
      module = ast.parse(tree.files[path])
    except (SyntaxError, ValueError, RecursionError):
      continue
    found.imports[path] = _imports(module, path, tree)
    _Reader(found, path).read(module)
  return found


def _imports(
  module: ast.Module, path: str, tree: trees.Tree
) -> dict[str, tuple[str, str]]:
  """Names that imports bind to something of the tree: (path, name), '' a module."""
  found: dict[str, tuple[str, str]] = {}
  folder = path.split('/')[:-1]
  for node in _statements(module):
    if isinstance(node, ast.ImportFrom):
      up = len(folder) - node.level + 1
      start = folder[:up] if node.level else []
      target = [*start, *(node.module or '').split('.')] if node.module else start
      for alias in node.names:
        inner = _file([*target, alias.name], tree)
        outer = _file(target, tree)
        if inner:
          found[alias.asname or alias.name] = (inner, '')
        elif outer:
          found[alias.asname or alias.name] = (outer, alias.name)
    elif isinstance(node, ast.Import):
      for alias in node.names:
        whole = _file(alias.name.split('.'), tree)
        if whole and (alias.asname or '.' not in alias.name):
          found[alias.asname or alias.name] = (whole, '')
  return found


def _statements(module: ast.Module) -> Iterator[ast.AST]:
  """All statements, without the expressions in them."""
  todo: list[ast.AST] = [module]
  while todo:
    node = todo.pop()
    yield node
    for field in _BLOCKS:
      todo += getattr(node, field, ())


def _inner(node: ast.AST) -> Iterator[ast.AST]:
  """Nodes directly within one; not those that hold nothing of interest."""
  for field in node._fields:
    value = getattr(node, field, None)
    for inner in value if type(value) is list else (value,):
      read = type(inner) is ast.Name and type(inner.ctx) is ast.Load
      if isinstance(inner, ast.AST) and not read and type(inner) not in _EMPTY:
        yield inner


def _file(parts: list[str], tree: trees.Tree) -> str:
  for path in ('/'.join(parts) + '.py', '/'.join([*parts, '__init__.py'])):
    if path in tree.files:
      return path
  return ''


class _Reader:
  """Walks one file and adds what it finds to an index."""

  def __init__(self, found: Index, path: str):
    self._found, self._path = found, path

  def read(self, module: ast.Module) -> None:
    for node in module.body:
      self._constant(node)
    for node in module.body:
      self._visit(node, None, '')

  def _visit(self, node: ast.AST, owner: Def | None, holder: str) -> None:
    """`holder` is the class, with a '.', that a definition here would be in."""
    self._bind(node)
    if isinstance(node, ast.ClassDef):
      inside = owner is None
      if inside:
        self._add(node, holder + node.name, 'class')
      else:
        self._found.bound[node.name] += 1
      for child in _inner(node):
        self._visit(child, owner, f'{holder}{node.name}.' if inside else holder)
      return
    if isinstance(node, _FUNCTION):
      if owner is None:
        owner = self._add(node, holder + node.name, 'method' if holder else 'function')
      else:
        self._found.bound[node.name] += 1
    elif isinstance(node, ast.Call):
      self._use(node.func, node.lineno, owner)
    elif isinstance(node, ast.Raise) and node.exc is not None:
      what = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
      self._use(what, node.lineno, owner, raised=True)
    for child in _inner(node):
      self._visit(child, owner, holder)

  def _use(
    self, what: ast.AST, line: int, owner: Def | None, raised: bool = False
  ) -> None:
    receiver, name = _parts(what)
    if name:
      use = Use(self._path, line, owner, name, receiver, raised)
      self._found.uses.append(use)

  def _add(
    self,
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    kind: str,
  ) -> Def:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    bases: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    if isinstance(node, ast.ClassDef):
      bases = tuple(b for b in (_parts(base)[1] for base in node.bases) if b)
    else:
      defaults = _defaults(node.args)
    marks = {_parts(d)[1] for d in node.decorator_list}
    plain = not any('property' in m or m in ('setter', 'deleter') for m in marks)
    made = Def(
      self._path,
      name,
      kind,
      first,
      node.end_lineno or first,
      defaults,
      bases,
      plain,
    )
    self._found.defs.append(made)
    return made

  def _constant(self, node: ast.stmt) -> None:
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
      targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
      targets = [node.target]
    for target in targets:
      if isinstance(target, ast.Name):
        ranges = self._found.constants.setdefault((self._path, target.id), [])
        ranges.append((node.lineno, node.end_lineno or node.lineno))

  def _bind(self, node: ast.AST) -> None:
    """Counts names that a node binds to anything but a definition of the tree."""
    bound = self._found.bound
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
      bound[node.id] += 1
    elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
      bound[node.attr] += 1
    elif isinstance(node, ast.arg):
      bound[node.arg] += 1
    elif isinstance(node, ast.ExceptHandler) and node.name:
      bound[node.name] += 1
    elif isinstance(node, ast.Import | ast.ImportFrom):
      own = self._found.imports[self._path]
      for alias in node.names:
        name = alias.asname or alias.name.partition('.')[0]
        if name not in own or (alias.asname and alias.asname != alias.name):
          bound[name] += 1
          bound[alias.name] += 1


def _parts(node: ast.AST) -> tuple[str, str]:
  """(receiver, last name) of `f`, `x.f` or something longer ('?')."""
  if isinstance(node, ast.Call):
    node = node.func
  if isinstance(node, ast.Subscript):
    node = node.value
  if isinstance(node, ast.Name):
    return '', node.id
  if isinstance(node, ast.Attribute):
    value = node.value
    return value.id if isinstance(value, ast.Name) else '?', node.attr
  return '', ''


def _defaults(args: ast.arguments) -> tuple[tuple[str, str], ...]:
  """Parameters whose default value is a plain name, with that name."""
  positional = [*args.posonlyargs, *args.args]
  last = positional[len(positional) - len(args.defaults) :]
  pairs = [*zip(last, args.defaults, strict=True)]
  pairs += [(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True) if d]
  return tuple((a.arg, d.id) for a, d in pairs if isinstance(d, ast.Name))
