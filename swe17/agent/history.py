"""OpenAI's messages <-> what a chat template and a format take, at this one edge.

In: arguments that are JSON strings become mappings (invalid ones stay as they are), and
every text that is not ours is guarded, so that what it says stays text. A template that
lacks something (tools, calls, results, a system message) is told it in words.

Out: what a turn says, as the assistant's message that a client is given. A call that
does not parse stays in the content as it was written: it is the client's to judge.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import re
from typing import Any

from swe17.agent import syntax, template, tokenizer, tools

Guard = Callable[[str], str]
Tool = Mapping[str, Any]  # as OpenAI's API describes it
RESULT, RESULT_END = '<tool_response>', '</tool_response>'
_INDEX = re.compile(r'_(\d{1,4})$')
_OURS = re.compile(r'call_[0-9a-f]{18}_\d{1,4}$')


@dataclasses.dataclass(frozen=True)
class Marks:
  """What a reader of an unfinished turn must know of its format.

  Attributes:
    opens: texts of which one opens every call.
    bare: a turn that begins with a brace may be a call.
    inside: whether a turn begins inside a thought that its prompt opened; None: where
      it holds the end of one.
  """

  opens: tuple[str, ...]
  bare: bool = False
  inside: bool | None = False


def mapped(messages: Sequence[template.Message]) -> list[template.Message]:
  """The messages with arguments as mappings, where the strings hold an object.

  A content of text parts becomes one text.
  """
  made = []
  for message in messages:
    content = message.get('content')
    if isinstance(content, list):
      message = {**message, 'content': ''.join(part['text'] for part in content)}
    calls = message.get('tool_calls')
    if calls:
      calls = [
        {
          **call,
          'function': {
            **call['function'],
            'arguments': _shallow_enough(call['function']['arguments']),
          },
        }
        for call in calls
      ]
      message = {**message, 'tool_calls': calls}
    made.append(message)
  return made


def _shallow_enough(arguments: Any) -> Any:
  found = template.mapping_of(arguments)
  try:
    json.dumps(guarded(found, str))
  except RecursionError:  # deeper than what is done with it can go
    return arguments
  return found


def guarded(value: Any, guard: Guard) -> Any:
  """JSON with every string in it guarded, keys too."""
  if isinstance(value, str):
    return guard(value)
  if isinstance(value, Mapping):
    return {guard(str(k)): guarded(v, guard) for k, v in value.items()}
  if isinstance(value, list | tuple):
    return [guarded(each, guard) for each in value]
  return value


def guard_message(message: template.Message, guard: Guard) -> template.Message:
  """A message whose texts are guarded, but for the tags of the thought it opens with.

  Templates look for these: they are the model's own.
  """
  made = guarded({k: v for k, v in message.items() if k != 'role'}, guard)
  content = message.get('content') or ''
  closed = tokenizer.THINK_END in content and bool(tools.thought(content)[0])
  if message['role'] == 'assistant' and closed:
    before, begin, rest = content.partition(tokenizer.THINK)
    inside, end, after = rest.partition(tokenizer.THINK_END)
    made['content'] = before + begin + guard(inside) + end + guard(after)
  return {'role': message['role'], **made}


def written(
  messages: Sequence[template.Message], way: syntax.Syntax
) -> list[template.Message]:
  """Calls as text of the content, for a template that knows no (or not these) calls."""
  made = []
  for message in messages:
    calls = message.get('tool_calls')
    if calls:
      texts = [_write(call['function'], i, way) for i, call in enumerate(calls)]
      said = [message.get('content') or '', *texts]
      rest = {k: v for k, v in message.items() if k != 'tool_calls'}
      message = {**rest, 'content': '\n'.join(text for text in said if text)}
    made.append(message)
  return made


def _write(function: Mapping[str, Any], i: int, way: syntax.Syntax) -> str:
  name, arguments = function['name'], function['arguments']
  if isinstance(arguments, Mapping):
    return way.write(name, arguments, i)
  # What holds no object stands where the object would.
  here = '\N{OBJECT REPLACEMENT CHARACTER}'
  text = way.write(name, {here: 0}, i)
  return text.replace(json.dumps({here: 0}, ensure_ascii=False), arguments, 1)


def folded(messages: Sequence[template.Message]) -> list[template.Message]:
  """Results as text of user messages, and neighbours of one role as one message."""
  made: list[template.Message] = []
  for message in messages:
    if message['role'] == 'tool':
      said = f'{RESULT}\n{message["content"]}\n{RESULT_END}'
      message = {'role': 'user', 'content': said}
    if made and made[-1]['role'] == message['role'] == 'user':
      both = f'{made[-1]["content"]}\n{message["content"]}'
      message = {**message, 'content': both}
      made.pop()
    made.append(message)
  return made


def without_system(messages: Sequence[template.Message]) -> list[template.Message]:
  """System messages as the beginning of the user's next, or as one."""
  made: list[template.Message] = []
  waiting: list[str] = []
  for message in messages:
    if message['role'] == 'system':
      waiting.append(message['content'])
      continue
    if waiting and message['role'] == 'user':
      text = '\n\n'.join([*waiting, message['content']])
      message, waiting = {**message, 'content': text}, []
    made.append(message)
  if waiting:
    made.append({'role': 'user', 'content': '\n\n'.join(waiting)})
  return made


def told(messages: Sequence[template.Message], text: str) -> list[template.Message]:
  """The messages with `text` at the end of the first system message, or as one."""
  if messages and messages[0]['role'] == 'system':
    said = f'{messages[0]["content"]}\n\n{text}'
    return [{**messages[0], 'content': said}, *messages[1:]]
  return [{'role': 'system', 'content': text}, *messages]


def following(
  messages: Sequence[template.Message],
  named: Sequence[tuple[str, str]],
  way: syntax.Syntax,
) -> list[template.Message]:
  """What follows a turn whose calls are `named` (tool, id), tied to them."""
  made = named_as(way, messages)
  n = _results(made, 0)
  return _tied(made[:n], named, ()) + made[n:]


def named_as(
  way: syntax.Syntax, messages: Sequence[template.Message]
) -> list[template.Message]:
  """Results in the order of their calls, with their tool's name and their call's id.

  Ids that `call_id` made become the model's own.
  """
  made, i = list(messages), 0
  while i < len(made):
    calls, i = made[i].get('tool_calls'), i + 1
    if not calls:
      continue
    named = []
    for place, call in enumerate(calls):
      name, own = call['function']['name'], call['id']
      named.append((name, way.call_id(name, place) if _OURS.match(own) else own))
    renamed = [{**c, 'id': own} for c, (_, own) in zip(calls, named, strict=True)]
    made[i - 1] = {**made[i - 1], 'tool_calls': renamed}
    end = _results(made, i)
    made[i:end] = _tied(made[i:end], named, [call['id'] for call in calls])
    i = end
  return made


def _results(messages: Sequence[template.Message], start: int) -> int:
  """Where the results that begin at `start` end."""
  end = start
  while end < len(messages) and messages[end]['role'] == 'tool':
    end += 1
  return end


def _tied(
  results: Sequence[template.Message],
  named: Sequence[tuple[str, str]],
  ids: Sequence[str],
) -> list[template.Message]:
  """By the id of a call, the number at its end, or else by place; each call once."""
  taken: dict[int, template.Message] = {}
  for place, message in enumerate(results):
    given = message.get('tool_call_id', '')
    number = _INDEX.search(given)
    at = int(number[1]) if number else place
    at = ids.index(given) if given in ids else at
    if at >= len(named) or at in taken:
      at = len(named) + place
    else:
      name, own = named[at]
      message = {**message, 'name': name, 'tool_call_id': own}
    taken[at] = message
  return [taken[at] for at in sorted(taken)]


def call_id(salt: str, text: str, i: int) -> str:
  """An id for call `i` of a turn; the number at its end ties results to calls."""
  digest = hashlib.blake2b(f'{salt}\n{text}'.encode('utf-8', 'replace'), digest_size=9)
  return f'call_{digest.hexdigest()}_{i}'


def spoken(
  text: str, parse: Callable[[str], tools.Parsed], *, calls: bool, salt: str
) -> template.Message:
  """The assistant's message of a turn.

  Args:
    text: the turn's, a thought with its opening tag.
    parse: the syntax's.
    calls: whether calls are taken out of the text; without, all of it is content.
    salt: makes ids of equal turns differ.
  """
  thinking, rest = tools.thought(text)
  parsed = parse(text) if calls else tools.Parsed((), thinking, rest)
  good = [call for call in parsed.calls if not call.error]
  if good:
    bad = [call.source for call in parsed.calls if call.error]
    content = '\n'.join(part for part in [parsed.text, *bad] if part)
  elif calls:
    content = rest.strip()
  else:
    content = rest if rest == text else rest.lstrip()
  message: template.Message = {'role': 'assistant', 'content': content}
  if good:
    message['content'] = content or None
    message['tool_calls'] = [
      {
        'id': call_id(salt, text, i),
        'type': 'function',
        'function': {'name': call.name, 'arguments': _arguments(call)},
      }
      for i, call in enumerate(good)
    ]
  if thinking.strip():
    message['reasoning_content'] = thinking.strip()
  return message


def _arguments(call: tools.Call) -> str:
  text = json.dumps(call.arguments, ensure_ascii=False)
  try:
    text.encode()
  except UnicodeEncodeError:  # half a character, which only an escape can spell
    return json.dumps(call.arguments)
  return text


def describe(listed: Sequence[Tool], way: syntax.Syntax) -> str:
  """Tools and how to call them, for templates that do not tell."""
  functions = '\n'.join(
    json.dumps(each['function'], ensure_ascii=False) for each in listed
  )
  return (
    'You have these functions:\n'
    f'<tools>\n{functions}\n</tools>\n'
    f'Call one by writing its name and arguments as JSON:\n{way.example}'
  )
