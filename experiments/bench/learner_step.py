"""Speed of the learner's step on a 135M-parameter dense model, against this machine.

  python -m experiments.bench.learner_step [--rows=4 --row_length=1024 --micro=4]
  python -m experiments.bench.learner_step --config=experiments/configs/smollm2.py

The second form steps on recorded episodes of the config's own model, and torch does the
same beside it (experiments/bench/learner_step_recorded.py); `--run_dir` takes them from
a run. The model of the first has SmolLM2-135M's shape (30 layers, D 576, F 1536, 9
query and 3 key heads of 64, vocabulary 49,152) with random weights; the batch is
synthetic: half of the tokens sampled, kept sets of up to K = 64 ids, 47 % of them
singletons. Steps and a 2048-square float32 matrix product alternate in one process, so
that their ratio survives a busy machine. `peak_share` counts the FLOPs that a step
needs (6 per trunk parameter and token, attention, kept-set head; neither recomputation
nor the optimiser) over the rate of that product (DESIGN.md 12.15). Also prints where
the time goes: the forward pass, the gradient, the optimiser. The last line is JSON:

  {"tokens_per_s": .., "peak_share": .., ...}

and with --config

  {"trained_tokens_per_s": .., "vs_torch": .., "peak_share": .., "peak_gib": ..,
   "torch_peak_gib": .., ...}
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import statistics
import time

from absl import app, flags
import jax
import jax.numpy as jnp
from ml_collections import config_flags
import numpy as np

from experiments import program
from experiments.bench import learner_step_recorded as recorded
from swe17 import config, settings, types
from swe17.learner import batching, optimizer, update
from swe17.learner import state as st
from swe17.model import params as p
from swe17.model import source

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_ROWS = flags.DEFINE_integer(
  'rows', 4, 'rows of a micro-batch', lower_bound=1, flag_values=FLAGS
)
_LENGTH = flags.DEFINE_integer(
  'row_length', 1024, 'tokens of a row', lower_bound=8, flag_values=FLAGS
)
_MICRO = flags.DEFINE_integer(
  'micro', 4, 'micro-batches a step', lower_bound=1, flag_values=FLAGS
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 1, 'steps timed', lower_bound=1, flag_values=FLAGS
)
_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'of the recorded batch and its model', flag_values=FLAGS
)
_RUN = flags.DEFINE_string(
  'run_dir', '', 'run whose stored groups are stepped on', flag_values=FLAGS
)
_RECORD = flags.DEFINE_bool(
  'record', False, "make those of --run_dir the recorded file's", flag_values=FLAGS
)
_TORCH_TOKENS = flags.DEFINE_integer(
  'torch_tokens', 2048, "tokens of torch's micro-batch", 1, flag_values=FLAGS
)
_TORCH_HEAD = flags.DEFINE_enum(
  'torch_head', 'all', ('all', 'sampled'), 'where torch has logits', flag_values=FLAGS
)
_REMAT = flags.DEFINE_bool(
  'remat', False, 'recompute layers in the backward pass', flag_values=FLAGS
)

VOCABULARY, K, SINGLETONS, SAMPLED, SQUARE = 49_152, 64, 0.47, 0.5, 2048


def model(remat: bool) -> config.Model:
  """The shape of SmolLM2-135M."""
  return config.Model(
    layers=30,
    width=576,
    ffn=1536,
    heads=9,
    kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    ngram=1,
    remat=remat,
    unroll=False,
  )


def segment(rng: np.random.Generator, T: int) -> types.Segment:
  """A synthetic segment of T tokens, half of them sampled, with kept sets."""
  token_T = rng.integers(0, VOCABULARY, T, np.int32)
  mask_T = rng.random(T) < SAMPLED
  wide_T = np.minimum(1 + rng.geometric(1 / 13, T), K)
  size_T = np.where(rng.random(T) < SINGLETONS, 1, wide_T) * mask_T
  sets = [
    np.unique(np.append(rng.integers(0, VOCABULARY, n - 1), token))
    for n, token in zip(size_T, token_T, strict=True)
    if n
  ]
  size_T[mask_T] = [len(ids) for ids in sets]
  zero_T = np.zeros(T, np.float32)
  return types.Segment(
    token_T=token_T,
    mask_T=mask_T,
    mu_logp_T=np.where(size_T > 1, -1.0, 0.0).astype(np.float32),
    entropy_T=zero_T,
    temperature_T=zero_T + 1.0,
    version_T=np.zeros(T, np.int32),
    turn_T=np.zeros(T, np.int32),
    kept=types.KeptSets(
      np.concatenate([[0], np.cumsum(size_T)]).astype(np.int32),
      np.concatenate(sets).astype(np.int32),
    ),
  )


def batch(M: int, B: int, T: int) -> st.Batch:
  """Packed rows of two segments each, seeded."""
  rng = np.random.default_rng(0)
  items = [
    batching.Item(segment(rng, T // 2 + 1), float(rng.normal()))
    for _ in range(2 * M * B)
  ]
  return batching.fill(
    items,
    micro=M,
    cfg=config.Batch(row_length=2 * (T // 2), micro_rows=B),
    K=K,
    denominator=float(M * B * T),
  )


def flops(cfg: config.Model, M: int, B: int, T: int, kept: float) -> dict[str, float]:
  """FLOPs that one step needs. `kept` is the mean set size of tokens with signal."""
  tokens = M * B * T
  D, H = cfg.width, cfg.head_dim
  layer = D * H * (2 * cfg.heads + 2 * cfg.kv_heads) + 3 * D * cfg.ffn
  # Scores and values, causal within two segments a row: half of (T / 2)^2 each.
  pairs = M * B * 2 * (T // 2) ** 2 / 2
  signal = tokens * SAMPLED * (1 - SINGLETONS)
  return {
    'trunk': 6.0 * tokens * cfg.layers * layer,
    'attention': 3 * 2 * 2.0 * pairs * cfg.heads * H * cfg.layers,
    'head': 6.0 * signal * kept * D,
  }


def seconds(fn: Callable[[], object]) -> float:
  """Wall time of one call, to the end of its computation."""
  began = time.perf_counter()
  jax.block_until_ready(fn())
  return time.perf_counter() - began


def beside_torch() -> dict[str, object]:
  """The figures of `--config`'s recorded batch."""
  cfg = settings.resolve(_CONFIG.value)
  cfg = dataclasses.replace(cfg, model=source.settle(cfg.model))
  options = recorded.Options(_REPEATS.value, _TORCH_TOKENS.value, _TORCH_HEAD.value)
  groups = recorded.recorded(_RUN.value, cfg)
  if _RECORD.value:
    recorded.RECORDED.parent.mkdir(exist_ok=True)
    recorded.RECORDED.write_bytes(recorded.pack(groups))
  return recorded.compare(cfg, groups, options)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  if _CONFIG.value is not None:
    print(json.dumps(beside_torch()), flush=True)
    return
  M, B, T = _MICRO.value, _ROWS.value, _LENGTH.value
  cfg, loss = model(_REMAT.value), config.Loss()
  tx = optimizer.make(config.Optim(), optimizer.schedule(config.Optim()))
  params = p.init(p.abstract(cfg, VOCABULARY), jax.random.key(0))
  print(f'{p.count(params):,} parameters, {M} x {B} x {T} tokens a step', flush=True)
  data = jax.tree.map(jnp.asarray, batch(M, B, T))
  size = np.asarray((data.kept_ids_MBTK >= 0).sum(-1))
  need = flops(cfg, M, B, T, float(size[size > 1].mean()))

  loss_fn = functools.partial(update.policy_loss_fn, model=cfg, cfg=loss)
  first = jax.tree.map(lambda x: x[0] if x.ndim else x, data)
  forward = jax.jit(lambda w, b: loss_fn(w, b)[0])
  gradient = jax.jit(lambda w, b: jax.grad(loss_fn, has_aux=True)(w, b)[0])
  step = jax.jit(
    functools.partial(update.update, model=cfg, loss=loss, tx=tx), donate_argnums=0
  )
  square = jax.random.normal(jax.random.key(1), (SQUARE, SQUARE))
  product = jax.jit(jnp.matmul)
  state = st.init(params, tx)
  memory = step.lower(state, data).compile().memory_analysis()

  def one_step() -> object:
    nonlocal state
    state, metrics = step(state, data)
    return metrics

  rows: dict[str, list[float]] = {k: [] for k in ('product', 'forward', 'grad', 'step')}
  for i in range(_REPEATS.value + 1):
    for name, fn in (
      ('product', lambda: product(square, square)),
      ('forward', lambda: forward(state.params, first)),
      ('grad', lambda: gradient(state.params, first)),
      ('step', one_step),
      ('product', lambda: product(square, square)),
    ):
      took = seconds(fn)
      if i:  # the first round compiles
        rows[name].append(took)
  best = {name: min(values) for name, values in rows.items()}
  rate = 2 * SQUARE**3 / best['product']
  per_step = statistics.median(rows['step'])
  print(f'product {rate / 1e9:.1f} GFLOP/s; step {per_step:.2f} s, of which')
  print(f'  gradient {M} x {best["grad"]:.2f} s (forward {best["forward"]:.2f} s)')
  print(f'  optimiser and the rest {per_step - M * best["grad"]:.2f} s')
  for name, count in need.items():
    print(f'  needs for {name}: {count / 1e9:.1f} GFLOP')
  total = sum(need.values())
  result = {
    'tokens_per_s': round(M * B * T / per_step, 1),
    'peak_share': round(total / per_step / rate, 3),
    'gradient_peak_share': round(total / M / best['grad'] / rate, 3),
    'gemm_gflops': round(rate / 1e9, 1),
    'temp_gib': round(memory.temp_size_in_bytes / 2**30, 2) if memory else None,
  }
  print(json.dumps(result), flush=True)


if __name__ == '__main__':
  program.run(main, FLAGS)
