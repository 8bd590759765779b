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
import socket
import sys
import threading
import time
from typing import NoReturn

from swe17 import config

ROOT = pathlib.Path(__file__).resolve().parent.parent  # where `-m experiments.x` works
GRACE = 3.5  # s from SIGTERM to SIGKILL; a role needs 3 at most
_COORDINATOR = 'JAX_COORDINATOR_ADDRESS'
_HOST_DEVICES = '--xla_force_host_platform_device_count'
_TUNABLES = 'GLIBC_TUNABLES'
_HUGE = 'glibc.malloc.hugetlb=1'  # madvise(MADV_HUGEPAGE) on what malloc maps
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
  if role == 'learner':
    _prepare_learner(cfg, index)
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache(cfg.run_dir)))
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')


def huge_pages() -> dict[str, str]:
  """What a process needs in its environment for big arrays to lie in huge pages.

  Where the kernel gives those only to who asks (transparent_hugepage: madvise), a
  product of 2048-square matrices takes a quarter less time with them, and a step of 32
  sequences of SmolLM2-135M 4 %. Read by glibc (2.35 and later) before `main`, so it is
  for children; others ignore it. A user's own word on it stays.
  """
  given = os.environ.get(_TUNABLES, '')
  if 'glibc.malloc.hugetlb' in given:
    return {}
  return {_TUNABLES: f'{given}:{_HUGE}'.lstrip(':')}


def restart_in_huge_pages() -> None:
  """Starts this program anew, in the same process, if it has none (Linux)."""
  if sys.platform == 'linux' and (more := huge_pages()):
    sys.stdout.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **more})


def _prepare_learner(cfg: config.Config, index: int) -> None:
  """Deals out this machine's devices to the learner's processes."""
  each = cfg.mesh.devices // cfg.mesh.processes
  # Without an accelerator the mesh is made of virtual devices. (The platforms that have
  # devices of their own do not look at this.)
  if each > 1 and _HOST_DEVICES not in os.environ.get('XLA_FLAGS', ''):
    os.environ['JAX_NUM_CPU_DEVICES'] = str(each)
  if cfg.mesh.processes == 1:
    return
  # It would take SIGTERM away from us in C++, to ask that everybody saves at one step:
  # process 0 tells them so by itself.
  os.environ['JAX_ENABLE_PREEMPTION_SERVICE'] = 'false'
  if not cfg.mesh.coordinator:
    mine = range(index * each, (index + 1) * each)
    os.environ.setdefault('JAX_LOCAL_DEVICE_IDS', ','.join(map(str, mine)))


def coordinator(cfg: config.Config) -> str:
  """host:port where the learner's processes find each other; '' if there is one.

  ValueError if it is not known.
  """
  if cfg.mesh.processes == 1:
    return ''
  address = cfg.mesh.coordinator or os.environ.get(_COORDINATOR, '')
  if not address:
    raise ValueError(
      f'mesh.processes={cfg.mesh.processes}: got no mesh.coordinator, want host:port '
      'of learner process 0 (--role=local finds a port by itself)'
    )
  return address


def coordinator_env(cfg: config.Config) -> dict[str, str]:
  """A free port on this machine for one start of the learner's processes, if needed."""
  if cfg.mesh.processes == 1 or cfg.mesh.coordinator:
    return {}
  with socket.socket() as found:
    found.bind(('127.0.0.1', 0))
    return {_COORDINATOR: f'127.0.0.1:{found.getsockname()[1]}'}


def leave(code: int) -> NoReturn:
  """Ends one of several learner processes, without what JAX does at an exit.

  It would wait for the others, who may be gone, and then abort.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


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
