"""Pages of the KV cache on the host: who holds which, what they hold, who may share.

A page is S positions of every layer. A row (one context) is a list of pages, the last
of them perhaps part full. Full pages never change, so rows share them by reference; of
a page that is part full, or that two contexts leave in the middle, the common part is
copied (copy-on-write, before the write). A page that no row holds stays as it is until
its place is needed, least recently used first.

What is found again is keyed by the ids from the start of the context and by the weight
version that computed all of it. A row that lived through a swap is of no one version:
nobody else finds its pages, but it may go on with them itself.
"""

import collections
from collections.abc import Sequence
import dataclasses
import hashlib

import numpy as np

Key = tuple[int, bytes]  # weight version, digest of all ids up to there
_LOOK = 32  # siblings that are compared for a common beginning, newest first


@dataclasses.dataclass(eq=False)
class Page:
  """A place in the pool."""

  id: int
  token: list[int] = dataclasses.field(default_factory=list)  # ids of its entries
  refs: int = 0  # rows that hold it
  stamp: int = 0  # how often its place was taken anew
  parent: Key | None = None  # what comes before it; None: nobody else finds it
  key: Key | None = None  # of its own end, once it is full


@dataclasses.dataclass(eq=False)
class Row:
  """One context: its pages and how many positions of them it has filled.

  Attributes:
    pages: in order; the last ones may be empty, taken for tokens to come.
    stamps: those of the pages when they were taken.
    size: positions filled.
    version: the weights that computed all of it; None: several did.
    ends: digests of the ids up to the end of each full page.
  """

  pages: list[Page] = dataclasses.field(default_factory=list)
  stamps: list[int] = dataclasses.field(default_factory=list)
  size: int = 0
  version: int | None = None
  ends: list[bytes] = dataclasses.field(default_factory=list)

  @property
  def token(self) -> list[int]:
    """The ids that it holds."""
    held = [i for page in self.pages for i in page.token]
    return held[: self.size]


@dataclasses.dataclass(frozen=True)
class Found:
  """What a new row may take over: whole pages, and the beginning of one more."""

  pages: list[Page]
  part: Page | None = None
  size: int = 0  # positions in all


class Pool:
  """All pages of a sampler. Not for several threads."""

  def __init__(self, pages: int, size: int):
    """`pages` pages of `size` positions each."""
    self.size = size
    self.all = [Page(i) for i in range(pages)]
    # Pages that nobody holds, the next to be taken first. Empty ones come before.
    self._idle = collections.OrderedDict((page.id, page) for page in self.all)
    self._full: dict[Key, Page] = {}
    self._children: dict[Key, dict[int, Page]] = {}
    self._copies: list[tuple[int, int]] = []  # (from, to), not done yet

  @property
  def available(self) -> int:
    """Pages that could be taken now."""
    return len(self._idle)

  @property
  def used(self) -> int:
    """Pages that rows hold."""
    return len(self.all) - len(self._idle)

  def needed(self, positions: int) -> int:
    """Pages for so many positions."""
    return -(-positions // self.size)

  def find(self, token: Sequence[int], version: int) -> Found:
    """The longest beginning of `token` that `version` has computed and that is kept."""
    at, end, pages = 0, b'', []
    while at + self.size <= len(token):
      after = digest(end, token[at : at + self.size])
      page = self._full.get((version, after)) or self._alike(version, end, after)
      if page is None:
        break
      pages.append(page)
      at, end = at + self.size, after
    part, most = None, 0
    rest = token[at : at + self.size]
    for page in self._siblings(version, end):
      common = shared(page.token, rest)
      if common > most:
        part, most = page, common
    return Found(pages, part, at + most)

  def _siblings(self, version: int, end: bytes) -> list[Page]:
    """Pages that go on after `end`, the newest first, not all."""
    return list(self._children.get((version, end), {}).values())[: -_LOOK - 1 : -1]

  def _alike(self, version: int, end: bytes, after: bytes) -> Page | None:
    """A full page that was filled when another one with its ids was there, now gone."""
    wanted = version, after
    return next((p for p in self._siblings(version, end) if p.key == wanted), None)

  def kept(self, row: Row, limit: int) -> Found:
    """What is left of a row's own pages, `limit` positions at most."""
    pages, at = [], 0
    for page, stamp in zip(row.pages, row.stamps, strict=True):
      if page.stamp != stamp or at >= min(row.size, limit):
        break
      pages.append(page)
      at += self.size
    size = min(at, row.size, limit)
    whole = size // self.size
    part = pages[whole] if size % self.size else None
    return Found(pages[:whole], part, size)

  def wants(self, found: Found, positions: int) -> int:
    """Pages that `open` and `reserve` take out of `available` for so many positions."""
    idle = sum(page.refs == 0 for page in found.pages)
    # What is copied from is held while a page for the copy is looked for.
    idle += found.part is not None and not _whole(found) and found.part.refs == 0
    return self.needed(positions) - len(found.pages) + idle

  def open(self, found: Found, version: int | None) -> Row:
    """Begins a row with what was found. `version`: that computed all of it, or None.

    The beginning of a page is copied (see `copies`), unless nobody else holds the page
    and it ends there: then the row goes on in it.
    """
    row = Row(version=version, size=found.size)
    adopted = [found.part] if found.part is not None and _whole(found) else []
    for page in [*found.pages, *adopted]:
      self._hold(page)
      row.pages.append(page)
      row.stamps.append(page.stamp)
      if len(page.token) == self.size:
        row.ends.append(digest(row.ends[-1] if row.ends else b'', page.token))
    if found.part is None or adopted:
      return row
    source = found.part
    self._hold(source)  # for a moment, lest its own place be taken for the copy
    room = self.reserve(row, found.size)
    self._release(source)
    assert room, 'a row was opened without asking whether there is room'
    copy = row.pages[-1]
    waiting = {to: origin for origin, to in self._copies}
    self._copies.append((waiting.get(source.id, source.id), copy.id))
    copy.token = source.token[: found.size % self.size]
    self._index(row, copy)
    return row

  def copies(self) -> list[tuple[int, int]]:
    """(from, to) of the pages to be copied, in order, before anything is written."""
    todo, self._copies = self._copies, []
    return todo

  def reserve(self, row: Row, positions: int) -> bool:
    """Takes pages until the row has so many positions; False, and none, if too few."""
    more = self.needed(positions) - len(row.pages)
    if more > self.available:
      return False
    for _ in range(more):
      page = next(iter(self._idle.values()))
      self._forget(page)
      page.stamp += 1
      self._hold(page)
      row.pages.append(page)
      row.stamps.append(page.stamp)
    return True

  def fill(self, row: Row, token: Sequence[int], version: int) -> None:
    """Notes that entries of these ids were written behind what the row had."""
    if row.size == 0:
      row.version = version
    elif row.version != version:
      row.version = None
    at = 0
    while at < len(token):
      page = row.pages[row.size // self.size]
      part = token[at : at + self.size - len(page.token)]
      assert row.size % self.size == len(page.token), 'a page is filled in order'
      page.token = [*page.token, *part]
      at, row.size = at + len(part), row.size + len(part)
      self._index(row, page)
      if len(page.token) == self.size:
        before = row.ends[-1] if row.ends else b''
        row.ends.append(digest(before, page.token))
        if page.parent is not None:
          page.key = page.parent[0], row.ends[-1]
          self._full.setdefault(page.key, page)

  def close(self, row: Row) -> None:
    """Lets go of a row's pages. What they hold stays for a while."""
    # The end of a context is of less use to others than its beginning.
    for page in reversed(row.pages):
      self._release(page)

  def renew(self) -> None:
    """Nothing computed so far is found any longer: the weights have changed."""
    self._full.clear()
    self._children.clear()
    for page in self.all:
      page.parent = page.key = None

  def _index(self, row: Row, page: Page) -> None:
    """Lets others find a page that is being filled, if one version made its row."""
    if row.version is None:
      self._hide(page)
    elif page.parent is None:
      page.parent = row.version, row.ends[-1] if row.ends else b''
      self._children.setdefault(page.parent, {})[page.id] = page

  def _hide(self, page: Page) -> None:
    if page.parent is not None:
      siblings = self._children.get(page.parent, {})
      siblings.pop(page.id, None)
      if not siblings:
        self._children.pop(page.parent, None)
    if page.key is not None and self._full.get(page.key) is page:
      del self._full[page.key]
    page.parent = page.key = None

  def _forget(self, page: Page) -> None:
    self._hide(page)
    page.token = []

  def _hold(self, page: Page) -> None:
    page.refs += 1
    self._idle.pop(page.id, None)

  def _release(self, page: Page) -> None:
    assert page.refs > 0, f'page {page.id} is held by nobody'
    page.refs -= 1
    if page.refs == 0:
      self._idle[page.id] = page
      if not page.token:
        self._idle.move_to_end(page.id, last=False)


def _whole(found: Found) -> bool:
  """Whether a row may go on in the page that it has found a part of."""
  part, pages = found.part, found.pages
  if part is None or part.refs:
    return False
  held = sum(len(page.token) for page in pages)
  return found.size - held == len(part.token)


def digest(before: bytes, token: Sequence[int]) -> bytes:
  """Of all ids up to the end of these, from that of the ids before them."""
  data = np.asarray(token, np.int32).tobytes()
  return hashlib.blake2b(before + data, digest_size=16).digest()


def shared(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
  """How many ids two sequences begin with in common."""
  n = min(len(a), len(b))
  if n == 0:
    return 0
  differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
  return int(differ[0]) if differ.size else n
