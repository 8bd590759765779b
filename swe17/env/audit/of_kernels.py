"""The kernels families under audit: candidates that must score nothing, and right ones.

A right candidate is one that solves: rewrites of the gold are as fast as the gold. What
does nothing or is the reference itself is wrong, however it is dressed up.

`kernel_bench` is other people's problems, which have a reference only. What solves one
is a module in `<problem>.gold` beside `<problem>.py`; a problem without is barred, for
nothing shows that it can be solved here.
"""

import ast
from collections.abc import Mapping, Sequence
import pathlib
import random
import re
from typing import Any

from swe17 import config, types
from swe17.env import families, sandbox
from swe17.env.audit import cheating, exploits, leaks, rewrites, subject
from swe17.env.kernels import kernel_bench, kernels, kernels_small, small, worker

_RIGHT = 1  # rewrites of a gold: each is timed
_LESS = 2  # candidates without work, where a gold has many functions
GOLD = '.gold'  # ending of a problem's solution
Calls = list[Any]


class Subject(subject.Hosted[Any]):
  """`kernels`; a solution is a list of calls."""

  room = worker.Room()  # that candidates work in

  def __init__(self, family: str, host: Any, cfg: config.Sandbox, backend: str):
    super().__init__(family, host)
    self._cfg, self._backend = cfg, backend

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """All of them: gold and fault of each are judged anyway."""
    return list(tasks), {}

  def gold(self, task: types.Task) -> Calls:
    return task.payload['gold']

  def empty(self, task: types.Task) -> Calls:
    """Who hands in what is there."""
    return _code(task.payload['source'])

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    made = _rewritten(self._gold_text(task), self._name(task))
    some = rng.sample(made, min(_RIGHT, len(made)))
    return [subject.Tried(label, _code(text)) for label, text in some]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    source, name = task.payload['source'], self._name(task)
    found = []
    for label, text in _less(source, name):
      found.append(subject.Tried(label, _code(text)))
    for label, text in _rewritten(source, name)[-1:]:
      found.append(subject.Tried(f'the reference, {label}', _code(text)))
    return found

  def _name(self, task: types.Task) -> str:
    return kernels.UNITS[task.payload['unit']].name

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    return subject.calls_of(self.gold(task)), [('submit', {})]

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    """What runs when a candidate is imported, and what stands where it works."""
    found = []
    for exploit in exploits.EXPLOITS:
      names = {'module': 'reference', 'function': self._name(task)}
      if exploit.statements:
        text = f'{exploit.statements.format(**names)}\n{self._honest(task)}'
        found.append(subject.Attempt(f'{exploit.name}, at import', tuple(_code(text))))
      if exploit.expression:
        text = self._returning(task, exploit.expression.format(**names))
        found.append(subject.Attempt(exploit.name, tuple(_code(text))))
    return found

  def _honest(self, task: types.Task) -> str:
    """A candidate that does what is asked, no faster."""
    return task.payload['source']

  def _returning(self, task: types.Task, made: str) -> str:
    """A candidate whose work is one expression."""
    return f'def {self._name(task)}(*a, **k):\n  return {made}\n'

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    return {f'{self.family}/candidate': list(tasks)}

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    """The file system of the sandbox that candidates run in, for every gold."""
    wanted = leaks.needles([self._gold_text(task) for task in tasks])
    shown, _ = worker.binds(self._backend, self.room)
    found = await leaks.in_sandbox(self._cfg, self._backend, wanted, shown)
    return dict.fromkeys(self.images(tasks), found)

  def _gold_text(self, task: types.Task) -> str:
    return self.gold(task)[0][1]['code']

  def text(self, task: types.Task) -> str:
    return task.payload['source']


class Small(Subject):
  """`kernels_small`: edits at places instead of whole modules."""

  def empty(self, task: types.Task) -> Calls:
    return [['test', {}]]

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    edits = [call for call in task.payload['gold'] if call[0] == 'edit']
    rng.shuffle(edits)
    return [subject.Tried('edits in another order', [*edits, ['test', {}]])]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    places = range(1, len(task.payload['pieces']) // 2 + 1)
    texts = ('0', 'None', '[]', 'n', 'x')
    return [
      subject.Tried(f'another text: {place}', _edited(place, rng.choice(texts)))
      for place in places
    ]

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    return subject.calls_of(self.gold(task)), [('test', {})]

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    names = {'module': 'reference', 'function': task.payload['function']}
    found = []
    for exploit in exploits.EXPLOITS:
      if exploit.expression:
        text = exploit.expression.format(**names)
        calls = subject.calls_of(_edited(1, f'{text}  #'))
        found.append(subject.Attempt(exploit.name, tuple(calls)))
    return found

  def _gold_text(self, task: types.Task) -> str:
    pieces = list(task.payload['pieces'])
    for name, arguments in task.payload['gold']:
      if name == 'edit':
        pieces[2 * int(arguments['at'].strip('«»')) - 1] = arguments['new'].strip(' ')
    return small.source(pieces)

  def text(self, task: types.Task) -> str:
    return small.source(task.payload['pieces'])


class Bench(Subject):
  """`kernel_bench`, whose golds are files beside the problems."""

  def __init__(
    self, host: Any, cfg: config.Sandbox, backend: str, root: str, room: worker.Room
  ):
    super().__init__(kernel_bench.FAMILY, host, cfg, backend)
    self.room = room
    self._root = pathlib.Path(root)
    self._golds: dict[str, Calls] = {}

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Those that have a gold."""
    barred = {}
    for task in tasks:
      file = self._root / f'{task.id}{GOLD}'
      if file.is_file():
        self._golds[task.id] = _code(file.read_text(encoding='utf-8'))
      else:
        barred[task.id] = f'no gold: no file {file.name} beside the problem'
    return [task for task in tasks if task.id not in barred], barred

  def gold(self, task: types.Task) -> Calls:
    return self._golds[task.id]

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    made = self._otherwise(self._gold_text(task), rewrites.same)
    some = rng.sample(made, min(_RIGHT, len(made)))
    return [subject.Tried(label, _code(text)) for label, text in some]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    """Golds without work, and the reference under the name that is asked for."""
    made = self._otherwise(self._gold_text(task), rewrites.less)
    some = rng.sample(made, min(_LESS, len(made)))
    found = [subject.Tried(label, _code(text)) for label, text in some]
    return [*found, subject.Tried('the reference', _code(self._honest(task)))]

  def _otherwise(self, code: str, how: Any) -> list[tuple[str, str]]:
    """Versions of a module with one `forward` of it written otherwise."""
    data = code.encode()
    return [
      (label, text.decode())
      for part in rewrites.functions(data)
      if re.match(r'\s*def forward\(', part)
      for label, text in rewrites.within(data, part, how)
    ]

  def _name(self, task: types.Task) -> str:
    return 'forward'

  def _honest(self, task: types.Task) -> str:
    return re.sub(r'\bModel\b', 'ModelNew', task.payload['source'])

  def _returning(self, task: types.Task, made: str) -> str:
    return (
      'import torch\n\n\nclass ModelNew(torch.nn.Module):\n  def __init__(self, *a):\n'
      f'    super().__init__()\n\n  def forward(self, *a):\n    return {made}\n'
    )


def _code(text: str) -> Calls:
  """Calls that hand a module in."""
  return [['attempt', {'code': text, 'summary': 'Faster.'}], ['submit', {}]]


def _edited(place: int, text: str) -> Calls:
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


async def open_subject(
  cfg: config.Sandbox, tasks: config.Tasks, family: str = kernels.FAMILY
) -> Subject:
  """Opens the family's bench."""
  del tasks
  host = await families.get(family).open(cfg)
  made = Small if family == kernels_small.FAMILY else Subject
  return made(family, host, cfg, sandbox.choose_backend(cfg))


async def open_bench(
  cfg: config.Sandbox, tasks: config.Tasks, device: str = 'cuda'
) -> Bench:
  """Opens the bench of a device. ValueError with the reason where there is none."""
  host = await kernel_bench.open_host(cfg, device)
  backend = sandbox.choose_backend(cfg)
  return Bench(host, cfg, backend, tasks.root, kernel_bench.room(device))
