"""Tool calls: out of a turn's text, checked, and run.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. JSON is read by a
JSON decoder from each opening tag, never by matching braces or the next closing tag, so
a string may hold either. A bad call becomes a `Call` with an error and takes no other
with it; nothing here raises on what a model wrote, and time is linear in its length.
Other models put other tags around a call (syntax.py).
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import re
from typing import Any, NoReturn

from swe17.agent import tokenizer
from swe17.env import base

CUT = 'cut'  # the error of a call that has no closing tag
_TYPES = {'int': int, 'str': str}
_SPACE = re.compile(r'[ \t\r\n]*')
_LOOKAHEAD = 16  # longer than any literal or escape


@dataclasses.dataclass(frozen=True)
class Call:
  """One call of a turn. `error` is empty or says why it cannot run."""

  id: str  # 'c0', 'c1', ... in the order of the turn
  name: str
  arguments: Mapping[str, Any]
  error: str = ''
  given: str = ''  # the id that the model itself gave it, where its syntax has one
  source: str = dataclasses.field(default='', compare=False)  # text, if it has an error


@dataclasses.dataclass(frozen=True)
class Parsed:
  """A turn: its calls, its thought, and what is left."""

  calls: tuple[Call, ...]
  thinking: str
  text: str


@dataclasses.dataclass(frozen=True)
class Result:
  """The one answer to a call."""

  id: str  # the call's
  text: str
  ran: bool  # False: refused or malformed, the environment never saw it


@dataclasses.dataclass(frozen=True)
class Tags:
  """What stands around a call, and what reads what is between.

  Attributes:
    open: begins a call.
    close: ends it.
    read: (text, place after `open`) -> ({'name', 'arguments'}, end, error), as
      `read_object`.
    ids: what `read` gives has the model's own 'id' too.
  """

  open: str
  close: str
  read: Callable[[str, int], tuple[Any, int, str]]
  ids: bool = False


def parse(text: str, tags: Tags | None = None) -> Parsed:
  """Splits one assistant turn. Never raises; a thought left open holds all the rest."""
  tags = tags or Tags(tokenizer.CALL, tokenizer.CALL_END, read_object)
  thinking, text = thought(text)
  calls: list[Call] = []
  rest: list[str] = []
  at, close = 0, -1
  while (start := text.find(tags.open, at)) >= 0:
    rest.append(text[at:start])
    begin = start + len(tags.open)
    value, end, error = tags.read(text, begin)
    if not error and text.startswith(tags.close, end):
      at = end + len(tags.close)
      given = value.pop('id') if tags.ids else ''
      made = call_of(len(calls), value)
      source = text[start:at] if made.error else ''
      calls.append(dataclasses.replace(made, given=given, source=source))
      continue
    # Go on after the closing tag, or at the next opening one where that comes first.
    # `close` is kept: a turn of nothing but opening tags must stay linear.
    close = close if close >= end else _find(text, tags.close, end)
    at = _find(text, tags.open, end)
    if close < at:
      at = close + len(tags.close)
      error = error or 'text after the JSON object'
    else:
      error = CUT if at == len(text) else error or 'no closing tag'
    calls.append(Call(f'c{len(calls)}', '', {}, error, source=text[start:at]))
  rest.append(text[at:])
  return Parsed(tuple(calls), thinking, ''.join(rest).strip())


def check(call: Call, tools: Sequence[base.Tool]) -> Call:
  """The call, with an error if no tool takes it as it stands."""
  if call.error:
    return call
  tool = next((tool for tool in tools if tool.name == call.name), None)
  if tool is None:
    return dataclasses.replace(call, error=f'unknown tool {call.name[:40]!r}')
  for name, kind in tool.parameters.items():
    if name not in call.arguments:
      return dataclasses.replace(call, error=f'{tool.name}: missing argument {name!r}')
    # Not isinstance: true and false are no numbers.
    if type(call.arguments[name]) is not _TYPES[kind]:
      return dataclasses.replace(call, error=f'{tool.name}: {name} must be {kind}')
    if not _is_unicode(call.arguments[name]):
      return dataclasses.replace(call, error=f'{tool.name}: {name} is not valid text')
  extra = [name for name in call.arguments if name not in tool.parameters]
  if extra:
    error = f'{tool.name}: unexpected argument {extra[0][:40]!r}'
    return dataclasses.replace(call, error=error)
  return call


async def execute(
  calls: Sequence[Call],
  env: base.Env,
  *,
  max_calls: int,
  call_seconds: float | None = None,
) -> list[Result]:
  """Runs checked calls; one result each, in call order, whenever they finish.

  Calls take effect in program order: one that writes waits for all before it and holds
  up all after it; those that only read run side by side in between. A call with an
  error, beyond `max_calls`, or after the episode ended is answered and not run. One
  that takes longer than `call_seconds` is answered so and leaves the others alone.
  What the environment raises is raised once the calls beside it have ended.
  """
  writes = {tool.name for tool in env.tools if tool.writes}
  results: dict[str, Result] = {}
  runnable: list[Call] = []
  for i, call in enumerate(calls):
    if call.error:
      results[call.id] = Result(call.id, f'error: {call.error}', False)
    elif i >= max_calls:
      text = f'not run: more than {max_calls} calls in a turn'
      results[call.id] = Result(call.id, text, False)
    else:
      runnable.append(call)
  for batch in _batches(runnable, writes):
    if env.done:
      for call in batch:
        results[call.id] = Result(call.id, 'not run: already submitted', False)
      continue
    done = await asyncio.gather(
      *(_step(call, env, call_seconds) for call in batch), return_exceptions=True
    )
    for result in done:
      if isinstance(result, BaseException):
        raise result
      results[result.id] = result
  return [results[call.id] for call in calls]


def _batches(calls: Sequence[Call], writes: set[str]) -> list[list[Call]]:
  """Neighbours that only read form one batch; every write is a batch of its own."""
  batches: list[list[Call]] = []
  for call in calls:
    after_read = batches and batches[-1][-1].name not in writes
    if call.name not in writes and after_read:
      batches[-1].append(call)
    else:
      batches.append([call])
  return batches


async def _step(call: Call, env: base.Env, seconds: float | None) -> Result:
  limit = asyncio.timeout(seconds)
  try:
    async with limit:
      return Result(call.id, await env.step(call.name, call.arguments), True)
  except TimeoutError:
    if not limit.expired():  # the environment's own: not the call's fault
      raise
    return Result(call.id, f'timed out after {seconds:g} s', True)


def thought(text: str) -> tuple[str, str]:
  """(thought, rest) of a turn; only what a turn opens with is its thought."""
  start = text.lstrip()
  if not start.startswith(tokenizer.THINK):
    return '', text
  thought, _, rest = start[len(tokenizer.THINK) :].partition(tokenizer.THINK_END)
  return thought, rest


def read_object(text: str, at: int) -> tuple[Any, int, str]:
  """(object, end, error) of the JSON object that begins at `at`; `at` on an error."""
  value, end, error, _ = scan_object(text, at)
  return value, end, error


def scan_object(text: str, at: int) -> tuple[Any, int, str, bool]:
  """As `read_object`, and whether the text ended before the object did.

  The decoder gets a window that grows while it may be what cut the object short: its
  errors count lines from the start of what it was given, which over a whole turn of bad
  calls would be quadratic.
  """
  start, size = skip_space(text, at), 256
  if not text.startswith('{', start):
    return None, at, 'want a JSON object', False
  while True:
    window = text[start : start + size]
    try:
      value, end = _DECODER.raw_decode(window)
      return value, skip_space(text, start + end), '', False
    except RecursionError:
      return None, at, 'invalid JSON: nested too deeply', False
    except json.JSONDecodeError as e:
      unended = e.msg.startswith('Unterminated')
      inside = e.pos < len(window) - _LOOKAHEAD and not unended
      if inside or start + size >= len(text):
        out = start + size >= len(text) and (unended or e.pos >= len(window))
        return None, at, f'invalid JSON: {e.msg}', out
    except ValueError as e:  # a number of more digits than Python reads, or a constant
      return None, at, f'invalid JSON: {e}', False
    size *= 4


def skip_space(text: str, at: int) -> int:
  space = _SPACE.match(text, at)
  return space.end() if space else at


def _refuse_constant(name: str) -> NoReturn:
  raise ValueError(f'{name} is not JSON')


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _find(text: str, tag: str, at: int) -> int:
  found = text.find(tag, at)
  return found if found >= 0 else len(text)


def call_of(i: int, value: dict[str, Any]) -> Call:
  """The one internal form of a call, or the same with what is wrong with it."""
  name, arguments = value.get('name'), value.get('arguments')
  if not isinstance(name, str):
    return Call(f'c{i}', '', {}, 'want "name", a string')
  if not isinstance(arguments, dict):
    return Call(f'c{i}', name, {}, 'want "arguments", an object')
  extra = [key for key in value if key not in ('name', 'arguments')]
  error = f'unexpected key {extra[0][:40]!r}' if extra else ''
  return Call(f'c{i}', name, arguments, error)


def _is_unicode(value: Any) -> bool:
  """Whether text can be written as UTF-8: JSON escapes can spell half a character."""
  try:
    str(value).encode()
  except UnicodeEncodeError:
    return False
  return True
