"""Faults: single edits that exist, are unique, and can be undone by another one."""

import ast

from hypothesis import given
from hypothesis import strategies as st
import pytest

from swe17.env.repair import faults, functions

CLAMP = """def clamp(x, low, high=None):
    if x < low:
        raise ValueError('low' + '.')
    for i in range(len(x)):
        if not x[i] in low and x[0] == '-':
            return x[:i] + x[i + 1:]
    return f'{low + 1}' + str(high - 1)"""


def edits(source, line):
  return {(f.old, f.new) for f in faults.candidates(source) if f.line == line}


def sources():
  found = [functions.source_of(e.module, e.function) for e in CATALOGUE.values()]
  return [source for source in found if source is not None]


CATALOGUE = functions.catalogue()


def test_every_candidate_of_the_catalogue_is_undone_by_a_candidate():
  for source in sources():
    for fault in faults.candidates(source):
      faulty = faults.apply(source, fault.line, fault.old, fault.new)
      undone = (
        faults.apply(faulty, f.line, f.old, f.new) for f in faults.candidates(faulty)
      )
      assert source in undone, (source, fault)


def test_candidates_parse_and_differ_and_name_a_kind():
  for source in sources():
    found = faults.candidates(source)
    results = {faults.apply(source, f.line, f.old, f.new) for f in found}
    assert len(results) == len(found)
    assert source not in results
    for result in results:
      ast.parse(result)
    assert {f.kind for f in found} <= set(faults.KINDS) - {'dropped_line'}
    assert [f.line for f in found] == sorted(f.line for f in found)


def test_old_is_no_longer_than_uniqueness_asks_for():
  source = 'def f(a, b):\n    return a + b + a'
  assert edits(source, 2) == {
    ('a +', 'b +'),
    ('+ b', '- b'),
    ('b', 'a'),
    ('+ a', '- a'),
    ('+ a', '+ b'),
  }


def test_golden_candidates_of_a_small_function():
  source = 'def f(n):\n    while n >= 2:\n        n -= 1\n    return n == 0'
  assert [(f.line, f.old, f.new, f.kind) for f in faults.candidates(source)] == [
    (2, '>=', '<=', 'comparison'),
    (2, '>=', '>', 'comparison'),
    (2, '2', '1', 'off_by_one'),
    (2, '2', '3', 'off_by_one'),
    (3, '-=', '+=', 'operator'),
    (3, '1', '0', 'off_by_one'),
    (3, '1', '2', 'off_by_one'),
    (4, '==', '!=', 'comparison'),
    (4, '0', '1', 'off_by_one'),
  ]


def test_messages_headers_loops_and_f_strings_are_left_alone():
  assert edits(CLAMP, 1) == set()
  assert edits(CLAMP, 3) == set()
  assert ('in', 'not in') not in edits(CLAMP, 4)
  assert not any('low' in old for old, _ in edits(CLAMP, 7))


def test_indices_and_bounds_move_by_one_both_ways():
  assert ('len(x)', 'len(x) + 1') in edits(CLAMP, 4)
  assert {('i]', 'i + 1]'), ('i + 1', 'i')} <= edits(CLAMP, 6)
  assert ('i]', 'i + 1]') in edits(CLAMP, 5)


def test_comparison_is_not_negated_twice():
  source = 'def f(a):\n    if a < 1:\n        return a\n    if a.b:\n        return 2'
  assert ('if ', 'if not ') not in edits(source, 2)
  assert ('if ', 'if not ') in edits(source, 4)
  negated = source.replace('if a.b', 'if not a.b')
  assert ('if not ', 'if ') in edits(negated, 4)


def test_dropped_line_becomes_pass():
  source = 'def f(a):\n    a += 1\n    return a'
  (fault,) = faults.dropped_lines(source)
  assert fault == faults.Fault(2, 'a += 1', 'pass', 'dropped_line')
  assert 'pass' in faults.apply(source, 2, fault.old, fault.new)


@pytest.mark.parametrize(
  ('line', 'old', 'new', 'says'),
  [
    (0, 'a', 'b', 'no line 0, last is 3'),
    (4, 'a', 'b', 'no line 4, last is 3'),
    (2, 'z', 'b', 'old occurs 0 times in line 2'),
    (2, 'aa', 'b', 'old occurs 2 times in line 2'),
    (2, '', 'b', 'old occurs 0 times in line 2'),
    (2, 'x', 'a\nb', 'new must be one line'),
    (2, 'x', 'x', 'old and new are equal'),
  ],
)
def test_impossible_edits_say_why_in_few_words(line, old, new, says):
  with pytest.raises(ValueError, match=says) as e:
    faults.apply('def f():\n    x = aaa\n    return x', line, old, new)
  assert len(str(e.value).split()) <= 8


@given(st.lists(st.text('ab<', max_size=6), min_size=1, max_size=4), st.data())
def test_apply_changes_one_line_and_only_its_unique_text(lines, data):
  line = data.draw(st.integers(1, len(lines)))
  old = data.draw(st.text('ab<', min_size=1, max_size=3))
  text = lines[line - 1]
  places = [i for i in range(len(text)) if text.startswith(old, i)]
  if len(places) != 1:
    with pytest.raises(ValueError):
      faults.apply('\n'.join(lines), line, old, 'X')
    return
  after = faults.apply('\n'.join(lines), line, old, 'X').split('\n')
  assert after[: line - 1] == lines[: line - 1]
  assert after[line:] == lines[line:]
  at = places[0]
  assert after[line - 1] == text[:at] + 'X' + text[at + len(old) :]
