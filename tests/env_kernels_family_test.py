"""The family `kernels` and its small sister, played with the real bench."""

import dataclasses
import random

import numpy as np
import pytest

from swe17 import config, types
from swe17.agent import episode, formats, kernels_scripted, tokenizer
from swe17.env import base
from swe17.env.audit import cheating
from swe17.env.kernels import bench, build, judge, kernels, kernels_small, units, values

CHEAP = 'common,run_lengths'  # units whose inputs are made and compared in no time


def tasks_of(**more) -> tuple[types.Task, ...]:
  return kernels.read(config.Tasks(family=kernels.FAMILY, **more))[0]


def test_the_table_has_tasks_of_many_units_and_splits_by_unit():
  rows = kernels.read_table(kernels.TABLE)
  assert len(rows) >= 60 and len({row.unit for row in rows}) >= 20
  assert all(row.gain >= build.LEAST for row in rows)
  for row in rows:
    assert row.split == build.split(row.unit)
    assert row.sha == kernels.sha(kernels.UNITS[row.unit], row.variant)
  assert {row.split for row in rows} == {'train', 'heldout'}


def test_golds_return_what_references_return():
  rng = np.random.default_rng(0)
  for unit in kernels.UNITS.values():
    for variant, slow in unit.slow.items():
      for size in unit.small:
        arguments = unit.inputs(rng, size)
        want, got = (
          values.decode(values.encode(function(*arguments)))
          for function in (slow, unit.fast)
        )
        assert values.differs(want, got, unit.rtol) == '', (unit.name, variant, size)


def test_a_source_is_a_module_that_stands_alone():
  for unit in kernels.UNITS.values():
    for function in (unit.fast, *unit.slow.values()):
      scope: dict = {}
      exec(units.source(function, unit.name), scope)
      assert callable(scope[unit.name])
      text = units.source(function, unit.name)
      assert function.__name__ == unit.name or function.__name__ not in text


def test_units_are_chosen_by_name_and_unknown_ones_refused():
  some = tasks_of(kinds='common,interpolate')
  assert {task.unit for task in some} == {'common', 'interpolate'}
  with pytest.raises(ValueError, match=r"tasks\.kinds: got 'commom'"):
    tasks_of(kinds='commom')
  with pytest.raises(ValueError, match=r'tasks.train: .* want 99'):
    tasks_of(train=99)
  with pytest.raises(ValueError, match=r'tasks\.attempts'):
    config.Tasks(attempts=0)


class Always:
  """A judge of one opinion."""

  def __init__(self, *verdicts: bench.Verdict):
    self._verdicts = list(verdicts)

  async def judge(self, problem, source) -> bench.Verdict:
    return self._verdicts.pop(0)


def env_of(task: types.Task, *verdicts: bench.Verdict) -> kernels.KernelsEnv:
  asked = kernels.problem(kernels.UNITS[task.unit], task.payload['variant'])
  return kernels.KernelsEnv(task, Always(*verdicts), asked)


CALL = {'code': 'def f(): 0', 'summary': 'Faster.'}


async def test_an_agent_is_told_the_class_and_the_best_attempt_counts():
  env = env_of(
    tasks_of()[0],
    bench.Verdict('parse', 'line 1: invalid syntax'),
    bench.Verdict('correct', speedup=3.0),
    bench.Verdict('wrong', 'other values'),
    bench.Verdict('correct', speedup=2.0),
  )
  await env.reset()
  said, scores = [], []
  for _ in range(4):
    assert not env.done
    said.append(await env.step('attempt', CALL))
    scores.append(await base.turn_score(env))
  assert said == [
    'parse: line 1: invalid syntax',
    'correct: 3.00 times as fast',
    'wrong: other values',
    'correct: 2.00 times as fast',
  ]
  assert scores == [0.0, 3.3, 0.0, 2.3]
  assert env.done and await env.step('attempt', CALL) == 'already submitted'
  assert await env.verify() == types.Outcome(3.3)
  assert env.figures == {'speedup': 3.0} and env.flags == ()


async def test_one_cheat_takes_everything_and_poor_work_only_its_own():
  task = tasks_of()[0]
  good = bench.Verdict('correct', speedup=3.0)
  env = env_of(task, good, bench.Verdict('barred', flag='timer'), good)
  await env.reset()
  scores = []
  for _ in range(3):
    await env.step('attempt', CALL)
    scores.append(await base.turn_score(env))
  assert scores == [3.3, 0.0, 0.0] and env.flags == ('timer',)
  outcome = await env.verify()
  assert outcome == types.Outcome(0.0, 'cheating: timer') and outcome.cheated
  env = env_of(task, good, bench.Verdict('barred', flag='copies_reference'))
  await env.reset()
  for _ in range(2):
    await env.step('attempt', CALL)
  assert env.flags == () and await env.verify() == types.Outcome(3.3)


async def test_watched_environments_keep_the_scores_of_their_turns():
  watched = cheating.Watched(env_of(tasks_of()[0], bench.Verdict('correct', speedup=2)))
  await watched.reset()
  await watched.step('attempt', CALL)
  assert await base.turn_score(watched) == 2.3
  watched = cheating.Watched(env_of(tasks_of()[0], bench.Verdict('correct', speedup=2)))
  await watched.reset()
  await watched.step('attempt', {**CALL, 'code': 'import os\nos._exit(0)'})
  assert await base.turn_score(watched) == 0.0


async def test_a_null_agent_scores_nothing_and_a_long_candidate_is_not_run():
  task = tasks_of()[0]
  env = env_of(task)
  await env.reset()
  assert (await env.step('attempt', {'code': 'x' * 99_999, 'summary': ''}))[:8] == (
    'too long'
  )
  await env.step('submit', {})
  assert env.done and await env.verify() == types.Outcome(0.0)


async def test_golds_solve_and_copies_score_nothing_on_the_real_bench():
  tasks = [t for t in tasks_of(kinds=f'{CHEAP},overlaps') if t.unit in CHEAP]
  host = await kernels.open_host(config.Sandbox(workers=1))
  try:
    sound, aside = await host.verify([t for t in tasks if t.id == 'common/list'])
    assert aside == {} and len(sound) == 1
    (task,) = sound
    agent = config.Agent(max_turns=5, max_context=9000, max_new_tokens=3000)
    fmt = formats.load()
    gold = task.payload['gold'][0][1]['code']
    half = gold.replace('set(b)', 'list(b)')
    for modules, want in (((gold,), 5.3), ((task.payload['source'],), 0.0)):
      done = await play(task, host, fmt, agent, modules)
      assert done.outcome.value == want and done.submitted
      assert done.solved == bool(want) and len(done.turn_scores or ()) == 2
    # Every turn has its own score, the best is the outcome.
    done = await play(task, host, fmt, agent, ('def common(', half, gold, half))
    assert done.turn_scores is not None and done.turn_scores[2] == 5.3
    assert done.turn_scores[0] == 0.0 and 0.3 < done.turn_scores[1] < 2.0
    assert done.turn_scores[3] == done.turn_scores[1]  # a text's verdict is kept
    assert done.outcome.value == 5.3 and host.judge.misses == 4
  finally:
    await host.close()


async def play(
  task: types.Task,
  host: kernels.Host,
  fmt: formats.Format,
  agent: config.Agent,
  modules: tuple[str, ...],
) -> types.Episode:
  return await episode.run(
    task=task,
    env=host.env(task),
    generate=kernels_scripted.handing_in(fmt, modules),
    fmt=fmt,
    cfg=agent,
    sampling=types.Sampling(),
    seed=0,
    group_id='g',
    member=0,
  )


async def test_small_tasks_are_sound_and_careful_work_pays_on_the_real_bench():
  cfg = config.Tasks(family=kernels_small.FAMILY, train=3, heldout=1)
  tasks, _ = kernels_small.read(cfg)
  host = await kernels_small.open_host(config.Sandbox(workers=1))
  fmt = formats.Own(tokenizer.load(tokenizer.PATH.parent / 'tokenizer_kernels.json'))
  try:
    sound, aside = await host.verify(tasks)
    assert len(sound) == 4 and aside == {}
    broken = dataclasses.replace(tasks[0], payload={**tasks[0].payload, 'gold': []})
    assert (await host.verify([broken]))[1] == {
      tasks[0].id: 'its gold: barred: copies_reference'
    }
    done = await episode.run(
      task=tasks[0],
      env=host.env(tasks[0]),
      generate=kernels_scripted.Editor(fmt, random.Random(0), kernels_scripted.CAREFUL),
      fmt=fmt,
      cfg=config.Agent(max_turns=5, max_context=320, max_new_tokens=72),
      sampling=types.Sampling(),
      seed=0,
      group_id='g',
      member=0,
    )
    assert (done.outcome.value or 0.0) > 1.6 and done.tests == 4
  finally:
    await host.close()


async def test_edits_that_name_no_place_or_are_long_are_answered():
  tasks, _ = kernels_small.read(
    config.Tasks(family=kernels_small.FAMILY, train=1, heldout=1)
  )
  env = kernels_small.SmallEnv(tasks[0], Always())
  await env.reset()
  for at in ('«0»', '«99»', 'x', '', '-1', '٣', '1' * 40):
    said = await env.step('edit', {'at': at, 'new': 'y'})
    assert said == f'no place {at[:8]}'
  assert (await env.step('edit', {'at': '1', 'new': 'a\nb'})).startswith('new must be')
  assert (await env.step('edit', {'at': '1', 'new': 'a' * 99})).startswith('new must')
  same = tasks[0].payload['pieces'][1]
  assert await env.step('edit', {'at': '«1»', 'new': same}) == 'nothing changed'
  assert await env.step('edit', {'at': '«1»', 'new': 'y'}) == 'edited'
  assert await env.step('undo', {}) == 'undone'
  assert await env.step('edit', {'at': '«1»', 'new': same}) == 'nothing changed'


def test_figures_of_an_account_are_those_of_the_best():
  account = judge.Account(3, 5.0)
  account.add(bench.Verdict('correct', speedup=9.0))
  account.add(bench.Verdict('correct', speedup=2.0))
  assert account.left == 1 and account.figures == {'speedup': 9.0}
  assert account.outcome() == types.Outcome(5.3)


def test_a_task_is_solved_by_a_share_of_what_its_gold_gains():
  assert kernels.solving(3.0, 0.5, 5.0) == 2.3
  assert kernels.solving(80.0, 0.5, 5.0) == kernels.solving(5.0, 0.5, 5.0) == 3.3
  assert all(task.solved_at > 1.3 for task in tasks_of())  # as fast is not enough
