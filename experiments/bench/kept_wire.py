"""Bytes of kept sets on the wire against the information bound, and how fast.

  python -m experiments.bench.kept_wire

Sizes have 47 % singletons, median 2 and mean near 8 in every row. Ids are

  uniform   any of V = 151,936, all alike: the bound is H(size) + log2 C(V - 1, s - 1)
  zipf      drawn without replacement as 1 / (id + 2.7)^1.1, V = 151,936: a model of a
            vocabulary in order of frequency
  bpe       the s likeliest continuations by a bigram model of Python's own library, in
            a byte-pair vocabulary of 32,768 trained on it: real ids, a small model

`bound` is that of uniform ids of the same sizes, for the other rows too: what order in
the vocabulary saves is below it. Speeds are tokens per second of CPU time, the best of
`--repeat`. The last line is JSON, a row each:

  {"uniform": {"bytes": .., "bound": .., "ratio": .., "encode_tokens_per_s": .., ...}}
"""

from collections.abc import Sequence
import itertools
import json
import math
import pathlib
import sysconfig
import time

from absl import flags
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from experiments import program
from swe17 import kept as kept_sets
from swe17 import types, wire_kept

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_TOKENS = flags.DEFINE_integer(
  'tokens', 1_000_000, 'tokens with a set', flag_values=FLAGS
)
_REPEAT = flags.DEFINE_integer(
  'repeat', 3, 'timings, of which the best counts', flag_values=FLAGS
)
_SEED = flags.DEFINE_integer('seed', 0, 'of sizes and ids', flag_values=FLAGS)
_CORPUS = flags.DEFINE_integer(
  'corpus_mb', 4, 'source text of the bpe row; 0: no row', flag_values=FLAGS
)

_V, _BPE_V, _TOP_K = 151_936, 32_768, 512


def sizes(n: int, rng: np.random.Generator) -> np.ndarray:
  """Set sizes with 47 % singletons, median 2 and mean near 8. int64 [n]."""
  wide_T = 1 + np.ceil(np.exp(rng.normal(1.42, 1.5, n)))
  return np.where(rng.random(n) < 0.47, 1, np.minimum(wide_T, _TOP_K)).astype(np.int64)


def bound(size_T: np.ndarray, vocab: int) -> float:
  """Bytes a token that sets of uniform ids need: sizes, and the ids not drawn."""
  bits = 0.0
  for s, count in zip(*np.unique(size_T, return_counts=True), strict=True):
    choose = math.lgamma(vocab) - math.lgamma(s) - math.lgamma(vocab - s + 1)
    bits += count * (choose / math.log(2) - math.log2(count / size_T.size))
  return bits / 8 / size_T.size


def drawn(size_T: np.ndarray, power: float, rng: np.random.Generator) -> np.ndarray:
  """Ascending ids of sets of these sizes, without replacement, as id ** -power."""
  cdf = np.cumsum((np.arange(_V) + 2.7) ** -power)
  owner, key = np.repeat(np.arange(size_T.size), size_T), np.zeros(0, np.int64)
  while owner.size:
    ids = np.searchsorted(cdf, rng.random(owner.size) * cdf[-1])
    key = np.unique(np.append(key, owner * _V + np.minimum(ids, _V - 1)))
    missing_T = size_T - np.bincount(key // _V, minlength=size_T.size)
    owner = np.repeat(np.arange(size_T.size), missing_T)
  return (key % _V).astype(np.int32)


def corpus(megabytes: int) -> list[str]:
  """Sources of Python's own library, in order of their names, up to a size."""
  texts, left = [], megabytes << 20
  for path in sorted(pathlib.Path(sysconfig.get_paths()['stdlib']).glob('*.py')):
    texts.append(path.read_text(encoding='utf-8', errors='replace')[: max(left, 0)])
    left -= len(texts[-1])
  return texts


def continuations(size_T: np.ndarray, texts: list[str]) -> np.ndarray:
  """Ascending ids of the likeliest continuations at places of the texts, in order."""
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=_BPE_V, initial_alphabet=alphabet, show_progress=False
  )
  bpe.train_from_iterator(texts, trainer)
  token = np.concatenate([np.array(bpe.encode(t).ids, np.int64) for t in texts])
  unigram_V = np.bincount(token, minlength=_BPE_V) / token.size
  pair, count = np.unique(token[:-1] * _BPE_V + token[1:], return_counts=True)
  start_V1 = np.searchsorted(pair, np.arange(_BPE_V + 1) * _BPE_V)
  ranked: dict[int, np.ndarray] = {}
  sets = []
  for size, before in zip(size_T, itertools.cycle(token.tolist()), strict=False):
    if before not in ranked:
      seen = slice(start_V1[before], start_V1[before + 1])
      weight_V = unigram_V.copy()  # one count's worth, for what was never seen
      weight_V[pair[seen] % _BPE_V] += count[seen]
      top = np.argpartition(-weight_V, _TOP_K)[:_TOP_K]
      ranked[before] = top[np.argsort(-weight_V[top], kind='stable')]
    sets.append(np.sort(ranked[before][:size]))
  return np.concatenate(sets).astype(np.int32)


def measure(
  size_T: np.ndarray, ids: np.ndarray, vocab: int, rng: np.random.Generator
) -> dict[str, float]:
  """Bytes a token, the bound, and speeds; checks that the sets come back."""
  kept = types.KeptSets(kept_sets.offsets(size_T), ids)
  token_T = ids[kept.offset_T1[:-1] + rng.integers(0, size_T)]
  encode = decode = math.inf
  data, back = b'', kept
  for _ in range(_REPEAT.value):
    began = time.process_time()
    data = wire_kept.to_bytes(kept, token_T)
    between = time.process_time()
    back = wire_kept.from_bytes(data, token_T)
    decode = min(decode, time.process_time() - between)
    encode = min(encode, between - began)
  if not np.array_equal(back.ids, ids) or not np.array_equal(back.size_T, size_T):
    raise RuntimeError('the sets that came back are not those that went in')
  n, least = size_T.size, bound(size_T, vocab)
  return {
    'bytes': len(data) / n,
    'bound': least,
    'ratio': len(data) / n / least,
    'int32_bytes': 4 * ids.size / n,
    'mean_size': ids.size / n,
    'encode_tokens_per_s': n / encode,
    'decode_tokens_per_s': n / decode,
  }


def main(argv: Sequence[str]) -> None:
  del argv
  rng = np.random.default_rng(_SEED.value)
  size_T = sizes(_TOKENS.value, rng)
  print(
    f'{size_T.size} sets: mean {size_T.mean():.2f}, median {np.median(size_T):.0f}, '
    f'{(size_T == 1).mean():.1%} singletons, p99 {np.quantile(size_T, 0.99):.0f}'
  )
  rows = {
    'uniform': measure(size_T, drawn(size_T, 0.0, rng), _V, rng),
    'zipf': measure(size_T, drawn(size_T, 1.1, rng), _V, rng),
  }
  if _CORPUS.value:
    ids = continuations(size_T, corpus(_CORPUS.value))
    rows['bpe'] = measure(size_T, ids, _BPE_V, rng)
  for name, row in rows.items():
    print(
      f'{name:8} {row["bytes"]:6.2f} bytes a token ({row["int32_bytes"]:.1f} as int32, '
      f'bound of uniform ids {row["bound"]:.2f}); encodes '
      f'{row["encode_tokens_per_s"] / 1e6:.1f}, decodes '
      f'{row["decode_tokens_per_s"] / 1e6:.1f} million tokens/s'
    )
  text = {name: {k: round(v, 4) for k, v in row.items()} for name, row in rows.items()}
  print(json.dumps(text), flush=True)


if __name__ == '__main__':
  program.run(main, FLAGS)
