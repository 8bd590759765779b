"""The tools of the retrieval family: grep, glob, read and list over a tree in memory.

Nothing here touches a disk, a shell or a process: a path is a key of the tree or it is
nothing, so that neither '..' nor a link leads anywhere. Every answer is bounded in
lines and characters. A pattern must be one that `re` accepts; it runs in the `regex`
module, which gives up after a time limit and lets go of the interpreter's lock while it
matches, so that a hostile one slows down nobody else.

Functions return the text of the answer; what is wrong with a call is an answer too.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import fnmatch
import functools
import posixpath
import re
import time
from typing import Any

import regex

from swe17.env import base
from swe17.env.retrieval import symbols, trees

MAX_PATTERN = 200  # characters
_LONGEST = 1000  # characters of a line that are searched
_BEFORE = 4  # characters before a hit that are shown with `enclosing`: 'def '
_BRACE = re.compile(r'(?<!\\)\{(?![0-9,])')  # regex would read an option of its own

GREP = base.Tool(
  'grep',
  "Search lines for a regular expression, in a file, a folder, or '' for all.",
  {'pattern': 'str', 'path': 'str'},
  writes=False,
)
GLOB = base.Tool(
  'glob',
  'List paths that match a pattern; * crosses folders.',
  {'pattern': 'str'},
  writes=False,
)
READ = base.Tool(
  'read',
  'Show lines of a file, from first to last.',
  {'path': 'str', 'first': 'int', 'last': 'int'},
  writes=False,
)
LIST = base.Tool(
  'list',
  'List a folder; of a Python file its definitions with their lines.',
  {'path': 'str'},
  writes=False,
)

Hit = tuple[str, int, int, int]  # (path, line, first column, column after the last)


@dataclasses.dataclass(frozen=True)
class Limits:
  """How much a tool says, and how grep says it."""

  hits: int = 40  # lines of an answer of grep
  lines: int = 120  # of one read
  entries: int = 100  # of list and glob
  text: int = 100  # characters of a hit's line; with `enclosing`, after the hit
  characters: int = 6000  # of any answer
  seconds: float = 0.5  # that one pattern may run
  # One line for each definition with hits in it: 'path:first-last name: text around
  # one in the last line that has any'. For models with short contexts; `git grep -p`
  # shows the function too.
  enclosing: bool = False


WHOLE = Limits()
SMALL = Limits(
  hits=8, lines=20, entries=12, text=2, characters=600, seconds=0.2, enclosing=True
)


@dataclasses.dataclass(frozen=True)
class Shelf:
  """A tree with the index of its definitions, made when first asked."""

  tree: trees.Tree
  limits: Limits = WHOLE

  @functools.cached_property
  def index(self) -> symbols.Index:
    return symbols.index(self.tree)

  @functools.cached_property
  def outlines(self) -> Mapping[str, list[symbols.Def]]:
    """Definitions of every file, in order of their lines."""
    found: dict[str, list[symbols.Def]] = {}
    for d in self.index.defs:
      found.setdefault(d.path, []).append(d)
    return {path: sorted(defs, key=lambda d: d.first) for path, defs in found.items()}


def look(shelf: Shelf, name: str, arguments: Mapping[str, Any]) -> str:
  """One well-formed call of a tool above. ValueError on another name."""
  match name:
    case 'grep':
      return grep(shelf, arguments['pattern'], arguments['path'])
    case 'glob':
      return glob(shelf, arguments['pattern'])
    case 'read':
      return read(shelf, arguments['path'], arguments['first'], arguments['last'])
    case 'list':
      return list_(shelf, arguments['path'])
  raise ValueError(f'tool: got {name!r}, want grep, glob, read or list')


def grep(shelf: Shelf, pattern: str, path: str) -> str:
  """Lines that a regular expression matches, in one file, a folder, or ('') all."""
  inside = _inside(shelf.tree, path)
  if inside is None:
    return f'no such path: {path[:80]!r}'
  try:
    found = _compiled(pattern)
  except (re.error, regex.error, OverflowError, RecursionError, ValueError) as e:
    return f'bad pattern: {str(e)[:80]}'
  limit = time.monotonic() + shelf.limits.seconds
  hits: list[Hit] = []
  try:
    for name in inside:
      for number, line in enumerate(shelf.tree.lines[name], 1):
        left = max(limit - time.monotonic(), 1e-3)
        match = found.search(line[:_LONGEST], timeout=left, concurrent=True)
        if match:
          hits.append((name, number, match.start(), match.end()))
      if time.monotonic() > limit:
        return f'timed out after {shelf.limits.seconds:g} s: search less, or for less'
  except TimeoutError:
    return f'timed out after {shelf.limits.seconds:g} s: want a simpler pattern'
  if not hits:
    return 'nothing found'
  said = (
    _by_definition(shelf, hits) if shelf.limits.enclosing else _by_line(shelf, hits)
  )
  return _bounded(list(said), shelf.limits.hits, shelf.limits)


def glob(shelf: Shelf, pattern: str) -> str:
  """Paths that match; '*' stands for any characters, '/' included."""
  if len(pattern) > MAX_PATTERN:
    return f'bad pattern: over {MAX_PATTERN} characters'
  paths = sorted((*shelf.tree.files, *shelf.tree.binary))
  found = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
  return _bounded(found, shelf.limits.entries, shelf.limits) or 'nothing found'


def read(shelf: Shelf, path: str, first: int, last: int) -> str:
  """Numbered lines of a file, `first` to `last`, no more than `limits.lines`."""
  name = _normal(path)
  if name in shelf.tree.binary:
    return 'a binary or very large file'
  if name not in shelf.tree.files:
    return f'no such file: {path[:80]!r}'
  lines = shelf.tree.lines[name]
  if not 1 <= first <= last:
    return f'got lines {first}-{last}, want 1 <= first <= last'
  if first > len(lines):
    return f'it has {len(lines)} lines'
  stop = min(last, len(lines))
  shown = [f'{n} {lines[n - 1][:_LONGEST]}' for n in range(first, stop + 1)]
  return _bounded(shown, shelf.limits.lines, shelf.limits)


def list_(shelf: Shelf, path: str) -> str:
  """Names in a folder; of a Python file its definitions with their lines."""
  name = _normal(path)
  if name in shelf.tree.folders:
    names = list(shelf.tree.folders[name])
    return _bounded(names, shelf.limits.entries, shelf.limits)
  if name in shelf.tree.binary:
    return 'a binary or very large file'
  if name not in shelf.tree.files:
    return f'no such path: {path[:80]!r}'
  outline = [f'{d.first}-{d.last} {d.name}' for d in shelf.outlines.get(name, ())]
  if not outline:
    return f'{len(shelf.tree.lines[name])} lines, no definitions'
  return _bounded(outline, shelf.limits.entries, shelf.limits)


def _normal(path: str) -> str:
  """A path as a key of the tree; what leads out of it is no key."""
  path = posixpath.normpath(path.strip()) if path.strip() else ''
  return '' if path == '.' else path


def _inside(tree: trees.Tree, path: str) -> list[str] | None:
  """Text files at or below a path; None if there is no such path."""
  name = _normal(path)
  if name in tree.files:
    return [name]
  if name not in tree.folders and name not in tree.binary:
    return None
  start = f'{name}/' if name else ''
  return sorted(file for file in tree.files if file.startswith(start))


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> 'regex.Pattern[str]':
  """ValueError or an error of `re` says why a pattern is refused."""
  if not 1 <= len(pattern) <= MAX_PATTERN:
    raise ValueError(f'got {len(pattern)} characters, want 1 to {MAX_PATTERN}')
  pattern = _BRACE.sub(r'\\{', pattern)
  re.compile(pattern)
  return regex.compile(pattern)


def _by_line(shelf: Shelf, hits: list[Hit]) -> Iterator[str]:
  for path, number, _, _ in hits:
    line = shelf.tree.lines[path][number - 1].strip()
    yield f'{path}:{number}: {line[: shelf.limits.text]}'


def _by_definition(shelf: Shelf, hits: list[Hit]) -> Iterator[str]:
  """One line a definition, in the order of the tree, with its last hit."""
  last: dict[tuple[str, int, int, str], str] = {}
  for path, number, start, end in hits:
    around = [d for d in shelf.outlines.get(path, ()) if d.first <= number <= d.last]
    inner = max(around, key=lambda d: d.first, default=None)
    key = (path, number, number, '')
    if inner is not None:
      key = (path, inner.first, inner.last, inner.leaf)
    line = shelf.tree.lines[path][number - 1]
    text = line[max(0, start - _BEFORE) : end + shelf.limits.text]
    last[key] = ' '.join(text.split())
  for (path, first, stop, name), text in last.items():
    yield f'{path}:{first}-{stop} {name}: {text}'


def _bounded(lines: list[str], most: int, limits: Limits) -> str:
  """The first lines that may be said, and how many were left out."""
  shown, size = 0, 0
  for line in lines[:most]:
    size += len(line) + 1
    if size > limits.characters and shown:
      break
    shown += 1
  said = [line[: limits.characters] for line in lines[:shown]]
  if shown < len(lines):
    said.append(f'... {len(lines) - shown} more')
  return '\n'.join(said)
