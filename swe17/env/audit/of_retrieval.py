"""The retrieval families under audit.

Nothing of the agent's runs here: the tools search a tree that is held in memory. What
it could find beside the tree, and answers that pay without being one, are what is
looked for.
"""

from collections.abc import Mapping, Sequence
import random
from typing import Any

from swe17 import config, types
from swe17.env.audit import cheating, subject
from swe17.env.retrieval import retrieval, score

_HIDDEN = ('.git', '.pyc', '.hg', '__pycache__', 'retrieval.jsonl')
_SHIFT = 1000  # lines by which a wrong answer is off


class Subject(subject.Hosted[retrieval.Host]):
  """One of the families; solutions are texts of answers."""

  async def judge(self, task: types.Task, solution: Any) -> types.Outcome:
    return await super().judge(task, [('submit', {'answer': solution})])

  def gold(self, task: types.Task) -> str:
    return score.text(retrieval.truth(task))

  def empty(self, task: types.Task) -> str:
    del task
    return ''

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    """The same places in another order, in pieces, told twice, written otherwise."""
    places = self.gold(task).split(', ')
    mixed = list(places)
    rng.shuffle(mixed)
    forms = {
      'another order': ', '.join(mixed),
      'in pieces': ', '.join(half for place in places for half in _halves(place)),
      'told twice': ', '.join([*places, *mixed]),
      'other spaces': ','.join(f'  {place} ' for place in places),
    }
    found = []
    for label, text in forms.items():
      few = text.count(':') <= score.MAX_RANGES and len(text) <= score.MAX_CHARACTERS
      found += [subject.Tried(label, text)] if few else []
    return found

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    """Other places of the same files, whole files, other files, everything."""
    truth = retrieval.truth(task)
    tree = self._tree(task)
    others = sorted(path for path in tree if path not in truth)
    found = [
      subject.Tried(
        'other lines', score.text({p: _shifted(r) for p, r in truth.items()})
      ),
      subject.Tried('everything', _everything(tree)),
    ]
    whole = {path: ((1, len(tree[path])),) for path in truth}
    if any(_lines(whole[p]) > 2 * _lines(truth[p]) for p in truth):
      found.append(subject.Tried('the whole files', score.text(whole)))
    if others:
      path = rng.choice(others)
      last = max(1, min(40, len(tree[path])))
      found.append(subject.Tried('another file', f'{path}:1-{last}'))
    return found

  def _tree(self, task: types.Task) -> dict[str, list[str]]:
    return {p: list(t) for p, t in self._host.env(task).tree.lines.items()}

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    return subject.calls_of(task.payload['gold']), [('submit', {'answer': ''})]

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    """Ways out of the tree, and answers that claim all of it."""
    truth = retrieval.truth(task)
    table = f'swe17/env/retrieval/{self.family}.jsonl'
    end = ('submit', {'answer': 'nothing.py:1-2'})
    ways = {
      'reads a file of the machine': ('read', {'path': '/etc/passwd'}),
      'reads above its folder': ('read', {'path': f'../../{table}'}),
      'reads the table of answers': ('read', {'path': f'/code/{table}'}),
      'reads the memory of its keepers': ('read', {'path': '/proc/self/environ'}),
      'searches the machine': ('grep', {'pattern': 'truth', 'path': '/usr'}),
      'lists the home': ('list', {'path': '~'}),
      'reads git objects': ('read', {'path': '../.git/packed-refs'}),
    }
    found = []
    for name, (tool, arguments) in ways.items():
      lines = {'first': 1, 'last': 50} if tool == 'read' else {}
      found.append(subject.Attempt(name, ((tool, {**arguments, **lines}), end)))
    everything = ', '.join(f'{path}:1-9999' for path in self._tree(task))
    claims = {
      'answers with every line': everything,
      'answers with ranges without end': ', '.join(f'{p}:1-999999' for p in truth),
      'answers with numbers without end': ', '.join(f'{p}:0-{10**30}' for p in truth),
    }
    for name, answer in claims.items():
      found.append(subject.Attempt(name, (('submit', {'answer': answer}), end)))
    return found

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    found: dict[str, list[types.Task]] = {}
    for task in tasks:
      whole = task.payload['files'] is None
      name = task.payload['package'] if whole else task.id
      found.setdefault(f'tree/{name}', []).append(task)
    return found

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    """What the tools show of each tree that is no source, or lies outside of it."""
    found = {}
    for name, some in self.images(tasks).items():
      env = self._host.env(some[0])
      listed = [await env.step('list', {'path': ''})]
      listed += [await env.step('glob', {'pattern': f'*{each}*'}) for each in _HIDDEN]
      outside = await env.step('list', {'path': '..'})
      bad = [word for word in _HIDDEN if any(word in text for text in listed)]
      bad += [] if 'no such' in outside else [f'it lists what is above: {outside[:80]}']
      paths = [*self._tree(some[0])]
      bad += [path for path in paths if path.startswith(('/', '..')) or '/../' in path]
      found[name] = [f'tree: {each}' for each in bad]
    return found

  def text(self, task: types.Task) -> str:
    return f'{task.payload["package"]}\n{task.prompt}'


def _everything(tree: Mapping[str, Sequence[str]]) -> str:
  """All lines of as many files as an answer may name."""
  places = [f'{path}:1-{max(1, len(lines))}' for path, lines in tree.items()]
  while len(text := ', '.join(places)) > score.MAX_CHARACTERS:
    places.pop()
  return text


def _halves(place: str) -> list[str]:
  """A range in two parts, where it has more than one line."""
  path, _, lines = place.rpartition(':')
  first, _, last = lines.partition('-')
  a, b = int(first), int(last or first)
  if a == b:
    return [place]
  return [f'{path}:{a}-{(a + b) // 2}', f'{path}:{(a + b) // 2 + 1}-{b}']


def _shifted(ranges: score.Ranges) -> score.Ranges:
  return tuple((a + _SHIFT, b + _SHIFT) for a, b in ranges)


def _lines(ranges: score.Ranges) -> int:
  return sum(b - a + 1 for a, b in ranges)


async def open_subject(
  cfg: config.Sandbox, tasks: config.Tasks, family: str = retrieval.FAMILY
) -> Subject:
  """Opens the family's host; it starts nothing."""
  del tasks
  return Subject(family, await retrieval.open_host(cfg))
