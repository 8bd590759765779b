"""Builds the tables of the retrieval families: every question that is worth asking.

A question is rejected if the index is not sure of its answer, if one grep answers it
(the best that any single grep for a name in the question could score, however its hits
are turned into ranges), if naming every line pays, if another question has the same
answer, or if a held-out answer occurs in a training package. Held out are packages.
"""

import collections
from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import random
import re

from swe17.env import splits
from swe17.env.retrieval import questions, retrieval, score, search, symbols, trees

ONE_GREP = 0.45  # a question that one grep scores more on is rejected
EVERYTHING = 0.4  # the same for an answer of every line
_CUTS = 3  # cuts of one subject
_PER_KIND = {retrieval.FAMILY: 16, retrieval.SMALL: 100}
_COPIED = 4  # lines from which a definition counts as copied
_AROUND = (5, 10)  # lines before and after a hit
_WORD = re.compile(r'\w+')
Answer = dict[str, score.Ranges]


@dataclasses.dataclass
class Report:
  """What was built and why the rest was not."""

  tasks: dict[str, dict[str, int]]  # split -> kind -> tasks
  packages: dict[str, int]  # split -> packages
  rejected: dict[str, int]  # reason -> questions
  one_grep_mean: float  # best single grep, over the tasks
  one_grep_plain: float  # the first name, hits as they are
  everything_mean: float  # every line of the tree
  shuffled_mean: float  # as many definitions, all of them wrong


def build(
  family: str, *, per_kind: int, heldout: float, seed: int
) -> tuple[list[retrieval.Row], Report]:
  """All rows of a family, at most `per_kind` of a kind from one package (0: usual)."""
  per_kind = per_kind or _PER_KIND[family]
  names = sorted(trees.PINS)
  split = splits.assign([[name] for name in names], heldout, seed)
  made = _Build(family, per_kind, seed)
  for name in sorted(names, key=lambda n: split[n] == 'heldout'):
    made.package(name, split[name])
  random.Random(seed).shuffle(made.rows)  # the first n of a split are of all packages
  return made.rows, made.report()


class _Build:
  """What has been accepted so far."""

  def __init__(self, family: str, per_kind: int, seed: int):
    self._family, self._per_kind, self._seed = family, per_kind, seed
    self.rows: list[retrieval.Row] = []
    self._rejected: collections.Counter[str] = collections.Counter()
    self._answers: set[str] = set()
    self._trained: set[str] = set()  # definitions of training packages, by hash
    self._probes: list[tuple[float, float, float, float]] = []

  def package(self, name: str, split: str) -> None:
    """Adds the questions about one package."""
    shelf = retrieval.shelf(name)
    if split == 'train':
      texts = (_text(shelf.tree, d.path, d.first, d.last) for d in shelf.index.defs)
      self._trained |= {_hash(text) for text in texts if text.count('\n') >= _COPIED}
    kinds = ('second',) if self._family == retrieval.SMALL else questions.KINDS
    for kind in kinds:
      count = 0
      for subject, cut in self._candidates(shelf.index, name, kind):
        if count == self._per_kind:
          self._rejected['enough of its kind from its package'] += 1
          continue
        reason = self._one(name, split, kind, subject, cut, count)
        count += not reason
        if reason:
          self._rejected[reason] += 1

  def _candidates(
    self, index: symbols.Index, name: str, kind: str
  ) -> Iterator[tuple[str, int]]:
    found = questions.subjects(index, kind)
    random.Random(f'{self._seed}/{name}/{kind}').shuffle(found)
    cuts = range(_CUTS) if self._family == retrieval.SMALL else (0,)
    return ((subject, cut) for cut in cuts for subject in found)

  def _one(
    self, name: str, split: str, kind: str, subject: str, cut: int, count: int
  ) -> str:
    """Adds one question, or says why not."""
    try:
      asked = retrieval.ask(self._family, name, kind, subject, cut)
    except questions.NoQuestionError as e:
      return str(e)
    answer = _hash(f'{asked.shelf.tree.sha} {kind} {asked.question.truth}')
    if answer in self._answers:
      return 'the answer of another question'
    best, plain = one_grep(asked)
    everything = scored(asked, every_line(asked))
    if best > ONE_GREP:
      return 'one grep answers it'
    if everything > EVERYTHING:
      return 'naming every line pays'
    if split == 'heldout' and self._copied(asked):
      return 'its answer occurs in a training package'
    task_id = f'{name}/{kind}/{count}'
    task = retrieval.task_of(self._family, task_id, split, name, asked)
    reason = retrieval.unsound(task)
    if reason:
      return reason
    self._answers.add(answer)
    self._probes.append((best, plain, everything, scored(asked, shuffled(asked))))
    sha = retrieval.sha(asked)
    row = (task_id, name, kind, subject, cut, split, round(best, 3), sha)
    self.rows.append(retrieval.Row(*row))
    return ''

  def _copied(self, asked: retrieval.Asked) -> bool:
    return any(
      _hash(_text(asked.shelf.tree, path, first, last)) in self._trained
      for path, ranges in asked.question.truth.items()
      for first, last in ranges
    )

  def report(self) -> Report:
    tasks: dict[str, dict[str, int]] = {'train': {}, 'heldout': {}}
    packages: dict[str, set[str]] = {'train': set(), 'heldout': set()}
    for row in self.rows:
      tasks[row.split][row.kind] = tasks[row.split].get(row.kind, 0) + 1
      packages[row.split].add(row.package)
    means = [sum(p) / max(len(p), 1) for p in zip(*self._probes, strict=True)]
    return Report(
      tasks,
      {split: len(found) for split, found in packages.items()},
      dict(self._rejected.most_common()),
      *(round(mean, 3) for mean in means or [0.0] * 4),
    )


def _text(tree: trees.Tree, path: str, first: int, last: int) -> str:
  return '\n'.join(line.strip() for line in tree.lines[path][first - 1 : last])


def _hash(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def scored(asked: retrieval.Asked, answer: Mapping[str, score.Ranges]) -> float:
  return score.score(answer, asked.question.truth).value


def one_grep(asked: retrieval.Asked) -> tuple[float, float]:
  """(best, plain) score of one grep for a name that the question gives away.

  Best is over names and over what its hits are made into: lines, lines with those
  around them, definitions around them, whole files. Plain is the first name's hits as
  grep prints them.
  """
  best, plain = 0.0, None
  tree, limits = asked.shelf.tree, asked.shelf.limits
  for name in asked.question.names:
    hits = {
      path: found[name] for path, found in words(asked.shelf).items() if name in found
    }
    lines = {p: score.union((n, n) for n in ns) for p, ns in hits.items()}
    before, after = _AROUND
    near = {
      p: score.union((max(1, n - before), n + after) for n in ns)
      for p, ns in hits.items()
    }
    files: Answer = {p: ((1, len(tree.lines[p])),) for p in hits}
    around = {p: _definitions(asked.shelf, p, ns, '') for p, ns in hits.items()}
    callers = {p: _definitions(asked.shelf, p, ns, name) for p, ns in hits.items()}
    answers = [lines, near, files]
    if limits.enclosing:  # grep says which definitions its hits are in
      answers += [around, {p: ranges for p, ranges in callers.items() if ranges}]
    best = max(best, *(scored(asked, answer) for answer in answers))
    if plain is None:
      plain = scored(asked, around if limits.enclosing else lines)
  return best, plain or 0.0


_WORDS: dict[str, dict[str, dict[str, list[int]]]] = {}


def words(shelf: search.Shelf) -> dict[str, dict[str, list[int]]]:
  """Path -> word -> lines that it is in."""
  key = shelf.tree.sha
  if key not in _WORDS:
    _WORDS.clear()  # questions come package by package
    _WORDS[key] = {path: _words(lines) for path, lines in shelf.tree.lines.items()}
  return _WORDS[key]


def _words(lines: tuple[str, ...]) -> dict[str, list[int]]:
  found: dict[str, list[int]] = {}
  for number, line in enumerate(lines, 1):
    for word in set(_WORD.findall(line)):
      found.setdefault(word, []).append(number)
  return found


def _definitions(
  shelf: search.Shelf, path: str, numbers: list[int], but: str
) -> score.Ranges:
  """The innermost definitions around lines, less the one called `but`."""
  found = []
  for number in numbers:
    around = [d for d in shelf.outlines.get(path, ()) if d.first <= number <= d.last]
    inner = max(around, key=lambda d: d.first, default=None)
    if inner is not None and inner.leaf != but:
      found.append((inner.first, inner.last))
  return score.union(found)


def every_line(asked: retrieval.Asked) -> Answer:
  """The answer that leaves nothing out."""
  return {path: ((1, len(lines)),) for path, lines in asked.shelf.tree.lines.items()}


def shuffled(asked: retrieval.Asked) -> Answer:
  """As many definitions as the answer has ranges, none of them right. Seeded."""
  truth = asked.question.truth
  wrong = [
    d
    for d in asked.shelf.index.defs
    if d.kind != 'class'
    and not any(a <= d.last and d.first <= b for a, b in truth.get(d.path, ()))
  ]
  count = sum(map(len, truth.values()))
  drawn = random.Random(asked.question.subject).sample(wrong, min(count, len(wrong)))
  spans: dict[str, list[tuple[int, int]]] = {}
  for d in drawn:
    spans.setdefault(d.path, []).append((d.first, d.last))
  return {path: score.union(found) for path, found in spans.items()}
