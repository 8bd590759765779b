"""Cut-down copies of a package: a few of its own functions in files of a few lines.

A model with a context of a few hundred tokens cannot read a package. A cut keeps code
as it is: whole definitions, each copied line by line. What is new is where they stand:
up to 8 files `a.py` to `h.py` of at most 99 lines, methods under a bare head of their
class. A name and a line number are then a token each. Everything else about the
question (index, answer, score) is computed on the cut like on any tree.

A cut holds X, some of its callers, some callers of those, functions that mention one of
these names without calling it, and others that have nothing to do with it.
"""

import random
import re
import types as python_types

from swe17.env.retrieval import questions, symbols, trees

FILES = 'abcdefgh'
MAX_LINES = 99  # of a file
_LONGEST = 40  # lines of a definition
_FIRST, _SECOND = 4, 2  # callers of X, and of each caller, at most
_FEWEST = 2  # callers of X: one search after the other would not do
_OTHERS = 20  # definitions in all, about


def cut(index: symbols.Index, subject: str, seed: int) -> tuple[trees.Tree, str]:
  """(the cut, the subject in it). `questions.NoQuestionError` if none can be made."""
  rng = random.Random(f'{subject}/{seed}')
  path, name = subject.split(':')
  found = index.by_place.get((path, name), [])
  if len(found) != 1 or not index.sure(found[0]):
    raise questions.NoQuestionError('calls of it cannot be told from others')
  (target,) = found
  chosen = {target.leaf: target}
  first = [c for c in index.callers(target) if _usable(c) and index.sure(c)]
  # Those that nobody calls come last: they are there to be looked at in vain.
  rng.shuffle(first)
  first.sort(key=lambda c: not index.callers(c))
  for caller in first[:_FIRST]:
    chosen.setdefault(caller.leaf, caller)
    second = [c for c in index.callers(caller) if _usable(c)]
    for c in rng.sample(second, min(_SECOND, len(second))):
      chosen.setdefault(c.leaf, c)
  if not _usable(target) or len(first) < _FEWEST:
    raise questions.NoQuestionError('too long, or too few callers')
  _add_others(index, chosen, rng)
  files, place = _files(index, list(chosen.values()), rng)
  made = trees.Tree(python_types.MappingProxyType(files))
  if target.leaf not in place:
    raise questions.NoQuestionError('no room for it')
  holder = f'{target.holder}.' if target.kind == 'method' else ''
  return made, f'{place[target.leaf]}:{holder}{target.leaf}'


def renamed(tree: trees.Tree, names: dict[str, str]) -> trees.Tree:
  """The tree with whole words exchanged, for practice in copying what one reads."""
  words = re.compile(r'\b(?:' + '|'.join(map(re.escape, names)) + r')\b')
  return trees.Tree(
    {
      path: words.sub(lambda found: names[found[0]], text)
      for path, text in tree.files.items()
    }
  )


def _usable(d: symbols.Def) -> bool:
  plain = d.kind == 'function' or (d.kind == 'method' and d.name.count('.') == 1)
  return plain and d.last - d.first < _LONGEST


def _add_others(
  index: symbols.Index,
  chosen: dict[str, symbols.Def],
  rng: random.Random,
) -> None:
  """Adds definitions that mention a chosen name first, then any."""
  names = set(chosen)
  pool = [d for d in index.defs if _usable(d) and d.leaf not in chosen]
  rng.shuffle(pool)
  calls = index.by_owner
  quiet = [d for d in pool if not names & {u.name for u in calls.get(d, ())}]
  near = [d for d in quiet if names & index.words[d]]
  for d in [*near[:4], *quiet]:
    if len(chosen) == _OTHERS:
      return
    chosen.setdefault(d.leaf, d)


def _files(
  index: symbols.Index, chosen: list[symbols.Def], rng: random.Random
) -> tuple[dict[str, str], dict[str, str]]:
  """Deals definitions out to files: (text by path, path by name)."""
  rng.shuffle(chosen)
  parts: dict[str, list[str]] = {f'{letter}.py': [] for letter in FILES}
  place: dict[str, str] = {}
  for i, d in enumerate(chosen):
    path = f'{FILES[i % len(FILES)]}.py'
    text = index.text(d).split('\n')
    head = [f'class {d.holder}:'] if d.kind == 'method' else []
    body = [*head, *text, '']
    if len(parts[path]) + len(body) <= MAX_LINES:
      parts[path] += body
      place[d.leaf] = path
  files = {path: '\n'.join(lines[:-1]) for path, lines in parts.items() if lines}
  return files, place
