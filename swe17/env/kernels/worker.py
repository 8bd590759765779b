"""One sandbox of the bench, as the trusted side talks to it (runner.py is inside)."""

import asyncio
from collections.abc import Mapping
import dataclasses
import importlib.util
import json
import pathlib
from typing import Any

from swe17 import config
from swe17.env import sandbox, zygote
from swe17.env.kernels import runner

_MARGIN_SECONDS = 10.0  # beyond the wall limit that the runner itself keeps
_START_SECONDS = 60.0  # for a sandbox to start and to import what it needs
_OUTPUT_BYTES = 16 << 20  # of one result
_PACKAGES = '/packages'
_CODE = pathlib.Path(__file__).resolve().parents[3]
_INSIDE = ('runner', 'values')
WAITED = 'out of time, waiting'  # not by its CPU time: the machine may have been busy
_ENDS = {'wall': WAITED, 'timeout': 'out of time'}
_ENDS |= {'died': 'its process died', 'large': 'it returned too much'}

ENDS = frozenset(_ENDS.values())  # of a candidate that may end otherwise next time


def failure(meta: Mapping[str, Any]) -> str:
  """Why a candidate gave no result, '' if it did."""
  return meta.get('failure') or _ENDS.get(meta.get('end', ''), '')


@dataclasses.dataclass(frozen=True)
class Room:
  """What a candidate finds in its sandbox; the defaults are for code on the CPU.

  Attributes:
    modules: what is imported beside numpy before there is a candidate.
    packages: names in numpy's folder that are shown; '*' alone: all of it.
    devices: paths of devices that are shown.
    clock: 'cpu', the kernel's count of a process, or 'wall'.
    processes: that a candidate may be; more than 1 would not be counted by 'cpu'.
    files: that it may have open.
    file_bytes: of a file that it may write, in a folder in memory.
    bounded: whether its address space is limited, which drivers of devices do not bear.
  """

  modules: tuple[str, ...] = ()
  packages: tuple[str, ...] = ('numpy', 'numpy.libs')
  devices: tuple[str, ...] = ()
  clock: str = 'cpu'
  processes: int = 1
  files: int = 32
  file_bytes: int = 0
  bounded: bool = True


def binds(backend: str, room: Room) -> tuple[list[str], str]:
  """(bwrap options that show packages and our programs, the folder numpy is in)."""
  spec = importlib.util.find_spec('numpy')
  assert spec is not None and spec.origin is not None, 'numpy is not installed'
  packages = pathlib.Path(spec.origin).resolve().parents[1]
  if backend != 'bubblewrap':
    return [], str(packages)
  folder = '/code/swe17/env/kernels'
  options = ['--perms', '0755', '--dir', folder, '--perms', '0755', '--dir', _PACKAGES]
  for name in _INSIDE:
    file = f'{folder}/{name}.py'
    options += ['--ro-bind', str(_CODE / file.removeprefix('/code/')), file]
  for name in room.packages:
    whole = name == '*'
    inside = _PACKAGES if whole else f'{_PACKAGES}/{name}'
    outside = packages if whole else packages / name
    options += ['--ro-bind-try', str(outside), inside]
  if room.file_bytes:
    options += ['--perms', '1777', '--tmpfs', '/tmp', '--setenv', 'HOME', '/tmp']
    # Large libraries look for randomness, and for what machine they are on.
    options += ['--dev', '/dev', '--proc', '/proc']
  for path in room.devices:
    options += ['--dev-bind', path, path]
  return options, _PACKAGES


class Fault(Exception):
  """A worker gave no usable answer."""


class Worker(zygote.Zygote):
  """One sandbox with runner.py in it, started when first asked."""

  def __init__(self, cfg: config.Sandbox, backend: str, room: Room):
    super().__init__()
    self._cfg, self._backend, self._room = cfg, backend, room

  async def _begin(self) -> None:
    options, packages = binds(self._backend, self._room)
    settings = {
      'isolated': self._backend == 'bubblewrap',
      'packages': packages,
      'cpu_seconds': self._cfg.cpu_seconds,
      'wall_seconds': self._cfg.wall_seconds,
      'memory_bytes': self._cfg.memory_mib << 20 if self._room.bounded else -1,
      'output_bytes': _OUTPUT_BYTES,
      'modules': self._room.modules,
      'clock': self._room.clock,
      'processes': self._room.processes,
      'files': self._room.files,
      'file_bytes': self._room.file_bytes,
    }
    await self.start(
      sandbox.program(
        self._backend, 'kernels.runner', 'main', json.dumps(settings), options=options
      )
    )

  async def open(self, name: str, source: str, function: str) -> str:
    """A fresh process for a source: why it does not run, '' if it does."""
    asked = {'op': 'open', 'id': name, 'source': source, 'function': function}
    meta, _ = await self._ask(asked)
    return failure(meta)

  async def call(
    self, name: str, function: str, arguments: bytes, *, after: bool
  ) -> tuple[dict[str, Any], bytes]:
    """(what the zygote says of a call, the bytes of its result)."""
    asked = {'op': 'call', 'id': name, 'function': function, 'after': after}
    return await self._ask(asked, arguments)

  async def end(self, name: str) -> None:
    """Kills the process of that name, if there is one."""
    await self._ask({'op': 'close', 'id': name})

  async def _ask(
    self, request: dict[str, Any], arguments: bytes | None = None
  ) -> tuple[dict[str, Any], bytes]:
    """(what the zygote says, the bytes of a result). Raises Fault."""
    frames = runner.frame(json.dumps(request).encode())
    if arguments is not None:
      frames += runner.frame(arguments)
    try:
      seconds = self._cfg.wall_seconds + _MARGIN_SECONDS
      if not self.running:
        await self._begin()
        seconds += _START_SECONDS
      async with asyncio.timeout(seconds):
        answer = await self.exchange(frames, _OUTPUT_BYTES)
        head, _, result = answer.partition(b'\n')
        meta = json.loads(head)
    except TimeoutError:
      raise Fault('it fell silent') from None
    except (asyncio.IncompleteReadError, OSError, ValueError) as error:
      raise Fault(f'{error!r} {await self.last_words()}'.strip()) from error
    if 'error' in meta or meta.get('end') == 'killed':
      raise Fault(str(meta.get('error', 'killed from outside (out of memory?)')))
    return meta, result
