"""The learner's state and step on meshes of 8 CPU devices, beside one device.

Run as `python -m tests.learner_mesh_main FOLDER CHECK ...`, in a process of its own.
Prints one JSON object: {name of a check: what was found}.
"""

import dataclasses
import json
import sys

import jax
import numpy as np

from experiments.bench import mesh as bench
from experiments.bench import mesh_main
from swe17 import config
from swe17.learner import checkpoint, mesh, optimizer
from swe17.model import params as p
from swe17.sync import apply
from tests import fixtures

VOCAB = 96
DENSE = dataclasses.replace(
  fixtures.MODEL, layers=1, width=32, ffn=48, head_dim=8, ngram=2, attention_chunk=8
)
MOE = dataclasses.replace(
  DENSE,
  ngram=1,
  tied=False,
  attention='mla',
  kv_heads=4,
  mla=config.config_model.Mla(q_rank=16, kv_rank=16, v_dim=8),
  moe=config.config_model.Moe(experts=4, ffn=16, router='sigmoid', capacity=4.0),
)
MESHES = {
  'rows and parameters': (DENSE, {'fsdp': 8}),
  'positions and heads': (DENSE, {'fsdp': 2, 'context': 2, 'tensor': 2}),
  'experts': (MOE, {'expert': 4}),
  'experts and the rest': (MOE, {'fsdp': 2, 'expert': 2, 'tensor': 2}),
}


def settings(model: config.Model, sizes: dict[str, int], **optim) -> config.Config:
  return config.Config(
    model=model,
    mesh=config.Mesh(**sizes),
    batch=config.Batch(row_length=32, micro_rows=8),
    agent=config.Agent(max_context=32, max_new_tokens=8),
    # One Newton-Schulz step compiles faster than five.
    optim=config.Optim(ns_steps=1, warmup=0, **optim),
  )


def result(cfg: config.Config) -> bench.Arrays:
  """Gradient and parameters of one step, under the bench's names."""
  params = jax.device_get(start(cfg))
  grad, new = mesh_main.step(cfg, VOCAB, params, mesh_main.batch(cfg, VOCAB, 3))
  return {f'grad:{k}': v for k, v in grad.items()} | {
    f'param:{k}': v for k, v in new.items()
  }


def start(cfg: config.Config) -> p.Params:
  return p.rounded(p.init(p.abstract(cfg.model, VOCAB), jax.random.key(0)))


def steps() -> dict[str, list[float]]:
  """By mesh: largest differences of gradient and of parameters."""
  alone, found = {}, {}
  for name, (model, sizes) in MESHES.items():
    key = model.attention
    if key not in alone:
      alone[key] = result(settings(model, {}))
    cfg = settings(model, sizes)
    begun = apply.name_tree(jax.device_get(start(cfg)))
    d = bench.compare(result(cfg), alone[key], begun)
    found[name] = [d.leaf, d.params]
  return found


def exact() -> bool:
  """Whether 8 replicas give the bits of one device, parameters after Muon included."""
  want = result(settings(DENSE, {}, exact_sum=True))
  got = result(settings(DENSE, {'replica': 8}, exact_sum=True))
  return all(got[k].tobytes() == want[k].tobytes() for k in want)


def born() -> dict[str, bool | float]:
  """Initial state on a mesh: values, and the largest share that a device holds.

  Compiled as one program, a scale is fused into what it scales: the last bit differs.
  """
  cfg = settings(MOE, {'fsdp': 2, 'expert': 2, 'tensor': 2})
  on = mesh.open(cfg, VOCAB)
  params = mesh.init(on, jax.random.key(0))
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  state = mesh.state(on, params, tx)
  shares = [
    x.addressable_shards[0].data.size / x.size
    for x in jax.tree.leaves((state.params, state.opt))
    if x.size > 1000
  ]
  want = p.init(p.abstract(cfg.model, VOCAB), jax.random.key(0))
  host = apply.to_host(want)
  return {
    'apart': max(
      float(np.abs(a - b).max() / np.abs(b).max())
      for a, b in zip(fixtures.leaves(params), fixtures.leaves(want), strict=True)
      if b.any()
    ),
    'largest share': max(shares),
    'published alike': fixtures.same_bits(apply.to_host(params), host),
  }


def restored(folder: str) -> list[bool]:
  """A checkpoint of one mesh restored to others: bits and places."""
  cfg = settings(DENSE, {'fsdp': 4, 'tensor': 2})
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  on = mesh.open(cfg, VOCAB)
  state = mesh.state(on, mesh.init(on, jax.random.key(1)), tx)
  saved = checkpoint.Checkpoints(folder, config.Checkpoint())
  saved.save(1, state, {'below': 3})
  found = []
  for sizes in ({'fsdp': 8}, {}):
    other = mesh.open(settings(DENSE, sizes), VOCAB)
    like = mesh.state(other, mesh.init(other, jax.random.key(2)), tx)
    got, _ = saved.restore(like)
    alike = [
      a.sharding.is_equivalent_to(b.sharding, a.ndim)
      for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(like), strict=True)
    ]
    found += [fixtures.same_bits(got, state), all(alike)]
  saved.close()
  return found


def main(folder: str, *checks: str) -> None:
  every = {
    'born': born,
    'restored': lambda: restored(folder),
    'exact': exact,
    'steps': steps,
  }
  print(json.dumps({name: every[name]() for name in checks}))


if __name__ == '__main__':
  main(*sys.argv[1:])
