"""What a rollout process does with episodes that cheated, and tasks out of band."""

import asyncio
import dataclasses
import json
import pathlib

import pytest

from swe17 import config, types
from swe17.agent import formats, tokenizer
from swe17.rollout import manager
from tests import rollout_fixtures


@pytest.fixture
def made(tmp_path):
  with rollout_fixtures.maker(tmp_path) as make:
    yield make


def test_an_episode_that_cheated_is_kept_to_read_and_told(made, monkeypatch):
  state = made()
  state.world.fmt = formats.Own(tokenizer.load())
  monkeypatch.setattr(manager, '_CHEATS', 3)
  group = asyncio.run(rollout_fixtures.group(state, 0))
  reason = f'{types.CHEATING}ends the process (_exit)'
  cheats = [
    dataclasses.replace(e, outcome=types.Outcome(0.0, reason)) for e in group.episodes
  ]
  group = dataclasses.replace(group, episodes=(*cheats[:2], *group.episodes[2:]))
  for _ in range(3):
    manager._keep_cheating(state, group)
  folder = pathlib.Path(state.cfg.run_dir) / 'cheating'
  assert sorted(p.name for p in folder.iterdir()) == [f'{e.id}.md' for e in cheats[:2]]
  assert reason in (folder / f'{cheats[0].id}.md').read_text()
  told = rollout_fixtures.events(state, 'cheating')
  assert (told[0]['episodes'], told[0]['reasons']) == (2, [reason])


def test_outcomes_of_a_group_are_in_the_log_and_tasks_out_of_band_rest(made):
  state = made(tasks=config.Tasks(band_low=0.1, band_high=0.9, band_retry=0.0))
  asyncio.run(rollout_fixtures.group(state, 0))
  path = pathlib.Path(state.cfg.run_dir) / 'rollout-0.jsonl'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  told = next(row for row in rows if row['kind'] == 'finished')
  assert told['tried'] == 4 and 0 <= told['solved'] <= 4
  assert set(state.estimates) == {told['task']}
