"""Warm graders: verdicts, and what happens when a worker fails."""

import asyncio
import contextlib
import logging
import os
import signal

import psutil
import pytest

from swe17.env.repair import grader
from tests import grader_fixtures
from tests.grader_fixtures import (
  check,
  GOOD,
  graders,
  LISTS,
  RIGHT,
)

backend, isolated, pool = (
  grader_fixtures.backend,
  grader_fixtures.isolated,
  grader_fixtures.pool,
)
pytestmark = pytest.mark.asyncio(loop_scope='module')


async def test_right_function_gives_results_and_arguments(pool):
  assert await pool.run(GOOD) == RIGHT


async def test_changed_arguments_are_part_of_the_answer(pool):
  got = await pool.run(check('a[0].append(a[1])', '([1], 2)'))
  assert got == ('ok (None, ([1, 2], 2,),)',)


async def test_each_end_has_its_verdict(pool):
  cases = ('(1,)', '(0,)', '(2,)')
  got = await pool.run(check('return 2 // a[0]', *cases))
  assert got == ('ok (2, (1,),)', 'raise ZeroDivisionError', 'ok (1, (2,),)')
  got = await pool.run(check('while a[0] == 0: pass\nreturn 1', *cases))
  assert got == ('ok (1, (1,),)', 'timeout', 'timeout')  # the first two are kept
  got = await pool.run(check('import os\nif a[0] == 0: os._exit(0)', *cases))
  assert got == ('ok (None, (1,),)', 'died', 'died')
  got = await pool.run(check('import ctypes\nctypes.string_at(0)', *cases))
  assert got == ('died',) * 3
  got = await pool.run(check('raise SystemExit(0)'))
  assert got == ('raise SystemExit',)
  assert pool.restarts == 0


async def test_sleep_is_cut_by_wall_time(isolated):
  body = 'import time; time.sleep(60 * a[0])\nreturn 1'
  got = await isolated.run(check(body, '(0,)', '(1,)'))
  assert got == ('ok (1, (0,),)', 'timeout')
  assert isolated.restarts == 0


@pytest.mark.parametrize(
  ('source', 'want'),
  [
    ('def bisect_left(a, x:', 'raise SyntaxError'),
    ('x = "\0"', 'raise SyntaxError'),
    ('(' * 5000, 'raise SyntaxError'),
    ('def bisect_left(a, x=undefined): pass', 'raise NameError'),
    ('1 / 0', 'raise ZeroDivisionError'),
    # The module's own bisect_left must not stand in for a missing one.
    ('', 'raise NameError'),
    ('def other(a, x): return 0', 'raise NameError'),
    ('bisect_left = None', 'raise TypeError'),
  ],
)
async def test_source_without_the_function_fails_every_case(isolated, source, want):
  got = await isolated.run(grader.Check('bisect', 'bisect_left', source, LISTS))
  assert got == (want,) * 3


async def test_names_of_the_module_work_and_nothing_more_can_be_imported(isolated):
  got = await isolated.run(
    check(
      """
      heapify(a[0])
      assert 'ä'.encode('latin-1').decode('cp1252') == 'ä'
      if a[1]: import colorsys
      return a[0][0]
      """,
      '([3, 1, 2], 0)',
      '([3, 1, 2], 1)',
      module='heapq',
    )
  )
  assert got == ('ok (1, ([1, 3, 2], 0,),)', 'raise ModuleNotFoundError')


async def test_answers_do_not_depend_on_worker_or_hash_seed(backend):
  body = "import random\nreturn list({'a', 'bc', 'd', 'ef'}), random.random()"
  answers = set()
  for _ in range(2):
    async with graders(backend, workers=2) as pool:
      probe = check(body, '()', '()', module='random')
      for got in await asyncio.gather(*[pool.run(probe) for _ in range(4)]):
        answers |= set(got)
  assert len(answers) == 1, answers


async def test_worker_killed_in_mid_check_is_replaced_and_the_check_redone(backend):
  async with graders(backend) as pool:
    slow = check('import time\ntime.sleep(.6)\nreturn 5')
    task = asyncio.create_task(pool.run(slow))
    await asyncio.sleep(0.2)
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    assert await task == ('ok (5, (,),)',)
    assert pool.restarts == 1 and pool.pids != (pid,)


async def test_worker_that_fails_twice_is_an_error_not_a_verdict(isolated):
  async def kill_all(pool: grader.Graders) -> None:
    while True:
      for pid in pool.pids:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(pid, signal.SIGKILL)
      await asyncio.sleep(0.05)

  async with graders('bubblewrap') as pool:
    killer = asyncio.create_task(kill_all(pool))
    with pytest.raises(grader.GraderError, match='twice'):
      await pool.run(check('import time; time.sleep(.5)'))
    killer.cancel()
    assert await pool.run(GOOD) == RIGHT


async def test_check_killed_from_outside_is_not_a_verdict(isolated):
  if os.getuid() != 0:
    pytest.skip('finds the check by its user, which needs root')

  async def kill_checks(pool: grader.Graders) -> None:
    while True:
      for pid in pool.pids:
        with contextlib.suppress(psutil.Error):
          for process in psutil.Process(pid).children(recursive=True):
            if process.uids().real == 65534:
              await asyncio.sleep(0.3)  # let it begin
              process.kill()
      await asyncio.sleep(0.02)

  async with graders('bubblewrap', wall_seconds=20.0) as pool:
    killer = asyncio.create_task(kill_checks(pool))
    with pytest.raises(grader.GraderError, match='from outside'):
      await pool.run(check('import time; time.sleep(15)'))
    killer.cancel()


async def test_module_that_cannot_be_imported_is_an_error(backend):
  async with graders(backend) as pool:
    with pytest.raises(grader.GraderError, match='msvcrt'):
      await pool.run(check('return 1', module='msvcrt'))


async def test_cancelled_check_leaves_a_usable_pool(isolated):
  task = asyncio.create_task(isolated.run(check('import time; time.sleep(60)')))
  await asyncio.sleep(0.1)
  task.cancel()
  with pytest.raises(asyncio.CancelledError):
    await task
  assert await isolated.run(GOOD) == RIGHT


async def test_two_checks_run_at_the_same_time(backend):
  async with graders(backend, workers=2, wall_seconds=60.0) as pool:
    for seconds in (1, 4, 16):  # on a busy machine the others may take long
      source = f'import time\ntime.sleep({seconds})\nreturn 1'
      slow = asyncio.create_task(pool.run(check(source)))
      await asyncio.sleep(0.05)
      for _ in range(5):
        assert await pool.run(GOOD) == RIGHT
      overtaken = not slow.done()
      assert await slow == ('ok (1, (,),)',)
      if overtaken:
        break
    assert overtaken


async def test_large_sources_and_cases_pass_through(isolated):
  case = repr(('é' * 300_000,))
  body = f'x = {"a" * 200_000!r}\nreturn len(x), len(a[0]), a.__class__ is tuple'
  cases = (case, '("b",)')
  async with graders('bubblewrap', output_kib=4096) as pool:
    first, second = await pool.run(check(body, *cases))
    assert first.startswith('ok ((200000, 300000, True,),')
    assert second.startswith('ok ((200000, 1, True,),')


async def test_processes_and_descriptors_do_not_grow(backend):
  me = psutil.Process()

  def counts() -> tuple[int, int]:
    return len(me.children(recursive=True)), me.num_fds()

  before = counts()
  async with graders(backend) as pool:
    await pool.run(GOOD)
    warm = counts()
    inner = [p.num_fds() for p in me.children(recursive=True)]
    for i in range(200 if backend == 'bubblewrap' else 60):
      assert await pool.run(GOOD) == RIGHT
      if i % 50 == 0:
        await pool.run(check('import os\nos.fork()\nos._exit(1)'))
    assert counts() == warm
    assert [p.num_fds() for p in me.children(recursive=True)] == inner
    assert pool.restarts == 0
  for _ in range(100):
    if counts() == before:
      break
    await asyncio.sleep(0.02)
  assert counts() == before


async def test_process_backend_warns(caplog):
  with caplog.at_level(logging.WARNING):
    async with graders('process') as pool:
      assert await pool.run(GOOD) == RIGHT
  assert 'WITHOUT isolation' in caplog.text


@pytest.mark.parametrize(
  ('fields', 'word'),
  [
    ({'module': 'os; import x'}, 'module'),
    ({'module': 'numpy'}, 'module'),
    ({'function': 'f()'}, 'function'),
    ({'cases': ()}, 'cases'),
    ({'cases': ('[1]',)}, 'cases'),
    ({'cases': ('(f(),)',)}, 'cases'),
    ({'cases': ('(',)}, 'cases'),
  ],
)
async def test_bad_check_is_refused_by_name(fields, word):
  good = {'module': 'bisect', 'function': 'f', 'source': '', 'cases': ('()',)}
  with pytest.raises(ValueError, match=f'check.{word}'):
    grader.Check(**{**good, **fields})


async def test_closing_while_checks_run_and_wait_ends_them_as_infrastructure(backend):
  source = 'def bisect_left(a, x):\n  while True:\n    pass\n'
  slow = grader.Check('bisect', 'bisect_left', source, LISTS[:1])
  async with graders(backend, wall_seconds=20.0, cpu_seconds=20.0) as pool:
    checks = [asyncio.ensure_future(pool.run(slow)) for _ in range(3)]
    await asyncio.sleep(0.3)
    await asyncio.wait_for(pool.close(), 10)
    for ended in await asyncio.gather(*checks, return_exceptions=True):
      assert isinstance(ended, grader.GraderError)
    assert pool.pids == ()
