"""The score of an answer: both F_beta by hand, and that padding one never pays."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from swe17.env.retrieval import score

TRUTH = {'a/b.py': ((3, 9),), 'a/c.py': ((1, 2), (20, 29))}


def value(text: str) -> float:
  return score.score(score.parse(text), TRUTH).value


def test_f_beta_by_hand():
  # 3 right of 4 given of 6 wanted: P .75, R .5, F = 1.25 * .375 / (.1875 + .5)
  assert score.f_beta(3, 4, 6) == pytest.approx(0.46875 / 0.6875)
  assert score.f_beta(5, 5, 5) == 1.0
  assert score.f_beta(0, 5, 5) == 0.0


def test_empty_against_empty_is_one_and_empty_against_something_is_none():
  assert score.f_beta(0, 0, 0) == 1.0
  assert score.f_beta(0, 0, 3) == score.f_beta(0, 3, 0) == 0.0
  assert score.score({}, {}).value == 1.0
  assert score.score({}, TRUTH).value == 0.0


def test_gold_scores_one_and_precision_counts_more_than_recall():
  assert value(score.text(TRUTH)) == 1.0
  part, more = value('a/b.py:3-9'), value(score.text(TRUTH) + ', z.py:1-19')
  assert part < 1 and more < 1
  # Half of the lines, all right, beats all of them with as many wrong ones.
  assert score.f_beta(5, 5, 10) > score.f_beta(10, 20, 10)


@pytest.mark.parametrize(
  'padded',
  [
    'a/b.py:1-999999999, a/c.py:1-999999999',  # ranges that never end
    'a/b.py:1-400, a/c.py:1-400',  # whole files
    '/etc/passwd:1-19, ../x.py:1-30, a/b.py:3-9, a/c.py:1-2, a/c.py:20-29',
  ],
)
def test_padding_an_answer_does_not_pay(padded):
  assert value(padded) < 0.9 * value(score.text(TRUTH))


def test_naming_a_line_twice_changes_nothing():
  once = value('a/b.py:3-9, q.py:1-5')
  assert value('a/b.py:3-9, a/b.py:3-9, a/b.py:4-6, q.py:1-5, q.py:2-2') == once
  assert value('./a/b.py:3-9, q.py:1-5') == once


def test_a_huge_range_costs_no_memory_and_scores_nearly_nothing_on_lines():
  got = score.score(score.parse('a/b.py:1-999999999'), {'a/b.py': ((3, 9),)})
  assert got.files == 1.0 and got.lines < 1e-7


@pytest.mark.parametrize(
  ('text', 'why'),
  [
    ('a.py', 'want path:first-last'),
    ('a.py:9-3', '1 <= first <= last'),
    ('a.py:0-3', '1 <= first <= last'),
    ('a.py:1-2 and more', 'want path:first-last'),
    ('a.py:1-2x', 'after a range'),
    (', '.join(f'a.py:{i}' for i in range(1, 70)), 'over 64 ranges'),
    ('x' * 5000, 'want at most'),
  ],
)
def test_an_answer_that_cannot_be_read_is_refused_with_the_reason(text, why):
  with pytest.raises(ValueError, match=why):
    score.parse(text)


def test_answers_may_be_separated_by_lines_commas_or_spaces():
  want = {'a.py': ((1, 2), (5, 5)), 'b.py': ((7, 8),)}
  for text in (
    'a.py:1-2, a.py:5, b.py:7-8',
    'a.py:1-2\na.py:5-5\nb.py:7-8\n',
    ' a.py:1-2;a.py:5 b.py:7-8',
  ):
    assert score.parse(text) == want
  assert score.parse(' \n') == {}


_spans = st.lists(
  st.tuples(st.integers(1, 60), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1])),
  max_size=6,
)


@given(_spans, _spans)
def test_intervals_count_as_sets_of_lines_do(a, b):
  lines = [{n for x, y in spans for n in range(x, y + 1)} for spans in (a, b)]
  got = score.score({'f': score.union(a)}, {'f': score.union(b)})
  assert got.lines == score.f_beta(len(lines[0] & lines[1]), *map(len, lines))
