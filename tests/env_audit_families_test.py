"""The audit on real families: gold and nothing, the exploits, the images, in small."""

import asyncio
import collections
import random

import pytest

from experiments import task_audit
from swe17 import config
from swe17.env.audit import difficulty, of_repair, of_retrieval, pipeline, subject
from swe17.env.repair import repair, repair_shell
from swe17.env.retrieval import retrieval

CFG = config.Sandbox(workers=2, wall_seconds=8.0)


def repair_subject():
  """(subject, one verified task that a shell can be given)."""

  async def opened():
    tasks, _ = repair.read(config.Tasks(train=12, heldout=1))
    about = await of_repair.open_subject(CFG, config.Tasks())
    usable, _ = repair_shell.usable(tasks)
    sound, _ = await about.ready(usable[:2])
    return about, sound[0]

  return opened


async def solved(about, task, tried) -> bool:
  outcome = await about.judge(task, tried.solution)
  assert outcome.value is not None, outcome
  return outcome.value >= task.solved_at


def test_repair_tells_gold_and_rewrites_from_nothing_and_half_fixes():
  async def run():
    about, task = await repair_subject()()
    try:
      rng = random.Random(0)
      good = [subject.Tried('gold', about.gold(task)), *about.right(task, rng)]
      bad = [subject.Tried('empty', about.empty(task)), *await about.wrong(task, rng)]
      right = [await solved(about, task, tried) for tried in good]
      wrong = {t.label: await solved(about, task, t) for t in bad}
      return right, wrong
    finally:
      await about.close()

  right, wrong = asyncio.run(run())
  assert all(right) and len(right) > 1
  assert not any(wrong.values()), wrong
  assert {'empty', 'only the visible cases', 'returns None'} <= set(wrong)


QUICK = ('leaves with exit code 0', 'imports the original', 'edits the tests')
QUICK += ('returns what equals everything', 'adds a conftest', 'shadows a module')
QUICK += ('looks up the stack', 'takes the original from the modules')


def test_exploits_of_repair_score_nothing_and_are_flagged_by_tools_and_shell():
  async def run():
    about, task = await repair_subject()()
    try:
      every = about.attempts(task)
      names = {each.exploit.removesuffix(', in a shell') for each in every}
      some = [
        each for each in every if each.exploit.removesuffix(', in a shell') in QUICK
      ]
      played = [(each.exploit, await about.play(task, each.calls)) for each in some]
      return names, played
    finally:
      await about.close()

  names, played = asyncio.run(run())
  assert len(names) > 25 and len(played) > len(QUICK)
  for name, each in played:
    assert each.outcome.value == 0.0 and each.outcome.cheated, (name, each)
    assert each.flags and each.raw == 0.0, (name, each)


def test_the_grader_has_nothing_to_be_found():
  async def run():
    about, task = await repair_subject()()
    try:
      return await of_repair.leaks._of_grader(about._host, task)
    finally:
      await about.close()

  assert asyncio.run(run()) == []


def test_a_shell_shows_no_copy_of_a_function_that_others_brought_along():
  """pip has a tomli of its own, whose functions are those of the library's tomllib."""
  tasks, _ = repair.read(config.Tasks())
  mine = [t for t in tasks if t.payload['module'] == 'tomllib._parser'][:1]

  async def run():
    about = await of_repair.open_subject(CFG, config.Tasks())
    try:
      sound, _ = await about.ready(repair_shell.usable(mine)[0])
      images = {f'shell/{task.id}': [task] for task in sound}
      return await of_repair.leaks.of_repair(CFG, about._backend, about._host, images)
    finally:
      await about.close()

  found = asyncio.run(run())
  assert found and not any(found.values()), found


@pytest.fixture(scope='module')
def searched():
  tasks, _ = retrieval.read(config.Tasks(family=retrieval.SMALL, train=3, heldout=1))
  about = asyncio.run(of_retrieval.open_subject(CFG, config.Tasks(), retrieval.SMALL))
  return about, tasks


def test_retrieval_tells_right_from_wrong(searched):
  about, tasks = searched

  async def run():
    counts = collections.Counter()
    for task in tasks:
      rng = random.Random(1)
      for tried in [subject.Tried('gold', about.gold(task)), *about.right(task, rng)]:
        assert await solved(about, task, tried), tried
        counts['right'] += 1
      wrong = [subject.Tried('', about.empty(task)), *await about.wrong(task, rng)]
      for tried in wrong:
        assert not await solved(about, task, tried), tried
        counts['wrong'] += 1
    return counts

  counts = asyncio.run(run())
  assert counts['right'] >= 16 and counts['wrong'] >= 12


def test_exploits_of_retrieval_score_nothing_and_are_flagged(searched):
  about, tasks = searched

  async def run():
    task = tasks[0]
    return [(a.exploit, await about.play(task, a.calls)) for a in about.attempts(task)]

  played = asyncio.run(run())
  assert len(played) >= 10
  for name, each in played:
    assert each.outcome.value == 0.0 and each.flags, (name, each)
    assert each.raw is not None and each.raw < tasks[0].solved_at, (name, each)


def test_trees_show_nothing_but_source(searched):
  about, tasks = searched
  found = asyncio.run(about.leaks(tasks))
  assert len(found) == len(tasks) and not any(found.values()), found


@pytest.mark.parametrize('family', task_audit.STRENGTHS)
def test_scripted_agents_of_every_family_say_how_hard_its_tasks_are(family, tmp_path):
  """By the command's own way, on one task; of packages and functions only settings."""
  cfg = task_audit.settings_of(family)
  assert cfg.batch.row_length >= cfg.agent.max_context
  if family in ('repair_packages', 'repair_functions', 'kernels_small'):
    return  # runs suites for minutes; graders and clocks have tests of their own
  tasks, _ = retrieval.read(config.Tasks(family=family, train=1, heldout=1))
  said: list[str] = []
  found = asyncio.run(
    task_audit._difficulty(family, tasks, tmp_path, pipeline.Plan(), 1, said.append)
  )
  assert sum(found['counts'].values()) == len(tasks) and said
  estimates = difficulty.read(str(tmp_path / f'{family}.difficulty.jsonl'))
  assert [e.tries for e in estimates.values()] == [3.0] * len(tasks)
