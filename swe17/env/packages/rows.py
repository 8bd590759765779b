"""The table of repair_packages: rows, their file, and what a row means.

A row names package, fault and tests; trees come from source distributions. Its hash
covers the tree that grades, so that a row which would mean something else is noticed.
"""

import ast
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import json
import pathlib
from typing import Any

from swe17.env.packages import faults, sources

RELEASE = 'release'
KINDS = (*faults.KINDS, RELEASE)


@dataclasses.dataclass(frozen=True)
class Row:
  """One task.

  Attributes:
    id: 'package/kind/hash of the fault'.
    edits: of an injected fault; () of a release pair.
    fail_to_pass: ids of tests that fail with the fault and pass without.
    pass_to_pass: ids of tests that pass with and without it.
    shown: id -> message, of failing tests that the statement tells of.
    sha: of the tree that grades.
    release: of a release pair, {'old': {...}, 'new': {...}}, each the fields of a
      `sources.Source`: the old one's source is repaired, the new one's tests decide.
  """

  id: str
  package: str
  version: str
  kind: str
  split: str
  seed: int
  sha: str
  fail_to_pass: tuple[str, ...]
  pass_to_pass: tuple[str, ...]
  shown: Mapping[str, str]
  edits: tuple[faults.Edit, ...] = ()
  release: Mapping[str, Any] | None = None

  @property
  def tests(self) -> tuple[str, ...]:
    """All that must pass."""
    return (*self.fail_to_pass, *self.pass_to_pass)


@dataclasses.dataclass(frozen=True)
class Problem:
  """A row with its trees.

  Attributes:
    clean: what grades, with the source that is the gold.
    source: what an agent begins with.
    rest: tests and data as the agent sees them, without the hidden tests.
  """

  row: Row
  clean: sources.Tree
  source: Mapping[str, bytes]
  rest: Mapping[str, bytes]

  def given(self, source: Mapping[str, bytes]) -> sources.Tree:
    """The tree that grades an agent's source."""
    return self.clean.with_source(source)


def to_json(row: Row) -> dict[str, Any]:
  """A row as a line of the table: tests by file, edits as lists."""
  return {
    **dataclasses.asdict(row),
    'fail_to_pass': _by_file(row.fail_to_pass),
    'pass_to_pass': _by_file(row.pass_to_pass),
    'edits': [list(dataclasses.astuple(edit)) for edit in row.edits],
  }


def from_json(line: Mapping[str, Any]) -> Row:
  """A row of its line. TypeError, KeyError or ValueError if it is none."""
  values: dict[str, Any] = {
    **line,
    'fail_to_pass': tuple(_ids(line['fail_to_pass'])),
    'pass_to_pass': tuple(_ids(line['pass_to_pass'])),
    'edits': tuple(faults.Edit(*edit) for edit in line['edits']),
  }
  return Row(**values)


def _by_file(ids: Iterable[str]) -> dict[str, list[str]]:
  found: dict[str, list[str]] = {}
  for test in ids:
    file, _, name = test.partition('::')
    found.setdefault(file, []).append(name)
  return found


def _ids(by_file: Mapping[str, Sequence[str]]) -> list[str]:
  return [f'{file}::{name}' for file, names in by_file.items() for name in names]


def read(path: pathlib.Path) -> list[Row]:
  """All rows of a table file. ValueError names the line that is not a row."""
  if not path.is_file():
    raise ValueError(f'tasks.table: no file {str(path)!r}')
  rows = []
  for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1):
    try:
      rows.append(from_json(json.loads(line)))
    except (ValueError, TypeError, KeyError, AttributeError) as e:
      raise ValueError(f'{path}, line {number}: not a row of the table: {e!r}') from e
  return rows


def write(path: pathlib.Path, rows: Iterable[Row]) -> None:
  """Writes a table file."""
  lines = [json.dumps(to_json(row), ensure_ascii=False) + '\n' for row in rows]
  path.write_text(''.join(lines), encoding='utf-8')


def problem(row: Row, cache: str = '') -> Problem:
  """What a row means. `sources.SourceError` or ValueError if that is not to be had."""
  clean, old = _trees(row, cache)
  if clean.sha != row.sha:
    raise ValueError(f'another {row.package} than when the table was built')
  hidden = {base(test) for test in row.fail_to_pass} - {
    base(test) for test in row.shown
  }
  # A release pair's agent sees the old tests: those that fail are new ones.
  rest = old.rest if row.release else without(clean.rest, hidden)
  return Problem(row, clean, old.source, rest)


def _trees(row: Row, cache: str) -> tuple[sources.Tree, sources.Tree]:
  """(the tree that grades, the tree with the fault)."""
  if row.release:
    new, old = (_release(row.package, row.release[k], cache) for k in ('new', 'old'))
    return new, old
  clean = sources.fetch(row.package, cache)
  return clean, faults.apply(clean, faults.Fault(row.kind, row.edits, ()))


def _release(name: str, fields: Mapping[str, Any], cache: str) -> sources.Tree:
  values: dict[str, Any] = {
    k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
  }
  return _release_tree(name, sources.Source(**values), cache)


@functools.lru_cache(maxsize=64)
def _release_tree(name: str, source: sources.Source, cache: str) -> sources.Tree:
  return sources.tree(name, source, cache)


def base(test: str) -> str:
  """A test's id without its parameters: its function."""
  return test.partition('[')[0]


def without(rest: Mapping[str, bytes], hidden: Iterable[str]) -> dict[str, bytes]:
  """Tests less the functions of `hidden`, ids without parameters.

  A test that is not written as a function of its file stays: it was made by code.
  """
  by_file: dict[str, set[str]] = {}
  for test in hidden:
    file, _, name = test.partition('::')
    by_file.setdefault(file, set()).add(name.replace('::', '.'))
  return {
    p: _cut(data, by_file[p]) if p in by_file else data for p, data in rest.items()
  }


def _cut(data: bytes, names: set[str]) -> bytes:
  """A module without some functions, by dotted name."""
  lines = data.splitlines(keepends=True)
  try:
    tree = ast.parse(data)
  except (SyntaxError, ValueError):
    return data
  for node, name, alone in reversed(list(_functions(tree, ''))):
    if name in names and node.end_lineno is not None:
      first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
      kept = [b' ' * node.col_offset + b'pass\n'] if alone else []
      lines[first : node.end_lineno] = kept
  return b''.join(lines)


def _functions(
  parent: ast.Module | ast.ClassDef, prefix: str
) -> Iterable[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str, bool]]:
  """(node, dotted name, whether it must leave a `pass`) of functions, in order."""
  for node in parent.body:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      yield node, prefix + node.name, isinstance(parent, ast.ClassDef)
    elif isinstance(node, ast.ClassDef):
      yield from _functions(node, f'{prefix}{node.name}.')
