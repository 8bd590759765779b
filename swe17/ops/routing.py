"""Which experts a token goes to and with what weight, with replay of recorded routes.

  softmax   g_i = I_i exp(s_i) / sum_j I_j exp(s_j)      renormalised (R3)
            g_i = I_i exp(s_i) / sum_all exp(s_j)        not renormalised
  sigmoid   g_i = c I_i sigma(s_i) / sum_j I_j sigma(s_j),
            I = top K of sigma(s) + bias within the best groups (DeepSeek-V3)

s are router logits and I marks the selected experts. Under replay I is what the sampler
recorded (R3, arXiv:2510.11370): a recorded id overrides the selection only, weights are
computed from the trainer's own logits, which stay trainable. Slots keep their recorded
order, because a sum over experts depends on it (DESIGN.md 12.10).

DeepSeek-V3: arXiv:2412.19437, eq. 12-16; groups: section 2.1.2. The bias moves the
selection alone and has no gradient. Losing groups are -inf, never 0: a biased score may
be negative. Ties go to the lower id. All in float32.
"""

from flax import struct
import jax
import jax.numpy as jnp


@struct.dataclass
class Routes:
  """K slots a token, in descending order of score, or as recorded.

  Attributes:
    ids_TK: int32 expert ids, distinct within a token.
    weight_TK: float32 g, carries the gradient to the logits.
    own_T: bool, the selection is this router's own, not a recorded one.
    top_TK: int32, the selection it would make by itself; `ids_TK` where `own_T`.
  """

  ids_TK: jax.Array
  weight_TK: jax.Array
  own_T: jax.Array
  top_TK: jax.Array


def top(score_TE: jax.Array, K: int) -> jax.Array:
  """Ids of the K largest, int32 [T, K], descending, ties by id; no gradient."""
  E = score_TE.shape[-1]
  if not 1 <= K <= E:
    raise ValueError(f'got {K} experts a token of {E}, want 1 to {E}')
  # -0 and 0 are one score; the order of XLA's top-k tells them apart.
  score_TE = jnp.where(score_TE == 0, 0.0, jax.lax.stop_gradient(score_TE))
  return jax.lax.top_k(score_TE, K)[1].astype(jnp.int32)


def replayed(own_TK: jax.Array, recorded_TK: jax.Array | None) -> tuple:
  """(ids_TK, own_T): the recorded slots of a token; its own where none is recorded.

  A token with a negative id in any slot has no recorded route (padding, or a tail that
  the engine never fed). An id beyond the experts gives NaN weights, so that the step is
  refused.
  """
  if recorded_TK is None:
    return own_TK, jnp.ones(own_TK.shape[0], bool)
  if recorded_TK.shape != own_TK.shape:
    raise ValueError(f'recorded routes: got {recorded_TK.shape}, want {own_TK.shape}')
  own_T = jnp.any(recorded_TK < 0, axis=-1)
  return jnp.where(own_T[:, None], own_TK, recorded_TK), own_T


@jax.custom_vjp
def picked(score_TE: jax.Array, ids_TK: jax.Array) -> jax.Array:
  """Scores of the chosen experts [T, K]; NaN for an id beyond the experts.

  The gradient is a masked sum over the slots: nothing is scattered.
  """
  return jnp.take_along_axis(score_TE, ids_TK, axis=-1)


def _picked_fwd(score_TE: jax.Array, ids_TK: jax.Array) -> tuple[jax.Array, tuple]:
  # An empty slice carries E and the dtype to the way back, and no scores.
  return picked(score_TE, ids_TK), (ids_TK, score_TE[:0])


def _picked_bwd(saved: tuple, dy_TK: jax.Array) -> tuple[jax.Array, None]:
  ids_TK, like_0E = saved
  E = like_0E.shape[-1]
  here_TKE = ids_TK[:, :, None] == jnp.arange(E)[None, None, :]
  d_TE = jnp.sum(jnp.where(here_TKE, dy_TK[:, :, None], 0.0), axis=1)
  return d_TE.astype(like_0E.dtype), None


picked.defvjp(_picked_fwd, _picked_bwd)


def softmax(
  logit_TE: jax.Array,
  K: int,
  *,
  renormalise: bool,
  recorded_TK: jax.Array | None = None,
) -> Routes:
  """Top K of the logits, weighted by their softmax.

  Args:
    logit_TE: router logits.
    K: experts a token.
    renormalise: weights sum to 1 over the slots (`norm_topk_prob` of model files);
      otherwise they are probabilities among all experts.
    recorded_TK: int32 ids that the sampler recorded; see `replayed`.
  """
  s_TE = logit_TE.astype(jnp.float32)
  top_TK = top(s_TE, K)
  ids_TK, own_T = replayed(top_TK, recorded_TK)
  s_TK = picked(s_TE, ids_TK)
  if renormalise:
    return Routes(ids_TK, jax.nn.softmax(s_TK, axis=-1), own_T, top_TK)
  total_T1 = jax.nn.logsumexp(s_TE, axis=-1, keepdims=True)
  return Routes(ids_TK, jnp.exp(s_TK - total_T1), own_T, top_TK)


def in_best_groups(score_TE: jax.Array, groups: int, best: int) -> jax.Array:
  """Scores with -inf outside the `best` of `groups` equal groups of neighbours.

  A group's score is the sum of its two largest; ties go to the lower group.
  """
  T, E = score_TE.shape
  if E % groups or not 1 <= best <= groups:
    raise ValueError(f'{E} experts: got {best} of {groups} groups, want a divisor')
  score_TGe = score_TE.reshape(T, groups, E // groups)
  two_TGe = jax.lax.top_k(score_TGe, min(2, E // groups))[0]
  best_Tg = top(two_TGe.sum(axis=-1), best)
  win_TG = jnp.any(best_Tg[:, :, None] == jnp.arange(groups)[None, None, :], axis=1)
  return jnp.where(win_TG[:, :, None], score_TGe, -jnp.inf).reshape(T, E)


def sigmoid(
  logit_TE: jax.Array,
  bias_E: jax.Array,
  K: int,
  *,
  groups: int = 1,
  best: int = 1,
  renormalise: bool = True,
  scale: float = 1.0,
  recorded_TK: jax.Array | None = None,
) -> Routes:
  """Top K of sigmoid scores plus a bias, weighted by the scores without it.

  Args:
    logit_TE: router logits.
    bias_E: correction that balances load; selects only.
    K: experts a token; at most the experts of `best` groups.
    groups: equal groups of neighbouring experts; 1: no limit.
    best: groups that a token may use.
    renormalise: weights sum to `scale` over the slots.
    scale: c, the factor of routed experts.
    recorded_TK: int32 ids that the sampler recorded; see `replayed`.
  """
  E = logit_TE.shape[-1]
  if E // groups * best < K:
    raise ValueError(
      f'got {K} experts a token, want at most {E // groups * best}: '
      f'{best} of {groups} groups of {E} experts'
    )
  score_TE = jax.nn.sigmoid(logit_TE.astype(jnp.float32))
  choice_TE = jax.lax.stop_gradient(score_TE + bias_E[None, :])
  choice_TE = in_best_groups(choice_TE, groups, best)
  top_TK = top(choice_TE, K)
  ids_TK, own_T = replayed(top_TK, recorded_TK)
  if renormalise:
    # By log-sigmoid: scores that are all tiny still sum to 1, and none divides by 0.
    s_TK = picked(logit_TE.astype(jnp.float32), ids_TK)
    weight_TK = jax.nn.softmax(jax.nn.log_sigmoid(s_TK), axis=-1)
  else:
    weight_TK = picked(score_TE, ids_TK)
  return Routes(ids_TK, scale * weight_TK, own_T, top_TK)
