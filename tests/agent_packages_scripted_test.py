"""Scripted agents for packages: what they read, what they try, when they stop."""

import random

import pytest

from swe17 import config, types
from swe17.agent import episode, formats, packages_scripted, tokenizer
from swe17.env import sandbox
from swe17.env.packages import catalogue, faults, packages, rows, sources
from swe17.rollout import scripts
from tests import tiny_package as tiny

FMT = formats.Own(tokenizer.load(tokenizer.PATH))
AGENT = config.Agent(max_turns=60, max_context=60_000, max_new_tokens=900)
CFG = config.Sandbox()


@pytest.fixture
def task(tmp_path, monkeypatch) -> types.Task:
  monkeypatch.setitem(catalogue.SOURCES, 'tiny', tiny.stored(tmp_path))
  sources.fetch.cache_clear()
  if sandbox.choose_backend(CFG) != 'bubblewrap':
    pytest.skip('without namespaces nothing is promised')
  start = tiny.CORE.index(b'total + value')
  row = rows.Row(
    id='tiny/operator/0',
    package='tiny',
    version='1.0',
    kind='operator',
    split='train',
    seed=0,
    sha=tiny.tree().sha,
    fail_to_pass=(tiny.MEAN,),
    pass_to_pass=(tiny.UP,),
    shown={tiny.MEAN: 'assert -3.0 == 3'},
    edits=(faults.Edit('src/tiny/core.py', start, 'total + value', 'total - value'),),
  )
  return packages.task_of(row, str(tmp_path))


async def play(task: types.Task, generate: episode.Generate) -> types.Episode:
  runner = packages.Runner(CFG, 'bubblewrap')
  return await episode.run(
    task=task,
    env=packages.PackageEnv(task, packages.problem_of(task), runner),
    generate=generate,
    fmt=FMT,
    cfg=AGENT,
    sampling=types.Sampling(),
    seed=0,
    group_id='g',
    member=0,
  )


async def test_gold_solves_and_nothing_does_not(task):
  gold = packages_scripted.Calls(FMT, task.payload['gold'])
  assert (await play(task, gold)).outcome == types.Outcome(1.0)
  null = await play(task, packages_scripted.Calls(FMT, packages_scripted.NULL))
  assert null.outcome == types.Outcome(0.0) and null.submitted


async def test_the_careful_one_reads_the_test_then_the_code_then_repairs_it(task):
  agent = packages_scripted.Mender(FMT, random.Random(0), packages_scripted.CAREFUL)
  done = await play(task, agent)
  (segment,) = done.segments
  seen = packages_scripted.read(FMT, FMT.messages(segment.token_T.tolist()))
  assert list(seen.greps) == [r'def test_mean\b', r'(def|class) mean\b']
  assert ('src/tiny/core.py', 13) in seen.reads
  assert done.submitted and done.outcome == types.Outcome(1.0)


def test_every_edit_it_would_try_is_of_a_line_it_has_read():
  seen = packages_scripted.Seen()
  lines = tiny.CORE.decode().split('\n')
  seen.reads['src/tiny/core.py', 13] = lines[12:40]
  found = packages_scripted.edits(seen)
  assert ('src/tiny/core.py', lines[15], lines[15].replace('+', '-')) in found
  assert all(old in lines and old != new for _, old, new in found)
  assert not any('def up' in old for _, old, _ in found)  # another function


@pytest.mark.parametrize('verdict, last', [('passed', 'submit'), ('failed', 'test')])
def test_it_submits_what_passes_and_takes_back_what_does_not(verdict, last):
  seen = packages_scripted.Seen(failing=[('tests/a.py', 'test_a')])
  seen.greps[r'def test_a\b'] = [('tests/a.py', 1)]
  seen.greps[r'(def|class) f\b'] = [('a.py', 1)]
  seen.reads['tests/a.py', 1] = ['def test_a():', '  assert f(1) == 2']
  seen.reads['a.py', 1] = ['def f(a):', '  return a + 1 - g(a)']
  seen.standing, seen.verdict = ('a.py', 'old', 'new'), verdict
  calls = packages_scripted.next_calls(
    random.Random(0), packages_scripted.CAREFUL, seen
  )
  assert calls[-1][0] == last
  if verdict == 'failed':
    assert calls[0] == ('edit', {'path': 'a.py', 'old': 'new', 'new': 'old'})
    assert [name for name, _ in calls] == ['edit', 'edit', 'test']


def test_the_family_has_a_script():
  script = scripts.get(packages.FAMILY)
  assert isinstance(script.careful(FMT, random.Random(0)), packages_scripted.Mender)
  assert script.agent(FMT, random.Random(0)) is not None
