"""The tools of the retrieval family: what they say, and what they refuse to do."""

import asyncio
import time

import pytest

from swe17.env.retrieval import search, trees

FILES = {
  'p/__init__.py': 'from p.core import run',
  'p/core.py': '''import os

class Engine:
  def start(self):
    return run(self)  # run

def run(engine):
  """Starts it."""
  return engine''',
  'p/sub/notes.txt': 'run this {e<=2} first\n' + 'x' * 5000,
}
SHELF = search.Shelf(trees.Tree(FILES, frozenset({'p/data.bin'})))


def small(**changes) -> search.Shelf:
  return search.Shelf(SHELF.tree, search.Limits(**changes))


def test_grep_says_path_line_and_text():
  assert search.grep(SHELF, r'\brun\(', '').split('\n') == [
    'p/core.py:5: return run(self)  # run',
    'p/core.py:7: def run(engine):',
  ]
  assert search.grep(SHELF, 'run', 'p/sub').startswith('p/sub/notes.txt:1: run this')
  assert search.grep(SHELF, 'walrus', '') == 'nothing found'


def test_grep_can_name_the_definition_around_its_last_hit():
  shelf = search.Shelf(SHELF.tree, search.SMALL)
  assert search.grep(shelf, 'run', 'p/core.py').split('\n') == [
    'p/core.py:4-5 start: urn run(s',
    'p/core.py:7-9 run: def run(e',
  ]
  assert search.grep(shelf, 'import os', '') == 'p/core.py:1-1 : import os'


def test_list_outlines_a_python_file():
  assert search.list_(SHELF, 'p') == '__init__.py\ncore.py\ndata.bin\nsub/'
  want = '3-5 Engine\n4-5 Engine.start\n7-9 run'
  assert search.list_(SHELF, 'p/core.py') == want
  assert search.list_(SHELF, 'p/sub/notes.txt') == '2 lines, no definitions'
  assert search.list_(SHELF, '') == 'p/'


def test_read_numbers_lines_and_ends_with_the_file():
  assert (
    search.read(SHELF, 'p/core.py', 8, 99) == '8   """Starts it."""\n9   return engine'
  )
  assert search.read(SHELF, 'p/core.py', 50, 99) == 'it has 9 lines'
  assert 'want 1 <= first' in search.read(SHELF, 'p/core.py', 3, 2)


def test_glob_matches_whole_paths():
  assert search.glob(SHELF, '*.py') == 'p/__init__.py\np/core.py'
  assert search.glob(SHELF, 'core.py') == 'nothing found'
  assert 'over 200' in search.glob(SHELF, '*' * 300)


@pytest.mark.parametrize(
  'path', ['../p/core.py', '/etc/passwd', 'p/../../etc/passwd', '~/x', 'p\0', '..']
)
def test_nothing_outside_of_the_tree_can_be_named(path):
  assert search.read(SHELF, path, 1, 5).startswith('no such file')
  assert search.list_(SHELF, path).startswith('no such path')
  assert search.grep(SHELF, '.', path).startswith('no such path')


def test_a_path_that_stays_inside_may_wander():
  assert search.read(SHELF, './p/sub/../core.py', 1, 1) == '1 import os'


def test_links_and_binary_files_are_no_part_of_what_is_read(tmp_path):
  (tmp_path / 'secret.py').write_text('secret = 1')
  folder = tmp_path / 'p'
  (folder / '__pycache__').mkdir(parents=True)
  (folder / '__pycache__' / 'x.py').write_text('cached = 1')
  (folder / 'a.py').write_bytes(b'\xef\xbb\xbfx = 1\r\ny = 2\r\n')
  (folder / 'link.py').symlink_to(tmp_path / 'secret.py')
  (folder / 'linked').symlink_to(tmp_path)
  (folder / 'b.bin').write_bytes(b'a\0b')
  (folder / 'latin.py').write_bytes(b'x = "\xe9"')
  (folder / 'huge.py').write_text('x = 1\n' * 100_000)
  tree = trees.read(folder, 'p')
  assert dict(tree.files) == {'p/a.py': 'x = 1\ny = 2'}
  assert tree.binary == {'p/b.bin', 'p/latin.py', 'p/huge.py'}
  shelf = search.Shelf(tree)
  assert search.read(shelf, 'p/b.bin', 1, 1) == 'a binary or very large file'
  assert search.grep(shelf, 'x', 'p/b.bin') == 'nothing found'


@pytest.mark.parametrize(
  'pattern',
  [r'(?:x|xx|xxx)+$', r'(x+x+)+y', r'(?=(x+)+y)x', r'(.*)*\1y', r'(x*)*(x*)*y'],
)
def test_a_hostile_pattern_ends_and_blocks_nobody(pattern):
  files = {'p/a.txt': '\n'.join(['x' * 900] * 300)}
  shelf = search.Shelf(trees.Tree(files), search.Limits(seconds=0.3))

  async def both() -> tuple[str, int]:
    ticks = 0
    running = asyncio.ensure_future(asyncio.to_thread(search.grep, shelf, pattern, ''))
    while not running.done():
      await asyncio.sleep(0.01)
      ticks += 1
    return running.result(), ticks

  began = time.monotonic()
  text, ticks = asyncio.run(both())
  assert time.monotonic() - began < 60  # a pattern that nothing stops takes days
  assert text == 'nothing found' or text.startswith(('timed out', 'p/a.txt'))
  assert ticks >= 1 or not text.startswith('timed out')


def test_a_pattern_that_backtracks_for_ever_is_told_so():
  files = {'p/a.txt': '\n'.join(['x' * 900] * 300)}
  shelf = search.Shelf(trees.Tree(files), search.Limits(seconds=0.05))
  assert search.grep(shelf, r'(?:x|xx|xxx)+$y', '').startswith('timed out')


@pytest.mark.parametrize('pattern', ['(', '*', '[a', 'a' * 201, '', '(?P<x>a)(?P<x>b)'])
def test_a_bad_pattern_is_an_answer(pattern):
  assert search.grep(SHELF, pattern, '').startswith('bad pattern: ')


def test_braces_mean_what_they_mean_in_re():
  # regex would take {e<=2} for up to two errors, which is slow and matches anything.
  assert search.grep(SHELF, 'is {e<=2}', '').startswith('p/sub/notes.txt:1:')
  assert search.grep(SHELF, 'xyz{e<=2}', '') == 'nothing found'
  assert search.grep(SHELF, 'x{40}', '').startswith('p/sub/notes.txt:2:')


def test_every_answer_is_bounded_and_says_what_it_left_out():
  assert search.grep(small(hits=1), 'run', '').split('\n')[1:] == ['... 3 more']
  assert search.list_(small(entries=2), 'p').split('\n')[2:] == ['... 2 more']
  assert search.read(small(lines=3), 'p/core.py', 1, 9).split('\n')[3:] == [
    '... 6 more'
  ]
  assert search.glob(small(entries=1), '*').split('\n')[1:] == ['... 3 more']
  long = search.read(small(characters=50), 'p/sub/notes.txt', 1, 2)
  assert len(long) < 80 and long.endswith('... 1 more')
  text = search.grep(SHELF, 'x{100}', '')
  assert len(text) < 150
