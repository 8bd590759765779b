"""Which start index is issued next, by whom, and the task that it stands for."""

import asyncio
import dataclasses
import random

import pytest

from swe17 import config, types
from swe17.learner import buffer
from swe17.rollout import admission, process
from swe17.store import groups as group_store
from tests import rollout_fixtures as rig


@pytest.fixture
def make(tmp_path):
  with rig.maker(tmp_path) as made:
    yield made


def plan(state: process.Rollout, below: int = 0, rest=(), step: int = 0, done=False):
  values = {
    'step': step,
    'consumed_below': below,
    'consumed_rest': list(rest),
    'done': done,
  }
  state.plan = dataclasses.replace(state.plan, plan=values)


def due(state: process.Rollout) -> int | None:
  return admission.due(state.plan.plan, state.issued, state.cfg, state.index)


def drain(state: process.Rollout) -> list[int]:
  """Issues all that is due now."""
  issued = []
  while (start := due(state)) is not None:
    state.issued.add(start)
    issued.append(start)
  return issued


def test_an_epoch_is_a_permutation_of_all_tasks_and_epochs_differ():
  epochs = [
    [admission.task(rig.TASKS, 3, s).id for s in range(6 * e, 6 * e + 6)]
    for e in range(5)
  ]
  assert all(sorted(epoch) == sorted(t.id for t in rig.TASKS) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 1
  again = [admission.task(rig.TASKS, 3, s).id for s in range(6)]
  assert again == epochs[0]
  other = [[admission.task(rig.TASKS, s, i).id for i in range(6)] for s in range(5)]
  assert len({tuple(epoch) for epoch in other}) > 1


def test_no_more_is_issued_than_ahead_allows(make):
  state = make()
  assert drain(state) == [0, 1, 2, 3]  # 2 batches of 2 groups
  plan(state, below=1)
  assert drain(state) == [4]
  plan(state, below=1, rest=[2, 4])
  assert drain(state) == [5, 6]
  plan(state, below=7)
  assert drain(state) == [7, 8, 9, 10]


def test_after_a_restart_only_what_was_in_flight_is_issued_again(make):
  """Finished groups wait in the store, consumed ones are in the plan (CASES 5.10)."""
  state = make('a1')
  plan(state, below=3, rest=[5])
  state.issued |= {2, 4, 6}  # in the store; 2 is consumed and not yet discarded
  # Outstanding: 4 and 6. In flight were 3 and 7, whatever was issued of them.
  assert drain(state) == [3, 7]
  plan(state, below=8)
  assert drain(state) == [8, 9, 10, 11]


def test_a_learner_that_falls_back_to_its_checkpoint_finds_its_groups(make):
  state = make()
  drain(state)
  plan(state, below=4)
  assert drain(state) == [4, 5, 6, 7]
  plan(state, below=2)  # 2 and 3 are in the store: never discarded before the commit
  assert drain(state) == []


@pytest.mark.parametrize('seed', range(10))
def test_kills_at_random_lose_no_start_and_train_none_twice(make, seed):
  rng = random.Random(seed)
  learner, state = None, make('p0')
  learner = rig.Learner(state.store, state.cfg)
  learner.version = 0
  lives, flight = 0, []
  while len(learner.trained) < 2 * len(rig.TASKS):
    flight += drain(state)
    rng.shuffle(flight)
    for _ in range(rng.randint(0, len(flight))):
      start = flight.pop()
      task = admission.task(rig.TASKS, 0, start)
      made = types.Group(f'{start}-{state.attempt}', start, task.id, task.unit, ())
      assert group_store.append(state.store, made)
    if learner.take(2) and rng.random() < 0.7:
      learner.publish()
      asyncio.run(process.next_plan(state))
    if rng.random() < 0.3:  # kill -9: what was in flight is gone, and so is memory
      lives, flight = lives + 1, []
      learner.publish()
      state = make(f'p{lives}')
      keys = state.store.list('groups/')
      state.issued |= {int(key.rsplit('/', 1)[1]) for key in keys}
  starts = [g.start for g in learner.trained]
  assert len(set(starts)) == len(starts)
  below, rest = buffer.cursor(learner.consumed)
  # What is missing below the newest is in the store or still to come, never skipped.
  gaps = set(range(max(starts))) - set(starts)
  assert gaps == set(range(below, max(starts))) - set(rest)
  assert len(gaps) <= 4


def test_a_run_resumed_for_more_steps_is_not_done_by_its_old_plan(make):
  state = make(steps=6)
  plan(state, below=12, step=6, done=True)
  assert admission.done(state.plan.plan, state.cfg)
  state = make(steps=9)
  plan(state, below=12, step=6, done=True)
  assert not admission.done(state.plan.plan, state.cfg)


# --- several processes ----------------------------------------------------------


def several(R: int, **changes) -> dict:
  rollout = config.Rollout(processes=R, group_size=4, ahead=2, keep_episodes=0)
  return {'rollout': dataclasses.replace(rollout, **changes)}


def test_processes_share_the_starts_without_a_word_with_each_other(make):
  states = [make(f'p{r}', index=r, **several(3)) for r in range(3)]
  issued = [drain(state) for state in states]
  assert issued == [[0, 3], [1, 4], [2, 5]]  # 2 batches of 2 groups, a third each
  for state in states:
    plan(state, below=2, rest=[3, 5])
  assert [drain(state) for state in states] == [[6, 9], [7], [8]]


@pytest.mark.parametrize('R', [2, 3, 5, 40])
@pytest.mark.parametrize('ahead', [1, 2, 3])
def test_without_any_one_process_a_batch_can_still_be_formed(make, R, ahead):
  cfg = make(batch=config.Batch(groups=16), **several(R, ahead=ahead)).cfg
  share = admission.share(cfg)
  assert (R - 1) * share >= cfg.batch.groups
  assert R * share >= ahead * cfg.batch.groups
  # No more than that asks for.
  assert (R - 1) * (share - 1) < cfg.batch.groups or R * (share - 1) < ahead * 16


def test_the_starts_in_the_store_that_are_others_do_not_count(make):
  cfg = make(**several(3)).cfg
  assert admission.own([0, 1, 2, 4, 7, 8], cfg, 1) == {1, 4, 7}


def test_samplers_and_rollouts_are_dealt_out_to_the_regions_in_turn(make):
  cfg = make(regions=3, sampler=config.Sampler(processes=5), **several(3)).cfg
  assert [admission.of_region(5, cfg, region) for region in range(3)] == [2, 2, 1]


@pytest.mark.parametrize('seed', range(3))
def test_a_process_that_is_cut_off_for_long_stops_nobody_and_loses_no_start(make, seed):
  rng, R, cut = random.Random(seed), 3, range(5, 14)
  states = [make(f'p{r}', index=r, **several(R)) for r in range(R)]
  learner = rig.Learner(states[0].store, states[0].cfg)
  learner.version = 0
  flights: list[list[int]] = [[] for _ in range(R)]
  for now in range(24):
    for r, state in enumerate(states):
      flights[r] += drain(state)
      assert len(state.issued - learner.consumed) <= admission.share(state.cfg)
      if r == 2 and now in cut:
        continue  # it may go on with what it has; nothing of it arrives
      rng.shuffle(flights[r])
      for start in flights[r]:
        group = types.Group(f'{start}-p{r}', start, 't', 'u', ())
        assert group_store.append(state.store, group)
      flights[r].clear()
    before = learner.step
    assert learner.take(2), now  # every time: no step waits for the one that is cut
    learner.publish()
    for r, state in enumerate(states):
      if r != 2 or now not in cut:
        asyncio.run(process.next_plan(state))
        if state.plan.version < learner.version:  # it missed some
          state.misses = -1
          asyncio.run(process.next_plan(state))
    assert learner.step == before + 1
  starts = [group.start for group in learner.trained]
  assert len(set(starts)) == len(starts)
  issued = set().union(*(state.issued for state in states))
  stored = {group_store.start_of(k) for k in states[0].store.list('groups/')}
  assert issued == set(starts) | stored  # the test's learner discards nothing
  below, _ = buffer.cursor(learner.consumed)
  assert below > 28  # its holes were filled when it came back
