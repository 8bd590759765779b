"""The plan: whole when a learner makes it, checked wherever it is read."""

import dataclasses

import numpy as np
import pytest

from swe17 import types
from swe17.store import kv
from swe17.sync import follower, manifest
from swe17.sync import plan as plans
from tests import sync_world as world

WHOLE = {
  'step': 7,
  'consumed_below': 12,
  'consumed_rest': [14, 15],
  'done': False,
  'sampling': types.Sampling(0.9, 0.0, 32, 0.95),
  'max_staleness': 3,
  'penalty_phase': 'budget',
  'tasks': [plans.task('repair_functions', 'off_by_one, wrong_name', 2.0)],
}


def test_a_plan_rides_along_and_comes_back_as_it_was():
  store = kv.open('memory://')
  made = plans.make(**WHOLE)
  world.publisher(store).publish(0, {'w': np.ones(3, np.float32)}, step=7, plan=made)
  got = follower.read_plan(store).plan
  assert got == made
  assert plans.sampling(got) == WHOLE['sampling']
  assert got['tasks'] == [
    {
      'family': 'repair_functions',
      'kinds': ['off_by_one', 'wrong_name'],
      'weight': 2.0,
    }
  ]


def test_a_task_row_without_kinds_means_all_of_them():
  assert plans.task('retrieval', ' ') == {
    'family': 'retrieval',
    'kinds': [],
    'weight': 1.0,
  }


BAD = {
  'step': [-1, True, '3', 1.5, None],
  'consumed_below': [-1, None],
  'consumed_rest': [[-1], 3, ['a'], None],
  'done': [0, 'no', None],
  'sampling': [{}, {'temperature': 1.0}, [1.0], 'greedy'],
  'max_staleness': [-1, 2.0],
  'penalty_phase': ['calm', 3, None],
  'tasks': [
    [],
    {},
    [{'family': 'x'}],
    [{'family': '', 'kinds': [], 'weight': 1}],
    [{'family': 'x', 'kinds': 'all', 'weight': 1}],
    [{'family': 'x', 'kinds': [], 'weight': 0}],
    [{'family': 'x', 'kinds': [], 'weight': float('inf')}],
  ],
}


@pytest.mark.parametrize('key', BAD)
def test_a_value_of_another_type_is_refused_by_its_name(key: str):
  for value in BAD[key]:
    with pytest.raises(ValueError, match=rf'plan\.{key}: got'):
      plans.check({**plans.make(**WHOLE), key: value})


def test_sampling_values_are_numbers():
  for name in ('temperature', 'min_p', 'top_k', 'top_p'):
    for value in ('1', None, -1, float('nan'), True):
      bad = {**dataclasses.asdict(WHOLE['sampling']), name: value}
      with pytest.raises(ValueError, match=r'plan\.sampling'):
        plans.check({'sampling': bad})


def test_every_key_of_a_learner_is_known_and_later_ones_pass():
  assert set(plans.make(**WHOLE)) == set(plans._KEYS) == set(BAD)
  plans.check({**plans.make(**WHOLE), 'curriculum': {'stage': 2}})
  with pytest.raises(ValueError, match='no sampling'):
    plans.sampling({'step': 3})


def test_a_manifest_with_a_bad_plan_is_neither_written_nor_read():
  store = kv.open('memory://')
  world.publish(world.publisher(store), 0)
  made = manifest.read(store, 0)
  with pytest.raises(ValueError, match=r'plan\.step'):
    manifest.to_bytes(dataclasses.replace(made, plan={'step': 'soon'}))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plans, 'check', lambda values: None)
    bad = manifest.to_bytes(dataclasses.replace(made, plan={'step': 'soon'}))
    listed = manifest.to_bytes(dataclasses.replace(made, plan=[1]))
  for data, want in ((bad, r'plan\.step'), (listed, 'want an object')):
    with pytest.raises(ValueError, match=want):
      manifest.parse(data)
  store.write(manifest.key_of(0), bad)
  follow = follower.Follower(store)
  assert follow.poll() is None
  assert follow.faults['manifest'] > 0
