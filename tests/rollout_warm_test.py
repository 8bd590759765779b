"""Scripted episodes of the warm start: written once, a share of them practice."""

import pytest

from swe17 import config, types
from swe17.agent import scripted
from swe17.env.repair import library
from swe17.rollout import process, warm
from swe17.store import groups as group_store
from swe17.store import kv
from tests import rollout_fixtures as rig


@pytest.fixture
def make(tmp_path):
  with rig.maker(tmp_path) as made:
    yield made


PRACTICE = [
  types.Task(f'practice/{i}', 'repair_functions', 'train', f'p{i}', 'Practise.', {})
  for i in range(4)
]


@pytest.fixture
def practice(monkeypatch):
  """Stands in for the library's functions; what was to be kept apart of them."""
  asked = []
  monkeypatch.setattr(
    library, 'practice', lambda held: asked.append(held) or list(PRACTICE)
  )
  return asked


def warm_start(state: process.Rollout) -> list[types.Episode]:
  store = kv.open(state.cfg.store + '/imitation')
  groups = [group_store.load(store, key) for key in store.list('groups/')]
  return [episode for group in groups for episode in group.episodes]


async def test_scripted_episodes_that_are_missing_are_written_once(make, practice):
  state = make(imitation=config.Imitation(episodes=10))
  await warm.write(state.cfg, state.world, state.says)
  store = kv.open(state.cfg.store + '/imitation')
  assert len(store.list('groups/')) == 3  # 10 episodes, 4 a record
  assert [member for _, _, member in state.world.ran] == list(range(12))
  first = list(state.world.ran)
  store.delete('groups/00000001')
  state.world.ran.clear()
  await warm.write(state.cfg, state.world, state.says)
  assert state.world.ran == first[4:8]  # on the same tasks
  assert len(store.list('groups/')) == 3
  assert state.store.list('groups/') == []
  state.world.ran.clear()
  await warm.write(state.cfg, state.world, state.says)
  assert state.world.ran == []
  assert practice == [rig.HELDOUT, rig.HELDOUT]  # nothing missing, nothing asked


@pytest.mark.parametrize('share', [0.0, 0.25, 1.0])
async def test_a_share_of_the_scripted_episodes_practises(make, practice, share):
  imitation = config.Imitation(episodes=200, practice=share)
  state = make(imitation=imitation)
  styles = {}

  async def episode(task, agent, group_id, member, sampling) -> types.Episode:
    styles[member] = agent._style
    return await rig.World().episode(task, agent, group_id, member, sampling)

  state.world.episode = episode
  await warm.write(state.cfg, state.world, state.says)
  done = warm_start(state)
  practised = [e for e in done if e.task_id.startswith('practice/')]
  assert abs(len(practised) - 200 * share) <= (20 if 0 < share < 1 else 0)
  for e in done:
    own = scripted.PRACTICE if e in practised else scripted.CLUMSY
    assert styles[e.member] == own
  # Their stand-ins had outcomes: nothing says whether practice was good.
  assert all(e.outcome.value is None and e.status == 'invalid' for e in practised)
  assert all(e.outcome.value is not None for e in done if e not in practised)
  assert len({e.id for e in done}) == 200
  held = {t.id for t in rig.HELDOUT}
  assert not held & {e.task_id for e in done}
