"""Plays an environment and says what is wrong with it, in sentences for its author."""

import asyncio
from collections.abc import Callable, Sequence
import inspect
import math
from typing import Any

from swe17 import types
from swe17.env import base

_PARAMETERS = ('int', 'str')
_SAMPLES: dict[str, list[Any]] = {
  'int': [0, -1, 1 << 40],
  'str': ['', '../../etc/passwd', '(a+)+$' * 20, '\0', 'x' * 20_000, '«\u2028»'],
}
_SECONDS = 20.0  # that one call may take
_LONGEST = 100_000  # characters of a result


async def environment(
  make: Callable[[types.Task], Any], tasks: Sequence[types.Task]
) -> list[str]:
  """What is wrong, one sentence each; [] if nothing was found.

  `make` gives an environment for a task. A task's payload may hold `gold`: calls that
  solve it.
  """
  if not tasks:
    return ['there is no task to check with']
  found = _of_tasks(tasks)
  for task in tasks:
    try:
      env = make(task)
    except Exception as e:  # an author's code may raise anything: that is a finding
      return [*found, f'{task.id}: making it raised {type(e).__name__}: {e}']
    shape = _shape(env)
    if shape:  # nothing can be played
      return [*found, *(f'{task.id}: {problem}' for problem in shape)]
    try:
      played = await _play(make, task)
    except (
      Exception
    ) as e:  # of reset or verify: those of step are findings of their own
      played = [f'reset or verify raised {type(e).__name__}: {e!s:.80}']
    found += [f'{task.id}: {problem}' for problem in played]
  return list(dict.fromkeys(found))


def _of_tasks(tasks: Sequence[types.Task]) -> list[str]:
  found = []
  ids = [task.id for task in tasks]
  if len(set(ids)) < len(ids):
    found.append('tasks share an id: ids must be unique')
  sides: dict[str, set[str]] = {}
  for task in tasks:
    sides.setdefault(task.unit, set()).add(task.split)
    if task.split not in ('train', 'heldout'):
      found.append(f'{task.id}: split is {task.split!r}, want train or heldout')
    if not task.prompt.strip():
      found.append(f'{task.id}: the prompt is empty')
  found += [f'unit {u!r} is in both splits' for u, s in sides.items() if len(s) > 1]
  return found


def _shape(env: Any) -> list[str]:
  """What the protocol has and the object does not."""
  found = []
  for name in ('reset', 'step', 'verify'):
    method = getattr(env, name, None)
    if method is None:
      found.append(f'it has no {name}()')
    elif not inspect.iscoroutinefunction(method):
      found.append(f'{name} must be async: write `async def {name}`')
  if not isinstance(getattr(env, 'done', None), bool):
    found.append('it has no `done`, False until the agent has submitted')
  tools = getattr(env, 'tools', None)
  if not isinstance(tools, tuple | list) or not tools:
    return [*found, 'it has no `tools`, a tuple of base.Tool']
  names = [getattr(tool, 'name', None) for tool in tools]
  if len(set(names)) < len(names):
    found.append(f'tools share a name: {names}')
  for tool in tools:
    if not isinstance(tool, base.Tool):
      found.append(f'tools holds {tool!r}, want base.Tool')
      continue
    if not tool.name.isidentifier() or not tool.description.strip():
      found.append(f'tool {tool.name!r}: want an identifier and a description')
    bad = {p: kind for p, kind in tool.parameters.items() if kind not in _PARAMETERS}
    if bad:
      found.append(f'tool {tool.name}: parameters {bad}, want int or str')
  if not any(isinstance(t, base.Tool) and t.writes for t in tools):
    found.append('no tool writes: the one that ends the episode must (writes=True)')
  return found


async def _play(make: Callable[[types.Task], Any], task: types.Task) -> list[str]:
  """Plays the episodes that say most: nothing done, odd arguments, gold, twice."""
  found = []
  first, second = await _began(make(task)), await _began(make(task))
  if not isinstance(first, str) or not first.strip():
    return [f'reset() gave {first!r:.60}, want the first message as text']
  if first != second:
    found.append('two resets of one task gave different messages')
  env = make(task)
  await env.reset()
  found += _outcome(await env.verify(), 'an agent that does nothing', task, most=0.0)
  found += await _odd(make, task)
  gold = task.payload.get('gold')
  if gold is not None:
    found += await _gold(make, task, gold)
  return found


async def _began(env: Any) -> Any:
  return await env.reset()


async def _odd(make: Callable[[types.Task], Any], task: types.Task) -> list[str]:
  """Well-formed calls with values that nobody expects are answered, in bounds."""
  found = []
  env = make(task)
  await env.reset()
  for tool in env.tools:
    for i in range(max(map(len, _SAMPLES.values()))):
      arguments = {
        name: _SAMPLES[kind][i % len(_SAMPLES[kind])]
        for name, kind in tool.parameters.items()
      }
      if env.done:
        env = make(task)
        await env.reset()
      found += await _step(env, tool.name, arguments)
  return found


async def _step(env: Any, name: str, arguments: dict[str, Any]) -> list[str]:
  said = f'{name}({str(arguments)[:60]})'
  try:
    async with asyncio.timeout(_SECONDS):
      result = await env.step(name, arguments)
  except TimeoutError:
    return [f'{said} took over {_SECONDS:g} s: bound it']
  except Exception as e:
    return [
      f'{said} raised {type(e).__name__}: {e!s:.80}; a call that fails is an ordinary '
      'result'
    ]
  if not isinstance(result, str):
    return [f'{said} gave {type(result).__name__}, want text']
  if len(result) > _LONGEST:
    return [f'{said} gave {len(result)} characters: bound its results']
  return []


async def _gold(
  make: Callable[[types.Task], Any], task: types.Task, gold: Any
) -> list[str]:
  found = []
  values = []
  for _ in range(2):
    env = make(task)
    await env.reset()
    for name, arguments in gold:
      found += await _step(env, name, arguments)
    if not env.done:
      found.append('after its gold the environment is not done')
    outcome = await env.verify()
    found += _outcome(outcome, 'its gold', task, least=task.solved_at)
    values.append(outcome)
  if values[0] != values[1]:
    found.append(f'its gold scored {values[0]}, then {values[1]}')
  return list(dict.fromkeys(found))


def _outcome(
  outcome: Any,
  who: str,
  task: types.Task,
  *,
  least: float = -math.inf,
  most: float = math.inf,
) -> list[str]:
  if not isinstance(outcome, types.Outcome):
    return [f'verify() gave {outcome!r:.60}, want types.Outcome']
  if outcome.value is None:
    reason = outcome.reason or 'without a reason'
    return [f'{who} has no outcome: {reason}']
  if not isinstance(outcome.value, float) or not math.isfinite(outcome.value):
    return [f'{who} scored {outcome.value!r}, want a finite float']
  if not least <= outcome.value <= most:
    want = f'at least {least:g}' if outcome.value < least else f'{most:g}'
    return [f'{who} scored {outcome.value:g}, want {want}']
  return []
