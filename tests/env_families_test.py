"""Families by name, and what check_env says of environments that are wrong."""

import dataclasses
import inspect
import pathlib

import pytest

from experiments import check_env, example_env
from swe17 import config, types
from swe17.env import base, check, families, mixture
from swe17.env.repair import repair
from swe17.env.retrieval import retrieval


def test_every_family_is_in_the_one_table():
  assert set(families.FAMILIES) >= {
    repair.FAMILY,
    retrieval.FAMILY,
    retrieval.SMALL,
  }
  for name, family in families.FAMILIES.items():
    assert family.name == name and families.get(name) is family
    assert (
      pathlib.Path(base.__file__).parents[1] / 'agent/data' / family.tokenizer
    ).is_file()


def test_an_unknown_family_is_refused_with_the_nearest():
  with pytest.raises(ValueError, match="did you mean 'retrieval_small'"):
    families.get('retrieval_smal')


async def test_the_example_is_short_and_right():
  assert len(inspect.getsource(example_env).splitlines()) < 60
  assert await check_env.problems('experiments.example_env:Guess') == []


async def test_a_name_that_leads_nowhere_is_refused():
  for name, why in (
    ('guess', 'want module:Env'),
    ('no_such_module:Env', 'cannot be imported'),
    ('experiments.example_env:Walrus', "has no function or class 'Walrus'"),
  ):
    with pytest.raises(ValueError, match=why):
      await check_env.problems(name)


class Wrong(example_env.Guess):
  """The example; each test breaks one thing."""


async def said(cls: type, **task) -> str:
  tasks = [dataclasses.replace(t, **task) for t in example_env.Guess.tasks()]
  return '\n'.join(await check.environment(cls, tasks))


async def test_a_missing_method_is_named():
  class Env(Wrong):
    verify = None

  class Sync(Wrong):
    def reset(self):
      return 'now'

  assert 'it has no verify()' in await said(Env)
  assert 'write `async def reset`' in await said(Sync)


async def test_tools_that_are_wrong_are_named():
  class Typed(Wrong):
    tools = (base.Tool('ask', 'Ask.', {'number': 'float'}, True),)

  class Reading(Wrong):
    tools = (base.Tool('ask', 'Ask.', {'number': 'int'}, False),)

  class Twice(Wrong):
    tools = (*example_env.Guess.tools, example_env.Guess.tools[0])

  assert "parameters {'number': 'float'}, want int or str" in await said(Typed)
  assert 'no tool writes' in await said(Reading)
  assert 'share a name' in await said(Twice)


async def test_a_call_that_raises_or_says_no_text_is_a_finding():
  class Raising(Wrong):
    async def step(self, name, arguments):
      return 1 // (arguments['number'] * 0)

  class Silent(Wrong):
    async def step(self, name, arguments):
      self.done = name == 'submit'

  class Endless(Wrong):
    async def step(self, name, arguments):
      return 'x' * 1_000_000

  assert 'raised ZeroDivisionError' in await said(Raising)
  assert 'gave NoneType, want text' in await said(Silent)
  assert 'bound its results' in await said(Endless)


async def test_a_verifier_that_raises_is_a_finding():
  class Raising(Wrong):
    async def verify(self):
      raise KeyError('secret')

  assert "reset or verify raised KeyError: 'secret'" in await said(Raising)


async def test_doing_nothing_must_score_nothing():
  class Generous(Wrong):
    async def verify(self):
      return types.Outcome(0.5)

  assert 'an agent that does nothing scored 0.5, want 0' in await said(Generous)


async def test_gold_must_end_the_episode_and_solve_it():
  wrong = {'secret': 7, 'gold': [['submit', {'number': 8}]]}
  assert 'its gold scored 0, want at least 1' in await said(Wrong, payload=wrong)
  early = {'secret': 7, 'gold': [['ask', {'number': 7}]]}
  assert 'the environment is not done' in await said(Wrong, payload=early)


async def test_an_outcome_without_a_number_and_without_a_reason_is_a_finding():
  class Absent(Wrong):
    async def verify(self):
      return types.Outcome(None)

  class Odd(Wrong):
    async def verify(self):
      return 1.0

  assert 'has no outcome: without a reason' in await said(Absent)
  assert 'want types.Outcome' in await said(Odd)


async def test_tasks_that_share_ids_or_units_across_splits_are_findings():
  tasks = example_env.Guess.tasks()
  alike = [tasks[0], dataclasses.replace(tasks[1], id=tasks[0].id)]
  assert 'tasks share an id' in '\n'.join(await check.environment(Wrong, alike))
  both = [tasks[0], dataclasses.replace(tasks[1], unit=tasks[0].unit, split='heldout')]
  assert 'is in both splits' in '\n'.join(await check.environment(Wrong, both))
  assert await check.environment(Wrong, []) == ['there is no task to check with']


async def test_the_families_pass_their_own_check():
  task = types.Task('t', 'f', 'train', 'u', 'Repair it.', {
    'source': 'def f(a):\n  return a < 1',
    'visible': [],
    'hidden': [],
    'expected_visible': [],
    'expected_hidden': [],
  })  # fmt: skip
  host = repair.Host(None)  # no cases: the graders are not asked
  found = await check.environment(host.env, [task])
  # Without cases there is no outcome, and check says so.
  assert found == [
    't: an agent that does nothing has no outcome: no cases: a function to practise on'
  ]


class Stub:
  """A host of one family that sets one task aside and remembers."""

  def __init__(self, name: str, log: list[str]):
    self.name, self.log = name, log

  async def verify(self, tasks):
    assert {task.family for task in tasks} <= {self.name}
    bad = {task.id: 'flaky' for task in tasks if task.id.endswith('1')}
    good = [task for task in tasks if task.id not in bad]
    return [dataclasses.replace(t, payload={'by': self.name}) for t in good], bad

  def env(self, task):
    return self.name

  async def close(self):
    self.log.append(f'closed {self.name}')


def a_family(name: str, kinds: tuple[str, ...], log: list[str]) -> base.Family:
  def read(cfg):
    log.append(f'{cfg.family} {cfg.kinds} {cfg.train}')
    return tuple(
      types.Task(f'{name}/{i}', name, 'train', name, '', {}) for i in range(3)
    ), {f'{name}/x': 'old'}

  async def start(cfg):
    if cfg.backend == 'process' and name == 'b':
      raise OSError('no sandbox')
    return Stub(name, log)

  return base.Family(name, read, start, kinds)


async def test_a_mixture_takes_turns_and_each_task_goes_to_its_own_host():
  log: list[str] = []
  mixed = mixture.of([a_family('a', ('x', 'y'), log), a_family('b', ('z',), log)])
  tasks, aside = mixed.read(config.Tasks(family='a,b', kinds='y,x', train=3))
  assert [task.id for task in tasks] == ['a/0', 'b/0', 'a/1', 'b/1', 'a/2', 'b/2']
  # Kinds choose among the tasks of the family that has them; of b all are wanted.
  assert log == ['a y,x 3', 'b  3'] and set(aside) == {'a/x', 'b/x'}
  host = await mixed.open(config.Sandbox())
  sound, bad = await host.verify(tasks)
  assert [task.id for task in sound] == ['a/0', 'b/0', 'a/2', 'b/2']
  assert set(bad) == {'a/1', 'b/1'}
  assert [host.env(task) for task in sound] == ['a', 'b', 'a', 'b']
  assert all(task.payload == {'by': task.family} for task in sound)
  await host.close()
  assert log[2:] == ['closed a', 'closed b']


async def test_a_mixture_whose_second_host_fails_closes_the_first():
  log: list[str] = []
  mixed = mixture.of([a_family('a', (), log), a_family('b', (), log)])
  with pytest.raises(OSError, match='no sandbox'):
    await mixed.open(config.Sandbox(backend='process'))
  assert log == ['closed a']


def test_a_mixture_is_named_by_its_parts():
  got = families.get('repair_text, retrieval_small')
  assert got.name == 'repair_text,retrieval_small'
  assert {'operator', 'second'} <= set(got.kinds)
  with pytest.raises(ValueError, match='want every family once'):
    families.get('retrieval,retrieval')
  with pytest.raises(ValueError, match="did you mean 'repair_text'"):
    families.get('retrieval,repair_txt')
  with pytest.raises(ValueError, match='leave it out'):
    got.read(config.Tasks(family=got.name, table='some.jsonl'))
