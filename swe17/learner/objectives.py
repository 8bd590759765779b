"""From `loss.objective` and its settings to a function of one micro-batch.

What is of a whole turn or episode (GSPO's ratio, ratios of a turn, masks by the
geometric mean) or of the policy at the start of the step (decoupled PPO) is measured in
one forward pass over the batch before the step: `measured`. A batch is one step, so
these are the very numbers of the policy that the gradient is taken at, whatever rows
and micro-batches an episode's segments lie in. The pass is left out where nothing
needs it. What the reference says of the batch (`loss.kl_weight`) is measured alike:
`referred`.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
import jax.numpy as jnp

from swe17 import config
from swe17.learner import state as st
from swe17.ops import masking, policy_loss

# (learner's log-probability, one micro-batch, what is trained) -> summed loss
Objective = Callable[[jax.Array, st.Batch, jax.Array], jax.Array]


def needs_measuring(cfg: config.Loss) -> bool:
  """Whether the loss wants more than the token's own numbers."""
  by_sequence = cfg.level != 'token' or cfg.sequence_mask != 'none'
  return by_sequence or cfg.objective in ('gspo', 'decoupled_ppo')


def objective(cfg: config.Loss, *, penalty: bool = True) -> Objective:
  """The objective that `cfg` names; without `penalty`, the policy gradient alone."""
  band = {'low': cfg.clip_low, 'high': cfg.clip_high}
  dppo = {'gap': cfg.dppo_gap, 'penalty': cfg.dppo_penalty if penalty else 0.0}
  settings: dict[str, tuple[Callable[..., jax.Array], dict[str, float]]] = {
    'reinforce_tis': (policy_loss.reinforce_tis, {'cap': cfg.tis_cap}),
    'icepop': (
      policy_loss.icepop,
      {'low': cfg.icepop_low, 'high': cfg.icepop_high},
    ),
    'cispo': (policy_loss.cispo, {'high': cfg.cispo_high}),
    'ppo_clip': (policy_loss.ppo_clip, band),
    'decoupled_ppo': (policy_loss.decoupled_ppo, {**band, 'cap': cfg.tis_cap}),
    'gspo': (policy_loss.gspo, {'low': cfg.gspo_low, 'high': cfg.gspo_high}),
    'dppo': (policy_loss.dppo, dppo),
  }
  fn, kwargs = settings[cfg.objective]

  def of(logp_BT: jax.Array, micro: st.Batch, mask_BT: jax.Array) -> jax.Array:
    arrays = (logp_BT, micro.mu_logp_MBT, micro.adv_MBT, mask_BT)
    return fn(*arrays, **kwargs, **_arrays(cfg, micro))

  return of


def _arrays(cfg: config.Loss, micro: st.Batch) -> dict[str, jax.Array]:
  """What an objective takes beyond the token's own numbers."""
  if cfg.objective == 'gspo':
    return {
      'episode_log_ratio_BT': micro.episode_log_ratio_MBT,
      'episode_tokens_BT': micro.episode_tokens_MBT,
    }
  if cfg.objective == 'decoupled_ppo':
    return {'prox_logp_BT': micro.prox_logp_MBT}
  unit = {
    'turn': micro.turn_log_ratio_MBT,
    'episode': micro.episode_log_ratio_MBT,
  }
  return {'unit_log_ratio_BT': unit[cfg.level]} if cfg.level in unit else {}


def penalised(cfg: config.Loss, micro: st.Batch, full_logp_BT: jax.Array) -> st.Batch:
  """The micro-batch with the KL to the reference taken off its advantages."""
  adv_BT = policy_loss.kl_penalised(
    micro.adv_MBT,
    full_logp_BT,
    micro.ref_logp_MBT,
    micro.mask_MBT,
    weight=cfg.kl_weight,
  )
  return dataclasses.replace(micro, adv_MBT=adv_BT)


def trained(cfg: config.Loss, micro: st.Batch) -> jax.Array:
  """The sampled tokens that the sequence mask leaves in the loss, bool [B, T]."""
  mask_BT = micro.mask_MBT
  ratio_BT = masking.masked(micro.episode_log_ratio_MBT, mask_BT)
  if cfg.sequence_mask == 'geometric':
    return mask_BT & masking.geometric(
      ratio_BT, low=cfg.geometric_low, high=cfg.geometric_high
    )
  if cfg.sequence_mask == 'off_policy':
    adv_BT = masking.masked(micro.adv_MBT, mask_BT)
    return mask_BT & masking.off_policy(ratio_BT, adv_BT, delta=cfg.off_policy_delta)
  return mask_BT


def silenced(
  cfg: config.Loss, logp_BT: jax.Array, micro: st.Batch, mask_BT: jax.Array
) -> jax.Array:
  """Sampled tokens with an advantage to which clip, band or mask leave no gradient."""
  loss = objective(cfg, penalty=False)
  weight_BT = jax.grad(loss)(jax.lax.stop_gradient(logp_BT), micro, mask_BT)
  asked_BT = micro.mask_MBT & (masking.masked(micro.adv_MBT, micro.mask_MBT) != 0)
  return jnp.sum(asked_BT & (weight_BT == 0)).astype(jnp.float32)


def episodes(batch: st.Batch) -> int:
  """Static bound J of a batch's episodes."""
  M, B, _ = batch.token_MBT.shape
  return st.EPISODES_A_ROW * M * B


def referred(logp_of: Callable[[st.Batch], jax.Array], batch: st.Batch) -> st.Batch:
  """The batch with what `logp_of`, of the reference, gives for its tokens."""
  return dataclasses.replace(batch, ref_logp_MBT=_scored(logp_of, batch))


def _scored(logp_of: Callable[[st.Batch], jax.Array], batch: st.Batch) -> jax.Array:
  """`logp_of` of the first `batch.micro` micro-batches, [M, B, T]; 0 for the rest."""
  whole = ('micro', 'denominator')
  arrays = {k: v for k, v in vars(batch).items() if k not in whole and v is not None}

  def body(i: jax.Array, logp_MBT: jax.Array) -> jax.Array:
    micro = dataclasses.replace(batch, **{k: v[i] for k, v in arrays.items()})
    return logp_MBT.at[i].set(jax.lax.stop_gradient(logp_of(micro)))

  zero_MBT = jnp.zeros(batch.token_MBT.shape, jnp.float32)
  return jax.lax.fori_loop(0, batch.micro, body, zero_MBT)


def measured(logp_of: Callable[[st.Batch], jax.Array], batch: st.Batch) -> st.Batch:
  """The batch with what is of turns, of episodes and of the start of the step.

  Args:
    logp_of: log-probability [B, T] of a micro-batch at the present weights.
    batch: its first `batch.micro` micro-batches are looked at.
  """
  logp_MBT = _scored(logp_of, batch)
  rows = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), {
    'mask': batch.mask_MBT, 'mu': batch.mu_logp_MBT, 'logp': logp_MBT,
    'turn': batch.turn_MBT, 'segment': batch.segment_MBT, 'episode': batch.episode_MBT,
  })  # fmt: skip
  d_BT = masking.log_ratio(rows['logp'], rows['mu'], rows['mask'])
  one_BT = rows['mask'].astype(jnp.float32)
  totals = functools.partial(
    masking.episode_totals,
    segment_BT=rows['segment'],
    episode_BT=rows['episode'],
    P=st.SEGMENTS_A_ROW,
    J=episodes(batch),
  )
  tokens_J = totals(one_BT)
  mean_J = masking.average(totals(d_BT), tokens_J)
  mean_turn_BT = masking.average(
    masking.turn_totals(d_BT, rows['turn']), masking.turn_totals(one_BT, rows['turn'])
  )
  return dataclasses.replace(
    batch,
    prox_logp_MBT=logp_MBT,
    turn_log_ratio_MBT=mean_turn_BT.reshape(logp_MBT.shape),
    episode_log_ratio_MBT=mean_J[batch.episode_MBT],
    episode_tokens_MBT=tokens_J[batch.episode_MBT],
  )
