"""This library's side of `learner_step_recorded`: `python -m .. folder`.

FLOPs are counted of what is there: every token of the packed rows once (a prompt that
several share is one), every pair of query and key that attention sees, and the kept
sets of tokens with signal; 6 per parameter and token, recomputation and optimiser not
counted (DESIGN.md 12.15).
"""

import functools
import json
import pathlib
import resource
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import learner_step_recorded as recorded
from swe17 import config, settings
from swe17.learner import batching, packing, update
from swe17.learner import state as st
from swe17.model import load

SQUARE = 2048


def flops(cfg: config.Model, batch: st.Batch) -> dict[str, float]:
  """What a step needs, by part."""
  D, H = cfg.width, cfg.head_dim
  layer = D * H * (2 * cfg.heads + 2 * cfg.kv_heads) + 3 * D * cfg.ffn
  segment_MBT = np.asarray(batch.segment_MBT)
  size = (np.asarray(batch.kept_ids_MBTK) >= 0).sum(-1)[np.asarray(batch.mask_MBT)]
  pairs = sum(map(_pairs, *(_rows(x) for x in (batch.segment_MBT, batch.prefix_MBT))))
  return {
    'trunk': 6.0 * int((segment_MBT > 0).sum()) * cfg.layers * layer,
    'attention': 3 * 2 * 2.0 * pairs * cfg.heads * H * cfg.layers,
    'head': 6.0 * float(size[size > 1].sum()) * D,
  }


def _rows(x: Any) -> np.ndarray:
  return np.asarray(x).reshape(-1, x.shape[-1])


def _pairs(segment_T: np.ndarray, prefix_T: np.ndarray) -> int:
  """Pairs of query and key of a row."""
  found = 0
  for j in range(1, int(segment_T.max(initial=0)) + 1):
    own = segment_T == j
    n, of = int(own.sum()), int(prefix_T[own].max(initial=0))
    found += n * (n + 1) // 2 + n * (int((segment_T == of).sum()) if of else 0)
  return found


def fill(cfg: config.Config, folder: pathlib.Path) -> st.Batch:
  """The batch of the folder's groups, no larger than it must be."""
  made = batching.assemble(
    recorded.unpack((folder / 'groups.bin').read_bytes()), cfg.loss
  )
  segments = [item.segment for item in made.items]
  rows, _ = packing.layout(segments, cfg.batch, cfg.model.routes)
  # Statistics by episode want rows for them.
  episodes = len({item.episode for item in made.items})
  rows = max(len(rows), -(-episodes // st.EPISODES_A_ROW))
  options = json.loads((folder / 'options.json').read_text())
  return batching.fill(
    made.items,
    micro=-(-rows // cfg.batch.micro_rows),
    cfg=cfg.batch,
    K=cfg.sampler.top_k,
    denominator=options['denominator'],
    routes=cfg.model.routes,
  )


def main(folder: pathlib.Path) -> dict[str, Any]:
  """Times the step; what it came to."""
  cfg = settings.from_json(json.loads((folder / 'config.json').read_text()))
  options = json.loads((folder / 'options.json').read_text())
  batch = fill(cfg, folder)
  micro, (_, B, T) = int(batch.micro), batch.token_MBT.shape
  used = int((np.asarray(batch.segment_MBT) > 0).sum())
  need = flops(cfg.model, batch)
  print(f'ours: {micro} x {B} x {T} places, {used} tokens in them')
  print('ours needs', {k: f'{v / 1e9:.0f} GFLOP' for k, v in need.items()}, flush=True)
  params = load.load(cfg.model.source, cfg.model)
  tx = optax.adamw(
    options['lr'],
    b1=options['b1'],
    b2=options['b2'],
    eps=options['eps'],
    weight_decay=0.0,
  )
  step = jax.jit(
    functools.partial(update.update, model=cfg.model, loss=cfg.loss, tx=tx),
    donate_argnums=0,
  )
  state, batch = st.init(params, tx), jax.tree.map(jnp.asarray, batch)
  del params
  square = jax.random.normal(jax.random.key(1), (SQUARE, SQUARE))
  product = jax.jit(jnp.matmul)
  first, seconds, cpu, products = {}, [], [], []

  def timed_product() -> float:
    began = time.perf_counter()
    jax.block_until_ready(product(square, square))
    return time.perf_counter() - began

  timed_product()
  for i in range(options['repeats'] + 1):
    before = timed_product()
    began, used_before = time.perf_counter(), time.process_time()
    state, metrics = step(state, batch)
    metrics = jax.device_get(metrics)
    jax.block_until_ready(state)
    took = time.perf_counter() - began
    print(f'ours: step {i} {took:.2f} s, loss {metrics["loss"]:.6f}', flush=True)
    if i:
      seconds.append(took)
      cpu.append(time.process_time() - used_before)
      products += [before, timed_product()]
    else:
      first = metrics
  rate = 2 * SQUARE**3 / min(products)
  took = statistics.median(seconds)
  return {
    'seconds': took,
    'cpu_seconds': statistics.median(cpu),
    'gemm': rate,
    'peak_share': sum(need.values()) / took / rate,
    'peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    'loss': float(first['loss']),
    'grad_norm': float(first['grad_norm']),
    'trained_tokens': int(first['trained_tokens']),
    'tokens': used,
    'rows': [micro, B, T],
  }


if __name__ == '__main__':
  print(json.dumps(main(pathlib.Path(sys.argv[1]))), flush=True)
