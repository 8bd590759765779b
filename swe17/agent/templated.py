"""The chat format of somebody else's model, learnt from its template by rendering.

A template only knows whole conversations, and an episode must never render one again:
what the sampler drew would come back as other ids. So a template is asked for the two
things that are not drawn, each once and as a difference:

  prompt   the first messages, with the assistant's next one opened
  results  what follows the last assistant message of a conversation that ends in the
           turn's results: from its end token to where the next turn is opened

For the second an assistant message that holds a private character is rendered, and all
up to the end token behind that character is dropped. What the text of a task or a tool
says in added tokens is guarded by a second private character, which is taken out again
before encoding (hf_tokenizer.py): it stays text.

Some templates drop old thoughts when they render a later turn; the context here keeps
them, as they were served (`rewrites` says what a template would have changed).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import functools
import json
import re

from swe17.agent import (
  hf_tokenizer,
  history,
  probe,
  syntax,
  template,
  tokenizer,
  tools,
)
from swe17.env import base

_MOST_ENDS = 8  # that a sampler takes


class Templated:
  """Satisfies `formats.Format`."""

  def __init__(
    self,
    tok: hf_tokenizer.Tokenizer,
    chat: template.Template,
    way: syntax.Syntax,
    ends: Sequence[int] = (),
  ):
    """`ends` are ids that may end a turn beside the template's own, which comes first.

    ValueError if the template does not say what stands between two turns.
    """
    self._tok, self._chat, self._way = tok, chat, way
    self.vocab_size = tok.vocab_size
    self._system = probe.takes_system(chat)
    self._opened, self._stop = probe.frame(chat, tok)
    stops = dict.fromkeys([tok.markup[self._stop], *ends])
    self.stop_ids = tuple(stops)[:_MOST_ENDS]
    # The template may open the thought itself, of every turn or of the first only.
    self._thinks = self._opened.rstrip().endswith(tokenizer.THINK)
    self.strips = not self._thinks
    self._shapes = [shape for shape in probe.SHAPES if self._works(shape)]
    if not self._shapes:
      raise ValueError('chat template: it renders no results of tool calls')
    after = self._between(self._shapes[0], 1)
    self._beside = probe.takes_content(chat)
    self._always = self._thinks and after.endswith(self._opened)
    self.rewrites = self._rewrites(self._shapes[0])
    inside = True if self._always else None if self._thinks else False
    self.marks = history.Marks(way.opens, way.bare, inside)

  def prompt(self, text: str, tools: Sequence[base.Tool]) -> list[int]:
    listed = [template.schema(tool) for tool in tools]
    return self.conversation([probe.message('user', text)], listed)

  def conversation(
    self,
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool] = (),
  ) -> list[int]:
    made = history.named_as(self._way, history.mapped(messages))
    _, mark = hf_tokenizer.marks(_strings(made, tools))
    made, given = self._guarded(made, tools, mark)
    text = self._first(self._kinds(made), given, lambda whole: whole)
    return self._tok.encode_markup(text, mark)

  def after(
    self,
    turn: Sequence[int],
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool] = (),
  ) -> list[int]:
    calls = [call for call in self.parse(turn).calls if not call.error]
    named = [
      (call.name, call.given or self._way.call_id(call.name, i))
      for i, call in enumerate(calls)
    ]
    follow = history.following(history.mapped(messages), named, self._way)
    return self._follow(turn, named, follow, tools)

  def results(
    self, turn: Sequence[int], calls: Sequence[tools.Call], texts: Sequence[str]
  ) -> list[int]:
    named = [
      (call.name or 'unknown', call.given or self._way.call_id(call.name, i))
      for i, call in enumerate(calls)
    ]
    follow = [
      probe.message('tool', text, name=name, tool_call_id=own)
      for (name, own), text in zip(named, texts, strict=True)
    ]
    return self._follow(turn, named, follow, (probe.ANY,))

  def _follow(
    self,
    turn: Sequence[int],
    named: probe.Named,
    follow: Sequence[template.Message],
    tools: Sequence[history.Tool],
  ) -> list[int]:
    """Ids from the end of a turn that called `named` to where the next turn begins."""
    if not follow:
      raise ValueError('messages: got none after a turn, want what follows it')
    anchor, mark = hf_tokenizer.marks(_strings([*follow, *named], tools))
    messages, given = self._guarded(follow, tools, mark)
    named = history.guarded(named or [('unknown', 'unknown')], self._guard(mark))
    opening = probe.message('user', probe.TEXT)
    answers = follow[0]['role'] == 'tool'
    kinds = []
    for shape in self._shapes if answers else (('user', anchor),):
      asked = [opening, probe.asks(shape, anchor, named), *messages]
      if answers and shape[0] == 'user':
        asked = history.folded(asked)
      kinds += list(self._kinds(asked))[:1]
    kinds.append(history.folded(kinds[-1]))
    text = self._first(kinds, given, lambda whole: self._cut(whole, anchor))
    ids = self._tok.encode_markup(text, mark)
    ended = len(turn) > 0 and turn[-1] in self.stop_ids
    return ids[1:] if ended else ids

  def text(self, turn: Sequence[int]) -> str:
    ended = len(turn) > 0 and turn[-1] in self.stop_ids
    return self._tok.decode(turn[:-1] if ended else turn)

  def parse(self, turn: Sequence[int]) -> tools.Parsed:
    return self.read(self.text(turn))

  def read(self, text: str) -> tools.Parsed:
    return self._way.parse(self._whole(text))

  def message(
    self, turn: Sequence[int], *, calls: bool = True, salt: str = ''
  ) -> template.Message:
    return self.spoken(self.text(turn), calls=calls, salt=salt)

  def spoken(
    self, text: str, *, calls: bool = True, salt: str = ''
  ) -> template.Message:
    return history.spoken(self._whole(text), self._way.parse, calls=calls, salt=salt)

  def raw(self, text: str) -> list[int]:
    return self._tok.encode_markup(text)

  def to_bytes(self, ids: Sequence[int]) -> bytes:
    return self._tok.to_bytes(ids)

  def _whole(self, text: str) -> str:
    return tokenizer.THINK + text if self._inside(text) else text

  def _inside(self, text: str) -> bool:
    """Whether a turn begins inside a thought that its prompt opened."""
    if not self._thinks or text.lstrip().startswith(tokenizer.THINK):
      return False
    return self._always or tokenizer.THINK_END in text

  def thinking(self, turn: Sequence[int]) -> int:
    """Tokens that end inside the thought: its tags may be no tokens of their own."""
    start, close, _, ends = self._thought(turn)
    return sum(start < end <= close for end in ends)

  def without_thought(self, turn: Sequence[int]) -> list[int]:
    if self._thinks:
      return list(turn)
    _, _, after, ends = self._thought(turn)
    begins = [0, *ends[:-1]]
    kept = [token for token, at in zip(turn, begins, strict=True) if at >= after]
    # A last token of the thought may be one with what follows: it is dropped whole.
    return kept

  def _thought(self, turn: Sequence[int]) -> tuple[int, int, int, list[int]]:
    """Bytes: where a thought's text begins and ends, its rest begins, tokens end.

    With the thought go the line ends after it. All 0 where there is none.
    """
    data, ends = b'', []
    ended = len(turn) > 0 and turn[-1] in self.stop_ids
    for token in turn:
      data += self._tok.to_bytes([token])
      ends.append(len(data))
    whole = ends[-2] if ended and len(ends) > 1 else len(data)
    begin, end = tokenizer.THINK.encode(), tokenizer.THINK_END.encode()
    start = 0
    if not self._inside(data.decode('utf-8', 'replace')):
      start = data.find(begin) + len(begin)
      if not data.lstrip().startswith(begin):
        return 0, 0, 0, ends
    close = data.find(end, start, whole)
    if close < 0:
      return start, whole, whole, ends
    after = close + len(end)
    return (
      start,
      close,
      after + len(data[after:]) - len(data[after:].lstrip(b'\n')),
      ends,
    )

  def messages(self, ids: Sequence[int]) -> list[tuple[str, str]]:
    """What stands before a turn is split into results where the template shows how."""
    ids, opened = list(ids), self._tok.encode_markup(self._opened)
    found: list[tuple[str, str]] = []
    at, again = 0, list[int]()
    while at < len(ids):
      start = probe.find(ids, opened, at)
      # Where nothing opens a turn, what ends a result may be followed by another.
      while again and ids[start + len(opened) :][: len(again)] == again:
        start = probe.find(ids, opened, start + len(opened))
      given = self._tok.decode(ids[at:start])
      found += self._split(given) if found else [('user', given)]
      begin = start + len(opened)
      if begin >= len(ids):
        break
      turn = range(begin, len(ids))
      end = next((i for i in turn if ids[i] in self.stop_ids), len(ids))
      found.append(('assistant', self._tok.decode(ids[begin:end])))
      at, (_, _, opened, again) = end + 1, self._frames
    return found

  def call(self, name: str, **arguments: int | str) -> list[int]:
    _, mark = hf_tokenizer.marks(name, *(str(value) for value in arguments.values()))
    guarded = {
      key: self._tok.guard(value, mark) if isinstance(value, str) else value
      for key, value in arguments.items()
    }
    return self._tok.encode_markup(self._way.write(name, guarded, 0), mark)

  def thought(self, text: str) -> list[int]:
    _, mark = hf_tokenizer.marks(text)
    opening = '' if self._thinks else tokenizer.THINK
    text = opening + self._tok.guard(text, mark) + tokenizer.THINK_END
    return self._tok.encode_markup(text, mark)

  def _guard(self, mark: str) -> history.Guard:
    return lambda text: self._tok.guard(text, mark)

  def _guarded(
    self,
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool],
    mark: str,
  ) -> tuple[list[template.Message], list[history.Tool]]:
    guard = self._guard(mark)
    made = [history.guard_message(message, guard) for message in messages]
    return made, history.guarded(tools, guard)

  def _kinds(
    self, messages: Sequence[template.Message]
  ) -> Iterator[list[template.Message]]:
    """Forms in which the template may take a conversation, the best first."""
    beside = list(messages)
    if self._shapes[0][0] != 'user':
      if not self._beside:
        beside = [
          history.written([m], self._way)[0] if m.get('content') else m for m in beside
        ]
      yield beside
      # Some join what is None to a text.
      yield [{**m, 'content': m.get('content') or ''} for m in beside]
      yield history.written(beside, self._way)
    yield history.folded(history.written(beside, self._way))

  def _first(
    self,
    kinds: Iterable[Sequence[template.Message]],
    tools: Sequence[history.Tool],
    take: Callable[[str], str],
  ) -> str:
    """What `take` makes of the first form that the template takes. Or its error."""
    failed: list[ValueError] = []
    for messages in kinds:
      try:
        return take(self._render(messages, tools))
      except ValueError as e:
        failed.append(e)
    raise failed[0]

  def _render(
    self,
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool],
  ) -> str:
    if tools and not self._chat.takes_tools:
      messages = history.told(messages, history.describe(tools, self._way))
      tools = ()
    if not self._system:
      messages = history.without_system(messages)
    return self._chat.render(messages, tools, generate=True)

  def _cut(self, whole: str, anchor: str) -> str:
    """From the end token of the turn that holds `anchor`. ValueError if there is none.

    With as many results as there are it is the template that joins them.
    """
    at = whole.rfind(anchor)
    start = whole.find(self._stop, at)
    if at < 0 or start < 0:
      raise ValueError(
        'chat template: the assistant message is not there, or not ended'
      )
    return whole[start:]

  def _between(self, shape: probe.Shape, n: int) -> str:
    """The text from the end token of a turn of `n` calls to the next turn."""
    messages = [probe.message('user', probe.TEXT), *probe.turn(shape, n)]
    return self._cut(self._render(messages, (probe.ANY,)), probe.ANCHOR)

  def _works(self, shape: probe.Shape) -> bool:
    """Whether the template renders the results of a turn of this shape, in order.

    It may refuse two in one turn (another shape is tried then), not lose one.
    """
    if shape[0] != 'user' and not self._chat.takes_results:
      return False
    for n in (1, 2):
      try:
        between = self._between(shape, n)
      except ValueError:
        return n == 2
      found = [between.find(text) for text in probe.RESULTS[:n]]
      if -1 in found or found != sorted(found):
        return False
    return True

  def _rewrites(self, shape: probe.Shape) -> str:
    """What the template does to earlier turns when it renders a later one."""
    opening = [probe.message('user', probe.TEXT)]
    turn = probe.turn(shape, 1)
    thought = f'{tokenizer.THINK}\nthought\n{tokenizer.THINK_END}\n\n{probe.ANCHOR}'
    thinking = [{**turn[0], 'content': thought}, *turn[1:]]
    before = self._render(opening, (probe.ANY,))
    try:
      later = self._render([*opening, *thinking], (probe.ANY,))
    except ValueError as e:
      return f'it takes no thought beside calls ({e})'
    # What an opened thought adds to the opening is not part of a turn that is past.
    if not later.startswith(before.rstrip().removesuffix(tokenizer.THINK)):
      return 'it changes what stands before an earlier turn'
    return '' if '\nthought\n' in later else 'it drops the thoughts of earlier turns'

  @functools.cached_property
  def _frames(self) -> tuple[re.Pattern[str], re.Pattern[str], list[int], list[int]]:
    """What stands before and between results, the ids after the last, and those that
    follow the same ids after any other."""
    encode = self._tok.encode_markup
    for shape in self._shapes:
      try:
        text = self._between(shape, 2)
      except ValueError:
        continue
      before, _, rest = text.removeprefix(self._stop).partition(probe.RESULTS[0])
      middle, _, after = rest.partition(probe.RESULTS[1])
      more = middle.removeprefix(after) if middle.startswith(after) else ''
      return probe.pattern(before), probe.pattern(middle), encode(after), encode(more)
    # One result a turn is all that this template takes.
    text = self._between(self._shapes[0], 1)
    before, _, after = text.removeprefix(self._stop).partition(probe.RESULTS[0])
    return probe.pattern(before), re.compile('(?!)'), encode(after), []

  def _split(self, text: str) -> list[tuple[str, str]]:
    before, middle, _, _ = self._frames
    head = before.match(text)
    if not head:
      return [('tool', text)]
    return [('tool', part) for part in middle.split(text[head.end() :])]


def _strings(*values: object) -> str:
  """Every character of what is JSON."""
  return json.dumps(values, ensure_ascii=False)
