"""The benches of the tasks, in small: what episodes leave, what is a failure."""

import asyncio
import dataclasses
import os

import pytest

from experiments.bench import tasks, tasks_soak

GOOD = {
  'accept_wrong': 0.01,
  'reject_right': 0.0,
  'exploits_scored': 0,
  'exploits_unflagged': 0,
  'leaks': 0,
  'gold_played': 5,
  'gold_solved': 5,
  'null_solved': 0,
}


def test_a_rate_above_5_percent_a_leak_and_a_score_are_failures():
  assert tasks.failures(GOOD) == []
  for name, value in (
    ('accept_wrong', 0.051),
    ('reject_right', None),
    ('exploits_scored', 1),
    ('exploits_unflagged', 1),
    ('leaks', 2),
  ):
    (sentence,) = tasks.failures({**GOOD, name: value})
    assert sentence.startswith(f'{name}: {value}')
  assert tasks.failures({**GOOD, 'gold_solved': 4}) != []
  assert tasks.failures({**GOOD, 'null_solved': 1}) != []


def test_what_is_more_at_the_end_is_a_leak():
  before = tasks_soak.Count(3, 20, 5, 100.0)
  assert tasks_soak.leaked(before, before, 10.0) == []
  assert tasks_soak.leaked(before, dataclasses.replace(before, mib=120.0), 10.0)
  for name in ('processes', 'descriptors', 'files'):
    more = dataclasses.replace(before, **{name: 99})
    assert tasks_soak.leaked(before, more, 10.0)[0].startswith(name)


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='counts are read there')
def test_a_child_and_an_open_file_are_counted(tmp_path, monkeypatch):
  monkeypatch.setattr(tasks_soak.tempfile, 'tempdir', str(tmp_path))

  async def run():
    before = tasks_soak.count()
    child = await asyncio.create_subprocess_exec('/bin/sleep', '60')
    with open(tmp_path / 'left', 'w') as file:
      during = tasks_soak.count()
      child.kill()
      await child.wait()
    del file
    (tmp_path / 'left').unlink()
    return before, during, await tasks_soak.settled(before)

  before, during, after = asyncio.run(run())
  assert during.processes == before.processes + 1
  assert during.files == before.files + 1
  assert during.descriptors > before.descriptors
  assert tasks_soak.leaked(before, after, 50.0) == []


@pytest.mark.skipif(not os.path.isdir('/proc/self'), reason='counts are read there')
def test_episodes_leave_nothing_behind(tmp_path, monkeypatch):
  monkeypatch.setattr(tasks_soak.tempfile, 'tempdir', str(tmp_path))
  before, after, invalid = asyncio.run(
    tasks_soak.soak(['repair_functions', 'retrieval_small'], 40, 16, 3)
  )
  assert invalid == 0
  assert tasks_soak.leaked(before, after, 64.0) == []
