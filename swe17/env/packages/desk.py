"""What an agent has before it: a package's files in memory, to be read and edited.

Only source may change. Whatever is asked, the answer is text; nothing here touches a
disk, so no path leads out.
"""

from collections.abc import Mapping
import difflib
from typing import Any

from swe17.env.packages import sources
from swe17.env.retrieval import search, trees

MAX_FILE = 400_000  # bytes of a source file
MAX_FILES = 200  # that an agent may add
_NOT_SOURCE = 'is not source: tests, settings and data stay as they are'


class Desk:
  """The files of one episode."""

  def __init__(
    self, clean: sources.Tree, source: Mapping[str, bytes], rest: Mapping[str, bytes]
  ):
    self._tree = clean
    self.source = dict(source)
    self._rest = rest
    self._shelf: search.Shelf | None = None

  def look(self, name: str, arguments: Mapping[str, Any]) -> str:
    """One of list, grep and read."""
    if self._shelf is None:
      self._shelf = shelf({**self._rest, **self.source})
    return search.look(self._shelf, name, arguments)

  def edit(self, path: str, old: str, new: str) -> str:
    """Replaces a text that occurs once."""
    if path not in self.source:
      known = path in self._rest
      return f'{path[:80]!r} {_NOT_SOURCE}' if known else f'no such file: {path[:80]!r}'
    text, ends = _text(self.source[path])
    found = text.count(old) if old else 0
    if found != 1:
      return f'old occurs {found} times in {path}, want once'
    return self._write(path, text.replace(old, new), ends)

  def create(self, path: str, text: str) -> str:
    """Writes a source file."""
    if not self._tree.is_source(path):
      return f'{path[:80]!r} {_NOT_SOURCE}'
    if (
      path not in self.source and len(self.source) >= len(self._tree.source) + MAX_FILES
    ):
      return 'too many files'
    ends = _text(self.source[path])[1] if path in self.source else '\n'
    return self._write(path, text, ends)

  def _write(self, path: str, text: str, ends: str) -> str:
    try:
      data = text.replace('\n', ends).encode()
    except UnicodeEncodeError:
      return 'not a text in UTF-8'
    if len(data) > MAX_FILE:
      return f'{path} would be over {MAX_FILE} bytes'
    if self.source.get(path) == data:
      return 'nothing changed'
    self.source[path] = data
    self._shelf = None
    return 'written'


def shelf(files: Mapping[str, bytes]) -> search.Shelf:
  """Files for the tools that search."""
  texts, binary = {}, set()
  for path, data in files.items():
    try:
      if len(data) > trees.MAX_FILE or b'\0' in data:
        raise ValueError
      texts[path] = _text(data)[0].removesuffix('\n')
    except ValueError:
      binary.add(path)
  return search.Shelf(trees.Tree(texts, frozenset(binary)))


def _text(data: bytes) -> tuple[str, str]:
  """(text with plain line ends, its own line ends). UnicodeDecodeError."""
  ends = '\r\n' if b'\r\n' in data else '\n'
  return data.decode().replace('\r\n', '\n'), ends


def gold(source: Mapping[str, bytes], clean: Mapping[str, bytes]) -> list[list[Any]]:
  """Calls that turn one source into another: [tool, arguments] each."""
  calls: list[list[Any]] = []
  for path in sorted(clean):
    if source.get(path) == clean[path]:
      continue
    after = _text(clean[path])[0]
    before = _text(source[path])[0] if path in source else None
    edits = None if before is None else _edits(path, before, after)
    if edits is None:
      calls.append(['create', {'path': path, 'text': after}])
    else:
      calls += edits
  return calls


def _edits(path: str, before: str, after: str) -> list[list[Any]] | None:
  """Edits of whole lines, each with as many lines around as make it unique."""
  one, two = before.splitlines(keepends=True), after.splitlines(keepends=True)
  blocks = difflib.SequenceMatcher(None, one, two, autojunk=False).get_opcodes()
  calls: list[list[Any]] = []
  text = before
  for tag, i, j, k, m in reversed(blocks):
    if tag == 'equal':
      continue
    for around in range(0, 40):
      first, last = max(0, i - around), min(len(one), j + around)
      old = ''.join(one[first:last])
      # Behind the block the text is that of `after` already; it was edited backwards.
      new = ''.join(one[first:i]) + ''.join(two[k:m]) + ''.join(one[j:last])
      if old and text.count(old) == 1:
        break
    else:
      return None
    calls.append(['edit', {'path': path, 'old': old, 'new': new}])
    text = text.replace(old, new)
  return calls if text == after else None
