"""The KL penalty: what it adds to the step, and where its reference is kept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from swe17 import config, types
from swe17.learner import batching, reference, update
from swe17.learner import state as st
from swe17.model import params as p
from swe17.model import transformer
from tests import fixtures

MODEL = config.Model(
  layers=1, width=32, ffn=32, heads=2, kv_heads=1, head_dim=16, rotary_dim=4,
  ngram=2, unroll=False,
)  # fmt: skip
ROWS = config.Batch(groups=2, row_length=32, micro_rows=2)
STEPS = 24
TX = optax.sgd(0.05)
KL = config.Loss(kl_weight=0.5)


def items() -> list[batching.Item]:
  """Three segments in two micro-batches: with sets, without, and at temperature .7."""
  rng = np.random.default_rng(0)
  made = [
    fixtures.segment(rng, (4, 9), (3, 8)),
    fixtures.segment(rng, (5, 20), width=0),
    fixtures.segment(rng, (3, 25), temperature=0.7),
  ]
  return [batching.Item(s, a) for s, a in zip(made, (1.0, -0.5, 0.25), strict=True)]


def batch(made: list[batching.Item] | None = None) -> st.Batch:
  """The one shape of this file: [8, 2, 32]; `items` take 2 of the 8 micro-batches."""
  made = made or items()
  return batching.fill(made, micro=8, cfg=ROWS, K=4, denominator=100.0)


def start(seed: int = 0, sharp: float = 1.0) -> p.Params:
  return fixtures.params(seed, sharp, MODEL)


def fresh(sharp: float = 1.0) -> st.State:
  return st.init(start(sharp=sharp), TX)


@functools.cache
def step(loss: config.Loss, exact: bool = False):
  fn = functools.partial(update.update, model=MODEL, loss=loss, tx=TX, exact=exact)
  return jax.jit(fn)


def log_softmax64(z: np.ndarray) -> np.ndarray:
  return z - fixtures.logsumexp64(z)[..., None]


def test_k1_and_k3_are_of_the_whole_vocabulary_at_the_tokens_temperature():
  other = start(1)
  _, metrics = step(KL)(fresh(), batch(), other)
  k1 = []
  for item in items():
    s = item.segment
    on = np.flatnonzero(s.mask_T)
    logp = []
    for params in (start(), other):
      z = fixtures.forward64(params, s.token_T, MODEL)[on - 1]
      z = log_softmax64(z / s.temperature_T[on, None])
      logp.append(z[np.arange(on.size), s.token_T[on]])
    k1.append(logp[0] - logp[1])
  k1 = np.concatenate(k1)
  assert abs(k1.mean()) > 0.1
  assert float(metrics['trained_tokens']) == k1.size
  assert float(metrics['kl_reference']) == pytest.approx(k1.mean(), abs=1e-4)
  k3 = np.exp(-k1) - 1 + k1
  assert float(metrics['kl_reference_k3']) == pytest.approx(k3.mean(), rel=1e-3)


def test_the_penalty_is_an_advantage_of_its_own_token():
  """The step with it is the plain step at advantages A - weight k1, from float64 k1."""
  other, made = start(1), []
  for item in items():
    s = item.segment
    logp = [
      log_softmax64(
        fixtures.forward64(params, s.token_T, MODEL)[:-1]
        / np.where(s.mask_T, s.temperature_T, 1)[1:, None]
      )[np.arange(s.token_T.size - 1), s.token_T[1:]]
      for params in (start(), other)
    ]
    # Each target is made a turn of its own, which may have an advantage of its own.
    s = dataclasses.replace(s, turn_T=np.arange(s.token_T.size, dtype=np.int32))
    turn_adv = np.append(0.0, item.adv - 0.5 * (logp[0] - logp[1]))
    made.append(batching.Item(s, item.adv, turn_adv=turn_adv))
  with_kl, a = step(KL)(fresh(), batch(), other)
  plain, b = step(config.Loss())(fresh(), batch(made))
  assert float(a['loss']) == pytest.approx(float(b['loss']), rel=1e-4)
  close(with_kl.params, plain.params)
  without, _ = step(config.Loss())(fresh(), batch())
  with pytest.raises(AssertionError):
    close(with_kl.params, without.params)


def close(a: p.Params, b: p.Params) -> None:
  """Equal changes from the start, to 1e-4 of a leaf's largest."""
  begin = fixtures.leaves(start())
  triples = zip(fixtures.leaves(a), fixtures.leaves(b), begin, strict=True)
  for x, y, z in triples:
    np.testing.assert_allclose(x - z, y - z, rtol=0, atol=1e-4 * np.abs(y - z).max())


def test_weight_zero_is_the_step_without_a_reference():
  """The same program: nothing is computed, compiled or held for a penalty of 0."""
  off = step(dataclasses.replace(KL, kl_weight=0.0))
  with_one = off.lower(fresh(), batch(), start(1)).as_text()
  assert with_one == off.lower(fresh(), batch()).as_text()
  assert with_one != step(KL).lower(fresh(), batch(), start(1)).as_text()
  _, metrics = step(config.Loss())(fresh(), batch())
  assert not {'kl_reference', 'kl_reference_k3'} & metrics.keys()


def test_a_policy_that_is_its_reference_pays_nothing():
  state, metrics = step(KL)(fresh(), batch(), start())
  assert abs(float(metrics['kl_reference'])) < 1e-6
  assert 0 <= float(metrics['kl_reference_k3']) < 1e-9
  plain, without = step(config.Loss())(fresh(), batch())
  assert float(metrics['loss']) == pytest.approx(float(without['loss']), rel=1e-5)
  close(state.params, plain.params)


@pytest.mark.parametrize('value', [np.nan, np.inf, -1e30])
def test_nothing_in_a_masked_slot_reaches_the_penalty(value):
  clean = batch()
  names = ('adv_MBT', 'mu_logp_MBT', 'temperature_MBT', 'ref_logp_MBT')
  dirt = {
    name: np.where(clean.mask_MBT, getattr(clean, name), np.float32(value))
    for name in names
  }
  dirty = dataclasses.replace(clean, **dirt)
  other = start(1)
  assert fixtures.same_bits(
    step(KL)(fresh(), clean, other), step(KL)(fresh(), dirty, other)
  )


def test_the_exact_sum_has_the_penalty_too():
  """By shape only: what is summed is a tree, and the tree's sum has its own tests."""
  args = (fresh(), batch(), start(1))
  want = jax.eval_shape(step(KL), *args)
  assert jax.eval_shape(step(KL, True), *args) == want
  assert {'kl_reference', 'kl_reference_k3'} <= want[1].keys()


def test_asked_for_without_a_reference_the_step_is_refused():
  with pytest.raises(ValueError, match=r'loss\.kl_weight=0\.5'):
    step(KL)(fresh(), batch())


@jax.jit
def log_prob(params: p.Params, token_BT: jax.Array) -> jax.Array:
  """Log-probabilities of what follows each row, [B, V]."""
  at_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1])[None, :], token_BT.shape)
  one_BT = jnp.ones_like(token_BT)
  hidden_BTD = transformer.apply(params, token_BT, at_BT, one_BT, cfg=MODEL)
  return jax.nn.log_softmax(transformer.logits(params, hidden_BTD[:, -1:])[:, 0])


def drawn(prompt_T: np.ndarray, token: int, logp: float) -> types.Segment:
  """A prompt and one token that was drawn after it from the whole vocabulary."""
  token_T = np.append(prompt_T, token).astype(np.int32)
  end_T = np.arange(token_T.size) == prompt_T.size
  return types.Segment(
    token_T=token_T,
    mask_T=end_T,
    mu_logp_T=np.where(end_T, logp, 0).astype(np.float32),
    entropy_T=end_T.astype(np.float32),
    temperature_T=end_T.astype(np.float32),
    version_T=np.zeros_like(token_T),
    turn_T=np.zeros_like(token_T),
    kept=types.KeptSets(np.zeros(token_T.size + 1, np.int32), token_T[:0]),
  )


def test_a_strong_weight_pulls_the_policy_back_to_its_reference():
  """On its own samples and without an advantage, the exact KL falls."""
  rng = np.random.default_rng(0)
  prompt_BT = np.repeat(rng.integers(0, fixtures.VOCAB, (8, 5)), 8, axis=0)
  other, state = start(sharp=2.0), fresh(sharp=3.0)
  exact, seen = [], []
  for _ in range(STEPS):
    ours_BV = np.float64(log_prob(p.rounded(state.params), prompt_BT))
    theirs_BV = np.float64(log_prob(other, prompt_BT))
    exact.append((np.exp(ours_BV) * (ours_BV - theirs_BV)).sum(-1).mean())
    made = []
    for prompt_T, ours_V in zip(prompt_BT, ours_BV, strict=True):
      token = rng.choice(fixtures.VOCAB, p=np.exp(ours_V) / np.exp(ours_V).sum())
      made.append(batching.Item(drawn(prompt_T, token, ours_V[token]), 0.0))
    b = dataclasses.replace(batch(made), denominator=np.float32(len(made)))
    state, metrics = step(KL)(state, b, other)
    seen.append(float(metrics['kl_reference']))
  assert exact[0] > 0.2
  assert exact[-1] < 0.5 * exact[0], exact
  assert np.mean(seen[-3:]) < 0.7 * np.mean(seen[:3]), seen


# Where it is kept.


def bfloat16(params: p.Params) -> list[np.ndarray]:
  return [x.astype(ml_dtypes.bfloat16) for x in fixtures.leaves(params)]


def test_the_reference_comes_back_bit_for_bit_in_published_values(tmp_path):
  masters = p.init(p.abstract(MODEL, fixtures.VOCAB), jax.random.key(0))
  held = reference.keep(str(tmp_path), masters)
  assert fixtures.same_bits(held, bfloat16(masters))
  back = reference.load(str(tmp_path), start(1))
  assert fixtures.same_bits(back, held)
  assert jax.tree.structure(back) == jax.tree.structure(masters)


def test_the_reference_outlives_the_parameters_it_was_taken_from(tmp_path):
  for params in (start(), jax.tree.map(jnp.bfloat16, start())):
    want = bfloat16(params)
    held = reference.keep(str(tmp_path), params)
    for leaf in jax.tree.leaves(params):
      leaf.delete()  # what donating them does
    assert fixtures.same_bits(held, want)


def test_a_start_that_was_lost_leaves_the_reference_of_the_next(tmp_path):
  for seed in (0, 1, 2):
    reference.keep(str(tmp_path), start(seed))
  back = reference.load(str(tmp_path), start())
  assert fixtures.same_bits(back, bfloat16(start(2)))


def test_a_missing_reference_is_named(tmp_path):
  with pytest.raises(ValueError, match=r'loss\.kl_weight: no reference in'):
    reference.load(str(tmp_path), start())
