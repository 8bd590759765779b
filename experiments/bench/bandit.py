"""A bandit-like token task, and policy-gradient training on it in one compiled scan.

An episode writes one token a turn. Each prompt and turn has its own logits over V
tokens: `good` tokens share most of the mass, a few `bad` ones a tenth, and the rest is
the tail, all of it bad. A bad token ends the episode with reward 0, as a malformed call
does; so does chance, at every turn, as hard problems do, which keeps the rewards of a
group different to the end. Reward 1 for an episode that finishes. Several tokens are
good at every turn: nothing asks the entropy to fall.

What differs between arms is the sampling and its score, nothing else:

  none     the whole vocabulary is sampled
  naive    top-p at the sampler; the learner normalises over the whole vocabulary
  replay   top-p at the sampler; the learner normalises over the recorded kept set

Two effects (SWE-1.7 post, Cognition, 2026-07), both of the logits' gradient
A (1[i = a] - p_i):

- A tail token with A < 0 gives its mass to the head in proportion to p: gaps widen, the
  policy sharpens. With top-p such a token is never drawn.
- Scored over the whole vocabulary, draws from q (p cut to the set) have a score of
  mean q - p, not 0. Wherever the mean advantage is positive, as in every turn that only
  the episodes still going reach, p moves towards q, of itself, and the next set is cut
  from that. Scored on the kept set the mean is q - q = 0.
"""

import dataclasses

import jax
import jax.numpy as jnp

from swe17.ops import divergence, kept_set, logprob, policy_loss


@dataclasses.dataclass(frozen=True)
class Task:
  """Sizes of the task and of a step's batch."""

  prompts: int = 4  # P
  turns: int = 4  # T
  vocab: int = 64  # V
  good: int = 6  # good tokens a turn
  bad: int = 2  # bad tokens outside the tail
  bad_mass: float = 0.1
  tail_mass: float = 0.1
  spread: float = 0.5  # deviation of the initial logits
  fail: float = 0.15  # chance that a turn fails whatever was written
  group: int = 8  # G, episodes a prompt and step


@dataclasses.dataclass(frozen=True)
class Arm:
  """How tokens are drawn and scored."""

  top_p: float
  replay: bool


ARMS: dict[str, Arm] = {
  'none': Arm(top_p=1.0, replay=True),  # nothing is filtered: no sets to replay
  'naive': Arm(top_p=0.9, replay=False),
  'replay': Arm(top_p=0.9, replay=True),
}
BASELINES = ('mean', 'length_weighted')


@dataclasses.dataclass(frozen=True)
class Train:
  """How the policy is trained; the same for all arms."""

  steps: int = 300
  lr: float = 1.0
  lag: int = 1  # steps the sampler's weights are behind the learner's
  correct: bool = True  # truncated importance weights; False: every weight is 1
  cap: float = 2.0
  baseline: str = 'mean'


def initial(key: jax.Array, task: Task) -> jax.Array:
  """Logits of the starting policy, float32 [P, T, V]; good tokens come first."""
  rest = task.vocab - task.good - task.bad
  mass = [(1 - task.bad_mass - task.tail_mass, task.good)]
  mass += [(task.bad_mass, task.bad), (task.tail_mass, rest)]
  mean_V = jnp.concatenate([jnp.full(n, jnp.log(m / n)) for m, n in mass])
  noise_PTV = jax.random.normal(key, (task.prompts, task.turns, task.vocab))
  return mean_V[None, None, :] + task.spread * noise_PTV


def train(
  key: jax.Array, task: Task, arm: Arm, cfg: Train, age: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Trains by plain gradient descent on `reinforce_tis`. Jit it; vmap it over keys.

  age: the lag as a traced int32 up to `cfg.lag`, to vmap over; None: `cfg.lag`.

  Returns (logits [P, T, V], records [steps]): `entropy` (full vocabulary, mean over
  prompts and turns, nats), `reward`, `tail` (mass), `k3`, `ratio_mean`.
  """
  if cfg.baseline not in BASELINES:
    raise ValueError(f'baseline: got {cfg.baseline!r}, want one of {BASELINES}')
  first, later = jax.random.split(key)
  theta_PTV = initial(first, task)
  # Axis 0 is age: the learner's own logits, those of a step before, and so on.
  history = jnp.broadcast_to(theta_PTV[None], (cfg.lag + 1, *theta_PTV.shape))

  def step(history: jax.Array, key: jax.Array) -> tuple[jax.Array, dict]:
    theta_PTV = history[0]
    sampler_PTV = history[cfg.lag if age is None else age]
    batch = sample(key, sampler_PTV, task, arm, cfg.baseline)
    grad_PTV, record = jax.grad(_loss, has_aux=True)(theta_PTV, batch, task, arm, cfg)
    record['entropy'] = jnp.mean(kept_set.entropy(theta_PTV))
    tail_PT = jax.nn.softmax(theta_PTV)[:, :, task.good + task.bad :].sum(-1)
    record['tail'] = jnp.mean(tail_PT)
    new = theta_PTV - cfg.lr * grad_PTV
    return jnp.concatenate([new[None], history[:-1]]), record

  history, records = jax.lax.scan(step, history, jax.random.split(later, cfg.steps))
  return history[0], records


def rounded(x: jax.Array) -> jax.Array:
  """bfloat16 values, as weights are published; the gradient passes straight through."""
  return x + jax.lax.stop_gradient(x.astype(jnp.bfloat16).astype(x.dtype) - x)


def sample(
  key: jax.Array, theta_PTV: jax.Array, task: Task, arm: Arm, baseline: str
) -> dict[str, jax.Array]:
  """One group a prompt: rows [P * G, T] of tokens, scores, sets, masks, advantages."""
  P, T, V = theta_PTV.shape
  rows, B = P * task.group, P * task.group * T
  z_BV = _rows(rounded(theta_PTV), task).reshape(B, V)
  filtered = arm.top_p < 1
  drawing, chance = jax.random.split(key)
  drawn = kept_set.draw(
    jax.random.split(drawing, B),
    z_BV,
    jnp.ones(B),
    jnp.full(B, arm.top_p),
    jnp.zeros(B),
    jnp.full(B, V),
    V if filtered else 0,
  )
  token_BT = drawn.token_B.reshape(rows, T)
  went_on = jax.random.bernoulli(chance, 1 - task.fail, (rows, T))
  ok_BT = (token_BT < task.good) & went_on
  # A turn is reached if all before it went well; the last one must go well too.
  going_BT = jnp.cumprod(ok_BT, axis=1).astype(bool)
  mask_BT = jnp.concatenate([jnp.ones((rows, 1), bool), going_BT[:, :-1]], axis=1)
  reward_PG = going_BT[:, -1].astype(jnp.float32).reshape(P, task.group)
  length_PG = mask_BT.sum(axis=1).astype(jnp.float32).reshape(P, task.group)
  adv_PG = reward_PG - baselines(reward_PG, length_PG, baseline)
  return {
    'token_BT': token_BT,
    'mu_logp_BT': drawn.logp_B.reshape(rows, T),
    'kept_ids_BTK': drawn.kept_ids_BK.reshape(rows, T, -1),
    'mask_BT': mask_BT,
    'adv_BT': jnp.broadcast_to(adv_PG.reshape(rows, 1), (rows, T)),
    'reward_PG': reward_PG,
  }


def baselines(reward_PG: jax.Array, length_PG: jax.Array, name: str) -> jax.Array:
  """A group's baseline as in `ops/advantage`, traceable, float32 [P, 1]."""
  weight_PG = length_PG if name == 'length_weighted' else jnp.ones_like(length_PG)
  total_P1 = weight_PG.sum(axis=1, keepdims=True)
  return (reward_PG * weight_PG).sum(axis=1, keepdims=True) / total_P1


def _rows(theta_PTV: jax.Array, task: Task) -> jax.Array:
  """Every prompt's logits, once for each member of its group, [P * G, T, V]."""
  return jnp.repeat(theta_PTV, task.group, axis=0)


def _loss(
  theta_PTV: jax.Array, batch: dict[str, jax.Array], task: Task, arm: Arm, cfg: Train
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The objective over the group size, and what is recorded of the step."""
  logits_BTV = _rows(rounded(theta_PTV), task)
  mask_BT, mu_logp_BT = batch['mask_BT'], batch['mu_logp_BT']
  logp_BT = logprob.score(
    logits_BTV,
    batch['token_BT'],
    batch['kept_ids_BTK'],
    jnp.ones_like(mu_logp_BT),
    replay=arm.replay,
  ).logp_BT
  behaviour_BT = mu_logp_BT if cfg.correct else jax.lax.stop_gradient(logp_BT)
  total = policy_loss.reinforce_tis(
    logp_BT, behaviour_BT, batch['adv_BT'], mask_BT, cap=cfg.cap
  )
  apart = divergence.finish(
    divergence.sums(logp_BT, mu_logp_BT, mask_BT, mask_BT, cap=cfg.cap)
  )
  record = {name: apart[name] for name in ('k3', 'ratio_mean')}
  record['reward'] = jnp.mean(batch['reward_PG'])
  return total / task.group, record
