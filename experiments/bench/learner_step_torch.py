"""torch's side of `learner_step_recorded`: `python -m .. folder`.

`transformers`' model from the same file, its weights rounded to bfloat16 as ours are,
computing in float32. Rows of similar length make a micro-batch, padded to its longest;
gradients are summed over them. The kept set is replayed by a softmax over the whole
vocabulary in which all other ids are masked. No gradient checkpointing. Reads what the
other side wrote; imports nothing of this library.
"""

import json
import pathlib
import resource
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import transformers

SQUARE = 2048


def read(folder: pathlib.Path) -> list[dict[str, torch.Tensor]]:
  """Rows by length."""
  rows: dict[str, dict[str, torch.Tensor]] = {}
  with np.load(folder / 'rows.npz') as arrays:
    for name in arrays.files:
      i, field = name.split('/')
      rows.setdefault(i, {})[field] = torch.from_numpy(arrays[name])
  return sorted(rows.values(), key=lambda row: len(row['token']))


def cut(rows: list[dict[str, torch.Tensor]], tokens: int) -> list[list[dict]]:
  """Micro-batches of at most `tokens` places, padding included, or one row."""
  found: list[list[dict]] = []
  for row in rows:  # the longest so far comes last
    if found and (len(found[-1]) + 1) * len(row['token']) <= tokens:
      found[-1].append(row)
    else:
      found.append([row])
  return found


def padded(rows: list[dict], name: str, fill: float) -> torch.Tensor:
  parts = [row[name] for row in rows]
  return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=fill)


def loss_of(model: Any, rows: list[dict], options: dict[str, Any]) -> torch.Tensor:
  """The summed loss of a micro-batch, not yet divided."""
  token = padded(rows, 'token', 0)
  lengths = torch.tensor([len(row['token']) for row in rows])
  real = torch.arange(token.shape[1])[None] < lengths[:, None]
  mask = padded(rows, 'mask', False)
  inputs = {'input_ids': token, 'attention_mask': real.long(), 'use_cache': False}
  if options['torch_head'] == 'all':
    logits = model(**inputs).logits[:, :-1][mask]
  else:
    hidden = model.model(**inputs).last_hidden_state[:, :-1][mask]
    logits = model.lm_head(hidden)
  logits = logits / padded(rows, 'temperature', 1)[mask][:, None]
  kept = padded(rows, 'kept', -1)[mask]
  inside = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool)
  inside.scatter_(1, torch.where(kept < 0, logits.shape[1], kept), True)
  logits = logits.masked_fill(~inside[:, :-1], float('-inf'))
  logp = torch.log_softmax(logits, dim=-1)
  logp = logp.gather(1, token[:, 1:][mask][:, None])[:, 0]
  ratio = torch.exp(logp.detach() - padded(rows, 'mu_logp', 0)[mask])
  weight = torch.clamp(ratio, max=options['tis_cap'])
  return -(weight * padded(rows, 'adv', 0)[mask] * logp).sum()


def open_model(path: pathlib.Path) -> Any:
  """The model of a GGUF file or a folder, float32."""
  of_file = {'gguf_file': path.name} if path.is_file() else {}
  model = transformers.AutoModelForCausalLM.from_pretrained(
    str(path.parent if of_file else path), dtype=torch.float32, **of_file
  )
  with torch.no_grad():
    for weight in model.parameters():
      weight.copy_(weight.bfloat16().float())
  return model.train()


def main(folder: pathlib.Path) -> dict[str, Any]:
  """Times the step; what it came to."""
  options = json.loads((folder / 'options.json').read_text())
  torch.set_num_threads(options['threads'])
  model = open_model(pathlib.Path(options['source']))
  optimiser = torch.optim.AdamW(
    model.parameters(),
    lr=options['lr'],
    betas=(options['b1'], options['b2']),
    eps=options['eps'],
    weight_decay=0.0,
    fused=True,
  )
  micro = cut(read(folder), options['torch_tokens'])
  shapes = [(len(rows), max(len(row['token']) for row in rows)) for rows in micro]
  print(f'torch: micro-batches of (rows, length) {shapes}', flush=True)
  square = torch.randn(SQUARE, SQUARE)

  def timed_product() -> float:
    began = time.perf_counter()
    square @ square
    return time.perf_counter() - began

  timed_product()
  first, seconds, cpu, products = {}, [], [], []
  for i in range(options['repeats'] + 1):
    before = timed_product()
    began, used_before = time.perf_counter(), time.process_time()
    optimiser.zero_grad(set_to_none=True)
    total = 0.0
    for rows in micro:
      loss = loss_of(model, rows, options) / options['denominator']
      loss.backward()
      total += float(loss.detach())
    norm = float(torch.nn.utils.get_total_norm([w.grad for w in model.parameters()]))
    optimiser.step()
    took = time.perf_counter() - began
    print(f'torch: step {i} {took:.2f} s, loss {total:.6f}', flush=True)
    if i:
      seconds.append(took)
      cpu.append(time.process_time() - used_before)
      products += [before, timed_product()]
    else:
      first = {'loss': total, 'grad_norm': norm}
  return {
    **first,
    'seconds': statistics.median(seconds),
    'cpu_seconds': statistics.median(cpu),
    'gemm': 2 * SQUARE**3 / min(products),
    'peak_bytes': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
  }


if __name__ == '__main__':
  print(json.dumps(main(pathlib.Path(sys.argv[1]))), flush=True)
