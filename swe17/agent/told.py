"""When the history that a client sends is the one that it was told.

Histories are equal message by message and value by value, with these liberties, which
clients take, and no others:

  key order; keys that hold null, '', [] or {} are as good as absent
  content may be a list of text parts, which is their concatenation
  of an assistant message only content and tool_calls (id, name, arguments) count, and
  arguments that are JSON are compared as JSON

A history is known by a digest that is extended message by message.
"""

from collections.abc import Mapping, Sequence
import hashlib
import json
from typing import Any

Message = Mapping[str, Any]


def histories(messages: Sequence[Message], tools: Sequence[Message]) -> list[bytes]:
  """Digests of the first 0, 1, 2, ... messages, under these tools."""
  told = [hashlib.blake2b(_json(tools).encode(), digest_size=16).digest()]
  for message in messages:
    told.append(extend(told[-1], message))
  return told


def extend(history: bytes, message: Message) -> bytes:
  text = _json(said(message))
  return hashlib.blake2b(history + text.encode(), digest_size=16).digest()


def said(message: Message) -> dict[str, Any]:
  """What of a message counts; see the module for the liberties."""
  role, content = message.get('role'), _text(message.get('content'))
  calls = message.get('tool_calls') or ()
  if role == 'assistant':
    found = {'role': role, 'content': content, 'tool_calls': [_call(c) for c in calls]}
  else:
    found = {**message, 'content': content}
  return {key: value for key, value in found.items() if value not in _NOTHING}


_NOTHING: tuple[Any, ...] = (None, '', [], {})


def _text(content: Any) -> Any:
  """Text parts as one text; anything else as it is."""
  if not isinstance(content, list | tuple):
    return content
  texts: list[str] = []
  for part in content:
    text = part.get('text') if isinstance(part, Mapping) else None
    if not isinstance(text, str) or part.get('type') != 'text':
      return content
    texts.append(text)
  return ''.join(texts)


def _call(call: Any) -> Any:
  """(id, name, arguments) of a call; what is none stands for itself."""
  function = call.get('function') if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping):
    return call
  arguments = function.get('arguments')
  if isinstance(arguments, str):
    try:
      arguments = {'json': _json(json.loads(arguments))}
    except (ValueError, RecursionError):  # not JSON: the text itself counts
      arguments = {'text': arguments}
  else:
    arguments = {'json': _json(arguments)}
  return [call.get('id'), function.get('name'), arguments]


def _json(value: Any) -> str:
  try:
    return json.dumps(value, sort_keys=True, separators=(',', ':'))
  except RecursionError as e:
    raise ValueError('messages: nested too deeply') from e
