"""Warm graders: what a check may not use up, see, or leave behind."""

import asyncio
import contextlib
import json
import os

import psutil
import pytest

from swe17.env.repair import grader
from tests import grader_fixtures
from tests.grader_fixtures import check, GOOD, graders, RIGHT

backend, isolated, pool = (
  grader_fixtures.backend,
  grader_fixtures.isolated,
  grader_fixtures.pool,
)
pytestmark = pytest.mark.asyncio(loop_scope='module')


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


@pytest.mark.parametrize('name', [name for name in HOGS if name != 'memory'])
async def test_hog_is_bounded_and_the_next_check_is_fine(isolated, name):
  await assert_bounded(isolated, name)


@pytest.mark.parametrize('name', ['cpu', 'a file', 'flood'])
async def test_hog_is_bounded_without_namespaces(name):
  async with graders('process') as pool:
    await assert_bounded(pool, name)


async def test_memory_is_bounded_by_its_own_limit(backend):
  # Filling the memory takes CPU time too, and several times as much on a busy machine:
  # it is the memory's limit that must end it.
  async with graders(backend, cpu_seconds=5.0, wall_seconds=30.0) as pool:
    await assert_bounded(pool, 'memory')


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
    assert count <= 6  # the limit; a kernel may let the one more through
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
