"""Experts spread over a mesh axis: rows go to where their expert is, and come back.

Under `shard_map` every shard holds rows of its own and E / S of the experts. It sorts
its rows by expert, and with that by shard; sends each shard its part; works on what it
received with the same grouped products (model/experts.py); sends back. Two ways to send
(`model.moe.exchange`; 'auto' takes the second on TPU and GPU, which alone have it):

  blocks   `all_to_all` of blocks of one static size, `capacity` times a shard's fair
           part; what a block does not fill is sent as zeros
  ragged   `ragged_all_to_all` of the rows alone; only what a shard receives in all is
           bounded, by `capacity` times its fair part

More rows than that is an error, raised on the host, never a dropped row: the result is
NaN until it arrives there.
"""

import functools
import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from swe17 import config_model
from swe17.model import experts, lora, sharding
from swe17.model import params as p

AXIS = 'expert'


def spread(
  x_BTD: jax.Array, ids_BTK: jax.Array, moe: p.Moe, cfg: config_model.Moe
) -> jax.Array:
  """Each token through each of its K experts, [B, T, K, D], on the mesh that is set.

  B is split over the axes of the batch, T over `context`, E over `expert`, F over
  `tensor`.

  Raises:
    ValueError: inside the runtime's own error, which ends the program: more rows than
      `model.moe.capacity` leaves room for.
  """
  tokens, F = jax.P(sharding.BATCH, 'context'), 'tensor'
  ways = {'blocks': _by_blocks, 'ragged': _by_rows}
  body = functools.partial(
    ways[way(cfg)],
    cfg=cfg,
    E=moe.wg_NEDF.shape[0],
    split=sharding.current().get(F, 1) > 1,
  )
  wide, tall = jax.P(AXIS, None, F), jax.P(AXIS, F)
  adapters = moe.lora or {}
  return jax.shard_map(
    body,
    in_specs=(tokens, tokens, wide, wide, tall, _specs(adapters, wide, tall)),
    out_specs=tokens,
    check_vma=False,
  )(x_BTD, ids_BTK, moe.wg_NEDF, moe.wu_NEDF, moe.wd_NEFD, adapters)


def _specs(adapters: lora.Adapters, wide: jax.P, tall: jax.P) -> dict[str, Any]:
  """Where adapters lie: as their experts do, ranks whole."""
  found: dict[str, Any] = {}
  for name, adapter in adapters.items():
    specs = (tall, jax.P(AXIS)) if name == 'expert_down' else (jax.P(AXIS), wide)
    found[name] = jax.tree.unflatten(jax.tree.structure(adapter), specs)
  return found


def way(cfg: config_model.Moe) -> str:
  """'blocks' or 'ragged'."""
  if cfg.exchange != 'auto':
    return cfg.exchange
  return 'blocks' if jax.default_backend() == 'cpu' else 'ragged'


def _by_blocks(
  x_BTD: jax.Array,
  ids_BTK: jax.Array,
  *w: Any,
  cfg: config_model.Moe,
  E: int,
  split: bool,
) -> jax.Array:
  """One shard's rows there and back, in blocks.

  `w`: its experts' gate, up, down, and their adapters.
  """
  (B, T, K), D = ids_BTK.shape, x_BTD.shape[-1]
  held = w[0].shape[0]
  S, R = E // held, B * T * K
  C = min(R, math.ceil(cfg.capacity * R / S))  # rows of a block
  rows_RD, sorted_R, order_R, back_R = _by_expert(x_BTD, ids_BTK)

  count_S = jnp.sum(sorted_R[None, :] // held == jnp.arange(S)[:, None], axis=1)
  first_S = jnp.cumsum(count_S) - count_S
  # Row r stands in block s at place r - first_s; place c of block s holds first_s + c.
  shard_R = sorted_R // held
  slot_R = shard_R * C + jnp.arange(R) - first_S[shard_R]
  place_SC = jnp.arange(C)[None, :]
  inside_SC = place_SC < count_S[:, None]
  row_SC = jnp.where(inside_SC, first_S[:, None] + place_SC, 0)
  over = jnp.max(count_S) > C
  slot_R = jnp.where(over, 0, slot_R)

  sent_SCD = _placed(rows_RD, row_SC, inside_SC, slot_R)
  # Beyond a block's rows: an expert that nobody has, sorted last, worked on never.
  expert_SC = jnp.where(inside_SC, sorted_R[row_SC] % held, held)
  swap = functools.partial(
    jax.lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True
  )
  got_GD, expert_G = swap(sent_SCD).reshape(S * C, D), swap(expert_SC).reshape(-1)
  out_GD = _worked(got_GD, expert_G, w, cfg, split)
  home_SCD = swap(out_GD.reshape(S, C, D))
  out_RD = _taken(home_SCD, slot_R, row_SC, inside_SC)
  jax.debug.callback(_refuse, over, jnp.max(count_S), room=C)
  out_RD = jnp.where(over, jnp.nan, out_RD)
  return experts.permuted(out_RD, back_R, order_R).reshape(B, T, K, D)


def _by_rows(
  x_BTD: jax.Array,
  ids_BTK: jax.Array,
  *w: Any,
  cfg: config_model.Moe,
  E: int,
  split: bool,
) -> jax.Array:
  """One shard's rows there and back, nothing else. `w` as in `_by_blocks`."""
  (B, T, K), D = ids_BTK.shape, x_BTD.shape[-1]
  held = w[0].shape[0]
  S, R = E // held, B * T * K
  G = min(S * R, math.ceil(cfg.capacity * R))  # rows that a shard has room for
  rows_RD, sorted_R, order_R, back_R = _by_expert(x_BTD, ids_BTK)

  own_E = jnp.sum(sorted_R[:, None] == jnp.arange(E)[None, :], axis=0, dtype=jnp.int32)
  # From each shard (S) to each (s), by expert there.
  count_Sse = jax.lax.all_gather(own_E, AXIS).reshape(S, S, held)
  received_s = jnp.sum(count_Sse, axis=(0, 2))
  over = jnp.max(received_s) > G  # the same on all shards: all of them send nothing
  count_Sse = jnp.where(over, 0, count_Sse)
  me = jax.lax.axis_index(AXIS)
  there, back = _plans(jnp.sum(count_Sse, axis=2), me)
  got_GD = _exchanged(rows_RD, there, back, (R, G))
  # What arrives is in order of its shard, and of its expert within.
  end_X = jnp.cumsum(jnp.reshape(count_Sse[:, me], -1))
  at_G = jnp.searchsorted(end_X, jnp.arange(G), side='right')
  expert_G = jnp.where(at_G < S * held, at_G % held, held)
  out_GD = _worked(got_GD, expert_G, w, cfg, split)
  out_RD = _exchanged(out_GD, back, there, (G, R))
  jax.debug.callback(_refuse, over, jnp.max(received_s), room=G)
  out_RD = jnp.where(over, jnp.nan, out_RD)
  return experts.permuted(out_RD, back_R, order_R).reshape(B, T, K, D)


def _by_expert(x_BTD: jax.Array, ids_BTK: jax.Array) -> tuple[jax.Array, ...]:
  """(rows [R, D] sorted by expert, their experts, the order, its inverse)."""
  flat_R = ids_BTK.reshape(-1)
  order_R = jnp.argsort(flat_R, stable=True)
  back_R = jnp.argsort(order_R, stable=True)
  rows_RD = jnp.repeat(x_BTD.reshape(-1, x_BTD.shape[-1]), ids_BTK.shape[-1], axis=0)
  return experts.permuted(rows_RD, order_R, back_R), flat_R[order_R], order_R, back_R


def _worked(
  got_GD: jax.Array,
  expert_G: jax.Array,
  w: tuple[jax.Array, jax.Array, jax.Array, lora.Adapters],
  cfg: config_model.Moe,
  split: bool,
) -> jax.Array:
  """Received rows through their experts here; 0 where `expert_G` is none of them."""
  wg_EDF, wu_EDF, wd_EFD, adapters = w
  held = wg_EDF.shape[0]
  order_G = jnp.argsort(expert_G, stable=True)
  back_G = jnp.argsort(order_G, stable=True)
  sizes_E = jnp.sum(
    expert_G[:, None] == jnp.arange(held)[None, :], axis=0, dtype=jnp.int32
  )
  mine = p.Moe(got_GD, wg_EDF, wu_EDF, wd_EFD, lora=adapters)
  sorted_GD = experts.permuted(got_GD, order_G, back_G)
  out_GD = experts.permuted(
    experts.swiglu(sorted_GD, mine, sizes_E, cfg), back_G, order_G
  )
  out_GD = jnp.where(expert_G[:, None] < held, out_GD, 0.0)
  # F is split over `tensor`: a shard there has a part of each sum.
  return jax.lax.psum(out_GD, 'tensor') if split else out_GD


def _refuse(over: np.ndarray, count: np.ndarray, *, room: int) -> None:
  if over:
    raise ValueError(
      f'{int(count)} rows go to one shard of experts, {room} have room; raise '
      'model.moe.capacity (or balance the router)'
    )


@struct.dataclass
class _Plan:
  """What `ragged_all_to_all` is told, int32 [S] each."""

  input_offsets: jax.Array
  send_sizes: jax.Array
  output_offsets: jax.Array
  recv_sizes: jax.Array


def _plans(count_SS: jax.Array, me: jax.Array) -> tuple[_Plan, _Plan]:
  """There and back of shard `me`. `count_SS`: rows from each shard to each."""
  sent_SS = jnp.cumsum(count_SS, axis=1) - count_SS  # first place at the sender
  got_SS = jnp.cumsum(count_SS, axis=0) - count_SS  # first place at the receiver
  there = _Plan(sent_SS[me], count_SS[me], got_SS[me], count_SS[:, me])
  back = _Plan(got_SS[:, me], count_SS[:, me], sent_SS[:, me], count_SS[me])
  return there, back


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _exchanged(
  x_XD: jax.Array, plan: _Plan, back: _Plan, sizes: tuple[int, int]
) -> jax.Array:
  """Rows sent by a plan, into zeros; the gradient is sent by the plan back."""
  del back
  into = jnp.zeros((sizes[1], x_XD.shape[1]), x_XD.dtype)
  return jax.lax.ragged_all_to_all(
    x_XD,
    into,
    plan.input_offsets,
    plan.send_sizes,
    plan.output_offsets,
    plan.recv_sizes,
    axis_name=AXIS,
  )


def _exchanged_fwd(
  x_XD: jax.Array, plan: _Plan, back: _Plan, sizes: tuple[int, int]
) -> tuple[jax.Array, tuple[_Plan, _Plan]]:
  return _exchanged(x_XD, plan, back, sizes), (plan, back)


def _exchanged_bwd(sizes: tuple[int, int], plans: tuple, dy_XD: jax.Array) -> tuple:
  plan, back = plans
  return _exchanged(dy_XD, back, plan, sizes[::-1]), None, None


_exchanged.defvjp(_exchanged_fwd, _exchanged_bwd)


@jax.custom_vjp
def _placed(
  rows_RD: jax.Array, row_SC: jax.Array, inside_SC: jax.Array, slot_R: jax.Array
) -> jax.Array:
  """Rows put into their blocks, 0 elsewhere; the gradient takes them out again."""
  del slot_R
  return jnp.where(inside_SC[:, :, None], rows_RD[row_SC], 0.0)


def _placed_bwd(slot_R: jax.Array, d_SCD: jax.Array) -> tuple:
  return d_SCD.reshape(-1, d_SCD.shape[-1])[slot_R], None, None, None


_placed.defvjp(
  lambda x, row, inside, slot: (_placed(x, row, inside, slot), slot), _placed_bwd
)


@jax.custom_vjp
def _taken(
  home_SCD: jax.Array, slot_R: jax.Array, row_SC: jax.Array, inside_SC: jax.Array
) -> jax.Array:
  """Rows taken out of their blocks: the transpose of `_placed`."""
  del row_SC, inside_SC
  return home_SCD.reshape(-1, home_SCD.shape[-1])[slot_R]


def _taken_bwd(saved: tuple, d_RD: jax.Array) -> tuple:
  row_SC, inside_SC = saved
  return jnp.where(inside_SC[:, :, None], d_RD[row_SC], 0.0), None, None, None


_taken.defvjp(
  lambda home, slot, row, inside: (_taken(home, slot, row, inside), (row, inside)),
  _taken_bwd,
)
