"""Limits the kernel holds a process to: identity, resources, namespaces, system calls.

This file runs inside the sandbox, before the code under test, and imports the
standard library only. The order in `confine` matters: limits first (lowering needs no
privilege), then the identity, then what is counted per identity, last the privileges,
since each step needs those that later steps take away.

Sources: prctl(2), capabilities(7), seccomp(2), user_namespaces(7), getrlimit(2).
"""

import ctypes
import math
import os
import resource
import signal
import struct
import sys

NOBODY = 65534
NEWUSER, NEWPID = 0x10000000, 0x20000000
_PDEATHSIG, _DUMPABLE, _SECCOMP, _SUBREAPER, _NO_NEW_PRIVS = 1, 4, 22, 36, 38
_CAPABILITY_VERSION_3 = 0x20080522

# System calls the code under test has no use for, by machine: new namespaces, mounts,
# other processes' memory, key rings, and memory that RLIMIT_AS does not count. Numbers
# from 424 on are the same everywhere.
_EVERYWHERE = (425, 428, 429, 430, 432, 438, 442, 447)  # io_uring, mounts, pidfd_getfd
_DENIED = {
  'x86_64': (
    0xC000003E,  # AUDIT_ARCH_X86_64
    56,  # clone
    # unshare setns mount umount2 pivot_root chroot ptrace process_vm_readv, _writev
    (272, 308, 165, 166, 155, 161, 101, 310, 311)
    # shmget semget msgget mq_open memfd_create add_key request_key keyctl bpf
    + (29, 64, 68, 240, 319, 248, 249, 250, 321)
    + (298, 323),  # perf_event_open userfaultfd
  ),
  'aarch64': (
    0xC00000B7,  # AUDIT_ARCH_AARCH64
    220,
    (97, 268, 40, 39, 41, 51, 117, 270, 271)
    + (194, 190, 186, 180, 279, 217, 218, 219, 280)
    + (241, 282),
  ),
}
_CLONE3 = 435
_EPERM, _ENOSYS = 1, 38

_libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == 'linux':
  # Looked up once, here: a forked child would pay for it every time.
  _FUNCTIONS = (_libc.prctl, _libc.unshare, _libc.setns, _libc.capset)


def _check(result: int, name: str) -> None:
  if result != 0:
    error = ctypes.get_errno()
    raise OSError(error, f'{name}: {os.strerror(error)}')


def _prctl(option: int, *values: int) -> None:
  if sys.platform != 'linux':
    return
  longs = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
  _check(_libc.prctl(option, *longs), f'prctl({option})')


def unshare(flags: int) -> None:
  """Move this process (NEWUSER) or its next child (NEWPID) to new namespaces."""
  _check(_libc.unshare(flags), f'unshare({flags:#x})')


def enter_pid_namespace(pidfd: int) -> None:
  """Make the next child in the pid namespace of the process behind `pidfd`.

  After `unshare(NEWPID)` and a fork, one's own allows to do both again. Linux 5.8.
  """
  _check(_libc.setns(pidfd, NEWPID), 'setns')


def set_undumpable() -> None:
  """Close this process's memory to processes of the same user."""
  _prctl(_DUMPABLE, 0)


def set_subreaper() -> None:
  """Become the parent of every orphan below, so that `kill_children` finds them."""
  _prctl(_SUBREAPER, 1)


def kill_children() -> None:
  """Kill and reap all descendants. They come up as orphans, layer by layer."""
  path = f'/proc/self/task/{os.getpid()}/children'
  while os.path.exists(path):  # absent without CONFIG_PROC_CHILDREN
    with open(path, encoding='ascii') as file:
      children = [int(word) for word in file.read().split()]
    if not children:
      return
    for pid in children:
      os.kill(pid, signal.SIGKILL)
    for pid in children:
      os.waitpid(pid, 0)


def _tasks_of(uid: int) -> int:
  """Threads that a user runs besides this process, for RLIMIT_NPROC counts them too."""
  count = 0
  for pid in filter(str.isdigit, os.listdir('/proc') if os.path.isdir('/proc') else []):
    if int(pid) == os.getpid():
      continue
    try:
      if os.stat(f'/proc/{pid}').st_uid == uid:
        count += len(os.listdir(f'/proc/{pid}/task'))
    except (FileNotFoundError, ProcessLookupError):
      continue  # ended while we counted
  return count


def _map_ids(uid: int, gid: int) -> None:
  """Map a new user namespace's ids to themselves; without, no file can be made."""
  _prctl(_DUMPABLE, 1)  # else /proc/self belongs to root
  for name, text in (
    ('setgroups', 'deny'),
    ('uid_map', f'{uid} {uid} 1'),
    ('gid_map', f'{gid} {gid} 1'),
  ):
    with open(f'/proc/self/{name}', 'w', encoding='ascii') as file:
      file.write(text)


def drop_identity() -> None:
  """Stop being root, for good. An ordinary user stays who they are."""
  if os.getuid() == 0:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def confine(
  *,
  cpu_seconds: float,
  memory_bytes: int,
  processes: int,
  files: int,
  file_bytes: int,
  isolated: bool,
  map_ids: bool = False,
) -> None:
  """Hold this process and its descendants to limits it cannot lift again.

  `isolated` says that namespaces are around us. RLIMIT_CPU counts whole seconds and
  each process on its own: it only backs up whoever watches the clock.
  """
  seconds = math.ceil(cpu_seconds)
  pairs = [
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, memory_bytes),
    (resource.RLIMIT_FSIZE, file_bytes),
    (resource.RLIMIT_CORE, 0),
  ]
  if sys.platform == 'linux':
    pairs += [(resource.RLIMIT_MSGQUEUE, 0), (resource.RLIMIT_MEMLOCK, 0)]
  for name, value in pairs:
    _lower(name, value)
  drop_identity()
  # RLIMIT_NPROC counts per user and user namespace, and spares root. A namespace of
  # its own gives this sandbox its own count.
  if isolated:
    uid, gid = os.getuid(), os.getgid()
    try:
      unshare(NEWUSER)
    except PermissionError:
      pass  # forbidden here: all sandboxes of this machine share one count
    else:
      if map_ids:
        _map_ids(uid, gid)
  others = 0 if isolated else _tasks_of(os.getuid())
  _lower(resource.RLIMIT_NPROC, processes + others)
  _lower(resource.RLIMIT_NOFILE, files)  # from here on we may be able to open none
  if sys.platform == 'linux':
    _drop_privileges()


def _lower(name: int, value: int) -> None:
  hard = resource.getrlimit(name)[1]
  value = value if hard == resource.RLIM_INFINITY else min(value, hard)
  resource.setrlimit(name, (value, value))


def _drop_privileges() -> None:
  header = struct.pack('=Ii', _CAPABILITY_VERSION_3, 0)
  _check(_libc.capset(header, bytes(24)), 'capset')
  _prctl(_NO_NEW_PRIVS, 1)
  _prctl(_PDEATHSIG, signal.SIGKILL)  # after the identity: changing it clears this
  if _PROGRAM:
    buffer = ctypes.create_string_buffer(_PROGRAM)
    fprog = struct.pack('@HP', len(_PROGRAM) // 8, ctypes.addressof(buffer))
    filter_mode = ctypes.c_ulong(2)
    _check(_libc.prctl(_SECCOMP, filter_mode, ctypes.c_char_p(fprog), 0, 0), 'seccomp')


def _filter(machine: str) -> bytes:
  """A seccomp program that refuses `_DENIED`; empty for a machine not listed there."""
  if machine not in _DENIED:
    return b''
  arch, clone, denied = _DENIED[machine]
  load, equal, at_least, has_bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
  refuse = [(give, 0, 0, 0x00050000 | _EPERM)]
  code = [(load, 0, 0, 4), (equal, 1, 0, arch), *refuse]  # offset 4: architecture
  code += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), *refuse]  # 0: number; x32
  for number in (*denied, *_EVERYWHERE):
    code += [(equal, 0, 1, number), *refuse]
  # clone3 hides its flags in memory: 'no such call' makes the C library use clone.
  code += [(equal, 0, 1, _CLONE3), (give, 0, 0, 0x00050000 | _ENOSYS)]
  # clone with any namespace flag; offset 16: first argument, low word.
  code += [(equal, 0, 3, clone), (load, 0, 0, 16), (has_bits, 0, 1, 0x7E020000)]
  code += [*refuse, (give, 0, 0, 0x7FFF0000)]
  return b''.join(struct.pack('=HBBI', *step) for step in code)


_PROGRAM = _filter(os.uname().machine)  # made once: each check's child installs it


def probe() -> None:
  """Raise OSError unless a child can get what `runner` gives it inside namespaces."""
  home = os.pidfd_open(os.getpid())
  for _ in range(2):
    unshare(NEWPID)
    pid = os.fork()
    if pid == 0:
      drop_identity()
      os._exit(0 if os.getpid() == 1 else 1)
    if os.waitpid(pid, 0)[1] != 0:
      raise OSError('a process in a new pid namespace could not drop its identity')
    enter_pid_namespace(home)
