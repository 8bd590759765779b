"""Chains of manifests that lead a follower to a newer version, the cheapest first.

A chain begins with the version after the one held, or with a full snapshot, and every
other is a delta on the one before it. What a chain costs is the bytes of its data.
"""

from collections.abc import Callable, Iterator, Sequence

from swe17.sync import manifest

# A version's manifest; its full snapshot's. None if it is absent or damaged.
Read = Callable[[int], manifest.Manifest | None]
ReadFull = Callable[[manifest.Manifest], manifest.Manifest | None]


def walk(read: Read, version: int) -> list[manifest.Manifest]:
  """Manifests from `version` on, up to the first that is absent or damaged."""
  chain = []
  while (made := read(version)) is not None:
    chain.append(made)
    version += 1
  return chain


def onward(
  chain: Sequence[manifest.Manifest], read_full: ReadFull
) -> Iterator[list[manifest.Manifest]]:
  """Ways to the end of `chain` for who holds the version before it.

  All of it, or the last full snapshot on it and what follows; that one is read only
  when its turn comes.
  """
  whole = list(chain)
  at = max((i for i, made in enumerate(whole) if made.starts), default=-1)
  if at < 0 or (at == 0 and whole[0].base is None):
    yield whole
    return
  skipped = sum(made.data_bytes for made in whole[: at + 1])
  cheaper = (whole[at].full_bytes or 0) < skipped
  for from_full in (cheaper, not cheaper):
    if not from_full:
      yield whole
    elif (full := read_full(whole[at])) is not None:
      yield [full, *whole[at + 1 :]]


def from_nothing(
  versions: Sequence[int], read: Read, read_full: ReadFull
) -> Iterator[list[manifest.Manifest]]:
  """Ways from each full snapshot among `versions`, ascending, the newest first."""
  for version in reversed(versions):
    made = read(version)
    full = read_full(made) if made is not None and made.starts else None
    if full is not None:
      yield [full, *walk(read, version + 1)]
