"""The kept set: which ids stay, that draws come from it, and what is recorded."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import kept_set
from tests import fixtures

_filter = jax.jit(kept_set.filter, static_argnums=4)
_draw = jax.jit(kept_set.draw, static_argnums=6)

# (probabilities, filters, kept ids)
ROWS = [
  ([0.4, 0.3, 0.2, 0.1], {'top_p': 0.8}, {0, 1, 2}),  # the id that crosses p stays
  ([0.97, 0.02, 0.01], {'top_p': 0.95}, {0}),  # never empty
  ([0.3, 0.1, 0.1, 0.5], {'top_p': 0.8}, {0, 3}),  # mass reaches p exactly
  ([0.3, 0.1, 0.1, 0.5], {'top_p': 1.0}, {0, 1, 2, 3}),
  ([0.5, 0.25, 0.25], {'top_p': 0.75}, {0, 1}),  # dyadic: exact in any float
  ([0.5, 0.25, 0.25], {'top_p': 1.0}, {0, 1, 2}),
  ([0.25, 0.25, 0.25, 0.25], {'top_p': 0.5}, {0, 1}),  # ties by id
  ([0.1, 0.3, 0.3, 0.3], {'top_k': 2}, {1, 2}),
  ([0.3, 0.25, 0.2, 0.15, 0.1], {'top_k': 1, 'top_p': 0.6}, {0}),
  # Top-p counts mass among the survivors of top-k: .3/.55 = .545 < .6.
  ([0.3, 0.25, 0.2, 0.15, 0.1], {'top_k': 2, 'top_p': 0.6}, {0, 1}),
  ([0.3, 0.25, 0.2, 0.15, 0.1], {'top_k': 2, 'top_p': 0.54}, {0}),
  # Min-p comes first: .2 and less fall, and of the rest .3 has .545 of the mass.
  ([0.3, 0.25, 0.2, 0.15, 0.1], {'min_p': 0.75, 'top_p': 0.54}, {0}),
  ([0.5, 0.25, 0.125, 0.125], {'min_p': 0.5}, {0, 1}),  # p = min_p p_max stays
]


def kept(prob, *, top_p=1.0, min_p=0.0, top_k=0) -> set[int]:
  """The set that `filter` keeps of one row of probabilities."""
  V = len(prob)
  ids, _, keep = _filter(
    np.log(np.float32(prob))[None],
    np.float32([top_p]),
    np.float32([min_p]),
    np.int32([top_k or V]),
    V,
  )
  return set(np.asarray(ids[0])[np.asarray(keep[0])].tolist())


def draw(logits_BV, *, seed=0, T=1.0, top_p=1.0, min_p=0.0, top_k=0, K=None):
  B, V = logits_BV.shape
  return _draw(
    jax.random.split(jax.random.key(seed), B),
    logits_BV,
    np.full(B, T, np.float32),
    np.full(B, top_p, np.float32),
    np.full(B, min_p, np.float32),
    np.full(B, top_k or K or V, np.int32),
    V if K is None else K,
  )


def logits(seed: int) -> np.ndarray:
  return np.random.default_rng(seed).normal(size=(64, 11)).astype(np.float32)


def sets(draws: kept_set.Draw) -> list[set[int]]:
  return [{int(i) for i in row if i >= 0} for row in np.asarray(draws.kept_ids_BK)]


@pytest.mark.parametrize('prob, filters, want', ROWS)
def test_rows_by_hand(prob, filters, want):
  assert kept(prob, **filters) == want
  assert set(fixtures.kept64(np.array(prob), **filters)) == want


@pytest.mark.parametrize('top_p', [0.3, 0.8, 0.95, 0.999])
def test_the_smallest_prefix_whose_mass_reaches_p(top_p):
  prob_BV = np.random.default_rng(1).dirichlet(np.full(50, 0.3), 75)
  for prob in prob_BV:
    ids = kept(prob, top_p=top_p)
    assert ids == set(fixtures.kept64(prob, top_p=top_p))
    mass = sorted(prob[list(ids)])
    assert sum(mass) >= top_p > sum(mass[1:])


def test_every_mix_of_filters_keeps_what_the_oracle_keeps():
  rng = np.random.default_rng(2)
  for _ in range(100):
    prob = rng.dirichlet(np.full(12, 0.5))
    filters = {
      'top_p': float(rng.uniform(0.01, 1)),
      'min_p': float(rng.uniform(0, 0.9)),
      'top_k': int(rng.integers(1, 13)),
    }
    ids = kept(prob, **filters)
    assert ids == set(fixtures.kept64(prob, **filters))
    assert int(prob.argmax()) in ids


# Powers of two: their logarithms differ by exact multiples of log 2, and every sum of
# them is exact, so mass meets p without rounding.
DYADIC = [
  [0.5, 0.25, 0.25],
  [0.25, 0.125, 0.5, 0.125],
  [0.25] * 4,
  [0.125] * 8,
  [0.125, 0.125, 0.5, 0.125, 0.125],
  [0.0625] * 16,
  [0.125, 0.25, 0.125, 0.25, 0.125, 0.125],
]


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize('prob', DYADIC)
def test_mass_that_meets_p_exactly_ends_the_set_in_both_precisions(prob, dtype):
  mass, V = np.cumsum(sorted(prob, reverse=True)), len(prob)
  with jax.enable_x64(dtype == np.float64):
    for p in mass:
      z_BV = jnp.asarray(np.log(np.array(prob, dtype)))[None]
      assert z_BV.dtype == dtype
      one = (np.array([p], dtype), np.zeros(1, dtype), np.array([V], np.int32))
      ids, _, keep = _filter(z_BV, *one, V)
      kept_ids = np.asarray(ids[0])[np.asarray(keep[0])].tolist()
      assert kept_ids == fixtures.kept64(np.array(prob), top_p=p)
      assert len(kept_ids) == 1 + np.searchsorted(mass, p)


@settings(deadline=None, max_examples=150)
@given(
  # Few values, so that ties are the rule; at least one id is possible.
  st.lists(st.integers(0, 4), min_size=8, max_size=8),
  st.integers(1, 8),
  st.floats(0.0078125, 1.0, width=32),
  st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_set_is_never_empty_holds_the_argmax_and_is_a_prefix(z, top_k, top_p, min_p):
  prob = np.exp(np.float64(z) - fixtures.logsumexp64(np.float64(z)))
  ids = kept(prob, top_k=top_k, top_p=top_p, min_p=min_p)
  order = sorted(range(8), key=lambda i: (-z[i], i))  # descending, ties by id
  assert 1 <= len(ids) <= top_k
  assert ids == set(order[: len(ids)])


TOPK_BOUND = [
  # (probabilities, filters, top_k decided)
  ([0.5, 0.3, 0.2], {'top_k': 2, 'top_p': 0.75}, False),  # .8 of the mass: enough
  ([0.5, 0.3, 0.2], {'top_k': 2, 'top_p': 0.85}, True),
  ([0.5, 0.3, 0.2], {'top_k': 3, 'top_p': 0.99}, False),  # nothing was cut
  ([0.5, 0.3, 0.2], {'top_k': 2}, True),
  ([0.5, 0.3, 0.2], {'top_k': 3}, False),
  ([0.5, 0.3, 0.2], {'top_k': 2, 'min_p': 0.5}, False),  # min-p left two
  # Smaller than top_k, and top_k's doing all the same: 7 of 8, .35 of the mass.
  ([0.05] * 20, {'top_k': 8, 'top_p': 0.85}, True),
]


def topk_bound(prob, *, top_p=1.0, min_p=0.0, top_k) -> bool:
  z_BV = jnp.log(jnp.float32(prob))[None]
  row = jnp.float32([top_p]), jnp.float32([min_p]), jnp.int32([top_k])
  _, z_BK, keep_BK = _filter(z_BV, *row, len(prob))
  return bool(kept_set.topk_bound(z_BV, z_BK, keep_BK, *row)[0])


@pytest.mark.parametrize('prob, filters, want', TOPK_BOUND)
def test_top_k_decided_where_the_set_would_be_larger_without_it(prob, filters, want):
  free = {k: v for k, v in filters.items() if k != 'top_k'}
  without = fixtures.kept64(np.array(prob), **free)
  assert want == (len(without) > len(kept(prob, **filters)))
  assert topk_bound(prob, **filters) == want


def test_top_k_decided_is_said_of_each_draw():
  flat = np.zeros((64, 40), np.float32)
  assert bool(jnp.all(draw(flat, top_k=8, top_p=0.9, K=8).topk_bound_B))
  assert max(map(len, sets(draw(flat, top_k=8, top_p=0.8, K=8)))) < 8
  assert not bool(jnp.any(draw(flat, top_k=8, top_p=0.02, K=8).topk_bound_B))
  assert not bool(jnp.any(draw(flat, K=0).topk_bound_B))
  assert not bool(jnp.any(draw(flat, T=0.0, K=8).topk_bound_B))  # one id, as asked


def test_the_vocabulary_is_never_sorted():
  V, K = 49_152, 64
  row = [jax.ShapeDtypeStruct((4,), x) for x in (*['float32'] * 3, 'int32')]
  key_B = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 4))
  z_BV = jax.ShapeDtypeStruct((4, V), 'float32')
  text = _draw.lower(key_B, z_BV, *row, K).compile().as_text()
  sorts = [line for line in text.splitlines() if re.search(r'\bsort\(', line)]
  assert not any(str(V) in line for line in sorts), sorts
  assert 'TopK' in text  # what bounds the set is there, by this name
  # The control: the same search finds the sort in a program that has one.
  whole = jax.jit(jnp.sort).lower(z_BV).compile().as_text()
  assert any(str(V) in line for line in re.findall(r'.*\bsort\(.*', whole))


@pytest.mark.parametrize('top_k', [1, 3, 7])
@pytest.mark.parametrize('top_p', [1e-6, 0.6, 1.0])
def test_the_recorded_set_is_the_set_that_draws_come_from(top_k, top_p):
  logits_V = 2 * jax.random.normal(jax.random.key(3), (7,))
  many = jnp.tile(logits_V, (5000, 1))
  got = draw(many, top_k=top_k, top_p=top_p)
  prob = np.asarray(jax.nn.softmax(logits_V), np.float64)
  want = set(fixtures.kept64(prob, top_k=top_k, top_p=top_p))
  assert all(s == want for s in sets(got))
  token_B = np.asarray(got.token_B)
  assert set(token_B.tolist()) <= want
  # And in its proportions: within 5 standard deviations for every id.
  q = {i: prob[i] / sum(prob[j] for j in want) for i in want}
  for i in want:
    assert abs((token_B == i).mean() - q[i]) <= 5 * np.sqrt(q[i] * (1 - q[i]) / 5000)


@pytest.mark.parametrize('K', [0, 7])
def test_top_p_of_one_draws_every_id(K):
  row = np.log(np.float32([0.5, 0.25, 0.25, 1e-30, 1e-30, 1e-30, 1e-30]))
  got = draw(jnp.tile(row, (5000, 1)), K=K)
  assert set(np.asarray(got.token_B).tolist()) == {0, 1, 2}


def test_no_filter_records_no_set():
  got = draw(logits(0), K=0)
  assert got.kept_ids_BK.shape == (64, 1)
  assert bool(jnp.all(got.kept_ids_BK == -1))


@pytest.mark.parametrize('filters', [{'K': 0}, {'top_k': 5}, {'top_p': 0.7}])
def test_log_probability_is_within_the_set(filters):
  logits_BV = 3 * logits(4)
  got = draw(logits_BV, T=0.6, **filters)
  for z, token, ids, logp in zip(
    np.asarray(logits_BV, np.float64),
    np.asarray(got.token_B),
    sets(got),
    np.asarray(got.logp_B),
    strict=True,
  ):
    inside = z[sorted(ids)] if ids else z
    want = z[token] / 0.6 - fixtures.logsumexp64(inside / 0.6)
    assert logp == pytest.approx(want, abs=1e-5)
    if len(ids) == 1:
      assert logp == 0.0


def test_temperature_zero_takes_the_argmax_alone():
  logits_BV = logits(5)
  for K in (0, 11):
    got = draw(logits_BV, T=0.0, K=K)
    assert bool(jnp.all(got.token_B == jnp.argmax(logits_BV, -1)))
    assert bool(jnp.all(got.entropy_B == 0))
    assert sets(got) == [{int(i)} for i in got.token_B]
    assert bool(jnp.all(got.logp_B == 0))


def test_temperature_acts_before_the_filters():
  # At T = 1 the first id has .73 of the mass; at T = 4 only .56.
  logits_BV = np.tile(np.float32([1.0, 0.0] + [-99.0] * 9), (64, 1))
  assert sets(draw(logits_BV, top_p=0.6))[0] == {0}
  assert sets(draw(logits_BV, T=4.0, top_p=0.6))[0] == {0, 1}


def test_entropy_is_of_the_whole_vocabulary_at_the_temperature():
  uniform = draw(np.zeros((64, 11), np.float32), top_k=2)
  assert float(uniform.entropy_B[0]) == pytest.approx(np.log(11), abs=1e-6)
  z = np.float64(logits(7)[0])
  logp = z / 0.5 - fixtures.logsumexp64(z / 0.5)
  got = draw(logits(7), T=0.5, top_k=1)
  assert float(got.entropy_B[0]) == pytest.approx(
    -(np.exp(logp) * logp).sum(), abs=1e-6
  )


def test_entropy_of_an_excluded_id_is_no_nan():
  got = kept_set.entropy(jnp.float32([[0.0, 0.0, -jnp.inf]]))
  assert float(got[0]) == pytest.approx(np.log(2), abs=1e-6)


def test_members_of_a_group_differ_and_a_key_replays_its_draw():
  # Uniform logits, 8 members x 16 positions: no two alike, no token run above 4.
  texts = np.stack(
    [np.asarray(draw(jnp.zeros((8, 97)), seed=t, top_k=97).token_B) for t in range(16)]
  ).T
  assert len({tuple(row) for row in texts.tolist()}) == 8
  for row in texts:
    assert not any((row[i : i + 5] == row[i]).all() for i in range(12))
  again = draw(jnp.zeros((8, 97)), seed=3, top_k=97).token_B
  assert np.array_equal(again, texts[:, 3])


def test_a_draw_does_not_depend_on_the_other_rows():
  logits_BV = logits(6)
  settings = [np.full(64, x, np.float32) for x in (1.0, 0.9, 0.0)]
  key_B = jax.random.split(jax.random.key(0), 64)
  order = np.random.default_rng(0).permutation(64)
  one = _draw(key_B, logits_BV, *settings, np.full(64, 6, np.int32), 11)
  two = _draw(key_B[order], logits_BV[order], *settings, np.full(64, 6, np.int32), 11)
  assert fixtures.same_bits(jax.tree.map(lambda x: x[order], one), two)


def test_rows_may_have_settings_of_their_own():
  logits_BV = np.tile(logits(7)[:1], (64, 1))
  T = np.tile(np.float32([1.0, 0.5, 1.0, 0.0]), 16)
  top_p = np.tile(np.float32([0.7, 1.0, 1.0, 1.0]), 16)
  min_p = np.tile(np.float32([0.0, 0.0, 0.4, 0.0]), 16)
  top_k = np.tile(np.int32([11, 3, 11, 11]), 16)
  key_B = jax.random.split(jax.random.key(0), 64)
  got = sets(_draw(key_B, logits_BV, T, top_p, min_p, top_k, 11))
  prob = np.asarray(jax.nn.softmax(logits_BV[0]), np.float64)
  want = [{'top_p': 0.7}, {'top_k': 3}, {'min_p': 0.4}, {'top_k': 1}]
  assert got == 16 * [set(fixtures.kept64(prob, **filters)) for filters in want]


@pytest.mark.parametrize('K', [0, 11])
def test_jit_draws_the_same(K):
  settings = [np.full(64, x, np.float32) for x in (0.8, 0.9, 0.05)]
  key_B = jax.random.split(jax.random.key(1), 64)
  args = (key_B, jnp.asarray(2 * logits(8)), *settings, np.full(64, 5, np.int32))
  plain = kept_set.draw(*args, K)
  jitted = _draw(*args, K)
  assert np.array_equal(plain.token_B, jitted.token_B)
  assert np.array_equal(plain.kept_ids_BK, jitted.kept_ids_BK)
  np.testing.assert_allclose(plain.logp_B, jitted.logp_B, atol=1e-6)
  np.testing.assert_allclose(plain.entropy_B, jitted.entropy_B, atol=1e-6)


def test_membership_of_padded_and_absent_sets():
  kept_ids_BTK = jnp.int32([[[2, 0, -1], [-1, -1, -1], [-1, 3, 3]]])
  got = np.asarray(kept_set.member(kept_ids_BTK, 4)[0])
  assert got.tolist() == [
    [True, False, True, False],
    [True] * 4,  # no set: nothing was filtered
    [False, False, False, True],
  ]


def test_membership_is_the_triple_loop_on_axes_of_different_lengths():
  B, T, K, V = 2, 3, 5, 7
  ids = np.random.default_rng(0).integers(-1, V, (B, T, K))
  got = np.asarray(jax.jit(kept_set.member, static_argnums=1)(jnp.asarray(ids), V))
  for b in range(B):
    for t in range(T):
      for v in range(V):
        assert got[b, t, v] == (v in ids[b, t] or (ids[b, t] < 0).all())


@pytest.mark.parametrize('V', [2048, 2049, 3000])  # whole blocks and broken ones
@pytest.mark.parametrize('kind', ['distinct', 'ties', 'few', 'one block'])
def test_the_blockwise_top_k_is_the_plain_one_bit_for_bit(V, kind):
  rng = np.random.default_rng(V)
  z_BV = rng.normal(size=(3, V)).astype(np.float32)
  if kind == 'ties':
    z_BV = np.round(z_BV)
  elif kind == 'few':  # fewer than K are not -inf
    z_BV[:, 2:] = -np.inf
  elif kind == 'one block':
    z_BV[:, 128:256] += 100
  for K in (1, 2, 4):
    values_BK, ids_BK = jax.jit(kept_set.top_k, static_argnums=1)(z_BV, K)
    want_BK, want_ids_BK = jax.lax.top_k(z_BV, K)
    np.testing.assert_array_equal(values_BK, want_BK)
    np.testing.assert_array_equal(ids_BK, want_ids_BK)


def test_the_blockwise_top_k_never_looks_at_all_ids_at_once():
  def sizes(V):
    text = jax.jit(kept_set.top_k, static_argnums=1).lower(jnp.zeros((1, V)), 4)
    return [int(n) for n in re.findall(r'top_k.*?tensor<1x(\d+)xf32>', text.as_text())]

  assert sizes(4096) == [32, 512]  # blocks, then the ids of four of them
  assert sizes(512) == [512]
