"""What the sampler's engine computes and sends, counted: no clock, a small model.

  python -m experiments.bench.sampler_work

Prefill of a group of 16 with a prompt of 1,024 tokens against that of one; what turn 5
of a session prefills; bytes a token on the way up, packed and compressed as they cross
the wire, with the routes of 61 layers x 8 of 384 experts (uniform: the worst case). The
last line is JSON.
"""

from collections.abc import Sequence
import dataclasses
import json

from absl import flags
import jax
import numpy as np

from experiments import program
from swe17 import config, types, wire
from swe17.model import params as p
from swe17.sampler import engine

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_GROUP = flags.DEFINE_integer('group', 16, 'members', flag_values=FLAGS)
_PROMPT = flags.DEFINE_integer('prompt', 1024, 'tokens of a prompt', flag_values=FLAGS)

MODEL = config.Model(layers=2, width=64, ffn=128, heads=4, kv_heads=2, head_dim=16)
VOCABULARY, NEW, GLUE = 512, 64, 20


def serve(length: int) -> engine.Engine:
  params = p.rounded(p.init(p.abstract(MODEL, VOCABULARY), jax.random.key(0)))
  cfg = config.Sampler(
    slots=_GROUP.value, prefill_rows=8, prefill_chunk=32, decode_steps=8, top_k=64
  )
  made = engine.Engine(
    params, 0, model=MODEL, cfg=cfg, length=length, swap=lambda: None
  )
  made.start()
  return made


def ask(session: str, token_T: np.ndarray, member: int) -> types.GenerateRequest:
  sampling = types.Sampling(top_k=64, top_p=0.95)
  return types.GenerateRequest(session, token_T, NEW, (), sampling, (0, member))


def prefilled(made: engine.Engine, asked: Sequence[types.GenerateRequest]) -> int:
  """Prompt tokens that serving these computes."""
  before = made.counters()['prompt_tokens_prefilled']
  for future in [made.submit(request) for request in asked]:
    future.result()
  return int(made.counters()['prompt_tokens_prefilled'] - before)


def flops(tokens: int) -> float:
  """Of prefilling a context from its start: products with weights, and attention."""
  D, H, Q, C = MODEL.width, MODEL.head_dim, MODEL.heads, MODEL.kv_heads
  weights = D * H * (2 * Q + 2 * C) + 3 * D * MODEL.ffn
  attention = 2 * Q * H * tokens / 2  # scores and values, half of the square
  return 2.0 * tokens * MODEL.layers * (weights + attention)


def fifth_turn(made: engine.Engine, prompt_T: np.ndarray) -> tuple[int, int]:
  """(tokens that turn 5 prefills, tokens that are new to it)."""
  token_T, rng, found = prompt_T, np.random.default_rng(1), 0
  for turn in range(5):
    before = made.counters()['prompt_tokens_prefilled']
    result = made.submit(ask('talk', token_T, turn)).result()
    found = int(made.counters()['prompt_tokens_prefilled'] - before)
    glue = rng.integers(0, VOCABULARY, GLUE)
    token_T = np.concatenate([token_T, result.token_T, glue]).astype(np.int32)
  # The last drawn token was never fed; the last of the context is fed by the draw.
  return found, GLUE


def bytes_a_token(result: types.GenerateResult) -> dict[str, float]:
  """Of an answer on the wire, with and without routes."""
  n = result.token_T.size
  rng = np.random.default_rng(0)
  score = rng.random((n, 61, 384), np.float32)
  routes = np.argpartition(score, 8)[..., :8].astype(np.uint16)
  routed = dataclasses.replace(result, routes_RNK=routes)
  bare, full = (len(wire.result_to_bytes(r)) / n for r in (result, routed))
  plain = 4 + 4 + 4 + 4 + 4 * result.kept.ids.size / n
  return {
    'sampled': round(bare, 1),
    'routes': round(full - bare, 1),
    'unpacked': round(plain, 1),
    'unpacked_routes': 61 * 8 * 2.0,
    'kept_ids': round(result.kept.ids.size / n, 1),
  }


def main(argv: Sequence[str]) -> None:
  del argv
  rng = np.random.default_rng(0)
  one, many, talk = rng.integers(0, VOCABULARY, (3, _PROMPT.value)).astype(np.int32)
  made = serve(_PROMPT.value + 6 * (NEW + GLUE))
  single = prefilled(made, [ask('one', one, 0)])
  group = prefilled(made, [ask(str(m), many, m) for m in range(_GROUP.value)])
  turn, new = fifth_turn(made, talk)
  answers = [made.submit(ask(str(m), one, m)) for m in range(8)]
  whole = types.join([future.result() for future in answers])
  counted = made.counters()
  made.close()
  result = {
    'prefill_of_one': single,
    'prefill_of_group': group,
    'flops_ratio': round(flops(group) / flops(single), 3),
    'turn_5_prefilled': turn,
    'turn_5_new': new,
    'bytes_a_token': bytes_a_token(whole),
    'compilations': counted['compilations'],
  }
  print(json.dumps(result))


if __name__ == '__main__':
  program.run(main, FLAGS)
