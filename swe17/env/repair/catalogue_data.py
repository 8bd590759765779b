"""Functions of lists, dicts and tables, and what to call them with."""

import random

# Names and not only the module: what follows is read as a table.
from swe17.env.repair import inputs
from swe17.env.repair.inputs import (
  dicts,
  entry,
  ints,
  lists,
  ordered,
  parts,
  pick,
  text,
  tuples,
)

_ITEM = ints(0, 30)
_HEAP = ordered(_ITEM, 0, 9)


def _max_heap(value: list[int]) -> list[int]:
  return value[::-1]


def _sift(change: bool) -> inputs.Generator:
  """A heap with one item out of place, and that place."""

  def make(rng: random.Random) -> tuple[list[int], int]:
    heap = sorted(rng.randint(0, 30) for _ in range(rng.randint(1, 9)))
    at = rng.randrange(len(heap))
    heap = heap[::-1] if change else heap
    heap[at] = rng.randint(0, 30)
    return heap, at

  return make


def _down(change: bool) -> inputs.Generator:
  """Arguments of _siftdown: heap, start position, position."""
  return inputs.then(_sift(change), lambda pair: (pair[0], 0, pair[1]))


_STATS = tuples(ints(0, 9), ints(0, 9), ints(0, 50), ints(0, 90))


def _callers(low: int) -> inputs.Generator:
  return dicts(pick('f', 'g', 'h'), _STATS, low, 3)


_PSTATS = inputs.then(tuples(_STATS, _callers(0)), lambda p: (*p[0], p[1]))

ENTRIES = (
  entry('heapq.heappop', _HEAP),
  entry('heapq.heapreplace', _HEAP, _ITEM),
  entry('heapq.heappushpop', _HEAP, _ITEM),
  entry('heapq._heappop_max', inputs.then(_HEAP, _max_heap)),
  entry('heapq._heapreplace_max', inputs.then(_HEAP, _max_heap), _ITEM),
  inputs.Entry('heapq', '_siftdown', _down(False)),
  inputs.Entry('heapq', '_siftup', _sift(False)),
  inputs.Entry('heapq', '_siftdown_max', _down(True)),
  inputs.Entry('heapq', '_siftup_max', _sift(True)),
  entry('bisect.insort_left', ordered(ints(0, 9), 0, 8), pick(0, 1.0, 3, 5.0, 5, 8, 9)),
  entry(
    'bisect.insort_right', ordered(ints(0, 9), 0, 8), pick(0, 1.0, 3, 5.0, 5, 8, 9)
  ),
  entry('re._compiler._generate_overlap_table', lists(ints(0, 1), 1, 9)),
  entry('operator.countOf', lists(ints(0, 3), 0, 8), ints(0, 3)),
  entry('operator.indexOf', lists(ints(0, 5), 0, 8), ints(0, 5)),
  entry('unittest.util._shorten', text('abcdef', 0, 60), ints(0, 9), ints(0, 9)),
  entry(
    'unittest.util._count_diff_hashable',
    lists(ints(0, 3), 0, 6),
    lists(ints(0, 3), 0, 6),
  ),
  entry('pstats.add_func_stats', _PSTATS, _PSTATS),
  entry(
    'sysconfig.expand_makefile_vars',
    parts('$(A) ${B} x /usr $(A)/b ${C} $ ( a', 0, 5),
    inputs.then(
      tuples(pick('u', '$(B)', 'w'), pick('', 'v'), pick('y', '${B}')),
      lambda t: dict(zip('ABC', t, strict=True)),
    ),
  ),
  entry('tabnanny.format_witnesses', lists(tuples(ints(1, 8), ints(0, 3)), 0, 4)),
  entry('mailcap.parsefield', text('ab;\\ ', 0, 9), ints(0, 4), ints(3, 9)),
  entry(
    'mailcap.findparam',
    pick('Name', 'x', 'charset'),
    lists(parts('name= x= charset= NAME= X=1 b utf-8', 1, 3), 0, 4),
  ),
  entry(
    'mailcap.lookup',
    dicts(
      pick('text/*', 'text/a', 'image/*'),
      lists(dicts(pick('view', 'edit', 'lineno'), ints(0, 9), 1, 3), 1, 2),
      0,
      3,
    ),
    pick('text/a', 'text/b', 'image/x'),
    pick(None, 'view', 'edit'),
  ),
  entry(
    'multiprocessing.spawn.is_forking',
    lists(pick('a', '--multiprocessing-fork', 'b'), 0, 4),
  ),
  entry(
    'multiprocessing.util.is_abstract_socket_namespace',
    inputs.either(text('\x00ab', 0, 4), inputs.raw(b'\x00ab', 0, 4), ints(0, 3)),
  ),
  entry(
    'optparse._match_abbrev',
    pick('--a', '--ab', '--abc', '--b', '--q', '-'),
    dicts(parts('--a --ab --abc --abd --ba --bc', 1, 1), ints(1, 2), 1, 5),
  ),
  entry(
    '_osx_support._save_modified_value',
    dicts(pick('A', 'B', '_OSX_SUPPORT_INITIAL_A'), pick('x', 'y', ''), 0, 3),
    pick('A', 'B', 'C'),
    pick('x', 'y', ''),
  ),
  entry(
    'ctypes._aix.get_shared',
    lists(tuples(parts('/lib/a [x.o] [y.o] b [', 0, 4), pick(0)), 0, 3),
  ),
  entry(
    'ctypes._aix.get_member',
    pick('c', 'z'),
    lists(
      pick(
        'libc.so', 'libz64.so', 'libc.so.1', 'libz.so.2', 'shr_64.o', 'libc.so.10', 'x'
      ),
      0,
      4,
    ),
  ),
  entry(
    'email.quoprimime._max_append',
    lists(text('abc', 1, 6), 0, 3),
    inputs.either(text('abc ', 0, 6), ints(65, 90)),
    ints(3, 9),
    pick('', ' ', '-'),
  ),
  entry(
    'email._header_value_parser._steal_trailing_WSP_if_exists',
    lists(text('ab \t', 0, 4), 0, 3),
  ),
  entry('genericpath.commonprefix', lists(parts('a b / c', 0, 4), 0, 3)),
  entry(
    'urllib.request.parse_keqv_list',
    lists(
      inputs.joined(
        pick('a=', 'b=', 'c==', 'd'), pick('"x"', '"y', 'z"', 'q', '=w', '"="')
      ),
      0,
      3,
    ),
  ),
  entry(
    'http.cookiejar.join_header_words',
    lists(
      lists(
        tuples(pick('a', 'b', 'path'), pick(None, 'x', '/y', 'a"b', 'z z', '')), 0, 3
      ),
      0,
      3,
    ),
  ),
  entry(
    'codeop._is_syntax_error',
    parts("x was~never~closed ( '", 1, 2),
    parts("x was~never~closed ( '", 1, 2),
  ),
)
