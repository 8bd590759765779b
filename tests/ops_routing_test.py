"""Routers against loops in float64; replay overrides the selection and nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.ops import routing

T, E, K = 6, 12, 3
RNG = np.random.default_rng(0)
LOGIT = np.float32(RNG.normal(size=(T, E)) * 2)
BIAS = np.float32(RNG.normal(size=E) * 0.5 - 0.8)  # biased scores of both signs
DY = np.float32(RNG.normal(size=(T, K)))


def largest(score, n: int) -> list[int]:
  return sorted(range(len(score)), key=lambda i: (-score[i], i))[:n]


def softmax64(s_E, renormalise: bool, recorded=None) -> tuple[list[int], list[float]]:
  ids = largest(s_E, K) if recorded is None else list(recorded)
  e = np.exp(np.float64(s_E))
  total = sum(e[j] for j in ids) if renormalise else sum(e)
  return ids, [e[i] / total for i in ids]


def sigmoid64(s_E, groups, best, renormalise, scale, recorded=None):
  score = [1 / (1 + np.exp(-float(s))) for s in s_E]
  choice = [a + float(b) for a, b in zip(score, BIAS, strict=True)]
  size = E // groups
  of_group = [
    sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)
  ]
  open_ = largest(of_group, best)
  allowed = [i for i in range(E) if i // size in open_]
  ids = sorted(allowed, key=lambda i: (-choice[i], i))[:K]
  ids = ids if recorded is None else list(recorded)
  total = sum(score[i] for i in ids) if renormalise else 1.0
  return ids, [scale * score[i] / total for i in ids]


def distinct(seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return np.int32([rng.permutation(E)[:K] for _ in range(T)])


def check(routes: routing.Routes, want: list) -> None:
  np.testing.assert_array_equal(routes.ids_TK, [ids for ids, _ in want])
  np.testing.assert_allclose(routes.weight_TK, [g for _, g in want], rtol=1e-5)


@pytest.mark.parametrize('replay', [False, True])
@pytest.mark.parametrize('renormalise', [False, True])
def test_softmax_router_equals_the_loop(renormalise, replay):
  recorded = distinct() if replay else None
  fn = functools.partial(routing.softmax, K=K, renormalise=renormalise)
  want = [
    softmax64(s, renormalise, recorded[t] if replay else None)
    for t, s in enumerate(LOGIT)
  ]
  check(fn(jnp.asarray(LOGIT), recorded_TK=recorded), want)


@pytest.mark.parametrize('replay', [False, True])
@pytest.mark.parametrize('renormalise', [False, True])
@pytest.mark.parametrize('groups, best', [(1, 1), (4, 2), (3, 1), (12, 5)])
def test_sigmoid_router_with_bias_and_groups_equals_the_loop(
  groups, best, renormalise, replay
):
  recorded = distinct() if replay else None
  got = routing.sigmoid(
    jnp.asarray(LOGIT),
    jnp.asarray(BIAS),
    K,
    groups=groups,
    best=best,
    renormalise=renormalise,
    scale=2.5,
    recorded_TK=recorded,
  )
  want = [
    sigmoid64(s, groups, best, renormalise, 2.5, recorded[t] if replay else None)
    for t, s in enumerate(LOGIT)
  ]
  check(got, want)


def test_the_flag_decides_whether_the_weights_of_two_sum_to_one():
  logit = jnp.array([[2.0, 1.0, 0.0, -1.0]])
  plain = routing.softmax(logit, 2, renormalise=False)
  full = routing.softmax(logit, 2, renormalise=True)
  np.testing.assert_allclose(plain.weight_TK, [[0.644, 0.237]], atol=5e-4)
  np.testing.assert_allclose(full.weight_TK, [[0.731, 0.269]], atol=5e-4)
  np.testing.assert_array_equal(plain.ids_TK, [[0, 1]])


def test_ties_between_experts_go_to_the_lower_id():
  logit = jnp.array([[0.0, 1.0, 1.0, 1.0], [-0.0, 0.0, -0.0, -1.0], [5.0] * 4])
  got = routing.softmax(logit, 2, renormalise=True).ids_TK
  np.testing.assert_array_equal(got, [[1, 2], [0, 1], [0, 1]])
  even = routing.sigmoid(jnp.zeros((1, 8)), jnp.zeros(8), 2, groups=4, best=2)
  np.testing.assert_array_equal(even.ids_TK, [[0, 1]])


def test_losing_groups_are_out_even_where_every_biased_score_is_negative():
  # With 0 for the losers, experts 2 and 3 would win over -1.5 and -1.6.
  logit, bias = jnp.zeros((1, 4)), jnp.array([-2.0, -2.1, -9.0, -9.0])
  got = routing.sigmoid(logit, bias, 2, groups=2, best=1)
  np.testing.assert_array_equal(got.ids_TK, [[0, 1]])


def test_the_bias_selects_and_is_not_in_the_weight():
  logit, bias = jnp.array([[3.0, 2.0, 0.0]]), jnp.array([-5.0, 0.0, 0.0])
  got = routing.sigmoid(logit, bias, 2)
  score = jax.nn.sigmoid(jnp.array([2.0, 0.0]))
  np.testing.assert_array_equal(got.ids_TK, [[1, 2]])
  np.testing.assert_allclose(got.weight_TK[0], score / score.sum(), rtol=1e-6)
  grad = jax.grad(lambda b: routing.sigmoid(logit, b, 2).weight_TK[0, 0])(bias)
  assert not np.asarray(grad).any()


def test_recorded_slots_keep_their_order():
  recorded = distinct()
  a = routing.softmax(jnp.asarray(LOGIT), K, renormalise=True, recorded_TK=recorded)
  turned = recorded[:, ::-1]
  b = routing.softmax(jnp.asarray(LOGIT), K, renormalise=True, recorded_TK=turned)
  np.testing.assert_array_equal(a.ids_TK, recorded)
  np.testing.assert_array_equal(b.ids_TK, turned)
  np.testing.assert_allclose(a.weight_TK, b.weight_TK[:, ::-1], rtol=1e-6)


def test_replaying_its_own_selection_changes_no_bit():
  for fn in (
    functools.partial(routing.softmax, K=K, renormalise=True),
    functools.partial(routing.softmax, K=K, renormalise=False),
    functools.partial(routing.sigmoid, bias_E=jnp.asarray(BIAS), K=K, groups=4, best=2),
  ):
    own = fn(jnp.asarray(LOGIT))
    again = fn(jnp.asarray(LOGIT), recorded_TK=own.ids_TK)
    assert np.asarray(own.own_T).all()
    assert not np.asarray(again.own_T).any()
    assert np.array_equal(own.ids_TK, again.ids_TK)
    assert np.asarray(own.weight_TK).tobytes() == np.asarray(again.weight_TK).tobytes()


def test_a_token_without_a_recorded_route_is_routed_by_its_own_logits():
  recorded = distinct()
  recorded[2] = -1
  recorded[4, 1] = -1
  got = routing.softmax(jnp.asarray(LOGIT), K, renormalise=True, recorded_TK=recorded)
  want = [
    softmax64(s, True, None if t in (2, 4) else recorded[t])
    for t, s in enumerate(LOGIT)
  ]
  check(got, want)
  np.testing.assert_array_equal(np.flatnonzero(got.own_T), [2, 4])


@pytest.mark.parametrize('replay', [False, True])
@pytest.mark.parametrize('kind', ['softmax', 'renormalised', 'sigmoid'])
def test_router_logits_stay_trainable_under_replay(kind, replay):
  recorded = distinct() if replay else None

  def weights(logit):
    if kind == 'sigmoid':
      return routing.sigmoid(
        logit, jnp.asarray(BIAS), K, groups=4, best=2, recorded_TK=recorded
      )
    renormalise = kind == 'renormalised'
    return routing.softmax(logit, K, renormalise=renormalise, recorded_TK=recorded)

  def of64(s_E, t):
    r = recorded[t] if replay else None
    if kind == 'sigmoid':
      return sigmoid64(s_E, 4, 2, True, 1.0, r)[1]
    return softmax64(s_E, kind == 'renormalised', r)[1]

  grad = jax.grad(lambda s: jnp.sum(weights(s).weight_TK * DY))(jnp.asarray(LOGIT))
  ids, h = np.asarray(weights(jnp.asarray(LOGIT)).ids_TK), 1e-6
  want = np.zeros((T, E))
  for t in range(T):
    for i in range(E):
      up, down = np.float64(LOGIT[t]), np.float64(LOGIT[t])
      up[i], down[i] = up[i] + h, down[i] - h
      slope = (np.array(of64(up, t)) - np.array(of64(down, t))) / (2 * h)
      want[t, i] = (slope * DY[t]).sum()
  np.testing.assert_allclose(grad, want, atol=1e-5)
  assert (np.abs(np.take_along_axis(want, ids, 1)) > 1e-6).all()


def test_scores_that_vanish_give_finite_weights_and_gradients():
  logit = jnp.array([[-200.0, -201.0, -300.0], [200.0, -200.0, 0.0]])
  for fn in (
    lambda s: routing.sigmoid(s, jnp.zeros(3), 2).weight_TK,
    lambda s: routing.softmax(s, 2, renormalise=True).weight_TK,
    lambda s: routing.softmax(s, 2, renormalise=False).weight_TK,
  ):
    value, grad = fn(logit), jax.grad(lambda s, fn=fn: fn(s)[:, 0].sum())(logit)
    assert np.isfinite(value).all() and np.isfinite(grad).all()
  got = routing.sigmoid(logit, jnp.zeros(3), 2).weight_TK[0]
  np.testing.assert_allclose(got, [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], 1e-4)


def test_low_precision_logits_are_routed_in_float32():
  logit = jnp.asarray(LOGIT).astype(jnp.bfloat16)
  got = routing.softmax(logit, K, renormalise=True)
  assert got.weight_TK.dtype == jnp.float32
  check(got, [softmax64(s, True) for s in np.float32(logit)])


def test_jit_equals_no_jit_in_selection_and_weight():
  fn = functools.partial(routing.softmax, K=K, renormalise=True)
  a, b = fn(jnp.asarray(LOGIT)), jax.jit(fn)(jnp.asarray(LOGIT))
  np.testing.assert_array_equal(a.ids_TK, b.ids_TK)
  np.testing.assert_allclose(a.weight_TK, b.weight_TK, rtol=1e-6)


def test_what_cannot_be_routed_is_refused():
  logit, bias = jnp.zeros((2, 6)), jnp.zeros(6)
  with pytest.raises(ValueError, match='got 7 experts a token of 6'):
    routing.softmax(logit, 7, renormalise=True)
  with pytest.raises(ValueError, match='want at most 2'):
    routing.sigmoid(logit, bias, 3, groups=3, best=1)
  with pytest.raises(ValueError, match='want a divisor'):
    routing.sigmoid(logit, bias, 1, groups=4, best=1)
  with pytest.raises(ValueError, match='recorded routes'):
    routing.softmax(logit, 2, renormalise=True, recorded_TK=jnp.zeros((2, 3), int))


@pytest.mark.parametrize('renormalise', [False, True])
def test_a_recorded_id_beyond_the_experts_gives_no_weight_that_could_pass(renormalise):
  recorded = distinct()
  recorded[1, 2] = E
  for fn in (
    functools.partial(routing.softmax, K=K),
    functools.partial(routing.sigmoid, bias_E=jnp.asarray(BIAS), K=K),
  ):
    got = fn(jnp.asarray(LOGIT), renormalise=renormalise, recorded_TK=recorded)
    bad = np.isnan(got.weight_TK).any(axis=-1)
    np.testing.assert_array_equal(np.flatnonzero(bad), [1])
