"""Candidates beside their reference: what counts, what does not, and noise."""

import dataclasses
import math
import os
import signal

import numpy as np
import pytest
import pytest_asyncio

from swe17 import config
from swe17.env.kernels import bench, judge
from swe17.env.repair import grader

REFERENCE = """import numpy as np


def total(x):
  out = 0.0
  for value in x:
    out += value * value
  return out
"""
FAST = 'import numpy as np\n\ndef total(x):\n  return float(x @ x)\n'


def inputs(rng: np.random.Generator, small: bool) -> tuple[np.ndarray]:
  return (rng.normal(size=4 if small else 12_000),)


PROBLEM = bench.Problem('total', 'total', REFERENCE, inputs, checks=2, calls=5)


@pytest_asyncio.fixture
async def on():
  made = bench.Bench(config.Sandbox(workers=1, cpu_seconds=0.1, wall_seconds=3.0))
  await made.start()
  yield made
  await made.close()


async def test_every_class_of_candidate_has_its_verdict(on):
  async def verdict(source: str) -> bench.Verdict:
    return await on.measure(PROBLEM, source)

  fast = await verdict(FAST)
  assert fast.kind == 'correct' and fast.speedup > 3 and len(fast.ratios) == 5
  # Another text of the same work is no faster.
  same = await verdict(
    REFERENCE.replace('value * value', '(value * value)') + '\nA = 1\n'
  )
  assert same.kind == 'barred' and same.flag == 'copies_reference'
  slow = await verdict(REFERENCE.replace('value * value', '(value * value) * 1.0'))
  assert slow.kind == 'correct' and slow.speedup <= 1.0
  assert (await verdict('def total(x:')).kind == 'parse'
  for source, words in (
    ('def other(x):\n  return x\n', 'NameError: no total is defined'),
    ('def total(x):\n  return x[99999999]\n', 'IndexError: index 99999999'),
    ('def total(x):\n  while len(x): pass\n', 'out of time'),
    ('def total(x):\n  return {1: print, 2: x}\n', 'TypeError: returned'),
    ('y = 1 / 0\ndef total(x):\n  return x\n', 'ZeroDivisionError'),
  ):
    seen = await verdict(source)
    assert seen.kind == 'run' and words in seen.words, (source, seen)
  for source, words in (
    (FAST.replace('x @ x', 'x[:3] @ x[:3]'), 'other values'),
    (FAST.replace('float(x @ x)', 'int(x @ x)'), 'want float, got int'),
    (FAST.replace('  return', '  x *= -1\n  return'), 'other values'),  # its arguments
  ):
    seen = await verdict(source)
    assert seen.kind == 'wrong' and seen.words == words, (source, seen)
  assert on.restarts == 0


async def test_work_cannot_be_hidden_from_the_clock(on):
  # What rules.py would bar is run all the same: these are what is behind it.
  async def ratio(source: str) -> bench.Verdict:
    return await on._insist(PROBLEM, source, 0.0)

  # Made ahead, by what was seen before: inputs are never those of an earlier call.
  kept = await ratio(
    'known = {}\n'
    'def slow(x):\n  out = 0.0\n  for v in x:\n    out += v * v\n  return out\n'
    'def total(x):\n  key = x.tobytes()\n  if key not in known:\n'
    '    known[key] = slow(x)\n  return known[key]\n'
  )
  assert kept.kind == 'correct' and kept.speedup < 1.2
  # Begun in another thread or process: there is none to be had.
  for start in (
    'import threading\n  t = threading.Thread(target=print)\n  t.start()',
    'import os\n  os.fork()',
  ):
    seen = await ratio(f'def total(x):\n  {start}\n  return float(x @ x)\n')
    assert seen.kind == 'run' and ('Error' in seen.words), seen
  # A clock of its own is nobody's business.
  bent = await ratio(
    'import time\ntime.process_time = time.perf_counter = lambda: 0.0\n'
    'def total(x):\n  out = 0.0\n  for v in x:\n    out += v * v\n  return out\n'
  )
  assert bent.kind == 'correct' and bent.speedup < 1.2


async def test_nothing_to_gain_is_within_reach(on):
  async def verdict(body: str) -> bench.Verdict:
    source = f'def total(x):\n  {body}\n  return float(x @ x)\n'
    return await on._insist(PROBLEM, source, 0.0)

  for body in (
    'open("/code/swe17/env/kernels/units_series.py")',
    'open("/etc/passwd")',
    'open("x", "w")',
    'import socket; socket.create_connection(("127.0.0.1", 80), 1)',
    'import swe17.config',
  ):
    assert (await verdict(body)).kind == 'run', body
  # It may end, or say what it likes: another process compares.
  assert (await verdict('import os; os._exit(0)')).kind == 'run'
  forged = 'import os\n  for fd in range(3, 9):\n    os.write(fd, b"\\0\\0\\0\\1+")'
  assert (await verdict(forged)).kind in ('run', 'wrong')


async def test_the_candidate_runs_before_the_reference_and_apart_from_it(on):
  pair = on._pairs[0]
  seen = []
  for name in ('candidate', 'reference'):
    worker = getattr(pair, name)
    call = worker.call

    async def noted(*args, call=call, name=name, **kwargs):
      seen.append(name)
      return await call(*args, **kwargs)

    worker.call = noted
  await on._insist(PROBLEM, FAST, 0.0)
  assert seen == ['candidate', 'reference'] * (PROBLEM.checks + PROBLEM.calls)
  assert pair.candidate._process.pid != pair.reference._process.pid


async def test_a_fault_of_ours_is_retried_and_never_a_verdict(on):
  assert (await on.measure(PROBLEM, FAST)).kind == 'correct'
  os.killpg(on._pairs[0].candidate._process.pid, signal.SIGKILL)
  assert (await on.measure(PROBLEM, FAST)).kind == 'correct'
  assert on.restarts == 1
  bad = dataclasses.replace(PROBLEM, reference='def total(x):\n  return 1 / 0\n')
  with pytest.raises(grader.GraderError, match='reference of total'):
    await on._insist(bad, FAST, 0.0)


async def test_two_benches_of_one_machine_take_turns():
  cfg = config.Sandbox(workers=1)
  one, two = bench.Bench(cfg), bench.Bench(cfg)
  await one.start()
  await two.start()
  async with one._alone():
    with pytest.raises(BlockingIOError):
      import fcntl

      fcntl.flock(two._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
  async with two._alone():
    pass
  await one.close()
  await two.close()


async def test_a_judge_runs_a_text_once_and_keeps_no_time_out():
  class Counting:
    calls = 0

    async def measure(self, problem, source):
      self.calls += 1
      lasting = source != 'hangs'
      return bench.Verdict('run', lasting=lasting)

  counting = Counting()
  by = judge.Judge(counting)
  for source in ('a', 'a', 'hangs', 'hangs'):
    await by.judge(PROBLEM, source)
  assert counting.calls == 3 and (by.hits, by.misses) == (1, 3)
  await by.judge(dataclasses.replace(PROBLEM, reference='x'), 'a')
  assert counting.calls == 4


def test_a_score_is_kevins_with_the_speedup_capped():
  def score(speedup: float, **more) -> float:
    return bench.score(bench.Verdict('correct', speedup=speedup, **more), 5.0)

  assert score(1.0) == 1.3 and score(2.5) == 2.8 and score(80.0) == 5.3
  assert score(0.5) == 0.8
  assert score(2.0, flag='stub') == 0.0
  assert bench.score(bench.Verdict('wrong', speedup=3.0), 5.0) == 0.0


def test_a_speedup_inside_the_band_is_one_and_the_median_decides():
  assert bench.speedup([1.0, 9.0, 1.04, 1.02, 0.2], 0.05) == 1.0
  assert bench.speedup([1.5, 9.0, 1.6], 0.05) == 1.6
  assert bench.speedup([0.5, 0.5, 0.4], 0.05) == 0.5
  assert bench.band([1.0] * 20, 5) == 0.03
  quiet, loud = ([math.exp(s * x) for x in np.linspace(-1, 1, 30)] for s in (0.1, 0.4))
  assert 0.03 < bench.band(quiet, 5) < bench.band(loud, 5) < 0.4
  # More calls, a narrower band.
  assert bench.band(loud, 15) < bench.band(loud, 3)


def test_inputs_are_never_drawn_twice():
  drawn = [bench.draw(PROBLEM, True)[0] for _ in range(3)]
  assert not np.array_equal(drawn[0], drawn[1])
  assert not np.array_equal(drawn[1], drawn[2])


async def test_who_only_waits_is_asked_once_more_and_the_verdict_is_not_kept(on):
  waits = 'import time\ndef total(x):\n  time.sleep(60)\n'
  on._cfg = dataclasses.replace(on._cfg, wall_seconds=0.5)
  for made in (on._pairs[0].candidate, on._pairs[0].reference):
    made._cfg = on._cfg
  seen = await on._insist(PROBLEM, waits, 0.0)
  assert seen.kind == 'run' and 'waiting' in seen.words and not seen.lasting
  assert on.restarts == 0
