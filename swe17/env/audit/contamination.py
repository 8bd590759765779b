"""Duplicates among tasks, and held-out tasks that training has seen.

Two texts are near-copies where they share most of their runs of eight tokens, names of
variables left out (so a renamed copy is one). Equal texts are duplicates within a side;
across the sides, near-copies are contamination, and so is a unit that is on both.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import hashlib
import keyword
import re

from swe17 import types

ALIKE = 0.8  # Jaccard index of the runs from which two texts are near-copies
_RUN = 8  # tokens
_COMMON = 60  # texts that share a run; one in more of them says nothing
_TOKEN = re.compile(r'[A-Za-z_]\w*|\d+|[^\w\s]')


@dataclasses.dataclass(frozen=True)
class Found:
  """What is wrong with a set of tasks."""

  duplicates: dict[str, str]  # id -> the first task with the same text
  contaminated: dict[str, str]  # held-out id -> the training task that it resembles
  units: tuple[str, ...]  # on both sides


def check(tasks: Sequence[types.Task], texts: Mapping[str, str]) -> Found:
  """Looks at tasks with their texts (by id)."""
  first: dict[tuple[str, str], str] = {}
  duplicates: dict[str, str] = {}
  for task in tasks:
    digest = hashlib.sha256(texts[task.id].encode()).hexdigest()
    other = first.setdefault((task.split, digest), task.id)
    if other != task.id:
      duplicates[task.id] = other
  sides: dict[str, set[str]] = defaultdict(set)
  for task in tasks:
    sides[task.unit].add(task.split)
  split = {
    name: {task.id: texts[task.id] for task in tasks if task.split == name}
    for name in ('train', 'heldout')
  }
  both = sorted(unit for unit, names in sides.items() if len(names) > 1)
  return Found(duplicates, near(split['heldout'], split['train']), tuple(both))


def near(texts: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
  """Those of `texts` that are near-copies of one of `others`, and of which."""
  holders: dict[int, list[str]] = defaultdict(list)
  sizes: dict[str, int] = {}
  for name, text in others.items():
    runs = _runs(text)
    sizes[name] = len(runs)
    for run in runs:
      holders[run].append(name)
  found = {}
  for name, text in texts.items():
    runs = _runs(text)
    shared: Counter[str] = Counter()
    for run in runs:
      if len(holders.get(run, ())) <= _COMMON:
        shared.update(holders.get(run, ()))
    for other, count in shared.most_common(5):
      if count / (len(runs) + sizes[other] - count) >= ALIKE:
        found[name] = other
        break
  return found


def prose(text: str) -> str:
  """A text in words as a number for each, since names say nothing here: of code, they
  are what a copy has changed; of prose, nothing but punctuation would be left."""
  words = re.findall(r'\w+', text.lower())
  return ' '.join(
    str(int(hashlib.sha256(w.encode()).hexdigest()[:8], 16)) for w in words
  )


def _runs(text: str) -> frozenset[int]:
  """Hashes of all runs of tokens; of a shorter text, of the whole of it."""
  shapes = list(_shapes(_TOKEN.findall(text)))
  last = max(1, len(shapes) - _RUN + 1)
  return frozenset(hash(tuple(shapes[i : i + _RUN])) for i in range(last))


def _shapes(tokens: Sequence[str]) -> Iterable[str]:
  for token, following in zip(tokens, [*tokens[1:], ''], strict=True):
    named = token.isidentifier() and not keyword.iskeyword(token)
    yield 'name' if named and following != '(' else token
