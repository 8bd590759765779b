"""What is learnt of a chat template by rendering: no conversation of anybody's.

The questions are put with texts of our own: an anchor that no template holds, two tools
and two results whose places are looked for in what comes out.
"""

from collections.abc import Sequence
import re

from swe17.agent import hf_tokenizer, history, template
from swe17.env import base

TEXT, ANCHOR, RESULTS = 'text', chr(0x10FFFD), ('first-result', 'second-result')
ANY = template.schema(base.Tool('act', 'Do something.', {'at': 'str'}, writes=False))
# A turn of calls, as templates take it: (its messages, content). Tried in this order;
# with content a template may leave the calls out.
SHAPES = (('calls', None), ('calls', ANCHOR), ('one', None), ('one', ANCHOR))
SHAPES += (('user', ANCHOR),)
# (tool, id of its call) of each; found again in what stands around their results.
ACTS = (('first-tool', 'first-call'), ('second-tool', 'second-call'))

Shape = tuple[str, str | None]
Named = Sequence[tuple[str, str]]  # (tool, id of the call)


def message(role: str, content: str | None, **rest: object) -> template.Message:
  return {'role': role, 'content': content, **rest}


def asks(shape: Shape, anchor: str, named: Named) -> template.Message:
  """An assistant message that holds `anchor`."""
  kind, content = shape
  if kind == 'user':
    return message('assistant', anchor)
  calls = [
    {
      'id': call_id,
      'type': 'function',
      'function': {'name': name, 'arguments': {'at': anchor}},
    }
    for name, call_id in (named if kind == 'calls' else named[:1])
  ]
  return message('assistant', None if content is None else anchor, tool_calls=calls)


def turn(shape: Shape, n: int) -> list[template.Message]:
  """An assistant message of `n` calls that holds the anchor, and their results."""
  results = [
    message('tool', text, name=name, tool_call_id=call_id)
    for (name, call_id), text in zip(ACTS[:n], RESULTS[:n], strict=True)
  ]
  follow = history.folded(results) if shape[0] == 'user' else results
  return [asks(shape, ANCHOR, ACTS[:n]), *follow]


def takes_system(chat: template.Template) -> bool:
  messages = [message('system', ANCHOR), message('user', TEXT)]
  try:
    return ANCHOR in chat.render(messages)
  except ValueError:
    return False


def takes_content(chat: template.Template) -> bool:
  """Whether it renders what an assistant says beside a call."""
  said = asks(('calls', ANCHOR), 'at', ACTS[:1])
  said['content'] = ANCHOR
  try:
    text = chat.render([message('user', TEXT), said], (ANY,))
  except ValueError:
    return False
  return ANCHOR in text and ACTS[0][0] in text


def frame(chat: template.Template, tok: hf_tokenizer.Tokenizer) -> tuple[str, str]:
  """(what opens a turn, the added token that ends one). ValueError without them."""
  user = [message('user', TEXT)]
  before, after = chat.render(user), chat.render(user, generate=True)
  if not after.startswith(before):
    raise ValueError('chat template: opening a turn changes what stands before it')
  opened = after[len(before) :]
  if not tok.first_markup(opened):
    raise ValueError(
      f'chat template: no added token is in what opens a turn, {opened!r}'
    )
  whole = chat.render([*user, message('assistant', ANCHOR)])
  stop = tok.first_markup(whole[whole.rfind(ANCHOR) + 1 :])
  if ANCHOR not in whole or not stop:
    raise ValueError('chat template: no added token ends an assistant message')
  return opened, stop


def pattern(text: str) -> re.Pattern[str]:
  """`text`, with anything in the places of tools and calls."""
  pattern = re.escape(text)
  for name in (part for act in ACTS for part in act):
    pattern = pattern.replace(re.escape(name), r'[^\n]*?')
  return re.compile(pattern)


def find(ids: Sequence[int], part: Sequence[int], at: int) -> int:
  """Where `part` begins in `ids` from `at` on; the end if it does not."""
  n = len(part)
  places = range(at, len(ids) - n + 1)
  return next((i for i in places if ids[i : i + n] == part), len(ids))
