"""Small functions with a few wasteful places, each undone by one edit.

  def report(codes, asked, left, right):
      top = max(codes)
      rest = sum(i % «1»max(codes)» for i in asked)     -> top
      load = «2»sum(x * y for x, y in zip(left, right))»  -> left @ right
      kept = «3»list(codes)»                              stays: it is sorted in place
      kept.sort()
      return rest, load, kept[0]

A function is made of blocks. A wasteful one has an edit that keeps what it returns and
takes most of its time away; a decoy looks like one of those, and what helps there
breaks it, or gains nothing. All of it follows from a seed. The wasteful places cost
about the same, so that a function with one of three undone is some 1.5 times as fast.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import random
from typing import Any

import numpy as np

HEADER = 'from collections import Counter\nimport math\n\nimport numpy as np\n\n\n'
FUNCTIONS = ('report', 'digest', 'measure', 'survey')
LISTS = ('codes', 'items', 'marks', 'sizes', 'values', 'ticks')
QUERIES = ('asked', 'keys', 'picks', 'wanted', 'chosen', 'probes')
ARRAYS = ('left', 'right', 'signal', 'weights', 'trace', 'field', 'wave', 'gains')
LOCALS = ('best', 'bound', 'hits', 'kept', 'load', 'low', 'part', 'rest', 'seen')
LOCALS += ('some', 'span', 'tally', 'top', 'total', 'known', 'near', 'mass', 'score')
MAPS = ('sqrt', 'exp', 'sin', 'cos', 'tanh', 'log')
_LIST, _QUERY, _ARRAY = 300, 120, 4000  # lengths of the arguments that are timed
_SMALL = (20, 12, 1000)
_TOP = 1000  # numbers in the lists are below: they are indices of the arrays
PLACES = (4, 5)
WASTEFUL = (2, 3, 4)


@dataclasses.dataclass(frozen=True)
class Names:
  """What a function calls its arguments, and names for what it computes."""

  v: str  # a list of numbers
  q: str  # a short list of numbers, most not in v
  a: str  # an array
  b: str  # another, as long
  rng: random.Random
  free: list[str]

  def new(self) -> str:
    return self.free.pop()


@dataclasses.dataclass(frozen=True)
class Block:
  """Some lines with one place, between marks; `gold` is '' in a decoy."""

  lines: tuple[str, ...]
  gold: str
  result: str  # an expression


@dataclasses.dataclass(frozen=True)
class Function:
  """A function with places at the odd indices of `pieces`; edits by place, from 1."""

  name: str
  pieces: tuple[str, ...]
  gold: Mapping[int, str]
  wasteful: tuple[str, ...]  # kinds of its blocks, sorted
  decoys: tuple[str, ...]


def source(pieces: Sequence[str]) -> str:
  """The module that a function's pieces make."""
  return HEADER + ''.join(pieces) + '\n'


def view(pieces: Sequence[str]) -> str:
  """The function with its places between marks: «n» and »."""
  text = pieces[0]
  for index in range(1, len(pieces), 2):
    text += f'«{index // 2 + 1}»{pieces[index]}»{pieces[index + 1]}'
  return text


def inputs(rng: np.random.Generator, small: bool) -> tuple[Any, ...]:
  """Arguments of any of the functions."""
  items, queries, length = _SMALL if small else (_LIST, _QUERY, _ARRAY)
  v = rng.integers(1, _TOP, items).tolist()
  q = rng.integers(1, _TOP, queries).tolist()
  q[: queries // 3] = v[: queries // 3]
  return v, q, rng.uniform(0.1, 3, length), rng.uniform(0.1, 3, length)


def _reduce(n: Names) -> Block:
  f, x, t = n.rng.choice(('sum', 'max', 'min')), n.rng.choice((n.a, n.b)), n.new()
  return Block((f'{t} = «{f}({x})»',), f'np.{f}({x})', t)


def _member(n: Names) -> Block:
  f, s, t = n.rng.choice(('list', 'tuple', 'sorted')), n.new(), n.new()
  lines = f'{s} = «{f}({n.v})»', f'{t} = sum(1 for i in {n.q} if i in {s})'
  return Block(lines, f'set({n.v})', t)


def _again(n: Names) -> Block:
  f, op = n.rng.choice(('max', 'min', 'sum')), n.rng.choice('%+*')
  m, t = n.new(), n.new()
  lines = f'{m} = {f}({n.v})', f'{t} = sum(i {op} «{f}({n.v})» for i in {n.q})'
  return Block(lines, m, t)


def _resort(n: Names) -> Block:
  s, t, k = n.new(), n.new(), n.rng.randint(5, 9)
  lines = f'{s} = sorted({n.v})', f'{t} = sum(«sorted({s})»[i % {k}] for i in {n.q})'
  return Block(lines, s, t)


def _converted(n: Names) -> Block:
  x, t, k = n.rng.choice((n.a, n.b)), n.new(), n.rng.randint(6, 8)
  line = f'{t} = sum(«{x}.tolist()»[i] for i in {n.q}[:{k}])'
  return Block((line,), x, t)


def _dot(n: Names) -> Block:
  x, y = n.rng.choice(((n.a, n.b), (n.b, n.a), (n.a, n.a), (n.b, n.b)))
  t = n.new()
  line = f'{t} = «sum(x * y for x, y in zip({x}, {y}))»'
  return Block((line,), f'{x} @ {y}', t)


def _mapped(n: Names) -> Block:
  f, x, r = n.rng.choice(MAPS), n.rng.choice((n.a, n.b)), n.new()
  return Block((f'{r} = «[math.{f}(x) for x in {x}]»',), f'np.{f}({x})', f'np.sum({r})')


def _counted(n: Names) -> Block:
  c, t = n.new(), n.new()
  lines = f'{c} = Counter({n.v})', f'{t} = sum(«{n.v}.count(i)» for i in {n.q})'
  return Block(lines, f'{c}[i]', t)


def _few(n: Names) -> Block:
  f, t = n.rng.choice(('sum', 'max', 'min')), n.new()
  return Block((f'{t} = «{f}({n.q})»',), '', t)


def _ordered(n: Names) -> Block:
  f, s = n.rng.choice(('list', 'sorted')), n.new()
  lines = [f'{s} = «{f}({n.v})»'] + ([f'{s}.sort()'] if f == 'list' else [])
  return Block(tuple(lines), '', f'{s}[{n.rng.randint(0, 9)}]')


def _other(n: Names) -> Block:
  f, m, t = n.rng.choice(('max', 'min')), n.new(), n.new()
  lines = f'{m} = {f}({n.q})', f'{t} = sum(i + «{f}({n.v})» for i in {n.q}[:5])'
  return Block(lines, '', f'{t} + {m}')


def _written(n: Names) -> Block:
  x, w = n.rng.choice((n.a, n.b)), n.new()
  if n.rng.random() < 0.5:
    return Block((f'{w} = «{x}.copy()»', f'{w}[0] = 9'), '', f'{w}[0] - {x}[0]')
  return Block((f'{w} = «{x}.tolist()»', f'{w}.append(9)'), '', f'len({w})')


def _short(n: Names) -> Block:
  t = n.new()
  line = f'{t} = «sum(x * y for x, y in zip({n.q}, {n.v}))»'
  return Block((line,), '', t)


def _recount(n: Names) -> Block:
  c, t = n.new(), n.new()
  lines = f'{c} = Counter({n.q})', f'{t} = sum(«{n.v}.count(i)» for i in {n.q}[:5])'
  return Block(lines, '', f'{t} + len({c})')


_Maker = Callable[[Names], Block]
WASTES: Mapping[str, _Maker] = {
  'reduce': _reduce,
  'member': _member,
  'again': _again,
  'resort': _resort,
  'converted': _converted,
  'dot': _dot,
  'mapped': _mapped,
  'counted': _counted,
}
DECOYS: Mapping[str, _Maker] = {
  'few': _few,
  'ordered': _ordered,
  'other': _other,
  'written': _written,
  'short': _short,
  'recount': _recount,
}


def make(seed: int) -> Function:
  """The function of a seed."""
  rng = random.Random(f'kernels_small/{seed}')
  a, b = rng.sample(ARRAYS, 2)
  free = rng.sample(LOCALS, len(LOCALS))
  names = Names(rng.choice(LISTS), rng.choice(QUERIES), a, b, rng, free)
  count = rng.choice(WASTEFUL)
  wasteful = rng.sample(sorted(WASTES), count)
  decoys = rng.sample(sorted(DECOYS), max(rng.choice(PLACES) - count, 1))
  blocks = [WASTES[kind](names) for kind in wasteful]
  blocks += [DECOYS[kind](names) for kind in decoys]
  rng.shuffle(blocks)
  name = rng.choice(FUNCTIONS)
  lines = [f'def {name}({names.v}, {names.q}, {names.a}, {names.b}):']
  lines += [f'    {line}' for block in blocks for line in block.lines]
  lines.append(f'    return {", ".join(block.result for block in blocks)}')
  text = '\n'.join(lines)
  pieces = tuple(text.replace('»', '«').split('«'))
  gold = {place: block.gold for place, block in enumerate(blocks, 1) if block.gold}
  return Function(name, pieces, gold, tuple(sorted(wasteful)), tuple(sorted(decoys)))


def edited(function: Function, edits: Mapping[int, str]) -> tuple[str, ...]:
  """Its pieces with other texts at some places."""
  pieces = list(function.pieces)
  for place, text in edits.items():
    pieces[2 * place - 1] = text
  return tuple(pieces)
