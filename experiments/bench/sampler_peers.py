"""Other engines for experiments/bench/sampler.py: transformers and llama.cpp.

Both read the GGUF file of the package; llama.cpp a copy in float32, since the original
is Q4_1, so that all compute the same.
"""

from collections.abc import Callable
import concurrent.futures
import importlib.util
import json
import pathlib
import tempfile
import time
from typing import Any

import numpy as np

from swe17 import source_file

Peer = Callable[[np.ndarray, int], float]  # (prompts [B, P], output) -> tokens a second


def open_all(source: str, threads: int, rows: int) -> dict[str, Peer]:
  """Every peer that is installed, by name."""
  path = source_file.resolve(source)
  made = {'transformers': transformers_peer(path, threads)}
  if importlib.util.find_spec('xllamacpp') is None:
    print('xllamacpp is not installed (.[bench]): llama.cpp is left out')
    return made
  xllamacpp = importlib.import_module('xllamacpp')
  made['llama_cpp'] = llama_peer(xllamacpp, path, threads, rows)
  return made


def transformers_peer(path: pathlib.Path, threads: int) -> Peer:
  """`generate`, batched, with its KV cache, greedy."""
  import torch
  import transformers

  torch.set_num_threads(threads)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    str(path.parent), gguf_file=path.name, dtype=torch.float32
  ).eval()

  def timed(ids: Any, new: int) -> float:
    began = time.perf_counter()
    with torch.inference_mode():
      out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
      )
    assert out.shape[1] == ids.shape[1] + new
    return time.perf_counter() - began

  def rate(prompts: np.ndarray, output: int) -> float:
    ids = torch.from_numpy(prompts.astype(np.int64))
    first = timed(ids, 1)
    return len(prompts) * (output - 1) / (timed(ids, output) - first)

  return rate


def llama_peer(lib: Any, path: pathlib.Path, threads: int, rows: int) -> Peer:
  """llama.cpp's server in this process: a slot a sequence, continuous batching."""
  plain = pathlib.Path(tempfile.mkdtemp()) / 'float32.gguf'
  in_float32(path, plain)
  params = lib.CommonParams()
  params.model.path = str(plain)
  params.n_parallel = rows
  params.n_ctx = rows * 512
  params.n_batch = params.n_ubatch = 512
  params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
  params.cache_type_k = params.cache_type_v = lib.ggml_type.GGML_TYPE_F32
  params.warmup, params.verbosity = True, 0
  server = lib.Server(params)
  plain.unlink()  # half a gigabyte; the server has it mapped
  plain.parent.rmdir()

  def complete(slot: int, prompt: list[int], new: int) -> int:
    asked = {
      'prompt': prompt,
      'n_predict': new,
      'ignore_eos': True,
      'temperature': 0.0,
      'cache_prompt': True,
      'id_slot': slot,
    }
    answer = server.handle_completions(asked)
    answer = json.loads(answer) if isinstance(answer, str) else answer
    return answer['usage']['completion_tokens']

  def rate(prompts: np.ndarray, output: int) -> float:
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
      rows_P = [row.tolist() for row in prompts]
      slots = range(len(prompts))
      list(pool.map(complete, slots, rows_P, [1] * len(prompts)))
      began = time.perf_counter()
      drawn = sum(pool.map(complete, slots, rows_P, [output] * len(prompts)))
      return drawn / (time.perf_counter() - began)

  return rate


def in_float32(path: pathlib.Path, to: pathlib.Path) -> None:
  """Copies a GGUF file with all its tensors in float32."""
  import gguf

  reader = gguf.GGUFReader(path)
  arch = reader.fields['general.architecture'].contents()
  writer = gguf.GGUFWriter(to, arch)
  for name, field in reader.fields.items():
    if name.startswith('GGUF.') or name == 'general.architecture':
      continue
    if name == 'general.file_type':
      writer.add_file_type(0)
      continue
    sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), field.types[0], sub)
  for tensor in reader.tensors:
    data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    shape = [int(n) for n in reversed(tensor.shape)]
    writer.add_tensor(tensor.name, data.reshape(shape).astype(np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
