"""The learner's step: equal weights, equal numbers; one division; faults do nothing."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from swe17 import config, types
from swe17.learner import batching, optimizer, update
from swe17.learner import state as st
from swe17.model import params as p
from swe17.ops import logprob, policy_loss
from swe17.sync import apply
from tests import fixtures

MODEL = fixtures.MODEL
BATCH = config.Batch(groups=2, row_length=48, micro_rows=4)
OPTIM = fixtures.OPTIM
TX = optimizer.make(OPTIM, optimizer.schedule(OPTIM))
K = 8


def policy(replay: bool = True) -> update.LossFn:
  loss = config.Loss(replay=replay)
  return functools.partial(update.policy_loss_fn, model=MODEL, cfg=loss)


def fill(items, *, rows: int = 4, **changes) -> st.Batch:
  """Items in micro-batches of `rows` rows, padded to the one shape [4, 4, 48]."""
  cfg = dataclasses.replace(BATCH, micro_rows=rows)
  defaults = {'micro': 4 // rows, 'cfg': cfg, 'K': K, 'denominator': 100.0}
  batch = batching.fill(items, **{**defaults, **changes})
  empty = batching.fill([], micro=4, cfg=BATCH, K=K, denominator=1.0)
  padded = {}
  for name, array in vars(batch).items():
    if np.ndim(array):
      padded[name] = getattr(empty, name).copy()
      padded[name][: array.shape[0], : array.shape[1]] = array
  return dataclasses.replace(batch, **padded)


def scripted(*turns: tuple[tuple[int, int], ...], **of_segment) -> list[batching.Item]:
  """Items with random tokens, alternating signs of the advantage."""
  rng = np.random.default_rng(0)
  made = [fixtures.segment(rng, *t, **of_segment) for t in turns]
  return [batching.Item(s, (1.0, -0.5)[i % 2]) for i, s in enumerate(made)]


# Five segments that take four rows.
ITEMS = scripted(((5, 20),), ((4, 9), (6, 8)), ((30, 12),), ((20, 15),), ((2, 5),))
# Jitted once for the whole file: every batch below has the one shape.
ACCUMULATE = jax.jit(functools.partial(update.accumulate, policy()))
DONATING = jax.jit(
  functools.partial(update.update, model=MODEL, loss=config.Loss(), tx=TX),
  donate_argnums=0,
)


def step(state: st.State, batch: st.Batch) -> tuple[st.State, dict[str, jax.Array]]:
  """An update that leaves the caller its state."""
  return DONATING(jax.tree.map(jnp.copy, state), batch)


@jax.jit
def logp(params, batch: st.Batch) -> jax.Array:
  """Log-probability of every target of the first micro-batch, [B, T]."""
  micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
  hidden = update.transformer.apply(
    params, micro.token_MBT, micro.position_MBT, micro.segment_MBT, cfg=MODEL
  )
  return logprob.score(
    update.transformer.logits(params, hidden),
    micro.target_MBT,
    micro.kept_ids_MBTK,
    micro.temperature_MBT,
    replay=True,
  ).logp_BT


def close(a, b, tolerance: float = 1e-6) -> None:
  """Sums may be cut differently: |diff| <= tolerance x the largest entry, by leaf."""
  for x, y in zip(fixtures.leaves(a), fixtures.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(x).max())


# Sampler and learner at the same weights.

SAMPLINGS = [
  types.Sampling(top_p=0.8),
  types.Sampling(0.6, top_p=0.95),
  types.Sampling(1.3, top_k=5),
  types.Sampling(0.7, 0.05, 8, 0.9),
  types.Sampling(),
]


@pytest.fixture(scope='module')
def sampled() -> tuple[p.Params, dict[types.Sampling, list[types.Segment]]]:
  params = fixtures.params(sharp=2.0)
  prompt_BT = np.random.default_rng(0).integers(0, fixtures.VOCAB, (8, 8))
  prompt_BT = prompt_BT.astype(np.int32)
  make = functools.partial(fixtures.sample, params, prompt_BT, 16)
  return params, {s: make(s, i) for i, s in enumerate(SAMPLINGS)}


def score(params, segments, replay: bool) -> dict[str, float]:
  """Divergence of the learner from what sampled the segments."""
  items = [batching.Item(s, 1.0) for s in segments]
  cfg = config.Batch(row_length=48, micro_rows=8)
  batch = batching.fill(
    items, micro=1, cfg=cfg, K=fixtures.VOCAB, denominator=1.0, version=0
  )
  total = _score(params, batch, replay)
  tokens = float(total.divergence.tokens)
  assert tokens == sum(s.mask_T.sum() for s in segments)
  found = update.divergence.finish(total.divergence)
  return {k: float(v) for k, v in found.items()} | {
    'kept_mass': float(total.kept_mass) / tokens,
    'k3_max': float(total.divergence.k3_max),
    'fresh': float(total.fresh),
  }


@functools.partial(jax.jit, static_argnums=2)
def _score(params, batch: st.Batch, replay: bool) -> update.Pieces:
  micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
  return policy(replay)(params, micro)[1]


@pytest.mark.parametrize('sampling', SAMPLINGS)
def test_equal_weights_give_a_ratio_of_one_under_replay(sampled, sampling):
  params, segments = sampled
  got = score(params, segments[sampling], replay=True)
  assert got['k3_max'] < 5e-9  # |dlogp| < 1e-4
  assert got['ratio_mean'] == pytest.approx(1, abs=1e-5)
  assert got['fresh'] == 8 * 16


@pytest.mark.parametrize('sampling', SAMPLINGS[:4])
def test_without_replay_the_mean_ratio_is_the_mean_kept_mass(sampled, sampling):
  params, segments = sampled
  got = score(params, segments[sampling], replay=False)
  assert got['kept_mass'] < 0.99
  assert got['ratio_mean'] == pytest.approx(got['kept_mass'], rel=0.01)
  assert got['k3'] > 1e-4


def test_packed_with_other_settings_every_rollout_scores_as_alone(sampled):
  params, segments = sampled
  items = [batching.Item(segments[s][0], 1.0) for s in SAMPLINGS[2:4]]
  together = np.asarray(logp(params, fill(items)))[0]
  assert fill(items).segment_MBT[0, 0].max() == 2
  for i, item in enumerate(items):
    alone = np.asarray(logp(params, fill([item])))[0, :23]
    np.testing.assert_allclose(together[23 * i : 23 * i + 23], alone, atol=1e-5)
    want = item.segment.mu_logp_T[item.segment.mask_T]
    np.testing.assert_allclose(alone[item.segment.mask_T[1:]], want, atol=1e-4)
    lone = item.segment.kept.size_T[item.segment.mask_T] == 1
    assert (alone[item.segment.mask_T[1:]][lone] == 0).all()


def test_other_rollouts_in_a_row_do_not_change_a_bit():
  params = fixtures.params()
  items = scripted(((5, 10),), ((4, 12),))
  clean = np.asarray(logp(params, fill(items)))[0]
  s = items[1].segment  # the longer one, which comes first in its row
  other = dataclasses.replace(s, token_T=(s.token_T + 1) % fixtures.VOCAB)
  kept = dataclasses.replace(s.kept, ids=(s.kept.ids + 1) % fixtures.VOCAB)
  other = dataclasses.replace(other, kept=kept)
  dirty = np.asarray(logp(params, fill([items[0], batching.Item(other, 1.0)])))[0]
  assert clean[15:29].tobytes() == dirty[15:29].tobytes()
  assert not np.array_equal(clean[:15], dirty[:15])


# The loss and its gradient.


def _but_the_mass(loss, pieces):
  """Kept mass is measured at places that are drawn for each micro-batch anew."""
  return loss, pieces.replace(kept_mass=0.0, kept_mass_count=0.0)


def test_one_division_whatever_the_number_of_micro_batches():
  params = fixtures.params()
  got, moved = {}, {}
  for micro in (1, 2, 4):
    batch = fill(ITEMS, rows=4 // micro)
    assert batch.micro == micro
    got[micro] = ACCUMULATE(params, batch)
    moved[micro], metrics = step(st.init(params, TX), batch)
    norm = float(optax.tree.norm(got[micro][2]))
    assert float(metrics['grad_norm']) == pytest.approx(norm / 100, rel=1e-5)
    assert float(metrics['loss']) == pytest.approx(float(got[micro][0]) / 100)
  for micro in (2, 4):
    close(got[1][2], got[micro][2])
    sums = (fixtures.leaves(_but_the_mass(*got[m][:2])) for m in (1, micro))
    for a, b in zip(*sums, strict=True):
      # Signed sums over some tokens: rounding is of the terms, not of what is left.
      assert np.abs(a - b).max(initial=0) < 1e-6 * max(69, np.abs(a).max(initial=0))
    change = jax.tree.map(jnp.subtract, moved[1].params, moved[micro].params)
    assert float(optimizer.rms(change)) < 1e-3 * OPTIM.lr * OPTIM.consistent_rms


def test_rubbish_in_padding_rows_and_empty_micro_batches_changes_nothing():
  params = fixtures.params()
  clean = fill(ITEMS)
  assert clean.micro == 1
  off = clean.segment_MBT == 0
  token = np.where(off, 3, clean.token_MBT)
  position = np.where(off, 17, clean.position_MBT)
  dirty = dataclasses.replace(clean, token_MBT=token, position_MBT=position)
  assert fixtures.same_bits(ACCUMULATE(params, clean), ACCUMULATE(params, dirty))
  every = dataclasses.replace(clean, micro=np.int32(4))  # all padding but the first
  assert fixtures.same_bits(ACCUMULATE(params, clean), ACCUMULATE(params, every))


@pytest.mark.parametrize('value', [1e4, -1e4, np.inf, -np.inf, np.nan])
def test_nothing_in_a_masked_slot_reaches_loss_gradient_or_metrics(value):
  params = fixtures.params()
  clean = fill(ITEMS)
  dirt = {
    name: np.where(clean.mask_MBT, getattr(clean, name), np.float32(value))
    for name in ('mu_logp_MBT', 'adv_MBT')
  }
  dirty = dataclasses.replace(clean, **dirt)
  assert fixtures.same_bits(ACCUMULATE(params, clean), ACCUMULATE(params, dirty))


def test_the_gradient_reaches_exactly_the_logits_that_drew_a_sampled_token():
  # Single turn, three turns, and a turn without an answer; no sets, so no singletons.
  items = scripted(((5, 3),), ((3, 2), (4, 3), (2, 1)), ((6, 0), (2, 4)), width=0)
  batch = fill(items)
  micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)

  def loss(logits_BTV):
    scores = logprob.score(
      logits_BTV,
      micro.target_MBT,
      micro.kept_ids_MBTK,
      micro.temperature_MBT,
      replay=True,
    )
    return policy_loss.reinforce_tis(
      scores.logp_BT, micro.mu_logp_MBT, micro.adv_MBT, micro.mask_MBT, cap=2.0
    )

  shape = (*micro.token_MBT.shape, fixtures.VOCAB)
  grad = np.asarray(jax.jit(jax.grad(loss))(jnp.ones(shape)))
  touched = np.abs(grad).max(-1) > 0
  assert np.array_equal(touched, micro.mask_MBT)
  assert touched.sum() == sum(item.segment.mask_T.sum() for item in items)


def test_tool_output_ten_times_the_models_text_enters_no_statistic():
  params = fixtures.params()
  (item,) = scripted(((2, 2), (40, 2)), width=0)
  s = item.segment
  # Other tool output of the same length, but for its last token: that predicts.
  token_T = s.token_T.copy()
  token_T[4:43] = (token_T[4:43] + 5) % fixtures.VOCAB
  other = batching.Item(dataclasses.replace(s, token_T=token_T), item.adv)
  open_, blocked = [], []
  for batch in (fill([item]), fill([other])):
    open_.append(ACCUMULATE(params, batch)[:2])
    # Attention to the tool output is blocked: it is made a segment of its own.
    segment = batch.segment_MBT.copy()
    segment[0, 0, 4:43] = 2
    batch = dataclasses.replace(batch, segment_MBT=segment)
    blocked.append(ACCUMULATE(params, batch)[:2])
  assert float(open_[0][1].divergence.tokens) == 4
  assert float(open_[0][1].divergence.signal) == 4
  assert not fixtures.same_bits(open_[0], open_[1])  # through the context
  assert fixtures.same_bits(blocked[0], blocked[1])  # and through nothing else


def test_the_gradient_of_a_rollout_cut_in_segments_is_the_sum_over_its_tokens():
  # The same sampled tokens in 1, 2 and 3 segments: their loss weights sum to the same.
  rng = np.random.default_rng(0)
  whole = fixtures.segment(rng, (4, 12))
  group = fixtures.group(0, (1.0, 0.0), turns=((4, 12),))

  def part(a: int, b: int) -> types.Segment:
    """Sampled tokens a..b after the prompt and what was sampled before."""
    at = np.arange(16)[: 4 + b]
    mask = (at >= 4 + a) & (at < 4 + b)
    sizes = np.where(mask, whole.kept.size_T[: 4 + b], 0)
    lo, hi = whole.kept.offset_T1[4 + a], whole.kept.offset_T1[4 + b]
    fields = {k: v[: 4 + b] for k, v in vars(whole).items() if k.endswith('_T')}
    fields['mask_T'] = mask
    kept = types.KeptSets(
      np.append(0, np.cumsum(sizes)).astype(np.int32), whole.kept.ids[lo:hi]
    )
    return types.Segment(**fields, kept=kept)

  params, got = fixtures.params(), []
  for cuts in ([0, 12], [0, 5, 12], [0, 3, 8, 12]):
    parts = tuple(part(a, b) for a, b in itertools.pairwise(cuts))
    first = dataclasses.replace(group.episodes[0], segments=parts)
    made = dataclasses.replace(group, episodes=(first, group.episodes[1]))
    assembled = batching.assemble([made], config.Loss())
    assert assembled.denominator_episodes == 2
    got.append(ACCUMULATE(params, fill(assembled.items)))
  for other in got[1:]:
    close(got[0][2], other[2], 1e-5)
    assert float(got[0][0]) == pytest.approx(float(other[0]), abs=1e-5)
    tokens = got[0][1].divergence.tokens, other[1].divergence.tokens
    assert float(tokens[0]) == float(tokens[1]) == 24


def test_the_forward_pass_is_at_the_published_values_and_the_step_on_the_masters():
  masters = p.init(p.abstract(MODEL, fixtures.VOCAB), jax.random.key(0))
  state, metrics = step(st.init(masters, TX), fill(ITEMS))
  published = {k: v.astype(np.float32) for k, v in apply.to_host(masters).items()}
  same = apply.unname(published, masters)
  assert fixtures.same_bits(same, p.rounded(masters))
  again, at_rounded = step(st.init(p.rounded(masters), TX), fill(ITEMS))
  assert float(metrics['loss']) == float(at_rounded['loss'])
  moved = jax.tree.map(jnp.subtract, state.params, masters)
  other = jax.tree.map(jnp.subtract, again.params, p.rounded(masters))
  close(moved, other, 1e-3)
  assert not fixtures.same_bits(p.rounded(state.params), state.params)


def test_an_episode_is_one_sequence_in_whatever_rows_its_segments_lie():
  # The first and third segment are one episode; packed in 1, 2 and 4 micro-batches.
  names = ('a', 'b', 'a', 'c', 'd')
  items = [
    dataclasses.replace(item, episode=name)
    for item, name in zip(ITEMS, names, strict=True)
  ]
  loss = config.Loss(
    objective='gspo',
    gspo_low=0.5,
    gspo_high=1.0,
    sequence_mask='geometric',
    geometric_low=0.6,
    geometric_high=1.1,
  )
  sgd = optax.sgd(1.0)
  fn = jax.jit(functools.partial(update.update, model=MODEL, loss=loss, tx=sgd))
  state, got = st.init(fixtures.params(), sgd), []
  for rows in (4, 2, 1):
    metrics = fn(state, fill(items, rows=rows))[1]
    got.append({k: float(v) for k, v in metrics.items()})
  # From the log-probabilities alone: means by episode, and what the mask leaves.
  batch = fill(items)
  d = np.asarray(logp(fixtures.params(), batch) - batch.mu_logp_MBT[0], np.float64)
  own = [batch.mask_MBT[0] & (batch.episode_MBT[0] == j) for j in range(4)]
  mean = np.array([d[o].mean() for o in own])
  off = (np.exp(mean) < 0.6) | (np.exp(mean) > 1.1)
  assert off.tolist() == [True, False, False, False]
  count = np.array([o.sum() for o in own])
  for row in got:
    assert row['episode_count'] == 4
    assert row['episode_distance_max'] == pytest.approx(np.abs(mean).max(), rel=1e-4)
    assert row['sequence_masked_share'] == pytest.approx(
      count[off].sum() / count.sum(), rel=1e-5
    )
    assert row['silenced_share'] == row['sequence_masked_share']
    for name in ('grad_norm', 'loss', 'episode_k1'):
      assert row[name] == pytest.approx(got[0][name], rel=1e-5), name


# Faults and no signal.


def stepped() -> st.State:
  """A state with momentum."""
  return step(st.init(fixtures.params(), TX), fill(ITEMS))[0]


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
  state, rows = st.init(fixtures.params(), TX), []
  bad = fill(ITEMS)
  adv = bad.adv_MBT.copy()
  adv[0, 0, np.flatnonzero(bad.mask_MBT[0, 0])[3]] = np.nan
  bad = dataclasses.replace(bad, adv_MBT=adv)
  for i in range(6):
    before = state
    state, metrics = step(state, bad if i == 2 else fill(ITEMS))
    rows.append(int(metrics['skipped_steps']))
    same = fixtures.same_bits((before.params, before.opt), (state.params, state.opt))
    assert same == (i == 2)
  assert rows == [0, 0, 1, 0, 0, 0]
  assert int(state.step) == 6


def test_one_nan_in_one_leaf_of_the_gradient_is_enough():
  state = stepped()
  grad = jax.tree.map(jnp.ones_like, state.params)
  wq_NDQH = grad.dense.attn.wq_NDQH.at[1, 2, 3, 4].set(jnp.nan)
  grad = grad.replace(
    dense=grad.dense.replace(attn=grad.dense.attn.replace(wq_NDQH=wq_NDQH))
  )
  fn = jax.jit(functools.partial(update.apply_gradient, tx=TX))
  new, metrics = fn(state, grad)
  assert fixtures.same_bits((new.params, new.opt), (state.params, state.opt))
  assert int(metrics['skipped_steps']) == 1


def test_a_batch_without_a_trained_token_takes_no_step_though_there_is_momentum():
  state = stepped()
  batch = fill(ITEMS)
  none = dataclasses.replace(batch, mask_MBT=np.zeros_like(batch.mask_MBT))
  new, metrics = step(state, none)
  assert fixtures.same_bits((new.params, new.opt), (state.params, state.opt))
  assert int(metrics['skipped_steps']) == 1
  assert float(metrics['trained_tokens']) == 0
  assert np.isnan(float(metrics['k3']))


def test_zero_advantages_leave_the_weights_bit_equal():
  state = stepped()
  items = [dataclasses.replace(item, adv=0.0) for item in ITEMS]
  new, _ = step(state, fill(items))
  assert fixtures.same_bits(new.params, state.params)


def test_the_same_batch_gives_the_same_bits():
  one = step(stepped(), fill(ITEMS))
  assert fixtures.same_bits(one, step(stepped(), fill(ITEMS)))


def test_a_slow_publisher_reads_the_weights_of_its_version_though_state_is_donated():
  state = jax.tree.map(jnp.copy, st.init(fixtures.params(), TX))
  plain, copies, want = st.init(fixtures.params(), TX), [], []
  for _ in range(3):
    first = jax.tree.leaves(state.params)[0]
    state, _ = DONATING(state, fill(ITEMS))
    assert first.is_deleted()
    copies.append(apply.to_host(state.params))  # looked at after all steps are done
    plain, _ = step(plain, fill(ITEMS))
    want.append(apply.to_host(plain.params))
  for a, b in zip(copies, want, strict=True):
    assert fixtures.same_bits(a, b)


def test_a_positive_advantage_raises_the_log_probability_and_a_negative_lowers_it():
  params = fixtures.params()
  for adv in (1.0, -1.0):
    (item,) = scripted(((5, 20),), width=0)
    batch = fill([dataclasses.replace(item, adv=adv)])
    new, _ = step(st.init(params, TX), batch)
    on = batch.mask_MBT[0]
    change = logp(p.rounded(new.params), batch)[on] - logp(params, batch)[on]
    assert float(jnp.sum(change)) * adv > 0.1
