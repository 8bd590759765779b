"""Scores an answer of files and line ranges: the mean of two F_beta, beta .5.

  P = |answer & truth| / |answer|,  R = |answer & truth| / |truth|
  F = 1.25 P R / (.25 P + R)                          (empty against empty is 1)

once over files, once over (file, line) pairs (SWE-grep, Cognition). Precision counts
more than recall. Ranges are counted as intervals, as unions: naming a line twice gains
nothing, and a range of a billion lines costs its length in precision and no memory.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import re

BETA = 0.5
MAX_RANGES, MAX_CHARACTERS = 64, 4000
Ranges = tuple[tuple[int, int], ...]  # (first, last), sorted, apart from each other
_ENTRY = re.compile(r'([^:\s,;]+):(\d{1,9})(?:-(\d{1,9}))?')
_BETWEEN = re.compile(r'[\s,;]*')


@dataclasses.dataclass(frozen=True)
class Score:
  """Both parts and their mean."""

  files: float
  lines: float

  @property
  def value(self) -> float:
    return (self.files + self.lines) / 2


def parse(text: str) -> dict[str, Ranges]:
  """'a/b.py:3-9, c.py:7' as ranges by path; '' is the empty answer.

  ValueError says what is wrong with the text, in one short line.
  """
  if len(text) > MAX_CHARACTERS:
    raise ValueError(f'got {len(text)} characters, want at most {MAX_CHARACTERS}')
  found: dict[str, list[tuple[int, int]]] = {}
  at, count = _skip(text, 0), 0
  while at < len(text):
    entry = _ENTRY.match(text, at)
    if entry is None:
      raise ValueError(f'got {text[at : at + 20]!r}, want path:first-last')
    path, first = entry[1], int(entry[2])
    last = int(entry[3]) if entry[3] else first
    if not 1 <= first <= last:
      raise ValueError(f'got lines {first}-{last}, want 1 <= first <= last')
    count += 1
    if count > MAX_RANGES:
      raise ValueError(f'got over {MAX_RANGES} ranges')
    found.setdefault(path.removeprefix('./'), []).append((first, last))
    at = _skip(text, entry.end())
    if at == entry.end() < len(text):
      raise ValueError(f'got {text[at : at + 20]!r} after a range')
  return {path: union(ranges) for path, ranges in found.items()}


def _skip(text: str, at: int) -> int:
  space = _BETWEEN.match(text, at)
  return space.end() if space else at


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
  """Sorted ranges that neither overlap nor touch."""
  out: list[tuple[int, int]] = []
  for first, last in sorted(ranges):
    if out and first <= out[-1][1] + 1:
      out[-1] = (out[-1][0], max(last, out[-1][1]))
    else:
      out.append((first, last))
  return tuple(out)


def f_beta(right: int, given: int, wanted: int) -> float:
  """F_beta from counts."""
  if given == 0 or wanted == 0:
    return float(given == wanted)
  precision, recall, square = right / given, right / wanted, BETA * BETA
  if right == 0:
    return 0.0
  return (1 + square) * precision * recall / (square * precision + recall)


def score(answer: Mapping[str, Ranges], truth: Mapping[str, Ranges]) -> Score:
  """Both F_beta of an answer. The ranges of a path are as `union` makes them."""
  files = f_beta(len(answer.keys() & truth.keys()), len(answer), len(truth))
  right = sum(_common(answer[path], truth[path]) for path in answer.keys() & truth)
  return Score(files, f_beta(right, _size(answer), _size(truth)))


def _size(answer: Mapping[str, Ranges]) -> int:
  return sum(last - first + 1 for ranges in answer.values() for first, last in ranges)


def _common(a: Ranges, b: Ranges) -> int:
  """Lines that are in both."""
  total = i = j = 0
  while i < len(a) and j < len(b):
    total += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]) + 1)
    if a[i][1] < b[j][1]:
      i += 1
    else:
      j += 1
  return total


def text(answer: Mapping[str, Ranges]) -> str:
  """An answer as `parse` reads it."""
  return ', '.join(
    f'{path}:{first}-{last}' for path in sorted(answer) for first, last in answer[path]
  )
