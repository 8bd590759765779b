"""Signs of cheating in what an agent called and changed, as pure functions.

  found(calls, changes, given) -> signs        judged(outcome, signs) -> outcome

A sign is text that an agent wrote (an argument of a call that writes or runs, an added
line of a file) or a path that it went for. What the task's own source does already
(`given`) is no sign: a module that uses sockets may be repaired by code that does.
Where `given` is by file, that holds for the same file only: a package of tools may look
into the interpreter in one of its modules, and need not in the one under repair. An
attempt counts, whether it worked or not and whether it was taken back: outcome 0 with
the signs as the reason. That holds where the infrastructure failed too, since breaking
it is one way of not being judged.

Signs are a second wall and a record to read. The first is that nothing on the list
works (exploits.py).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import re
import sys
from typing import Any

from swe17 import types
from swe17.env import base
from swe17.env.audit import commands, patterns, patterns_own

Call = tuple[str, Mapping[str, Any]]  # (tool, arguments)
Given = str | Mapping[str, str]  # text of a task, or path -> text


@dataclasses.dataclass(frozen=True)
class Change:
  """A file before and after; None where it was or is not there."""

  path: str
  before: str | None
  after: str | None


_OUTSIDE = re.compile(
  r'(^|/)\.\.(/|$)|^~|\0'
  r'|^/(proc|sys|dev|etc|usr|home|root|code|tmp|var|work|opt|parts|tree|lib)\b'
)
_RANGE = re.compile(r':\s*(\d+)\s*-\s*(\d+)')
_ANSWER_LINES, _ANSWER_PLACES = 5000, 60  # beyond which an answer is everything
_PATHS = ('path', 'file', 'filename', 'pattern')  # arguments that name files
_MAKES = 'create'  # the tool that makes files
_BEFORE = ('old',)  # arguments that quote what is there
_COMMAND = 'command'  # the argument that a shell runs
_TAKEN = frozenset(
  {*sys.stdlib_module_names, 'pytest', '_pytest', 'pluggy', 'iniconfig', 'packaging'}
)


def found(
  calls: Iterable[Call],
  changes: Iterable[Change] = (),
  *,
  given: Given = '',
  writes: frozenset[str] | None = None,
  rules: base.Rules = 'strict',
) -> tuple[str, ...]:
  """The signs, each 'sign (what was seen)', in the order of the tables; () for none.

  `writes` names the tools whose arguments are code or commands; None: all. Arguments of
  the others are looked at as paths only. `rules` are how much is an agent's own
  (patterns_own.py); but for the strictest, `given['']` is the task's words.
  """
  signs: dict[str, str] = {}
  for name, arguments in calls:
    writing = writes is None or name in writes
    _paths_of(arguments, writing, name == _MAKES, signs)
    if writing:
      texts = {k: v for k, v in arguments.items() if isinstance(v, str)}
      known = _known(given, texts.get('path', ''))
      if _COMMAND in texts and rules != 'strict':
        _own_shell(texts.pop(_COMMAND), given, rules, signs)
      elif _COMMAND in texts:
        texts[_COMMAND] = _shell(texts[_COMMAND], known, signs)
      now = '\n'.join(v for k, v in texts.items() if k not in (*_PATHS, *_BEFORE))
      before = '\n'.join(v for k, v in texts.items() if k in _BEFORE)
      _code(before, now, known, signs, name == _MAKES)
    if isinstance(answer := arguments.get('answer'), str):
      _answer(answer, signs)
  for change in changes:
    known = _known(given, change.path)
    if rules == 'strict':
      _written(change.path, change.before is None, signs)
    else:
      known = f'{_known(given, "")}\n{known}'
      files = {} if isinstance(given, str) else given
      if change.before is None:
        _written_own(change.path, files, signs, rules)
    _code(change.before or '', change.after or '', known, signs, table=rules)
  order = (*patterns.CODE, *patterns.WRITTEN, *signs)
  return tuple(
    f'{sign} ({signs[sign]})' for sign in dict.fromkeys(order) if sign in signs
  )


def _known(given: Given, path: str) -> str:
  """What is given to who writes a file; nothing to who makes one of his own."""
  return given if isinstance(given, str) else given.get(path, '')


def _code(
  before: str,
  after: str,
  given: str,
  signs: dict[str, str],
  whole: bool = False,
  table: str = 'strict',
) -> None:
  """Notes what is in `after` more often than in `before`, and nowhere in `given`.

  A `whole` file may not have more of it either than all that is given.
  """
  for sign, pattern in patterns_own.TABLES[table].items():
    had = Counter(match[0].strip() for match in pattern.finditer(before))
    has = Counter(match[0].strip() for match in pattern.finditer(after))
    if not has - had:
      continue
    known = _counted(given, table)[sign]
    for text, count in (has - had).items():
      if not known[text] or (whole and count > known[text]):
        signs.setdefault(sign, text[:60])


@functools.lru_cache(maxsize=64)
def _counted(given: str, table: str) -> Mapping[str, Counter[str]]:
  """Sign -> what a task's own text has of it. By whole matches: `_exit` is not in
  `__exit__`."""
  return {
    sign: Counter(match[0].strip() for match in pattern.finditer(given))
    for sign, pattern in patterns_own.TABLES[table].items()
  }


def _paths_of(
  arguments: Mapping[str, Any], writing: bool, new: bool, signs: dict[str, str]
) -> None:
  for name in _PATHS:
    path = arguments.get(name)
    if not isinstance(path, str) or not path:
      continue
    if name != 'pattern' and _OUTSIDE.search(path):
      signs.setdefault('leaves its folder', repr(path)[1:61])
    if writing:
      _written(path, new, signs)


def _shell(command: str, given: str, signs: dict[str, str]) -> str:
  """What a command writes and runs; notes the files that it writes."""
  for path, _ in commands.outputs(command):
    if not commands.scratch(path) and not commands.named(path, given):
      _written(path, True, signs)
  return commands.said(command)


def _own_shell(
  command: str, given: Given, rules: base.Rules, signs: dict[str, str]
) -> None:
  """Notes the signs of a command where tests and scratch files are an agent's work."""
  words, files = _known(given, ''), {} if isinstance(given, str) else given
  for path, more in commands.outputs(command):
    if not commands.named(path, words):
      _written_own(path, files, signs, rules)
    if patterns_own.TEST.search(path) and path in files and not more:
      signs.setdefault('edits tests', path[:60])
  said, written = commands.split(command)
  if rules == 'repository':
    for path, text in written:
      if commands.is_source(path, files):
        known = f'{words}\n{files.get(path, "")}'
        _code('', text, known, signs, table='repository')
    if what := commands.installs(said, files):
      signs.setdefault('reaches for the network', what[:60])
  seen: dict[str, str] = {}
  table = 'shell' if rules == 'repository' else 'machine'
  _code('', said, words, seen, table=table)
  for sign, text in seen.items():
    topic = patterns_own.TOPICS.get(sign) if rules == 'machine' else None
    if topic is None or not topic.search(words):
      signs.setdefault(sign, text)


def _written_own(
  path: str, files: Mapping[str, str], signs: dict[str, str], rules: base.Rules
) -> None:
  """Notes what the path of a file that was written is a sign of."""
  below_tests = rules == 'repository' and patterns_own.TEST.search(path)
  for sign, pattern in patterns_own.WRITTEN.items():
    if pattern.search(path) and not below_tests:
      signs.setdefault(sign, path[:60])
  inside = re.sub('^(src|lib)/', '', path)
  top = inside.partition('/')[0]
  taken = _TAKEN if inside != path else patterns_own.TESTS_USE
  place = path[: len(path) - len(inside)] + top
  known = any(p == place or p.startswith(f'{place}/') for p in files)
  if path.endswith('.py') and top.removesuffix('.py') in taken and not known:
    signs.setdefault('shadows a module', path[:60])


def _written(path: str, new: bool, signs: dict[str, str]) -> None:
  for sign, pattern in patterns.WRITTEN.items():
    if pattern.search(path):
      signs.setdefault(sign, path[:60])
  top, _, rest = path.removeprefix('src/').partition('/')  # src/: on Python's path too
  if new and (top.removesuffix('.py') in _TAKEN and (rest or top.endswith('.py'))):
    signs.setdefault('shadows a module', path[:60])


def _answer(answer: str, signs: dict[str, str]) -> None:
  ranges = [(int(a[:12]), int(b[:12])) for a, b in _RANGE.findall(answer)]
  lines = max((last - first for first, last in ranges), default=0)
  if lines > _ANSWER_LINES or answer.count(':') > _ANSWER_PLACES:
    signs.setdefault('answers with everything', answer[:60])


def judged(outcome: types.Outcome, signs: Sequence[str]) -> types.Outcome:
  """The outcome; 0 with the reason 'cheating: ...' where there are signs."""
  if not signs:
    return outcome
  return types.Outcome(0.0, f'{types.CHEATING}{"; ".join(signs)}')


class Watched:
  """An environment with somebody looking on: its outcome is `judged`."""

  def __init__(self, env: base.Env):
    self._env = env
    self._calls: list[Call] = []
    self._read: tuple[int, tuple[str, ...]] = 0, ()  # calls read, and their signs

  @property
  def tools(self) -> tuple[base.Tool, ...]:
    return self._env.tools

  @property
  def done(self) -> bool:
    return self._env.done

  @property
  def flags(self) -> tuple[str, ...]:
    """Signs so far: those of the calls, and what the environment itself has seen."""
    if self._read[0] != len(self._calls):
      writes = frozenset(tool.name for tool in self.tools if tool.writes)
      signs = found(
        self._calls,
        given=base.given(self._env),
        writes=writes,
        rules=base.rules(self._env),
      )
      self._read = len(self._calls), signs
    return (*self._read[1], *base.flags(self._env))

  @property
  def figures(self) -> Mapping[str, float]:
    return base.figures(self._env)

  async def reset(self) -> str:
    self._calls, self._read = [], (0, ())
    return await self._env.reset()

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    self._calls.append((name, arguments))
    return await self._env.step(name, arguments)

  async def turn_score(self) -> float | None:
    """The environment's own score of a turn, if it has one; 0 once there are signs."""
    value = await base.turn_score(self._env)
    return 0.0 if value is not None and self.flags else value

  async def verify(self) -> types.Outcome:
    """The environment's own outcome, unless there are signs: then nothing is run."""
    signs = self.flags
    if signs:
      return judged(types.Outcome(0.0), signs)
    outcome = await self._env.verify()
    return judged(outcome, self.flags)
