"""`repair_functions` under audit, by its tools and through its shell; `repair_text`.

Both have the same tasks and verdicts. An edit stands at an anchor in the one, in the
other it quotes what it replaces; agents with a shell are given tasks of the one.
"""

import ast
from collections.abc import Mapping, Sequence
import dataclasses
import random
from typing import Any

from swe17 import config, types
from swe17.env import sandbox
from swe17.env.audit import cheating, exploits, leaks, rewrites, subject
from swe17.env.repair import (
  anchors,
  faults,
  functions,
  grader,
  repair,
  repair_shell,
  repair_text,
)

MUTANTS = 4  # of the gold, a task
_SEEDS = range(1, 9)  # of the cases that tell a mutant from an equal program
_SECONDS = 10.0  # of a shell command


class Subject(subject.Hosted[repair.Host]):
  """The family with its graders; shells are opened on demand."""

  def __init__(
    self,
    cfg: config.Sandbox,
    host: repair.Host,
    backend: str,
    family: str = repair.FAMILY,
  ):
    super().__init__(family, host)
    self._cfg, self._backend = cfg, backend

  async def judge(self, task: types.Task, solution: Any) -> types.Outcome:
    """The outcome of a function's text. Not from the kept verdicts: run anew."""
    verifier = repair.Verifier(self._host.graders, capacity=0)
    env = _Given(task, verifier, solution)
    return await env.verify()

  def gold(self, task: types.Task) -> str:
    return task.payload['original']

  def empty(self, task: types.Task) -> str:
    return task.payload['source']

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    del rng
    return [subject.Tried(*each) for each in rewrites.same(task.payload['original'])]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    """What does nothing, special cases of the visible inputs, and mutants of the gold.

    A mutant that answers several hundred other inputs as the gold does is equal to it
    as far as anybody can tell, and is left out.
    """
    gold, bad = task.payload['original'], task.payload['source']
    found = [subject.Tried(*each) for each in rewrites.less(gold)]
    found.append(subject.Tried('only the visible cases', _visible_only(task)))
    made = [faults.apply(gold, f.line, f.old, f.new) for f in faults.candidates(gold)]
    mutants = [text for text in made if text not in (gold, bad)]
    tried = [
      ('mutant', text) for text in rng.sample(mutants, min(MUTANTS, len(mutants)))
    ]
    more = list(faults.candidates(bad))
    for fault in rng.sample(more, min(2, len(more))):
      text = faults.apply(bad, fault.line, fault.old, fault.new)
      if text != gold:
        tried.append(('another edit', text))
    want = await self._answers(task, gold)
    for number, (label, text) in enumerate(tried):
      if await self._answers(task, text) != want:
        found.append(subject.Tried(f'{label}: {number}', text))
    return found

  async def _answers(self, task: types.Task, source: str) -> tuple[str, ...]:
    """What a version answers to many inputs of other seeds than the task's."""
    name = f'{task.payload["module"]}.{task.payload["function"]}'
    entry = functions.catalogue()[name]
    cases: dict[str, None] = {}
    for seed in _SEEDS:
      visible, hidden = functions.cases(entry, 1000 + seed)
      cases |= dict.fromkeys((*visible, *hidden))
    check = grader.Check(entry.module, entry.function, source, tuple(cases))
    got = await self._host.graders.run(check)
    return tuple(verdict if repair.final(verdict) else 'late' for verdict in got)

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    """The gold as one edit, where it is one."""
    end = ('submit', {})
    edit = self._edit(task.payload['source'], task.payload['original'])
    return (None if edit is None else [('edit', edit), ('test', {}), end]), [end]

  def _edit(self, source: str, wanted: str) -> dict[str, str] | None:
    """The arguments that make one version of the other; None if no one edit does."""
    bad, good = anchors.split(source), anchors.split(wanted)
    if len(bad) != len(good):
      return None
    others = [i for i, (a, b) in enumerate(zip(bad, good, strict=True)) if a != b]
    names = {index: name for name, index in anchors.names(bad).items()}
    if len(others) != 1 or others[0] not in names:
      return None
    return {'at': f'«{names[others[0]]}»', 'new': good[others[0]]}

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    """One edit each, and whole episodes of a shell."""
    payload = task.payload
    names = {'module': payload['module'], 'function': payload['function']}
    found = []
    for exploit in exploits.EXPLOITS:
      if exploit.expression:
        edit = self._exploiting(payload['source'], exploit.expression.format(**names))
        if edit is not None:
          calls = (('edit', edit), ('test', {}), ('submit', {}))
          found.append(subject.Attempt(exploit.name, calls))
      if exploit.commands and self._shell_of(task):
        commands = [command.format(**names) for command in exploit.commands]
        calls = tuple(('bash', {'command': command}) for command in commands)
        found.append(subject.Attempt(f'{exploit.name}, in a shell', calls))
    return found

  def _exploiting(self, source: str, text: str) -> dict[str, str] | None:
    """An edit that puts an expression in place of the rest of a line."""
    at, _ = _placed(source, text)
    return {'at': at, 'new': f'{text}  #'} if at else None

  def _shell_of(self, task: types.Task) -> bool:
    return self._backend == 'bubblewrap' and bool(repair_shell.usable([task])[0])

  async def play(
    self, task: types.Task, calls: Sequence[cheating.Call]
  ) -> subject.Played:
    if calls and calls[0][0] == 'bash':
      return await self._play_shell(task, calls)
    return await super().play(task, calls)

  async def _play_shell(
    self, task: types.Task, calls: Sequence[cheating.Call]
  ) -> subject.Played:
    shell = repair_shell.RepairShell(
      task, self._host.verifier, self._cfg, self._backend, _SECONDS
    )
    try:
      said = [(await shell.run(arguments['command'])).output for _, arguments in calls]
      outcome = cheating.judged(await shell.verify(), shell.flags)
      raw = await self.judge(task, shell.source)  # what the grader alone says
      return subject.Played(outcome, raw.value, shell.flags, tuple(said))
    finally:
      shell.close()

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    """The grader's image by function, and a shell's by task."""
    found: dict[str, list[types.Task]] = {}
    for task in tasks:
      found.setdefault(f'grader/{task.unit}', []).append(task)
      if self._shell_of(task):
        found[f'shell/{task.id}'] = [task]
    return found

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    return await leaks.of_repair(
      self._cfg, self._backend, self._host, self.images(tasks)
    )

  def text(self, task: types.Task) -> str:
    return task.payload['source']


class TextSubject(Subject):
  """`repair_text`: edits quote."""

  def _edit(self, source: str, wanted: str) -> dict[str, str] | None:
    old, new = quoted(source, wanted)
    return {'old': old, 'new': new}

  def _exploiting(self, source: str, text: str) -> dict[str, str] | None:
    at, made = _placed(source, text)
    return self._edit(source, made) if at else None

  def _shell_of(self, task: types.Task) -> bool:
    return False


class _Given(repair.RepairEnv):
  """An environment in which the agent has already written a whole function."""

  def __init__(self, task: types.Task, verifier: repair.Verifier, source: str):
    super().__init__(task, verifier)
    self._pieces = [source]


def quoted(source: str, wanted: str) -> tuple[str, str]:
  """(old, new) whole lines that make one text of the other; old stands there once."""
  bad, good = source.splitlines(keepends=True), wanted.splitlines(keepends=True)
  shorter = min(len(bad), len(good))
  first = next((i for i in range(shorter) if bad[i] != good[i]), shorter)
  last = 0  # lines that are alike at the end
  while last < shorter - first and bad[-1 - last] == good[-1 - last]:
    last += 1
  while True:
    old = ''.join(bad[first : len(bad) - last])
    if old and source.count(old) == 1:
      return old, ''.join(good[first : len(good) - last])
    assert first or last, 'a whole text stands in itself once'
    first, last = max(0, first - 1), max(0, last - 1)


def _placed(source: str, text: str) -> tuple[str, str]:
  """An anchor where an expression can take the place of the rest of its line, and the
  source with it there; ('', '') if there is none."""
  pieces = anchors.split(source)
  for name, index in anchors.names(pieces).items():
    before = ''.join(pieces[:index]).rsplit('\n', 1)[-1].strip()
    if before not in ('', 'return'):
      continue
    made = ''.join([*pieces[:index], f'{text}  #', *pieces[index + 1 :]])
    try:
      ast.parse(made)
    except SyntaxError:
      continue
    return f'«{name}»', made
  return '', ''


def _visible_only(task: types.Task) -> str:
  """The fault, but for the visible inputs, which the gold answers."""
  payload = task.payload
  name = payload['function']

  def inner(source: str, new: str) -> str:
    tree = ast.parse(source)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.name = new
    return ast.unparse(tree)

  known = [repr(ast.literal_eval(case)) for case in payload['visible']]
  return '\n\n'.join(
    (
      inner(payload['original'], 'known_ones'),
      inner(payload['source'], 'all_others'),
      f'def {name}(*given):\n  if repr(given) in {known!r}:\n'
      '    return known_ones(*given)\n  return all_others(*given)',
    )
  )


async def open_subject(cfg: config.Sandbox, tasks: config.Tasks) -> Subject:
  """Starts graders, with time for the many inputs that tell mutants apart."""
  del tasks
  cfg = _patient(cfg)
  host = await repair.open_host(cfg)
  return Subject(cfg, host, sandbox.choose_backend(cfg))


async def open_text(cfg: config.Sandbox, tasks: config.Tasks) -> TextSubject:
  """The same for `repair_text`."""
  del tasks
  cfg = _patient(cfg)
  host = await repair_text.open_host(cfg)
  backend = sandbox.choose_backend(cfg)
  return TextSubject(cfg, host, backend, repair_text.FAMILY)


def _patient(cfg: config.Sandbox) -> config.Sandbox:
  return dataclasses.replace(cfg, cpu_seconds=max(cfg.cpu_seconds, 0.5))
