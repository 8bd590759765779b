"""Functions rewritten so that they mean the same, and so that they mean less.

`same` gives versions that every right verifier accepts: other local names, turned
comparisons, temporaries, other forms of branches. `less` gives versions that do next to
nothing. Both work on the text of one function (or method), by its syntax; `changed`
finds those that a repair has touched, and `within` rewrites one in its file.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
import textwrap

_TURNED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
  ast.Lt: ast.Gt,
  ast.Gt: ast.Lt,
  ast.LtE: ast.GtE,
  ast.GtE: ast.LtE,
  ast.Eq: ast.Eq,
  ast.NotEq: ast.NotEq,
}
_READS_NAMES = frozenset(('locals', 'vars', 'eval', 'exec', 'dir', 'super'))
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_RESULT = 'the_result'


def same(source: str) -> Iterator[tuple[str, str]]:
  """(label, source) of versions that do the same. None where nothing can be changed."""
  rewrites: tuple[tuple[str, Callable[[ast.FunctionDef], None]], ...] = (
    ('renamed locals', _rename),
    ('turned comparisons', _turn),
    ('temporaries', _temporaries),
    ('early returns', _early),
    ('else after a return', _late),
    ('exchanged branches', _exchange),
    ('branches for conditional expressions', _branch),
  )
  plain = _text(_parsed(source))
  last = _parsed(source)
  for label, change in rewrites:
    function = _parsed(source)
    change(function)
    made = _text(function)
    if made != plain:
      yield label, made
      change(last)
  made = _text(last)
  if made != plain:
    yield 'all of it', made


def less(source: str) -> Iterator[tuple[str, str]]:
  """(label, source) of versions without their work."""
  function = _parsed(source)
  arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
  bodies = {
    'returns None': 'return None',
    'raises': 'raise NotImplementedError',
    'returns 0': 'return 0',
    'returns an empty text': "return ''",
    'returns an empty list': 'return []',
  }
  names = [name for name in arguments if name not in ('self', 'cls')]
  if names:
    bodies['returns its first argument'] = f'return {names[0]}'
  for label, body in bodies.items():
    function = _parsed(source)
    function.body = ast.parse(body).body
    made = _text(function)
    if made != _text(_parsed(source)):
      yield label, made


def functions(data: bytes) -> Iterator[str]:
  """Texts of a file's functions and methods, decorators left out, inner ones too."""
  try:
    tree = ast.parse(data)
  except (SyntaxError, ValueError):
    return
  lines = data.decode(errors='replace').splitlines(keepends=True)
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
      yield ''.join(lines[node.lineno - 1 : node.end_lineno])


def changed(
  gold: Mapping[str, bytes], before: Mapping[str, bytes]
) -> Iterator[tuple[str, str]]:
  """(path, text) of the gold's functions that are others in the files before."""
  for path, data in sorted(gold.items()):
    old = before.get(path)
    if old is not None and old != data:
      had = set(functions(old))
      yield from ((path, text) for text in functions(data) if text not in had)


def within(
  data: bytes, part: str, how: Callable[[str], Iterable[tuple[str, str]]]
) -> list[tuple[str, bytes]]:
  """(label, file) of a file with one function of it written otherwise."""
  text = data.decode(errors='replace')
  if text.count(part) != 1:
    return []
  indent = part[: len(part) - len(part.lstrip())]
  try:
    made = list(how(textwrap.dedent(part)))
  except (SyntaxError, ValueError):
    return []  # its lines are not all as deep as it is
  return [
    (label, text.replace(part, textwrap.indent(new, indent) + '\n').encode())
    for label, new in made
  ]


def _parsed(source: str) -> ast.FunctionDef:
  """The function that a text is. ValueError if it is none."""
  body = ast.parse(source).body
  if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
    raise ValueError(f'a rewrite: got {source[:40]!r}, want one function')
  return body[0]


def _text(function: ast.FunctionDef) -> str:
  return ast.unparse(ast.fix_missing_locations(function))


def _rename(function: ast.FunctionDef) -> None:
  """Gives local variables other names, where nothing looks them up by name."""
  bound: set[str] = set()
  kept: set[str] = set()
  for node in ast.walk(function):
    match node:
      case ast.Name(ctx=ast.Store()):
        bound.add(node.id)
      case ast.Name() if node.id in _READS_NAMES:
        return
      case ast.arg():
        kept.add(node.arg)
      case ast.Global() | ast.Nonlocal():
        kept.update(node.names)
      case ast.ExceptHandler() if node.name:
        kept.add(node.name)
      case ast.Import() | ast.ImportFrom():
        kept.update((a.asname or a.name).split('.')[0] for a in node.names)
      case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
        kept.add(node.name)
      case ast.MatchAs() | ast.MatchStar() if node.name:
        kept.add(node.name)
      case ast.MatchMapping() if node.rest:
        kept.add(node.rest)
      case ast.keyword():
        continue  # a name of the callee's
  taken = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} | kept
  names: dict[str, str] = {}
  for number, name in enumerate(sorted(bound - kept)):
    new = f'v{number}_{name}'
    if new not in taken and not name.startswith('__'):
      names[name] = new
  for node in ast.walk(function):
    if isinstance(node, ast.Name) and node.id in names:
      node.id = names[node.id]


def _turn(function: ast.FunctionDef) -> None:
  """a < b -> b > a, where both sides are plain."""
  for node in ast.walk(function):
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
      continue
    turned = _TURNED.get(type(node.ops[0]))
    if turned and _plain(node.left) and _plain(node.comparators[0]):
      node.left, node.comparators[0] = node.comparators[0], node.left
      node.ops[0] = turned()


def _plain(node: ast.expr) -> bool:
  """Whether it matters to nobody when it is evaluated."""
  if isinstance(node, ast.Call):
    by_len = isinstance(node.func, ast.Name) and node.func.id == 'len'
    return by_len and not node.keywords and all(map(_plain, node.args))
  return isinstance(node, ast.Name | ast.Constant)


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
  """Every block of statements, inner ones first; not those of inner functions."""
  waiting: list[ast.AST] = [function]
  found: list[list[ast.stmt]] = []
  while waiting:
    node = waiting.pop()
    for name in ('body', 'orelse', 'finalbody'):
      block = getattr(node, name, None)
      if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
        found.append(block)
    waiting += [
      child
      for child in ast.iter_child_nodes(node)
      if not isinstance(
        child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
      )
    ]
  yield from reversed(found)


def _temporaries(function: ast.FunctionDef) -> None:
  """return f(x) -> the_result = f(x); return the_result."""
  for block in _blocks(function):
    for i in range(len(block) - 1, -1, -1):
      node = block[i]
      if isinstance(node, ast.Return) and node.value and not _plain(node.value):
        store = ast.Name(_RESULT, ast.Store())
        value = ast.Assign([store], node.value, lineno=node.lineno)
        block[i : i + 1] = [value, ast.Return(ast.Name(_RESULT, ast.Load()))]


def _early(function: ast.FunctionDef) -> None:
  """if c: return a; else: B -> if c: return a; B, where the `if` is the last."""
  for block in _blocks(function):
    last = block[-1]
    if isinstance(last, ast.If) and last.orelse and isinstance(last.body[-1], _ENDS):
      rest, last.orelse = last.orelse, []
      block += rest


def _late(function: ast.FunctionDef) -> None:
  """if c: return a; B -> if c: return a; else: B."""
  for block in _blocks(function):
    for i, node in enumerate(block[:-1]):
      if not isinstance(node, ast.If) or node.orelse:
        continue
      if isinstance(node.body[-1], _ENDS):
        node.orelse = block[i + 1 :]
        del block[i + 1 :]
        break


def _exchange(function: ast.FunctionDef) -> None:
  """if c: A; else: B -> if not c: B; else: A."""
  for node in ast.walk(function):
    if isinstance(node, ast.If) and node.orelse:
      node.test = ast.UnaryOp(ast.Not(), node.test)
      node.body, node.orelse = node.orelse, node.body


def _branch(function: ast.FunctionDef) -> None:
  """return a if c else b -> if c: return a; return b."""
  for block in _blocks(function):
    for i in range(len(block) - 1, -1, -1):
      node = block[i]
      if isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp):
        choice = node.value
        first = ast.If(choice.test, [ast.Return(choice.body)], [])
        block[i : i + 1] = [first, ast.Return(choice.orelse)]
