"""CASES section 1 end to end: what was drawn, scored by the learner's own head.

64 prompts by 32 tokens for every mix of filters, through the KV cache, against the
learner's packed forward pass at the same weights.
"""

import functools

import jax
import numpy as np
import pytest

from swe17 import config, types
from swe17.learner import batching
from swe17.model import transformer
from swe17.ops import head, logprob
from tests import fixtures

MODEL, V = fixtures.MODEL, fixtures.VOCAB
PROMPTS, PROMPT, DRAWN = 64, 3, 32
FILTERS = [{}, {'top_p': 0.95}, {'top_p': 0.8}, {'top_k': 5}]
TABLE = [types.Sampling(t, **f) for t in (0.6, 1.0) for f in FILTERS]
MIXED = [types.Sampling(0.5, top_p=0.9), TABLE[4], types.Sampling(1.3, top_k=8)]


@pytest.fixture(scope='module')
def params():
  return fixtures.params(sharp=2.0)


@functools.cache
def drawn(sampling: types.Sampling) -> list[types.Segment]:
  rng = np.random.default_rng(0)
  prompt_BT = rng.integers(0, V, (PROMPTS, PROMPT)).astype(np.int32)
  every = [*TABLE, *MIXED]
  params = fixtures.params(sharp=2.0)
  return fixtures.sample(params, prompt_BT, DRAWN, sampling, every.index(sampling))


@functools.partial(jax.jit, static_argnames='replay')
def scores(params, batch, *, replay: bool) -> logprob.Scores:
  """What the learner makes of the first micro-batch, [B, T]."""
  micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
  hidden = transformer.apply(
    params, micro.token_MBT, micro.position_MBT, micro.segment_MBT, cfg=MODEL
  )
  return head.score(
    hidden,
    params.embed_VD,
    micro.target_MBT,
    micro.kept_ids_MBTK,
    micro.temperature_MBT,
    micro.mask_MBT,
    replay=replay,
    whole=True,
    plan=head.Plan(),
  )


def score(params, segments, *, replay: bool, rows: int, length: int) -> tuple:
  """(batch, scores) of segments in rows of `length`, on the host."""
  items = [batching.Item(s, 1.0) for s in segments]
  cfg = config.Batch(row_length=length, micro_rows=rows)
  batch = batching.fill(items, micro=1, cfg=cfg, K=V, denominator=1.0)
  return batch, jax.device_get(scores(params, batch, replay=replay))


@pytest.mark.parametrize('sampling', TABLE)
def test_at_equal_weights_the_learner_gives_what_the_sampler_gave(params, sampling):
  segments = drawn(sampling)
  length = segments[0].token_T.size - 1
  batch, got = score(params, segments, replay=True, rows=PROMPTS, length=length)
  on = batch.mask_MBT[0]
  assert on.sum() == PROMPTS * DRAWN
  mu = batch.mu_logp_MBT[0]
  assert np.abs(got.logp_BT - mu)[on].max() < 1e-4
  alone = on & ((batch.kept_ids_MBTK[0] >= 0).sum(-1) == 1)
  assert not got.logp_BT[alone].any() and not mu[alone].any()
  assert alone.any() == bool(sampling.top_p < 1)
  # The control: normalised over the vocabulary, every ratio is its own kept mass.
  _, bare = score(params, segments, replay=False, rows=PROMPTS, length=length)
  ratio, mass = np.exp(bare.logp_BT - mu)[on], got_mass(bare, on)
  assert ratio.mean() == pytest.approx(mass.mean(), rel=0.01)
  assert (mass.mean() < 0.99) == sampling.truncates
  np.testing.assert_allclose(ratio, mass, atol=1e-4)


def got_mass(found: logprob.Scores, on: np.ndarray) -> np.ndarray:
  assert found.measured_BT[on].all()
  return np.float64(found.kept_mass_BT[on])


def by_float64(params, segment: types.Segment, sampling: types.Sampling) -> np.ndarray:
  """log q of the drawn tokens, one at a time: logits over T, then normalised."""
  logits_TV = fixtures.forward64(params, segment.token_T, MODEL)
  kept, out = segment.kept, []
  for t in np.flatnonzero(segment.mask_T):
    z = logits_TV[t - 1] / sampling.temperature
    ids = kept.ids[kept.offset_T1[t] : kept.offset_T1[t + 1]]
    inside = z[ids] if ids.size else z
    out.append(z[segment.token_T[t]] - fixtures.logsumexp64(inside))
  return np.array(out)


def test_temperatures_and_filters_are_of_the_token_and_not_of_the_row(params):
  # CASES 1.3 and 1.12: T = .5, 1 and 1.3, three filters, packed into one row.
  segments = [drawn(s)[0] for s in MIXED]
  n = segments[0].token_T.size - 1
  batch, together = score(params, segments, replay=True, rows=1, length=3 * n)
  assert batch.segment_MBT.max() == 3 and batch.token_MBT.shape == (1, 1, 3 * n)
  for i, (segment, sampling) in enumerate(zip(segments, MIXED, strict=True)):
    _, alone = score(params, [segment], replay=True, rows=1, length=3 * n)
    part = slice(i * n, (i + 1) * n)
    np.testing.assert_array_equal(batch.token_MBT[0, 0, part], segment.token_T[:-1])
    on = segment.mask_T[1:]
    packed = together.logp_BT[0, part][on]
    np.testing.assert_allclose(packed, alone.logp_BT[0, :n][on], atol=1e-5)
    want = by_float64(params, segment, sampling)
    np.testing.assert_allclose(packed, want, atol=1e-5)
    # The wrong route, log-probabilities over T, is far away.
    if sampling.temperature != 1:
      plain = by_float64(params, segment, types.Sampling(1.0)) / sampling.temperature
      assert np.abs(plain - want).max() > 0.1


def test_the_mismatch_is_within_ten_times_the_floor_of_batch_shapes(params):
  # CASES 9.8. The floor: the same prompts scored all together and one by one.
  segments = drawn(TABLE[4])
  n = segments[0].token_T.size - 1
  batch, together = score(params, segments, replay=True, rows=PROMPTS, length=n)
  on, mu = batch.mask_MBT[0, 0], batch.mu_logp_MBT[0]
  # Rows of equal length are packed in the order of the items.
  floor = mismatch = 0.0
  for i, segment in enumerate(segments[:16]):
    _, alone = score(params, [segment], replay=True, rows=1, length=3 * n)
    floor = max(floor, np.abs(together.logp_BT[i] - alone.logp_BT[0, :n])[on].max())
    mismatch = max(mismatch, np.abs(together.logp_BT[i] - mu[i])[on].max())
  # Backends that give the same bits in any batch still round: one unit of a logit.
  floor = max(floor, np.finfo(np.float32).eps * np.abs(mu).max())
  assert floor < 1e-5
  assert mismatch <= 10 * floor
