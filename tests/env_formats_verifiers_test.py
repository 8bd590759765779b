"""Environments of the verifiers' shape: played, scored, never 0 for a fault."""

import json
import signal

import pytest

from swe17 import config
from swe17.env import base, check, families
from swe17.env.formats import verifiers_env
from swe17.env.formats import verifiers_shapes as shapes
from tests import verifiers_fixture as fixture

MODULE = 'tests.verifiers_fixture'


def cfg(name: str, arguments: str = '{}', **more) -> config.Tasks:
  return config.Tasks(
    family='verifiers', factory=f'{MODULE}:{name}', arguments=arguments, **more
  )


def tasks(name: str, arguments: str = '{}') -> list:
  found, aside = verifiers_env.read(cfg(name, arguments))
  assert not aside
  return sorted(found, key=lambda task: task.prompt)


async def played(task, *calls):
  env = verifiers_env.VerifiersEnv(task)
  await env.reset()
  said = [await env.step(name, arguments) for name, arguments in calls]
  return await env.verify(), env, said


async def test_an_environment_of_theirs_passes_the_check_of_ours():
  for name in ('sums', 'guess'):
    assert await check.environment(verifiers_env.VerifiersEnv, tasks(name)) == []


async def test_tools_are_called_and_the_rubric_scores_the_sum_of_its_weights():
  task = tasks('sums')[1]
  assert task.prompt == 'You add.\n\nWhat is 1 + 2?'
  answer = ('answer', {'text': '3'})
  got, env, said = await played(task, ('add', {'a': 1, 'b': 2}), answer)
  assert said[0] == '3' and env.done and got.value == 1.0
  got, _, _ = await played(task, ('answer', {'text': '4'}))
  assert got.value == 0.25
  got, _, _ = await played(task, *[('add', {'a': 1, 'b': 2})] * 2, answer)
  assert got.value == 0.75


def test_parameters_that_ours_cannot_be_are_json_text():
  made, optional = shapes.tool(fixture.definition(fixture.total))
  assert made.parameters == {'values': 'str', 'scale': 'str', 'unit': 'str'}
  assert optional == {'values': False, 'scale': True, 'unit': True}
  assert made.description.startswith('Sum up. (values is JSON, scale is JSON')
  strict = fixture.definition(fixture.total)
  strict['parameters']['required'] = ['values', 'scale', 'unit']  # as some make it
  strict['parameters']['properties']['scale']['default'] = 1.0
  assert shapes.tool(strict)[1] == {'values': False, 'scale': True, 'unit': False}
  made, _ = shapes.tool({'function': fixture.definition(fixture.add)})  # older form
  assert made == base.Tool('add', 'Add two numbers.', {'a': 'int', 'b': 'int'}, True)


async def test_json_arguments_are_read_and_empty_ones_left_out():
  task = tasks('sums')[0]
  calls = [
    ('total', {'values': '[1, 2]', 'scale': '', 'unit': ''}),
    ('total', {'values': '[1, 2]', 'scale': '2.5', 'unit': ' m'}),
    ('total', {'values': '1, 2', 'scale': '', 'unit': ''}),
    ('total', {'values': '7', 'scale': '', 'unit': ''}),
  ]
  _, _, said = await played(task, *calls)
  assert said[:2] == ['3', '7.5 m'] and said[2].startswith('values: not JSON')
  assert 'not iterable' in said[3]  # of the tool, an ordinary result


async def test_a_game_without_tools_is_talked_to_until_it_ends_itself():
  (task,) = tasks('guess')
  calls = [('reply', {'text': text}) for text in ('3', 'x', '9', '7')]
  got, env, said = await played(task, *calls)
  assert said == ['more', 'a number, please', 'less', 'equal']
  assert env.done and got.value == 1.0
  got, env, _ = await played(task, calls[0])
  assert not env.done and got.value == 0.0


async def test_the_turn_limit_of_the_environment_ends_the_episode():
  (task,) = tasks('guess', '{"max_turns": 2}')
  got, env, said = await played(task, *[('reply', {'text': '3'})] * 3)
  assert said == ['more', 'the episode is over', 'already submitted']
  assert env.done and got.value == 0.0


async def test_an_agent_that_says_nothing_scores_nothing():
  got, _, _ = await played(tasks('sums')[0])
  assert got.value == 0.0 and got.reason == 'nothing was said'


@pytest.mark.parametrize(
  ('where', 'reason'),
  [
    ('rubric', 'the rubric failed: ConnectionError: the judge is away'),
    ('nan', 'the rubric failed: score gave nan'),
    ('model', 'the environment failed: AttributeError'),
    ('error', 'the environment failed: RuntimeError: a model that went away'),
  ],
)
async def test_a_fault_of_the_environment_is_no_reward(where, reason):
  (task,) = tasks('failing', f'{{"where": "{where}"}}')
  got, _, _ = await played(task, ('reply', {'text': '7'}))
  assert got.value is None and got.reason.startswith(reason)


async def test_a_task_that_does_not_begin_is_set_aside():
  (task,) = tasks('failing', '{"where": "setup"}')
  host = await families.get('verifiers').open(config.Sandbox())
  sound, aside = await host.verify([task])
  assert not sound and aside == {task.id: 'setup_state: ConnectionError: no database'}
  with pytest.raises(OSError, match='no database'):
    await host.env(task).reset()


async def test_episodes_of_one_task_do_not_see_each_other():
  (task,) = tasks('guess')
  one, two = verifiers_env.VerifiersEnv(task), verifiers_env.VerifiersEnv(task)
  await one.reset()
  await two.reset()
  await one.step('reply', {'text': '7'})
  assert one.done and not two.done
  assert (await two.verify()).reason == 'nothing was said'
  await one.reset()
  assert not one.done and (await one.verify()).value == 0.0


async def test_clean_up_runs_once_an_episode():
  arguments = '{"rows": 4}'
  env = verifiers_env.load(f'{MODULE}:sums', arguments)
  before = env.cleaned
  _, one, _ = await played(tasks('sums', arguments)[0], ('answer', {'text': '2'}))
  await one.verify()
  assert env.cleaned == before + 1


def test_held_out_rows_are_their_own_or_a_fifth_and_never_trained_on():
  found = tasks('sums', '{"rows": 60}')
  held = [task for task in found if task.split == 'heldout']
  assert 5 <= len(held) <= 20
  row = {'prompt': 'You add.\n\nWhat is 1 + 2?'}
  arguments = json.dumps({'rows': 9, 'eval_dataset': [row]})
  found, aside = verifiers_env.read(cfg('sums', arguments))
  assert [task.id for task in found if task.split == 'heldout'] == ['heldout/0']
  assert aside == {'train/1': 'its prompt is that of an earlier or a held-out row'}


def test_the_signals_of_the_process_stay_its_own():
  before = signal.getsignal(signal.SIGTERM)
  verifiers_env.load(f'{MODULE}:sums', '{"rows": 2}')
  assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
  ('factory', 'arguments', 'reason'),
  [
    ('', '{}', 'got none, want module:function'),
    ('no-such-env', '{}', 'no_such_env cannot be imported'),
    (f'{MODULE}:nothing', '{}', "has no function or class 'nothing'"),
    (f'{MODULE}:sums', '{', 'tasks.arguments: not JSON'),
    (f'{MODULE}:sums', '[]', r'tasks.arguments: got \[\], want an object'),
    (f'{MODULE}:grouped', '{}', 'best scores several episodes at once'),
    (f'{MODULE}:Taskset', '{}', 'a taskset, as of verifiers 0.4'),
    (f'{MODULE}:Rubric', '{"funcs": []}', 'it has no get_dataset'),
  ],
)
def test_what_cannot_be_played_is_refused_with_the_reason(factory, arguments, reason):
  with pytest.raises(ValueError, match=reason):
    verifiers_env.read(
      config.Tasks(family='verifiers', factory=factory, arguments=arguments)
    )


def family() -> base.Family:
  return base.Family('mine', verifiers_env.read, verifiers_env.open_host)


def test_a_family_of_somebody_elses_is_named_by_its_factory():
  assert families.get('tests.env_formats_verifiers_test:family').name == 'mine'
  for name, reason in (
    ('no_such:family', 'cannot be imported'),
    (f'{MODULE}:none', "has no function or class 'none'"),
    (f'{MODULE}:sums', 'want a base.Family'),
  ):
    with pytest.raises(ValueError, match=reason):
      families.get(name)
