"""Policy-gradient objectives: one function each, composed from small pieces.

Each is a sum over trained tokens of the one form

  L = -sum_t sg[w_t] A_t log q(y_t | S_t)

where w_t A_t is the derivative of its source's objective with respect to log q(y_t):
the gradient is the source's, also where a ratio would overflow, and the value is that
of this surrogate. Nothing is divided here: the batch has one denominator Z for all of
its micro-batches, T_max times the number of valid episodes of the groups that train
(SWE-grep post, Cognition: constant T_max as in Dr. GRPO, arXiv:2503.20783); GSPO keeps
its paper's mean over sequences.

Ratios are r = exp(logp - mu_logp) against mu, the sampler at the token's own version
(DESIGN.md 12.6). Inputs are masked before any non-linear function, so a value in a
masked slot, NaN included, cannot reach loss or gradient.
"""

import jax
import jax.numpy as jnp

from swe17.ops import masking


def ratio(logp_BT: jax.Array, mu_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Importance ratio exp(logp - mu_logp), 1 where masked, no gradient."""
  return jnp.exp(masking.log_ratio(logp_BT, mu_logp_BT, mask_BT))


def surrogate(
  weight_BT: jax.Array, adv_BT: jax.Array, logp_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """-sum_t sg[w_t] A_t logp_t over the trained tokens, float32 scalar."""
  weight_BT = jax.lax.stop_gradient(weight_BT)
  return -jnp.sum(
    weight_BT * masking.masked(adv_BT, mask_BT) * masking.masked(logp_BT, mask_BT)
  )


def _unit_ratio(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  mask_BT: jax.Array,
  unit_log_ratio_BT: jax.Array | None,
) -> jax.Array:
  """The token's own ratio, or the geometric ratio of its turn or episode."""
  if unit_log_ratio_BT is None:
    return ratio(logp_BT, mu_logp_BT, mask_BT)
  return jnp.exp(jax.lax.stop_gradient(masking.masked(unit_log_ratio_BT, mask_BT)))


def reinforce_tis(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  cap: float,
  unit_log_ratio_BT: jax.Array | None = None,
) -> jax.Array:
  """REINFORCE with truncated importance weights, w = min(r, C). The default.

  Truncated importance sampling (Ionides, 2008), as SWE-grep's sg[w_j] (post,
  Cognition); C = 2 is what others use.

  Args:
    logp_BT: learner's log-probability, carries the gradient.
    mu_logp_BT: sampler's log-probability at the token's own version.
    adv_BT: advantage of the token's episode.
    mask_BT: bool, True where the token is trained.
    cap: C, the largest weight.
    unit_log_ratio_BT: mean log-ratio of the token's turn or episode, to weigh by the
      geometric ratio of that unit; None: by the token's own ratio.

  Returns:
    float32 scalar, not yet divided by the batch's denominator.
  """
  r_BT = _unit_ratio(logp_BT, mu_logp_BT, mask_BT, unit_log_ratio_BT)
  return surrogate(jnp.minimum(r_BT, cap), adv_BT, logp_BT, mask_BT)


def icepop(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  low: float,
  high: float,
  unit_log_ratio_BT: jax.Array | None = None,
) -> jax.Array:
  """Masked importance sampling: w = r inside [low, high], else 0.

  IcePop (Ring-1T report, arXiv:2510.18855): double-sided masking of the discrepancy
  between trainer and sampler; the band [0.5, 5] is its own. Arguments as
  `reinforce_tis`.
  """
  r_BT = _unit_ratio(logp_BT, mu_logp_BT, mask_BT, unit_log_ratio_BT)
  inside_BT = (r_BT >= low) & (r_BT <= high)
  return surrogate(jnp.where(inside_BT, r_BT, 0.0), adv_BT, logp_BT, mask_BT)


def cispo(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  high: float,
  unit_log_ratio_BT: jax.Array | None = None,
) -> jax.Array:
  """Clipped importance weights: w = min(r, 1 + high), clipped only above.

  CISPO (MiniMax-M1, arXiv:2506.13585; no lower clip, as there). Every token
  keeps a gradient. With ratios against mu it is `reinforce_tis` with C = 1 + high: the
  two come from different places and usually with different caps. Arguments as
  `reinforce_tis`.
  """
  r_BT = _unit_ratio(logp_BT, mu_logp_BT, mask_BT, unit_log_ratio_BT)
  return surrogate(jnp.minimum(r_BT, 1.0 + high), adv_BT, logp_BT, mask_BT)


def clipped(
  r_BT: jax.Array, adv_BT: jax.Array, *, low: float, high: float
) -> jax.Array:
  """Derivative of min(r A, clip(r, 1 - low, 1 + high) A) with respect to log r, over A.

  r where the first is the smaller, else 0: above 1 + high for A > 0, below 1 - low for
  A < 0 (PPO, arXiv:1707.06347, eq. 7).
  """
  gone_BT = (adv_BT > 0) & (r_BT > 1.0 + high) | (adv_BT < 0) & (r_BT < 1.0 - low)
  return jnp.where(gone_BT, 0.0, r_BT)


def ppo_clip(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  low: float,
  high: float,
) -> jax.Array:
  """PPO's clipped objective, sum_t min(r A, clip(r, 1 - low, 1 + high) A).

  PPO, arXiv:1707.06347, eq. 7; clip-higher .2/.28 from DAPO, arXiv:2503.14476, and
  used by Kevin, arXiv:2507.11948. Arguments as `reinforce_tis`.
  """
  adv_BT = masking.masked(adv_BT, mask_BT)
  r_BT = ratio(logp_BT, mu_logp_BT, mask_BT)
  return surrogate(clipped(r_BT, adv_BT, low=low, high=high), adv_BT, logp_BT, mask_BT)


def decoupled_ppo(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  prox_logp_BT: jax.Array,
  low: float,
  high: float,
  cap: float,
) -> jax.Array:
  """Decoupled PPO: sum_t (prox / mu) min(u A, clip(u, 1 - low, 1 + high) A).

  u = pi / prox. AReaL, arXiv:2505.24298 (from Hilton et al., arXiv:2110.00641): the
  clip is around a proximal policy, here the policy at the start of the step, and the
  weight prox / mu corrects for the sampler; it is truncated at `cap`, which is ours.
  While one batch is one step, pi is prox, u = 1, and the gradient is `reinforce_tis`'s.

  Args:
    prox_logp_BT: log-probability under the policy at the start of the step.
    low, high: clip of u.
    cap: largest weight prox/mu.
    The others as `reinforce_tis`.
  """
  adv_BT = masking.masked(adv_BT, mask_BT)
  behind_BT = jnp.minimum(ratio(prox_logp_BT, mu_logp_BT, mask_BT), cap)
  u_BT = ratio(logp_BT, prox_logp_BT, mask_BT)
  weight_BT = behind_BT * clipped(u_BT, adv_BT, low=low, high=high)
  return surrogate(weight_BT, adv_BT, logp_BT, mask_BT)


def gspo(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  episode_log_ratio_BT: jax.Array,
  episode_tokens_BT: jax.Array,
  low: float,
  high: float,
) -> jax.Array:
  """GSPO: sum_j min(s_j A_j, clip(s_j, 1 - low, 1 + high) A_j), s_j = exp(mean_t d_jt).

  arXiv:2507.18071, with its gradient s_j A_j 1/n_j sum_t grad logp_jt where not
  clipped; its clip is 3e-4 below and 4e-4 above. An episode is one sequence,
  however many segments it has. Divide by the number of episodes, not by T_max times it.

  Args:
    mu_logp_BT: not used: it is inside the episode's log-ratio.
    episode_log_ratio_BT: mean of d over the tokens of the token's episode.
    episode_tokens_BT: n_j, the number of those.
    low, high: clip of s_j.
    The others as `reinforce_tis`.
  """
  del mu_logp_BT
  adv_BT = masking.masked(adv_BT, mask_BT)
  s_BT = jnp.exp(jax.lax.stop_gradient(masking.masked(episode_log_ratio_BT, mask_BT)))
  n_BT = jnp.maximum(masking.masked(episode_tokens_BT, mask_BT), 1.0)
  weight_BT = clipped(s_BT, adv_BT, low=low, high=high) / n_BT
  return surrogate(weight_BT, adv_BT, logp_BT, mask_BT)


def dppo(
  logp_BT: jax.Array,
  mu_logp_BT: jax.Array,
  adv_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  gap: float,
  penalty: float,
) -> jax.Array:
  """DPPO: w = r, or 0 where the probability has moved by more than `gap` along A.

  arXiv:2602.04879, the binary total-variation form: dropped if pi - mu > gap for A > 0,
  if mu - pi > gap for A < 0. Probabilities are those of the kept set (DESIGN.md 12.6).
  To the loss comes penalty * sum_t (logp_t - mu_logp_t)^2 over all trained tokens, with
  its gradient. Arguments as `reinforce_tis`.
  """
  adv_BT = masking.masked(adv_BT, mask_BT)
  logp_BT, mu_logp_BT = (
    masking.masked(logp_BT, mask_BT),
    masking.masked(mu_logp_BT, mask_BT),
  )
  moved_BT = jnp.exp(jax.lax.stop_gradient(logp_BT)) - jnp.exp(mu_logp_BT)
  gone_BT = (adv_BT > 0) & (moved_BT > gap) | (adv_BT < 0) & (moved_BT < -gap)
  weight_BT = jnp.where(gone_BT, 0.0, ratio(logp_BT, mu_logp_BT, mask_BT))
  distance = jnp.sum(jnp.square(logp_BT - mu_logp_BT))
  return surrogate(weight_BT, adv_BT, logp_BT, mask_BT) + penalty * distance


def kl_penalised(
  adv_BT: jax.Array,
  full_logp_BT: jax.Array,
  ref_logp_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  weight: float,
) -> jax.Array:
  """Advantages less a penalty on the KL to a reference: A_t - weight sg[k1_t].

    k1_t = log pi(y_t) - log ref(y_t)

  k1 as a penalty is Composer 2's (arXiv:2603.24477), and it has to be a reward: as a
  term of the loss its own derivative, grad log pi, has mean zero, and nothing would be
  pulled. As a reward of its token it gives E[k1_t grad log q(y_t)], with pi the policy
  that samples (q = pi) the gradient of KL(pi || ref) at each prefix; what a choice does
  to the KL of later tokens is left out, as with a discount of 0. The objective's own
  ratio, clip and masks then hold for the penalty as for any other reward.

  Both log-probabilities are over the whole vocabulary (FACTS 1): renormalised on the
  kept set they would not see that mass has left it. The gradient goes through the
  objective's own log q, which under replay is within the set, as the token was drawn.

  Args:
    adv_BT: advantages of outcomes.
    full_logp_BT: the policy's full-vocabulary log-probability; no gradient.
    ref_logp_BT: the reference's, at the same temperature.
    mask_BT: bool, True where the token was sampled; elsewhere the result is 0.
    weight: advantage that a nat costs.
  """
  k1_BT = masking.log_ratio(full_logp_BT, ref_logp_BT, mask_BT)
  return masking.masked(adv_BT, mask_BT) - weight * k1_BT
