"""The family `kernel_bench`: problems in the shape of KernelBench, on an accelerator.

A problem is a file of PyTorch: `class Model(nn.Module)`, `get_inputs()` and
`get_init_inputs()`; a candidate is a module that defines `class ModelNew` with the same
constructor and `forward` (KernelBench, arXiv:2502.10517). Files are those of
`tasks.root`, level by folder; every fifth, by a hash of its name, is held out.

Both models are made with one seed and get inputs of one seed, drawn anew for each call;
what they return is compared out here at 4096 places drawn for each call, and by shape
and type. As no CPU clock counts what a device does, a call takes the time that passes
until its result has been read, candidate and reference in turns under the bench's lock.
Models and inputs are made before that, by the problem's own code in the same process:
here, unlike on the CPU, a candidate that got hold of torch's functions could begin
early; rules.py bars what does that.

Where there is no device the family is refused with the reason (`missing`).
"""

import ast
from collections.abc import Sequence
import hashlib
import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np

from swe17 import config, types
from swe17.env.kernels import bench, judge, kernels, worker

FAMILY = 'kernel_bench'
PARTS = ('Model', 'get_inputs', 'get_init_inputs')
RTOL = 1e-2  # KernelBench's, for float32 on a device
_PLACES = 4096  # values of a result that are compared
_FILE_BYTES = 256 << 20  # that a compiler may write
_PROCESSES = 256  # compilers and drivers start some
_ALLOWED = frozenset(('torch', 'triton'))
_PROMPT = """Write a faster version of the model below, as `class ModelNew`, with the
same constructor and the same results (to 1 %) on a GPU. You may write kernels in CUDA
(torch.utils.cpp_extension.load_inline) or Triton.

```python
{source}```

Call `attempt` with a whole module that defines `ModelNew` and a sentence that sums up
what you changed and why: your reasoning is not kept, the sentence is. You have
{attempts} attempts and are told of each whether it parses, runs and is right, and how
much faster it is; the best counts."""
# What runs in a child; the names of problem and candidate are apart.
_DRIVER = """import importlib.util
import tempfile

import torch

_problem = {{'__name__': 'problem'}}
exec(compile({problem!r}, '<problem>', 'exec'), _problem)
_path = tempfile.mkdtemp() + '/kernel.py'  # Triton reads the source of its functions
with open(_path, 'w', encoding='utf-8') as _file:
  _file.write({source!r})
_spec = importlib.util.spec_from_file_location('kernel', _path)
_own = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_own)
_model_of = _own.{name}
_ready = []


def _moved(value):
  return value.to({device!r}) if isinstance(value, torch.Tensor) else value


def _wait():
  if {device!r} != 'cpu':
    torch.cuda.synchronize()


def prepare(seed, places):
  _ready.clear()
  torch.manual_seed(seed)
  made = [_moved(value) for value in _problem['get_init_inputs']()]
  torch.manual_seed(seed)
  model = _model_of(*made).to({device!r})
  torch.manual_seed(seed + 1)
  inputs = [_moved(value) for value in _problem['get_inputs']()]
  _wait()
  _ready.extend((model, inputs, places))


def run():
  model, inputs, places = _ready
  with torch.no_grad():
    out = model(*inputs)
  if type(out) is not torch.Tensor:
    raise TypeError('forward must return a tensor')
  flat = out.detach().reshape(-1)
  at = torch.from_numpy(places % max(flat.numel(), 1)).to(flat.device)
  some = flat[at] if flat.numel() else flat
  return [list(out.shape), str(out.dtype), some.double().cpu().numpy()]
"""


def parse(source: str) -> str:
  """Why a file is no problem, '' if it is one."""
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError) as e:
    return f'it does not parse: {e}'
  defined = {
    node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
  }
  missing = [name for name in PARTS if name not in defined]
  if missing:
    return f'it defines no {", ".join(missing)}'
  model = next(n for n in tree.body if getattr(n, 'name', '') == 'Model')
  methods = {n.name for n in ast.walk(model) if isinstance(n, ast.FunctionDef)}
  return '' if 'forward' in methods else 'its Model has no forward'


def missing(device: str = 'cuda') -> str:
  """Why candidates cannot run here, '' if they can."""
  if importlib.util.find_spec('torch') is None:
    return 'PyTorch is not installed'
  if device == 'cpu':
    return ''
  if not devices():
    return 'there is no GPU: no /dev/nvidia0'
  code = 'import torch; print(torch.cuda.is_available())'
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=False
  )
  if done.stdout.strip() != 'True':
    return 'the installed PyTorch finds no GPU: is it a build for CPUs?'
  return ''


def devices() -> tuple[str, ...]:
  """Device files of NVIDIA GPUs; () if there is none."""
  found = sorted(str(path) for path in pathlib.Path('/dev').glob('nvidia*'))
  files = tuple(path for path in found if not pathlib.Path(path).is_dir())
  return files if '/dev/nvidia0' in files else ()


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """The problems below `cfg.root`: (tasks, set-aside id -> reason).

  ValueError without a folder, or if there are fewer than asked for.
  """
  root = pathlib.Path(cfg.root)
  if not cfg.root or not root.is_dir():
    raise ValueError(
      f'tasks.root: got {cfg.root!r}, want a folder of problems in the shape of '
      f'KernelBench: files that define {", ".join(PARTS)}'
    )
  found: dict[str, list[types.Task]] = {'train': [], 'heldout': []}
  set_aside: dict[str, str] = {}
  for path in sorted(root.rglob('*.py')):
    name = str(path.relative_to(root)).removesuffix('.py')
    source = path.read_text(encoding='utf-8')
    if why := parse(source):
      set_aside[name] = why
      continue
    task = _task(name, source, cfg)
    found[task.split].append(task)
  for split, asked in (('train', cfg.train), ('heldout', cfg.heldout)):
    if len(found[split]) < max(asked, 1):
      raise ValueError(
        f'tasks.{split}: {root} has {len(found[split])} problems, want '
        f'{max(asked, 1)}; {len(set_aside)} files were set aside'
      )
  train, heldout = found['train'][: cfg.train or None], found['heldout']
  return (*train, *heldout[: cfg.heldout or None]), set_aside


def _task(name: str, source: str, cfg: config.Tasks) -> types.Task:
  digest = hashlib.sha256(f'{FAMILY}/{name}'.encode()).digest()
  payload = {'source': source, 'attempts': cfg.attempts, 'cap': cfg.speedup_cap}
  text = _PROMPT.format(source=source, attempts=cfg.attempts)
  # Faster than PyTorch's own: fast_1 of KernelBench.
  return types.Task(
    name,
    FAMILY,
    'heldout' if digest[0] % 5 == 0 else 'train',
    name,
    text,
    payload,
    solved_at=0.3 + 1.0 + 1e-6,
  )


def problem(task: types.Task, device: str = 'cuda') -> bench.Problem:
  """What the bench asks of a candidate."""
  reference = task.payload['source']

  def module(text: str) -> str:
    name = 'Model' if text == reference else 'ModelNew'
    return _DRIVER.format(problem=reference, source=text, name=name, device=device)

  return bench.Problem(
    task.id,
    'run',
    reference,
    _inputs,
    checks=1,
    rtol=RTOL,
    prepare='prepare',
    module=module,
    compared='forward',
    allowed=_ALLOWED,
  )


def _inputs(rng: np.random.Generator, small: bool) -> tuple[Any, ...]:
  """A seed of model and inputs, and the places of the result that are compared."""
  del small
  places = rng.integers(0, 1 << 62, _PLACES)
  return int(rng.integers(0, 1 << 31)), places


def room(device: str = 'cuda') -> worker.Room:
  """What a candidate finds in its sandbox: all packages, the devices, a clock."""
  return worker.Room(
    modules=('torch',),
    packages=('*',),
    devices=devices() if device != 'cpu' else (),
    clock='wall',
    processes=_PROCESSES,
    files=1024,
    file_bytes=_FILE_BYTES,
    bounded=False,
  )


class Env(kernels.KernelsEnv):
  """One episode; that of `kernels`, on another bench."""

  def __init__(self, task: types.Task, by: judge.Judging, device: str = 'cuda'):
    super().__init__(task, by, problem(task, device))


class Host:
  """The bench of a process, and its verdicts."""

  def __init__(self, on: bench.Bench, device: str = 'cuda'):
    self._bench, self._device = on, device
    self.judge = judge.Judge(on)

  async def verify(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Every problem is taken: its reference runs when it is first measured."""
    return list(tasks), {}

  def env(self, task: types.Task) -> Env:
    return Env(task, self.judge, self._device)

  async def close(self) -> None:
    await self._bench.close()


async def open_host(cfg: config.Sandbox, device: str = 'cuda') -> Host:
  """Starts a bench. ValueError with the reason where there is no device."""
  if why := missing(device):
    raise ValueError(f'tasks.family={FAMILY}: {why}')
  on = bench.Bench(cfg, room(device))
  await on.start()
  return Host(on, device)
