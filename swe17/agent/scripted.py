"""A scripted agent that stands where a sampler does: context in, the next turn out.

It knows nothing of the gold. It reads the code from `view`'s result and tries other
texts at its anchors, those of `alternatives`; where the code stands in the first
message (repair_text) it quotes what it replaces instead. A `Style` says how well: the
default is clumsy at exactly what reinforcement learning can teach a small model (test
before submitting, undo what did not help, go on); `CAREFUL` is not.

  <think>look</think> view
  <think>comparison</think> edit test      or, untested: edit, then submit
  <think>operator</think> undo edit test   after 'failed 2 of 6'
  <think>done</think> submit             after 'passed 6 of 6'
"""

import abc
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import random
import re
from typing import Generic, TypeVar

import numpy as np

from swe17 import types
from swe17.agent import formats, tools
from swe17.env import sites
from swe17.env.repair import anchors

# What a thought calls each kind of fault.
SUSPECT = {
  'comparison': 'comparison',
  'off_by_one': 'offset',
  'operator': 'operator',
  'negated_condition': 'negation',
  'wrong_constant': 'constant',
}
_WORDS = {
  'if': [('if not ', 'negated_condition')],
  'elif': [('elif not ', 'negated_condition')],
  'while': [('while not ', 'negated_condition')],
  'not': [('', 'negated_condition')],
  'and': [(' or ', 'operator')],
  'or': [(' and ', 'operator')],
  'in': [(' not in ', 'comparison')],
  'not in': [(' in ', 'comparison')],
  'is': [(' is not ', 'comparison')],
  'is not': [(' is ', 'comparison')],
  'True': [('False', 'wrong_constant')],
  'False': [('True', 'wrong_constant')],
}

Messages = Sequence[tuple[str, str]]  # (role, text)
Manner = TypeVar('Manner')  # an agent's style
_WORD = re.compile(r'\w+|\s+|[^\w\s]')
# The first message of repair_text.
_SHOWN = re.compile(r'```python\n(def .*?)\n?```', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Style:
  """Probabilities of what the agent does, each drawn anew every time."""

  think: float = 0.95  # says which kind of fault it suspects
  test: float = 0.85  # tests an edit in the same turn; else submits it untested
  undo: float = 0.9  # undoes an edit that failed its test before the next one
  persist: float = 0.7  # tries again after a failed test; else submits
  retry_same: float = 0.0  # may draw an edit it has tried before
  practice: int = 0  # instead: so many edits a turn, each undone, never a test


WEAK = Style(think=0.95, test=0.4, undo=0.5, persist=0.3, retry_same=0.3)
CLUMSY = Style()
PRACTICE = Style(practice=2, persist=0.9)
CAREFUL = Style(think=1.0, test=1.0, undo=1.0, persist=1.0, retry_same=0.0)
STRENGTHS = {'weak': WEAK, 'clumsy': CLUMSY, 'careful': CAREFUL}


@dataclasses.dataclass(frozen=True)
class _Seen:
  """What the agent can know from its context."""

  source: str = ''  # as first seen, '' before that
  text: bool = False  # edits name what stands there, not an anchor
  tried: frozenset[tuple[str, str]] = frozenset()  # (anchor or text, new text)
  edited: bool = False  # the last edit is in place
  verdict: str = ''  # the last test's first word, '' if none since the last edit


class Player(abc.ABC, Generic[Manner]):
  """Usable as an episode's `generate`. Log-probs are 0 and no kept sets are given, so
  the request's sampling must be `types.Sampling()` (no filter).

  A draw depends on the seed drawn from `rng`, the request's key and its position only,
  so episodes may run side by side in any order.
  """

  def __init__(self, fmt: formats.Format, rng: random.Random, style: Manner):
    self._fmt = fmt
    self._seed = rng.getrandbits(64)
    self._style = style

  async def __call__(self, request: types.GenerateRequest) -> types.GenerateResult:
    rng = random.Random(f'{self._seed}/{request.key}/{request.token_T.size}')
    messages = self._fmt.messages(request.token_T.tolist())
    turn = self.turn(rng, messages, request.max_new - 1)
    return drawn(turn, self._fmt.stop_ids[0], request.max_new)

  @abc.abstractmethod
  def turn(self, rng: random.Random, messages: Messages, room: int) -> list[int]:
    """Ids of the next turn, without the end token, for which `room` ids leave space."""


class Scripted(Player[Style]):
  """The agent of `repair_functions` and `repair_text`."""

  def turn(self, rng: random.Random, messages: Messages, room: int) -> list[int]:
    return _turn(self._fmt, rng, self._style, _read(self._fmt, messages), room)


def drawn(turn: list[int], stop: int, most: int) -> types.GenerateResult:
  """A program's turn as a sampler would return it, cut at `most` tokens."""
  ids = [*turn, stop][:most]
  n = len(ids)
  return types.GenerateResult(
    token_T=np.asarray(ids, np.int32),
    logp_T=np.zeros(n, np.float32),
    entropy_T=np.zeros(n, np.float32),
    version_T=np.zeros(n, np.int32),
    kept=types.KeptSets(np.zeros(n + 1, np.int32), np.zeros(0, np.int32)),
    finish='stop' if ids[-1] == stop else 'length',
  )


def first(messages: Messages) -> str:
  """What an episode begins with."""
  return next((text for role, text in messages if role == 'user'), '')


def results(
  fmt: formats.Format, messages: Messages
) -> Iterator[tuple[tools.Call, str]]:
  """Plays a conversation back: each result belongs to the next call of its turn."""
  pending: list[tools.Call] = []
  for role, text in messages:
    if role == 'assistant':
      pending = list(fmt.read(text).calls)
    elif role == 'tool' and pending:
      yield pending.pop(0), text


def _read(fmt: formats.Format, messages: Messages) -> _Seen:
  shown = _SHOWN.search(first(messages))
  seen = _Seen(source=shown[1], text=True) if shown else _Seen()
  for call, result in results(fmt, messages):
    seen = _after(seen, call, result)
  return seen


def _after(seen: _Seen, call: tools.Call, result: str) -> _Seen:
  """What is known after one more result."""
  match call.name:
    case 'view' if not seen.source and result.startswith('def '):
      return dataclasses.replace(seen, source=anchors.strip(result))
    case 'edit':
      where = call.arguments['old' if seen.text else 'at']
      tried = seen.tried | {(where, call.arguments['new'])}
      if result != 'edited':
        return dataclasses.replace(seen, tried=tried)
      return dataclasses.replace(seen, tried=tried, edited=True, verdict='')
    case 'undo' if result == 'undone':
      return dataclasses.replace(seen, edited=False)
    case 'test':
      return dataclasses.replace(seen, verdict=result.partition(' ')[0])
  return seen


def _turn(
  fmt: formats.Format, rng: random.Random, style: Style, seen: _Seen, room: int
) -> list[int]:
  """Ids of the next turn, without the end token, for which `room` ids leave space."""
  if not seen.source:
    return _thought(fmt, rng, style, 'look') + fmt.call('view')
  if style.practice:
    return _practice(fmt, rng, style, seen, room)
  stop = seen.verdict == 'passed' or (seen.edited and not seen.verdict)
  if stop or (seen.verdict and rng.random() >= style.persist):
    return _thought(fmt, rng, style, 'done') + fmt.call('submit')
  undo = seen.edited and rng.random() < style.undo
  found = text_edits(seen.source) if seen.text else edits(seen.source)
  fresh = [edit for edit in found if edit[:2] not in seen.tried]
  pool = found if rng.random() < style.retry_same else fresh
  if not pool:
    return _thought(fmt, rng, style, 'done') + fmt.call('submit')
  at, new, kind = rng.choice(pool)
  ids = _thought(fmt, rng, style, SUSPECT[kind])
  ids += fmt.call('undo') if undo else []
  ids += fmt.call('edit', **{'old' if seen.text else 'at': at}, new=new)
  return ids + (fmt.call('test') if rng.random() < style.test else [])


def _practice(
  fmt: formats.Format, rng: random.Random, style: Style, seen: _Seen, room: int
) -> list[int]:
  """Edits that are undone at once, those that fit in `room`; some time, submit."""
  found = edits(seen.source)
  if not found or rng.random() >= style.persist:
    return _thought(fmt, rng, style, 'done') + fmt.call('submit')
  chosen = rng.choices(found, k=style.practice)
  ids: list[int] = []
  for at, new, kind in chosen:
    pair = [] if ids else _thought(fmt, rng, style, SUSPECT[kind])
    pair += fmt.call('edit', at=at, new=new)
    pair += fmt.call('undo')
    ids += pair if len(ids) + len(pair) <= room else []
  return ids or _thought(fmt, rng, style, 'done') + fmt.call('submit')


def _thought(
  fmt: formats.Format, rng: random.Random, style: Style, text: str
) -> list[int]:
  if rng.random() >= style.think:
    return []
  return fmt.thought(text)


@functools.lru_cache(maxsize=4096)
def edits(source: str) -> tuple[tuple[str, str, str], ...]:
  """(anchor, new text, kind) of all that the agent would try on a source."""
  pieces = anchors.split(source)
  return tuple(
    (f'«{name}»', new, kind)
    for name, index in anchors.names(pieces).items()
    for new, kind in alternatives(pieces[index])
  )


@functools.lru_cache(maxsize=4096)
def text_edits(source: str) -> tuple[tuple[str, str, str], ...]:
  """(text, new text, kind) of the same tries: of the shortest text that stands once."""
  pieces, at = anchors.split(source), 0
  places = set(anchors.names(pieces).values())
  found: list[tuple[str, str, str]] = []
  for index, piece in enumerate(pieces):
    start, at = at, at + len(piece)
    if index in places:
      before, after = _context(source, start, at)
      found += [
        (before + piece + after, before + new.strip(' ') + after, kind)
        for new, kind in alternatives(piece)
        if source.count(before + piece + after) == 1
      ]
  return tuple(found)


def _context(source: str, start: int, stop: int) -> tuple[str, str]:
  """The fewest words and signs around a place, on its line, that make it the only one.

  One more on the left, then one more on the right, and so on.
  """
  first = source.rfind('\n', 0, start) + 1
  last = source.find('\n', stop) % (len(source) + 1)
  left = _WORD.findall(source[first:start].lstrip())
  right = _WORD.findall(source[stop:last])
  before, after = '', ''
  while source.count(before + source[start:stop] + after) > 1 and (left or right):
    if left:
      before = left.pop() + before
    if right and source.count(before + source[start:stop] + after) > 1:
      after += right.pop(0)
  return before, after


def alternatives(text: str) -> list[tuple[str, str]]:
  """(text, kind) of what may belong in a place instead: never another name."""
  if text in _WORDS:
    return _WORDS[text]
  if text.isdecimal():
    near = [int(text) - 1, int(text) + 1]
    return [(str(n), 'off_by_one') for n in near if n >= 0]
  for table, kind in (
    (sites.COMPARE, 'comparison'),
    (sites.BINARY, 'operator'),
    (sites.AUGMENTED, 'operator'),
  ):
    if text in table:
      return [(f' {new} ', kind) for new in table[text]]
  if text in sites.PAIRED_TEXT:
    return [(sites.PAIRED_TEXT[text], 'wrong_constant')]
  return []
