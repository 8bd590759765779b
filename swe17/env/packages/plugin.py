"""The pytest plugin by which a suite's results get out of the process that runs it.

One record a line: token, number, then fields, escaped. What it uses is bound before
any code under test is imported, so that patching a module does not change it.

  items   '+id' for a test that can have a canary, '-id' for another, in order
  start   place of the plan           end     place, outcome, message
  touched id, 'path:line' of functions that it ran ('' for what imports ran)
  error   file, message: it could not be collected
  done

This file runs inside the sandbox; pytest is imported when it is called.
"""

from collections.abc import Callable, Mapping, Sequence
import copy
import functools
import inspect
import os
import random
import sys
import threading
from typing import Any

from swe17.env.packages import guard

_TEXT = 600  # characters of a message
_OFF = ('cacheprovider', 'pastebin', 'stepwise', 'setuponly', 'setupplan')
_OFF += ('faulthandler', 'doctest')


def plan(texts: Sequence[str], seed: int, canaries: int) -> list[tuple[int, bool]]:
  """(index of a test, whether its canary) in the order in which they run.

  `texts` as in the record `items`. A canary stands beside its test.
  """
  rng = random.Random(seed)
  able = [i for i, text in enumerate(texts) if text[0] == '+']
  chosen = set(rng.sample(able, min(canaries, len(able))))
  found = []
  for i in range(len(texts)):
    pair = [(i, False), (i, True)] if i in chosen else [(i, False)]
    found += reversed(pair) if rng.random() < 0.5 else pair
  return found


def run(spec: Mapping[str, Any], over: frozenset[int], out: int, token: str) -> None:
  """Runs pytest on the spec's files, in this process, and says how it went."""
  tree = spec['tree']
  os.chdir(tree)
  os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'
  places = [os.path.join(tree, part) if part else tree for part in spec['path']]
  # Last what an agent writes: nothing of it stands before the library or pytest.
  sys.path[:] = [*sys.path, spec['parts'], *places]
  sys.argv = ['pytest']
  for name in [name for name in sys.modules if name.startswith('swe17')]:
    del sys.modules[name]  # ours, and not a package that tests could miss
  import pytest

  send = sender(out, token)
  plugin = Plugin(spec, over, send)
  if not spec['explain']:  # else pytest rewrites asserts itself
    guard.install([os.path.join(tree, file) for file in spec['guarded']])
  arguments = [
    *(word for name in _OFF for word in ('-p', f'no:{name}')),
    *('--rootdir', tree, '-o', 'addopts=', '--no-header', '--no-summary'),
    '--continue-on-collection-errors',
    f'--assert={"rewrite" if spec["explain"] else "plain"}',
    *spec['files'],
  ]
  pytest.main(arguments, plugins=[plugin])
  if not plugin.left:
    send('done')


def sender(out: int, token: str) -> Callable[..., None]:
  """A function that writes one record."""
  write, own, getpid = os.write, os.getpid(), os.getpid
  count = 0

  def send(*fields: str) -> None:
    nonlocal count
    if getpid() != own:
      return  # a test has forked, and its child came out of pytest
    escaped = [f.encode('unicode_escape').decode('ascii') for f in fields]
    data = '\t'.join([token, str(count), *escaped]).encode() + b'\n'
    count += 1
    while data:
      data = data[write(out, data) :]

  return send


class Plugin:
  """Hooks of one run of pytest."""

  def __init__(
    self, spec: Mapping[str, Any], over: frozenset[int], send: Callable[..., None]
  ):
    from _pytest import runner

    self._protocol = runner.runtestprotocol
    self._spec, self._over, self._send = spec, over, send
    self._wanted = None if spec['wanted'] is None else frozenset(spec['wanted'])
    self._order: list[tuple[Any, int, bool]] = []
    self._bad: list[str] = []  # of the test that runs: subtests that failed
    self._tracer = Tracer(spec['tree']) if spec['trace'] else None
    self.left = 1
    if self._tracer:
      self._tracer.start()

  def pytest_collectreport(self, report: Any) -> None:
    if report.failed:
      self._send('error', report.nodeid, _text(report))

  def pytest_collection_modifyitems(self, items: list[Any]) -> None:
    """Leaves the tests that are wanted, and puts the canaries among them."""
    if self._tracer:
      self._send('touched', '', *self._tracer.stop())
    wanted = self._wanted
    found = [item for item in items if wanted is None or item.nodeid in wanted]
    texts = [('+' if _can_have(item) else '-') + item.nodeid for item in found]
    self._send('items', *texts)
    places = plan(texts, self._spec['seed'], self._spec['canaries'])
    items[:] = []
    for place, (index, canary) in enumerate(places):
      item = _canary(found[index]) if canary else found[index]
      if place not in self._over:
        items.append(item)
        self._order.append((item, place, canary))
    self.left = len(items)

  def pytest_runtest_logreport(self, report: Any) -> None:
    if report.failed:
      self._bad.append(_text(report))

  def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
    place, canary = next((p, c) for known, p, c in self._order if known is item)
    self._bad.clear()
    self._send('start', str(place))
    returned: list[bool] = []
    able = hasattr(item, 'obj')
    if able:
      item.obj = _failing(item.obj) if canary else _watched(item.obj, returned)
    if self._tracer:
      self._tracer.start()
    reports = self._protocol(item, log=True, nextitem=nextitem)
    if self._tracer:
      self._send('touched', item.nodeid, *self._tracer.stop())
    outcome, text = _outcome(reports)
    if outcome == 'passed' and self._bad:
      outcome, text = 'failed', self._bad[0]
    if outcome == 'passed' and not canary and able and not returned:
      outcome, text = 'failed', 'it did not run to its end'
    self._send('end', str(place), outcome, text)
    self.left -= 1
    return True


def _outcome(reports: Sequence[Any]) -> tuple[str, str]:
  """(outcome, message) of the reports of setup, call and teardown."""
  for report in reports:
    if report.failed:
      return 'failed' if report.when == 'call' else 'error', _text(report)
  if any(report.skipped for report in reports):
    return 'skipped', ''
  called = [report for report in reports if report.when == 'call']
  if len(called) == 1 and all(report.passed for report in reports):
    return 'passed', ''
  return 'error', 'no report'


def _text(report: Any) -> str:
  """What a report says of its failure, in a few lines."""
  crash = getattr(report.longrepr, 'reprcrash', None)
  if crash is None:  # a traceback as text: its end says what went wrong
    return str(report.longrepr).strip()[-_TEXT // 2 :]
  text = crash.message
  return text if len(text) <= _TEXT else text[: _TEXT - 4] + ' ...'


def _can_have(item: Any) -> bool:
  """Whether a test can have a canary: it is a function, and not to fail or be left."""
  marks = {mark.name for mark in item.iter_markers()}
  if marks & {'xfail', 'skip', 'skipif'} or not hasattr(item, '_initrequest'):
    return False
  odd = inspect.iscoroutinefunction(item.obj) or hasattr(item.obj, '__unittest_skip__')
  return not (odd or hasattr(item.obj, '__unittest_expecting_failure__'))


def _watched(test: Callable[..., Any], returned: list[bool]) -> Callable[..., Any]:
  """A test's function that notes whether it came to its end."""
  if inspect.iscoroutinefunction(test):

    @functools.wraps(test)
    async def later(*arguments: Any, **named: Any) -> None:
      await test(*arguments, **named)
      returned.append(True)

    return later

  @functools.wraps(test)
  def run(*arguments: Any, **named: Any) -> Any:
    result = test(*arguments, **named)
    returned.append(True)
    return result

  return run


def _failing(test: Callable[..., Any]) -> Callable[..., Any]:
  """A test's function that fails after all that it does."""

  @functools.wraps(test)
  def run(*arguments: Any, **named: Any) -> Any:
    try:
      test(*arguments, **named)
    finally:
      raise AssertionError('values differ')

  return run


def _canary(item: Any) -> Any:
  """The same test under the same name; what it runs is put in its place later."""
  import pytest

  canary = copy.copy(item)
  canary.stash = canary._store = pytest.Stash()
  canary._report_sections = []
  canary.__dict__.pop('_instance', None)
  canary.__dict__.pop('_obj', None)
  canary.funcargs = {}
  canary._initrequest()
  return canary


class Tracer:
  """Collects which functions of the tree run, in every thread."""

  def __init__(self, tree: str):
    self._start = tree.rstrip('/') + '/'
    self._seen: set[tuple[str, int]] = set()

  def start(self) -> None:
    self._seen = set()
    threading.setprofile(self._note)
    sys.setprofile(self._note)

  def stop(self) -> list[str]:
    """'path:first line' of code objects that ran, sorted."""
    sys.setprofile(None)
    none: Any = None  # its stub wants a function
    threading.setprofile(none)
    skip = len(self._start)
    places = {f'{path[skip:]}:{line}' for path, line in self._seen}
    return sorted(places)

  def _note(self, frame: Any, event: str, _: Any) -> None:
    if event == 'call':
      code = frame.f_code
      if code.co_filename.startswith(self._start):
        self._seen.add((code.co_filename, code.co_firstlineno))
