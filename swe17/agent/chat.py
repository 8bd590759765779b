"""The chat format, by id: what stands between the tokens that a sampler drew.

  <|user|> text <|end|> <|assistant|> turn <|end|>
    {<|tool|> result <|end|>} <|assistant|> turn <|end|> ...
  turn = [<think> ... </think>] [text] {<tool_call> JSON </tool_call>}

A context is only ever extended. A turn enters it as the very ids that were served, and
the rest is made here: no sampled text is encoded again, and the trained tokens are
exactly the sampled ones.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from swe17.agent import tokenizer


def open_prompt(tok: tokenizer.Tokenizer, user_text: str) -> list[int]:
  """Ids of a context up to where the first turn begins."""
  return [tok.user, *tok.encode(user_text), tok.end, tok.assistant]


def close_turn(tok: tokenizer.Tokenizer, sampled: Sequence[int]) -> list[int]:
  """The glue after a turn: the end token if the sampler was cut before drawing it."""
  return [] if len(sampled) > 0 and sampled[-1] == tok.end else [tok.end]


def tool_results(tok: tokenizer.Tokenizer, texts: Sequence[str]) -> list[int]:
  """Ids of the results of a turn's calls, in call order, up to the next turn."""
  ids: list[int] = []
  for text in texts:
    ids += [tok.tool, *tok.encode(text), tok.end]
  return [*ids, tok.assistant]


def stop_ids(tok: tokenizer.Tokenizer) -> tuple[int, ...]:
  """What a sampler stops at; the drawn one is part of the turn."""
  return (tok.end,)


def call(tok: tokenizer.Tokenizer, name: str, **arguments: int | str) -> list[int]:
  """Ids of one call. Values are plain text, whatever markup they seem to hold."""
  return write(tok, name, arguments)


def write(
  tok: tokenizer.Tokenizer, name: str, arguments: Mapping[str, Any] | str
) -> list[int]:
  """Ids of one call of any tool; arguments that are no object stand as they are."""
  if isinstance(arguments, str) or '<' in ''.join([name, *arguments]):
    given = arguments if isinstance(arguments, str) else _json(arguments)
    body = f'{{"name": {_json(name)}, "arguments": {given}}}'
    return [tok.call, *tok.encode(body), tok.call_end]
  ids: list[int] = []
  frame = f'{tokenizer.CALL}{{"name": {_json(name)}, "arguments": {{'
  for i, (key, value) in enumerate(arguments.items()):
    frame += f'{", " if i else ""}{_json(key)}: '
    written = _json(value)
    if isinstance(value, str):
      frame, written = frame + '"', written[1:-1]
    ids += [*tok.encode_markup(frame), *tok.encode(written)]
    frame = '"' if isinstance(value, str) else ''
  return [*ids, *tok.encode_markup(frame + '}}' + tokenizer.CALL_END)]


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


def written(
  tok: tokenizer.Tokenizer, history: Sequence[Mapping[str, Any]]
) -> list[int]:
  """Ids of whole messages in OpenAI's form, up to where the next turn begins.

  What a system message says begins the user's next one: this format has no such role.
  """
  ids: list[int] = []
  system: list[str] = []
  for message in history:
    role, content = message['role'], message.get('content') or ''
    if role == 'system':
      system.append(content)
      continue
    if role == 'assistant':
      ids += [tok.assistant, *_turn(tok, message), tok.end]
      continue
    if role == 'user':
      content, system = '\n\n'.join([*system, content]), []
    ids += [tok.user if role == 'user' else tok.tool, *tok.encode(content), tok.end]
  if system:
    ids += [tok.user, *tok.encode('\n\n'.join(system)), tok.end]
  return [*ids, tok.assistant]


def _turn(tok: tokenizer.Tokenizer, message: Mapping[str, Any]) -> list[int]:
  ids: list[int] = []
  if message.get('reasoning_content'):
    ids = [tok.think, *tok.encode(message['reasoning_content']), tok.think_end]
  ids += tok.encode(message.get('content') or '')
  for each in message.get('tool_calls') or ():
    ids += write(tok, each['function']['name'], each['function']['arguments'])
  return ids


def messages(tok: tokenizer.Tokenizer, ids: Sequence[int]) -> list[tuple[str, str]]:
  """Splits a context into (role, text), role 'user', 'assistant' or 'tool'.

  A last message that has not begun is left out. ValueError if one opens with no role.
  """
  roles = {tok.user: 'user', tok.assistant: 'assistant', tok.tool: 'tool'}
  found: list[tuple[str, str]] = []
  role, start = '', 0
  for i, token in enumerate([*ids, -1]):
    if role and token in (tok.end, -1):
      if start < i or token == tok.end:
        found.append((role, tok.decode(ids[start:i])))
      role = ''
    elif not role and token != -1:
      if token not in roles:
        raise ValueError(f'context: got id {token} at {i}, want a role')
      role, start = roles[token], i + 1
  return found
