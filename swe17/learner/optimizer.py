"""Muon for matrices, AdamW for the rest, by an explicit table of every parameter.

  M <- beta M + (1 - beta) G, Nesterov;  X = M / |M|_F;  5 times: A = X X^T,
  X <- a X + (b A + c A^2) X, (a, b, c) = (3.4445, -4.7750, 2.0315);
  update = -lr * consistent_rms * sqrt(max(fan_in, fan_out)) * X

(Muon, arXiv:2502.16982; the scale lets an AdamW learning rate transfer.) The orthogonal
factor is optax's; which axes of which leaf form a matrix is said here, leaf by leaf,
because optax's own rule would give the embedding to Muon and stacked weights to Adam. A
parameter that the table does not name stops the run.
"""

from collections.abc import Sequence
import math

import jax
import jax.numpy as jnp
import optax

from swe17 import config

Muon = optax.contrib.MuonDimensionNumbers
ADAMW = 'adamw'

# Axis 0 (layer or offset) stacks matrices. Q, K and V are never fused.
TABLE: dict[str, Muon | str] = {
  'embed_VD': ADAMW,
  'prev_JDD': Muon(reduction_axis=1, output_axis=2),
  'norm_D': ADAMW,
  'layers/attn_norm_ND': ADAMW,
  'layers/mlp_norm_ND': ADAMW,
  'layers/wq_NDQH': Muon(reduction_axis=1, output_axis=(2, 3)),
  'layers/wk_NDCH': Muon(reduction_axis=1, output_axis=(2, 3)),
  'layers/wv_NDCH': Muon(reduction_axis=1, output_axis=(2, 3)),
  'layers/wo_NQHD': Muon(reduction_axis=(1, 2), output_axis=3),
  'layers/wg_NDF': Muon(reduction_axis=1, output_axis=2),
  'layers/wu_NDF': Muon(reduction_axis=1, output_axis=2),
  'layers/wd_NFD': Muon(reduction_axis=1, output_axis=2),
}


def name(path: tuple) -> str:
  """'layers/wq_NDQH' of a tree path."""
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _row(path: tuple) -> Muon | str:
  key = name(path)
  if key not in TABLE:
    raise ValueError(
      f'parameter {key!r} is not in the optimiser table; add it to '
      'learner/optimizer.py, as Muon with its matrix axes or as AdamW'
    )
  return TABLE[key]


def labels(params: optax.Params) -> optax.Params:
  """'muon' or 'adamw' at every leaf."""

  def label(path: tuple, _: jax.Array) -> str:
    return 'adamw' if _row(path) == ADAMW else 'muon'

  return jax.tree_util.tree_map_with_path(label, params)


def schedule(cfg: config.Optim) -> optax.Schedule:
  """Linear warm-up from lr / warmup, then constant."""
  if cfg.warmup <= 1:
    return optax.constant_schedule(cfg.lr)
  return optax.linear_schedule(cfg.lr / cfg.warmup, cfg.lr, cfg.warmup - 1)


def make(
  cfg: config.Optim, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
  """The transformation for a whole parameter tree."""

  def dims(updates: optax.Updates) -> optax.Updates:
    return jax.tree_util.tree_map_with_path(lambda path, _: _row(path), updates)

  def match_rms(updates: optax.Updates, _: optax.Params | None) -> optax.Updates:
    def scale(path: tuple, x: jax.Array) -> jax.Array:
      row = _row(path)
      assert isinstance(row, Muon), name(path)
      fan = max(_size(x, row.reduction_axis), _size(x, row.output_axis))
      return x * (cfg.consistent_rms * math.sqrt(fan))

    return jax.tree_util.tree_map_with_path(scale, updates)

  muon = optax.chain(
    optax.contrib.scale_by_muon(
      ns_steps=cfg.ns_steps, beta=cfg.muon_beta, weight_dimension_numbers=dims
    ),
    optax.stateless(match_rms),
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
  return optax.partition({'muon': muon, 'adamw': adamw}, labels)


def _size(x: jax.Array, axes: int | Sequence[int]) -> int:
  axes = (axes,) if isinstance(axes, int) else axes
  return math.prod(x.shape[a] for a in axes)


def rms(updates: optax.Updates) -> jax.Array:
  """Root mean square over all elements of an update, float32 scalar."""
  leaves = jax.tree.leaves(updates)
  total = sum(jnp.sum(jnp.square(x)) for x in leaves)
  return jnp.sqrt(total / sum(x.size for x in leaves))
