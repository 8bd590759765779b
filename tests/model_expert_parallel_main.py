"""A program that spreads experts over 8 devices and compares with a single place.

Run as `python -m tests.model_expert_parallel_main`, in a process of its own: the number
of CPU devices (XLA_FLAGS) is fixed when JAX starts. Prints one JSON object: per case
the largest difference of values and of gradients, relative to the largest entry of
each. The CPU has no `ragged_all_to_all`; `by_its_rules` does what its documentation
says with an `all_gather`, which proves the plans that it is given, not the collective.
"""

import dataclasses
import functools
import itertools
import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from swe17 import config_model
from swe17.model import lora, moe, sharding
from swe17.model import params as p

D, F, E, K, B, T = 16, 8, 8, 3, 8, 12
MESHES = (
  {'expert': 8},
  {'fsdp': 2, 'expert': 2, 'tensor': 2},
  {'expert': 2, 'context': 4},
  {'replica': 2, 'expert': 4},
)
CFG = config_model.Moe(experts=E, active=K, ffn=F, capacity=8.0, exchange='blocks')
SIGMOID = dataclasses.replace(CFG, router='sigmoid', groups=2, best_groups=1, shared=1)


def leaves(cfg: config_model.Moe) -> p.Moe:
  rng = np.random.default_rng(0)

  def w(*shape: int) -> jax.Array:
    return jnp.asarray(np.float32(rng.normal(size=shape) / np.sqrt(shape[-2])))

  def adapter(In: int, Out: int) -> lora.Adapter:
    return lora.Adapter(w(E, In, 2), w(E, 2, Out), scale=0.5)

  sigmoid = cfg.router == 'sigmoid'
  adapters = {
    'expert_gate': adapter(D, F),
    'expert_up': adapter(D, F),
    'expert_down': adapter(F, D),
  }
  return p.Moe(
    router_NDE=w(D, E),
    wg_NEDF=w(E, D, F),
    wu_NEDF=w(E, D, F),
    wd_NEFD=w(E, F, D),
    bias_NE=w(1, E)[0] if sigmoid else None,
    shared=p.Dense(w(D, F), w(D, F), w(F, D)) if sigmoid else None,
    lora=adapters if sigmoid else None,
  )


def tokens() -> tuple[jax.Array, jax.Array]:
  """(x, cotangent)."""
  rng = np.random.default_rng(1)
  x, dy = (np.float32(rng.normal(size=(B, T, D))) for _ in range(2))
  return jnp.asarray(x), jnp.asarray(dy)


def by_its_rules(
  operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
  """`jax.lax.ragged_all_to_all` from its documentation."""
  gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
  me = jax.lax.axis_index(axis_name)
  rows = gather(operand)
  plans = zip(
    rows, gather(input_offsets), gather(send_sizes), gather(output_offsets), strict=True
  )
  at_G = jnp.arange(output.shape[0])
  for i, (sent, start, size, to) in enumerate(plans):
    place_G = at_G - to[me]
    mine_G = (place_G >= 0) & (place_G < size[me])
    got = sent[jnp.clip(start[me] + place_G, 0, operand.shape[0] - 1)]
    output = jnp.where(mine_G[:, None], got, output)
    # A receiver that expects other sizes is undefined; here it is wrong loudly.
    output = jnp.where(size[me] == recv_sizes[i], output, jnp.nan)
  return output


def results(
  cfg: config_model.Moe, mesh: dict[str, int] | None, recorded: bool
) -> tuple:
  """(values, gradients of tokens and leaves) as host arrays."""
  layer, (x, dy) = leaves(cfg), tokens()
  rng = np.random.default_rng(2)
  ids = np.array([rng.permutation(E)[:K] for _ in range(B * T)], np.int32)
  given = jnp.asarray(ids.reshape(B, T, K)) if recorded else None

  def loss(x, layer):
    y, _ = moe.mix(x, layer, cfg, given)
    return jnp.sum(y * dy), y

  fn = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
  if mesh is None:
    (_, y), grad = fn(x, layer)
    return jax.device_get((y, grad))
  with jax.set_mesh(sharding.mesh(mesh)):
    (_, y), grad = fn(x, layer)
    return jax.device_get((y, grad))


def apart(got, want) -> float:
  """Largest difference of a leaf relative to its largest entry; NaN stays NaN."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return float(max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in pairs))


def overflow(way: str) -> dict[str, object]:
  """All rows to the experts of one shard, with room for a fair part only."""
  cfg = dataclasses.replace(CFG, capacity=1.0, exchange=way)
  layer, (x, _) = leaves(cfg), tokens()
  recorded = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, T, K))
  said = ''
  with jax.set_mesh(sharding.mesh({'expert': 2, 'fsdp': 4})):
    try:
      y = jax.device_get(
        jax.jit(lambda x, w: moe.mix(x, w, cfg, recorded)[0])(x, layer)
      )
      jax.effects_barrier()
      return {'said': said, 'nan': bool(np.isnan(y).all())}
    except jax.errors.JaxRuntimeError as e:
      said = str(e)
  return {'said': said, 'nan': None}


def lowered(platform: str) -> int:
  """How many ragged exchanges the step has when lowered for another platform."""
  cfg = dataclasses.replace(CFG, exchange='ragged')
  layer, (x, dy) = leaves(cfg), tokens()

  def loss(x, layer):
    return jnp.sum(moe.mix(x, layer, cfg)[0] * dy)

  # A callback into this host is part of a program for this backend only.
  quiet = mock.patch.object(jax.debug, 'callback', lambda *_, **__: None)
  with quiet, jax.set_mesh(sharding.mesh({'expert': 4, 'fsdp': 2})):
    traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(x, layer)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
  return text.count('@ragged_all_to_all')


def main() -> None:
  found: dict[str, object] = {}
  cases = (('softmax', CFG, False, MESHES), ('sigmoid', SIGMOID, True, MESHES[:2]))
  for name, cfg, recorded, meshes in cases:
    want = results(cfg, None, recorded)
    for mesh, way in itertools.product(meshes, ('blocks', 'ragged')):
      spread = dataclasses.replace(cfg, exchange=way)
      with mock.patch.object(jax.lax, 'ragged_all_to_all', by_its_rules):
        got = results(spread, mesh, recorded)
      at = ' '.join(f'{k}={v}' for k, v in mesh.items())
      found[f'{name}, {way}: {at}'] = [apart(got[i], want[i]) for i in (0, 1)]
  lowering = {platform: lowered(platform) for platform in ('tpu', 'cuda')}
  refused = {}
  for way in ('blocks', 'ragged'):
    with mock.patch.object(jax.lax, 'ragged_all_to_all', by_its_rules):
      refused[way] = overflow(way)
  print(json.dumps({'apart': found, 'lowered': lowering, 'overflow': refused}))


if __name__ == '__main__':
  main()
