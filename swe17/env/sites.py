"""Where a single-token fault may sit: the rules behind `faults.candidates`.

Every rule is a symmetric relation between texts, and asks only for context that the
replacement itself leaves as it was: so each has its inverse among the sites of the
changed source. Rules are kept narrow, for a fault is to be found by search: neighbours
instead of all pairs, `+ 1` only in indices and bounds, little that is sure to fail.
"""

import ast
from collections.abc import Iterator
import dataclasses
import io
import itertools
import keyword
import re
import tokenize

COMPARE = {
  '<': ('<=', '>'),
  '<=': ('<', '>='),
  '>': ('>=', '<'),
  '>=': ('>', '<='),
  '==': ('!=',),
  '!=': ('==',),
}
BINARY = {
  '+': ('-',),
  '-': ('+',),
  '*': ('/',),
  '/': ('*',),
  '//': ('%',),
  '%': ('//',),
  '<<': ('>>',),
  '>>': ('<<',),
  '&': ('|',),
  '|': ('&',),
}
AUGMENTED = {
  '+=': ('-=',),
  '-=': ('+=',),
  '*=': ('//=',),
  '//=': ('*=',),
  '<<=': ('>>=',),
  '>>=': ('<<=',),
  '&=': ('|=',),
  '|=': ('&=',),
}
_PAIRS = (
  ('min', 'max'),
  ('any', 'all'),
  ('find', 'rfind'),
  ('index', 'rindex'),
  ('startswith', 'endswith'),
  ('lstrip', 'rstrip'),
  ('partition', 'rpartition'),
  ('split', 'rsplit'),
  ('lower', 'upper'),
  ('ljust', 'rjust'),
  ('bisect_left', 'bisect_right'),
)
_TEXTS = (
  ("''", "' '"),
  ("'<'", "'>'"),
  ("'('", "')'"),
  ("'['", "']'"),
  ("'/'", "'\\\\'"),
  ("'.'", "','"),
  ("':'", "';'"),
  ("'-'", "'_'"),
  ("'+'", "'*'"),
  ("'='", "'#'"),
  ("'0'", "'1'"),
  ("'\\n'", "'\\r'"),
)
_VALUES = ('True', 'False', 'None')  # keywords that are operands
_INTLIKE = re.compile(
  r'[ijklmnq]|i\d|j\d|lo|hi|mid|num|cnt|count|start|stop|end|beg|left|right|pre|post'
  r'|width|size|length|\w*(pos|len|idx|index|Index|bits|digits|pad)'
)
# Where a variable may be taken for another: never the callee, never before a dot.
_NAME_PLACES = (
  ast.Compare,
  ast.BinOp,
  ast.Subscript,
  ast.Slice,
  ast.Call,
  ast.Return,
  ast.Assign,
  ast.AugAssign,
  ast.Tuple,
  ast.IfExp,
)
_SCOPES = (
  ast.FunctionDef,
  ast.Lambda,
  ast.ListComp,
  ast.SetComp,
  ast.DictComp,
  ast.GeneratorExp,
)


def _both_ways(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
  return dict(pairs) | {b: a for a, b in pairs}


PAIRED = _both_ways(_PAIRS)
PAIRED_TEXT = _both_ways(_TEXTS)


@dataclasses.dataclass(frozen=True)
class Site:
  """Columns [start, end) of a line to be replaced by `text`."""

  line: int
  start: int
  end: int
  text: str
  kind: str


@dataclasses.dataclass(frozen=True)
class Token:
  type: int
  string: str
  line: int
  start: int
  end: int

  @property
  def operand(self) -> bool:
    """Whether an operand can end here, so that a sign after it is binary."""
    if self.type == tokenize.NAME:
      return not keyword.iskeyword(self.string) or self.string in _VALUES
    return self.type in (tokenize.NUMBER, tokenize.STRING) or self.string in ')]}'


def tokens_by_line(source: str) -> dict[int, list[Token]]:
  """Tokens of each line. The inside of an f-string is one string on every version."""
  lines: dict[int, list[Token]] = {}
  fstring_start = getattr(tokenize, 'FSTRING_START', None)
  fstring_end = getattr(tokenize, 'FSTRING_END', None)
  opened: list[tuple[int, int]] = []
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    (row, start), (end_row, end) = token.start, token.end
    kind, string = token.type, token.string
    if fstring_start is not None and kind == fstring_start:
      opened.append((row, start))
      continue
    if fstring_end is not None and kind == fstring_end:
      row, start = opened.pop()
      kind, string = tokenize.STRING, ''
    if opened or row != end_row or not (string or kind == tokenize.STRING):
      continue
    if kind in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
      lines.setdefault(row, []).append(Token(kind, string, row, start, end))
  return lines


def find(source: str) -> Iterator[Site]:
  tree = ast.parse(source)
  skipped = {1}  # the def line; and what a raise says is not graded
  for node in ast.walk(tree):
    if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.Global)):
      skipped.add(node.lineno)
  for line, tokens in tokens_by_line(source).items():
    if line not in skipped:
      yield from _token_sites(tokens)
  yield from (s for s in _tree_sites(tree) if s.line not in skipped)


def _token_sites(tokens: list[Token]) -> Iterator[Site]:
  """What can be seen in one line's tokens alone."""
  depth, loops = 0, []
  for i, token in enumerate(tokens):
    before = tokens[i - 1] if i else None
    after = tokens[i + 1] if i + 1 < len(tokens) else None
    depth += (token.string in '([{') - (token.string in ')]}') if token.string else 0
    if token.string == 'for':
      loops.append(depth)
    elif token.string == 'in' and loops and loops[-1] == depth:
      loops.pop()
      continue
    for end, text, kind in _replacements(before, token, after):
      yield Site(token.line, token.start, end, text, kind)


def _replacements(
  before: Token | None, token: Token, after: Token | None
) -> Iterator[tuple[int, str, str]]:
  """(end column, text, kind) of what may stand in the place that starts at `token`."""
  text, end = token.string, token.end
  binary = before is not None and before.operand
  if token.type == tokenize.OP:
    yield from ((end, new, 'comparison') for new in COMPARE.get(text, ()))
    yield from ((end, new, 'operator') for new in AUGMENTED.get(text, ()))
    strings = tokenize.STRING in [t.type for t in (before, after) if t is not None]
    if binary and not strings:
      yield from ((end, new, 'operator') for new in BINARY.get(text, ()))
  elif token.type == tokenize.STRING and text in PAIRED_TEXT:
    yield end, PAIRED_TEXT[text], 'wrong_constant'
  elif token.type == tokenize.NAME:
    yield from _word_replacements(before, token, after)


def _word_replacements(
  before: Token | None, token: Token, after: Token | None
) -> Iterator[tuple[int, str, str]]:
  text, end = token.string, token.end
  follows = after.string if after is not None else ''
  if text in ('True', 'False'):
    yield end, 'False' if text == 'True' else 'True', 'wrong_constant'
  elif text in ('and', 'or'):
    yield end, 'or' if text == 'and' else 'and', 'operator'
  elif text == 'is' and after is not None:
    negated = follows == 'not'
    yield after.end if negated else end, 'is' if negated else 'is not', 'comparison'
  elif text == 'in' and not (before is not None and before.string == 'not'):
    yield end, 'not in', 'comparison'
  elif text == 'not' and follows == 'in' and after is not None:
    yield after.end, 'in', 'comparison'
  elif text in PAIRED and follows == '(':
    yield end, PAIRED[text], 'wrong_name'


def _tree_sites(tree: ast.Module) -> Iterator[Site]:
  """What needs the syntax tree: tests, numbers, indices and bounds, variables."""
  for parent, node in _edges(tree):
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
      word = 'while ' if isinstance(node, ast.While) else 'if '  # the end of elif too
      yield from _test_sites(node.test, word)
    elif isinstance(node, ast.Subscript):
      yield from _index_sites(node.slice)
    elif isinstance(node, ast.Slice):
      for bound in (node.lower, node.upper):
        yield from _bound_sites(bound)
    elif isinstance(node, ast.Call) and _called(node) == 'range':
      for argument in node.args:
        yield from _bound_sites(argument)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
      yield from _number_sites(parent, node, node.value)
  yield from _name_sites(tree.body[0])


def _edges(parent: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
  """(parent, child) pairs, not entering f-strings: positions in them vary."""
  for node in ast.iter_child_nodes(parent):
    yield parent, node
    if not isinstance(node, ast.JoinedStr):
      yield from _edges(node)


def _called(node: ast.Call) -> str:
  return node.func.id if isinstance(node.func, ast.Name) else ''


def _site(node: ast.expr, start: int, end: int, text: str, kind: str) -> Site:
  return Site(node.lineno, start, end, text, kind)


def _end(node: ast.expr) -> int:
  assert node.end_col_offset is not None
  return node.end_col_offset


def _test_sites(test: ast.expr, word: str) -> Iterator[Site]:
  """`if c` <-> `if not c`; comparisons have their own kind."""
  start, kind = test.col_offset - len(word), 'negated_condition'
  simple = (ast.Name, ast.Call, ast.Attribute, ast.Subscript)
  match test:
    case ast.UnaryOp(op=ast.Not(), operand=operand) if isinstance(operand, simple):
      yield _site(test, start, start + len(word + 'not '), word, kind)
    case _ if isinstance(test, simple):
      yield _site(test, start, test.col_offset, word + 'not ', kind)


def _number_sites(parent: ast.AST, node: ast.Constant, n: int) -> Iterator[Site]:
  """n <-> n + 1 below 10; larger constants pair up, 2k <-> 2k + 1.

  In `x + n`, `x - n` and `-n` nothing becomes 0 or stops being 0.
  """
  signed = isinstance(parent, ast.UnaryOp) or (
    isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Add, ast.Sub))
  )
  near = (n ^ 1,) if n >= 10 else (n - 1, n + 1)
  for other in near:
    if (n >= 10 or other <= 9) and other >= 0 and not (signed and 0 in (n, other)):
      yield _site(node, node.col_offset, _end(node), str(other), 'off_by_one')


def _index_sites(index: ast.expr) -> Iterator[Site]:
  name = _step(index) or index
  if isinstance(name, ast.Name) and _INTLIKE.fullmatch(name.id):
    yield from _bound_sites(index)
  else:
    other = {'0': '-1', '-1': '0'}.get(ast.unparse(index))
    if other is not None:
      yield _site(index, index.col_offset, _end(index), other, 'wrong_constant')


def _step(node: ast.expr) -> ast.expr | None:
  """The `x` of `x + 1`."""
  match node:
    case ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(value=1)):
      return left
  return None


def _bound_sites(bound: ast.expr | None) -> Iterator[Site]:
  """`x` <-> `x + 1` where x is a variable or a length."""
  if bound is None:
    return
  inner = _step(bound)
  base = bound if inner is None else inner
  length = isinstance(base, ast.Call) and _called(base) == 'len'
  if not (isinstance(base, ast.Name) or length):
    return
  text = ast.unparse(base)
  other = text + ' + 1' if inner is None else text
  yield _site(bound, bound.col_offset, _end(bound), other, 'off_by_one')


def _name_sites(function: ast.stmt) -> Iterator[Site]:
  """A variable for its partner: the neighbour of its role in the order of definition.

  Only reads are replaced, so the order of definition, the roles and what is defined
  before a line stay as they were.
  """
  assert isinstance(function, ast.FunctionDef)
  defined = _definitions(function)
  partner: dict[str, str] = {}
  for parameter, intlike in itertools.product((True, False), repeat=2):
    chain = [
      name
      for name, line in defined.items()
      if (line == 0) is parameter and bool(_INTLIKE.fullmatch(name)) is intlike
    ]
    for a, b in zip(chain[::2], chain[1::2], strict=False):
      partner[a], partner[b] = b, a
  for parent, node in _own_names(function):
    if not (isinstance(node.ctx, ast.Load) and isinstance(parent, _NAME_PLACES)):
      continue
    other = partner.get(node.id)
    callee = isinstance(parent, ast.Call) and parent.func is node
    if other is None or callee:
      continue
    if max(defined[node.id], defined[other]) < node.lineno:
      yield _site(node, node.col_offset, _end(node), other, 'wrong_name')


def _definitions(function: ast.FunctionDef) -> dict[str, int]:
  """Parameters (line 0), then variables of the function's own scope -> first line."""
  arguments = function.args
  defined = {a.arg: 0 for a in arguments.posonlyargs + arguments.args}
  other = {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
  other.update(a.arg for a in arguments.kwonlyargs)
  for node in ast.walk(function):
    if isinstance(node, (ast.Global, ast.Nonlocal)):
      other.update(node.names)
  stores = [
    node
    for _, node in _own_names(function)
    if isinstance(node.ctx, ast.Store) and node.id not in other
  ]
  for node in sorted(stores, key=lambda n: (n.lineno, n.col_offset)):
    defined.setdefault(node.id, node.lineno)
  return defined


def _own_names(parent: ast.AST) -> Iterator[tuple[ast.AST, ast.Name]]:
  """(parent, name) pairs, not entering f-strings and nested scopes."""
  for node in ast.iter_child_nodes(parent):
    if isinstance(node, ast.Name):
      yield parent, node
    elif not isinstance(node, (ast.JoinedStr, *_SCOPES)):
      yield from _own_names(node)
