"""A scripted agent for the retrieval families: greps, looks at outlines, answers.

It knows nothing of the gold; all it has is its context, which it plays back each turn.
A `Style` says how well it searches: `CLUMSY` asks one thing a turn, answers before it
has looked everywhere and takes the definition of what it looked for as a place where
that is called, which is what reinforcement learning can teach a small model not to do.

  grep X                         who calls X?
  grep F, grep G, grep H         side by side: who calls those?      (two steps)
  list a.py, list b.py           where do they begin and end? (if grep has not said so)
  submit a.py:3-9, b.py:12-20
"""

from collections.abc import Sequence
import dataclasses
import random
import re

from swe17.agent import formats, scripted, tools

TURNS = 4
_CALLS = 8
_NAME = re.compile(r'`(?:\w+\.)*(\w+)`')
_IN_DEFINITION = re.compile(r'(\S+?):(\d+)-(\d+) (\w*): (.*)')
_IN_LINE = re.compile(r'(\S+?):(\d+): (.*)')
_OUTLINE = re.compile(r'(\d+)-(\d+) (\S+)')
_CALLED = re.compile(r'\b([A-Za-z_]\w{2,})\(')
_REACH = 6  # lines taken where no outline says where a definition ends


@dataclasses.dataclass(frozen=True)
class Style:
  """Probabilities of what the agent does, each drawn anew every time."""

  parallel: float = 0.2  # asks all that it wants to know at once; else one thing
  persist: float = 0.6  # goes on while there is something to ask; else answers
  step: float = 0.85  # takes the second of two steps; else answers with the first
  exclude: float = 0.6  # leaves a definition out of the places that call it
  repeat: float = 0.15  # asks once more what it has asked
  deadline: float = 0.8  # answers in the last turn, whatever there is left to ask


WEAK = Style(0.0, 0.4, 0.5, 0.3, 0.3, 0.7)
CLUMSY = Style()
CAREFUL = Style(1.0, 1.0, 1.0, 1.0, 0.0, 1.0)
STRENGTHS = {'weak': WEAK, 'clumsy': CLUMSY, 'careful': CAREFUL}


@dataclasses.dataclass(frozen=True)
class Hit:
  """A place that grep printed. Without a name its definition is not known."""

  path: str
  first: int
  last: int
  name: str
  text: str


@dataclasses.dataclass
class _Seen:
  """What the agent can know from its context."""

  question: str = ''
  turns: int = 0
  greps: dict[str, list[Hit]] = dataclasses.field(default_factory=dict)
  outlines: dict[str, list[Hit]] = dataclasses.field(default_factory=dict)
  read: str = ''

  def placed(self, hit: Hit) -> Hit:
    """A hit with the innermost definition around it, as far as outlines tell."""
    around = [
      d for d in self.outlines.get(hit.path, ()) if d.first <= hit.first <= d.last
    ]
    if hit.name or not around:
      return hit
    inner = max(around, key=lambda d: d.first)
    return dataclasses.replace(inner, text=hit.text)


class Searcher(scripted.Player[Style]):
  """The agent of the retrieval families."""

  def turn(
    self, rng: random.Random, messages: scripted.Messages, room: int
  ) -> list[int]:
    return _turn(self._fmt, rng, self._style, _read(self._fmt, messages), room)


def _read(fmt: formats.Format, messages: scripted.Messages) -> _Seen:
  turns = sum(role == 'assistant' for role, _ in messages)
  seen = _Seen(question=scripted.first(messages), turns=turns)
  for call, result in scripted.results(fmt, messages):
    _after(seen, call, result)
  return seen


def _after(seen: _Seen, call: tools.Call, result: str) -> None:
  lines = result.split('\n')
  match call.name:
    case 'grep':
      hits = [hit for line in lines if (hit := _hit(line))]
      seen.greps[_word(call.arguments['pattern'])] = hits
    case 'list':
      path = call.arguments['path']
      spans = [_OUTLINE.fullmatch(line) for line in lines]
      seen.outlines[path] = [
        Hit(path, int(m[1]), int(m[2]), m[3].rpartition('.')[2], '') for m in spans if m
      ]
    case 'read':
      seen.read += result


def _hit(line: str) -> Hit | None:
  found = _IN_DEFINITION.fullmatch(line)
  if found:
    return Hit(found[1], int(found[2]), int(found[3]), found[4], found[5])
  found = _IN_LINE.fullmatch(line)
  if found:
    return Hit(found[1], int(found[2]), int(found[2]), '', found[3])
  return None


def _word(pattern: str) -> str:
  """The name that a pattern of ours looks for."""
  return pattern.replace('\\b', '').removeprefix('def ').removesuffix('\\(')


def _turn(
  fmt: formats.Format, rng: random.Random, style: Style, seen: _Seen, room: int
) -> list[int]:
  """Ids of the next turn, without the end token, in at most `room` ids."""
  names = _NAME.findall(seen.question)
  last = seen.turns + 1 >= TURNS and rng.random() < style.deadline
  if not names or last:
    return _submit(fmt, rng, style, seen, names, room)
  todo = _todo(rng, style, seen, names)
  if not todo or (seen.turns and rng.random() >= style.persist):
    return _submit(fmt, rng, style, seen, names, room)
  asked = todo[:_CALLS] if rng.random() < style.parallel else todo[:1]
  if seen.greps and len(asked) < _CALLS and rng.random() < style.repeat:
    asked.append(('grep', rng.choice(list(seen.greps))))
  ids: list[int] = []
  for tool, what in asked:
    call = _call(fmt, seen, tool, what)
    ids += call if len(ids) + len(call) <= room else []
  return ids


def _call(fmt: formats.Format, seen: _Seen, tool: str, what: str) -> list[int]:
  if tool == 'list':
    return fmt.call('list', path=what)
  if tool == 'read':
    path, first, last = what.split(':')
    return fmt.call('read', path=path, first=int(first), last=int(last))
  return fmt.call('grep', pattern=what, path='')


def _todo(
  rng: random.Random, style: Style, seen: _Seen, names: Sequence[str]
) -> list[tuple[str, str]]:
  """Calls (tool, what) that would tell something new, the first ones first."""
  fresh = [('grep', name) for name in names[:1] if name not in seen.greps]
  if fresh:
    return fresh
  hits = [hit for found in seen.greps.values() for hit in found]
  files = dict.fromkeys(hit.path for hit in hits if not hit.name)
  todo = [('list', f) for f in files if f.endswith('.py') and f not in seen.outlines]
  if _two_steps(seen.question) and rng.random() < style.step:
    first = [seen.placed(hit) for hit in seen.greps[names[0]]]
    found = [h.name for h in first if h.name and not _defines(h, names[0])]
    todo = [('grep', n) for n in dict.fromkeys(found) if n not in seen.greps] + todo
  elif 'calls directly' in seen.question:
    todo = _of_callees(seen, names[0]) or todo
  return todo


def _of_callees(seen: _Seen, name: str) -> list[tuple[str, str]]:
  """What a function calls: its own lines first, then the definitions of its calls."""
  if not seen.read:
    own = [seen.placed(h) for h in seen.greps[name] if f'def {name}' in h.text]
    return [('read', f'{h.path}:{h.first}:{h.last}') for h in own if h.name][:1]
  called = dict.fromkeys(_CALLED.findall(seen.read))
  return [('grep', n) for n in called if n not in seen.greps]


def _two_steps(question: str) -> bool:
  return 'call one that calls' in question


def _defines(hit: Hit, name: str) -> bool:
  return hit.name == name or f'def {name}' in hit.text


def _submit(
  fmt: formats.Format,
  rng: random.Random,
  style: Style,
  seen: _Seen,
  names: Sequence[str],
  room: int,
) -> list[int]:
  """The places that the last step found, those that fit in `room`."""
  second = {n: hits for n, hits in seen.greps.items() if n not in names[:1]}
  wants_definitions = 'calls directly' in seen.question or 'override' in seen.question
  found: list[Hit] = []
  for name, hits in (second or seen.greps).items():
    for hit in map(seen.placed, hits):
      own = _defines(hit, name)
      wanted = own if wants_definitions else not own
      if wanted or rng.random() >= style.exclude:
        found.append(hit)
  places = dict.fromkeys(map(_place, found))
  answer, ids = '', fmt.call('submit', answer='')
  for place in places:
    longer = f'{answer}, {place}' if answer else place
    call = fmt.call('submit', answer=longer)
    if len(call) > room:
      break
    answer, ids = longer, call
  return ids


def _place(hit: Hit) -> str:
  last = hit.last if hit.name or hit.last > hit.first else hit.last + _REACH
  return f'{hit.path}:{hit.first}-{last}'
