"""Settings of the tasks and of the sandbox that what agents write runs in."""

import dataclasses
import re

from swe17 import fields

_f, _want = fields.setting, fields.want
_at_least, _above, _one_of = fields.at_least, fields.above, fields.one_of


@dataclasses.dataclass(frozen=True)
class Tasks:
  family: str = _f('repair_functions', 'task family')
  table: str = _f('', 'task table file; empty: the one shipped with the family')
  kinds: str = _f('', 'kinds of fault used, comma-separated; empty: all')
  lines: int = _f(0, 'longest function used [lines], 0 = any')
  train: int = _f(0, 'training tasks used, 0 = all')
  heldout: int = _f(0, 'held-out tasks used, 0 = all')
  verify: bool = _f(True, 'verify every task once more before the run')
  cache: str = _f('', "folder of source distributions; empty: the user's own cache")
  difficulty: str = _f('', 'file of estimates (build_tasks) that a run starts from')
  band_low: float = _f(0.0, 'share solved below which a training task rests')
  band_high: float = _f(1.0, 'share solved above which it rests; 0 and 1: none rests')
  band_tries: int = _f(8, 'episodes of a task before it may rest')
  band_retry: float = _f(0.1, 'share of groups drawn from all tasks all the same')
  band_least: int = _f(16, 'tasks in the band below which none rests')
  attempts: int = _f(4, 'kernels: candidates an agent may hand in')
  speedup_cap: float = _f(5.0, 'kernels: largest speedup that counts')
  root: str = _f('', 'folder of repositories (swe_bench) or of task folders (harbor)')
  place: str = _f('container', 'where those tasks run: container | local (no image)')
  units: str = _f('', 'their held-out units, comma-separated; empty: a fifth, by hash')
  factory: str = _f('', "verifiers: 'module:function' that makes the environment")
  arguments: str = _f('{}', 'verifiers: its arguments, JSON')

  def __post_init__(self):
    _at_least(self, 'tasks.', 0, 'lines', 'train', 'heldout', 'band_tries')
    band = f'{self.band_low:g} to {self.band_high:g}'
    inside = 0.0 <= self.band_low < self.band_high <= 1.0
    _want(inside, 'tasks.band_low to tasks.band_high', band, 'a part of 0 to 1')
    _at_least(self, 'tasks.', 1, 'attempts', 'speedup_cap')
    _one_of(self, 'tasks.', 'place', 'container', 'local')


@dataclasses.dataclass(frozen=True)
class Sandbox:
  backend: str = _f(
    'auto', 'auto | bubblewrap | container | process (no isolation, warned)'
  )
  workers: int = _f(2, 'warm graders')
  cpu_seconds: float = _f(0.15, 'CPU time one check may take [s]')
  wall_seconds: float = _f(4.0, 'wall time one check may take [s]')
  memory_mib: int = _f(512, 'address space of one check [MiB]')
  processes: int = _f(8, 'processes of one check')
  output_kib: int = _f(256, 'output of one check [KiB]')
  engine: str = _f('docker', 'container engine: docker, podman or their like')
  image: str = _f('', 'image of backend=container; never pulled')
  user: str = _f('65534:65534', "user in a container; 0:0 where files are root's")
  cpus: float = _f(1.0, 'CPUs of one container')
  life_seconds: float = _f(7200.0, 'longest life of a container that is kept [s]')

  def __post_init__(self):
    _one_of(self, 'sandbox.', 'backend', 'auto', 'bubblewrap', 'container', 'process')
    _above(self, 'sandbox.', 0, 'cpu_seconds', 'wall_seconds', 'cpus', 'life_seconds')
    _want(bool(self.engine), 'sandbox.engine', self.engine, 'a command')
    _want(
      bool(re.fullmatch(r'\d+:\d+', self.user)), 'sandbox.user', self.user, 'uid:gid'
    )
    _at_least(self, 'sandbox.', 1, 'workers', 'memory_mib', 'processes', 'output_kib')
