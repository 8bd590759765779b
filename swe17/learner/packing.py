"""Segments into rows of a fixed length. Host side."""

from collections.abc import Sequence

from swe17 import config, types
from swe17.learner import prompts
from swe17.learner import state as st

# Rows of segment indices, in the order in which they lie there.
Rows = list[list[int]]


def pack(
  lengths: Sequence[int],
  row_length: int,
  sets: Sequence[prompts.Shared] | None = None,
) -> Rows:
  """Rows of indices: first fit, longest first, ties by index.

  Members of a set follow each other. One goes to a row that has their prefix, if it
  fits one, and else with the prefix to another. A row takes `state.SEGMENTS_A_ROW`
  segments at most, prefixes included.

  Args:
    lengths: of items, prefix included.
    row_length: what a row takes.
    sets: who shares a prefix, every item in one; None: nobody does.

  Raises:
    ValueError: an item is longer than a row.
  """
  for length in lengths:
    if length > row_length:
      raise ValueError(
        f'a segment of {length} tokens does not fit a row of {row_length}; '
        'raise batch.row_length or lower agent.max_context'
      )
  rows: Rows = []
  room: list[int] = []
  places: list[int] = []  # segments that a row may take yet
  sets = prompts.alone(len(lengths)) if sets is None else sets
  ordered = [
    (s.prefix, sorted(s.members, key=lambda i: (-lengths[i], i))) for s in sets
  ]
  for prefix, members in sorted(ordered, key=lambda s: (-lengths[s[1][0]], s[1])):
    here: list[int] = []  # rows that have the prefix
    for i in members:
      tail = lengths[i] - prefix
      fits = (r for r in here if room[r] >= tail and places[r])
      at = next(fits, None)
      if at is None:
        taken = 1 + bool(prefix)
        fits = (
          r for r, free in enumerate(room) if free >= lengths[i] and places[r] >= taken
        )
        at = next(fits, len(rows))
        if at == len(rows):
          rows.append([])
          room.append(row_length)
          places.append(st.SEGMENTS_A_ROW)
        here.append(at)
        room[at] -= prefix
        places[at] -= taken - 1
      rows[at].append(i)
      room[at] -= tail
      places[at] -= 1
  return rows


def bundled(
  lengths: Sequence[int], row_length: int, sets: Sequence[prompts.Shared]
) -> Rows:
  """As `pack`, but each set is first dealt out evenly to as few rows as hold it.

  First fit puts the longest members of a set together and leaves a bit of every row;
  here the longest goes to the emptiest. Rows may hold more segments than `pack`'s.
  """
  units: Rows = []
  loads: list[int] = []
  for s in sets:
    members = sorted(s.members, key=lambda i: (-lengths[i], i))
    tails = sum(lengths[i] - s.prefix for i in members)
    count = max(-(-tails // max(row_length - s.prefix, 1)), 1)
    parts, load = _dealt(members, lengths, s.prefix, count)
    while max(load) > row_length:
      count += 1
      parts, load = _dealt(members, lengths, s.prefix, count)
    units += parts
    loads += load
  return [[i for u in row for i in units[u]] for row in pack(loads, row_length)]


def _dealt(
  members: Sequence[int], lengths: Sequence[int], prefix: int, count: int
) -> tuple[Rows, list[int]]:
  parts: Rows = [[] for _ in range(count)]
  load = [prefix] * count
  for i in members:
    at = load.index(min(load))
    parts[at].append(i)
    load[at] += lengths[i] - prefix
  return parts, load


def held(
  rows: Rows, lengths: Sequence[int], sets: Sequence[prompts.Shared]
) -> list[tuple[int, int]]:
  """(inputs, segments) of every row, each prefix in it once."""
  of = {i: s for s in sets for i in s.members}
  found = []
  for row in rows:
    prefixes = [s.prefix for s in {of[i] for i in row} if s.prefix]
    tails = sum(lengths[i] - of[i].prefix for i in row)
    found.append((tails + sum(prefixes), len(row) + len(prefixes)))
  return found


def layout(
  segments: Sequence[types.Segment],
  cfg: config.Batch,
  routes: tuple[int, int, int] | None = None,
) -> tuple[Rows, list[prompts.Shared]]:
  """Rows, and who shares a prefix in them: what takes the fewest rows.

  Of equally many the fewest inputs. Nobody shares if `cfg.share_prompts` is off.
  ValueError if a segment is longer than a row.
  """
  lengths = [segment.token_T.size - 1 for segment in segments]
  none = prompts.alone(len(segments))
  options = [(pack(lengths, cfg.row_length, none), none)]
  if cfg.share_prompts:
    sets = prompts.shared(segments, cfg.row_length, routes)
    options += [(fn(lengths, cfg.row_length, sets), sets) for fn in (pack, bundled)]

  def cost(option: tuple[Rows, list[prompts.Shared]]) -> tuple[int, int]:
    rows, sets = option
    return len(rows), sum(inputs for inputs, _ in held(rows, lengths, sets))

  fit = [
    (rows, sets)
    for rows, sets in options
    if all(n <= st.SEGMENTS_A_ROW for _, n in held(rows, lengths, sets))
  ]
  return min(fit, key=cost)
