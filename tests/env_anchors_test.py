"""Code with anchors: what is a place, what its number is, what edits there can do."""

import ast
import collections
import itertools
import keyword
import re

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest

from swe17 import config, types
from swe17.env import sites
from swe17.env.repair import anchors, library, repair

CLAMP = """\
def clamp(x, low=-1, *rest, sign='+'):
    if x < low and (not rest):
        return low
    elif x is not None:
        x += [y for y in rest if y not in x][-1]
    while True:
        x = 'a' if x == '' else x ** 2 // -x
    return 'a long text' + f'{low + 1}'"""
VIEW = """\
def clamp(x, low=-1, *rest, sign='+'):
    «1»if «n1»x«2» < «n2»low«3» and («4»not «n3»rest):
        return «n4»low
    «5»elif «n5»x«6» is not «n6»None:
        «n7»x«7» += [«n8»y for «n9»y in «n10»rest«8» if «n11»y«9» not in «n12»x][-«10»1]
    «11»while «12»True:
        «n13»x = «13»'a'«14» if «n14»x«15» == «16»'' else «n15»x ** «17»2«18» // -«n16»x
    return «n17»'a long text'«19» + «n18»f'{low + 1}'"""


def view_of(source: str) -> str:
  pieces = anchors.split(source)
  return anchors.view(pieces, anchors.names(pieces))


def places(source: str) -> list[str]:
  return anchors.split(source)[1::2]


@pytest.fixture(scope='module')
def tasks():
  return repair.read(config.Tasks(kinds='', train=0, heldout=0))[0]


@pytest.fixture(scope='module')
def sources(tasks) -> list[str]:
  """The code of all tasks, right and faulty, and some of the library."""
  found = [t.payload[key] for t in tasks for key in ('original', 'source')]
  return sorted({*found, *itertools.islice(library.functions(), 500)})


# What is a place.


def test_view_of_a_small_function():
  assert view_of(CLAMP) == VIEW


def test_places_and_the_rest_join_to_the_source_and_a_view_strips_to_it(sources):
  assert len(sources) > 1200
  for source in sources:
    pieces = anchors.split(source)
    assert ''.join(pieces) == source
    assert anchors.strip(anchors.view(pieces, anchors.names(pieces))) == source


def test_every_anchor_of_a_view_is_unique_and_each_kind_counts_from_1(sources):
  for source in sources:
    pieces = anchors.split(source)
    names = anchors.names(pieces)
    found = anchors.ANCHOR.findall(view_of(source))
    assert found == list(names) and len(set(found)) == len(found)
    assert list(names.values()) == list(range(1, len(pieces), 2))
    for mark in ('', 'n'):
      own = [name for name in found if name.startswith('n') == bool(mark)]
      assert own == [f'{mark}{i}' for i in range(1, len(own) + 1)]


def test_the_def_line_has_no_anchor(sources):
  for source in sources:
    assert view_of(source).split('\n')[0] == source.split('\n')[0]


@pytest.mark.parametrize(
  ('line', 'view'),
  [
    ('for x in a:', 'for «n1»x in «n2»a:'),
    ('for x, y in a in b:', 'for «n1»x, «n2»y in «n3»a«1» in «n4»b:'),
    ('[x for x in a]', '[«n1»x for «n2»x in «n3»a]'),
    (
      '[x in a for x in b for y in c if y in d]',
      '[«n1»x«1» in «n2»a for «n3»x in «n4»b '
      'for «n5»y in «n6»c«2» if «n7»y«3» in «n8»d]',
    ),
    ('if x in a:', '«1»if «n1»x«2» in «n2»a:'),
  ],
)
def test_the_in_of_a_for_is_no_place_and_the_operator_is_one(line, view):
  rest = '\n        pass' if line.endswith(':') else ''
  shown = view_of(f'def f(a):\n    {line}{rest}').split('\n')[1]
  assert shown == f'    {view}'


@pytest.mark.parametrize('word', ['not in', 'is not', 'in', 'is', 'and', 'or', '>='])
def test_an_operator_of_two_words_is_one_place_and_all_keep_their_spaces(word):
  source = f'def f(x, y):\n    return x {word} y'
  assert places(source) == ['x', word, 'y']
  assert view_of(source).endswith(f'return «n1»x«1» {word} «n2»y')


def test_two_words_that_only_stand_side_by_side_are_two_places():
  assert places('def f(x):\n    return x and not x') == ['x', 'and', 'not', 'x']
  assert places('def f(x):\n    return x is (not x)') == ['x', 'is', 'not', 'x']
  assert places('def f(x):\n    if not x:\n        pass') == ['if', 'not', 'x', 'pass']


@pytest.mark.parametrize('line', ['-x', '(-x)', 'f(*x)', 'f(**x)', '~x', 'f(y=x)'])
def test_signs_stars_and_assignments_are_no_places(line):
  found = places(f'def f(x):\n    return {line}')
  assert found == re.findall(r'[a-z]', line)


@pytest.mark.parametrize('left', ['None', 'True', '1', "''", 'x()', 'x[0]', '{}'])
def test_an_operator_is_a_place_behind_any_operand(left):
  found = places(f'def f(x):\n    return {left} == x')
  assert found[-2:] == ['==', 'x']


def test_texts_of_up_to_two_characters_are_numbered_and_longer_ones_are_not():
  source = "def f():\n    return ['', 'a', '\\n', 'ab', 'abc', b'a']"
  names = anchors.names(anchors.split(source))
  assert list(names) == ['1', '2', '3', '4', 'n1', 'n2']


OPERATORS = {
  ast.Lt: '<',
  ast.LtE: '<=',
  ast.Gt: '>',
  ast.GtE: '>=',
  ast.Eq: '==',
  ast.NotEq: '!=',
  ast.In: 'in',
  ast.NotIn: 'not in',
  ast.Is: 'is',
  ast.IsNot: 'is not',
  ast.Not: 'not',
}
ARITHMETIC = {
  ast.Add: '+',
  ast.Sub: '-',
  ast.Mult: '*',
  ast.Div: '/',
  ast.FloorDiv: '//',
  ast.Mod: '%',
  ast.LShift: '<<',
  ast.RShift: '>>',
  ast.BitAnd: '&',
  ast.BitOr: '|',
}
COUNTED = {*OPERATORS.values(), *ARITHMETIC.values(), *sites.AUGMENTED}
COUNTED |= {'and', 'or', 'True', 'False', 'number', 'if', 'while'}


def counted_by_syntax(source: str) -> collections.Counter:
  """How often each kind of place must occur, from the tree of the function's body."""
  found: collections.Counter = collections.Counter()

  def visit(node: ast.AST) -> None:
    match node:
      case ast.JoinedStr():
        return  # a text is one place, whatever stands in it
      case ast.Compare(ops=operators):
        found.update(OPERATORS[type(op)] for op in operators)
      case ast.UnaryOp(op=ast.Not()):
        found['not'] += 1
      case ast.BinOp(op=op) if type(op) in ARITHMETIC:
        found[ARITHMETIC[type(op)]] += 1
      case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
        found[ARITHMETIC[type(op)] + '='] += 1
      case ast.BoolOp(op=op, values=values):
        found['and' if isinstance(op, ast.And) else 'or'] += len(values) - 1
      case ast.Constant(value=bool() as value):
        found[str(value)] += 1
      case ast.Constant(value=int() | float() | complex()):
        found['number'] += 1
      case ast.If() | ast.IfExp():
        found['if'] += 1
      case ast.While():
        found['while'] += 1
      case ast.comprehension(ifs=ifs):
        found['if'] += len(ifs)
    for child in ast.iter_child_nodes(node):
      visit(child)

  (function,) = ast.parse(source).body
  assert isinstance(function, ast.FunctionDef)
  for statement in function.body:
    visit(statement)
  return +collections.Counter({k: n for k, n in found.items() if k in COUNTED})


def counted_by_place(source: str) -> collections.Counter:
  words = [
    'number' if text[0].isdigit() else 'if' if text == 'elif' else text
    for text in places(source)
  ]
  return collections.Counter(word for word in words if word in COUNTED)


def test_every_operator_condition_number_and_truth_value_is_a_place(sources):
  """Counted in the syntax tree, which has no tokens."""
  total: collections.Counter = collections.Counter()
  for source in sources:
    if 'match ' in source:
      continue
    want = counted_by_syntax(source)
    assert counted_by_place(source) == want, source
    total += want
  assert set(total) >= COUNTED - {'<<=', '>>=', '/=', '%='}


def test_no_place_is_a_word_that_an_edit_can_not_replace(sources):
  may = {'if', 'elif', 'while', 'and', 'or', 'not', 'in', 'is', 'pass'}
  may |= {'True', 'False', 'None', 'not in', 'is not'}
  for source in sources[::7]:
    words = {text for text in places(source) if keyword.iskeyword(text.split(' ')[0])}
    assert words <= may


# Functions of hypothesis' making.

NAMES = st.sampled_from(['a', 'b', 'for_x', 'in_y', 'not_z', 'n1'])
ATOMS = NAMES | st.sampled_from(['0', '17', '1.5', "'in'", "''", 'None', 'True', 'a.b'])


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
  operators = ['<', '>=', '==', 'in', 'not in', 'is', 'is not', '+', '-', '*', '//']
  operators += ['and', 'or', 'and not', 'or not', '**', '@', '^']
  pairs = st.tuples(inner, st.sampled_from(operators), inner).map(' '.join)
  return st.one_of(
    pairs.map(lambda text: f'({text})'),
    inner.map(lambda text: f'(-{text})'),
    inner.map(lambda text: f'(not {text})'),
    st.tuples(inner, inner, inner).map(lambda p: f'({p[0]} if {p[1]} else {p[2]})'),
    st.tuples(inner, NAMES, inner, inner).map(
      lambda p: f'[{p[0]} for {p[1]} in {p[2]} if {p[3]}]'
    ),
    st.tuples(NAMES, inner, inner).map(lambda p: f'{p[0]}(*{p[1]}, k={p[2]})'),
    st.tuples(NAMES, inner, inner).map(lambda p: f'{p[0]}[{p[1]}:{p[2]}]'),
    inner.map(lambda text: f'(lambda a: {text})'),
  )


EXPRESSIONS = st.recursive(ATOMS, _compound, max_leaves=12)
STATEMENTS = st.one_of(
  EXPRESSIONS.map(lambda text: f'return {text}'),
  EXPRESSIONS.map(lambda text: f'a += {text}'),
  EXPRESSIONS.map(lambda text: f'if {text}:\n        b = {text}'),
  EXPRESSIONS.map(lambda text: f'while {text}:\n        pass'),
  EXPRESSIONS.map(lambda text: f'for a, b in {text}:\n        a -= 1'),
)
FUNCTIONS = st.lists(STATEMENTS, min_size=1, max_size=4).map(
  lambda lines: ast.unparse(ast.parse('def f(a, b=-1):\n    ' + '\n    '.join(lines)))
)


@given(FUNCTIONS)
@settings(max_examples=150, deadline=None)
def test_any_function_splits_joins_strips_and_has_the_places_of_its_syntax(source):
  pieces = anchors.split(source)
  assert ''.join(pieces) == source
  assert all(pieces[1::2])
  assert anchors.strip(view_of(source)) == source
  assert counted_by_place(source) == counted_by_syntax(source)


@given(FUNCTIONS, st.data())
@settings(max_examples=100, deadline=None)
def test_whatever_is_written_in_places_the_anchors_of_a_view_stay(source, data):
  pieces = anchors.split(source)
  names = anchors.names(pieces)
  before = anchors.ANCHOR.findall(anchors.view(pieces, names))
  texts = st.text(st.characters(exclude_characters='«»', exclude_categories=['Cs']))
  texts |= st.sampled_from(['', 'if not', 'or', ' < ', 'x + 1'])
  for name in data.draw(st.lists(st.sampled_from(before), min_size=1, max_size=3)):
    pieces[names[name]] = data.draw(texts)
  view = anchors.view(pieces, names)
  assert anchors.ANCHOR.findall(view) == before
  assert anchors.strip(view) == ''.join(pieces)


# Every shipped fault has one edit that undoes it.


class Nobody:
  """A verifier that nobody may ask."""

  async def run(self, check):
    raise AssertionError(f'a grader was asked for {check.function}')


class Plain(ast.NodeTransformer):
  """Takes out what adds nothing to a whole number: `x + 0` is `x`, and `-0` is `0`.

  An index or a bound `x` that the fault made `x + 1` can't lose the ` + 1` at one
  anchor, and `a[-1]` can't lose its sign, but both numbers can become 0. Indices and
  bounds are whole numbers, so what runs is the original.
  """

  def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
    self.generic_visit(node)
    return node.left if isinstance(node.op, ast.Add) and _zero(node.right) else node

  def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
    self.generic_visit(node)
    negative = isinstance(node.op, ast.USub) and _zero(node.operand)
    return node.operand if negative else node


def _zero(node: ast.AST) -> bool:
  return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 0


def syntax(source: str, *, plain: bool = False) -> str:
  """The tree as text; '' if it does not parse."""
  try:
    tree = ast.parse(source)
  except SyntaxError:
    return ''
  return ast.dump(Plain().visit(tree) if plain else tree)


def _candidates(task) -> list[tuple[str, str]]:
  """(anchor, text) that leave the original around the place, and zeros."""
  original, pieces = task.payload['original'], anchors.split(task.payload['source'])
  found, zeros = [], []
  for name, index in anchors.names(pieces).items():
    before, after = ''.join(pieces[:index]), ''.join(pieces[index + 1 :])
    if original.startswith(before) and original.endswith(after):
      # The two may share a space: `if c` of `if not c`.
      end = max(len(before), len(original) - len(after))
      found.append((f'«{name}»', original[len(before) : end]))
    if pieces[index] == '1':
      zeros.append((f'«{name}»', '0'))
  return found + zeros


async def test_every_shipped_fault_is_undone_by_one_edit_at_an_anchor(tasks):
  how: collections.Counter = collections.Counter()
  for task in tasks:
    payload = {**task.payload, 'expected_visible': [], 'expected_hidden': []}
    task = types.Task(task.id, task.family, task.split, task.unit, task.prompt, payload)
    original = payload['original']
    ways = set()
    for at, new in _candidates(task):
      env = repair.RepairEnv(task, Nobody())
      if await env.step('edit', {'at': at, 'new': new}) != 'edited':
        continue
      if env.source == original:
        ways.add('text')
      elif syntax(env.source) == syntax(original):
        ways.add('syntax')
      elif syntax(env.source, plain=True) == syntax(original, plain=True):
        ways.add('zero')
    assert ways, (task.id, payload['source'], original)
    best = next(way for way in ('text', 'syntax', 'zero') if way in ways)
    how[best, payload['kind']] += 1
  assert how.total() == len(repair.read_table(repair.TABLE))
  # By equal syntax: `if not c` with its `not` taken out, which leaves two spaces.
  assert {kind for way, kind in how if way == 'syntax'} == {'negated_condition'}
  zeros = {kind: n for (way, kind), n in how.items() if way == 'zero'}
  assert set(zeros) <= {'off_by_one', 'wrong_constant'}
  assert sum(zeros.values()) < 0.05 * how.total()
