"""Muon for matrices, AdamW for the rest, by an explicit table of every parameter.

  M <- beta M + (1 - beta) G, Nesterov;  X = M / |M|_F;  5 times: A = X X^T,
  X <- a X + (b A + c A^2) X, (a, b, c) = (3.4445, -4.7750, 2.0315);
  update = -lr * consistent_rms * sqrt(max(fan_in, fan_out)) * X

(Muon, arXiv:2502.16982; the scale lets an AdamW learning rate transfer.) Which axes of
which leaf form a matrix is said here, leaf by leaf: a rule by shape would give the
embedding to Muon, or fuse what must stay apart (a layer, an expert, a head where
configured; Q, K and V). A parameter that the table does not name stops the run.

With adapters (model/lora.py) they alone train, and no state is held for the base. Both
of their matrices get AdamW. That is a default of ours: it is what adapters are usually
trained with, and Muon would orthogonalise A and B each by itself, though what changes
the model is their product.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from swe17 import config
from swe17.model import lora, sharding

ADAMW = 'adamw'
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclasses.dataclass(frozen=True)
class Matrix:
  """The axes of a leaf that are a matrix's rows (fan in) and columns (fan out).

  All other axes (layer, expert) stack matrices, and so does `head` with
  `optim.muon_per_head`. `split` names the axes of one layer's experts, as params.py
  does: on a mesh these are exchanged a layer at a time.
  """

  rows: tuple[int, ...]
  columns: tuple[int, ...]
  head: int | None = None
  split: tuple[str, ...] = ()

  def axes(self, per_head: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows, columns) of one matrix."""
    head = self.head if per_head else None
    rows = tuple(a for a in self.rows if a != head)
    return rows, tuple(a for a in self.columns if a != head)


Table = Mapping[str, Matrix | str]

_IN_OUT = Matrix(rows=(1,), columns=(2,))
_TO_HEADS = Matrix(rows=(1,), columns=(2, 3), head=2)
_FROM_HEADS = Matrix(rows=(1, 2), columns=(3,), head=1)
# Axis 1 is the expert's.
_TO_FFN = Matrix((2,), (3,), split=('experts', 'embed', 'expert_ffn'))
_FROM_FFN = Matrix((2,), (3,), split=('experts', 'expert_ffn', 'embed'))

# One line a parameter of a stack of layers. Axis 0 (layer or offset) stacks matrices.
_LAYER: Table = {
  'attn_norm_ND': ADAMW,
  'mlp_norm_ND': ADAMW,
  'attn/wq_NDQH': _TO_HEADS,
  'attn/wk_NDCH': _TO_HEADS,
  'attn/wv_NDCH': _TO_HEADS,
  'attn/wo_NQHD': _FROM_HEADS,
  'attn/bq_NQH': ADAMW,
  'attn/bk_NCH': ADAMW,
  'attn/bv_NCH': ADAMW,
  'attn/q_norm_NH': ADAMW,
  'attn/k_norm_NH': ADAMW,
  'attn/wq_down_NDA': _IN_OUT,
  'attn/q_norm_NA': ADAMW,
  'attn/wq_NAQH': _TO_HEADS,
  'attn/wkv_down_NDL': _IN_OUT,
  'attn/wk_rope_NDr': _IN_OUT,
  'attn/kv_norm_NL': ADAMW,
  'attn/wk_NLQP': _TO_HEADS,
  'attn/wv_NLQU': _TO_HEADS,
  'attn/wo_NQUD': _FROM_HEADS,
  'mlp/wg_NDF': _IN_OUT,
  'mlp/wu_NDF': _IN_OUT,
  'mlp/wd_NFD': _IN_OUT,
  'mlp/router_NDE': ADAMW,
  'mlp/bias_NE': ADAMW,
  'mlp/wg_NEDF': _TO_FFN,
  'mlp/wu_NEDF': _TO_FFN,
  'mlp/wd_NEFD': _FROM_FFN,
  'mlp/shared/wg_NDF': _IN_OUT,
  'mlp/shared/wu_NDF': _IN_OUT,
  'mlp/shared/wd_NFD': _IN_OUT,
}

# Both matrices of every adapter.
_ADAPTERS: Table = {
  f'{at}/lora/{name}/{matrix}': ADAMW
  for at, names in (
    ('attn', 'q k v o q_a q_b kv_a kv_b'),
    ('mlp', 'gate up down expert_gate expert_up expert_down'),
    ('mlp/shared', 'gate up down'),
  )
  for name in names.split()
  for matrix in ('a_NIr', 'b_NrO')
}

TABLE: Table = {
  'embed_VD': ADAMW,
  'head_VD': ADAMW,
  'prev_JDD': _IN_OUT,
  'norm_D': ADAMW,
  **{
    f'{stack}/{leaf}': row
    for stack in ('dense', 'moe')
    for leaf, row in {**_LAYER, **_ADAPTERS}.items()
  },
}


class MuonState(NamedTuple):
  """Steps taken (int32) and momentum M, float32 like the parameters."""

  count: jax.Array
  mu: optax.Updates


def name(path: tuple) -> str:
  """'dense/attn/wq_NDQH' of a tree path."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _row(table: Table, path: tuple, leaf: jax.Array) -> Matrix | str:
  key = name(path)
  if key not in table:
    raise ValueError(
      f'parameter {key!r} is not in the optimiser table; add it to '
      'learner/optimizer.py, as Matrix with its axes or as ADAMW'
    )
  row = table[key]
  if isinstance(row, Matrix) and max(row.rows + row.columns) >= len(leaf.shape):
    raise ValueError(f'parameter {key!r}: got shape {leaf.shape}, want axes of {row}')
  return row


def labels(params: optax.Params, table: Table = TABLE) -> optax.Params:
  """'muon' or 'adamw' at every leaf."""

  def label(path: tuple, leaf: jax.Array) -> str:
    return 'adamw' if _row(table, path, leaf) == ADAMW else 'muon'

  return jax.tree_util.tree_map_with_path(label, params)


def _refuse_low_precision(params: optax.Params) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if leaf.dtype != jnp.float32:
      raise ValueError(
        f'parameter {name(path)!r}: got a {leaf.dtype} master, want float32 (values '
        'are rounded for the forward pass, never in the optimiser)'
      )


def schedule(cfg: config.Optim) -> optax.Schedule:
  """Linear warm-up from lr / warmup, then constant."""
  if cfg.warmup <= 1:
    return optax.constant_schedule(cfg.lr)
  return optax.linear_schedule(cfg.lr / cfg.warmup, cfg.lr, cfg.warmup - 1)


def newton_schulz(x: jax.Array, steps: int) -> jax.Array:
  """Near-orthogonal factor of one matrix or a stack, [..., rows, columns]: U V^T.

  Five steps leave singular values within about .7 and 1.2 (arXiv:2502.16982, eq. 2). A
  zero matrix stays zero. The size of `x` does not matter, however small.
  """
  a, b, c = COEFFICIENTS
  wide = x.shape[-2] <= x.shape[-1]
  x = x if wide else jnp.swapaxes(x, -1, -2)  # A is the smaller of the two products
  # The largest entry first: squares of a tiny gradient would vanish in float32.
  x = _divided(x, jnp.max(jnp.abs(x), axis=(-1, -2), keepdims=True))
  x = _divided(x, jnp.sqrt(jnp.sum(x * x, axis=(-1, -2), keepdims=True)))
  for _ in range(steps):
    s = x @ jnp.swapaxes(x, -1, -2)
    x = a * x + (b * s + c * (s @ s)) @ x
  return x if wide else jnp.swapaxes(x, -1, -2)


def _divided(x: jax.Array, by: jax.Array) -> jax.Array:
  return x / jnp.where(by == 0, 1.0, by)


def _stacked(x: jax.Array, axes: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
  """A leaf as [..., rows, columns], the axes that stack matrices as they are."""
  rows, columns = axes
  rest = tuple(a for a in range(x.ndim) if a not in rows + columns)
  fan_in = math.prod(x.shape[a] for a in rows)
  fan_out = math.prod(x.shape[a] for a in columns)
  lead = [x.shape[a] for a in rest]
  return x.transpose(rest + rows + columns).reshape(*lead, fan_in, fan_out)


def _unstacked(
  x: jax.Array, axes: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...]
) -> jax.Array:
  rows, columns = axes
  rest = tuple(a for a in range(len(shape)) if a not in rows + columns)
  order = rest + rows + columns
  back = tuple(order.index(a) for a in range(len(shape)))
  return x.reshape([shape[a] for a in order]).transpose(back)


def orthogonalise(
  stacks: list[jax.Array],
  cfg: config.Optim,
  splits: Sequence[tuple[str, ...]] | None = None,
) -> list[jax.Array]:
  """Newton-Schulz over every matrix of every stack [..., rows, columns].

  On CPU one matrix at a time: a batched product is slower there, and the stack is a
  copy. With `cfg.muon_stack`, matrices of one shape (up to transposition) from all
  leaves are one batched product: few large calls, what an accelerator wants. On a mesh
  each leaf is a stack of its own, whose matrices are dealt to all devices: no product
  then needs another device. `splits`: of each stack, `Matrix.split`.
  """
  splits = [()] * len(stacks) if splits is None else splits
  if sharding.current():
    return [_dealt(x, cfg.ns_steps, s) for x, s in zip(stacks, splits, strict=True)]
  if not cfg.muon_stack:
    one = functools.partial(newton_schulz, steps=cfg.ns_steps)
    return [
      jax.lax.map(one, x.reshape(-1, *x.shape[-2:])).reshape(x.shape) for x in stacks
    ]
  flat = [x.reshape(-1, *x.shape[-2:]) for x in stacks]
  wide = [x if x.shape[1] <= x.shape[2] else jnp.swapaxes(x, 1, 2) for x in flat]
  members: dict[tuple[int, ...], list[int]] = {}
  for i, x in enumerate(wide):
    members.setdefault(x.shape[1:], []).append(i)
  for ids in members.values():
    done = newton_schulz(jnp.concatenate([wide[i] for i in ids]), cfg.ns_steps)
    at = 0
    for i in ids:
      wide[i] = done[at : at + flat[i].shape[0]]
      at += flat[i].shape[0]
  return [
    (y if x.shape == y.shape else jnp.swapaxes(y, 1, 2)).reshape(of.shape)
    for x, y, of in zip(flat, wide, stacks, strict=True)
  ]


def _dealt(x: jax.Array, steps: int, split: tuple[str, ...]) -> jax.Array:
  """`newton_schulz` with whole matrices on a device each, of the mesh that is set.

  Where a stack does not go round evenly, zeros fill it up (60 layers on 64 devices):
  without them the partitioner gathers the whole stack on every device. In and out,
  parts of all matrices are exchanged for all of some matrices (all-to-all).
  """
  devices = math.prod(sharding.current().values())
  over = 'matrices' if x.ndim == 3 else 'expert_matrices'
  if split and x.shape[1] % devices == 0:  # experts, which are spread already

    def layer(x: jax.Array) -> jax.Array:
      mine = sharding.constrain(sharding.constrain(x, *split), over, '', '')
      return sharding.constrain(newton_schulz(mine, steps), *split)

    # One layer's copies at a time. Said outside too: else the compiler would exchange
    # all layers before the loop, the whole stack at once.
    x = sharding.constrain(x, 'layer', *split)
    return sharding.constrain(jax.lax.map(layer, x), 'layer', *split)
  first = jnp.moveaxis(x, -3, 0)
  flat = first.reshape(-1, *x.shape[-2:])
  extra = -flat.shape[0] % devices
  full = jnp.pad(flat, ((0, extra), (0, 0), (0, 0)))
  done = newton_schulz(sharding.dealt(full, over), steps)
  # Back to parts of all matrices before the zeros are cut off.
  done = sharding.gathered(done, over, '', 'embed', '')[: flat.shape[0]]
  return jnp.moveaxis(done.reshape(first.shape), 0, -3)


def scale_by_muon(cfg: config.Optim, table: Table) -> optax.GradientTransformation:
  """Momentum, Nesterov as in optax, orthogonalised matrix by matrix, RMS-matched."""

  def init(params: optax.Params) -> MuonState:
    return MuonState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

  def update(
    updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
  ) -> tuple[optax.Updates, optax.OptState]:
    del params
    assert isinstance(state, MuonState)
    beta, count = cfg.muon_beta, state.count + 1
    mu = optax.tree.update_moment(updates, state.mu, beta, 1)
    ahead = jax.tree.map(
      lambda m, g: beta * m + (1 - beta) * g,
      optax.tree.bias_correction(mu, beta, count + 1),
      optax.tree.bias_correction(updates, beta, count),
    )
    paths, tree = jax.tree_util.tree_flatten_with_path(ahead)
    axes, splits = [], []
    for path, leaf in paths:
      row = _row(table, path, leaf)
      assert isinstance(row, Matrix), name(path)
      axes.append(row.axes(cfg.muon_per_head))
      splits.append(row.split)
    stacks = [_stacked(x, a) for (_, x), a in zip(paths, axes, strict=True)]
    turned = orthogonalise(stacks, cfg, splits)
    done = [
      _unstacked(cfg.consistent_rms * math.sqrt(max(y.shape[-2:])) * y, a, x.shape)
      for y, a, (_, x) in zip(turned, axes, paths, strict=True)
    ]
    return jax.tree.unflatten(tree, done), MuonState(count, mu)

  return optax.GradientTransformation(init, update)


def make(
  cfg: config.Optim, schedule: optax.Schedule, table: Table = TABLE
) -> optax.GradientTransformationExtraArgs:
  """The transformation for what trains of a parameter tree (`lora.trained`).

  `init` takes the whole tree or that part of it, `update` the part.

  Raises (from `init`):
    ValueError: a parameter that `table` does not name, whose axes do not fit its row,
      or that is not float32.
  """
  muon = optax.chain(
    scale_by_muon(cfg, table),
    optax.add_decayed_weights(cfg.weight_decay),
    optax.scale_by_learning_rate(schedule),
  )
  adamw = optax.adamw(
    schedule,
    b1=cfg.adam_b1,
    b2=cfg.adam_b2,
    eps=cfg.adam_eps,
    weight_decay=cfg.weight_decay,
  )

  def checked(params: optax.Params) -> optax.Params:
    _refuse_low_precision(params)
    return labels(params, table)

  made = optax.partition({'muon': muon, 'adamw': adamw}, checked)
  return optax.GradientTransformationExtraArgs(
    lambda params: made.init(lora.trained(params)), made.update
  )


def rms(updates: optax.Updates) -> jax.Array:
  """Root mean square over all elements of an update, float32 scalar."""
  leaves = jax.tree.leaves(updates)
  total = sum(jnp.sum(jnp.square(x)) for x in leaves)
  return jnp.sqrt(total / float(sum(x.size for x in leaves)))  # beyond int32
