"""Environments in the shapes of verifiers 0.1.14 (read 2026-11-30), without it.

Names and signatures are those of verifiers/envs/multiturn_env.py, envs/tool_env.py and
rubrics/rubric.py; what an environment's author would write is below them.
"""

import inspect
import json
import signal
from typing import Any


class Rubric:
  """verifiers.Rubric: functions, weights, and what they may ask for."""

  def __init__(self, funcs: list, weights: list[float] | None = None):
    self.funcs = funcs
    self.weights = weights or [1.0] * len(funcs)
    self.class_objects = {'parser': str.strip}

  def _is_group_func(self, func: Any) -> bool:
    return bool({'states', 'completions'} & set(inspect.signature(func).parameters))


class RubricGroup(Rubric):
  """verifiers.RubricGroup."""

  def __init__(self, rubrics: list[Rubric]):
    super().__init__([])
    self.rubrics = rubrics


class MultiTurnEnv:
  """verifiers.MultiTurnEnv, as far as a rollout uses it."""

  def __init__(self, dataset: list, rubric: Rubric, max_turns: int = -1, **more: Any):
    self.dataset, self.rubric, self.max_turns = dataset, rubric, max_turns
    self.eval_dataset = more.get('eval_dataset')
    self.tool_defs = more.get('tool_defs')
    self.cleaned = 0
    signal.signal(signal.SIGTERM, lambda *_: None)  # as Environment.__post_init__ does

  def get_dataset(self, n: int = -1, seed: int | None = None) -> list:
    return self.dataset

  def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> list:
    return self.eval_dataset or self.dataset  # it falls back, with a warning

  async def setup_state(self, state: dict) -> None:
    """Override."""

  async def is_completed(self, state: dict, **kwargs: Any) -> bool:
    over = 0 < self.max_turns <= len(state['trajectory'])
    return over or state.get('final_env_response') is not None

  async def cleanup(self, state: dict, task: Any = None) -> None:
    self.cleaned += 1

  async def env_response(self, messages: list, state: dict, **kwargs: Any) -> list:
    raise NotImplementedError


class ToolEnv(MultiTurnEnv):
  """verifiers.ToolEnv: a message's calls, by the names of functions."""

  def __init__(self, tools: list, **more: Any):
    super().__init__(tool_defs=[definition(tool) for tool in tools], **more)
    self.tool_map = {tool.__name__: tool for tool in tools}

  async def env_response(self, messages: list, state: dict, **kwargs: Any) -> list:
    answers = []
    for call in messages[-1].tool_calls:
      try:
        content = str(self.tool_map[call.name](**json.loads(call.arguments)))
      except Exception as e:
        content = str(e)
      answers.append({'role': 'tool', 'content': content, 'tool_call_id': call.id})
    return answers


def definition(function: Any) -> dict[str, Any]:
  """verifiers.types.Tool of a function, as its schema library gives it."""
  kinds = {int: 'integer', str: 'string', float: 'number', list: 'array'}
  given = inspect.signature(function).parameters.values()
  return {
    'name': function.__name__,
    'description': function.__doc__ or '',
    'parameters': {
      'type': 'object',
      'properties': {p.name: {'type': kinds[p.annotation]} for p in given},
      'required': [p.name for p in given if p.default is p.empty],
    },
  }


# ---- what authors write -------------------------------------------------------------


def add(a: int, b: int) -> int:
  """Add two numbers.

  More that a model need not read.
  """
  return a + b


def total(values: list, scale: float = 1.0, unit: str = '') -> str:
  """Sum up."""
  return f'{sum(values) * scale:g}{unit}'


def right(completion: list, answer: str, **kwargs: Any) -> float:
  return float(completion[-1].content.strip() == answer)


async def short(state: dict) -> float:
  return 1.0 if len(state['trajectory']) <= 2 else 0.0


def metric(completion: list) -> float:
  raise RuntimeError('a metric has no weight, and is not asked')


def sums(rows: int = 3, **more: Any) -> ToolEnv:
  """Sums with a tool; reward for the right answer, and for few turns."""
  dataset = [
    {
      'example_id': n,
      'prompt': [
        {'role': 'system', 'content': 'You add.'},
        {'role': 'user', 'content': f'What is {n} + 2?'},
      ],
      'answer': str(n + 2),
      'info': {'n': n},
    }
    for n in range(rows)
  ]
  group = RubricGroup([Rubric([right], [0.75]), Rubric([short, metric], [0.25, 0.0])])
  return ToolEnv([add, total], dataset=dataset, rubric=group, max_turns=5, **more)


class Guess(MultiTurnEnv):
  """A game without tools: higher, lower."""

  async def setup_state(self, state: dict) -> None:
    state['secret'] = int(state['answer'])

  async def env_response(self, messages: list, state: dict, **kwargs: Any) -> list:
    try:
      guess = int(messages[-1].content)
    except ValueError:
      return [{'role': 'user', 'content': 'a number, please'}]
    said = 'equal' if guess == state['secret'] else 'more' if guess < 7 else 'less'
    answer = [{'role': 'user', 'content': said}]
    if said == 'equal':
      state['final_env_response'] = answer
    return answer


def guess(rows: int = 1, **more: Any) -> Guess:
  def solved(completion: list) -> float:
    return float(bool(completion) and completion[-1].content == 'equal')

  dataset = [{'prompt': f'Guess, game {n}.', 'answer': '7'} for n in range(rows)]
  return Guess(dataset, Rubric([solved]), **more)


def failing(where: str) -> MultiTurnEnv:
  """An environment that raises at one place."""

  def score(completion: list) -> float:
    if where == 'rubric':
      raise ConnectionError('the judge is away')
    return float('nan') if where == 'nan' else 1.0

  class Failing(Guess):
    async def setup_state(self, state: dict) -> None:
      if where == 'setup':
        raise ConnectionError('no database')
      state['secret'] = 7
      if where == 'error':
        state['error'] = 'a model that went away'

    async def env_response(self, messages: list, state: dict, **kwargs: Any) -> list:
      if where == 'model':
        state['client'].ask()  # a simulated user
      return await super().env_response(messages, state)

  return Failing([{'prompt': 'Guess.', 'answer': '7'}], Rubric([score]))


def grouped() -> MultiTurnEnv:
  def best(completions: list) -> list[float]:
    return [1.0 for _ in completions]

  return Guess([{'prompt': 'Guess.'}], Rubric([best]))


class Taskset:
  """verifiers 0.4.0 (read 2026-11-30): verifiers/v1/taskset.py."""

  def load(self) -> list:
    return []
