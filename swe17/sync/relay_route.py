"""Verified weights from the first of several sources that has them.

A route is a list of sources, the nearest first: parent, grandparent, …, controller, and
last, if that is allowed, the store. Whatever a source says is checked before anybody
sees it: a manifest must parse and be the one that was asked for, data must have the
size and, block by block, the sha256 that its manifest names.

A source that fails (silence, an error, damaged bytes) is left out for a while, which
doubles with each failure, and comes back when it answers a probe. "There is none" is
believed from the controller and from the store; from another node only as long as
nobody has told of that version.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import logging
import time
from typing import TypeVar

from swe17.store import kv
from swe17.sync import manifest, relay_source

_log = logging.getLogger(__name__)
_T = TypeVar('_T')
_K = TypeVar('_K')
_SHORTEST, _LONGEST = 0.5, 60.0  # seconds a failed source is left out
_KEPT = 32  # manifests' contents


@dataclasses.dataclass(frozen=True)
class Contents:
  """What one manifest says of the bytes in the store."""

  version: int
  full: bool  # followers can begin here
  sizes: Mapping[str, int]  # key -> bytes
  blocks: Mapping[str, Sequence[tuple[int, int, str]]]  # key -> (start, stop, sha256)
  beside: str = ''  # key of the manifest of a full snapshot, which is among `sizes`


def contents(data: bytes, version: int) -> Contents:
  """Reads a manifest. ValueError if it is damaged or another version's."""
  made = manifest.parse(data)
  if made.version != version:
    raise ValueError(f'manifest {version}: says it is version {made.version}')
  spans: dict[str, set[tuple[int, int, str]]] = {e.key: set() for e in made.objects}
  for row in made.tensors:
    for block in row.blocks:
      if block.coding != 'same':
        key = made.objects[block.object].key
        spans[key].add((block.start, block.stop, block.sha256))
  sizes = {entry.key: entry.size for entry in made.objects}
  if made.full is not None:
    sizes[made.full.key] = made.full.size
    spans[made.full.key] = {(0, made.full.size, made.full.sha256)}
  blocks = {key: sorted(rows) for key, rows in spans.items()}
  beside = made.full.key if made.full else ''
  return Contents(version, made.starts, sizes, blocks, beside)


def check(held: Contents, span: relay_source.Span, data: bytes) -> None:
  """ValueError unless `data` is what the manifest says of `span`.

  A whole object must be covered by its blocks to the last byte. Of a part, blocks that
  it cuts cannot be checked here; who reads parts checks what it uses.
  """
  if len(data) != span.stop - span.start:
    raise ValueError(f'{span.key}: got {len(data)} bytes of {span.stop - span.start}')
  whole, at = span.stop - span.start == span.size, span.start
  for start, stop, sha256 in held.blocks[span.key]:
    if start < span.start or stop > span.stop:
      continue
    if whole and start > at:
      raise ValueError(f'{span.key}: no block names bytes {at}:{start}')
    part = memoryview(data)[start - span.start : stop - span.start]
    if hashlib.sha256(part).hexdigest() != sha256:
      raise ValueError(f'{span.key}: bytes {start}:{stop} do not match their sha256')
    at = max(at, stop)
  if whole and at < span.stop:
    raise ValueError(f'{span.key}: no block names bytes {at}:{span.stop}')


@dataclasses.dataclass
class _Health:
  """How a source does."""

  well: bool = True
  damaged: bool = False  # what it sent did not verify: only sound data is a recovery
  failures: int = 0
  until: float = 0.0  # left out until then, and until a probe is answered
  probe: asyncio.Task[None] | None = None


class Route:
  """Sources in the order in which they are asked. One event loop only.

  newest: the highest version that somebody told of. faults: failures by source.
  """

  def __init__(self, sources: Sequence[relay_source.Source]):
    self.newest = -1
    self.faults: dict[str, int] = {}
    self._sources = list(sources)
    self._health = {source.name: _Health() for source in sources}
    self._contents: dict[int, Contents] = {}
    self._fulls: dict[str, Contents] = {}  # by the key of their manifest

  async def manifest(
    self, version: int, wait: float, tick: relay_source.Tick = lambda: None
  ) -> bytes | None:
    """A verified manifest, or None if there is none. StoreError: nobody answers."""
    key = manifest.key_of(version)

    async def ask(source: relay_source.Source) -> bytes | None:
      data = await source.manifest(version, wait, tick)
      if data is not None:
        await self.learn(version, data)
      return data

    return await self._first(key, ask, lambda: version <= self.newest)

  def knows(self, version: int) -> bool:
    """Whether `contents` has an answer at hand."""
    return version in self._contents

  async def learn(self, version: int, data: bytes) -> None:
    """Takes in a manifest. ValueError if it is damaged or another version's."""
    held = await asyncio.to_thread(contents, data, version)
    self.newest = max(self.newest, version)
    _keep(self._contents, version, held)

  async def contents(self, version: int) -> Contents | None:
    """What a version's manifest says, read if it is not known. StoreError."""
    if version not in self._contents and await self.manifest(version, 0.0) is None:
      return None
    return self._contents.get(version)

  async def data(
    self,
    key: str,
    start: int | None = None,
    stop: int | None = None,
    tick: relay_source.Tick = lambda: None,
  ) -> bytes | None:
    """Verified bytes [start, stop) of an object, cut like a slice, or None.

    None too for an object that no manifest names. StoreError: nobody answers.
    """
    held = await self._holding(key)
    if held is None:
      return None
    size = held.sizes[key]
    span = relay_source.Span(key, size, *slice(start, stop).indices(size)[:2])
    if span.stop <= span.start:
      return b''

    async def ask(source: relay_source.Source) -> bytes | None:
      data = await source.data(span, tick)
      if data is not None:
        await asyncio.to_thread(check, held, span, data)
        if key == held.beside and len(data) == size:
          full = await asyncio.to_thread(contents, data, held.version)
          _keep(self._fulls, key, full)
      return data

    return await self._first(key, ask, lambda: True)

  async def _holding(self, key: str) -> Contents | None:
    """What names `key`: its version's manifest, or that of the full snapshot beside."""
    version = relay_source.object_version(key)
    held = None if version is None else await self.contents(version)
    if held is None or key in held.sizes:
      return held
    if held.beside and held.beside not in self._fulls:
      await self.data(held.beside)
    full = self._fulls.get(held.beside)
    return full if full is not None and key in full.sizes else None

  async def versions(self) -> list[int]:
    """The versions that the controller, or failing it the store, knows of.

    Not the tree: a node that lags behind cannot hide a version from those below it.
    StoreError: nobody answers.
    """

    async def ask(source: relay_source.Source) -> list[int]:
      return await source.versions()

    found = await self._first('', ask, lambda: False, final=True) or []
    self.newest = max([self.newest, *found[-1:]])
    return found

  async def close(self) -> None:
    for health in self._health.values():
      if health.probe is not None:
        health.probe.cancel()
    for source in self._sources:
      await source.close()

  async def _first(
    self,
    key: str,
    ask: Callable[[relay_source.Source], Awaitable[_T | None]],
    exists: Callable[[], bool],
    final: bool = False,
  ) -> _T | None:
    """The first sound answer. `exists`: there must be one, so None is no answer."""
    said, damaged = [], False
    for source in self._order(final):
      # Damaged on the way, or where it lies? Nobody stands behind the last: ask again.
      for _ in range(2 if source.final else 1):
        try:
          found = await ask(source)
        except relay_source.Behind as e:
          said.append(str(e))
          break
        except relay_source.Unwell as e:
          said.append(str(e))
          self._failed(source, str(e))
          break
        except ValueError as e:
          said.append(str(e))
          damaged = damaged or source.final
          self._failed(source, f'damaged: {e}', damaged=True)
          continue
        self._succeeded(source, found)
        if found is not None or source.final or not exists():
          return found
        said.append(f'{source.name} has no {key}')
        break
    if damaged:
      # Published damaged: for whoever asks it is as good as not there.
      _log.warning('%s does not verify, wherever it is read: %s', key, said[-1])
      return None
    raise kv.StoreError('relay', key, '; '.join(said) or 'there is nobody to ask')

  def _order(self, final: bool) -> list[relay_source.Source]:
    """Sources that are well, in their order, then the others: better than nobody."""
    sources = [s for s in self._sources if s.final or not final]
    well = [source for source in sources if self._well(source)]
    return well + [source for source in sources if source not in well]

  def _well(self, source: relay_source.Source) -> bool:
    health = self._health[source.name]
    if health.well:
      return True
    if health.probe is None and time.monotonic() >= health.until:
      health.probe = asyncio.create_task(self._probe(source))
    return False

  async def _probe(self, source: relay_source.Source) -> None:
    """Asks in the background, so that nobody waits for a source that may be dead."""
    health = self._health[source.name]
    try:
      with contextlib.suppress(relay_source.Unwell):
        await source.probe()
        health.well = True
        _log.info('%s answers again', source.name)
        return
      self._left_out(health)
    finally:
      health.probe = None

  def _succeeded(self, source: relay_source.Source, found: object) -> None:
    health = self._health[source.name]
    health.well = True
    # A node with a bad disk still lists versions well: that does not clear its name.
    if not health.damaged or isinstance(found, bytes):
      health.damaged, health.failures = False, 0

  def _failed(
    self, source: relay_source.Source, text: str, *, damaged: bool = False
  ) -> None:
    self.faults[source.name] = self.faults.get(source.name, 0) + 1
    health = self._health[source.name]
    health.damaged = health.damaged or damaged
    self._left_out(health)
    _log.warning('%s is left out for a while: %s', source.name, text)

  def _left_out(self, health: _Health) -> None:
    health.well = False
    health.failures += 1
    pause = min(_SHORTEST * 2 ** min(health.failures - 1, 10), _LONGEST)
    health.until = time.monotonic() + pause


def _keep(known: dict[_K, Contents], key: _K, held: Contents) -> None:
  """Remembers `held`, and forgets what was remembered longest ago."""
  known.pop(key, None)
  known[key] = held
  while len(known) > _KEPT:
    del known[next(iter(known))]


@functools.cache
def ancestors(index: int, fanout: int) -> tuple[int, ...]:
  """Parent, grandparent, …, 0 of node `index` in a tree of `fanout` children each."""
  found = []
  while index > 0:
    index = (index - 1) // fanout
    found.append(index)
  return tuple(found)
