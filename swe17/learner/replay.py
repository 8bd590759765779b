"""Router replay in the learner's step, and the load of experts.

Replay (R3, arXiv:2510.11370): experts are those that the sampler recorded, their
weights are this model's own, so the router keeps its gradient (ops/routing.py). What
each router would have chosen is compared with what was recorded.

Load is balanced without an auxiliary loss, as in DeepSeek-V3 (arXiv:2412.19437, section
2.1.2): after a step, b_e += speed * sign(mean load - load_e), outside of the gradient.
A loss for balance would be one more force on the router beside the reward; the bias
moves the selection alone, and leaves weights and gradient as they are.
"""

import dataclasses

from flax import struct
import jax
import jax.numpy as jnp

from swe17.learner import state as st
from swe17.model import params as p


@struct.dataclass
class Routing:
  """Additive statistics of the layers with experts.

  Attributes:
    load_NE: float32, how often each router chooses each expert by itself.
    differ: float32 scalar, recorded routes (one a token and layer) whose set of experts
      is not the one that the router chooses.
    recorded: float32 scalar, recorded routes.
  """

  load_NE: jax.Array
  differ: jax.Array
  recorded: jax.Array


def recorded(micro: st.Batch) -> jax.Array | None:
  """The routes to replay, int32 [B, T, N, K], -1 where none; None: replay is off."""
  routes_BTNK = micro.routes_MBTNK
  return None if routes_BTNK is None else routes_BTNK.astype(jnp.int32)


def statistics(top_BTNK: jax.Array, micro: st.Batch, E: int) -> Routing:
  """What the routers' own choice of a micro-batch says, padding left out.

  A shared prompt counts as often as there are segments that continue it.
  """
  top_BTNK, zero = jax.lax.stop_gradient(top_BTNK), jnp.zeros((), jnp.float32)
  copies_BT = _copies(micro)
  hit_BTNKE = top_BTNK[..., None] == jnp.arange(E)[None, None, None, None, :]
  hit_BTNKE = jnp.where(hit_BTNKE, copies_BT[:, :, None, None, None], 0)
  load_NE = jnp.sum(hit_BTNKE, axis=(0, 1, 3), dtype=jnp.float32)
  recorded_BTNK = recorded(micro)
  if recorded_BTNK is None:
    return Routing(load_NE, zero, zero)
  known_BTN = jnp.all(recorded_BTNK >= 0, axis=-1)
  same_BTN = jnp.all(jnp.sort(top_BTNK) == jnp.sort(recorded_BTNK), axis=-1)
  times_BT1 = jnp.maximum(copies_BT, 1)[:, :, None]
  return Routing(
    load_NE=load_NE,
    differ=jnp.sum(jnp.where(known_BTN & ~same_BTN, times_BT1, 0), dtype=jnp.float32),
    recorded=jnp.sum(jnp.where(known_BTN, times_BT1, 0), dtype=jnp.float32),
  )


def _copies(micro: st.Batch) -> jax.Array:
  """How often each token would be there if no prompt were shared, int32 [B, T]."""
  segment_BT, prefix_BT = micro.segment_MBT, micro.prefix_MBT
  once_BT = (segment_BT > 0).astype(jnp.int32)
  if prefix_BT is None:
    return once_BT
  before_BT = jnp.pad(segment_BT[:, :-1], ((0, 0), (1, 0)))
  first_BT1 = (segment_BT != before_BT)[:, :, None]
  place_11P = jnp.arange(1, st.SEGMENTS_A_ROW + 1)[None, None, :]
  tails_B1P = jnp.sum(
    first_BT1 & (prefix_BT[:, :, None] == place_11P), 1, keepdims=True
  )
  held_BT = jnp.sum(jnp.where(segment_BT[:, :, None] == place_11P, tails_B1P, 0), -1)
  return jnp.maximum(held_BT, once_BT)


def metrics(routing: Routing | None) -> dict[str, jax.Array]:
  """Share of routes that differ and their count; load of the busiest expert."""
  if routing is None:
    return {}
  load_NE = routing.load_NE
  busiest_N = jnp.max(load_NE, axis=-1) / jnp.mean(load_NE, axis=-1)
  return {
    'route_mismatch': routing.differ / routing.recorded,
    'route_mismatch_count': routing.recorded,
    'expert_load_max': jnp.max(busiest_N),
  }


def with_bias(params: p.Params, of: p.Params, step_NE: jax.Array | float) -> p.Params:
  """`params` with the routers' biases of `of`, moved by a step; the same if none.

  No gradient reaches a bias, and an optimiser's weight decay should not either.
  """
  if params.moe is None or of.moe is None:
    return params
  now, before = params.moe.mlp, of.moe.mlp
  if not (isinstance(now, p.Moe) and isinstance(before, p.Moe)):
    return params
  if before.bias_NE is None:
    return params
  mlp = dataclasses.replace(now, bias_NE=before.bias_NE + step_NE)
  return dataclasses.replace(params, moe=dataclasses.replace(params.moe, mlp=mlp))


def balanced(
  params: p.Params, load_NE: jax.Array, speed: float, skipped: jax.Array
) -> p.Params:
  """Biases moved by `speed` towards equal load; by nothing where a step was skipped."""
  mean_N1 = jnp.mean(load_NE, axis=-1, keepdims=True)
  step_NE = speed * jnp.sign(mean_N1 - load_NE)
  return with_bias(params, params, jnp.where(skipped > 0, 0.0, step_NE))
