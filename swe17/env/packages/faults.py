"""Faults injected in a package's source: one edit, or several in different functions.

A fault is drawn from a seed and named by its edits, so that a table of them is small;
a tree's hash says whether they still fit. Its diff is for people: the statement of a
task never shows it.
"""

import ast
from collections.abc import Iterator, Sequence
import dataclasses
import difflib
import itertools
import random

from swe17.env.packages import fault_sites, sources

SEVERAL = 'several'
KINDS = (*fault_sites.KINDS, SEVERAL)
_MOST = 3  # edits of one fault
_EVERY = 6  # one fault in so many has several edits


@dataclasses.dataclass(frozen=True)
class Edit:
  """`old` stands at byte `start` of a file; `new` takes its place."""

  path: str
  start: int
  old: str
  new: str


@dataclasses.dataclass(frozen=True)
class Fault:
  """Attributes:
  kind: of `KINDS`.
  edits: in different functions.
  functions: 'path:line' of each function's code, as `suite.Report.touched` names it.
  """

  kind: str
  edits: tuple[Edit, ...]
  functions: tuple[str, ...]

  @property
  def id(self) -> str:
    """Names the fault in its tree."""
    return '+'.join(f'{e.path}:{e.start}-{len(e.old)}:{e.new[:20]}' for e in self.edits)


def singles(tree: sources.Tree) -> list[Fault]:
  """All faults of one edit, in the order of the source. Few of them do not parse."""
  found = []
  for path in sorted(tree.source):
    data = tree.source[path]
    for site in fault_sites.find(data):
      old, new = data[site.start : site.end].decode(), site.new.decode()
      edit = Edit(path, site.start, old, new)
      found.append(Fault(site.kind, (edit,), (f'{path}:{site.line}',)))
  return found


def candidates(
  tree: sources.Tree, seed: int, functions: frozenset[str] | None = None
) -> Iterator[Fault]:
  """Faults in a seeded order, kind after kind, none twice.

  `functions` are those worth changing, as in `Fault.functions`: tests run them.
  """
  rng = random.Random(f'{tree.name}/{seed}')
  left: dict[str, list[Fault]] = {kind: [] for kind in fault_sites.KINDS}
  for fault in singles(tree):
    if functions is None or functions.issuperset(fault.functions):
      left[fault.kind].append(fault)
  for faults in left.values():
    rng.shuffle(faults)
  everything = [fault for faults in left.values() for fault in faults]
  rng.shuffle(everything)
  count = 0
  while any(left.values()):
    for kind in fault_sites.KINDS:
      if not left[kind]:
        continue
      fault = left[kind].pop()
      if parses(tree, fault):
        yield fault
      count += 1
      several = _several(rng, everything) if count % _EVERY == 0 else None
      if several and parses(tree, several):
        yield several


def _several(rng: random.Random, everything: Sequence[Fault]) -> Fault | None:
  """Two or three faults of different functions as one; None if there are too few."""
  wanted = rng.randint(2, _MOST)
  chosen: dict[str, Fault] = {}
  for fault in rng.sample(everything, min(4 * wanted, len(everything))):
    chosen.setdefault(fault.functions[0], fault)
    if len(chosen) == wanted:
      break
  if len(chosen) < 2:
    return None
  edits = tuple(fault.edits[0] for fault in chosen.values())
  ends = sorted((e.path, e.start, e.start + len(e.old.encode())) for e in edits)
  for (path, _, end), (next_path, start, _) in itertools.pairwise(ends):
    if path == next_path and start < end:
      return None  # a function within another
  return Fault(SEVERAL, edits, tuple(chosen))


def parses(tree: sources.Tree, fault: Fault) -> bool:
  """Whether every file that the fault changes still parses."""
  changed = apply(tree, fault)
  try:
    for path in {edit.path for edit in fault.edits}:
      ast.parse(changed.files[path])
  except (SyntaxError, ValueError):
    return False
  return True


def apply(tree: sources.Tree, fault: Fault) -> sources.Tree:
  """The tree with the fault in it. ValueError if it does not fit."""
  files = dict(tree.source)
  for edit in sorted(fault.edits, key=lambda e: -e.start):
    data, old = files.get(edit.path, b''), edit.old.encode()
    end = edit.start + len(old)
    if data[edit.start : end] != old:
      raise ValueError(
        f'{tree.name}: got another text at byte {edit.start} of {edit.path} than the '
        'fault says; the table is of another version'
      )
    files[edit.path] = data[: edit.start] + edit.new.encode() + data[end:]
  return tree.with_source(files)


def diff(before: sources.Tree, after: sources.Tree) -> str:
  """A unified diff of the source of two trees."""
  parts = []
  for path in sorted({*before.source, *after.source}):
    one, two = (
      tree.source.get(path, b'').decode(errors='replace').splitlines(keepends=True)
      for tree in (before, after)
    )
    parts += difflib.unified_diff(one, two, f'a/{path}', f'b/{path}')
  return ''.join(parts)
