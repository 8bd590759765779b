"""One learner step on meshes of several sizes; what bench/mesh.py starts and compares.

  python -m experiments.bench.mesh_main --out=DIR [--cases=a,b]
         [--processes=2 --index=0 --address=localhost:PORT]

Every case starts from the same parameters and batch, and writes its summed gradient and
its parameters after the step to DIR/<case>.npz; a case that others are compared with
also writes the gradient that float64 gives. How many devices a process has is in
XLA_FLAGS.
"""

from collections.abc import Sequence
import dataclasses
import functools
import os
from typing import Any

from absl import app, flags
import jax
from jax.experimental import multihost_utils
import numpy as np

from experiments import program
from experiments.bench import float64
from swe17 import config
from swe17.learner import batching, mesh, optimizer, update
from swe17.learner import state as st
from swe17.model import params as p
from swe17.sync import apply

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_OUT = flags.DEFINE_string('out', None, 'folder of the results', flag_values=FLAGS)
_CASES = flags.DEFINE_list('cases', [], 'which; empty: all', flag_values=FLAGS)
_PROCESSES = flags.DEFINE_integer(
  'processes', 1, 'of jax.distributed', flag_values=FLAGS
)
_INDEX = flags.DEFINE_integer('index', 0, 'this process', flag_values=FLAGS)
_ADDRESS = flags.DEFINE_string(
  'address', '', 'host:port of process 0', flag_values=FLAGS
)

VOCAB = 512
_BATCH = config.Batch(row_length=128, micro_rows=8)
_MICRO = 8
DENSE = config.Model(attention_chunk=32)
MOE = config.Model(
  layers=3,
  width=96,
  ffn=160,
  attention='mla',
  heads=4,
  kv_heads=4,
  head_dim=24,
  rotary_dim=8,
  tied=False,
  ngram=1,
  mla=config.config_model.Mla(q_rank=48, kv_rank=32, v_dim=16),
  moe=config.config_model.Moe(
    experts=8, active=2, ffn=64, shared=1, first_dense=1, router='sigmoid', capacity=8.0
  ),
  attention_chunk=32,
)


@dataclasses.dataclass(frozen=True)
class Case:
  """A model, a mesh, and whether micro-batches are summed in the fixed tree.

  `against` is the case on one device that it is compared with.
  """

  model: config.Model
  sizes: dict[str, Any]
  exact: bool = False
  against: str = ''


def _cases() -> dict[str, Case]:
  """Named cases: one device, and meshes of 2, 4 and 8."""
  found = {}
  meshes = {
    'dense': (
      {'fsdp': 2},
      {'fsdp': 2, 'tensor': 2},
      {'fsdp': 8},
      {'replica': 2, 'context': 4},
      {'fsdp': 2, 'context': 2, 'tensor': 2},
    ),
    'moe': ({'expert': 2}, {'fsdp': 2, 'expert': 2}, {'expert': 8}),
  }
  for name, model in (('dense', DENSE), ('moe', MOE)):
    found[name] = Case(model, {})
    for sizes in meshes[name]:
      of = '-'.join(f'{axis}{size}' for axis, size in sizes.items())
      found[f'{name}-{of}'] = Case(model, sizes, against=name)
  found['exact'] = Case(DENSE, {}, exact=True)
  for R in (2, 4, 8):
    found[f'exact-replica{R}'] = Case(DENSE, {'replica': R}, True, 'exact')
  # Cut otherwise on one device: how large rounding alone is.
  other = dataclasses.replace(DENSE, attention_chunk=48)
  found['dense-chunks'] = Case(other, {}, against='dense')
  return found


CASES = _cases()
TWO_PROCESSES = ('dense-fsdp8', 'moe-expert8', 'exact-replica8')


def settings(case: Case) -> config.Config:
  return config.Config(
    model=case.model,
    mesh=config.Mesh(**case.sizes),
    batch=_BATCH,
    agent=config.Agent(max_context=_BATCH.row_length),
    optim=config.Optim(exact_sum=case.exact),
  )


def _params(case: Case) -> p.Params:
  return p.rounded(p.init(p.abstract(case.model, VOCAB), jax.random.key(0)))


def begun(case: Case) -> dict[str, np.ndarray]:
  """The parameters that a case starts from, by name."""
  return _whole(_params(case))


def batch(cfg: config.Config, vocab: int, micro: int, seed: int = 0) -> st.Batch:
  """Random rows: two segments and some padding each, a third of the tokens sampled."""
  rng = np.random.default_rng(seed)
  empty = batching.fill([], micro=micro, cfg=cfg.batch, K=4, denominator=float(micro))
  shape = M, B, T = empty.token_MBT.shape
  cut_MB1 = rng.integers(T // 4, T // 2, (M, B, 1))
  end_MB1 = rng.integers(3 * T // 4, T, (M, B, 1))
  at_T = np.arange(T)
  first = at_T < cut_MB1
  segment = np.where(at_T >= end_MB1, 0, np.where(first, 1, 2))
  target = rng.integers(0, vocab, shape)
  kept = np.stack([target, (target + 3) % vocab, (target + 7) % vocab], axis=-1)
  kept = np.concatenate([kept, np.full((*shape, 1), -1)], axis=-1)
  arrays: dict[str, Any] = dict(
    token_MBT=np.int32(rng.integers(0, vocab, shape)),
    position_MBT=np.int32(np.where(first, at_T, at_T - cut_MB1)),
    segment_MBT=np.int32(segment),
    target_MBT=np.int32(target),
    mask_MBT=(segment > 0) & (rng.random(shape) < 0.33),
    mu_logp_MBT=np.float32(-rng.uniform(0.5, 1.5, shape)),
    adv_MBT=np.float32(rng.normal(size=shape)),
    temperature_MBT=np.ones(shape, np.float32),
    kept_ids_MBTK=np.int32(kept),
    episode_MBT=np.int32(np.broadcast_to(np.arange(M * B).reshape(M, B, 1), shape)),
    micro=np.int32(M),
  )
  return dataclasses.replace(empty, **arrays)


def placed(on: mesh.Devices, params: p.Params, tx: Any) -> st.State:
  """A state with these values (on every process), split as `on` says."""
  if on.mesh is None:
    return mesh.state(on, params, tx)

  def of(x: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

  host = jax.tree.map(np.asarray, params)
  return mesh.state(on, jax.tree.map(of, host, mesh.shardings(on)), tx)


def step(
  cfg: config.Config, vocab: int, params: p.Params, of: st.Batch
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """(summed gradient, parameters after one step), by name, on every process."""
  devices = jax.devices()[: cfg.mesh.devices]
  on = mesh.open(cfg, vocab, devices)
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  loss_fn = functools.partial(update.policy_loss_fn, model=cfg.model, cfg=cfg.loss)

  def run(state: st.State, of: st.Batch) -> tuple[st.State, p.Params]:
    _, _, grad = update.accumulate(
      loss_fn, state.params, of, exact=cfg.optim.exact_sum, mesh=on.replicas
    )
    mean = jax.tree.map(lambda g: g / of.denominator, grad)
    return update.apply_gradient(state, mean, tx)[0], grad

  state = placed(on, params, tx)
  mine = mesh.part(on, of, jax.process_index())
  with mesh.scope(on):
    new, grad = mesh.jit(on, run, state)(state, mesh.put(on, mine))
  return _whole(grad), _whole(new.params)


def reference(
  cfg: config.Config, params: p.Params, of: st.Batch
) -> dict[str, np.ndarray]:
  """The summed gradient of one device in float64, by name."""
  loss_fn = functools.partial(update.policy_loss_fn, model=cfg.model, cfg=cfg.loss)

  def summed(params: p.Params, of: st.Batch) -> p.Params:
    return update.accumulate(loss_fn, params, of, exact=False, mesh=None)[2]

  return apply.name_tree(float64.run(summed, params, of))


def _whole(tree: Any) -> dict[str, np.ndarray]:
  """All of every leaf, on the host of every process."""
  if jax.process_count() > 1:
    tree = multihost_utils.process_allgather(tree, tiled=True)
  return {k: np.asarray(v) for k, v in apply.name_tree(jax.device_get(tree)).items()}


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  assert _OUT.value
  if _PROCESSES.value > 1:
    jax.distributed.initialize(_ADDRESS.value, _PROCESSES.value, _INDEX.value)
  for name in _CASES.value or CASES:
    case = CASES[name]
    cfg = settings(case)
    params, of = jax.device_get(_params(case)), batch(cfg, VOCAB, _MICRO)
    grad, new = step(cfg, VOCAB, params, of)
    if jax.process_index() == 0:
      found: dict[str, Any] = {f'grad:{k}': v for k, v in grad.items()}
      found |= {f'param:{k}': v for k, v in new.items()}
      if any(other.against == name for other in CASES.values()):
        exact = reference(cfg, params, of)
        found |= {f'float64:{k}': v for k, v in exact.items()}
      suffix = f'@{_PROCESSES.value}' if _PROCESSES.value > 1 else ''
      np.savez(os.path.join(_OUT.value, f'{name}{suffix}.npz'), **found)
      print(f'{name}{suffix}', flush=True)


if __name__ == '__main__':
  flags.mark_flag_as_required('out', flag_values=FLAGS)
  program.run(main, FLAGS)
