"""Every objective against its source's formula, differentiated in float64."""

from collections.abc import Callable
import functools

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import policy_loss
from tests import fixtures

B, T = 2, 6
# Episode 1 has a segment in either row.
EPISODE_BT = np.array([[0, 0, 0, 1, 1, 3], [2, 2, 2, 2, 1, 1]])
CLIP = {'low': 0.2, 'high': 0.28}
SETTINGS = {
  'reinforce_tis': {'cap': 2.0},
  'icepop': {'low': 0.5, 'high': 5.0},
  'cispo': {'high': 4.0},
  'ppo_clip': CLIP,
  'decoupled_ppo': {**CLIP, 'cap': 2.0},
  'gspo': {'low': 0.3, 'high': 0.4},
  'dppo': {'gap': 0.2, 'penalty': 1e-3},
}
NAMES = list(SETTINGS)
quick = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)


@functools.cache
def compiled(name: str) -> Callable:
  fn = functools.partial(getattr(policy_loss, name), **SETTINGS[name])
  return jax.jit(lambda logp_BT, rest: jax.value_and_grad(fn)(logp_BT, **rest))


def loss_and_grad(name: str, x: dict[str, np.ndarray]) -> tuple:
  rest = {k: v for k, v in x.items() if k != 'logp_BT'}
  return compiled(name)(x['logp_BT'], rest)


def example(name: str, seed: int, spread: float = 1.0) -> dict[str, np.ndarray]:
  """Random inputs of an objective; an episode has one advantage."""
  rng = np.random.default_rng(seed)
  logp_BT = -rng.uniform(0, 3, (B, T))
  x = {
    'logp_BT': logp_BT,
    'mu_logp_BT': logp_BT - spread * rng.normal(size=(B, T)),
    'adv_BT': rng.normal(size=4)[EPISODE_BT],
    'mask_BT': rng.random((B, T)) < 0.7,
  }
  if name == 'decoupled_ppo':
    x['prox_logp_BT'] = logp_BT - 0.3 * spread * rng.normal(size=(B, T))
  if name == 'gspo':
    mean_BT, n_BT = per_episode(x, x['logp_BT'])
    x |= {'episode_log_ratio_BT': mean_BT, 'episode_tokens_BT': n_BT}
  return {k: v if v.dtype == bool else v.astype(np.float32) for k, v in x.items()}


def per_episode(x, logp_BT) -> tuple[np.ndarray, np.ndarray]:
  """Mean log-ratio and number of tokens of each token's episode."""
  mean_BT, n_BT = np.zeros((B, T)), np.zeros((B, T))
  for j in range(4):
    own = (j == EPISODE_BT) & x['mask_BT']
    n_BT[j == EPISODE_BT] = own.sum()
    d = (np.float64(logp_BT) - x['mu_logp_BT'])[own]
    mean_BT[j == EPISODE_BT] = d.mean() if own.any() else 0
  return mean_BT, n_BT


def clip_term(r: float, A: float, low: float, high: float) -> float:
  return min(r * A, min(max(r, 1 - low), 1 + high) * A)


def source(name: str, x: dict[str, np.ndarray], logp_BT: np.ndarray) -> float:
  """The source's objective at `logp_BT`, token by token in float64.

  What it stops the gradient at is taken at x['logp_BT'].
  """
  s = SETTINGS[name]
  if name == 'gspo':
    total = 0.0
    for j in set(EPISODE_BT[x['mask_BT']].tolist()):
      own = (j == EPISODE_BT) & x['mask_BT']
      d = (logp_BT - np.float64(x['mu_logp_BT']))[own]
      A = float(x['adv_BT'][own][0])
      total += clip_term(np.exp(d.mean()), A, **s)
    return total
  total = 0.0
  for b, t in zip(*np.nonzero(x['mask_BT']), strict=True):
    logp, fixed, mu = (float(a[b, t]) for a in (logp_BT, x['logp_BT'], x['mu_logp_BT']))
    A, r0 = float(x['adv_BT'][b, t]), np.exp(fixed - mu)
    if name == 'reinforce_tis':
      total += min(r0, s['cap']) * A * logp
    elif name == 'icepop':
      total += (r0 if s['low'] <= r0 <= s['high'] else 0) * A * logp
    elif name == 'cispo':
      total += min(r0, 1 + s['high']) * A * logp
    elif name == 'ppo_clip':
      total += clip_term(np.exp(logp - mu), A, **s)
    elif name == 'decoupled_ppo':
      prox = float(x['prox_logp_BT'][b, t])
      behind = min(np.exp(prox - mu), s['cap'])
      total += behind * clip_term(np.exp(logp - prox), A, s['low'], s['high'])
    else:
      gap = np.exp(fixed) - np.exp(mu)
      drop = (A > 0 and gap > s['gap']) or (A < 0 and -gap > s['gap'])
      total += 0 if drop else np.exp(logp - mu) * A
      total -= s['penalty'] * (logp - mu) ** 2
  return total


@pytest.mark.parametrize('name', NAMES)
@quick
@hypothesis.given(strategies.integers(0, 10**6))
def test_the_gradient_is_that_of_the_sources_formula(name, seed):
  x = example(name, seed)
  grad = np.asarray(loss_and_grad(name, x)[1])
  for b in range(B):
    for t in range(T):
      at = [np.float64(x['logp_BT']) for _ in range(2)]
      at[0][b, t] += 1e-5
      at[1][b, t] -= 1e-5
      want = -(source(name, x, at[0]) - source(name, x, at[1])) / 2e-5
      assert grad[b, t] == pytest.approx(want, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize('name', NAMES)
@quick
@hypothesis.given(strategies.integers(0, 10**6))
def test_at_a_ratio_of_one_it_is_the_plain_policy_gradient(name, seed):
  x = example(name, seed, spread=0.0)
  adv_BT = np.where(x['mask_BT'], x['adv_BT'], 0)
  n_BT = np.maximum(per_episode(x, x['logp_BT'])[1], 1) if name == 'gspo' else 1
  np.testing.assert_allclose(loss_and_grad(name, x)[1], -adv_BT / n_BT, rtol=1e-6)


@pytest.mark.parametrize('name', NAMES)
@quick
@hypothesis.given(
  strategies.integers(0, 10**6),
  strategies.sampled_from([1e4, -1e4, np.inf, -np.inf, np.nan]),
)
def test_nothing_in_a_masked_slot_reaches_loss_or_gradient(name, seed, value):
  clean = example(name, seed)
  dirty = {
    k: v if v.dtype == bool else np.where(clean['mask_BT'], v, np.float32(value))
    for k, v in clean.items()
  }
  assert fixtures.same_bits(loss_and_grad(name, clean), loss_and_grad(name, dirty))


def test_all_masked_is_exactly_zero():
  for name in NAMES:
    x = example(name, 0) | {'mask_BT': np.zeros((B, T), bool)}
    loss, grad = loss_and_grad(name, x)
    assert float(loss) == 0 and not np.asarray(grad).any(), name


def one(name: str, d: float, adv: float, logp: float = -0.5, **rest: float) -> float:
  """The gradient weight of a single token: -dL/dlogp / A."""
  arrays = {'logp_BT': logp, 'mu_logp_BT': logp - d, 'adv_BT': adv, **rest}
  if name == 'gspo':
    arrays |= {'episode_log_ratio_BT': d, 'episode_tokens_BT': 1.0}
  x = {k: np.full((B, T), v, np.float32) for k, v in arrays.items()}
  x['mask_BT'] = np.arange(B * T).reshape(B, T) == 0
  return -float(loss_and_grad(name, x)[1][0, 0]) / adv


def test_icepop_drops_ratios_outside_its_band_on_either_side():
  assert one('icepop', np.log(0.49), 1.0) == one('icepop', np.log(5.1), -1.0) == 0
  assert one('icepop', np.log(0.51), -1.0) == pytest.approx(0.51, rel=1e-5)
  assert one('icepop', np.log(4.9), 1.0) == pytest.approx(4.9, rel=1e-5)


@pytest.mark.parametrize('adv', [1.0, -1.0])
def test_cispo_clips_above_only_and_never_drops_a_token(adv):
  assert one('cispo', 3.0, adv) == pytest.approx(5)
  assert one('cispo', -3.0, adv) == pytest.approx(np.exp(-3), rel=1e-5)


@pytest.mark.parametrize('name', ['ppo_clip', 'gspo'])
def test_negative_advantage_is_not_clipped_above(name):
  assert one(name, 1.0, -1.0) == pytest.approx(np.e, rel=1e-5)
  assert one(name, 1.0, 1.0) == 0
  assert one(name, -1.0, 1.0) == pytest.approx(np.exp(-1), rel=1e-5)
  assert one(name, -1.0, -1.0) == 0


def test_the_higher_clip_lets_a_positive_advantage_go_further():
  assert one('ppo_clip', np.log(1.27), 1.0) == pytest.approx(1.27, rel=1e-5)
  assert one('ppo_clip', np.log(1.29), 1.0) == 0
  assert one('ppo_clip', np.log(0.79), -1.0) == 0


def test_decoupled_clips_around_the_proximal_policy_and_weighs_by_it():
  # logp = prox: never clipped, however far the sampler is behind.
  assert one('decoupled_ppo', 0.5, 1.0, prox_logp_BT=-0.5) == pytest.approx(
    np.exp(0.5), rel=1e-5
  )
  assert one('decoupled_ppo', 5.0, 1.0, prox_logp_BT=-0.5) == 2  # the cap
  assert one('decoupled_ppo', 0.0, 1.0, prox_logp_BT=-1.0) == 0  # u = e^.5


def test_dppo_masks_by_probability_and_not_by_ratio():
  # A rare token may grow tenfold; a common one that moves by > .2 is dropped.
  rare = one('dppo', np.log(10), 1.0, logp=np.log(0.01))
  assert rare == pytest.approx(10 - 2e-3 * np.log(10), rel=1e-4)
  common = one('dppo', np.log(0.9 / 0.6), 1.0, logp=np.log(0.9))
  assert common == pytest.approx(-2e-3 * np.log(1.5), rel=1e-3)  # the penalty alone
  against = one('dppo', np.log(0.9 / 0.6), -1.0, logp=np.log(0.9))
  assert against == pytest.approx(1.5 + 2e-3 * np.log(1.5), rel=1e-4)


@pytest.mark.parametrize('name', ['ppo_clip', 'gspo', 'icepop', 'dppo', 'cispo'])
def test_a_ratio_that_overflows_and_is_dropped_leaves_finite_numbers(name):
  assert np.isfinite(one(name, 200.0, 1.0))


def test_a_unit_ratio_replaces_the_tokens_own():
  x = example('reinforce_tis', 5)
  unit_BT = np.full((B, T), np.log(1.5), np.float32)
  for name in ('reinforce_tis', 'icepop', 'cispo'):
    grad = loss_and_grad(name, x | {'unit_log_ratio_BT': unit_BT})[1]
    want = np.where(x['mask_BT'], -1.5 * x['adv_BT'], 0)
    np.testing.assert_allclose(grad, want, rtol=1e-5)


def test_the_kl_penalty_is_taken_off_the_advantage_of_its_token():
  rng = np.random.default_rng(0)
  full_BT, ref_BT = -rng.uniform(0, 3, (2, B, T)).astype(np.float32)
  adv_BT = rng.normal(size=(B, T)).astype(np.float32)
  mask_BT = rng.random((B, T)) < 0.7
  fn = functools.partial(policy_loss.kl_penalised, weight=0.3)
  got = fn(adv_BT, full_BT, ref_BT, mask_BT)
  want = np.where(mask_BT, adv_BT - 0.3 * (np.float64(full_BT) - ref_BT), 0)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  dirty = [np.where(mask_BT, a, np.float32(np.nan)) for a in (adv_BT, full_BT, ref_BT)]
  assert fixtures.same_bits(got, fn(*dirty, mask_BT))
  grad = jax.grad(lambda x: jnp.sum(fn(adv_BT, x, ref_BT, mask_BT)))(full_BT)
  assert not np.any(grad)  # k1 is a reward, not a term of the loss


def test_a_policy_that_is_its_reference_keeps_its_advantages_bit_for_bit():
  x = example('reinforce_tis', 2)
  got = policy_loss.kl_penalised(
    x['adv_BT'], x['logp_BT'], x['logp_BT'], np.ones((B, T), bool), weight=7.0
  )
  assert fixtures.same_bits(got, x['adv_BT'])


def test_the_expected_gradient_of_the_kl_penalty_is_that_of_the_kl():
  """Over a whole vocabulary: sum_a pi_a k1_a grad log pi_a = grad KL(pi || ref)."""
  rng = np.random.default_rng(1)
  z, ref = rng.normal(size=6), rng.normal(size=6)
  log_ref = ref - fixtures.logsumexp64(ref)

  def kl(z):
    log_pi = z - fixtures.logsumexp64(z)
    return float((np.exp(log_pi) * (log_pi - log_ref)).sum())

  def expected(z_V):
    log_pi_1V, every_1V = jax.nn.log_softmax(z_V)[None, :], np.ones((1, 6), bool)
    adv_1V = policy_loss.kl_penalised(
      np.zeros((1, 6), np.float32),
      log_pi_1V,
      log_ref[None].astype(np.float32),
      every_1V,
      weight=1.0,
    )
    # Each token of the vocabulary once, weighted by its probability through `mu`:
    # r = pi/mu with mu = 1 is pi, and the cap of 2 is never reached.
    mu_1V = np.zeros((1, 6), np.float32)
    return policy_loss.reinforce_tis(log_pi_1V, mu_1V, adv_1V, every_1V, cap=2.0)

  grad = jax.grad(expected)(z.astype(np.float32))
  step = 1e-6 * np.eye(6)
  want = [(kl(z + h) - kl(z - h)) / 2e-6 for h in step]
  np.testing.assert_allclose(grad, want, atol=1e-5)
