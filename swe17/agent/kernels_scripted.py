"""Scripted agents for the families of kernels: they edit marked places, and test.

They know nothing of the gold; all they have is their context, which they play back each
turn. Of `kernels_small` they know what text may belong in a place (`options`), and a
`Style` says how well they choose among these. `CLUMSY` writes any of them anywhere,
which breaks the code more often than not; `CAREFUL` sees which ones keep what the code
returns (`judged`) and writes them all in its first turn.

  edit «2» "left @ right", edit «3» "set(codes)", test       -> wrong
  undo, edit «2» "left @ right", test                        -> correct 1.6

`handing_in` is an agent for `kernels`: it hands in given modules, one a turn.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import random
import re

from swe17 import types
from swe17.agent import episode, formats, scripted, tools

_PLACE = re.compile(r'«(\d+)»([^»]*)»')
_CALL = re.compile(r'(sum|max|min|sorted|list|tuple)\((\w+)\)')
_METHOD = re.compile(r'(\w+)\.(copy|tolist)\(\)')
_ZIP = re.compile(r'sum\(x \* y for x, y in zip\((\w+), (\w+)\)\)')
_MAP = re.compile(r'\[math\.(\w+)\(x\) for x in (\w+)\]')
_COUNT = re.compile(r'(\w+)\.count\(i\)')
_ASSIGN = re.compile(r'^ *(\w+) = (.*)$', re.MULTILINE)
_ARGUMENTS = re.compile(r'def \w+\((\w+), (\w+), (\w+), (\w+)\)')


@dataclasses.dataclass(frozen=True)
class Style:
  """Probabilities of what the agent does, each drawn anew every time."""

  more: float = 0.5  # writes one edit more in a turn, again and again
  undo: float = 0.7  # goes back after a bad test before it writes
  judge: float = 0.25  # chooses an edit by judging it; else by lot
  test: float = 0.95  # tests in the turn in which it wrote
  alone: float = 0.0  # after a bad test, writes one edit alone
  think: float = 0.0  # says how many edits it will write


WEAK = Style(0.2, 0.2, 0.0, 0.8)
CLUMSY = Style()
CAREFUL = Style(1.0, 1.0, 1.0, 1.0, 1.0)
STRENGTHS = {'weak': WEAK, 'clumsy': CLUMSY, 'careful': CAREFUL}


@dataclasses.dataclass
class Seen:
  """What the agent can know from its context."""

  code: str = ''  # with its marks
  now: dict[str, str] = dataclasses.field(default_factory=dict)  # place -> text
  best: dict[str, str] = dataclasses.field(default_factory=dict)
  speedup: float = 0.0  # of the best
  bad: bool = False  # the last test was not right, or not faster than the best
  tried: set[tuple[str, str]] = dataclasses.field(default_factory=set)

  @property
  def places(self) -> dict[str, str]:
    """Place -> the text that is in it at first."""
    return {m[1]: m[2] for m in _PLACE.finditer(self.code)}


class Editor(scripted.Player[Style]):
  """The agent of `kernels_small`."""

  def turn(
    self, rng: random.Random, messages: scripted.Messages, room: int
  ) -> list[int]:
    return _turn(self._fmt, rng, self._style, read(self._fmt, messages), room)


def read(fmt: formats.Format, messages: scripted.Messages) -> Seen:
  """What a conversation has shown."""
  seen = Seen(code=scripted.first(messages))
  for call, result in scripted.results(fmt, messages):
    _after(seen, call, result)
  return seen


def _after(seen: Seen, call: tools.Call, result: str) -> None:
  match call.name:
    case 'edit' if result == 'edited':
      at, new = call.arguments['at'].strip('«»'), call.arguments['new']
      seen.now[at] = new
      seen.tried.add((at, new))
    case 'undo':
      seen.now, seen.bad = dict(seen.best), False
    case 'test':
      right, _, speedup = result.partition(' ')
      seen.bad = right != 'correct' or float(speedup) <= seen.speedup
      if not seen.bad:
        seen.best, seen.speedup = dict(seen.now), float(speedup)


def _turn(
  fmt: formats.Format, rng: random.Random, style: Style, seen: Seen, room: int
) -> list[int]:
  """Ids of the next turn, without the end token, in at most `room` ids."""
  ids: list[int] = []
  undo = seen.bad and rng.random() < style.undo
  held = seen.best if undo else seen.now
  alone = seen.bad and rng.random() < style.alone
  if undo:
    ids += fmt.call('undo')
  test = fmt.call('test') if rng.random() < style.test else []
  chosen = _choose(rng, style, seen, held, alone)
  if chosen and rng.random() < style.think:
    ids = fmt.thought(f'{len(chosen)}') + ids
  for at, new in chosen:
    call = fmt.call('edit', at=f'«{at}»', new=new)
    ids += call if len(ids) + len(call) + len(test) <= room else []
  return (ids + test) or fmt.call('test')


def _choose(
  rng: random.Random, style: Style, seen: Seen, held: Mapping[str, str], alone: bool
) -> list[tuple[str, str]]:
  """Edits of one turn, each at a place of its own that holds its first text."""
  places = [at for at in seen.places if at not in held]
  rng.shuffle(places)
  chosen: list[tuple[str, str]] = []
  for at in places:
    if chosen and (alone or rng.random() >= style.more):
      break
    judging = rng.random() < style.judge
    found = judged(seen.code, at) if judging else options(seen.code, at)
    # Alone, what failed beside others is tried once more.
    fresh = [new for new in found if (at, new) not in seen.tried or alone]
    chosen += [(at, rng.choice(fresh))] if fresh else []
  return sorted(chosen)


def options(code: str, at: str) -> list[str]:
  """Texts that may belong in a place of a view, whatever they would do there."""
  before, text, _ = _around(code, at)
  names = [name for name, _ in _ASSIGN.findall(before)]
  if found := _CALL.fullmatch(text):
    f, x = found[1], found[2]
    if f in ('list', 'tuple'):
      return [f'set({x})', x]
    return [f'set({x})' if f == 'sorted' else f'np.{f}({x})', *names]
  if found := _METHOD.fullmatch(text):
    return [found[1]]
  if found := _ZIP.fullmatch(text):
    return [f'{found[1]} @ {found[2]}']
  if found := _MAP.fullmatch(text):
    return [f'np.{found[1]}({found[2]})']
  if _COUNT.fullmatch(text):
    return [f'{name}[i]' for name in names]
  return []


def judged(code: str, at: str) -> list[str]:
  """Those of the options that keep what the code returns, and help; at most one."""
  before, text, after = _around(code, at)
  known = {value: name for name, value in _ASSIGN.findall(before)}
  arguments = _ARGUMENTS.search(code)
  arrays = arguments.groups()[2:] if arguments else ()
  line = after.partition('\n')[0]
  in_loop, short = ' for ' in line, '[:' in line
  if found := _CALL.fullmatch(text):
    f, x = found[1], found[2]
    if in_loop:
      name = x if f == 'sorted' and x in known.values() else known.get(text)
      return [name] if name and not short else []
    if f in ('list', 'tuple', 'sorted'):
      name = _target(before)
      asked = f' in {name})' in after and f'{name}[' not in after
      return [f'set({x})'] if asked else []
    return [f'np.{f}({x})'] if x in arrays else []
  if found := _METHOD.fullmatch(text):
    return [found[1]] if in_loop else []
  if found := _ZIP.fullmatch(text):
    both = found[1] in arrays and found[2] in arrays
    return [f'{found[1]} @ {found[2]}'] if both else []
  if found := _MAP.fullmatch(text):
    return [f'np.{found[1]}({found[2]})'] if found[2] in arrays else []
  if found := _COUNT.fullmatch(text):
    name = known.get(f'Counter({found[1]})')
    return [f'{name}[i]'] if name and not short else []
  return []


def _around(code: str, at: str) -> tuple[str, str, str]:
  """(what stands before a place, its text, what stands behind it), without marks."""
  before, _, rest = code.partition(f'«{at}»')
  text, _, after = rest.partition('»')
  return _PLACE.sub(r'\2', before), text, _PLACE.sub(r'\2', after)


def _target(before: str) -> str:
  """The name that the line which a place is on assigns to."""
  return before.rpartition('\n')[2].partition(' = ')[0].strip()


def handing_in(fmt: formats.Format, modules: Sequence[str]) -> episode.Generate:
  """An agent for `kernels` that hands in these modules, one a turn, then submits."""

  async def generate(request: types.GenerateRequest) -> types.GenerateResult:
    messages = fmt.messages(request.token_T.tolist())
    turn = sum(role == 'assistant' for role, _ in messages)
    turn -= bool(messages) and messages[-1] == ('assistant', '')
    ids = fmt.call('submit')
    if turn < len(modules):
      ids = fmt.call('attempt', code=modules[turn], summary=f'Version {turn + 1}.')
    return scripted.drawn(ids, fmt.stop_ids[0], request.max_new)

  return generate
