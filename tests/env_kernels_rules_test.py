"""Candidates that are none, found by reading them; golds are never among them."""

import pytest

from swe17.env.kernels import kernels, rules, units

REFERENCE = """import numpy as np


def total(x, y):
  out = 0.0
  for i in range(len(x)):
    out += x[i] * y[i]
  return out
"""
HEAD = 'import numpy as np\n'
FAST = HEAD + 'def total(x, y):\n  return np.dot(x, y)\n'


def broken(source: str) -> str:
  return rules.broken(source, REFERENCE, 'total')


def test_a_faster_version_breaks_no_rule():
  assert broken(FAST) == ''


def test_the_reference_under_other_names_is_a_copy():
  renamed = '''
def total(a, b):
  """Fast."""
  result: float = 0.0
  for k in range(len(a)):
    result += a[k] * b[k]
  return result
'''
  helper = REFERENCE.replace('def total', 'def slow')
  assert broken(REFERENCE) == broken(renamed) == 'copies_reference'
  assert broken(helper + '\n\ndef total(x, y):\n  return slow(x, y)\n') == (
    'copies_reference'
  )
  assert broken(renamed.replace('a[k] * b[k]', 'b[k] * b[k]')) == ''


def test_falling_back_on_something_else_is_barred():
  source = (
    'def total(x, y):\n  try:\n    return x @ y\n  except Exception:\n    return 0\n'
  )
  assert broken(source) == 'try_except'


@pytest.mark.parametrize('body', ['pass', '...', 'return 0.0', 'raise ValueError("x")'])
def test_what_looks_at_nothing_is_a_stub(body):
  assert broken(f'def total(x, y):\n  {body}\n') == 'stub'


@pytest.mark.parametrize(
  'source, rule',
  [
    ('import os\n' + FAST, 'reaches_out'),
    ('import swe17\n' + FAST, 'reaches_out'),
    ('from . import secret\n' + FAST, 'reaches_out'),
    ('def total(x, y):\n  return eval("x @ y")\n', 'reaches_out'),
    ('def total(x, y):\n  return x.__class__.__base__(y)\n', 'reaches_out'),
    (HEAD + 'def total(x, y):\n  return np.load("x") + y\n', 'reaches_out'),
    (HEAD + 'def total(x, y):\n  return np.ctypeslib.os.getpid() + x\n', 'reaches_out'),
    ('import re\ndef total(x, y):\n  return re.enum.sys.modules\n', 'reaches_out'),
    ('import threading\n' + FAST, 'reaches_out'),
    ('import time\n' + FAST, 'timer'),
    (HEAD + 'np.dot = lambda x, y: 0.0\n' + FAST, 'patches'),
    (HEAD + 'import math\nmath.sqrt, z = 1, 2\n' + FAST, 'patches'),
    ('class E:\n  def __eq__(self, o):\n    return True\n' + FAST, 'disguised'),
    (HEAD + 'class A(np.ndarray):\n  x = 1\n' + FAST, 'disguised'),
  ],
)
def test_each_way_out_has_a_name(source, rule):
  assert broken(source) == rule
  assert rule in rules.RULES and rule in rules.CHEATS


def test_what_the_reference_does_itself_is_allowed():
  reference = REFERENCE.replace(
    '  out = 0.0', '  try:\n    out = 0.0\n  finally:\n    pass'
  )
  source = FAST.replace('  return', '  try:\n    pass\n  finally:\n    pass\n  return')
  assert rules.broken(source, reference, 'total') == ''


def test_what_does_not_parse_raises():
  for bad in ('def total(x:', 'return 1', 'x = \0', '(' * 500 + ')' * 500):
    with pytest.raises((SyntaxError, ValueError, RecursionError, MemoryError)):
      broken(bad)


def test_golds_break_no_rule_and_references_are_copies():
  for unit in kernels.UNITS.values():
    gold = units.source(unit.fast, unit.name)
    for slow in unit.slow.values():
      reference = units.source(slow, unit.name)
      assert rules.broken(gold, reference, unit.name) == '', unit.name
      assert rules.broken(reference, reference, unit.name) == 'copies_reference'
