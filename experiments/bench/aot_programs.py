"""The programs that bench/aot.py compiles, from abstract arrays, and what they hold."""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import io
import math
import re
import resource
import time
from typing import Any

import jax
from jax import ad_checkpoint
from jax.experimental import topologies
import numpy as np

from swe17 import config
from swe17.learner import batching, optimizer, update
from swe17.learner import state as st
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.model import sharding
from swe17.sampler import check, decode

_GIB = 2**30
_KINDS = 'all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute'
_LINE = re.compile(rf'= (.+?) ({_KINDS})(?:-start)?\(')
# Every device a group of its own: nothing moves.
_ALONE = re.compile(r'replica_groups=(\{\{0\},|\[\d+,1\])')
_SHAPE = re.compile(r'(\w+)\[([\d,]*)\]')
_BYTES = {
  'f32': 4,
  's32': 4,
  'u32': 4,
  'bf16': 2,
  'f16': 2,
  's8': 1,
  'u8': 1,
  'pred': 1,
}
# Machines that are asked about: name, GiB of a device, what is left for the rest.
_MACHINES = (('TPU v5p', 95), ('H200', 141))


def chips(topology: str) -> list[jax.Device]:
  """Devices of a TPU slice that is not here: programs compile for them, none runs.

  RuntimeError if libtpu is missing or does not know the topology.
  """
  return topologies.get_topology_desc(topology_name=topology, platform='tpu').devices


def compiled(
  cfg: config.Config, chips: Sequence[jax.Device] | None, vocab: int, micro: int
) -> dict[str, Any]:
  """Both programs, and what is printed of them. `chips`: None for virtual CPUs."""
  devices = math.prod(cfg.mesh.sizes.values())
  on = sharding.mesh(cfg.mesh.sizes, chips)
  if chips is not None and cfg.model.moe.exchange == 'auto':
    moe = dataclasses.replace(cfg.model.moe, exchange='ragged')  # as on a TPU
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, moe=moe))
  leaves = p.abstract(cfg.model, vocab)
  shapes = jax.tree.map(lambda leaf: _abstract(leaf.shape, 'float32'), leaves)
  params = _placed(shapes, sharding.shardings(leaves, on))
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  with jax.set_mesh(on):
    opt = jax.eval_shape(tx.init, params)
  opt = _placed(opt, sharding.like(opt, leaves, on))
  count = p.count(leaves)
  print(f'{count:,} parameters on {devices} devices: {cfg.mesh.sizes}', flush=True)
  held = {
    'parameters (float32)': _per_device(params),
    'optimiser': _per_device(opt),
    'gradient (float32)': _per_device(params),
    'rounded weights': _per_device(params)
    * (0.5 if cfg.model.dtype != 'float32' else 1),
  }
  with jax.set_mesh(on):
    batch = _batch(cfg, micro, on)
    held['activations'] = _activations(cfg, params, batch) / devices
    for name, size in held.items():
      print(f'  {name:22s} {size / _GIB:8.2f} GiB a device')
    total = sum(held.values())
    for machine, gib in _MACHINES:
      need = math.ceil(total * devices / _GIB / (0.85 * gib))
      print(f'  {machine} ({gib} GiB, 85 % of it used): {need} devices or more')
    seconds = {'train': _train(cfg, params, opt, batch, tx, on)}
    seconds['decode'] = _decode(cfg, params, on)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  return {
    'compiled': True,
    'params': count,
    'devices': devices,
    'gib_per_device': round(total / _GIB, 2),
    'seconds': {name: round(value) for name, value in seconds.items()},
    'host_gib': round(peak, 1),
  }


def _abstract(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
  """An array that holds nothing."""
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _placed(tree: Any, shardings: Any) -> Any:

  return jax.tree.map(
    lambda x, s: _abstract(x.shape, x.dtype, sharding=s), tree, shardings
  )


def _per_device(tree: Any) -> float:
  """Bytes of one device's shards."""

  def size(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

  return float(sum(size(x) for x in jax.tree.leaves(tree)))


def _batch(cfg: config.Config, M: int, on: Any) -> Any:
  """An abstract batch, rows over the axes of the batch, positions over `context`."""
  empty = batching.fill(
    [],
    micro=1,
    cfg=cfg.batch,
    K=cfg.sampler.top_k,
    denominator=1.0,
    routes=cfg.model.routes,
  )
  place = jax.sharding.NamedSharding(on, jax.P(None, sharding.BATCH, 'context'))
  whole = jax.sharding.NamedSharding(on, jax.P())

  def of(x: Any) -> Any:
    x = np.asarray(x)
    if x.ndim == 0:
      return _abstract((), x.dtype, sharding=whole)
    return _abstract((M, *x.shape[1:]), x.dtype, sharding=place)

  return jax.tree.map(of, empty)


def _activations(cfg: config.Config, params: Any, batch: Any) -> float:
  """Bytes that the backward pass of one micro-batch keeps, over all devices."""
  dtype = cfg.model.dtype
  weights = jax.tree.map(lambda x: _abstract(x.shape, dtype), params)
  one = jax.tree.map(lambda x: _abstract(x.shape[1:] if x.ndim else (), x.dtype), batch)
  fn = functools.partial(update.policy_loss_fn, model=cfg.model, cfg=cfg.loss)
  said = io.StringIO()
  with contextlib.redirect_stdout(said):
    ad_checkpoint.print_saved_residuals(lambda w, b: fn(w, b)[0], weights, one)
  total = 0.0
  for line in said.getvalue().splitlines():
    if 'from the argument' not in line:
      total += _bytes(line.split(' ')[0])
  return total


def _bytes(text: str) -> float:
  """Bytes of every shape in a text like 'f32[4,8]' or '(bf16[2], u32[])'."""
  total = 0.0
  for dtype, dims in _SHAPE.findall(text):
    sizes = [int(d) for d in dims.split(',') if d]
    total += _BYTES.get(dtype.replace('float32', 'f32'), 4) * math.prod(sizes)
  return total


def _train(
  cfg: config.Config, params: Any, opt: Any, batch: Any, tx: Any, on: Any
) -> float:

  whole = jax.sharding.NamedSharding(on, jax.P())
  state = st.State(params, opt, _abstract((), 'int32', sharding=whole))
  out = jax.tree.map(lambda x: x.sharding, state)
  step = functools.partial(update.update, model=cfg.model, loss=cfg.loss, tx=tx)
  jitted = jax.jit(step, donate_argnums=0, out_shardings=(out, None))
  return _compile('train step', lambda: jitted.lower(state, batch), _tpu(on))


def _decode(cfg: config.Config, params: Any, on: Any) -> float:

  sampler, rows = cfg.sampler, jax.P(sharding.BATCH)
  place = jax.sharding.NamedSharding(on, rows)
  B = sampler.slots
  weights = jax.tree.map(
    lambda x: _abstract(x.shape, cfg.model.dtype, sharding=x.sharding),
    params,
  )
  columns = -(-cfg.agent.max_context // sampler.page)
  pages = sampler.kv_pages or B * columns
  cache = jax.eval_shape(lambda: kv.init(cfg.model, pages, sampler.page))
  fields = {'key_B2': ((B, 2), 'uint32')}
  fields |= dict.fromkeys(('temperature_B', 'top_p_B', 'min_p_B'), ((B,), 'float32'))
  fields['stop_BX'] = ((B, check.STOPS), 'int32')
  fields['table_BJ'] = ((B, columns), 'int32')
  names = ('token_B', 'position_B', 'left_B', 'top_k_B')
  fields |= dict.fromkeys(names, ((B,), 'int32'))
  slots = decode.Slots(**{k: _abstract(*v) for k, v in fields.items()})
  cache, slots = (_placed(x, jax.tree.map(lambda _: place, x)) for x in (cache, slots))
  fn = functools.partial(decode.decode, cfg=cfg.model, K=sampler.top_k, steps=1)
  jitted = jax.jit(fn, donate_argnums=1)
  return _compile('decode step', lambda: jitted.lower(weights, cache, slots), _tpu(on))


def _tpu(on: jax.sharding.Mesh) -> bool:
  return on.devices.flat[0].platform == 'tpu'


def _compile(name: str, lower: Any, tpu: bool) -> float:
  """Lowers and compiles; prints the collectives, and a TPU's memory. Seconds."""
  began = time.monotonic()
  lowered = lower()
  print(f'{name}: lowered in {time.monotonic() - began:.0f} s', flush=True)
  made = lowered.compile()
  text = made.as_text()
  seconds = time.monotonic() - began
  if tpu:
    memory = made.memory_analysis()
    for what in ('argument', 'output', 'alias', 'temp'):
      size = getattr(memory, f'{what}_size_in_bytes') / _GIB
      print(f'  {what:9s} {size:8.2f} GiB a chip, by the compiler')
  print(f'{name}: compiled in {seconds:.0f} s; its collectives, bytes a device:')
  for line in collectives(text):
    print('  ' + line, flush=True)
  return seconds


def collectives(text: str) -> list[str]:
  """A table of a compiled program's collectives, largest first."""
  found: dict[tuple[str, str, bool], int] = {}
  inside = False
  for line in text.splitlines():
    if line.startswith(('%', 'ENTRY')) and line.endswith('{'):
      inside = not line.startswith('ENTRY')
    match = _LINE.search(line)
    if match and not _ALONE.search(line):
      key = (match[2], re.sub(r'\{[^}]*\}', '', match[1]), inside)
      found[key] = found.get(key, 0) + 1
  rows = sorted(found.items(), key=lambda item: -_bytes(item[0][1]))
  shown = [
    f'{kind:18s} {_bytes(shape) / 2**20:10.1f} MiB x {n}{" in a loop" * loop} {shape}'
    for (kind, shape, loop), n in rows[:12]
  ]
  rest = sum(n for _, n in rows[12:])
  return [*shown, f'and {rest} smaller ones'] if rest else shown
