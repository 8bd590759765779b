"""The family `verifiers`: environments in the shape of that library's, by an adapter.

  tasks.factory     'module:function' that makes one, or its name, whose module has
                    `load_environment`
  tasks.arguments   what it is called with, JSON

  get_dataset, get_eval_dataset   rows with prompt, answer, info
  setup_state, env_response       an episode: every call of ours is a message of the
  is_completed                    agent's, answered by the environment
  rubric                          functions with weights: the score is their sum

An environment with tools offers them, and `answer`, which ends the episode as a message
without a call does there; one without offers `reply`. The library scores 0 where a
function raises; here that is no outcome. Functions that score several episodes at once,
and environments that ask a model themselves, cannot be used.

Nothing of the library is imported here. Source: verifiers 0.1.14, MultiTurnEnv,
ToolEnv, Rubric. Version 0.4.0 has tasksets and harnesses in place of these.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import functools
import hashlib
import json
import math
import signal
from typing import Any

from swe17 import config, types
from swe17.env import base
from swe17.env.formats import swe_bench
from swe17.env.formats import verifiers_shapes as shapes

FAMILY = 'verifiers'
_ANSWER = base.Tool('answer', 'Give the final answer.', {'text': 'str'}, writes=True)
_REPLY = base.Tool('reply', 'Say something.', {'text': 'str'}, writes=True)
_SHOWN = 20_000  # characters of what the environment says
_HELDOUT = 5  # every so many rows, where the environment has none of its own


@functools.lru_cache(maxsize=8)
def load(factory: str, arguments: str) -> Any:
  """The environment that settings name. ValueError says why there is none."""
  module, _, name = factory.partition(':')
  if not factory:
    raise ValueError('tasks.factory: got none, want module:function')
  if not name:  # as the library finds its environments
    module, name = factory.rpartition('/')[2].replace('-', '_'), 'load_environment'
  made = base.named('tasks.factory', module, name)
  try:
    given = json.loads(arguments)
  except json.JSONDecodeError as e:
    raise ValueError(f'tasks.arguments: not JSON: {e}') from e
  if not isinstance(given, dict):
    raise ValueError(f'tasks.arguments: got {given!r:.40}, want an object')
  env = _keeping_signals(lambda: made(**given))
  if reason := _unfit(env):
    raise ValueError(f'tasks.factory: {factory}: {reason}')
  return env


def _keeping_signals(make: Callable[[], Any]) -> Any:
  """Makes an environment. Those of the library take over the signals of a process."""
  numbers = (signal.SIGINT, signal.SIGTERM)
  before = [signal.getsignal(number) for number in numbers]
  try:
    return make()
  finally:
    for number, handler in zip(numbers, before, strict=True):
      if signal.getsignal(number) is not handler:
        signal.signal(number, handler)


def _unfit(env: Any) -> str:
  """What keeps an object from being played; '' if nothing."""
  if hasattr(env, 'load') and not hasattr(env, 'env_response'):
    return 'a taskset, as of verifiers 0.4: its agents need a harness of its own'
  for name in ('get_dataset', 'env_response', 'rubric'):
    if not hasattr(env, name):
      return f'it has no {name}: want the shape of a MultiTurnEnv'
  try:
    scores = list(functions(env.rubric))
  except ValueError as e:
    return str(e)
  if not any(weight for _, _, weight in scores):
    return 'its rubric has no function with a weight'
  return ''


def functions(rubric: Any) -> Iterator[tuple[Any, Callable[..., Any], float]]:
  """(rubric, function, weight) of a rubric or a group of them.

  ValueError if one scores several episodes at once.
  """
  for part in getattr(rubric, 'rubrics', None) or [rubric]:
    if part is not rubric and getattr(part, 'rubrics', None):
      yield from functions(part)
      continue
    for function, weight in zip(part.funcs, part.weights, strict=True):
      is_group = getattr(part, '_is_group_func', lambda _: False)
      if is_group(function):
        name = getattr(function, '__name__', repr(function))
        raise ValueError(f'{name} scores several episodes at once')
      yield part, function, float(weight)


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """The rows of the environment as tasks, and set-aside id -> reason. ValueError.

  Held out are the rows of `get_eval_dataset` if there are any of its own, and whatever
  training rows have the same prompt are set aside; else a fifth of the rows, by hash.
  """
  env = load(cfg.factory, cfg.arguments)
  own = any(
    getattr(env, name, None) is not None
    for name in ('eval_dataset', 'eval_dataset_source')
  )
  given = {'train': list(env.get_dataset())}
  if own:
    given['heldout'] = list(env.get_eval_dataset())
  made: list[types.Task] = []
  aside: dict[str, str] = {}
  seen: set[str] = set()
  for split in ('heldout', 'train'):
    for number, row in enumerate(given.get(split, ())):
      name = f'{split}/{row.get("example_id", number)}'
      task = _task(cfg, env, name, split, dict(row), own)
      if isinstance(task, str):
        aside[name] = task
      elif task.prompt in seen:
        aside[name] = 'its prompt is that of an earlier or a held-out row'
      else:
        seen.add(task.prompt)
        made.append(task)
  return swe_bench.chosen(cfg, made, aside), aside


def _task(
  cfg: config.Tasks, env: Any, name: str, split: str, row: dict[str, Any], own: bool
) -> types.Task | str:
  """The task of a row, or why it is set aside."""
  if 'prompt' not in row:
    return 'no prompt'
  try:
    row = {key: value for key, value in row.items() if value is not None}
    if not isinstance(row['prompt'], str):
      row['prompt'] = [plain(one) for one in row['prompt']]
    json.dumps(row)
    prompt = shapes.told(shapes.messages(row['prompt']))
    for given in shapes.tool_defs(env, row):
      shapes.tool(given)
  except (TypeError, ValueError) as e:
    return str(e)
  if not prompt.strip():
    return 'the prompt is empty'
  if not own:
    digest = hashlib.sha256(prompt.encode()).digest()
    split = 'train' if digest[0] % _HELDOUT else 'heldout'
  payload = {'factory': cfg.factory, 'arguments': cfg.arguments, 'row': row}
  solved_at = getattr(env, 'pass_threshold', 1.0)
  return types.Task(name, FAMILY, split, name, prompt, payload, float(solved_at))


def plain(message: Any) -> dict[str, Any]:
  """A message as a plain mapping, without entries that are None."""
  dump = getattr(message, 'model_dump', None)
  found = dump() if callable(dump) else dict(message)
  return {key: value for key, value in found.items() if value is not None}


class VerifiersEnv:
  """One episode on one row."""

  def __init__(self, task: types.Task):
    self._task = task
    self._env = load(task.payload['factory'], task.payload['arguments'])
    row = task.payload['row']
    self._defs = {
      shapes.tool(given)[0].name: given for given in shapes.tool_defs(self._env, row)
    }
    made = [shapes.tool(given)[0] for given in self._defs.values()]
    self._last = _ANSWER if made else _REPLY
    self.tools: tuple[base.Tool, ...] = (*made, self._last)
    self._state: Any = None
    self._said: list[Any] = []  # the whole conversation
    self._failed = ''
    self.done = False

  async def reset(self) -> str:
    """Begins anew. OSError if the environment's own set-up fails."""
    self._state = shapes.state(self._env, self._task.payload['row'])
    self._said = list(self._state['prompt'])
    self._failed, self.done = '', False
    setup = getattr(self._env, 'setup_state', None)
    if setup is not None:
      try:
        self._state = await shapes.ask(setup, state=self._state) or self._state
      except Exception as e:  # somebody else's code may raise anything
        raise OSError(f'setup_state: {type(e).__name__}: {e}') from e
    return self._task.prompt

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    """Runs one well-formed call; what the environment raises ends the episode."""
    if self.done or self._state is None:
      return 'already submitted'
    if name == self._last.name:
      said = shapes.message('assistant', arguments['text'])
    else:
      values = shapes.arguments(self._defs[name], arguments)
      if isinstance(values, str):
        return values
      said = shapes.call(name, values)
    trajectory_id = self._state['trajectory_id']
    self._state['trajectory'].append(shapes.step(self._said, said, trajectory_id))
    self._said.append(said)
    try:
      answers = await self._answers(said)
    except Exception as e:  # somebody else's code may raise anything
      self._failed = f'{type(e).__name__}: {e}'
      self.done = True
      return f'the environment failed: {self._failed[:200]}'
    return self._shown(answers)

  async def _answers(self, said: Any) -> list[Any]:
    """What the environment says to a message; `done` if that ends the episode."""
    called = bool(shapes.get(said, 'tool_calls'))
    if await self._completed() or (self._defs and not called):
      self.done = True
      return []
    given = await shapes.ask(
      self._env.env_response, messages=list(self._said), state=self._state
    )
    if isinstance(given, tuple):  # the older form: messages, state
      given, self._state = given
    answers = shapes.messages(given)
    self._said += answers
    final = self._state.get('final_env_response') is not None
    self.done = final or await self._completed()
    return answers

  async def _completed(self) -> bool:
    if self._state.get('error') is not None:
      raise RuntimeError(str(self._state['error']))
    check = getattr(self._env, 'is_completed', None)
    if check is None:
      return False
    return bool(await shapes.ask(check, messages=self._said, state=self._state))

  def _shown(self, answers: Sequence[Any]) -> str:
    text = shapes.told(answers) or ('the episode is over' if self.done else '')
    return text if len(text) <= _SHOWN else f'{text[:_SHOWN]}\n... cut'

  async def verify(self) -> types.Outcome:
    """The sum of the rubric's functions, each by its weight; None if one fails."""
    if self._state is None or not self._state['trajectory']:
      return types.Outcome(0.0, 'nothing was said')
    if self._failed:
      return types.Outcome(None, f'the environment failed: {self._failed}')
    self._state['completion'] = self._said[len(self._state['prompt']) :]
    self._state['is_completed'] = True
    total = 0.0
    try:
      await self._clean_up()
      for rubric, function, weight in functions(self._env.rubric):
        if weight:
          value = float(await shapes.ask(function, **self._objects(rubric)))
          if not math.isfinite(value):
            name = getattr(function, '__name__', 'a function')
            return types.Outcome(None, f'the rubric failed: {name} gave {value}')
          total += weight * value
    except Exception as e:  # somebody else's code may raise anything
      return types.Outcome(None, f'the rubric failed: {type(e).__name__}: {e}')
    return types.Outcome(total)

  async def _clean_up(self) -> None:
    """As the library does, before it scores; once."""
    clean = getattr(self._env, 'cleanup', None)
    if clean is not None and not self._state.get('cleaned_up'):
      self._state['cleaned_up'] = True
      await shapes.ask(clean, state=self._state)

  def _objects(self, rubric: Any) -> dict[str, Any]:
    """What a function of a rubric may ask for."""
    own = getattr(rubric, 'score_objects', None)
    if own is not None:
      return dict(own(self._state))
    row = self._task.payload['row']
    return {
      **row,
      'prompt': self._state['prompt'],
      'completion': self._state['completion'],
      'answer': row.get('answer', ''),
      'info': self._state.get('info') or {},
      'state': self._state,
      **getattr(rubric, 'class_objects', {}),
    }


class Host:
  """Environments of one process. Rows have no gold: whether they begin is all."""

  async def verify(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Begins every task once: (those that begin, set-aside id -> reason)."""
    sound, aside = [], {}
    for task in tasks:
      try:
        await VerifiersEnv(task).reset()
      except (OSError, ValueError) as e:
        aside[task.id] = str(e)
      else:
        sound.append(task)
    return sound, aside

  def env(self, task: types.Task) -> VerifiersEnv:
    return VerifiersEnv(task)

  async def close(self) -> None:
    return


async def open_host(cfg: config.Sandbox) -> Host:
  """A host. The environments bring what sandboxes they need."""
  del cfg
  return Host()
