"""One of several processes that are one learner, on loopback.

Run as `python -m tests.learner_distributed_main FOLDER PROCESSES INDEX ADDRESS`, each
with 4 / PROCESSES CPU devices (XLA_FLAGS); with 1 process the mesh is the same, without
`jax.distributed`. Prints one JSON object: {name of a check: what was found}.
"""

import hashlib
import json
import os
import sys
import threading

import jax
import numpy as np

from experiments.bench import mesh_main
from swe17 import config
from swe17.learner import checkpoint, gather, mesh, optimizer, reference, team
from swe17.learner import state as st
from tests import fixtures
from tests import learner_mesh_main as tiny


def digest(arrays: dict[str, np.ndarray]) -> str:
  """sha256 over names and bytes."""
  out = hashlib.sha256()
  for name in sorted(arrays):
    out.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
  return out.hexdigest()


def total(on: mesh.Devices) -> float:
  """The sum of the devices' numbers, by psum over all of them."""
  assert on.mesh is not None
  split = jax.sharding.NamedSharding(on.mesh, jax.P('fsdp'))
  number = jax.make_array_from_callback(
    (4,), split, lambda index: np.arange(4, dtype=np.float32)[index]
  )
  added = jax.shard_map(
    lambda x: jax.lax.psum(x, 'fsdp'),
    mesh=on.mesh,
    in_specs=jax.P('fsdp'),
    out_specs=jax.P(),
  )
  return float(jax.jit(added)(number)[0])


def numbered(cfg: config.Config) -> st.Batch:
  """A batch whose tokens are the numbers of their rows."""
  batch = mesh_main.batch(cfg, tiny.VOCAB, 3)
  rows_B1 = np.arange(batch.token_MBT.shape[1], dtype=np.int32)[:, None]
  return batch.replace(token_MBT=np.zeros_like(batch.token_MBT) + rows_B1)


def main(folder: str, processes: str, index: str, address: str) -> None:
  sizes = {'fsdp': 4, 'processes': int(processes)}
  cfg = tiny.settings(tiny.DENSE, sizes)
  ours = team.join(cfg.mesh, int(index), address, threading.Event())
  on = mesh.open(cfg, tiny.VOCAB)
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  params = mesh.init(on, jax.random.key(0))
  state = mesh.state(on, params, tx)
  published = gather.to_host(params, ours)
  part = mesh.part(on, numbered(cfg), int(index))
  saved = checkpoint.Checkpoints(folder, config.Checkpoint())
  saved.save(1, state, {'below': 3})
  got, extra = saved.restore(state)
  saved.close()
  held = reference.keep(folder, params)
  same = reference.load(folder, params)
  kept = ([x.addressable_data(0) for x in jax.tree.leaves(s)] for s in (held, same))
  back = ([x.addressable_data(0) for x in jax.tree.leaves(s)] for s in (got, state))
  host = jax.device_get(tiny.start(tiny.settings(tiny.DENSE, {})))
  grad, new = mesh_main.step(cfg, tiny.VOCAB, host, mesh_main.batch(cfg, tiny.VOCAB, 3))
  if index == '0':
    np.savez(os.path.join(folder, f'gradient{processes}.npz'), **grad)
  found = {
    'devices': [len(jax.local_devices()), jax.device_count()],
    'sum': total(on),
    'rows': sorted({int(x) for x in part.token_MBT.ravel()}),
    'published': digest(published) if published else '',
    'restored': extra == {'below': 3} and fixtures.same_bits(*back),
    'reference': fixtures.same_bits(*kept),
    'after': digest(new),
  }
  print(json.dumps(found), flush=True)
  ours.end(0)


if __name__ == '__main__':
  main(*sys.argv[1:])
