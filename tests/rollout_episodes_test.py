"""One world for any family: opened by name, played, evaluated."""

import dataclasses
import json
import random

import pytest

from swe17 import config, types
from swe17.agent import formats, searcher
from swe17.env.retrieval import retrieval
from swe17.rollout import episodes, evaluation


@pytest.fixture
def cfg(tmp_path) -> config.Config:
  rows = retrieval.read_table(retrieval.TABLES[retrieval.SMALL])
  sides = {
    'train': [r for r in rows if r.package == 'jwt'],
    'heldout': [r for r in rows if r.package == 'mistune'],
  }
  assert all(r.split == split for split, found in sides.items() for r in found)
  path = tmp_path / 'table.jsonl'
  kept = [row for found in sides.values() for row in found[:6]]
  path.write_text(''.join(json.dumps(dataclasses.asdict(r)) + '\n' for r in kept))
  return config.Config(
    tasks=config.Tasks(family=retrieval.SMALL, table=str(path)),
    agent=config.Agent(max_turns=4, max_context=512, max_new_tokens=96),
  )


async def test_a_family_is_opened_by_name_played_and_evaluated(cfg):
  said = []
  world = await episodes.open_world(cfg, said.append)
  assert len(world.train) == len(world.heldout) == 6 and world.set_aside == {}
  assert said[-1] == '12 tasks verified, 0 set aside'

  async def one(task: types.Task, group_id: str, member: int) -> types.Episode:
    agent = searcher.Searcher(world.fmt, random.Random(member), searcher.CAREFUL)
    return await world.episode(task, agent, group_id, member, types.Sampling())

  done = await evaluation.evaluate(
    world.heldout, one, label='x', samples=2, at_once=4, progress=lambda *_: None
  )
  record = evaluation.record(
    done, version=0, split='heldout', samples=2, seed=0, seconds=1.0
  )
  assert record['outcome'] > 0.5 and record['calls_per_turn'] > 1
  assert record['outcome_low'] <= record['outcome'] <= record['outcome_high']
  assert set(record['outcomes']) == {task.id for task in world.heldout}
  # A score is more than solved or not.
  assert record['outcome'] != record['pass_at_1']
  await world.close()


async def test_each_family_has_its_own_tokeniser_and_a_model_of_ones_own_keeps_it(cfg):
  world = await episodes.open_world(cfg, lambda text: None)
  own, repair = world.fmt, formats.load()
  assert own.vocab_size == repair.vocab_size  # learner and sampler need not know
  assert own.stop_ids == repair.stop_ids
  grep = own.call('grep', pattern='x', path='')
  assert len(grep) < len(repair.call('grep', pattern='x', path=''))
  await world.close()


async def test_an_environment_that_does_not_begin_is_no_outcome(cfg):
  world = await episodes.open_world(cfg, lambda text: None)

  class Broken(retrieval.Host):
    def env(self, task):
      class Env(retrieval.RetrievalEnv):
        async def reset(self):
          raise ConnectionError('the container is gone')

      return Env(task, super().env(task)._shelf)

  world.host = Broken()

  async def nobody(request: types.GenerateRequest) -> types.GenerateResult:
    raise AssertionError('asked for a turn')

  done = await world.episode(world.train[0], nobody, 'g', 3, types.Sampling())
  assert (done.id, done.status, done.segments) == ('g.3', 'invalid', ())
  assert done.outcome == types.Outcome(None, 'ConnectionError: the container is gone')


async def test_an_unknown_family_stops_before_anything_starts():
  bad = config.Config(tasks=config.Tasks(family='repair'))
  with pytest.raises(ValueError, match=r"tasks\.family: got 'repair'"):
    await episodes.open_world(bad, lambda text: None)
