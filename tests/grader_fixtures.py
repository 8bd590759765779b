"""What the tests of the graders share: pools, a check, and the right answer."""

from collections.abc import AsyncIterator
import contextlib
import textwrap

import pytest
import pytest_asyncio

from swe17 import config
from swe17.env import sandbox
from swe17.env.repair import grader

BISECT = """
def bisect_left(a, x):
  lo, hi = 0, len(a)
  while lo < hi:
    mid = (lo + hi) // 2
    if a[mid] < x:
      lo = mid + 1
    else:
      hi = mid
  return lo
"""
LISTS = ('([1, 2, 3], 2)', '([], 5)', '([1, 1, 4], 9)')
RIGHT = ('ok (1, ([1, 2, 3], 2,),)', 'ok (0, ([], 5,),)', 'ok (3, ([1, 1, 4], 9,),)')
GOOD = grader.Check('bisect', 'bisect_left', BISECT, LISTS)
LIMITS = config.Sandbox(
  workers=1, cpu_seconds=0.25, wall_seconds=1.0, memory_mib=128, output_kib=64
)


@pytest.fixture(scope='module', params=['bubblewrap', 'process'])
def backend(request) -> str:
  reason = sandbox._why_not_bubblewrap() if request.param == 'bubblewrap' else ''
  if reason:
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')
  return request.param


@contextlib.asynccontextmanager
async def graders(
  backend: str, *, files: int = 0, **fields
) -> AsyncIterator[grader.Graders]:
  """With `files` a check may open some, and import: so the walls behind are tried."""
  cfg = config.Sandbox(
    **{**{f: getattr(LIMITS, f) for f in LIMITS.__dataclass_fields__}, **fields}
    | {'backend': backend}
  )
  pool = grader.Graders(cfg)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(grader, '_FILES', files)
    await pool.start()
    try:
      yield pool
    finally:
      await pool.close()


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def pool(backend) -> AsyncIterator[grader.Graders]:
  async with graders(backend) as pool:
    yield pool


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def isolated() -> AsyncIterator[grader.Graders]:
  reason = sandbox._why_not_bubblewrap()
  if reason:
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')
  async with graders('bubblewrap') as pool:
    yield pool


def check(body: str, *cases: str, module='bisect') -> grader.Check:
  """A check of `def f(*a)` with this body."""
  source = 'def f(*a):\n' + textwrap.indent(textwrap.dedent(body), '  ')
  return grader.Check(module, 'f', source, cases or ('()',))
