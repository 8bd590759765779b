"""Sandboxes that wait: each serves one command, none is left over."""

import asyncio
import contextlib
import os

import psutil
import pytest

from swe17 import config
from swe17.env import pool, sandbox

CFG = config.Sandbox(wall_seconds=30.0, cpu_seconds=10.0)


@pytest.fixture(scope='module')
def backend() -> str:
  if reason := sandbox._why_not_bubblewrap():
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')
  return 'bubblewrap'


@contextlib.asynccontextmanager
async def opened(backend: str, size: int = 2):
  made = pool.Pool(CFG, backend, size)
  await made.open()
  try:
    yield made
  finally:
    await made.close()


def test_a_command_runs_in_one_that_waited_as_in_a_fresh_one(backend):
  async def run():
    words = ['/bin/sh', '-c', 'cat d/a; cat; pwd; id -u; echo err >&2; exit 3']
    how = {'files': {'d/a': b'file\n'}, 'stdin': b'in\n'}
    async with opened(backend) as made:
      assert made.waiting == 2
      return await made.run(words, **how), await sandbox.run(CFG, backend, words, **how)

  warm, fresh = asyncio.run(run())
  assert warm == fresh
  assert (warm.returncode, warm.stderr) == (3, b'err\n')
  assert warm.stdout.startswith(b'file\nin\n/work\n')


def test_no_command_sees_what_another_left_and_its_place_is_taken(backend):
  async def run():
    async with opened(backend, 1) as made:
      answers = []
      for _ in range(3):
        while not made.waiting:
          await asyncio.sleep(0.01)
        words = ['/bin/sh', '-c', 'ls | wc -l; touch left']
        answers.append((await made.run(words)).stdout.strip())
      return answers

  assert asyncio.run(run()) == [b'0'] * 3


def test_one_that_died_is_not_used_and_more_than_wait_are_started(backend):
  async def run():
    async with opened(backend, 1) as made:
      process = made._waiting[0].process
      sandbox.kill(process)
      await process.wait()
      asked = (made.run(['/bin/echo', str(i)]) for i in range(4))
      return [done.stdout for done in await asyncio.gather(*asked)]

  assert asyncio.run(run()) == [b'0\n', b'1\n', b'2\n', b'3\n']


def test_nothing_is_left_after_close(backend):
  async def run():
    async with opened(backend) as made:
      await made.run(['/bin/true'])
    await asyncio.sleep(0.3)

  me = psutil.Process()
  asyncio.run(run())  # what is opened once stays open
  before = len(os.listdir('/proc/self/fd')), len(me.children(recursive=True))
  asyncio.run(run())
  after = len(os.listdir('/proc/self/fd')), len(me.children(recursive=True))
  assert after <= before


def test_without_isolation_nothing_waits():
  async def run():
    async with opened('process') as made:
      assert made.waiting == 0
      return await made.run(['/bin/echo', 'a'])

  assert asyncio.run(run()).stdout == b'a\n'
