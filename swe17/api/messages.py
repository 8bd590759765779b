"""OpenAI's messages and tools, checked and in one form.

  {'role', 'content': text or None, 'tool_calls': [{'id', 'type', 'function': {'name',
   'arguments': the string as it came}}], 'tool_call_id', 'name', 'reasoning_content'}

Only what was given stands in a message. A content of text parts becomes one text;
`developer` is the newer name of `system`.
"""

from collections.abc import Mapping
import json
from typing import Any

from swe17.api import errors

Message = dict[str, Any]
_ROLES = {'system', 'user', 'assistant', 'tool'}
_MAX_MESSAGES, _MAX_TOOLS, _MAX_CALLS = 16_384, 512, 512
_MAX_DEPTH = 64  # of a tool's schema
_TEXTS = ('name', 'tool_call_id', 'reasoning_content')


def read(value: Any) -> tuple[Message, ...]:
  """Messages of a request in one form. `errors.Refused` names the place."""
  if not isinstance(value, list) or not 0 < len(value) <= _MAX_MESSAGES:
    errors.refuse('messages', value, f'a list of 1 to {_MAX_MESSAGES} messages')
  return tuple(_message(each, f'messages[{i}]') for i, each in enumerate(value))


def tools(value: Any) -> tuple[Mapping[str, Any], ...]:
  """Tools of a request, as they came. `errors.Refused` names the place."""
  if value is None:
    return ()
  if not isinstance(value, list) or len(value) > _MAX_TOOLS:
    errors.refuse('tools', value, f'a list of up to {_MAX_TOOLS} tools')
  for i, tool in enumerate(value):
    at = f'tools[{i}]'
    if not isinstance(tool, dict) or tool.get('type') != 'function':
      errors.refuse(at, tool, "an object of the type 'function'")
    function = tool.get('function')
    if not isinstance(function, dict):
      errors.refuse(f'{at}.function', function, 'an object')
    _text(function, 'name', f'{at}.function')
    parameters = function.get('parameters')
    if parameters is not None and not isinstance(parameters, dict):
      errors.refuse(f'{at}.function.parameters', parameters, 'an object')
    if not _shallow(tool, _MAX_DEPTH):
      errors.refuse(at, tool, f'no more than {_MAX_DEPTH} levels')
    if not is_unicode(json.dumps(tool, ensure_ascii=False)):
      errors.refuse(at, tool, 'text that UTF-8 can write')
  return tuple(value)


def is_unicode(text: str) -> bool:
  """Whether UTF-8 can write it: JSON's escapes can spell half a character."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return True


def _message(given: Any, at: str) -> Message:
  if not isinstance(given, dict):
    errors.refuse(at, given, 'an object')
  role = given.get('role')
  role = 'system' if role == 'developer' else role
  if not isinstance(role, str) or role not in _ROLES:
    errors.refuse(f'{at}.role', role, f'one of {", ".join(sorted(_ROLES))}')
  calls = given.get('tool_calls') if role == 'assistant' else None
  made: Message = {'role': role, 'content': _content(given.get('content'), at)}
  if made['content'] is None and role != 'assistant':
    errors.refuse(f'{at}.content', None, 'text')
  for name in _TEXTS:
    if given.get(name) is not None:
      made[name] = _text(given, name, at)
  if calls:
    if not isinstance(calls, list) or len(calls) > _MAX_CALLS:
      errors.refuse(f'{at}.tool_calls', calls, f'a list of up to {_MAX_CALLS} calls')
    made['tool_calls'] = [
      _call(call, f'{at}.tool_calls[{i}]') for i, call in enumerate(calls)
    ]
  elif made['content'] is None:
    made['content'] = ''
  if role == 'tool' and 'tool_call_id' not in made:
    errors.refuse(f'{at}.tool_call_id', None, 'the id of the call that it answers')
  return made


def _content(value: Any, at: str) -> str | None:
  if value is None or isinstance(value, str):
    return value if value is None else _checked(value, f'{at}.content')
  if not isinstance(value, list):
    errors.refuse(f'{at}.content', value, 'text or a list of text parts')
  parts = []
  for i, part in enumerate(value):
    place = f'{at}.content[{i}]'
    if not isinstance(part, dict):
      errors.refuse(place, part, 'an object')
    kind = part.get('type')
    if not isinstance(kind, str) or kind not in ('text', 'refusal'):
      errors.refuse(f'{place}.type', kind, "'text'")
    parts.append(_text(part, kind, place))
  return ''.join(parts)


def _call(given: Any, at: str) -> dict[str, Any]:
  if not isinstance(given, dict):
    errors.refuse(at, given, 'an object')
  function = given.get('function')
  if given.get('type', 'function') != 'function' or not isinstance(function, dict):
    errors.refuse(at, given, "an object of the type 'function'")
  arguments = function.get('arguments', '')
  if isinstance(arguments, dict):  # what the API forbids, and some agents send
    arguments = json.dumps(arguments, ensure_ascii=False)
  name = _text(function, 'name', f'{at}.function')
  text = _text({'arguments': arguments}, 'arguments', f'{at}.function')
  return {
    'id': _text(given, 'id', at),
    'type': 'function',
    'function': {'name': name, 'arguments': text},
  }


def _text(given: Mapping[str, Any], name: str, at: str) -> str:
  value = given.get(name)
  if not isinstance(value, str):
    errors.refuse(f'{at}.{name}', value, 'a string')
  return _checked(value, f'{at}.{name}')


def _checked(text: str, at: str) -> str:
  if not is_unicode(text):
    raise errors.Refused(f'{at}: half a character, want text that UTF-8 can write', at)
  return text


def _shallow(value: Any, depth: int) -> bool:
  if isinstance(value, dict | list):
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_shallow(each, depth - 1) for each in inner)
  return True
