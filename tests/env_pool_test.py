"""Sandboxes that wait: each serves one suite, none is left over."""

import asyncio
import contextlib
import os

import psutil
import pytest

from swe17 import config
from swe17.env import pool, sandbox
from swe17.env.packages import suite
from tests import tiny_package as tiny

CFG = config.Sandbox(wall_seconds=30.0, cpu_seconds=10.0)
TESTS = [*tiny.CLAMP, tiny.MEAN, tiny.UP]


@pytest.fixture(scope='module')
def backend() -> str:
  if reason := sandbox._why_not_bubblewrap():
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')
  return 'bubblewrap'


@contextlib.asynccontextmanager
async def opened(backend: str, size: int = 1):
  made = suite.waiting(CFG, backend, size)
  try:
    yield made
  finally:
    await made.close()


async def run(ready: pool.Pool, backend: str, core: bytes = tiny.CORE) -> suite.Report:
  tree = tiny.tree().with_source(tiny.changed(core=core))
  return await suite.run(CFG, backend, tree, TESTS, 5.0, ready=ready)


async def waited(ready: pool.Pool) -> None:
  while not ready.waiting:
    await asyncio.sleep(0.01)


async def test_a_suite_has_the_same_results_in_one_that_waited(backend):
  async with opened(backend) as ready:
    assert ready.waiting == 0  # before anybody came
    fresh = await run(ready, backend)
    await waited(ready)
    process = ready._waiting[0].process
    warm = await run(ready, backend, tiny.CORE.replace(*tiny.FAULT))
    assert process.returncode == 0  # it was that one
  assert fresh.passed(TESTS)
  assert warm.complete and warm.passed([tiny.MEAN, tiny.UP])
  assert not warm.passed(tiny.CLAMP[:1])


_WRITES = b"""
import os, pathlib
for place in (pathlib.Path(__file__), pathlib.Path('tests/test_tiny.py'),
              pathlib.Path('new.py'), pathlib.Path('/parts/new.py'),
              pathlib.Path('/usr/new.py'), pathlib.Path('/new.py')):
  try:
    place.write_text('def test_mean(): pass')
  except OSError as e:
    assert e.errno in (30, 13), e
  else:
    os._exit(0)
assert not os.path.exists('/work/left')
pathlib.Path('/work/left').write_text('x')
"""


async def test_the_tree_is_read_only_and_nothing_of_another_is_left(backend):
  async with opened(backend) as ready:
    for _ in range(2):
      report = await run(ready, backend, tiny.CORE + _WRITES)
      assert report.passed(TESTS), report
      await waited(ready)


async def test_what_is_hidden_for_a_package_is_hidden_in_one_that_waited(
  backend, monkeypatch
):
  """A copy of the package that the system has: a folder, and a file."""
  library = os.path.dirname(os.path.realpath(os.__file__))
  places = [os.path.join(library, name) for name in ('wsgiref', 'this.py')]
  monkeypatch.setattr(suite.copies, 'find', lambda names: places)
  looks = f"""
import os
assert os.listdir({places[0]!r}) == []
try:
  open({places[1]!r}).read()
except OSError:
  pass
else:
  raise AssertionError('it can be read')
"""
  async with opened(backend) as ready:
    assert (await run(ready, backend, tiny.CORE + looks.encode())).passed(TESTS)
    await waited(ready)
    assert (await run(ready, backend, tiny.CORE + looks.encode())).passed(TESTS)
  monkeypatch.setattr(suite.copies, 'find', lambda names: [])
  async with opened(backend) as ready:
    report = await run(ready, backend, tiny.CORE + looks.encode())
    assert report.results == {tiny.FILE: 'error'}  # it does look


async def test_one_that_died_is_not_used_and_more_than_wait_are_started(backend):
  async with opened(backend) as ready:
    await run(ready, backend)
    await waited(ready)
    process = ready._waiting[0].process
    sandbox.kill(process)
    await process.wait()
    reports = await asyncio.gather(*(run(ready, backend) for _ in range(2)))
    assert all(report.passed(TESTS) for report in reports)


def test_nothing_is_left_after_close(backend):
  async def once():
    async with opened(backend, 2) as ready:
      await run(ready, backend)
      await waited(ready)
    with pytest.raises(ValueError, match='closed'):
      await ready.run(CFG, b'')
    await asyncio.sleep(0.3)

  me = psutil.Process()
  asyncio.run(once())  # what is opened once stays open
  before = len(os.listdir('/proc/self/fd')), len(me.children(recursive=True))
  asyncio.run(once())
  after = len(os.listdir('/proc/self/fd')), len(me.children(recursive=True))
  assert after <= before


async def test_without_isolation_nothing_waits():
  async with opened('process') as ready:
    if suite._unreadable():  # root's own Python: said instead of failing every test
      with pytest.raises(suite.SuiteError, match='closed to others'):
        await run(ready, 'process')
    else:
      assert (await run(ready, 'process')).passed(TESTS)
    assert ready.waiting == 0
