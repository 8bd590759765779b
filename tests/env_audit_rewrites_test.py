"""Rewrites that mean the same: tried on functions, told by what they compute."""

import textwrap

import pytest

from swe17.env.audit import rewrites

FUNCTIONS = {
  'a loop': (
    """
    def f(a, x, lo=0):
      hi = len(a)
      while lo < hi:
        mid = (lo + hi) // 2
        if a[mid] < x:
          lo = mid + 1
        else:
          hi = mid
      return lo
    """,
    [([1, 2, 4], 2), ([], 1), ([1, 1, 1], 9), ([3], 3, 0)],
  ),
  'branches': (
    """
    def f(n):
      if n == 0:
        return 'none'
      elif n < 0:
        found = -n
      else:
        found = n
      kind = 'odd' if found % 2 else 'even'
      return kind if found < 9 else kind + '!'
    """,
    [(0,), (-3,), (4,), (11,), (-12,)],
  ),
  'names that look like locals': (
    """
    def f(text, sep=','):
      import re as rx
      parts = [p.strip() for p in rx.split(sep, text)]
      try:
        n = int(parts[0])
      except ValueError as e:
        return str(e)[:7], len(parts)
      key = lambda p, n=n: (len(p), n)
      return sorted(parts, key=key), dict(n=n)
    """,
    [('3,b,a',), ('x',), ('1;2;33', ';')],
  ),
  'a generator': (
    """
    def f(n):
      for i in range(n):
        if i % 2 == 0:
          continue
        total = i * i
        yield total
      if n > 3:
        return
      yield -1
    """,
    [(0,), (3,), (6,)],
  ),
}


def results(source: str, cases) -> list:
  scope: dict = {}
  exec(source, scope)
  found = [scope['f'](*case) for case in cases]
  return [list(x) if hasattr(x, '__next__') else x for x in found]


@pytest.mark.parametrize('name', FUNCTIONS)
def test_a_version_that_means_the_same_computes_the_same(name):
  text, cases = FUNCTIONS[name]
  source = textwrap.dedent(text).strip()
  want = results(source, cases)
  made = dict(rewrites.same(source))
  assert 'all of it' in made
  for label, version in made.items():
    assert results(version, cases) == want, f'{label}:\n{version}'
  assert len(set(made.values())) >= len(made) - 1  # 'all of it' may be the only one


def test_each_rewrite_does_what_it_says():
  def after(label: str, source: str) -> str:
    return dict(rewrites.same(source)).get(label, '')

  assert '7 > x' in after('turned comparisons', 'def f(x):\n  return x < 7')
  assert after('turned comparisons', 'def f(x):\n  return g(x) < 7') == ''
  assert 'return the_result' in after('temporaries', 'def f(x):\n  return x + 1')
  branch = 'def f(x):\n  if x:\n    return 1\n  else:\n    return 2'
  assert 'else' not in after('early returns', branch)
  assert 'if not x' in after('exchanged branches', branch)
  assert 'else' in after(
    'else after a return', 'def f(x):\n  if x:\n    return 1\n  x()'
  )
  assert after('renamed locals', 'def f(x):\n  y = x\n  return y').count('v0_y') == 2
  assert after('renamed locals', 'def f(x):\n  y = x\n  return locals()') == ''
  assert list(rewrites.same('def f(x):\n  return x')) == []


def test_versions_without_work_are_none_of_them_the_same():
  made = dict(rewrites.less('def f(self, text):\n  return text.strip()'))
  assert made['returns its first argument'].endswith('return text')
  assert len(set(made.values())) == len(made) == 6
  assert 'returns 0' not in dict(rewrites.less('def f():\n  return 0'))


def test_what_is_no_function_is_refused():
  with pytest.raises(ValueError, match='want one function'):
    list(rewrites.same('x = 1'))
