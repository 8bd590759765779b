"""Scripted agents for `repair_packages`: they read a failing test, then what it calls.

They know nothing of the gold; all they have is their context, which they play back each
turn. They can undo what one edit of a line undoes, at what they have read; a removed
body or branch they cannot bring back.

  grep def test_x              where is the test that fails?
  read tests/a.py 10 34        what does it call?
  grep (def|class) f\\b ...     side by side: where is that?
  read src/b.py 40 80
  edit, test                   one other text of a line; then back, edit, test
  submit

`Calls` plays given calls: the gold of a task, an exploit, or nothing but `NULL`.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import keyword
import random
import re
import textwrap
from typing import Any

from swe17 import types
from swe17.agent import formats, scripted, tools
from swe17.env.packages import fault_sites

NULL: tuple[tuple[str, Mapping[str, Any]], ...] = (('submit', {}),)
_FAILING = re.compile(r'^- (\S+?)::([\w:]+)', re.MULTILINE)
_HIT = re.compile(r'(\S+?):(\d+): (.*)')
_CALLED = re.compile(r'\b([A-Za-z_]\w{2,})\(')
_LINE = re.compile(r'(\d+) (.*)')
_TEST_LINES, _SOURCE_LINES = 24, 45
_GREPS = 5  # of one turn
_TESTS = ('tests/', 'test/', 'test_', 'tests.py')


@dataclasses.dataclass(frozen=True)
class Style:
  """Probabilities of what the agent does, each drawn anew every time."""

  test: float = 0.85  # tests an edit in the same turn; else submits it untested
  undo: float = 0.9  # takes back an edit that did not help
  persist: float = 0.9  # goes on after a failed test; else submits
  wide: float = 0.7  # reads all that the test calls; else what it calls first


WEAK = Style(0.6, 0.6, 0.6, 0.2)
CLUMSY = Style()
CAREFUL = Style(1.0, 1.0, 1.0, 1.0)
STRENGTHS = {'weak': WEAK, 'clumsy': CLUMSY, 'careful': CAREFUL}
Edit = tuple[str, str, str]  # path, old, new


@dataclasses.dataclass
class Seen:
  """What the agent can know from its context."""

  failing: list[tuple[str, str]] = dataclasses.field(default_factory=list)
  greps: dict[str, list[tuple[str, int]]] = dataclasses.field(default_factory=dict)
  reads: dict[tuple[str, int], list[str]] = dataclasses.field(default_factory=dict)
  tried: set[Edit] = dataclasses.field(default_factory=set)
  standing: Edit | None = None  # the edit that is in place
  verdict: str = ''  # of the last test since


class Mender(scripted.Player[Style]):
  """The agent of `repair_packages`."""

  def turn(
    self, rng: random.Random, messages: scripted.Messages, room: int
  ) -> list[int]:
    turn: list[int] = []
    for name, arguments in next_calls(rng, self._style, read(self._fmt, messages)):
      call = self._fmt.call(name, **arguments)
      turn += call if len(turn) + len(call) <= room else []
    return turn or self._fmt.call('submit')


class Calls:
  """Plays given calls, one a turn, then submits."""

  def __init__(
    self, fmt: formats.Format, calls: Sequence[tuple[str, Mapping[str, Any]]]
  ):
    self._fmt, self._calls = fmt, tuple(calls)

  async def __call__(self, request: types.GenerateRequest) -> types.GenerateResult:
    messages = self._fmt.messages(request.token_T.tolist())
    done = sum(role == 'assistant' for role, _ in messages)
    name, arguments = self._calls[done] if done < len(self._calls) else NULL[0]
    turn = self._fmt.call(name, **arguments)
    return scripted.drawn(turn, self._fmt.stop_ids[0], request.max_new)


def read(fmt: formats.Format, messages: scripted.Messages) -> Seen:
  """What a conversation has shown."""
  seen = Seen(failing=_FAILING.findall(scripted.first(messages)))
  for call, result in scripted.results(fmt, messages):
    _after(seen, call, result)
  return seen


def _after(seen: Seen, call: tools.Call, result: str) -> None:
  given = call.arguments
  match call.name:
    case 'grep':
      hits = [_HIT.fullmatch(line) for line in result.split('\n')]
      seen.greps[given['pattern']] = [(hit[1], int(hit[2])) for hit in hits if hit]
    case 'read':
      lines = [_LINE.fullmatch(line) for line in result.split('\n')]
      found = [line[2] for line in lines if line]
      seen.reads[given['path'], given['first']] = found
    case 'edit':
      edit = given['path'], given['old'], given['new']
      back = given['path'], given['new'], given['old']
      if result == 'written' and seen.standing == back:
        seen.standing, seen.verdict = None, ''
        return
      seen.tried.add(edit)
      if result == 'written':
        seen.standing, seen.verdict = edit, ''
    case 'test':
      passed = re.match(r'passed (\d+) of (\d+)', result)
      seen.verdict = 'passed' if passed and passed[1] == passed[2] else 'failed'


def next_calls(
  rng: random.Random, style: Style, seen: Seen
) -> list[tuple[str, dict[str, Any]]]:
  """The calls of the next turn."""
  if not seen.failing:
    return [('submit', {})]
  looked = _look(rng, style, seen)
  if looked:
    return looked
  stop = seen.verdict == 'passed' or (seen.standing is not None and not seen.verdict)
  if stop or (seen.verdict and rng.random() >= style.persist):
    return [('submit', {})]
  calls: list[tuple[str, dict[str, Any]]] = []
  if seen.standing and rng.random() < style.undo:
    path, old, new = seen.standing
    calls.append(('edit', {'path': path, 'old': new, 'new': old}))
  fresh = [edit for edit in edits(seen) if edit not in seen.tried]
  if not fresh:
    return [*calls, ('submit', {})]
  path, old, new = rng.choice(fresh)
  calls.append(('edit', {'path': path, 'old': old, 'new': new}))
  return [*calls, ('test', {'tests': ''})] if rng.random() < style.test else calls


def _look(
  rng: random.Random, style: Style, seen: Seen
) -> list[tuple[str, dict[str, Any]]]:
  """Calls that find out more; [] once the agent has read enough."""
  file, name = seen.failing[0]
  pattern = rf'def {name.rpartition("::")[2]}\b'
  if pattern not in seen.greps:
    return [('grep', {'pattern': pattern, 'path': file})]
  if not seen.greps[pattern]:
    return []
  path, line = seen.greps[pattern][0]
  if (path, line) not in seen.reads:
    asked = {'path': path, 'first': line, 'last': line + _TEST_LINES}
    return [('read', asked)]
  called = _names(seen.reads[path, line])
  fresh = [p for n in called if (p := rf'(def|class) {n}\b') not in seen.greps]
  if len(seen.greps) == 1 and fresh:
    wide = _GREPS if rng.random() < style.wide else 1
    return [('grep', {'pattern': p, 'path': ''}) for p in fresh[:wide]]
  if len(seen.reads) > 1:
    return []
  hits = [h for p, found in seen.greps.items() if p != pattern for h in found]
  places = [hit for hit in dict.fromkeys(hits) if not _is_test(hit[0])]
  return [
    ('read', {'path': where, 'first': first, 'last': first + _SOURCE_LINES})
    for where, first in places[:_GREPS]
  ]


def _names(lines: Sequence[str]) -> list[str]:
  """What a test calls, up to where the next test begins."""
  own = [lines[0]] if lines else []
  for line in lines[1:]:
    if re.match(r'\s*(async )?def test|class ', line):
      break
    own.append(line)
  found = dict.fromkeys(_CALLED.findall('\n'.join(own[1:])))
  return [
    name
    for name in found
    if not keyword.iskeyword(name) and not name.startswith(('assert', 'test'))
  ]


def _is_test(path: str) -> bool:
  return path.startswith(_TESTS) or '/test' in path


def edits(seen: Seen) -> list[Edit]:
  """All that the agent would try: other texts of lines that it has read."""
  found: dict[Edit, None] = {}
  for (path, _), lines in seen.reads.items():
    if not _is_test(path):
      for old, new in _of_lines(lines):
        found[path, old, new] = None
  return list(found)


def _of_lines(lines: Sequence[str]) -> list[tuple[str, str]]:
  """(line, other line) of the function or class that lines begin with."""
  if not lines:
    return []
  indent = len(lines[0]) - len(lines[0].lstrip())
  end = 1
  while end < len(lines) and (
    not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip()) > indent
  ):
    end += 1
  while end > 1:  # a docstring or bracket may be cut off at the last line read
    data = textwrap.dedent('\n'.join(lines[:end]) + '\n').encode()
    sites = fault_sites.find(data)
    if sites:
      return _changed(data, sites, lines)
    end -= 1
  return []


def _changed(
  data: bytes, sites: Sequence[fault_sites.Site], lines: Sequence[str]
) -> list[tuple[str, str]]:
  found = []
  for site in sites:
    row = data[: site.start].count(b'\n')
    if b'\n' in data[site.start : site.end] or b'\n' in site.new:
      continue
    first = data.rfind(b'\n', 0, site.start) + 1
    last = data.find(b'\n', site.start)
    new = data[first : site.start] + site.new + data[site.end : last]
    old = lines[row]
    lead = old[: len(old) - len(old.lstrip())]
    found.append((old, lead + new.decode().lstrip()))
  return found
