"""One recorded RL batch, stepped on by this library and by torch: who is faster.

`experiments.bench.learner_step --config=..` comes here. Both sides get the same
episodes, weights, objective (kept-set replay and truncated importance weights) and
optimiser (AdamW on every parameter), in processes of their own, one after the other;
a matrix product is timed around every step of either. The first step of both must give
the same loss and gradient norm, else nothing is reported.

Recorded groups are finished groups as rollouts write them: objects of a run's store, or
the file beside this one, which is `pack`ed from them.
"""

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile
from typing import Any
import zipfile

import numpy as np

from swe17 import config, kept, settings, source_file, types, wire
from swe17.learner import batching
from swe17.store import groups as group_store
from swe17.store import kv

RECORDED = pathlib.Path(__file__).parent / 'data' / 'smollm2_groups.bin'
LOSS_DIFFERENCE, NORM_DIFFERENCE = 1e-3, 1e-3  # relative; else the steps are not equal
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Options:
  """How both sides are run.

  Attributes:
    repeats: steps timed on each side, after a first that compiles.
    torch_tokens: tokens of torch's micro-batches, padding included.
    torch_head: 'all' positions get logits, as `transformers` gives them, or those with
      a 'sampled' target alone.
  """

  repeats: int = 2
  torch_tokens: int = 2048
  torch_head: str = 'all'


def pack(groups: Sequence[types.Group]) -> bytes:
  """Groups one after the other, each with its length before it."""
  parts = [wire.group_to_bytes(group) for group in groups]
  return b''.join(struct.pack('<Q', len(part)) + part for part in parts)


def unpack(data: bytes) -> list[types.Group]:
  """Inverse of `pack`; ValueError if the bytes end early."""
  found, at = [], 0
  while at < len(data):
    (size,) = struct.unpack_from('<Q', data, at)
    at += 8
    if at + size > len(data):
      raise ValueError(f'recorded groups: got {len(data)} bytes, want {at + size}')
    found.append(wire.bytes_to_group(data[at : at + size]))
    at += size
  return found


def recorded(run_dir: str, cfg: config.Config) -> list[types.Group]:
  """The first `batch.groups` groups with signal of a run, or of the recorded file.

  ValueError if there are too few.
  """
  if run_dir:
    store = kv.open(settings.load(run_dir).store)
    keys = group_store.list_new(store, ())
    groups = [group_store.load(store, key) for key in keys]
  else:
    groups = unpack(RECORDED.read_bytes())
  trains = [g for g in groups if batching.assemble([g], cfg.loss).items]
  if len(trains) < cfg.batch.groups:
    raise ValueError(
      f'{run_dir or RECORDED}: got {len(trains)} groups with signal of {len(groups)}, '
      f'want batch.groups={cfg.batch.groups}'
    )
  return trains[: cfg.batch.groups]


def compare(
  cfg: config.Config, groups: Sequence[types.Group], options: Options
) -> dict[str, Any]:
  """Both sides' figures, from this library's and torch's process.

  ValueError if the sides do not compute the same step.
  """
  with tempfile.TemporaryDirectory() as folder:
    work = pathlib.Path(folder)
    _write(work, cfg, groups, options)
    ours = _run('experiments.bench.learner_step_ours', work)
    theirs = _run('experiments.bench.learner_step_torch', work)
  for name, most in (('loss', LOSS_DIFFERENCE), ('grad_norm', NORM_DIFFERENCE)):
    if abs(ours[name] - theirs[name]) > most * abs(theirs[name]):
      raise ValueError(f'{name}: ours is {ours[name]}, of torch {theirs[name]}')
  trained = ours['trained_tokens']
  return {
    'trained_tokens_per_s': round(trained / ours['seconds'], 2),
    'vs_torch': round(theirs['seconds'] / ours['seconds'], 3),
    'peak_share': round(ours['peak_share'], 3),
    'peak_gib': round(ours['peak_bytes'] / _GIB, 2),
    'torch_peak_gib': round(theirs['peak_bytes'] / _GIB, 2),
    'torch_trained_tokens_per_s': round(trained / theirs['seconds'], 2),
    'torch_head': options.torch_head,
    'cpu_seconds': [round(x['cpu_seconds'], 1) for x in (ours, theirs)],
    'gemm_gflops': round(ours['gemm'] / 1e9, 1),
    'torch_gemm_gflops': round(theirs['gemm'] / 1e9, 1),
    'loss': [ours['loss'], theirs['loss']],
    'grad_norm': [ours['grad_norm'], theirs['grad_norm']],
    'tokens': ours['tokens'],
    'rows': ours['rows'],
    'trained_tokens': trained,
  }


def _write(
  work: pathlib.Path,
  cfg: config.Config,
  groups: Sequence[types.Group],
  options: Options,
) -> None:
  """What both sides read: settings, groups, and torch's rows."""
  origin = settings.origins(dataclasses.asdict(cfg), ())
  (work / 'config.json').write_text(json.dumps(settings.to_json(cfg, origin)))
  (work / 'groups.bin').write_bytes(pack(groups))
  made = batching.assemble(groups, cfg.loss)
  episodes = made.denominator_episodes
  denominator = batching.denominator(cfg.loss, episodes, cfg.agent.max_context)
  (work / 'options.json').write_text(
    json.dumps(
      {
        **dataclasses.asdict(options),
        'denominator': denominator,
        'threads': os.cpu_count(),
        'tis_cap': cfg.loss.tis_cap,
        'lr': cfg.optim.lr,
        'b1': cfg.optim.adam_b1,
        'b2': cfg.optim.adam_b2,
        'eps': cfg.optim.adam_eps,
        'source': str(source_file.resolve(cfg.model.source)),
      }
    )
  )
  arrays: dict[str, np.ndarray] = {}
  for i, item in enumerate(made.items):
    s = item.segment
    arrays |= {
      f'{i}/token': s.token_T.astype(np.int64),
      f'{i}/mask': s.mask_T[1:],
      f'{i}/mu_logp': s.mu_logp_T[1:],
      f'{i}/adv': item.adv_T().astype(np.float32),
      f'{i}/temperature': np.where(s.mask_T, s.temperature_T, 1)[1:].astype(np.float32),
      f'{i}/kept': kept.padded(s.kept, cfg.sampler.top_k)[1:].astype(np.int64),
    }
  with zipfile.ZipFile(work / 'rows.npz', 'w') as file:
    for name, array in arrays.items():
      with file.open(f'{name}.npy', 'w', force_zip64=True) as entry:
        np.save(entry, array)


def _run(module: str, work: pathlib.Path) -> dict[str, Any]:
  """One side, in a process of its own; what it prints last. Its words are passed on."""
  done = subprocess.Popen(
    [sys.executable, '-m', module, str(work)], stdout=subprocess.PIPE, text=True
  )
  last = ''
  assert done.stdout is not None
  for line in done.stdout:
    if last:
      print(last, end='', flush=True)
    last = line
  if done.wait():
    raise RuntimeError(f'{module} ended with code {done.returncode}')
  return json.loads(last)
