"""What one agent was served, as a tree: messages in, exact ids out, then segments.

An agent that speaks the OpenAI API sends its whole history with every request. Here a
request finds its place by that history: behind the served turn whose own history (all
messages asked, and the assistant's as the agent was told it) equals all that the agent
sends up to its last assistant message. From there ids are only extended,

  context = ids that turn was asked with + ids it drew + fmt.after(them, new messages)

so no sampled token is ever encoded again. Two answers to one place (n > 1, a request
that is repeated) and two continuations of one turn are branches; they share what stands
before. Where no served turn fits (the agent edited, dropped or summarised an assistant
message or one before it, or has other tools) there is a new root, which
fmt.conversation renders; sub-agents have roots of their own in the same way.

told.py says when two histories are equal.

An answer is *replaced* if the same request (same place) came again after it had been
served, was answered, and nobody went on from the first: the client had given it up. It
is not trained. All other turns are, each in one segment: one that leads from a root to
a leaf, with those turns masked out that another segment has. An agent that wants
several answers asks with n, or at the same time.
"""

from collections.abc import Callable, Sequence
import dataclasses
import hashlib
from typing import Any

import numpy as np

from swe17 import types
from swe17.agent import formats, record, told

Message = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Turn:
  """What a sampler drew at a place, and was told to the agent."""

  place: 'Place'
  session: int
  result: types.GenerateResult
  temperature: float
  number: int  # in the order of being served
  text: str | None = None  # all that was told so far, where no messages were asked
  replaced: bool = False
  places: list['Place'] = dataclasses.field(default_factory=list)

  @property
  def trained(self) -> bool:
    went_on = any(place.turns for place in self.places)
    return went_on or not self.replaced


@dataclasses.dataclass(eq=False)
class Place:
  """A context at which turns are asked for.

  Attributes:
    parent: the turn before it; None at a root.
    glue_T: ids after the parent's turn; at a root the whole context.
    length: tokens of the context.
    name: digest of its ids; with the number of the draw it keys the draws.
    history: digest of the messages asked, and of the tools.
    text: what was asked, where it was a text and no messages.
    turns: what was served here, by the number of the draw.
    taken: numbers of draws that are under way.
    sessions: of every draw ever begun here, by number.
  """

  parent: Turn | None
  glue_T: np.ndarray
  length: int
  name: str
  history: bytes
  text: str | None = None
  turns: dict[int, Turn] = dataclasses.field(default_factory=dict)
  taken: set[int] = dataclasses.field(default_factory=set)
  sessions: dict[int, int] = dataclasses.field(default_factory=dict)

  @property
  def context_T(self) -> np.ndarray:
    """int32 [length]: what the sampler is given."""
    parts: list[np.ndarray] = []
    place: Place | None = self
    while place is not None:
      parts.append(place.glue_T)
      turn, place = place.parent, None
      if turn is not None:
        parts.append(turn.result.token_T)
        place = turn.place
    return np.concatenate(parts[::-1])

  @property
  def routed(self) -> int:
    """Tokens of the context whose routes are recorded: those that were fed."""
    turn = self.parent
    while turn is not None and turn.result.routes_RNK is None:
      turn = turn.place.parent
    return 0 if turn is None else turn.place.length + turn.result.token_T.size - 1


@dataclasses.dataclass(frozen=True)
class Sought:
  """Where a request belongs: what `Tree.put` makes a place of.

  Attributes:
    parent: the turn that it goes on from; None: a root.
    history: digest of all that is asked.
    render: ids after the parent's. May run on another thread. ValueError if the format
      does not take the messages.
    text: what is asked, where it is a text and no messages.
  """

  parent: Turn | None
  history: bytes
  render: Callable[[], Sequence[int]]
  text: str | None = None

  @property
  def key(self) -> tuple[int, bytes]:
    return -1 if self.parent is None else self.parent.number, self.history


@dataclasses.dataclass(eq=False)
class Draw:
  """One answer under way. Ends in `Tree.serve` or in `Tree.drop`."""

  place: Place
  number: int
  before: tuple[Turn, ...]  # served here before this was asked

  @property
  def session(self) -> int:
    return self.place.sessions[self.number]

  @property
  def name(self) -> str:
    """Of the branch, for `episode.draw_key`: equal episodes have equal ones.

    It depends on nothing but the context and the number of the draw. One that nobody
    was served (the client went away) is drawn again under the same name, so that no
    answer is lost for taking long.
    """
    return f'{self.place.name}.{self.number}'


class Tree:
  """Grows as an agent is served. Not for several threads."""

  def __init__(self, fmt: formats.Format):
    self._fmt = fmt
    self.roots: list[Place] = []
    self.turns: list[Turn] = []
    self._places: dict[tuple[int, bytes], Place] = {}  # (parent's number, history)
    self._told: dict[bytes, list[Turn]] = {}  # by the history that ends in the turn
    self.sessions = 0

  def seek(
    self, messages: Sequence[Message], tools: Sequence[told.Message] = ()
  ) -> Sought:
    """The served turn that a conversation goes on from, if there is one."""
    history = told.histories(messages, tools)
    own = [i for i, m in enumerate(messages, 1) if m.get('role') == 'assistant']
    last = own[-1] if own else 0
    turns = self._told.get(history[last], []) if last else []
    if not turns:
      return Sought(None, history[-1], lambda: self._fmt.conversation(messages, tools))
    # Of several equal answers it is the last that the agent has, if it asked again.
    drawn = turns[-1].result.token_T.tolist()
    return Sought(
      turns[-1], history[-1], lambda: self._fmt.after(drawn, messages[last:], tools)
    )

  def seek_text(self, text: str) -> Sought:
    """The same for a bare text, which goes on from the longest text that was told."""
    parent, known = None, ''
    for turn in self.turns:
      whole = turn.text
      if whole is not None and len(whole) >= len(known) and text.startswith(whole):
        parent, known = turn, whole
    rest = text[len(known) :]
    history = hashlib.blake2b(text.encode(), digest_size=16, person=b'text').digest()
    return Sought(parent, history, lambda: self._fmt.raw(rest), text)

  def find(self, sought: Sought) -> Place | None:
    """The place, if somebody asked there before."""
    return self._places.get(sought.key)

  def put(self, sought: Sought, ids: Sequence[int]) -> Place:
    """The place, added unless it came meanwhile."""
    if sought.key not in self._places:
      self._places[sought.key] = self._add(sought, ids)
    return self._places[sought.key]

  def place(self, sought: Sought) -> Place:
    """Where a request stands, rendered here. ValueError if it can't be."""
    found = self.find(sought)
    return self.put(sought, sought.render()) if found is None else found

  def ask(self, place: Place, n: int = 1) -> list[Draw]:
    """Begins `n` answers to one request."""
    before = tuple(place.turns.values())
    draws = []
    for _ in range(n):
      busy = place.taken | place.turns.keys()
      number = next(i for i in range(len(busy) + 1) if i not in busy)
      place.taken.add(number)
      if number not in place.sessions:
        place.sessions[number] = self._session(place, number)
      draws.append(Draw(place, number, before))
    return draws

  def drop(self, draw: Draw) -> None:
    """The answer was not served, and is not recorded. No harm if it was."""
    draw.place.taken.discard(draw.number)

  def serve(
    self,
    draw: Draw,
    result: types.GenerateResult,
    message: Message,
    temperature: float,
  ) -> Turn:
    """Records an answer, and what the agent was told."""
    place = draw.place
    assert draw.number in place.taken, 'served twice, or dropped before'
    place.taken.discard(draw.number)
    turn = Turn(place, draw.session, result, temperature, len(self.turns))
    for earlier in draw.before:
      earlier.replaced = True
    self.turns.append(turn)
    place.turns[draw.number] = turn
    if place.text is not None:
      turn.text = place.text + message['content']
    else:
      history = told.extend(place.history, {**message, 'role': 'assistant'})
      self._told.setdefault(history, []).append(turn)
    return turn

  def record(self, log: record.Record) -> None:
    """Writes what is trained to an empty log: its segments are this tree.

    Turns are numbered in the order of being served, those left out not counted.
    """
    trained = [turn for turn in self.turns if turn.trained]
    number = {turn: i for i, turn in enumerate(trained)}
    heirs = {turn: _heir(turn) for turn in trained}
    begun = set(heirs.values())
    heads = [turn for turn in trained if turn not in begun]
    for i, head in enumerate(heads):
      if i:
        log.open_segment([])
      for turn in _path(head):
        log.given(turn.place.glue_T.tolist())
        log.served(turn.result)
      turn = head
      while turn is not None:
        log.given(turn.place.glue_T.tolist())
        log.sampled(turn.result, number[turn], turn.temperature)
        turn = heirs[turn]

  @property
  def replaced(self) -> int:
    """Turns that were served and are not trained."""
    return sum(not turn.trained for turn in self.turns)

  def _add(self, sought: Sought, ids: Sequence[int]) -> Place:
    ids_T, parent = np.asarray(ids, np.int32), sought.parent
    place = Place(parent, ids_T, ids_T.size, '', sought.history, sought.text)
    if parent is None:
      self.roots.append(place)
    else:
      place.length += parent.place.length + parent.result.token_T.size
      parent.places.append(place)
    data = place.context_T.astype('<i4').tobytes()
    place.name = hashlib.blake2b(data, digest_size=16).hexdigest()
    return place

  def _session(self, place: Place, number: int) -> int:
    """The session whose cache holds the context, unless another branch has it."""
    parent = place.parent
    if number == 0 and parent is not None and parent.places[0] is place:
      return parent.session
    self.sessions += 1
    return self.sessions - 1


def _heir(turn: Turn) -> Turn | None:
  """The turn that goes on in this one's segment: the first trained one after it."""
  after = [t for place in turn.places for t in place.turns.values() if t.trained]
  return min(after, key=lambda t: t.number, default=None)


def _path(turn: Turn) -> list[Turn]:
  """The turns before this one, from its root on."""
  before: list[Turn] = []
  parent = turn.place.parent
  while parent is not None:
    before.append(parent)
    parent = parent.place.parent
  return before[::-1]
