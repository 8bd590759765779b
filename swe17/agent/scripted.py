"""A scripted agent that stands where a sampler does: context in, the next turn out.

It knows nothing of the gold. It reads the code from `view`'s result, follows its own
edits, and tries single edits out of `faults.candidates`. A `Style` says how well: the
default is clumsy at exactly what reinforcement learning can teach a small model (test
before submitting, undo what did not help, try something new); `CAREFUL` is not.

  <think>look</think> view
  <think>comparison</think> edit test      or, untested: edit, then submit
  <think>operator</think> undo edit test   after 'failed 2 of 6'
  <think>done</think> submit             after 'passed 6 of 6'
"""

import dataclasses
import random
import re

import numpy as np

from swe17 import types
from swe17.agent import chat, tools
from swe17.agent import tokenizer as tokenizers
from swe17.env import faults

# What a thought calls each kind of fault.
SUSPECT = {
  'comparison': 'comparison',
  'off_by_one': 'offset',
  'operator': 'operator',
  'negated_condition': 'negation',
  'wrong_constant': 'constant',
}
# The agent suspects operators, numbers and conditions, never names: edits whose texts
# hold other words than these are not in its repertoire.
_WORDS = frozenset(
  ('and', 'or', 'not', 'is', 'in', 'if', 'elif', 'while', 'return')
  + ('True', 'False', 'None')
)
_WORD = re.compile(r'[A-Za-z_]\w*')
_ROW = re.compile(r'\d+\|')


@dataclasses.dataclass(frozen=True)
class Style:
  """Probabilities of what the agent does, each drawn anew every time."""

  think: float = 0.95  # says which kind of fault it suspects
  test: float = 0.9  # tests an edit in the same turn; else submits it untested
  undo: float = 0.4  # undoes an edit that failed its test before the next one
  persist: float = 0.95  # tries again after a failed test; else submits
  retry_same: float = 0.2  # may draw an edit it has tried before
  practice: int = 0  # instead: so many edits a turn, each undone, never a test


CLUMSY = Style()
PRACTICE = Style(practice=2, persist=0.9)
CAREFUL = Style(think=1.0, test=1.0, undo=1.0, persist=1.0, retry_same=0.0)


@dataclasses.dataclass(frozen=True)
class _Seen:
  """What the agent can know from its context."""

  source: str = ''  # '' before the first view; its own edits are followed
  before: tuple[str, ...] = ()  # the sources that `undo` goes back to
  tried: frozenset[tuple[int, str, str]] = frozenset()
  edited: bool = False  # the last edit is in place
  verdict: str = ''  # the last test's first word, '' if none since the last edit


class Scripted:
  """Usable as an episode's `generate`. Log-probs are 0 and no kept sets are given, so
  the request's sampling must be `types.Sampling()` (no filter).

  A draw depends on the seed drawn from `rng`, the request's key and its position only,
  so episodes may run side by side in any order.
  """

  def __init__(self, tok: tokenizers.Tokenizer, rng: random.Random, style: Style):
    self._tok = tok
    self._seed = rng.getrandbits(64)
    self._style = style

  async def __call__(self, request: types.GenerateRequest) -> types.GenerateResult:
    rng = random.Random(f'{self._seed}/{request.key}/{request.token_T.size}')
    messages = chat.messages(self._tok, request.token_T.tolist())
    room = request.max_new - 1
    turn = _turn(self._tok, rng, self._style, _read(messages), room)
    ids = [*turn, self._tok.end][: request.max_new]
    n = len(ids)
    return types.GenerateResult(
      token_T=np.asarray(ids, np.int32),
      logp_T=np.zeros(n, np.float32),
      entropy_T=np.zeros(n, np.float32),
      version_T=np.zeros(n, np.int32),
      kept=types.KeptSets(np.zeros(n + 1, np.int32), np.zeros(0, np.int32)),
      finish='stop' if ids[-1] == self._tok.end else 'length',
    )


def _read(messages: list[tuple[str, str]]) -> _Seen:
  """Plays the conversation back: each result belongs to the next call of its turn."""
  seen = _Seen()
  pending: list[tools.Call] = []
  for role, text in messages:
    if role == 'assistant':
      pending = list(tools.parse(text).calls)
    elif role == 'tool' and pending:
      seen = _after(seen, pending.pop(0), text)
  return seen


def _after(seen: _Seen, call: tools.Call, result: str) -> _Seen:
  """What is known after one more result."""
  if call.name == 'view' and _ROW.match(result):
    source = '\n'.join(row.partition('|')[2] for row in result.split('\n'))
    return dataclasses.replace(seen, source=source)
  if call.name == 'edit':
    edit = (call.arguments['line'], call.arguments['old'], call.arguments['new'])
    seen = dataclasses.replace(seen, tried=seen.tried | {edit}, edited=False)
    if result != 'edited':
      return seen
    return dataclasses.replace(
      seen,
      source=faults.apply(seen.source, *edit),
      before=(*seen.before, seen.source),
      edited=True,
      verdict='',
    )
  if call.name == 'undo' and result == 'undone':
    *before, source = seen.before
    return dataclasses.replace(seen, source=source, before=tuple(before), edited=False)
  if call.name == 'test':
    return dataclasses.replace(seen, verdict=result.partition(' ')[0])
  return seen


def _turn(
  tok: tokenizers.Tokenizer, rng: random.Random, style: Style, seen: _Seen, room: int
) -> list[int]:
  """Ids of the next turn, without the end token, for which `room` ids leave space."""
  if not seen.source:
    return _thought(tok, rng, style, 'look') + chat.call(tok, 'view')
  if style.practice:
    return _practice(tok, rng, style, seen, room)
  stop = seen.verdict == 'passed' or (seen.edited and not seen.verdict)
  if stop or (seen.verdict and rng.random() >= style.persist):
    return _thought(tok, rng, style, 'done') + chat.call(tok, 'submit')
  undo = seen.edited and rng.random() < style.undo
  source = seen.before[-1] if undo else seen.source
  found = _edits(tok, source)
  fresh = [(edit, kind) for edit, kind in found if edit not in seen.tried]
  pool = found if rng.random() < style.retry_same else fresh
  if not pool:
    return _thought(tok, rng, style, 'done') + chat.call(tok, 'submit')
  (line, old, new), kind = rng.choice(pool)
  ids = _thought(tok, rng, style, SUSPECT[kind])
  ids += chat.call(tok, 'undo') if undo else []
  ids += chat.call(tok, 'edit', old=old, new=new, line=line)
  return ids + (chat.call(tok, 'test') if rng.random() < style.test else [])


def _practice(
  tok: tokenizers.Tokenizer, rng: random.Random, style: Style, seen: _Seen, room: int
) -> list[int]:
  """Edits that are undone at once, those that fit in `room`; some time, submit."""
  found = _edits(tok, seen.source)
  if not found or rng.random() >= style.persist:
    return _thought(tok, rng, style, 'done') + chat.call(tok, 'submit')
  chosen = rng.choices(found, k=style.practice)
  ids: list[int] = []
  for (line, old, new), kind in chosen:
    pair = [] if ids else _thought(tok, rng, style, SUSPECT[kind])
    pair += chat.call(tok, 'edit', old=old, new=new, line=line)
    pair += chat.call(tok, 'undo')
    ids += pair if len(ids) + len(pair) <= room else []
  return ids or _thought(tok, rng, style, 'done') + chat.call(tok, 'submit')


def _thought(
  tok: tokenizers.Tokenizer, rng: random.Random, style: Style, text: str
) -> list[int]:
  if rng.random() >= style.think:
    return []
  return [tok.think, *tok.encode(text), tok.think_end]


def _edits(
  tok: tokenizers.Tokenizer, source: str
) -> list[tuple[tuple[int, str, str], str]]:
  """Candidate edits and their kinds; `old` is written in whole tokens of its line."""
  rows = source.split('\n')
  edits = []
  for fault in faults.candidates(source):
    if not _WORDS.issuperset(_WORD.findall(fault.old + ' ' + fault.new)):
      continue
    row = f'{fault.line}|{rows[fault.line - 1]}'
    edit = (fault.line, *tokenizers.widen(tok, row, fault.old, fault.new))
    edits.append((edit, fault.kind))
  return edits
