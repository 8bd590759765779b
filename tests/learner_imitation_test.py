"""The warm start: which episodes it draws, and what a step of it computes."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from swe17 import config
from swe17.learner import batching, imitation, mesh, optimizer
from swe17.learner import state as st
from swe17.store import groups as group_store
from swe17.store import kv
from tests import fixtures

CFG = config.Config(
  model=fixtures.MODEL,
  batch=config.Batch(row_length=32, micro_rows=2),
  agent=config.Agent(max_context=32, max_new_tokens=8),
  optim=fixtures.OPTIM,
  imitation=config.Imitation(episodes=4, steps=12, rows=2, lr=0.01, context_weight=0.2),
)


def scripted(groups: int, **changes) -> tuple[kv.Store, list[bytes]]:
  """A store of scripted groups (two episodes each) and their token sequences."""
  store, tokens = kv.open('memory://'), []
  for start in range(groups):
    group = fixtures.group(start, (1.0, 1.0), width=0, **changes)
    group_store.append(store, group)
    tokens += [e.segments[0].token_T.tobytes() for e in group.episodes]
  return store, tokens


def no() -> bool:
  return False


def test_waiting_returns_once_there_are_enough():
  store, _ = scripted(3)
  episodes = imitation.Episodes(store, 0)
  assert episodes.wait(6, no) == 6
  group_store.append(store, fixtures.group(9, (1.0,), width=0))
  assert episodes.wait(7, no) == 7  # takes in what has arrived since


def test_waiting_ends_when_told_to_stop():
  ticks = itertools.count()
  episodes = imitation.Episodes(kv.open('memory://'), 0)
  assert episodes.wait(5, lambda: next(ticks) >= 2) == 0


def test_a_damaged_group_is_left_out():
  store, _ = scripted(2)
  store.write(group_store.key_of(5), b'garbage')
  assert imitation.Episodes(store, 0).wait(4, no) == 4


def test_every_episode_comes_once_an_epoch_in_a_seeded_order():
  store, tokens = scripted(5)

  def order(seed: int) -> list[bytes]:
    episodes = imitation.Episodes(store, seed)
    episodes.wait(10, no)
    return [
      item.segment.token_T.tobytes()
      for _ in range(20)
      for item in episodes.take(17, 99)
    ]

  first = order(0)
  assert sorted(first[:10]) == sorted(first[10:]) == sorted(tokens)
  assert first[:10] != first[10:]
  assert first == order(0)
  assert first != order(1)


def test_a_batch_stays_within_its_room_and_leaves_out_what_fits_no_row():
  store, _ = scripted(3)
  long = fixtures.group(7, (1.0, 1.0), turns=((30, 20),), width=0)
  group_store.append(store, long)
  episodes = imitation.Episodes(store, 0)
  episodes.wait(8, no)
  for _ in range(10):
    sizes = [item.segment.token_T.size - 1 for item in episodes.take(60, 32)]
    assert sizes and sum(sizes) <= 60 and max(sizes) <= 32


@pytest.mark.parametrize('groups', [0, 2])
def test_episodes_of_which_none_fits_a_row_are_refused_by_the_settings(groups):
  store, _ = scripted(groups, turns=((30, 20),))
  episodes = imitation.Episodes(store, 0)
  episodes.wait(2 * groups, no)
  says = rf'none of {2 * groups} .*row of 32.*batch\.row_length.*agent\.max_context'
  with pytest.raises(ValueError, match=says):
    episodes.take(60, 32)


def test_the_learning_rate_rises_falls_and_stays_below_its_peak():
  cfg = config.Imitation(steps=100, lr=0.01)
  rates = [float(imitation.schedule(cfg)(i)) for i in range(101)]
  assert rates[0] == 0.0
  assert max(rates) == pytest.approx(0.01) and int(np.argmax(rates)) == 10
  assert rates[100] == pytest.approx(0.001)
  assert all(a >= b for a, b in itertools.pairwise(rates[10:]))


def alike(groups: int) -> kv.Store:
  """Scripted groups whose contexts all begin with the same 18 ids."""
  store = kv.open('memory://')
  for start in range(groups):
    group = fixtures.group(start, (1.0, 1.0), width=0, turns=((20, 3), (2, 4)))
    members = []
    for e in group.episodes:
      s = e.segments[0]
      token_T = np.concatenate([np.arange(18, dtype=np.int32), s.token_T[18:]])
      members.append(
        dataclasses.replace(e, segments=(dataclasses.replace(s, token_T=token_T),))
      )
    group_store.append(store, dataclasses.replace(group, episodes=tuple(members)))
  return store


def test_a_prompt_that_weighs_nothing_is_shared_and_changes_no_loss():
  batch = dataclasses.replace(CFG.batch, row_length=64)
  shown = dataclasses.replace(CFG.imitation, context_weight=0.0, rows=2)
  cfg = dataclasses.replace(CFG, batch=batch, imitation=shown)
  episodes = imitation.Episodes(alike(4), 0)
  episodes.wait(8, no)
  assert episodes.prompt == 17
  made = next(imitation.batches(episodes, cfg))
  sampled = int(made.mask_MBT.sum())
  # Two rows hold more episodes than whole ones would fit: 28 inputs each, 11 in a tail.
  assert made.prefix_MBT is not None and sampled > 7 * (2 * 64 // 28)
  alone = dataclasses.replace(batch, share_prompts=False)
  items = imitation.Episodes(alike(4), 0)
  items.wait(8, no)
  taken = items.take(int(imitation.FILLED * 2 * (64 - 17)), 64, 17)
  whole = batching.fill(
    taken, micro=3, cfg=alone, K=1, denominator=float(sampled), context_weight=0.0
  )
  assert int(whole.mask_MBT.sum()) == sampled
  tx = optimizer.make(CFG.optim, imitation.schedule(CFG.imitation))
  losses = []
  for of in (made, whole):
    start = st.init(jax.tree.map(np.array, fixtures.params()), tx)
    losses.append(float(imitation.step(cfg, DEVICES, start)(start, of)[1]['loss']))
  assert losses[0] == pytest.approx(losses[1], rel=1e-5)


DEVICES = mesh.open(CFG, fixtures.VOCAB)


@pytest.fixture(scope='module')
def done() -> tuple[st.State, list[dict[str, float]]]:
  """The state after a warm start on one episode, and every step's metrics."""
  store = kv.open('memory://')
  group_store.append(store, fixtures.group(0, (1.0,), width=0))
  episodes = imitation.Episodes(store, 0)
  episodes.wait(1, no)
  tx = optimizer.make(CFG.optim, imitation.schedule(CFG.imitation))
  start = st.init(jax.tree.map(np.array, fixtures.params()), tx)
  step, state, rows = imitation.step(CFG, DEVICES, start), start, []
  for batch in imitation.batches(episodes, CFG):
    state, metrics = step(state, batch)
    rows.append({k: float(v) for k, v in metrics.items()})
  return state, rows


def test_a_step_is_weighted_cross_entropy_divided_by_its_weights(done):
  s = fixtures.group(0, (1.0,), width=0).episodes[0].segments[0]
  logits = fixtures.forward64(fixtures.params(), s.token_T[:-1], fixtures.MODEL)
  z = fixtures.logsumexp64(logits) - logits[np.arange(len(logits)), s.token_T[1:]]
  weight = np.where(s.mask_T[1:], 1.0, CFG.imitation.context_weight)
  first = done[1][0]
  assert first['loss'] == pytest.approx((z * weight).sum() / weight.sum(), rel=1e-5)
  assert first['trained_loss'] == pytest.approx(z[s.mask_T[1:]].mean(), rel=1e-5)


def test_imitation_learns_an_episode_by_heart(done):
  state, rows = done
  assert len(rows) == int(state.step) == CFG.imitation.steps
  assert rows[-1]['trained_loss'] < 0.5 * rows[0]['trained_loss']
  assert not any(row['skipped_steps'] for row in rows)
