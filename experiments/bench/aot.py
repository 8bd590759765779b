"""Lowers and compiles the train step and the decode step of a model of any size.

  python -m experiments.bench.aot --config=experiments/configs/kimi_k2.py

From abstract arrays, on a virtual mesh of `mesh`'s size (CPU devices that hold
nothing): no weight is allocated. Prints, by device: bytes of parameters, gradient and
optimiser (from their shardings), bytes of activations (what the backward pass keeps of
one micro-batch, from saved residuals), and the collectives of the compiled program by
kind, count and size, with the largest gather. Collectives inside a loop over layers run
once a layer; they are marked. XLA's own figures for temporaries are of its CPU backend,
which expands a grouped product densely: they mean nothing for another machine and are
not printed.

  ... --topology=v5p:4x4x4     (pip install libtpu; no TPU is needed)

compiles for those chips with the real TPU compiler instead, whose figures for memory
are printed: bytes that a chip holds before the step and needs beside it. Their number
must be the mesh's. The last line is JSON:

  {"compiled": true, "params": .., "devices": .., "gib_per_device": ..}
"""

from collections.abc import Sequence
import importlib
import json
import math
import os

from absl import app, flags
from ml_collections import config_flags

from swe17 import settings

_CONFIG = config_flags.DEFINE_config_file('config', None, 'whose model and mesh')
_MICRO = flags.DEFINE_integer('micro', 2, 'micro-batches a step', lower_bound=1)
_VOCAB = flags.DEFINE_integer('vocab', 163_840, 'ids', lower_bound=2)
_TOPOLOGY = flags.DEFINE_string('topology', '', 'chips to compile for, as v5p:4x4x4')
flags.mark_flag_as_required('config')


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  cfg = settings.resolve(_CONFIG.value)
  devices = math.prod(cfg.mesh.sizes.values())
  # JAX makes its devices when it is imported: their number comes first.
  flag = f'--xla_force_host_platform_device_count={devices}'
  os.environ['XLA_FLAGS'] = f'{os.environ.get("XLA_FLAGS", "")} {flag}'.strip()
  os.environ['JAX_PLATFORMS'] = 'cpu'
  programs = importlib.import_module('experiments.bench.aot_programs')
  # libtpu asks a cloud's metadata server who it is, unless told not to.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  found = programs.chips(_TOPOLOGY.value) if _TOPOLOGY.value else None
  result = programs.compiled(cfg, found, _VOCAB.value, _MICRO.value)
  print(json.dumps(result), flush=True)


if __name__ == '__main__':
  app.run(main)
