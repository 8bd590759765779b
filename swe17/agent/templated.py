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

from collections.abc import Sequence
import functools
import json
import re

from swe17.agent import hf_tokenizer, syntax, template, tokenizer, tools
from swe17.env import base

_RESULT, _RESULT_END = '<tool_response>', '</tool_response>'
# What is rendered to learn from it.
_TEXT, _ANCHOR, _RESULTS = 'text', chr(0x10FFFD), ('first-result', 'second-result')
_ANY = base.Tool('act', 'Do something.', {'at': 'str'}, writes=False)
# A turn of calls, as templates take it: (its messages, content). Tried in this order;
# with content a template may leave the calls out.
_SHAPES = (('calls', None), ('calls', _ANCHOR), ('one', None), ('one', _ANCHOR))
_SHAPES += (('user', _ANCHOR),)

# (tool, id of its call) of each; found again in what stands around their results.
_ACTS = (('first-tool', 'first-call'), ('second-tool', 'second-call'))

_Shape = tuple[str, str | None]
_Named = Sequence[tuple[str, str]]  # (tool, id of the call)


class Templated:
  """Satisfies `formats.Format`."""

  def __init__(
    self,
    tok: hf_tokenizer.Tokenizer,
    chat: template.Template,
    way: syntax.Syntax,
  ):
    """ValueError if the template does not say what stands between two turns."""
    self._tok, self._chat, self._way = tok, chat, way
    self.vocab_size = tok.vocab_size
    self._system = _takes_system(chat)
    self._opened, self._stop = _frame(chat, tok)
    self.stop_ids = (tok.markup[self._stop],)
    # The template may open the thought itself, of every turn or of the first only.
    self._thinks = self._opened.rstrip().endswith(tokenizer.THINK)
    self.strips = not self._thinks
    self._shapes = [shape for shape in _SHAPES if self._works(shape)]
    if not self._shapes:
      raise ValueError('chat template: it renders no results of tool calls')
    after = self._between(self._shapes[0], _ANCHOR, _ACTS[:1], _RESULTS[:1])
    self._always = self._thinks and after.endswith(self._opened)
    self.rewrites = self._rewrites(self._shapes[0])

  def prompt(self, text: str, tools: Sequence[base.Tool]) -> list[int]:
    _, mark = hf_tokenizer.marks(text, *(tool.description for tool in tools))
    messages, given = self._opening(self._tok.guard(text, mark), tools)
    return self._tok.encode_markup(
      self._chat.render(messages, given, generate=True), mark
    )

  def results(
    self, turn: Sequence[int], calls: Sequence[tools.Call], texts: Sequence[str]
  ) -> list[int]:
    said = [text for call in calls for text in (call.name, call.given)]
    anchor, mark = hf_tokenizer.marks(*texts, *said)
    guarded = [self._tok.guard(text, mark) for text in texts]
    named = [
      (
        self._tok.guard(call.name, mark) or 'unknown',
        self._tok.guard(call.given, mark) or self._way.call_id(call.name, i),
      )
      for i, call in enumerate(calls)
    ]
    text = ''
    for shape in self._shapes:
      try:
        text = self._between(shape, anchor, named, guarded)
        break
      except ValueError:
        continue  # e.g. several calls in a turn: the next shape has one
    if not text:
      raise ValueError(f'chat template: it does not take {len(texts)} results')
    ids = self._tok.encode_markup(text, mark)
    ended = len(turn) > 0 and turn[-1] in self.stop_ids
    return ids[1:] if ended else ids

  def parse(self, turn: Sequence[int]) -> tools.Parsed:
    ended = len(turn) > 0 and turn[-1] in self.stop_ids
    return self.read(self._tok.decode(turn[:-1] if ended else turn))

  def read(self, text: str) -> tools.Parsed:
    return self._way.parse(tokenizer.THINK + text if self._inside(text) else text)

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
      start = _find(ids, opened, at)
      # Where nothing opens a turn, what ends a result may be followed by another.
      while again and ids[start + len(opened) :][: len(again)] == again:
        start = _find(ids, opened, start + len(opened))
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

  def _opening(
    self, text: str, tools: Sequence[base.Tool]
  ) -> tuple[list[template.Message], Sequence[base.Tool]]:
    """The first messages, and the tools that the template is to describe itself."""
    if self._chat.takes_tools:
      return [_message('user', text)], tools
    if not self._system:
      return [_message('user', f'{describe(tools, self._way)}\n\n{text}')], ()
    return [_message('system', describe(tools, self._way)), _message('user', text)], ()

  def _between(
    self, shape: _Shape, anchor: str, named: _Named, texts: Sequence[str]
  ) -> str:
    """The text from a turn's end token to the next turn. ValueError if there is none.

    With as many results as there are it is the template that joins them.
    """
    messages, given = self._opening(_TEXT, (_ANY,))
    messages += _turn(shape, anchor, named, texts)
    whole = self._chat.render(messages, given, generate=True)
    at = whole.rfind(anchor)
    start = whole.find(self._stop, at)
    if at < 0 or start < 0:
      raise ValueError(
        'chat template: the assistant message is not there, or not ended'
      )
    return whole[start:]

  def _works(self, shape: _Shape) -> bool:
    """Whether the template renders the results of a turn of this shape, in order.

    It may refuse two in one turn (another shape is tried then), not lose one.
    """
    if shape[0] != 'user' and not self._chat.takes_results:
      return False
    for n in (1, 2):
      try:
        between = self._between(shape, _ANCHOR, _ACTS[:n], _RESULTS[:n])
      except ValueError:
        return n == 2
      found = [between.find(text) for text in _RESULTS[:n]]
      if -1 in found or found != sorted(found):
        return False
    return True

  def _rewrites(self, shape: _Shape) -> str:
    """What the template does to earlier turns when it renders a later one."""
    opening, given = self._opening(_TEXT, (_ANY,))
    turn = _turn(shape, _ANCHOR, _ACTS[:1], _RESULTS[:1])
    thought = f'{tokenizer.THINK}\nthought\n{tokenizer.THINK_END}\n\n{_ANCHOR}'
    thinking = [{**turn[0], 'content': thought}, *turn[1:]]
    before = self._chat.render(opening, given, generate=True)
    try:
      later = self._chat.render([*opening, *thinking], given, generate=True)
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
        text = self._between(shape, _ANCHOR, _ACTS, _RESULTS)
      except ValueError:
        continue
      before, _, rest = text.removeprefix(self._stop).partition(_RESULTS[0])
      middle, _, after = rest.partition(_RESULTS[1])
      more = middle.removeprefix(after) if middle.startswith(after) else ''
      return _pattern(before), _pattern(middle), encode(after), encode(more)
    # One result a turn is all that this template takes.
    text = self._between(self._shapes[0], _ANCHOR, _ACTS[:1], _RESULTS[:1])
    before, _, after = text.removeprefix(self._stop).partition(_RESULTS[0])
    return _pattern(before), re.compile('(?!)'), encode(after), []

  def _split(self, text: str) -> list[tuple[str, str]]:
    before, middle, _, _ = self._frames
    head = before.match(text)
    if not head:
      return [('tool', text)]
    return [('tool', part) for part in middle.split(text[head.end() :])]


def describe(tools: Sequence[base.Tool], way: syntax.Syntax) -> str:
  """Tools and how to call them, for templates that do not tell."""
  functions = [template.schema(tool)['function'] for tool in tools]
  listed = '\n'.join(json.dumps(each, ensure_ascii=False) for each in functions)
  return (
    'You have these functions:\n'
    f'<tools>\n{listed}\n</tools>\n'
    f'Call one by writing its name and arguments as JSON:\n{way.example}'
  )


def _message(role: str, content: str | None, **rest: object) -> template.Message:
  return {'role': role, 'content': content, **rest}


def _turn(
  shape: _Shape, anchor: str, named: _Named, texts: Sequence[str]
) -> list[template.Message]:
  """An assistant message that holds `anchor`, and results after it."""
  kind, content = shape
  if kind == 'user':
    results = '\n'.join(f'{_RESULT}\n{text}\n{_RESULT_END}' for text in texts)
    return [_message('assistant', anchor), _message('user', results)]
  calls = [
    {
      'id': call_id,
      'type': 'function',
      'function': {'name': name, 'arguments': {'at': anchor}},
    }
    for name, call_id in (named if kind == 'calls' else named[:1])
  ]
  results = [
    _message('tool', text, name=name, tool_call_id=call_id)
    for (name, call_id), text in zip(named, texts, strict=True)
  ]
  said = None if content is None else anchor
  return [_message('assistant', said, tool_calls=calls), *results]


def _takes_system(chat: template.Template) -> bool:
  messages = [_message('system', _ANCHOR), _message('user', _TEXT)]
  try:
    return _ANCHOR in chat.render(messages)
  except ValueError:
    return False


def _frame(chat: template.Template, tok: hf_tokenizer.Tokenizer) -> tuple[str, str]:
  """(what opens a turn, the added token that ends one). ValueError without them."""
  user = [_message('user', _TEXT)]
  before, after = chat.render(user), chat.render(user, generate=True)
  if not after.startswith(before):
    raise ValueError('chat template: opening a turn changes what stands before it')
  opened = after[len(before) :]
  if not tok.first_markup(opened):
    raise ValueError(
      f'chat template: no added token is in what opens a turn, {opened!r}'
    )
  whole = chat.render([*user, _message('assistant', _ANCHOR)])
  stop = tok.first_markup(whole[whole.rfind(_ANCHOR) + 1 :])
  if _ANCHOR not in whole or not stop:
    raise ValueError('chat template: no added token ends an assistant message')
  return opened, stop


def _pattern(text: str) -> re.Pattern[str]:
  """`text`, with anything in the places of tools and calls."""
  pattern = re.escape(text)
  for name in (part for act in _ACTS for part in act):
    pattern = pattern.replace(re.escape(name), r'[^\n]*?')
  return re.compile(pattern)


def _find(ids: Sequence[int], part: Sequence[int], at: int) -> int:
  """Where `part` begins in `ids` from `at` on; the end if it does not."""
  n = len(part)
  places = range(at, len(ids) - n + 1)
  return next((i for i in places if ids[i : i + n] == part), len(ids))
