"""What the learner holds between steps, and the batch it steps on."""

from flax import struct
import jax
import jax.numpy as jnp
import optax

from swe17.model import params as p

SEGMENTS_A_ROW = 64  # static bound of segments packed into one row
EPISODES_A_ROW = 4  # static bound of a batch's episodes, on average over its rows


@struct.dataclass
class State:
  """float32 masters, optimiser state, and the number of steps taken (int32)."""

  params: p.Params
  opt: optax.OptState
  step: jax.Array


@struct.dataclass
class Batch:
  """Packed rows in micro-batches: every array starts with [M micro-batches, B rows].

  On the host, before a jitted step takes it, the arrays are numpy's.

  Entry t speaks of the prediction made at input token t, that is of token t + 1 of the
  episode. Unused rows and micro-batches are all padding (segment 0, mask False).

  Attributes:
    token_MBT: int32 input ids.
    position_MBT: int32 position within the segment.
    segment_MBT: int32, 0 = padding.
    target_MBT: int32 next ids.
    mask_MBT: bool, True where the target was sampled and is trained.
    mu_logp_MBT: float32 sampler's log-probability of the target.
    adv_MBT: float32 advantage (for imitation: the token's weight).
    temperature_MBT: float32 > 0.
    kept_ids_MBTK: int32 kept set of the target, -1 = none.
    fresh_MBT: bool, all of the segment was sampled at the learner's present version.
    turn_MBT: int32, numbers the assistant turns of a row; the tokens of one lie side
      by side (what was read between two turns belongs to the earlier).
    episode_MBT: int32 episode of the segment, from 0, one numbering for the batch.
    prox_logp_MBT: float32 log-probability under the policy at the start of the step.
    ref_logp_MBT: float32 the same under the reference, over the whole vocabulary.
    turn_log_ratio_MBT: float32 mean of logp - mu_logp over the token's turn.
    episode_log_ratio_MBT: float32 the same over all segments of its episode.
    episode_tokens_MBT: float32 sampled tokens of its episode.
      (These five are 0 until `objectives` fills in what is asked for, in the step.)
    micro: int32 scalar, how many micro-batches hold anything.
    denominator: float32 scalar the summed loss is divided by.
    routes_MBTNK: int16 experts of the input token, in slot order, -1 = none recorded;
      None where none are replayed.
    prefix_MBT: int32 segment of the row that the token's own continues, and sees beside
      it (a prompt that several share, itself without a trained target), 0 = none; None
      where prompts are not shared. Positions run on from it.
  """

  token_MBT: jax.Array
  position_MBT: jax.Array
  segment_MBT: jax.Array
  target_MBT: jax.Array
  mask_MBT: jax.Array
  mu_logp_MBT: jax.Array
  adv_MBT: jax.Array
  temperature_MBT: jax.Array
  kept_ids_MBTK: jax.Array
  fresh_MBT: jax.Array
  turn_MBT: jax.Array
  episode_MBT: jax.Array
  prox_logp_MBT: jax.Array
  ref_logp_MBT: jax.Array
  turn_log_ratio_MBT: jax.Array
  episode_log_ratio_MBT: jax.Array
  episode_tokens_MBT: jax.Array
  micro: jax.Array
  denominator: jax.Array
  routes_MBTNK: jax.Array | None = None
  prefix_MBT: jax.Array | None = None


def init(params: p.Params, tx: optax.GradientTransformation) -> State:
  """State before the first step."""
  tree: p.Tree = params
  return State(params=params, opt=tx.init(tree), step=jnp.zeros((), jnp.int32))
