"""Rows of the embedding, and their gradient without a scatter-add.

Scatter-add with repeated ids is slow on CPU and unordered on GPU (FACTS.md 6). A small
vocabulary's gradient is a one-hot product; a large one's is summed id by id in sorted
order (ops/row_gradient.py), whose cost does not grow with V. On a mesh every shard
looks up the ids that its part of the vocabulary has, and the parts are summed.
"""

import functools

import jax
import jax.numpy as jnp

from swe17.model import sharding
from swe17.ops import row_gradient

_SMALL = 4096  # ids up to which the one-hot product is quicker
_BLOCK = 256  # pairs summed at once


@jax.custom_vjp
def embed(table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  """Rows of the table, [B, T, D]."""
  if not sharding.current():
    return table_VD[token_BT]
  return _spread(_local_rows, 'VT', 'T')(table_VD, token_BT)


def _embed_fwd(
  table_VD: jax.Array, token_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return embed(table_VD, token_BT), (token_BT, table_VD)


def _embed_bwd(saved: tuple, grad_BTD: jax.Array) -> tuple[jax.Array, None]:
  token_BT, table_VD = saved
  V, dtype = table_VD.shape[0], table_VD.dtype
  if not sharding.current():
    return _sums(token_BT, grad_BTD, V).astype(dtype), None
  held = V // sharding.current()['tensor']
  sums = _spread(functools.partial(_local_sums, held=held), 'TT', 'V')
  return sums(token_BT, grad_BTD).astype(dtype), None


embed.defvjp(_embed_fwd, _embed_bwd)


def _sums(token_BT: jax.Array, grad_BTD: jax.Array, V: int) -> jax.Array:
  """The gradient of `V` rows, float32; ids outside of them are left out."""
  id_X = token_BT.reshape(-1)
  grad_XD = grad_BTD.reshape(id_X.shape[0], -1).astype(jnp.float32)
  if V <= _SMALL:
    return jax.nn.one_hot(id_X, V, dtype=jnp.float32).T @ grad_XD
  one_X, row_X = jnp.ones(id_X.shape), jnp.arange(id_X.shape[0])
  return row_gradient.row_sums(id_X, one_X, row_X, grad_XD, V, block=_BLOCK)


def _spread(fn, ins: str, outs: str):
  """`fn` of local arrays: T is split like tokens, V like the vocabulary."""
  spec = {'T': jax.P(sharding.BATCH, 'context'), 'V': jax.P('tensor')}
  return jax.shard_map(
    fn,
    in_specs=tuple(spec[letter] for letter in ins),
    out_specs=spec[outs],
    check_vma=False,
  )


def _local_rows(table_VD: jax.Array, token_BT: jax.Array) -> jax.Array:
  V = table_VD.shape[0]
  at_BT = token_BT - jax.lax.axis_index('tensor') * V
  mine_BT = (at_BT >= 0) & (at_BT < V)
  row_BTD = table_VD[jnp.where(mine_BT, at_BT, 0)]
  return jax.lax.psum(jnp.where(mine_BT[:, :, None], row_BTD, 0), 'tensor')


def _local_sums(token_BT: jax.Array, grad_BTD: jax.Array, *, held: int) -> jax.Array:
  at_BT = token_BT - jax.lax.axis_index('tensor') * held
  sum_VD = _sums(jnp.where(at_BT >= 0, at_BT, held), grad_BTD, held)
  return jax.lax.psum(sum_VD, (*sharding.BATCH, 'context'))
