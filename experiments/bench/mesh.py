"""The same learner step on 1, 2, 4 and 8 devices and on 2 processes, compared.

  python -m experiments.bench.mesh

A small dense model and one with latent attention and experts, on virtual CPU devices;
2 processes of 4 devices each through `jax.distributed` on loopback. Compared with one
device, leaf by leaf, as DESIGN.md says: the summed gradient to 1e-6 of the leaf's
largest, parameters after Muon to 1e-3 of the update's RMS (orthogonalising amplifies
rounding), and bits where `optim.exact_sum` with replicas promises them. AdamW's leaves
are not compared: its first step is the sign of a gradient, and where that is rounding,
so is its sign. How much of it is rounding is shown too: every case beside the same
gradient in float64 (bench/float64.py), and one device whose attention is cut otherwise.

Hardware: 2 cores; 6 minutes. Expect `"bitwise": true` and a max_grad_diff of 1.1e-6:
meshes that split heads and feed-forward (tensor) are the furthest off, up to 1.5e-6 of
a leaf's own largest; all others stay within 1.04e-6. The last line is JSON:

  {"max_grad_diff": .., "bitwise": ..}

max_grad_diff: largest difference of a gradient on any mesh, over the largest gradient
of that model.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile

from absl import app
import numpy as np

from experiments.bench import mesh_main
from swe17.learner import optimizer

DEVICES = 8
_NONE = np.full((), np.nan)
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
  """Of one case from the case on one device.

  Attributes:
    leaf: largest |gradient difference| over the leaf's largest |gradient|.
    worst: the leaf where that is.
    exact: `leaf` with the float64 gradient in the place of one device's; NaN if `want`
      has none.
    model: the same over the largest |gradient| of all leaves.
    params: largest |parameter difference| over the RMS of the update, leaves of Muon.
    bitwise: all bits of gradient and parameters are equal.
  """

  leaf: float
  worst: str
  exact: float
  model: float
  params: float
  bitwise: bool


def compare(got: Arrays, want: Arrays, start: Arrays) -> Difference:
  """Compares two results of mesh_main; `start` has the parameters before the step."""
  grads = [key for key in want if key.startswith('grad:')]
  by_leaf = {key: _apart(got[key], want[key]) / _largest(want[key]) for key in grads}
  exact: Arrays = {k: want.get(k.replace('grad:', 'float64:'), _NONE) for k in grads}
  worst = max(by_leaf, key=lambda key: by_leaf[key])
  largest = max(_largest(want[key]) for key in grads)
  params = 0.0
  for key, before in start.items():
    if optimizer.TABLE[key] == optimizer.ADAMW:
      continue
    update = np.float64(want[f'param:{key}']) - before
    rms = np.sqrt(np.mean(update**2))
    apart = _apart(got[f'param:{key}'], want[f'param:{key}'])
    params = max(params, apart / float(rms))
  return Difference(
    leaf=by_leaf[worst],
    worst=worst.removeprefix('grad:'),
    exact=max(_apart(got[k], x) / _largest(x) for k, x in exact.items()),
    model=max(_apart(got[key], want[key]) for key in grads) / largest,
    params=params,
    bitwise=all(got[key].tobytes() == want[key].tobytes() for key in got),
  )


def _apart(a: np.ndarray, b: np.ndarray) -> float:
  return float(np.abs(np.float64(a) - np.float64(b)).max())


def _largest(x: np.ndarray) -> float:
  return float(np.abs(np.float64(x)).max()) or 1.0


def start(devices: int, *arguments: str) -> subprocess.Popen[bytes]:
  """mesh_main in a process of its own with so many devices."""
  env = os.environ | {
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    'JAX_PLATFORMS': 'cpu',
    'JAX_DEFAULT_MATMUL_PRECISION': 'highest',
  }
  command = [sys.executable, '-m', 'experiments.bench.mesh_main', *arguments]
  return subprocess.Popen(command, env=env)


def together(processes: int, devices: int, *arguments: str) -> None:
  """mesh_main in several processes that are one mesh. RuntimeError if one fails."""
  with socket.socket() as found:
    found.bind(('localhost', 0))
    address = f'localhost:{found.getsockname()[1]}'
  shared = (f'--processes={processes}', f'--address={address}', *arguments)
  started = [start(devices, f'--index={i}', *shared) for i in range(processes)]
  try:
    codes = [process.wait(timeout=1200) for process in started]
  finally:
    for process in started:
      process.kill()
  if any(codes):
    raise RuntimeError(f'mesh_main: got exit codes {codes}, want 0')


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  with tempfile.TemporaryDirectory() as folder:
    together(1, DEVICES, f'--out={folder}')
    cases = ','.join(mesh_main.TWO_PROCESSES)
    together(2, DEVICES // 2, f'--out={folder}', f'--cases={cases}')
    result = report(folder)
  print(json.dumps(result), flush=True)


def report(folder: str) -> dict[str, float | bool]:
  """Prints a line a case, and sums them up."""
  found: dict[str, Arrays] = {}
  for name in sorted(os.listdir(folder)):
    with np.load(os.path.join(folder, name)) as file:
      found[name.removesuffix('.npz')] = dict(file)
  print(f'{"case":38s} leaf     float64  model    params   bits   worst leaf')
  largest, bitwise = 0.0, True
  for name, got in found.items():
    case = mesh_main.CASES[name.partition('@')[0]]
    begun = {k: np.asarray(v) for k, v in mesh_main.begun(case).items()}
    d = compare(got, found[case.against or name], begun)
    print(
      f'{name:38s} {d.leaf:.1e}  {d.exact:.1e}  {d.model:.1e}  {d.params:.1e}  '
      f'{"equal" if d.bitwise else "no":5s}  {d.worst}'
    )
    if case.sizes:
      largest = max(largest, d.model)
    if case.exact:
      bitwise = bitwise and d.bitwise
  return {'max_grad_diff': float(f'{largest:.2g}'), 'bitwise': bitwise}


if __name__ == '__main__':
  app.run(main)
