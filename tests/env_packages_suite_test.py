"""Suites in a sandbox: results that can be believed, whatever the source does."""

import asyncio
import pathlib

import pytest

from swe17 import config
from swe17.env import sandbox
from swe17.env.packages import guard, plugin, sources, suite
from tests import tiny_package as tiny

CFG = config.Sandbox()
DOWN = f'{tiny.FILE}::CounterTest::test_down'
ALL = [*tiny.CLAMP, tiny.MEAN, tiny.UP]


@pytest.fixture(scope='module')
def backend() -> str:
  chosen = sandbox.choose_backend(CFG)
  if chosen != 'bubblewrap':
    pytest.skip('without namespaces nothing is promised')
  return chosen


def run(
  backend: str, tree: sources.Tree, tests=ALL, seconds=3.0, **how
) -> suite.Report:
  return asyncio.run(suite.run(CFG, backend, tree, tests, seconds, **how))


def test_every_test_has_its_own_result(backend):
  report = run(backend, tiny.tree(), None)
  assert report.complete and not report.forged
  results = dict(report.results)
  assert results.pop(DOWN) == 'skipped'
  assert set(results.values()) == {'passed'} and len(results) == 10
  assert report.passed(ALL) and report.cpu_seconds > 0


def test_a_fault_fails_its_tests_and_no_others(backend):
  report = run(backend, tiny.tree().with_source(tiny.faulty()), explain=True)
  assert report.complete
  failing = {test for test, result in report.results.items() if result == 'failed'}
  assert failing == set(tiny.CLAMP)
  assert 'assert ' in report.texts[tiny.CLAMP[0]]
  assert not report.passed(ALL) and report.passed([tiny.MEAN, tiny.UP])


def test_absent_is_not_passed(backend):
  report = run(backend, tiny.tree(), [tiny.MEAN, f'{tiny.FILE}::test_new'])
  assert report.results == {tiny.MEAN: 'passed'}
  assert report.complete and not report.passed([tiny.MEAN, f'{tiny.FILE}::test_new'])
  broken = run(backend, tiny.tree().with_source(tiny.changed(core=b'1 +')))
  assert broken.results == {tiny.FILE: 'error'} and not broken.passed([tiny.MEAN])


def test_repetitions_tell_what_wavers(backend):
  wavering = tiny.CORE.replace(
    b'return total /', b'import os; return (os.getpid() % 2) or total /'
  )
  report = run(backend, tiny.tree().with_source(tiny.changed(core=wavering)), repeats=6)
  assert report.unsteady == {tiny.MEAN} or report.unsteady == frozenset()
  steady = run(backend, tiny.tree(), repeats=3)
  assert steady.passed(ALL) and not steady.unsteady


def test_a_hanging_test_times_out_and_the_rest_runs_on(backend):
  slow = tiny.CORE.replace(b'total = 0\n', b'while True: pass\n')
  tree = tiny.tree().with_source(tiny.changed(core=slow))
  report = run(backend, tree, seconds=0.4)
  assert report.complete
  assert report.results[tiny.MEAN] == 'timeout'
  assert report.passed([*tiny.CLAMP, tiny.UP])


def test_a_test_that_ends_the_process_is_an_error(backend):
  dying = tiny.CORE.replace(b'total = 0\n', b'import os; os._exit(0)\n')
  report = run(backend, tiny.tree().with_source(tiny.changed(core=dying)))
  assert report.results[tiny.MEAN] == 'error' and report.complete
  assert report.passed([*tiny.CLAMP, tiny.UP])


def test_the_trace_says_which_functions_a_test_runs(backend):
  report = run(backend, tiny.tree(), trace=True)
  core = 'src/tiny/core.py'
  assert f'{core}:4' in report.touched[tiny.CLAMP[0]]
  assert f'{core}:13' in report.touched[tiny.MEAN]
  assert f'{core}:4' not in report.touched[tiny.MEAN]


_HOOK = b"""
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
  report = (yield).get_result()
  report.outcome, report.longrepr = 'passed', None
"""
_TESTS_PASS = b'def test_mean(): pass\ndef test_clamp(): pass\n'


@pytest.mark.parametrize(
  'path, data',
  [
    ('conftest.py', _HOOK),
    ('tests/conftest.py', _HOOK),
    ('src/tiny/conftest.py', _HOOK),
    ('pytest.ini', b'[pytest]\naddopts = --collect-only\n'),
    ('pyproject.toml', b'[tool.pytest.ini_options]\naddopts = "--collect-only"\n'),
    ('setup.cfg', b'[tool:pytest]\naddopts = --collect-only\n'),
    ('pytest.py', b'print("PASSED")\nraise SystemExit(0)\n'),
    ('src/pytest.py', b'print("PASSED")\nraise SystemExit(0)\n'),
    ('sitecustomize.py', b'import os\nos._exit(0)\n'),
    ('src/usercustomize.py', b'import os\nos._exit(0)\n'),
    ('unittest.py', b'class TestCase: pass\n'),
    ('tests/test_tiny.py', _TESTS_PASS),  # hidden tests come last, over an agent's
    ('tests/test_tiny.py/test_tiny.py', _TESTS_PASS),
    ('tests/test_new.py', _TESTS_PASS),
    ('src/tiny/test_tiny.py', _TESTS_PASS),
    ('../tests/test_tiny.py', _TESTS_PASS),
    ('src/tiny/../../tests/test_tiny.py', _TESTS_PASS),
    ('/tree/tests/test_tiny.py', _TESTS_PASS),
    ('src/tiny/a\nb.py', b'pass\n'),
    ('src/tiny/\0.py', b'pass\n'),
    ('src/tiny/core.py\u202e', b'pass\n'),
    ('.git/HEAD', b'ref\n'),
    ('src/tiny/__pycache__/core.cpython-311.pyc', b'code'),
  ],
)
def test_only_source_is_taken_from_an_agent(path, data):
  clean = tiny.tree()
  assert clean.with_source({**tiny.faulty(), path: data}) == clean.with_source(
    tiny.faulty()
  )


def test_a_module_may_be_added_and_removed_but_no_package_be_opened():
  clean = tiny.tree()
  taken = clean.with_source({'src/tiny/extra.py': b'x = 1\n'})
  assert 'src/tiny/extra.py' in taken.files and 'src/tiny/core.py' not in taken.files
  assert taken.files['src/tiny/__init__.py'] == tiny.FILES['src/tiny/__init__.py']
  assert taken.files[tiny.FILE] == tiny.TESTS


_FIND_CONFIG = b"""
import gc, _pytest.config, pytest
class Bend:
  @pytest.hookimpl(hookwrapper=True)
  def pytest_runtest_makereport(self, item, call):
    report = (yield).get_result()
    %s
      report.outcome, report.longrepr = 'passed', None
for found in gc.get_objects():
  if isinstance(found, _pytest.config.Config):
    found.pluginmanager.register(Bend())
    break
"""
_EQUAL = b"""
class Equal:
  __hash__ = None
  def __eq__(self, other): return True
  def __ne__(self, other): return False
"""
# Name -> code that a cheat puts at the top of its module.
_CHEATS = {
  'leaves': b'import os; os._exit(0)',
  'exits': b'import sys; sys.exit(0)',
  'says passed and leaves': (
    b'import os\nprint("PASSED tests/test_tiny.py::test_clamp", flush=True)\n'
    b'os._exit(0)'
  ),
  'leaves at exit': b'import atexit, os; atexit.register(os._exit, 0)',
  'leaves soon': b'import os, threading; threading.Timer(.05, os._exit, (0,)).start()',
  'asks pytest to leave': b'import pytest; pytest.exit("ok", returncode=0)',
  'kills its keeper': b'import os; os.kill(os.getppid(), 9)',
  'bends reports': _FIND_CONFIG % b'if True:',
  'bends reports of tests that it knows': _FIND_CONFIG
  % b'if "test_clamp" in item.name:',
  'empties tests': (
    b'import _pytest.python as p\np.Function.runtest = lambda self: None'
  ),
  'empties calls': (
    b'import _pytest.runner as r\n'
    b'r.call_runtest_hook = lambda item, when, **k: '
    b'r.CallInfo.from_call(lambda: None, when=when)\n'
    b'r.call_and_report = lambda item, when, *a, **k: '
    b'r.pytest_runtest_makereport(item, r.CallInfo.from_call(lambda: None, when=when))'
  ),
  'makes reports of its own': (
    b'import _pytest.reports as r\ninit = r.TestReport.__init__\n'
    b'def bent(self, *a, **k):\n'
    b'  init(self, *a, **k)\n  self.outcome, self.longrepr = "passed", None\n'
    b'r.TestReport.__init__ = bent'
  ),
  'writes to every descriptor': (
    b'import os\nfor n in range(3, 60):\n  try: os.write(n, b"0\\t0\\tdone\\n")\n'
    b'  except OSError: pass'
  ),
  'rewrites the tests': (
    b'for path in ("/tree/tests/test_tiny.py", "tests/test_tiny.py"):\n'
    b'  try: open(path, "w").write("def test_mean(): pass")\n  except OSError: pass'
  ),
  'bends asserts': b'import builtins; builtins.AssertionError = type("E", (), {})',
  'forks': (
    b'import os\nif os.fork() == 0: os.setsid(); os.execv("/bin/sleep", ["s", "9"])'
  ),
}


@pytest.mark.parametrize('cheat', _CHEATS)
def test_no_cheat_makes_failing_tests_pass(backend, cheat):
  tree = tiny.tree().with_source(tiny.faulty(_CHEATS[cheat]))
  report = run(backend, tree, [*tiny.CLAMP, tiny.MEAN])
  assert not report.passed(tiny.CLAMP)
  assert report.results.get(tiny.CLAMP[0]) != 'passed' or report.forged


@pytest.mark.parametrize('cheat', [c for c in _CHEATS if 'bends reports' in c])
def test_a_bent_pytest_is_found_out_by_canaries(backend, cheat):
  tree = tiny.tree().with_source(tiny.faulty(_CHEATS[cheat]))
  report = run(backend, tree, tiny.CLAMP)
  assert report.forged.startswith('a test that must fail passed')


def test_what_equals_everything_does_not_pass(backend):
  equal = tiny.changed(
    core=_EQUAL + b'def clamp(*a, **k): return Equal()\n'
    b'def mean(values): return [Equal()][0]\n'
    b'class Counter:\n  def __init__(self, *a): pass\n'
    b'  def up(self, *a): return Equal()\n'
  )
  report = run(backend, tiny.tree().with_source(equal), None)
  others = {r for test, r in report.results.items() if test != DOWN}
  assert report.complete and others == {'failed'}


def test_equality_is_asked_inside_containers_and_survives_odd_types():
  class Equal:
    __hash__ = None

    def __eq__(self, other):
      return True

  class Raises:
    __hash__ = None

    def __eq__(self, other):
      raise TypeError

  assert guard.equals_all(Equal()) and guard.equals_all({'a': [(Equal(),)]})
  assert not guard.equals_all(Raises()) and not guard.equals_all([1, 'a', object()])
  assert guard.same(1, 1) is True and guard.same(Equal(), 1) is False
  assert not guard.held(Equal(), [1]) and guard.held(1, [1])


def test_nothing_of_a_suite_lives_on(backend):
  marker = '4147.5'
  fork = (
    b'import os\n'
    b'for n in range(3):\n'
    b'  if os.fork() == 0:\n    os.setsid()\n'
    b'    if os.fork() == 0: os.execv("/bin/sleep", ["sleep", "4147.5"])\n'
    b'    os._exit(0)\n'
  )
  run(backend, tiny.tree().with_source(tiny.faulty(fork)), [tiny.MEAN])
  lines = [p.read_bytes() for p in pathlib.Path('/proc').glob('[0-9]*/cmdline')]
  assert not [line for line in lines if marker.encode() in line]


def test_the_network_the_machine_and_other_packages_are_out_of_reach(backend):
  probe = (
    b'import glob, importlib.util as u, os, socket, sys\n'
    b'def mean(values):\n'
    b'  found = [n for n in ("numpy", "pip", "jax", "swe17") if u.find_spec(n)]\n'
    b'  for place in ("/home/*", "/root/*/*/*-packages/*", "/tree/.git", "/work/*"):\n'
    b'    found += glob.glob(place)\n'
    b'  for prefix in (sys.base_prefix, "/usr", "/usr/local"):\n'
    b'    found += glob.glob(prefix + "/lib/python3*/*-packages/*")\n'
    b'  try: socket.create_connection(("192.0.2.1", 80), 1); found.append("net")\n'
    b'  except OSError: pass\n'
    b'  try: open("/tree/x", "w"); found.append("written")\n'
    b'  except OSError: pass\n'
    b'  if os.getuid() == 0: found.append("root")\n'
    b'  raise ValueError(found)\n'
  )
  core = tiny.CORE.replace(b'def mean', b'def old') + probe
  tree = tiny.tree().with_source(tiny.changed(core=core))
  report = run(backend, tree, [tiny.MEAN], seconds=20.0, explain=True)
  assert report.texts[tiny.MEAN] == 'ValueError: []'


def test_canaries_stand_beside_their_tests_in_an_order_of_the_seed():
  texts = ['+a', '-b', '+c', '+d']
  plans = {tuple(plugin.plan(texts, seed, 2)) for seed in range(20)}
  assert len(plans) > 5
  for plan in plans:
    assert [index for index, canary in plan if not canary] == [0, 1, 2, 3]
    canaries = [index for index, canary in plan if canary]
    assert len(canaries) == 2 and 1 not in canaries
  assert plugin.plan(['-a'], 0, 2) == [(0, False)]
