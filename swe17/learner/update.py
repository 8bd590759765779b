"""The learner's step: pure functions, jitted where they are wired.

  loss(params, micro) -> (sum, pieces)      update(state, batch) -> (state, metrics)

The forward pass computes from bf16-rounded masters, the very values that samplers hold;
the gradient at them is applied to the masters (straight through). Gradients of
micro-batches are summed, then divided once by the batch's one denominator.
"""

import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import optax

from swe17 import config
from swe17.learner import accumulate as sums
from swe17.learner import objectives, optimizer, replay
from swe17.learner import state as st
from swe17.model import lora, sharding, transformer
from swe17.model import params as p
from swe17.ops import (
  divergence,
  head,
  head_sharding,
  logprob,
  masking,
  vocab_head,
)

LossFn = sums.LossFn


@struct.dataclass
class Pieces:
  """Additive statistics of trained tokens."""

  divergence: divergence.Sums
  episodes: divergence.Episodes
  kept_entropy: jax.Array
  kept_mass: jax.Array
  kept_mass_count: jax.Array  # tokens it was measured on
  fresh: jax.Array  # tokens of segments sampled at the learner's present version
  k3_fresh: jax.Array
  asked: jax.Array  # tokens with an advantage that is not 0
  silenced: jax.Array  # of those: clip, band or mask leave them no gradient
  masked: jax.Array  # tokens that the sequence mask leaves out
  # To the reference, summed over sampled tokens; None without one.
  reference_k1: jax.Array | None = None
  reference_k3: jax.Array | None = None
  routing: replay.Routing | None = None  # None without experts


def _hidden(
  params: p.Params,
  micro: st.Batch,
  cfg: config.Model,
  recorded_BTNK: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """Hidden states, and the routers' own choice (None without experts)."""
  place = micro.token_MBT, micro.position_MBT, micro.segment_MBT
  return transformer.apply_routed(
    params, *place, recorded_BTNK, cfg=cfg, prefix_BT=micro.prefix_MBT
  )


def _scores(
  hidden_BTD: jax.Array, unembed_VD: jax.Array, micro: st.Batch, cfg: config.Loss
) -> logprob.Scores:
  return head.score(
    hidden_BTD,
    unembed_VD,
    micro.target_MBT,
    micro.kept_ids_MBTK,
    micro.temperature_MBT,
    micro.mask_MBT,
    replay=cfg.replay,
    whole=True,  # tokens may come from samplers with a filter and without
    plan=head.Plan(shard=_shard()),
  )


def _shard() -> head_sharding.Shard | None:
  """How the heads are split on the mesh that is set, if one is."""
  if not sharding.current():
    return None
  on = jax.sharding.get_abstract_mesh()
  return head_sharding.Shard(on, vocab='tensor', rows=(*sharding.BATCH, 'context'))


def _full_logp(
  hidden_BTD: jax.Array, unembed_VD: jax.Array, micro: st.Batch
) -> jax.Array:
  """Log-probability over the whole vocabulary, 0 where masked, no gradient."""
  logp_X, _ = vocab_head.log_prob(
    jax.lax.stop_gradient(hidden_BTD).reshape(-1, hidden_BTD.shape[-1]),
    jax.lax.stop_gradient(unembed_VD),
    micro.target_MBT.reshape(-1),
    micro.temperature_MBT.reshape(-1),
    micro.mask_MBT.reshape(-1),
    plan=vocab_head.Plan(),
    shard=_shard(),
  )
  return logp_X.reshape(micro.target_MBT.shape)


def policy_loss_fn(
  params: p.Params,
  micro: st.Batch,
  *,
  model: config.Model,
  cfg: config.Loss,
  J: int = 0,
) -> tuple[jax.Array, Pieces]:
  """Policy-gradient loss of one micro-batch, summed over its trained tokens.

  `J` bounds the batch's episodes; with 0 nothing is summed by episode.
  """
  hidden_BTD, top_BTNK = _hidden(params, micro, model, replay.recorded(micro))
  scores = _scores(hidden_BTD, params.unembed_VD, micro, cfg)
  logp_BT, mu_logp_BT, mask = scores.logp_BT, micro.mu_logp_MBT, micro.mask_MBT
  trained = objectives.trained(cfg, micro)  # by the advantages of outcomes
  to_reference, routing = {}, None
  if top_BTNK is not None:
    routing = replay.statistics(top_BTNK, micro, model.moe.experts)
  if cfg.kl_weight:
    full_logp_BT = _full_logp(hidden_BTD, params.unembed_VD, micro)
    found = divergence.sums(micro.ref_logp_MBT, full_logp_BT, mask, mask, cap=1.0)
    to_reference = {'reference_k1': found.k1, 'reference_k3': found.k3}
    micro = objectives.penalised(cfg, micro, full_logp_BT)
  loss = objectives.objective(cfg)(logp_BT, micro, trained)
  # A recorded set of one is a token without signal; no set is a whole vocabulary.
  size_BT = jnp.sum(micro.kept_ids_MBTK >= 0, axis=-1)
  fresh_BT, measured_BT = mask & micro.fresh_MBT, mask & scores.measured_BT
  same = divergence.sums(logp_BT, mu_logp_BT, fresh_BT, fresh_BT, cap=cfg.tis_cap)
  pieces = Pieces(
    divergence=divergence.sums(
      logp_BT, mu_logp_BT, mask, size_BT != 1, cap=cfg.tis_cap
    ),
    episodes=divergence.episodes(
      logp_BT,
      mu_logp_BT,
      mask,
      micro.segment_MBT,
      micro.episode_MBT,
      P=st.SEGMENTS_A_ROW,
      J=J,
    ),
    kept_entropy=jnp.sum(masking.masked(scores.kept_entropy_BT, mask)),
    kept_mass=jnp.sum(masking.masked(scores.kept_mass_BT, measured_BT)),
    kept_mass_count=jnp.sum(measured_BT).astype(jnp.float32),
    fresh=same.tokens,
    k3_fresh=same.k3,
    asked=jnp.sum(masking.masked(micro.adv_MBT, mask) != 0).astype(jnp.float32),
    silenced=objectives.silenced(cfg, logp_BT, micro, trained),
    masked=jnp.sum(mask & ~trained).astype(jnp.float32),
    **to_reference,
    routing=routing,
  )
  return loss, pieces


def _logp(
  params: p.Params, micro: st.Batch, *, model: config.Model, cfg: config.Loss
) -> jax.Array:
  hidden_BTD, _ = _hidden(params, micro, model, replay.recorded(micro))
  return _scores(hidden_BTD, params.unembed_VD, micro, cfg).logp_BT


def _reference_logp(
  reference: p.Params, micro: st.Batch, *, model: config.Model
) -> jax.Array:
  # By its own routers: what was recorded is another policy's choice.
  hidden_BTD, _ = _hidden(reference, micro, model)
  return _full_logp(hidden_BTD, reference.unembed_VD, micro)


def imitation_loss_fn(
  params: p.Params, micro: st.Batch, *, model: config.Model
) -> tuple[jax.Array, jax.Array]:
  """Weighted cross-entropy of one micro-batch, and the trained tokens' share of it."""
  logits_BTV = transformer.logits(params, _hidden(params, micro, model)[0])
  z_BT = optax.softmax_cross_entropy(
    logits_BTV, jax.nn.one_hot(micro.target_MBT, logits_BTV.shape[-1])
  )
  weight_BT = micro.adv_MBT
  trained = jnp.sum(masking.masked(z_BT, micro.mask_MBT))
  return jnp.sum(jnp.where(weight_BT > 0, z_BT * weight_BT, 0.0)), trained


def _add(a: Any, b: Any) -> Any:
  if isinstance(a, Pieces):
    total = jax.tree.map(jnp.add, a, b)
    return total.replace(divergence=divergence.add(a.divergence, b.divergence))
  return jax.tree.map(jnp.add, a, b)


def accumulate(
  loss_fn: LossFn,
  params: p.Params,
  batch: st.Batch,
  *,
  exact: bool = False,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, Any, p.Params]:
  """Loss, pieces and gradient summed over the `batch.micro` leading micro-batches.

  `exact` (`optim.exact_sum`) sums in a fixed tree, which the replicas of `mesh` share.
  """

  def add(a: tuple, b: tuple) -> tuple:
    return tuple(_add(x, y) for x, y in zip(a, b, strict=True))

  return sums.gradient(loss_fn, params, batch, add=add, exact=exact, mesh=mesh)


def apply_gradient(
  state: st.State, grad: p.Tree, tx: optax.GradientTransformation
) -> tuple[st.State, dict[str, jax.Array]]:
  """One optimiser step; a gradient that is zero or not finite changes nothing.

  Momentum would move the weights where no trained token asks for it.
  """
  norm = optax.tree.norm(grad)
  ok = jnp.isfinite(norm) & (norm > 0)
  trained = lora.trained(state.params)
  updates, opt = tx.update(grad, state.opt, trained)
  moved = lora.moved(state.params, optax.apply_updates(trained, updates))
  moved = replay.with_bias(moved, state.params, 0.0)
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
  reference: p.Params | None = None,
  *,
  model: config.Model,
  loss: config.Loss,
  tx: optax.GradientTransformation,
  exact: bool = False,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[st.State, dict[str, jax.Array]]:
  """One policy-gradient step. Donate `state`.

  `reference`, which `loss.kl_weight` asks for, holds published values (bfloat16 or
  widened), split like the parameters; it is not to be donated.

  Raises:
    ValueError: `loss.kl_weight` without a reference.
  """
  params = p.rounded(state.params, model.dtype)
  if loss.kl_weight:
    if reference is None:
      raise ValueError(f'loss.kl_weight={loss.kl_weight}: got no reference, want one')
    held = p.rounded(reference, model.dtype)
    ref_logp_of = functools.partial(_reference_logp, held, model=model)
    batch = objectives.referred(ref_logp_of, batch)
  if objectives.needs_measuring(loss):
    logp_of = functools.partial(_logp, params, model=model, cfg=loss)
    batch = objectives.measured(logp_of, batch)
  fn = functools.partial(
    policy_loss_fn, model=model, cfg=loss, J=objectives.episodes(batch)
  )
  total, pieces, grad = accumulate(fn, params, batch, exact=exact, mesh=mesh)
  grad = jax.tree.map(lambda g: g / batch.denominator, grad)
  state, metrics = apply_gradient(state, grad, tx)
  if model.moe.bias_speed and pieces.routing is not None:
    load_NE, skipped = pieces.routing.load_NE, metrics['skipped_steps']
    moved = replay.balanced(state.params, load_NE, model.moe.bias_speed, skipped)
    state = dataclasses.replace(state, params=moved)
  tokens = pieces.divergence.tokens
  return state, {
    **metrics,
    **divergence.finish(pieces.divergence),
    **divergence.finish_episodes(pieces.episodes),
    'loss': total / batch.denominator,
    'kept_entropy': pieces.kept_entropy / tokens,
    'kept_mass': pieces.kept_mass / pieces.kept_mass_count,
    'kept_mass_count': pieces.kept_mass_count,
    'k3_same_version': pieces.k3_fresh / pieces.fresh,
    'fresh_count': pieces.fresh,
    'silenced_share': pieces.silenced / pieces.asked,
    'silenced_count': pieces.asked,
    'sequence_masked_share': pieces.masked / tokens,
    'trained_tokens': tokens,
    **_to_reference(pieces, tokens),
    **replay.metrics(pieces.routing),
  }


def _to_reference(pieces: Pieces, tokens: jax.Array) -> dict[str, jax.Array]:
  if pieces.reference_k1 is None or pieces.reference_k3 is None:
    return {}
  return {
    'kl_reference': pieces.reference_k1 / tokens,
    'kl_reference_k3': pieces.reference_k3 / tokens,
  }


def imitate(
  state: st.State,
  batch: st.Batch,
  *,
  model: config.Model,
  tx: optax.GradientTransformation,
  exact: bool = False,
) -> tuple[st.State, dict[str, jax.Array]]:
  """One cross-entropy step on scripted episodes. Donate `state`."""
  fn = functools.partial(imitation_loss_fn, model=model)
  total, trained, grad = accumulate(
    fn, p.rounded(state.params, model.dtype), batch, exact=exact
  )
  grad = jax.tree.map(lambda g: g / batch.denominator, grad)
  state, metrics = apply_gradient(state, grad, tx)
  return state, {
    **metrics,
    'loss': total / batch.denominator,
    'trained_loss': trained / jnp.sum(batch.mask_MBT),
  }
