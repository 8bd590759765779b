"""Single-token faults in a function, and the edits that undo them.

A fault is exactly one `edit(line, old, new)`: `old` occurs once in that line and is
replaced by `new`. The kinds:

  comparison         < <= > >=, == !=, is / is not, in / not in
  off_by_one         integer n -> n + 1 or n - 1; x <-> x + 1 as index or bound
  operator           + -, * / // %, << >>, & |, and or, and their augmented forms
  wrong_name         a variable for its partner of the same role; find <-> rfind ...
  negated_condition  if c <-> if not c
  wrong_constant     True False, x[0] x[-1], one-character strings that pair up
  dropped_line       a statement -> pass (the only kind that no candidate undoes)

All but the last are closed under inversion: a candidate of the faulty source gives the
original back.
"""

import ast
import dataclasses
import functools

from swe17.env import sites

KINDS = (
  'comparison',
  'off_by_one',
  'operator',
  'wrong_name',
  'negated_condition',
  'wrong_constant',
  'dropped_line',
)


@dataclasses.dataclass(frozen=True)
class Fault:
  line: int  # 1 is the `def` line
  old: str  # occurs exactly once in the line
  new: str
  kind: str


def apply(source: str, line: int, old: str, new: str) -> str:
  """Replaces `old` by `new` in one line (1-based).

  ValueError, with a sentence fit for the agent, if the line does not exist, `old` does
  not occur exactly once in it (overlapping occurrences count), `new` has a newline, or
  nothing would change.
  """
  lines = source.split('\n')
  if not 1 <= line <= len(lines):
    raise ValueError(f'no line {line}, last is {len(lines)}')
  if '\n' in new or '\r' in new:
    raise ValueError('new must be one line')
  if old == new:
    raise ValueError('old and new are equal')
  found = _occurrences(lines[line - 1], old)
  if found != 1:
    raise ValueError(f'old occurs {found} times in line {line}')
  lines[line - 1] = lines[line - 1].replace(old, new)
  return '\n'.join(lines)


@functools.lru_cache(maxsize=4096)
def candidates(source: str) -> tuple[Fault, ...]:
  """All single edits of the closed kinds, in the order of their place in the source.

  `source` is one function that parses; SyntaxError otherwise. No two candidates give
  the same source.
  """
  found = sorted(
    sites.find(source),
    key=lambda s: (s.line, s.start, s.end, KINDS.index(s.kind), s.text),
  )
  tokens = sites.tokens_by_line(source)
  seen, faults = {source}, []
  for site in found:
    fault = _minimal(source, tokens[site.line], site)
    result = apply(source, fault.line, fault.old, fault.new)
    if result not in seen:
      seen.add(result)
      faults.append(fault)
  return tuple(faults)


def dropped_lines(source: str) -> tuple[Fault, ...]:
  """One fault per simple statement: the statement becomes `pass`."""
  lines = source.split('\n')
  faults = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr)):
      old = lines[node.lineno - 1].strip()
      faults.append(Fault(node.lineno, old, 'pass', 'dropped_line'))
  return tuple(sorted(faults, key=lambda f: f.line))


def _occurrences(text: str, part: str) -> int:
  if not part:
    return 0
  return sum(text.startswith(part, i) for i in range(len(text)))


def _minimal(source: str, tokens: list[sites.Token], site: sites.Site) -> Fault:
  """Widens the site token by token until its text is unique in the line."""
  line = source.split('\n')[site.line - 1]
  starts = [t.start for t in tokens if t.start < site.start]
  ends = [t.end for t in tokens if t.end > site.end]
  for total in range(len(starts) + len(ends) + 1):
    for after in range(min(total, len(ends)), -1, -1):
      before = total - after
      if before > len(starts):
        continue
      start = starts[-before] if before else site.start
      end = ends[after - 1] if after else site.end
      old = line[start:end]
      if _occurrences(line, old) == 1:
        new = line[start : site.start] + site.text + line[site.end : end]
        return Fault(site.line, old, new, site.kind)
  raise AssertionError(f'a whole line is unique in itself: {line!r}')
