"""Weights for the delta bench: drawn, read from a run's store, or learned here."""

from collections.abc import Iterator, Mapping
import functools

import jax
import numpy as np

from swe17 import config, types
from swe17.agent import tokenizer
from swe17.learner import batching, optimizer, update
from swe17.learner import state as st
from swe17.model import params as p
from swe17.store import kv
from swe17.sync import apply, manifest, pack

STD = 0.02
Tensors = Mapping[str, np.ndarray]


def synthetic(
  params: int, size: int, seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Blocks of `size` float32 masters and directions in [-1, 1), `params` in all."""
  for i, start in enumerate(range(0, params, size)):
    rng = np.random.default_rng([seed, i])
    count = min(size, params - start)
    master = rng.standard_normal(count, np.float32) * np.float32(STD)
    yield master, rng.random(count, np.float32) * 2 - 1


def published(store: kv.Store) -> Iterator[Tensors]:
  """The tensors of a store's versions, oldest first, from the first full one on."""
  held: Tensors | None = None
  for version in manifest.versions(store):
    made = manifest.read(store, version)
    if made is None or (held is None and made.base is not None):
      continue
    found = [store.read(entry.key) for entry in made.objects]
    objects = [memoryview(data) for data in found if data is not None]
    if len(objects) != len(found):
      raise ValueError(f'version {version}: some of its objects are gone')

    def frame_of(block: manifest.Block, objects=objects) -> memoryview:
      return objects[block.object][block.start : block.stop]

    held = pack.unpack(made, frame_of, held if made.base is not None else None)
    yield held


def learned(cfg: config.Config, steps: int) -> Iterator[Tensors]:
  """Published tensors before and after each of `steps` policy-gradient steps."""
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  model = p.abstract(cfg.model, tokenizer.VOCABULARY)
  state = st.init(p.init(model, jax.random.key(cfg.seed)), tx)
  step = jax.jit(
    functools.partial(update.update, model=cfg.model, loss=cfg.loss, tx=tx),
    donate_argnums=0,
  )
  yield apply.to_host(state.params)
  rng = np.random.default_rng(cfg.seed)
  for _ in range(steps):
    state, _ = step(state, _random_batch(rng, cfg.batch))
    yield apply.to_host(state.params)


def _random_batch(rng: np.random.Generator, cfg: config.Batch) -> st.Batch:
  """One micro-batch of random tokens, all sampled, with random advantages."""
  T = cfg.row_length
  items = []
  for _ in range(cfg.micro_rows):
    token_T = rng.integers(0, tokenizer.VOCABULARY, T + 1, np.int32)
    zero_T, one_T = np.zeros(T + 1, np.float32), np.ones(T + 1, np.float32)
    segment = types.Segment(
      token_T=token_T,
      mask_T=np.arange(T + 1) > 0,
      mu_logp_T=zero_T - np.log(np.float32(tokenizer.VOCABULARY)),
      entropy_T=zero_T,
      temperature_T=one_T,
      version_T=np.zeros(T + 1, np.int32),
      turn_T=np.zeros(T + 1, np.int32),
      kept=types.KeptSets(np.zeros(T + 2, np.int32), np.zeros(0, np.int32)),
    )
    items.append(batching.Item(segment, float(rng.normal())))
  return batching.fill(
    items, micro=1, cfg=cfg, K=1, denominator=float(cfg.micro_rows * T)
  )
