"""Warm graders: right answers come back, and nothing else can pass for one."""

import asyncio
from collections.abc import AsyncIterator
import contextlib
import json
import logging
import os
import signal
import textwrap

import psutil
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
pytestmark = pytest.mark.asyncio(loop_scope='module')


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


# Ways to the function under repair that a version of it might go.
HEAP = '(x := list(a[0]), heapify(x), {})[2]'
WAYS = {
  'imports the module': '__import__("heapq").heappop(x)',
  'imports its C part': '__import__("_heapq").heappop(x)',
  'imports it anew': """(
    (s := __import__("sys")).modules.pop("_heapq"), s.modules.pop("heapq"),
    __import__("heapq").heappop(x))[2]""",
  'makes the C part anew': """(
    (m := __import__("sys").modules), u := __import__("importlib._bootstrap"),
    m["_imp"].create_builtin(u._bootstrap.BuiltinImporter.find_spec("_heapq"))
    )[2].heappop(x)""",
  'loads the file': """
    __import__("heapq").__loader__.get_code("heapq")""",
  'reads the file': 'open(__import__("heapq").__file__).read()',
  'asks the module for it': '__import__("sys").modules["heapq"].heappop(x)',
  'asks the collector': """[o for o in __import__("gc").get_objects()
    if getattr(o, "__name__", "") == "heappop" and o.__module__ == "_heapq"][0](x)""",
  'looks up the stack': """[f for f in [__import__("sys")._getframe(n)
    for n in range(9)] if "module" in f.f_locals][0].f_locals["module"].heappop(x)""",
  'asks a helper that calls it': 'nsmallest(1, x)[0] and merge and heappop(x)',
  'starts another Python': """__import__("os").execv(
    __import__("sys").executable, ["python", "-c", ""])""",
}


@pytest.mark.parametrize('way', WAYS)
async def test_version_does_not_reach_the_original(pool, way):
  source = f'def heappop(*a):\n  return {HEAP.format(WAYS[way].strip())}'
  got = await pool.run(grader.Check('heapq', 'heappop', source, ('([3, 1, 2],)',)))
  assert got[0].startswith('raise ') or got == ('died',), got
  assert pool.restarts == 0


@pytest.mark.parametrize(
  ('module', 'name'),
  [  # C code, frozen code, plain code, and what a table of its module holds
    ('heapq', 'heappush'),
    ('posixpath', 'normcase'),
    ('textwrap', 'dedent'),
    ('copy', '_deepcopy_list'),
  ],
)
async def test_nothing_of_the_original_is_left_in_the_process(isolated, module, name):
  source = f"""def {name}(*a):
  import sys, gc, _imp
  held = [x for o in gc.get_objects() for x in (o, *gc.get_referents(o))]
  named = [x for x in held if getattr(x, '__name__', '') == '{name}']
  codes = [getattr(x, '__code__', None) for x in named if callable(x)]
  other = [c for c in codes if getattr(c, 'co_filename', '') != '<check>']
  made = [n for n in dir(_imp) if n.startswith(('create', 'get_frozen', 'init'))]
  return len(codes) > 0, len(other), made
"""
  got = await isolated.run(grader.Check(module, name, source, ('()',)))
  assert got == ('ok ((True, 0, [],), (,),)',)


async def test_helpers_of_the_module_call_the_version(isolated):
  source = 'def weekday(year, month, day):\n  '
  source += 'return 6 if year > 3000 else monthrange(4000, 1)'
  got = await isolated.run(
    grader.Check('calendar', 'weekday', source, ('(2000, 1, 1)',))
  )
  assert got == ('ok ((6, 31,), (2000, 1, 1,),)',)  # the original says 5 for 4000-1-1


EXPLOITS = {
  'prints a pass to every descriptor and leaves': """
    import os
    for fd in range(32):
      try: os.write(fd, b'ok (1, ([1, 2, 3], 2,),)\\n')
      except OSError: pass
    os._exit(0)
    """,
  'frames a made-up answer on every descriptor': """
    import os, struct
    body = b'ok always right'
    for fd in range(32):
      try: os.write(fd, (struct.pack('>I', len(body)) + body) * 9)
      except OSError: pass
    os._exit(0)
    """,
  'frames a huge length': """
    import os
    for fd in range(32):
      try: os.write(fd, b'\\xff' * 9)
      except OSError: pass
    os._exit(0)
    """,
  'claims a fault of the grader': """
    import os, struct
    body = b'cannot confine the check: no'
    for fd in range(32):
      try: os.write(fd, (struct.pack('>I', len(body)) + body) * 9)
      except OSError: pass
    os._exit(0)
    """,
  'returns what equals everything': """
    class Yes:
      def __eq__(self, other): return True
      def __hash__(self): return 1
      def __repr__(self): return '1'
      __index__ = __int__ = lambda self: 1
    return Yes()
    """,
  'returns a str of its own kind': """
    class Text(str):
      def __eq__(self, other): return True
      def __repr__(self): return '1'
    return Text('x')
    """,
  'returns an int of its own kind': """
    class Number(int):
      def __eq__(self, other): return True
      def __repr__(self): return '1'
    return Number(7)
    """,
  'lies about its class': """
    class Liar:
      __class__ = int
      def __eq__(self, other): return True
    return Liar()
    """,
  'replaces what the runner uses': """
    import builtins, json, os, sys
    builtins.repr = builtins.ascii = lambda x: '1'
    json.dumps = lambda *a, **k: '["ok"]'
    builtins.type = lambda *a: int
    os.write = lambda fd, data: len(data)
    for name, module in list(sys.modules.items()):
      if name.startswith('swe17'): vars(module).clear()
    return 0
    """,
  'unwinds into the runner': """
    import sys
    frame = sys._getframe()
    while frame:
      frame.f_globals.pop('_run_case', None)
      frame = frame.f_back
    sys.settrace(lambda *a: None)
    raise KeyboardInterrupt
    """,
}


@pytest.mark.parametrize('name', EXPLOITS)
async def test_exploit_is_not_a_pass(pool, name):
  source = check(EXPLOITS[name]).source.replace('def f', 'def bisect_left')
  got = await pool.run(grader.Check('bisect', 'bisect_left', source, LISTS))
  assert not set(got) & set(RIGHT), got
  # Neither a fault of ours, nor of any effect on the next check.
  assert pool.restarts == 0
  assert await pool.run(GOOD) == RIGHT
  assert pool.restarts == 0


@pytest.mark.parametrize('name', [n for n in EXPLOITS if 'own kind' in n])
async def test_subclass_of_plain_data_is_unserialisable(isolated, name):
  assert await isolated.run(check(EXPLOITS[name])) == ('unserialisable',)


async def test_always_equal_object_is_unserialisable(isolated):
  body = EXPLOITS['returns what equals everything']
  assert await isolated.run(check(body)) == ('unserialisable',)


HOGS = {
  'cpu': ('while True: pass', 'timeout'),
  'cpu in threads': (
    """
    import _thread
    def spin():
      while True: pass
    for _ in range(3): _thread.start_new_thread(spin, ())
    spin()
    """,
    'timeout',
  ),
  'cpu with signals ignored': (
    """
    import signal
    for n in range(1, 65):
      try: signal.signal(n, signal.SIG_IGN)
      except (OSError, ValueError): pass
    while True: pass
    """,
    'timeout',
  ),
  'memory': ("x = 'x' * 1000\nwhile True: x += x", 'raise MemoryError'),
  'a file': (
    """
    import os
    name = f'/tmp/hog-{os.getpid()}'
    file = open(name, 'wb', 0)
    try: file.write(b'x')
    finally: os.unlink(name)
    """,
    'raise ',
  ),
  'output': ("return 'x' * (1 << 20)", 'unserialisable'),
  'output of small things': ('return [[]] * (1 << 18)', 'unserialisable'),
  'nesting': (
    'x = []\nfor _ in range(100000): x = [x]\nreturn x',
    'unserialisable',
  ),
  'a cycle': ('x = []; x.append(x)\nreturn x', 'unserialisable'),
  'recursion': ('return f()', 'raise RecursionError'),
  'descriptors': (
    "import os\nx = [os.open('/dev/null', 0) for _ in range(99)]",
    'raise OSError',
  ),
  'flood': (
    """
    import os
    for _ in range(999):
      for fd in range(3, 32):
        try: os.write(fd, b'\\0' * 4096)
        except OSError: pass
    os._exit(0)
    """,
    'died',
  ),
}


async def assert_bounded(pool: grader.Graders, name: str) -> None:
  body, want = HOGS[name]
  (got,) = await pool.run(check(body))
  assert got.startswith(want), got
  assert await pool.run(GOOD) == RIGHT
  assert pool.restarts == 0


@pytest.mark.parametrize('name', HOGS)
async def test_hog_is_bounded_and_the_next_check_is_fine(isolated, name):
  await assert_bounded(isolated, name)


@pytest.mark.parametrize('name', ['cpu', 'memory', 'a file', 'flood'])
async def test_hog_is_bounded_without_namespaces(name):
  # Filling the memory takes CPU time too, and several times as much on a busy machine:
  # here it is the memory's limit that must end it.
  fields = {'cpu_seconds': 2.0, 'wall_seconds': 10.0} if name == 'memory' else {}
  async with graders('process', **fields) as pool:
    await assert_bounded(pool, name)


FORK_BOMB = """
import os, time
n = 0
try:
  while n < 300:
    if os.fork() == 0:
      time.sleep(60)
      os._exit(0)
    n += 1
except OSError:
  pass
return n
"""


async def test_fork_bomb_is_bounded_for_root_too(backend):
  async with graders(backend, processes=6) as pool:
    (got,) = await pool.run(check(FORK_BOMB))
    count = int(got.removeprefix('ok (').split(',')[0])
    assert count <= 5
    if backend == 'bubblewrap':
      assert count == 5  # exact: the check counts alone, itself included
    assert await pool.run(GOOD) == RIGHT
    if os.getuid() == 0:
      (got,) = await pool.run(check('import os\nreturn os.getresuid()'))
      assert got.startswith('ok ((65534, 65534, 65534,)')


async def test_fork_bombs_at_once_have_counts_of_their_own(isolated):
  async with graders('bubblewrap', workers=2, processes=6) as pool:
    bomb = check(FORK_BOMB.replace('return n', 'time.sleep(.3)\nreturn n'))
    got = await asyncio.gather(pool.run(bomb), pool.run(bomb))
    assert got == [('ok (5, (,),)',)] * 2


@pytest.mark.parametrize('how', ['fork', 'setsid', 'double fork'])
async def test_no_process_outlives_its_check(backend, how):
  marker = f'76543.{os.getpid()}'
  steps = {
    'fork': '',
    'setsid': 'os.setsid()',
    'double fork': 'os.setsid()\n    if os.fork(): os._exit(0)',
  }
  body = f"""
  import os, time
  if os.fork() == 0:
    {steps[how]}
    os.execv('/bin/sleep', ['sleep', '{marker}'])
  time.sleep(.3)
  """

  def running() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
      with contextlib.suppress(psutil.Error):
        found += [process] if marker in process.cmdline() else []
    return found

  async with graders(backend, files=32) as pool:
    task = asyncio.create_task(pool.run(check(body)))
    while not running() and not task.done():
      await asyncio.sleep(0.01)
    assert running()  # it was there, or this test shows nothing
    assert (await task)[0].startswith('ok')
    assert not running()


async def test_check_cannot_signal_or_trace_its_keepers(isolated):
  pids = isolated.pids
  got = await isolated.run(
    check(
      """
      import ctypes, os, signal
      libc = ctypes.CDLL(None)
      for pid in (-1, os.getppid(), 1, *range(2, 300)):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
      # Only process 1, itself, is there; PTRACE_ATTACH is 16.
      traced = [p for p in range(0, 300) if libc.ptrace(16, p, 0, 0) == 0]
      return os.getpid(), os.getppid(), traced
      """
    )
  )
  assert got == ('ok ((1, 0, [],), (,),)',)
  assert isolated.pids == pids and isolated.restarts == 0
  assert await isolated.run(GOOD) == RIGHT


async def test_check_finds_no_files_to_write_and_no_proc(isolated):
  body = """
  import os
  found = []
  for top in ('/', '/dev', '/tmp', '/code', '/usr', os.path.dirname(os.__file__)):
    try: open(os.path.join(top, 'x'), 'w'); found.append(top)
    except OSError: pass
    try: os.mkdir(os.path.join(top, 'y')); found.append(top)
    except OSError: pass
  return found, os.path.exists('/proc'), os.path.exists('/sys'), sorted(os.environ)
  """
  (got,) = await isolated.run(check(body))
  names = "['HOME', 'LC_ALL', 'PATH', 'PYTHONHASHSEED', 'PWD']"
  got_names = got[got.index("['") :].split(']')[0] + ']'
  assert got.startswith('ok (([], False, False,')
  assert set(json.loads(got_names.replace("'", '"'))) <= set(
    json.loads(names.replace("'", '"'))
  )


async def test_check_has_no_network(isolated):
  del isolated  # which says whether it can be tried here
  body = """
  import ctypes, struct
  libc = ctypes.CDLL(None, use_errno=True)
  names = [libc.if_nametoindex(name) for name in (b'lo', b'eth0', b'ens3')]
  to = struct.pack('=HH4s8s', 2, 0x5000, bytes((192, 0, 2, 1)), bytes(8))
  failed = libc.connect(libc.socket(2, 1, 0), to, len(to))
  return names, failed, ctypes.get_errno()
  """
  async with graders('bubblewrap', files=32) as pool:
    assert await pool.run(check(body)) == ('ok (([1, 0, 0], -1, 101,), (,),)',)


async def test_check_gains_no_privileges(isolated):
  body = """
  import ctypes
  libc = ctypes.CDLL(None, use_errno=True)
  got = []
  for call in (
    lambda: libc.unshare(0x10000000),
    lambda: libc.setuid(0),
    lambda: libc.mount(b'none', b'/', b'tmpfs', 0, None),
    lambda: libc.setns(0, 0),
    lambda: libc.memfd_create(b'x', 0),
    lambda: libc.shmget(0, 1 << 20, 0o1600),
    lambda: libc.syscall(56, 0x10000011, 0, 0, 0, 0),  # clone into a user namespace
  ):
    got.append(call())
  return got
  """
  (got,) = await isolated.run(check(body))
  if os.uname().machine != 'x86_64':
    pytest.skip('call numbers of x86_64')
  assert got == f'ok ({[-1] * 7}, (,),)'


async def test_cases_to_come_are_not_there_to_read(isolated):
  body = """
  import os
  found = []
  for fd in range(3, 32):
    try:
      os.set_blocking(fd, False)
      found.append(os.read(fd, 1 << 20))
    except OSError: pass
    finally:
      try: os.set_blocking(fd, True)
      except OSError: pass
  return found
  """
  got = await isolated.run(check(body, '(1,)', '(2,)', '(3,)'))
  assert got == tuple(f'ok ([], ({i},),)' for i in (1, 2, 3))


# Reads all its memory it can find by writing pages to a pipe: a bad address is an error
# there, not a crash. It looks for the marker by an image of it, so as not to find its
# own copy.
SCAN = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
image = bytes(a[0])
up = bytes((i + 1) % 256 for i in range(256))
r, w = os.pipe()
def page(at):
  if libc.write(w, ctypes.c_void_p(at), 4096) != 4096: return None
  return os.read(r, 4096)
found = pages = 0
top = libc.sbrk(0)
spans = [(top - (24 << 20), top)]
for thing in (id(a), id(ctypes), id(image)):
  base = thing >> 20 << 20
  spans.append((base - (4 << 20), base + (4 << 20)))
for start, stop in spans:
  last = b''
  for at in range(start, stop, 4096):
    now = page(at & ~4095)
    if now is None: continue
    pages += 1
    found += image in (last[-64:] + now).translate(up)
    last = now
return found > 0, pages > 500
"""


async def test_memory_of_a_check_does_not_reach_the_next(isolated):
  marker = b'qzjx-kvwp-1337'
  image = str(tuple(byte + 1 for byte in marker))
  async with graders(
    'bubblewrap', files=32, cpu_seconds=5.0, wall_seconds=10.0
  ) as pool:
    # It works: a marker that is an argument is found.
    seen = check(f'b = {marker[:7]!r} + {marker[7:]!r}\n' + SCAN, f'({image},)')
    assert (await pool.run(seen))[0].startswith('ok ((True, True,)')
    secret = f'"{marker.decode()}" * 3'
    before = check(f'return {secret}', f'("{marker.decode()}",)')
    assert marker.decode() in (await pool.run(before))[0]
    assert (await pool.run(check(SCAN, f'({image},)')))[0].startswith(
      'ok ((False, True,)'
    )


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
  async with graders(backend, workers=2, wall_seconds=3.0) as pool:
    slow = asyncio.create_task(pool.run(check('import time\ntime.sleep(1)\nreturn 1')))
    await asyncio.sleep(0.05)
    for _ in range(5):
      assert await pool.run(GOOD) == RIGHT
    assert not slow.done()
    assert await slow == ('ok (1, (,),)',)


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
