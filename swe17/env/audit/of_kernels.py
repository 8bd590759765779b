"""The kernels families under audit: candidates that must score nothing, and right ones.

A right candidate is one that solves: rewrites of the gold are as fast as the gold. What
does nothing or is the reference itself is wrong, however it is dressed up.
"""

import ast
from collections.abc import Mapping, Sequence
import random
from typing import Any

from swe17 import config, types
from swe17.env import base, families, sandbox
from swe17.env.audit import cheating, exploits, leaks, rewrites, subject
from swe17.env.kernels import kernels, kernels_small, small
from swe17.env.repair import grader

_RIGHT = 1  # rewrites of a gold: each is timed


class Subject:
  """`kernels` or `kernels_small`; a solution is a list of calls."""

  def __init__(self, family: str, host: Any, cfg: config.Sandbox, backend: str):
    self.family, self._host = family, host
    self._cfg, self._backend = cfg, backend

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """All of them: gold and fault of each are judged anyway."""
    return list(tasks), {}

  async def judge(self, task: types.Task, solution: Any) -> types.Outcome:
    env: base.Env = self._host.env(task)
    await env.reset()
    try:
      for name, arguments in solution:
        await env.step(name, arguments)
      return await env.verify()
    except grader.GraderError as e:
      return types.Outcome(None, f'the verifier failed: {e}')

  def gold(self, task: types.Task) -> list[Any]:
    return task.payload['gold']

  def empty(self, task: types.Task) -> list[Any]:
    """Who hands in what is there."""
    if self.family == kernels_small.FAMILY:
      return [['test', {}]]
    return _code(task.payload['source'])

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    if self.family == kernels_small.FAMILY:
      edits = [call for call in task.payload['gold'] if call[0] == 'edit']
      rng.shuffle(edits)
      return [subject.Tried('edits in another order', [*edits, ['test', {}]])]
    code = task.payload['gold'][0][1]['code']
    made = _rewritten(code, kernels.UNITS[task.payload['unit']].name)
    some = rng.sample(made, min(_RIGHT, len(made)))
    return [subject.Tried(label, _code(text)) for label, text in some]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    if self.family == kernels_small.FAMILY:
      places = range(1, len(task.payload['pieces']) // 2 + 1)
      texts = ('0', 'None', '[]', 'n', 'x')
      return [
        subject.Tried(f'another text: {place}', _edited(place, rng.choice(texts)))
        for place in places
      ]
    source = task.payload['source']
    name = kernels.UNITS[task.payload['unit']].name
    found = []
    for label, text in _less(source, name):
      found.append(subject.Tried(label, _code(text)))
    for label, text in _rewritten(source, name)[-1:]:
      found.append(subject.Tried(f'the reference, {label}', _code(text)))
    return found

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    gold = [(name, arguments) for name, arguments in task.payload['gold']]
    small = self.family == kernels_small.FAMILY
    return gold, [('test' if small else 'submit', {})]

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    if self.family == kernels_small.FAMILY:
      return self._small_attempts(task)
    name = kernels.UNITS[task.payload['unit']].name
    found = []
    for exploit in exploits.EXPLOITS:
      names = {'module': 'reference', 'function': name}
      source = task.payload['source']
      if exploit.statements:
        text = f'{exploit.statements.format(**names)}\n{source}'
        found.append(subject.Attempt(f'{exploit.name}, at import', tuple(_code(text))))
      if exploit.expression:
        made = exploit.expression.format(**names)
        text = f'def {name}(*a, **k):\n  return {made}\n'
        found.append(subject.Attempt(exploit.name, tuple(_code(text))))
    return found

  def _small_attempts(self, task: types.Task) -> list[subject.Attempt]:
    names = {'module': 'reference', 'function': task.payload['function']}
    found = []
    for exploit in exploits.EXPLOITS:
      if exploit.expression:
        text = exploit.expression.format(**names)
        calls = tuple((name, given) for name, given in _edited(1, f'{text}  #'))
        found.append(subject.Attempt(exploit.name, calls))
    return found

  async def play(
    self, task: types.Task, calls: Sequence[cheating.Call]
  ) -> subject.Played:
    env = self._host.env(task)
    return await subject.play(env, calls, env.verify)

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    return {f'{self.family}/candidate': list(tasks)}

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    """The file system of the sandbox that candidates run in, for every gold."""
    golds = [self._gold_text(task) for task in tasks]
    found = await leaks.in_sandbox(self._cfg, self._backend, leaks.needles(golds))
    return dict.fromkeys(self.images(tasks), found)

  def _gold_text(self, task: types.Task) -> str:
    if self.family != kernels_small.FAMILY:
      return task.payload['gold'][0][1]['code']
    pieces = list(task.payload['pieces'])
    for name, arguments in task.payload['gold']:
      if name == 'edit':
        pieces[2 * int(arguments['at'].strip('«»')) - 1] = arguments['new'].strip(' ')
    return small.source(pieces)

  def text(self, task: types.Task) -> str:
    if self.family == kernels_small.FAMILY:
      return small.source(task.payload['pieces'])
    return task.payload['source']

  async def close(self) -> None:
    await self._host.close()


def _code(text: str) -> list[Any]:
  """Calls that hand a module in."""
  return [['attempt', {'code': text, 'summary': 'Faster.'}], ['submit', {}]]


def _edited(place: int, text: str) -> list[Any]:
  return [['edit', {'at': f'«{place}»', 'new': text}], ['test', {}]]


def _parts(code: str, name: str) -> tuple[str, str, str]:
  """(before, the function, after) of a module. ValueError if it is not there."""
  for node in ast.parse(code).body:
    if isinstance(node, ast.FunctionDef) and node.name == name:
      lines = code.splitlines(keepends=True)
      first = node.lineno - 1
      assert node.end_lineno is not None
      body = ''.join(lines[first : node.end_lineno])
      return ''.join(lines[:first]), body, ''.join(lines[node.end_lineno :])
  raise ValueError(f'a module: no function {name!r} in it')


def _rewritten(code: str, name: str) -> list[tuple[str, str]]:
  before, body, after = _parts(code, name)
  return [(label, f'{before}{text}\n{after}') for label, text in rewrites.same(body)]


def _less(code: str, name: str) -> list[tuple[str, str]]:
  before, body, after = _parts(code, name)
  return [(label, f'{before}{text}\n{after}') for label, text in rewrites.less(body)]


async def open_subject(cfg: config.Sandbox, family: str) -> Subject:
  """Opens the family's bench."""
  host = await families.get(family).open(cfg)
  return Subject(family, host, cfg, sandbox.choose_backend(cfg))
