"""The learner's step: pure functions, jitted where they are wired.

  loss(params, micro) -> (sum, pieces)      update(state, batch) -> (state, metrics)

The forward pass computes from bf16-rounded masters, the very values that samplers hold;
the gradient at them is applied to the masters (straight through). Gradients of
micro-batches are summed, then divided once by the batch's one denominator.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, cast

from flax import struct
import jax
import jax.numpy as jnp
import optax

from swe17 import config
from swe17.learner import optimizer
from swe17.learner import state as st
from swe17.model import params as p
from swe17.model import transformer
from swe17.ops import divergence, logprob, policy_loss

# (params, one micro-batch [B, T]) -> (loss summed over tokens, additive pieces)
LossFn = Callable[[p.Params, st.Batch], tuple[jax.Array, Any]]


@struct.dataclass
class Pieces:
  """Additive statistics of trained tokens."""

  divergence: divergence.Sums
  kept_entropy: jax.Array
  kept_mass: jax.Array
  fresh: jax.Array  # tokens of segments sampled at the learner's present version
  k3_fresh: jax.Array


def _hidden_logits(params: p.Params, micro: st.Batch, cfg: config.Model) -> jax.Array:
  hidden_BTD = transformer.apply(
    params, micro.token_MBT, micro.position_MBT, micro.segment_MBT, cfg=cfg
  )
  return transformer.logits(params, hidden_BTD)


def policy_loss_fn(
  params: p.Params, micro: st.Batch, *, model: config.Model, cfg: config.Loss
) -> tuple[jax.Array, Pieces]:
  """Policy-gradient loss of one micro-batch, summed over its trained tokens."""
  scores = logprob.score(
    _hidden_logits(params, micro, model),
    micro.target_MBT,
    micro.kept_ids_MBTK,
    micro.temperature_MBT,
    replay=cfg.replay,
  )
  mask = micro.mask_MBT
  loss = policy_loss.reinforce_tis(
    scores.logp_BT, micro.mu_logp_MBT, micro.adv_MBT, mask, cap=cfg.tis_cap
  )
  # A recorded set of one is a token without signal; no set is a whole vocabulary.
  size_BT = jnp.sum(micro.kept_ids_MBTK >= 0, axis=-1)
  fresh_BT = mask & micro.fresh_MBT
  same = divergence.sums(
    scores.logp_BT, micro.mu_logp_MBT, fresh_BT, fresh_BT, cap=cfg.tis_cap
  )
  pieces = Pieces(
    divergence=divergence.sums(
      scores.logp_BT, micro.mu_logp_MBT, mask, size_BT != 1, cap=cfg.tis_cap
    ),
    kept_entropy=jnp.sum(policy_loss.masked(scores.kept_entropy_BT, mask)),
    kept_mass=jnp.sum(policy_loss.masked(scores.kept_mass_BT, mask)),
    fresh=same.tokens,
    k3_fresh=same.k3,
  )
  return loss, pieces


def imitation_loss_fn(
  params: p.Params, micro: st.Batch, *, model: config.Model
) -> tuple[jax.Array, jax.Array]:
  """Weighted cross-entropy of one micro-batch, and the trained tokens' share of it."""
  logits_BTV = _hidden_logits(params, micro, model)
  z_BT = optax.softmax_cross_entropy(
    logits_BTV, jax.nn.one_hot(micro.target_MBT, logits_BTV.shape[-1])
  )
  weight_BT = micro.adv_MBT
  trained = jnp.sum(policy_loss.masked(z_BT, micro.mask_MBT))
  return jnp.sum(jnp.where(weight_BT > 0, z_BT * weight_BT, 0.0)), trained


def _add(a: Any, b: Any) -> Any:
  if isinstance(a, Pieces):
    total = jax.tree.map(jnp.add, a, b)
    return total.replace(divergence=divergence.add(a.divergence, b.divergence))
  return jax.tree.map(jnp.add, a, b)


def accumulate(
  loss_fn: LossFn, params: p.Params, batch: st.Batch
) -> tuple[jax.Array, Any, p.Params]:
  """Loss, pieces and gradient summed over the `batch.micro` leading micro-batches."""
  arrays = {k: v for k, v in vars(batch).items() if k not in ('micro', 'denominator')}

  def one(i: jax.Array) -> tuple[jax.Array, Any, p.Params]:
    micro = dataclasses.replace(batch, **{k: v[i] for k, v in arrays.items()})
    (loss, pieces), grad = jax.value_and_grad(loss_fn, has_aux=True)(params, micro)
    return loss, pieces, grad

  def body(i: jax.Array, total: tuple) -> tuple:
    new = one(i)
    return tuple(_add(a, b) for a, b in zip(total, new, strict=True))

  shapes = jax.eval_shape(one, jnp.zeros((), jnp.int32))
  zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
  return jax.lax.fori_loop(0, batch.micro, body, zero)


def apply_gradient(
  state: st.State, grad: p.Tree, tx: optax.GradientTransformation
) -> tuple[st.State, dict[str, jax.Array]]:
  """One optimiser step; a gradient that is zero or not finite changes nothing.

  Momentum would move the weights where no trained token asks for it.
  """
  norm = optax.tree.norm(grad)
  ok = jnp.isfinite(norm) & (norm > 0)
  params: p.Tree = state.params
  updates, opt = tx.update(grad, state.opt, params)
  moved = cast(p.Params, optax.apply_updates(params, updates))
  stepped = st.State(moved, opt, state.step + 1)
  keep = dataclasses.replace(state, step=state.step + 1)
  new = jax.tree.map(lambda a, b: jnp.where(ok, a, b), stepped, keep)
  return new, {
    'grad_norm': norm,
    'update_rms': optimizer.rms(updates),
    'skipped_steps': 1 - ok.astype(jnp.int32),
  }


def update(
  state: st.State,
  batch: st.Batch,
  *,
  model: config.Model,
  loss: config.Loss,
  tx: optax.GradientTransformation,
) -> tuple[st.State, dict[str, jax.Array]]:
  """One policy-gradient step. Donate `state`."""
  fn = functools.partial(policy_loss_fn, model=model, cfg=loss)
  total, pieces, grad = accumulate(fn, p.rounded(state.params), batch)
  grad = jax.tree.map(lambda g: g / batch.denominator, grad)
  state, metrics = apply_gradient(state, grad, tx)
  tokens = pieces.divergence.tokens
  return state, {
    **metrics,
    **divergence.finish(pieces.divergence),
    'loss': total / batch.denominator,
    'kept_entropy': pieces.kept_entropy / tokens,
    'kept_mass': pieces.kept_mass / tokens,
    'k3_same_version': pieces.k3_fresh / pieces.fresh,
    'fresh_count': pieces.fresh,
    'trained_tokens': tokens,
  }


def imitate(
  state: st.State,
  batch: st.Batch,
  *,
  model: config.Model,
  tx: optax.GradientTransformation,
) -> tuple[st.State, dict[str, jax.Array]]:
  """One cross-entropy step on scripted episodes. Donate `state`."""
  fn = functools.partial(imitation_loss_fn, model=model)
  total, trained, grad = accumulate(fn, p.rounded(state.params), batch)
  grad = jax.tree.map(lambda g: g / batch.denominator, grad)
  state, metrics = apply_gradient(state, grad, tx)
  return state, {
    **metrics,
    'loss': total / batch.denominator,
    'trained_loss': trained / jnp.sum(batch.mask_MBT),
  }
