"""From settings to an objective, and what is measured before the step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config
from swe17.learner import batching, objectives
from swe17.learner import state as st
from swe17.ops import policy_loss
from tests import fixtures

ROWS = config.Batch(groups=2, row_length=32, micro_rows=2)
NAMES = ('a', 'b', 'a', 'b', 'c')  # 'a' and 'b' have segments in several rows


def batch() -> st.Batch:
  rng = np.random.default_rng(0)
  turns = [((3, 9), (4, 6)), ((2, 12), (5, 5)), ((1, 8),), ((4, 4), (2, 3)), ((3, 20),)]
  items = [
    batching.Item(fixtures.segment(rng, *t), adv, name)
    for t, adv, name in zip(turns, (1.0, -0.5, 1.0, -0.5, -2.0), NAMES, strict=True)
  ]
  return batching.fill(items, micro=3, cfg=ROWS, K=4, denominator=1.0)


def scored(micro: st.Batch) -> jax.Array:
  """A policy that has moved by an amount each token of its own."""
  return micro.mu_logp_MBT + 0.02 * (micro.token_MBT - 48.0)


@functools.cache
def measured() -> st.Batch:
  return jax.jit(functools.partial(objectives.measured, scored))(batch())


def test_turns_and_episodes_are_measured_over_all_their_rows():
  b, got = batch(), measured()
  assert b.micro > 1
  on, d = b.mask_MBT, 0.02 * (b.token_MBT - 48.0)
  row = np.broadcast_to(np.arange(6).reshape(3, 2, 1), on.shape)
  for at in zip(*np.nonzero(on), strict=True):
    episode = on & (b.episode_MBT == b.episode_MBT[at])
    turn = on & (row == row[at]) & (b.turn_MBT == b.turn_MBT[at])
    turn &= b.segment_MBT == b.segment_MBT[at]
    assert float(got.episode_tokens_MBT[at]) == episode.sum()
    want = pytest.approx(d[episode].mean(), abs=1e-5)
    assert float(got.episode_log_ratio_MBT[at]) == want
    assert float(got.turn_log_ratio_MBT[at]) == pytest.approx(d[turn].mean(), abs=1e-5)
    want = pytest.approx(b.mu_logp_MBT[at] + d[at], abs=1e-6)
    assert float(got.prox_logp_MBT[at]) == want


def test_nothing_in_a_masked_slot_is_measured():
  clean = batch()
  dirty = dataclasses.replace(
    clean, mu_logp_MBT=np.where(clean.mask_MBT, clean.mu_logp_MBT, np.float32(np.nan))
  )
  got = jax.jit(functools.partial(objectives.measured, scored))(dirty)
  for name in ('turn_log_ratio_MBT', 'episode_log_ratio_MBT', 'episode_tokens_MBT'):
    assert fixtures.same_bits(getattr(got, name), getattr(measured(), name)), name


@pytest.mark.parametrize(
  ('settings', 'needed'),
  [
    ({}, False),
    ({'objective': 'ppo_clip'}, False),
    ({'objective': 'dppo'}, False),
    ({'objective': 'gspo'}, True),
    ({'objective': 'decoupled_ppo'}, True),
    ({'level': 'turn'}, True),
    ({'sequence_mask': 'off_policy'}, True),
  ],
)
def test_the_pass_before_the_step_is_taken_only_where_needed(settings, needed):
  assert objectives.needs_measuring(config.Loss(**settings)) == needed


def loss(settings: dict, micro: st.Batch) -> tuple[float, np.ndarray]:
  cfg = config.Loss(**settings)
  fn = objectives.objective(cfg)
  mask_BT = objectives.trained(cfg, micro)
  value, grad = jax.value_and_grad(lambda x: fn(x, micro, mask_BT))(scored(micro))
  return float(value), np.asarray(grad)


def first(b: st.Batch) -> st.Batch:
  return jax.tree.map(lambda x: jnp.asarray(x)[0] if np.ndim(x) else x, b)


@pytest.mark.parametrize(
  ('settings', 'name', 'kwargs'),
  [
    ({'tis_cap': 1.2}, 'reinforce_tis', {'cap': 1.2}),
    ({'icepop_low': 0.9}, 'icepop', {'low': 0.9, 'high': 5.0}),
    ({'cispo_high': 0.1}, 'cispo', {'high': 0.1}),
    ({'clip_low': 0.1}, 'ppo_clip', {'low': 0.1, 'high': 0.28}),
    ({'dppo_gap': 0.05}, 'dppo', {'gap': 0.05, 'penalty': 1e-3}),
  ],
)
def test_settings_reach_their_objective(settings, name, kwargs):
  micro = first(measured())
  fn = functools.partial(getattr(policy_loss, name), **kwargs)
  want = fn(scored(micro), micro.mu_logp_MBT, micro.adv_MBT, micro.mask_MBT)
  assert loss({'objective': name, **settings}, micro)[0] == pytest.approx(float(want))


def test_a_ratio_at_the_level_of_a_turn_is_one_for_all_of_its_tokens():
  micro = first(measured())
  for level, field in (('turn', 'turn_log_ratio'), ('episode', 'episode_log_ratio')):
    _, grad = loss({'level': level, 'tis_cap': 1e9}, micro)
    want = np.exp(getattr(micro, f'{field}_MBT')) * micro.adv_MBT * micro.mask_MBT
    np.testing.assert_allclose(grad, -want, rtol=1e-5)


def test_at_the_start_of_a_step_decoupled_ppo_is_reinforce_tis():
  micro = first(measured())
  _, decoupled = loss({'objective': 'decoupled_ppo'}, micro)
  np.testing.assert_allclose(decoupled, loss({}, micro)[1], rtol=1e-5)


def test_sequence_masks_take_whole_episodes_out_of_the_loss():
  micro = first(measured())
  ratio = np.exp(np.asarray(micro.episode_log_ratio_MBT))
  band = {'geometric_low': 0.86, 'geometric_high': 1.05}
  _, grad = loss({'sequence_mask': 'geometric', **band}, micro)
  keep = (ratio >= 0.86) & (ratio <= 1.05) & micro.mask_MBT
  assert 0 < keep.sum() < micro.mask_MBT.sum()
  np.testing.assert_array_equal(grad != 0, keep)
  _, grad = loss({'sequence_mask': 'off_policy', 'off_policy_delta': 0.0}, micro)
  keep = ((micro.adv_MBT >= 0) | (ratio >= 1)) & micro.mask_MBT
  np.testing.assert_array_equal(grad != 0, keep)


def test_silenced_tokens_are_those_without_a_gradient_that_have_an_advantage():
  micro = first(measured())
  micro = dataclasses.replace(
    micro, adv_MBT=jnp.where(micro.segment_MBT == 2, 0.0, micro.adv_MBT)
  )
  for settings in (
    {},
    {'objective': 'ppo_clip'},
    {'objective': 'dppo', 'dppo_gap': 0.1},
    {'sequence_mask': 'geometric', 'geometric_low': 0.86, 'geometric_high': 1.05},
  ):
    cfg = config.Loss(**settings)
    mask_BT = objectives.trained(cfg, micro)
    got = objectives.silenced(cfg, scored(micro), micro, mask_BT)
    _, grad = loss({**settings, 'dppo_penalty': 0.0}, micro)
    asked = micro.mask_MBT & (micro.adv_MBT != 0)
    assert float(got) == (asked & (grad == 0)).sum()
    assert (float(got) > 0) == bool(settings)


def test_the_kl_penalty_is_under_the_objective_and_not_under_the_masks():
  """Masks go by the advantages of outcomes; ratios and clips hold for the penalty."""
  micro = first(measured())
  micro = dataclasses.replace(micro, ref_logp_MBT=micro.mu_logp_MBT - 10.0)
  cfg = config.Loss(kl_weight=1.0, sequence_mask='off_policy', off_policy_delta=0.0)
  full_BT = micro.mu_logp_MBT  # k1 is 10 everywhere: all advantages become negative
  got = objectives.penalised(cfg, micro, full_BT)
  want = np.where(micro.mask_MBT, micro.adv_MBT - 10, 0)
  np.testing.assert_allclose(got.adv_MBT, want, rtol=1e-6)
  assert np.all(np.asarray(got.adv_MBT) <= 0)
  by_outcome = np.asarray(objectives.trained(cfg, micro))
  assert by_outcome.sum() > np.asarray(objectives.trained(cfg, got)).sum()
  _, grad = loss({'tis_cap': 1.2}, got)
  ratio = np.exp(np.asarray(scored(micro) - micro.mu_logp_MBT))
  np.testing.assert_allclose(grad, -np.minimum(ratio, 1.2) * want, rtol=1e-5)


def test_what_the_reference_says_is_kept_for_every_micro_batch():
  got = jax.jit(functools.partial(objectives.referred, scored))(batch())
  assert fixtures.same_bits(got.ref_logp_MBT, measured().prox_logp_MBT)
  assert fixtures.same_bits(got.prox_logp_MBT, np.zeros_like(got.prox_logp_MBT))
