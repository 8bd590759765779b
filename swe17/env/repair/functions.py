"""The catalogue of functions, their canonical sources, and the cases they run on.

The canonical source of a function is `ast.unparse` of its definition in this Python's
own library, without decorators, docstring, annotations and blank lines. It is looked
up in the module's source: no module of the catalogue is imported here.
"""

import ast
from collections.abc import Sequence
import functools
import hashlib
import pathlib
import random
import sysconfig

from swe17.env.repair import (
  catalogue_data,
  catalogue_numbers,
  catalogue_text,
  catalogue_web,
  inputs,
)

VISIBLE, HIDDEN = 6, 32  # cases of a task
MIN_HIDDEN = 20  # a small domain may have fewer
LINES = (3, 16)  # of a source, its `def` included
CHARACTERS, COLUMNS = 480, 88
_TRIES = 60  # draws per case, so that a small domain ends


def catalogue() -> dict[str, inputs.Entry]:
  """Dotted name -> entry, in a fixed order."""
  entries = (
    *catalogue_numbers.ENTRIES,
    *catalogue_data.ENTRIES,
    *catalogue_text.ENTRIES,
    *catalogue_web.ENTRIES,
  )
  return {entry.name: entry for entry in entries}


@functools.lru_cache(maxsize=256)
def _definitions(module: str) -> dict[str, ast.FunctionDef]:
  """Module-level functions of a module, from its source; empty if there is none."""
  body = ast.parse(_module_source(module)).body
  return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def _module_source(module: str) -> str:
  """The module's text, from its file in the standard library; '' if it has none.

  Not from its loader: modules frozen into the interpreter keep no source there.
  """
  file = _module_file(module)
  return file.read_text(encoding='utf-8') if file else ''


def _module_file(module: str) -> pathlib.Path | None:
  path = pathlib.Path(sysconfig.get_path('stdlib'), *module.split('.'))
  for file in (path.with_name(path.name + '.py'), path / '__init__.py'):
    if file.is_file():
      return file
  return None


@functools.lru_cache(maxsize=256)
def run_at_import(module: str) -> frozenset[str]:
  """Functions and classes that the import of a module may call; rather too many."""
  tree = ast.parse(_module_source(module))
  bodies = {
    node.name: node
    for node in tree.body
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
  }
  seen: set[str] = set()
  todo = set().union(*(_called(node, whole=False) for node in tree.body))
  while todo:
    name = todo.pop()
    if name not in seen and name in bodies:
      todo |= _called(bodies[name], whole=True)
    seen.add(name)
  return frozenset(seen)


def _called(node: ast.AST, *, whole: bool) -> set[str]:
  """Names in the calls of a statement; with `whole` in the functions it defines too."""
  found: set[str] = set()
  waiting: list[ast.AST] = [node]
  while waiting:
    here = waiting.pop()
    calls: list[ast.AST] = [here] if isinstance(here, ast.Call) else []
    parts = list(ast.iter_child_nodes(here))
    if isinstance(here, ast.FunctionDef | ast.AsyncFunctionDef):
      calls += here.decorator_list
      parts = parts if whole else [*here.decorator_list, here.args]
    elif isinstance(here, ast.If) and '__main__' in ast.unparse(here.test):
      parts = here.orelse
    for call in calls:
      found |= {each.id for each in ast.walk(call) if isinstance(each, ast.Name)}
    waiting += parts
  return found


def with_source(module: str, function: str, source: str) -> tuple[pathlib.Path, str]:
  """(file, text) of a module in which one function has another source.

  ValueError where this Python has no such function.
  """
  file, node = _module_file(module), _definitions(module).get(function)
  if file is None or node is None or node.end_lineno is None:
    raise ValueError(f'{module}: no function {function!r} in this Python')
  lines = _module_source(module).split('\n')
  lines[node.lineno - 1 : node.end_lineno] = source.split('\n')
  return file, '\n'.join(lines)


@functools.lru_cache(maxsize=1024)
def source_of(module: str, function: str) -> str | None:
  """The canonical source, or None where this Python has no such function."""
  node = _definitions(module).get(function)
  if node is None:
    return None
  # Unparsed and parsed again: the cached tree stays as it is.
  copy = ast.parse(ast.unparse(node)).body[0]
  assert isinstance(copy, ast.FunctionDef)
  for part in ast.walk(copy):
    if isinstance(part, ast.FunctionDef):
      _strip(part)
  lines = ast.unparse(copy).split('\n')
  return '\n'.join(line for line in lines if line.strip())


def _strip(node: ast.FunctionDef) -> None:
  """Takes annotations, and from the outer function what is around its code."""
  node.decorator_list, node.returns = [], None
  if ast.get_docstring(node) is not None and len(node.body) > 1:
    node.body = node.body[1:]
  arguments = node.args
  rest = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
  for argument in (
    *arguments.posonlyargs,
    *arguments.args,
    *arguments.kwonlyargs,
    *rest,
  ):
    argument.annotation = None


def misfit(source: str) -> str:
  """Why a source is no material for a task; '' if it is."""
  lines = source.split('\n')
  if not LINES[0] <= len(lines) <= LINES[1]:
    return 'lines'
  if len(source) > CHARACTERS or max(map(len, lines)) > COLUMNS:
    return 'size'
  if not source.isascii() or '\\\n' in source or '"""' in source:
    return 'text'
  return ''


def sha(text: str) -> str:
  """A short hash that names a source."""
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def cases(entry: inputs.Entry, seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """(visible, hidden) cases: literals of argument tuples, all different.

  The same seed gives the same cases. Fewer hidden ones, or none, if the domain is
  exhausted.
  """
  rng = random.Random(f'{entry.name}/{seed}')
  found: dict[str, None] = {}
  for _ in range(_TRIES * (VISIBLE + HIDDEN)):
    found.setdefault(repr(entry.arguments(rng)))
    if len(found) == VISIBLE + HIDDEN:
      break
  literals: Sequence[str] = tuple(found)
  return tuple(literals[:VISIBLE]), tuple(literals[VISIBLE:])
