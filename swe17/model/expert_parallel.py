"""Experts spread over a mesh axis: rows go to where their expert is, and come back.

Under `shard_map` every shard holds rows of its own and E / S of the experts. It sorts
its rows by expert, and with that by shard; sends each shard its part (`all_to_all`);
works on what it received with the same grouped products (model/experts.py); sends back.

`all_to_all` moves blocks of one static size, `capacity` times a shard's fair part. More
rows than that for one shard is an error, raised on the host, never a dropped row: the
result is NaN until it arrives there. Where the backend has `ragged_all_to_all` (TPU,
GPU) nothing is padded on the way, and the bound is that of the receiver alone.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from swe17 import config_model
from swe17.model import experts, sharding
from swe17.model import params as p

AXIS = 'expert'


def spread(
  x_BTD: jax.Array, ids_BTK: jax.Array, moe: p.Moe, cfg: config_model.Moe
) -> jax.Array:
  """Each token through each of its K experts, [B, T, K, D], on the mesh that is set.

  B is split over the axes of the batch, T over `context`, E over `expert`, F over
  `tensor`.
  """
  tokens, F = jax.P(sharding.BATCH, 'context'), 'tensor'
  body = functools.partial(_body, cfg=cfg, E=moe.wg_NEDF.shape[0])
  return jax.shard_map(
    body,
    in_specs=(tokens, tokens, *(jax.P(AXIS, None, F),) * 2, jax.P(AXIS, F)),
    out_specs=tokens,
    check_vma=False,
  )(x_BTD, ids_BTK, moe.wg_NEDF, moe.wu_NEDF, moe.wd_NEFD)


def _body(
  x_BTD: jax.Array,
  ids_BTK: jax.Array,
  wg_EDF: jax.Array,
  wu_EDF: jax.Array,
  wd_EFD: jax.Array,
  *,
  cfg: config_model.Moe,
  E: int,
) -> jax.Array:
  """One shard's rows there and back. Arrays are experts."""
  (B, T, K), D = ids_BTK.shape, x_BTD.shape[-1]
  held = wg_EDF.shape[0]
  S, R = E // held, B * T * K
  C = min(R, math.ceil(cfg.capacity * R / S))  # rows of a block
  flat_R = ids_BTK.reshape(-1)
  order_R = jnp.argsort(flat_R, stable=True)
  back_R = jnp.argsort(order_R, stable=True)
  sorted_R = flat_R[order_R]
  rows_RD = experts.permuted(
    jnp.repeat(x_BTD.reshape(-1, D), K, axis=0), order_R, back_R
  )

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
  order_G = jnp.argsort(expert_G, stable=True)
  back_G = jnp.argsort(order_G, stable=True)
  sizes_E = jnp.sum(
    expert_G[:, None] == jnp.arange(held)[None, :], axis=0, dtype=jnp.int32
  )
  mine = p.Moe(router_NDE=x_BTD, wg_NEDF=wg_EDF, wu_NEDF=wu_EDF, wd_NEFD=wd_EFD)
  sorted_GD = experts.permuted(got_GD, order_G, back_G)
  out_GD = experts.permuted(
    experts.swiglu(sorted_GD, mine, sizes_E, cfg), back_G, order_G
  )
  out_GD = jnp.where(expert_G[:, None] < held, out_GD, 0.0)
  if sharding.current()['tensor'] > 1:  # F is split: a shard has a part of each sum
    out_GD = jax.lax.psum(out_GD, 'tensor')
  home_SCD = swap(out_GD.reshape(S, C, D))
  out_RD = _taken(home_SCD, slot_R, row_SC, inside_SC)
  out_RD = jnp.where(over, jnp.nan, out_RD)
  jax.debug.callback(_refuse, over, jnp.max(count_S), C=C)
  return experts.permuted(out_RD, back_R, order_R).reshape(B, T, K, D)


def _refuse(over: np.ndarray, count: np.ndarray, *, C: int) -> None:
  if over:
    raise ValueError(
      f'{int(count)} rows go to one shard of experts, {C} have room; raise '
      'model.moe.capacity (or balance the router)'
    )


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
