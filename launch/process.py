"""What a process needs before it imports JAX, and how it ends with its parent.

JAX reads its settings from the environment when it is imported, so they are set here,
once, by role, and nowhere else. The platform is left to JAX (`JAX_PLATFORMS`).
"""

import ctypes
import hashlib
import os
import pathlib
import platform
import signal
import sys
import threading
import time

from swe17 import config

ROOT = pathlib.Path(__file__).resolve().parent.parent  # where `-m experiments.x` works
GRACE = 3.5  # s from SIGTERM to SIGKILL; a role needs 3 at most
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER in <sys/prctl.h>


def prepare_jax(cfg: config.Config, role: str, index: int) -> None:
  """Sets threads and JAX's environment for this process. Call before JAX is imported.

  Matmuls in full float32 and exact ranks: sampler and learner must agree to the
  numeric floor. Compiled programs are kept between runs and shared by the samplers.
  """
  assert 'jax' not in sys.modules, 'JAX was imported before its settings were made'
  if role == 'sampler':
    _pin(cfg.sampler.threads, index)
    if cfg.sampler.threads == 1:
      flags = os.environ.get('XLA_FLAGS', '')
      os.environ['XLA_FLAGS'] = f'{flags} --xla_cpu_multi_thread_eigen=false'.strip()
  os.environ.update(
    {
      'JAX_DEFAULT_MATMUL_PRECISION': 'highest',
      'JAX_NUMPY_RANK_PROMOTION': 'raise',
      'JAX_THREEFRY_PARTITIONABLE': 'true',
    }
  )
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache(cfg.run_dir)))
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')


def _pin(threads: int, index: int) -> None:
  """Keeps sampler `index` on its own `threads` cores; XLA sizes its pool by them."""
  if not hasattr(os, 'sched_setaffinity'):
    return  # macOS: the scheduler decides
  cores = sorted(os.sched_getaffinity(0))
  first = index * threads
  os.sched_setaffinity(0, {cores[(first + i) % len(cores)] for i in range(threads)})


def _cache(run_dir: str) -> pathlib.Path:
  """A folder for compiled programs, one for each kind of CPU.

  A program compiled for another CPU's instructions may not run here, and home
  folders are shared between machines.
  """
  kind = platform.machine()
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  if cpuinfo.exists():
    flags = [line for line in cpuinfo.read_text().splitlines() if 'flags' in line[:9]]
    kind += ''.join(flags[:1])
  name = f'jax-{hashlib.sha256(kind.encode()).hexdigest()[:12]}'
  home = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  folder = pathlib.Path(home) / 'swe17' / name
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:
    return pathlib.Path(run_dir).parent / '.jax_cache' / name
  if os.access(folder, os.W_OK):
    return folder
  return pathlib.Path(run_dir).parent / '.jax_cache' / name


def end_with(parent: int) -> None:
  """Ends this process, and its group, within seconds of its parent's end.

  However the parent died: SIGTERM first, SIGKILL to the group after `GRACE`. The
  caller must lead its own group.
  """

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.killpg(0, signal.SIGKILL)

  threading.Thread(target=watch, name='end-with-parent', daemon=True).start()


def adopt_orphans() -> None:
  """Makes this process the parent of what its dead children leave behind (Linux).

  A role that is killed cannot stop its graders; whoever adopts them can.
  """
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
  """Process ids of this process's children, dead ones not yet waited for included."""
  found: set[int] = set()
  for path in pathlib.Path('/proc/self/task').glob('*/children'):
    try:
      found.update(int(pid) for pid in path.read_text().split())
    except FileNotFoundError:
      continue  # the thread ended meanwhile
  return found


def end_orphans(ours: set[int]) -> None:
  """Kills and reaps every child that is not in `ours`: adopted, wanted by nobody."""
  for pid in children() - ours:
    try:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, os.WNOHANG)  # what is not gone yet goes in the next round
    except (ProcessLookupError, ChildProcessError):
      continue
