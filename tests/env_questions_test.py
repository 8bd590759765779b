"""Questions and their answers on a tree whose every call is known by hand."""

import pytest

from swe17.env.retrieval import questions, search, small_trees, symbols, trees

FILES = {
  'p/__init__.py': 'from .core import Base, launch\n',
  'p/core.py': '''from .errors import BadValue, Oops
from .limits import MOST as _MOST

RETRIES = 3


class Base:
  def act(self, retries=RETRIES):
    return launch(retries)

  @property
  def shown(self):
    return launch(0)


def launch(n, most=_MOST):
  """Calls launch_all? No: launch_all calls launch."""
  if n > most:
    raise BadValue(n)
  return n


def launch_all(ns):
  def inner(n):
    return launch(n)

  if not ns:
    raise Oops
  return [inner(n) for n in ns]
''',
  'p/more.py': """from p import core
from p.core import Base, launch_all


class Child(Base):
  def act(self, retries=2):
    return core.launch(retries)


class Grandchild(Child):
  def act(self):
    return super().act()

  def other(self):
    return launch_all([self.act()])


class Stranger:
  def act(self):
    return None
""",
  'p/errors.py': """class Oops(Exception):
  pass


class BadValue(Oops):
  pass
""",
  'p/limits.py': 'MOST = (\n  9\n)\n',
  'p/tests/test_core.py': """from p.core import launch


def test_launch():
  assert launch(1) == 1


def helper():
  return launch(2)
""",
}
TREE = trees.Tree(FILES)
INDEX = symbols.index(TREE)


def answer(kind: str, subject: str) -> dict:
  return dict(questions.ask(INDEX, kind, subject).truth)


def span(path: str, name: str) -> tuple[int, int]:
  (found,) = INDEX.by_place[path, name]
  return found.first, found.last


CORE, MORE = 'p/core.py', 'p/more.py'


def test_callers_are_whole_functions_and_nested_ones_belong_to_the_outer():
  got = answer('callers', f'{CORE}:launch')
  assert got == {
    CORE: (span(CORE, 'Base.act'), span(CORE, 'Base.shown'), span(CORE, 'launch_all')),
    MORE: (span(MORE, 'Child.act'),),
    'p/tests/test_core.py': ((4, 5), (8, 9)),
  }
  assert span(CORE, 'Base.shown') == (11, 13)  # the decorator is part of it


def test_second_asks_for_the_callers_of_callers():
  # launch_all is called by Grandchild.other alone; act is no sure name, so it is not.
  with pytest.raises(questions.NoQuestionError, match='of a caller'):
    questions.ask(INDEX, 'second', f'{CORE}:launch')
  tree = trees.Tree(
    {
      'q/a.py': 'def low():\n  pass\n\n\ndef mid():\n  low()\n',
      'q/b.py': 'from q.a import mid\n\n\ndef high():\n  return mid()\n',
    }
  )
  got = questions.ask(symbols.index(tree), 'second', 'q/a.py:low')
  assert dict(got.truth) == {'q/b.py': ((4, 5),)}
  assert got.names == ('low',)


def test_overrides_are_found_at_any_depth_and_strangers_are_not():
  got = answer('overrides', f'{CORE}:Base.act')
  assert got == {MORE: (span(MORE, 'Child.act'), span(MORE, 'Grandchild.act'))}


def test_overridden_is_the_method_of_the_nearest_base():
  got = answer('overridden', f'{MORE}:Grandchild.act')
  assert got == {MORE: (span(MORE, 'Child.act'),)}
  with pytest.raises(questions.NoQuestionError):
    questions.ask(INDEX, 'overridden', f'{MORE}:Stranger.act')


def test_raisers_of_derived_exceptions_leave_out_the_base_itself():
  assert answer('raisers', 'p/errors.py:Oops') == {CORE: (span(CORE, 'launch'),)}
  with pytest.raises(questions.NoQuestionError):
    questions.ask(INDEX, 'raisers', 'p/errors.py:BadValue')


def test_a_default_is_followed_through_imports_to_its_one_assignment():
  assert answer('default', f'{CORE}:launch:most') == {'p/limits.py': ((1, 3),)}
  assert answer('default', f'{CORE}:Base.act:retries') == {CORE: ((4, 4),)}


def test_tests_that_cover_a_function_are_those_that_call_it():
  assert answer('tests', f'{CORE}:launch') == {'p/tests/test_core.py': ((4, 5),)}


def test_callees_are_resolved_through_imports():
  tree = trees.Tree(
    {
      'q/a.py': 'def one():\n  pass\n\n\ndef two():\n  pass\n',
      'q/b.py': (
        'from q.a import one\nfrom q import a\n\n\n'
        'def both(x):\n  x.append(one())\n  return len(a.two())\n'
      ),
    }
  )
  got = questions.ask(symbols.index(tree), 'callees', 'q/b.py:both')
  assert dict(got.truth) == {'q/a.py': ((1, 2), (5, 6))}


@pytest.mark.parametrize(
  'more',
  [
    'def launch():\n  pass\n',  # defined twice
    'def f(launch):\n  return launch()\n',  # a parameter of the name
    'launch = print\n',  # bound to something else
    'from elsewhere import launch\n',  # another one
    'from p.core import launch as go\n\n\ndef f():\n  go()\n',  # called by another name
    'def f(rocket):\n  return rocket.launch()\n',  # perhaps a method of something else
  ],
)
def test_nothing_is_asked_about_a_name_with_two_meanings(more):
  index = symbols.index(trees.Tree({**FILES, 'p/extra.py': more}))
  (launch,) = index.by_place[CORE, 'launch']
  assert INDEX.sure(INDEX.by_place[CORE, 'launch'][0])
  assert not index.sure(launch)
  with pytest.raises(questions.NoQuestionError):
    questions.ask(index, 'callers', f'{CORE}:launch')


def test_names_that_common_types_have_are_never_sure():
  tree = trees.Tree({'q/a.py': 'class A:\n  def append(self):\n    pass\n'})
  index = symbols.index(tree)
  assert not index.sure(index.by_place['q/a.py', 'A.append'][0])


def test_a_file_that_does_not_parse_is_left_out():
  index = symbols.index(trees.Tree({**FILES, 'p/bad.py': 'def (:\n'}))
  assert [d.name for d in index.defs] == [d.name for d in INDEX.defs]


def made_up(callers: int) -> symbols.Index:
  """A package in which x is called by c0.., each of which d0.. calls."""
  files = {'r/x.py': 'def xaxis():\n  pass\n'}
  for i in range(callers):
    files[f'r/c{i}.py'] = (
      f'from r.x import xaxis\n\n\ndef caller{i}():\n  # not xaxis\n  return xaxis()\n'
    )
    files[f'r/d{i}.py'] = (
      f'from r.c{i} import caller{i}\n\n\ndef deep{i}():\n  return caller{i}()\n'
    )
    files[f'r/o{i}.py'] = f'def other{i}():\n  """As xaxis does."""\n  return {i}\n'
  return symbols.index(trees.Tree(files))


def test_a_cut_keeps_definitions_as_they_are_and_its_question_is_of_the_cut():
  index = made_up(6)
  tree, subject = small_trees.cut(index, 'r/x.py:xaxis', 0)
  assert set(tree.files) <= {f'{c}.py' for c in 'abcdefgh'}
  text = '\n'.join(tree.files.values())
  whole = [index.text(d) for d in index.defs]
  assert sum(piece in text for piece in whole) >= 9
  assert all(len(lines) <= small_trees.MAX_LINES for lines in tree.lines.values())
  shelf = search.Shelf(tree, search.SMALL)
  asked = questions.ask(shelf.index, 'second', subject)
  assert sum(map(len, asked.truth.values())) == 4  # of the callers that are kept
  for path, ranges in asked.truth.items():
    for first, last in ranges:
      assert 'def deep' in tree.lines[path][first - 1]
      assert last == first + 1


def test_cuts_differ_by_seed_and_not_otherwise():
  index = made_up(6)
  cuts = [small_trees.cut(index, 'r/x.py:xaxis', seed)[0].sha for seed in (0, 0, 1)]
  assert cuts[0] == cuts[1] != cuts[2]


def test_a_single_caller_is_no_cut():
  with pytest.raises(questions.NoQuestionError, match='too few callers'):
    small_trees.cut(made_up(1), 'r/x.py:xaxis', 0)
