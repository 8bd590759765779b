"""Sums over turns and episodes of packed rows, and sequence masks."""

import functools

import hypothesis
from hypothesis import strategies
import jax
import numpy as np
import pytest

from swe17.ops import masking
from tests import fixtures

B, T, P, J = 3, 16, 5, 6
_totals = jax.jit(functools.partial(masking.episode_totals, P=P, J=J))
_turns = jax.jit(masking.turn_totals)
quick = hypothesis.settings(max_examples=40, deadline=None, derandomize=True)


def layout(seed: int) -> dict[str, np.ndarray]:
  """Rows of up to P segments, episodes spread over rows, padding at the end."""
  rng = np.random.default_rng(seed)
  segment_BT, episode_BT, turn_BT = np.zeros((3, B, T), np.int32)
  for b in range(B):
    at = turn = 0
    for j in range(1, P + 1):
      n = int(rng.integers(0, 4))
      to = slice(at, at + n)
      segment_BT[b, to], episode_BT[b, to] = j, rng.integers(J)
      new = 1 + np.cumsum(rng.random(n) < 0.4)
      turn_BT[b, to] = turn + new
      turn, at = turn + int(new[-1] if n else 0), at + n
  x_BT = rng.normal(size=(B, T)).astype(np.float32)
  x_BT[segment_BT == 0] = 0
  return {'x': x_BT, 'segment': segment_BT, 'episode': episode_BT, 'turn': turn_BT}


@quick
@hypothesis.given(strategies.integers(0, 10**6))
def test_an_episodes_total_is_over_all_of_its_rows(seed):
  a = layout(seed)
  want = np.zeros(J)
  for b in range(B):
    for t in range(T):
      if a['segment'][b, t]:
        want[a['episode'][b, t]] += a['x'][b, t]
  got = _totals(a['x'], a['segment'], a['episode'])
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_value_that_is_no_number_stays_with_its_own_turn_and_episode(value):
  a = layout(4)
  b, t = (int(i[0]) for i in np.nonzero(a['segment']))
  mine, clean = int(a['episode'][b, t]), a['x'].copy()
  a['x'][b, t] = value
  got, want = (_totals(x, a['segment'], a['episode']) for x in (a['x'], clean))
  assert not np.isfinite(got[mine])
  others = np.arange(J) != mine
  assert np.asarray(got)[others].tobytes() == np.asarray(want)[others].tobytes()
  turns, plain = (
    np.asarray(_turns(a['x'], a['turn'])),
    np.asarray(_turns(clean, a['turn'])),
  )
  own = np.zeros((B, T), bool)
  own[b] = a['turn'][b] == a['turn'][b, t]
  assert not np.isfinite(turns[own]).any()
  assert turns[~own].tobytes() == plain[~own].tobytes()


def test_parts_of_a_batch_add_up_to_the_whole():
  a = layout(3)
  whole = _totals(a['x'], a['segment'], a['episode'])
  parts = [
    _totals(np.where(np.arange(B)[:, None] == b, a['x'], 0), a['segment'], a['episode'])
    for b in range(B)
  ]
  np.testing.assert_allclose(sum(parts), whole, atol=1e-6)


@quick
@hypothesis.given(strategies.integers(0, 10**6))
def test_a_turns_total_is_over_its_own_tokens(seed):
  a = layout(seed)
  got = np.asarray(_turns(a['x'], a['turn']))
  for b in range(B):
    for t in range(T):
      own = a['turn'][b] == a['turn'][b, t]
      assert got[b, t] == pytest.approx(float(a['x'][b][own].sum()), abs=1e-5)


def test_the_average_of_nothing_is_zero():
  assert masking.average(np.float32([0, 6]), np.float32([0, 3])).tolist() == [0, 2]


def test_the_geometric_mask_is_by_mean_and_not_by_product():
  # A ratio of 1.05 a token is kept whatever the length; 1.2 and NaN are not.
  mean_BT = np.log(np.float32([[1.05, 0.95, 1.2, 0.8]]))
  mean_BT = np.append(mean_BT, [[np.nan]], axis=1)
  keep = masking.geometric(mean_BT, low=0.9, high=1.1)
  assert keep.tolist() == [[True, True, False, False, False]]


def test_the_off_policy_mask_drops_only_negative_advantages():
  # Mean k1 of .1 and of -.1 (more likely now than when it was sampled).
  mean_BT = np.float32([[-0.1, -0.1, 0.1, -0.01]])
  adv_BT = np.float32([[-1, 1, -1, -1]])
  keep = masking.off_policy(mean_BT, adv_BT, delta=0.05)
  assert keep.tolist() == [[False, True, True, True]]


@pytest.mark.parametrize('value', [1e4, -np.inf, np.nan])
def test_the_log_ratio_is_zero_where_masked_and_has_no_gradient(value):
  logp_BT = np.float32([[-1.0, value]])
  mu_BT, mask_BT = np.float32([[-3.0, value]]), np.array([[True, False]])
  assert masking.log_ratio(logp_BT, mu_BT, mask_BT).tolist() == [[2, 0]]
  total = jax.grad(lambda x: masking.log_ratio(x, mu_BT, mask_BT).sum())
  assert not np.asarray(total(logp_BT)).any()


def test_jit_computes_the_same():
  a = layout(1)
  plain = masking.episode_totals(a['x'], a['segment'], a['episode'], P=P, J=J)
  np.testing.assert_allclose(plain, _totals(a['x'], a['segment'], a['episode']), 1e-6)
  assert fixtures.same_bits(
    masking.turn_totals(a['x'], a['turn']), _turns(a['x'], a['turn'])
  )
