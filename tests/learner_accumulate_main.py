"""A program that takes two exact steps on 1, 2, 4, ... replicas and prints the hashes.

Run as `python -m tests.learner_accumulate_main 1 2 4 8`, in a process of its own: the
number of CPU devices (XLA_FLAGS) is fixed when JAX starts.
"""

import dataclasses
import functools
import hashlib
import json
import sys

import jax
import numpy as np

from swe17 import config
from swe17.learner import batching, optimizer, update
from swe17.learner import state as st
from tests import fixtures

MODEL = dataclasses.replace(
  fixtures.MODEL, layers=1, width=32, ffn=48, heads=2, kv_heads=1, ngram=1
)
# Seven micro-batches of one row: the eighth leaf of the tree is missing.
BATCH = config.Batch(groups=4, row_length=24, micro_rows=1)
TX = optimizer.make(fixtures.OPTIM, optimizer.schedule(fixtures.OPTIM))
LOSS_FN = functools.partial(update.policy_loss_fn, model=MODEL, cfg=config.Loss())


def batch(micro: int = 7, seed: int = 0) -> st.Batch:
  """Random segments, one a row."""
  rng = np.random.default_rng(seed)
  items = [
    batching.Item(fixtures.segment(rng, (4 + i, 16 - i)), (1.0, -0.5)[i % 2])
    for i in range(7)
  ]
  return batching.fill(items, micro=micro, cfg=BATCH, K=4, denominator=50.0)


def digest(tree) -> str:
  """sha256 over the bytes of all leaves."""
  out = hashlib.sha256()
  for leaf in fixtures.leaves(tree):
    out.update(leaf.tobytes())
  return out.hexdigest()


@jax.jit
def apply(state: st.State, grad, denominator) -> st.State:
  """The optimiser's step, compiled once for all numbers of replicas."""
  mean = jax.tree.map(lambda g: g / denominator, grad)
  return update.apply_gradient(state, mean, TX)[0]


def run(replicas: int) -> dict[str, str]:
  """Hashes of gradient and parameters; 0 replicas is without a mesh."""
  mesh = None
  if replicas:
    axis = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:replicas]
    mesh = jax.make_mesh((replicas,), ('replica',), axis, devices=devices)
  fn = jax.jit(functools.partial(update.accumulate, LOSS_FN, exact=True, mesh=mesh))
  state, totals = st.init(fixtures.params(cfg=MODEL), TX), []
  for seed in range(2):
    of_step = batch(seed=seed)
    totals.append(jax.device_get(fn(jax.device_get(state.params), of_step)))
    state = apply(state, totals[-1][2], of_step.denominator)
  loss, pieces, grad = zip(*totals, strict=True)
  return {
    'loss': digest(loss),
    'pieces': digest(pieces),
    'gradient': digest(grad),
    'params': digest(state.params),
  }


def main(argv: list[str]) -> None:
  """One JSON object: number of replicas -> hashes."""
  print(json.dumps({r: run(int(r)) for r in argv}))


if __name__ == '__main__':
  main(sys.argv[1:])
