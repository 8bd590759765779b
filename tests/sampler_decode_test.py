"""Prefill and decode as functions: what is drawn, and who writes what."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.sampler import decode

MODEL = config.Model(
  layers=2, width=64, ffn=128, heads=4, kv_heads=2, head_dim=16, rotary_dim=8
)
V, K, LENGTH, B = 97, 8, 16, 64


@pytest.fixture(scope='module')
def params() -> p.Params:
  return p.rounded(p.init(p.abstract(MODEL, V), jax.random.key(0)))


@functools.cache
def program(steps: int):
  return jax.jit(functools.partial(decode.decode, cfg=MODEL, K=K, steps=steps))


def slots(**changes) -> decode.Slots:
  values = {
    'table_BJ': np.arange(B, dtype=np.int32)[:, None],  # a page is a whole row
    'token_B': np.full(B, 5, np.int32),
    'position_B': np.zeros(B, np.int32),
    'left_B': np.full(B, 4, np.int32),
    'stop_BX': np.full((B, 2), -1, np.int32),
    'key_B2': np.stack([np.arange(B), np.ones(B)], axis=1).astype(np.uint32),
    'temperature_B': np.ones(B, np.float32),
    'top_p_B': np.full(B, 0.9, np.float32),
    'min_p_B': np.zeros(B, np.float32),
    'top_k_B': np.full(B, K, np.int32),
  }
  return decode.Slots(**{k: jnp.asarray(v) for k, v in {**values, **changes}.items()})


def arrays(tree) -> list[np.ndarray]:
  return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_draws_follow_the_recorded_probabilities(params):
  """Chi-square of 4,096 draws of one distribution, each under a key of its own."""
  counts, prob = {}, {}
  cache = kv.init(MODEL, B, LENGTH)
  for i in range(64):
    key_B2 = np.stack([np.full(B, i), np.arange(B)], axis=1).astype(np.uint32)
    _, _, draws = program(1)(params, cache, slots(key_B2=key_B2))
    sets = {tuple(sorted(row.tolist())) for row in np.asarray(draws.kept_ids_BK[0])}
    assert len(sets) == 1
    for token, logp in zip(
      draws.token_B[0].tolist(), draws.logp_B[0].tolist(), strict=True
    ):
      counts[token] = counts.get(token, 0) + 1
      assert abs(prob.setdefault(token, np.exp(logp)) - np.exp(logp)) < 1e-6
  n = sum(counts.values())
  assert len(counts) >= 4
  assert set(counts) == {i for i in sets.pop() if i >= 0}
  assert sum(prob.values()) == pytest.approx(1, abs=1e-5)
  chi2 = sum((counts[t] - n * prob[t]) ** 2 / (n * prob[t]) for t in counts)
  # P(chi-square of k degrees of freedom > x) = Q(k / 2, x / 2)
  assert float(jax.scipy.special.gammaincc((len(counts) - 1) / 2, chi2 / 2)) > 1e-4


def test_many_steps_in_a_dispatch_equal_single_steps(params):
  cache = kv.init(MODEL, B, LENGTH)
  cache_many, after_many, many = program(4)(params, cache, slots())
  s, singles = slots(), []
  for _ in range(4):
    cache, s, draws = program(1)(params, cache, s)
    singles.append(draws)
  for name in ('token_B', 'logp_B', 'kept_ids_BK'):
    want = np.concatenate([np.asarray(getattr(d, name)) for d in singles])
    np.testing.assert_allclose(np.asarray(getattr(many, name)), want, atol=1e-5)
  for a, b in zip(arrays(after_many), arrays(s), strict=True):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(arrays(cache_many), arrays(cache), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_draw_does_not_depend_on_the_other_slots(params):
  cache = kv.init(MODEL, B, LENGTH)
  _, _, together = program(4)(params, cache, slots())
  for b in (0, 17, B - 1):
    left_B = np.where(np.arange(B) == b, 4, 0).astype(np.int32)
    other_B = np.where(np.arange(B) == b, 5, 60).astype(np.int32)
    _, _, alone = program(4)(params, cache, slots(left_B=left_B, token_B=other_B))
    np.testing.assert_array_equal(alone.token_B[:, b], together.token_B[:, b])
    np.testing.assert_allclose(alone.logp_B[:, b], together.logp_B[:, b], atol=1e-6)


def test_a_key_draws_differently_at_each_position(params):
  flat = jax.tree.map(jnp.zeros_like, params)
  cache = kv.init(MODEL, B, LENGTH)
  _, _, draws = program(4)(flat, cache, slots(top_p_B=np.ones(B, np.float32)))
  token_TB = np.asarray(draws.token_B)
  same = np.mean(np.all(token_TB == token_TB[:1], axis=0))
  assert same < 0.2  # by chance 8 ** -3


def test_an_idle_slot_writes_nothing_and_stays_as_it_is(params):
  cache = jax.tree.map(lambda x: x + 7, kv.init(MODEL, B, LENGTH))
  left_B = (np.arange(B) % 2 * 4).astype(np.int32)
  before = slots(left_B=left_B)
  cache_after, after, _ = program(4)(params, cache, before)
  for old, new in zip(arrays(cache), arrays(cache_after), strict=True):
    np.testing.assert_array_equal(old[::2], new[::2])
  kept, written = (
    [*(np.swapaxes(k, 2, 3) for k in arrays(c.k)), *arrays(c.v)]
    for c in (cache, cache_after)
  )
  for old, new in zip(kept, written, strict=True):  # [B, heads, positions, H]
    assert (old[1::2, :, :4] != new[1::2, :, :4]).any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(old[:, :, 4:], new[:, :, 4:])
  np.testing.assert_array_equal(after.position_B, np.arange(B) % 2 * 4)
  np.testing.assert_array_equal(after.token_B[::2], before.token_B[::2])


def test_a_slot_stops_at_its_stop_token_and_at_its_limit(params):
  cache = kv.init(MODEL, B, LENGTH)
  _, _, free = program(4)(params, cache, slots())
  token_TB = np.asarray(free.token_B)
  stop_B = token_TB[1]
  stop_BX = np.stack([np.full(B, -1, np.int32), stop_B], axis=1)
  left_B = np.where(np.arange(B) % 2 == 0, 4, 3).astype(np.int32)
  _, after, _ = program(4)(params, cache, slots(stop_BX=stop_BX, left_B=left_B))
  first_B = (token_TB == stop_B).argmax(axis=0)  # 0 or 1: the second draw at the latest
  np.testing.assert_array_equal(after.position_B, first_B + 1)
  np.testing.assert_array_equal(after.left_B, 0)
  _, after, _ = program(4)(params, cache, slots(left_B=left_B))
  np.testing.assert_array_equal(after.position_B, np.minimum(left_B, 4))


def test_prefill_in_chunks_of_any_rows_equals_prefill_at_once(params):
  token_T = np.random.default_rng(1).integers(0, V, 12).astype(np.int32)
  at_once = decode.prefill(
    params,
    kv.init(MODEL, 3, LENGTH),
    token_T[None],
    np.arange(12)[None],
    np.array([[2]]),
    cfg=MODEL,
  )
  cache = kv.init(MODEL, 3, LENGTH)
  for at in (0, 6):
    # The second row is padding that points at row 0, beyond the cache.
    token_BT = np.zeros((2, 8), np.int32)
    position_BT = np.full((2, 8), LENGTH, np.int32)
    token_BT[0, :6], position_BT[0, :6] = token_T[at : at + 6], np.arange(at, at + 6)
    cache = decode.prefill(
      params, cache, token_BT, position_BT, np.array([[2], [0]]), cfg=MODEL
    )
  for a, b in zip(arrays(at_once), arrays(cache), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
    assert (b[:2] == 0).all()


def test_a_set_of_one_has_a_log_probability_of_exactly_zero(params):
  cache = kv.init(MODEL, B, LENGTH)
  lone = slots(top_k_B=np.ones(B, np.int32))
  greedy = dataclasses.replace(slots(), temperature_B=jnp.zeros(B))
  for s in (lone, greedy):
    _, _, draws = program(4)(params, cache, s)
    assert (np.asarray(draws.logp_B) == 0).all()
    assert ((np.asarray(draws.kept_ids_BK) >= 0).sum(axis=-1) == 1).all()
