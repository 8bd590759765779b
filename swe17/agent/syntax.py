"""How models write tool calls: Hermes and Qwen, Llama 3, DeepSeek, Kimi-K2.

  hermes    <tool_call>{"name": n, "arguments": {..}}</tool_call> ...
  llama     [<|python_tag|>] {"name": n, "parameters": {..}} [; {..}] ...
  deepseek  <｜tool▁calls▁begin｜> calls <｜tool▁calls▁end｜>, a call being (V3, R1)
            <｜tool▁call▁begin｜>function<｜tool▁sep｜>n
            ```json {..} ```<｜tool▁call▁end｜>
            or (V3.1) <｜tool▁call▁begin｜>n<｜tool▁sep｜>{..}<｜tool▁call▁end｜>
  kimi      <|tool_calls_section_begin|> calls <|tool_calls_section_end|>, a call being
            <|tool_call_begin|>functions.n:i<|tool_call_argument_begin|>{..}
            <|tool_call_end|>

All are read by the scan of tools.py: a JSON decoder from each opening tag, bad calls
named, none dropped for another, time linear in the length of the turn.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import json
import re
from typing import Any

from swe17.agent import tokenizer, tools

PYTHON_TAG = '<|python_tag|>'
_DEEPSEEK = ('<｜tool▁calls▁begin｜>', '<｜tool▁calls▁end｜>')
_DEEPSEEK_CALL, _DEEPSEEK_END = '<｜tool▁call▁begin｜>', '<｜tool▁call▁end｜>'
_SEPARATOR = '<｜tool▁sep｜>'
_KIMI = ('<|tool_calls_section_begin|>', '<|tool_calls_section_end|>')
_KIMI_CALL, _KIMI_END = '<|tool_call_begin|>', '<|tool_call_end|>'
_KIMI_ARGUMENTS = '<|tool_call_argument_begin|>'
_HEADER = 256  # most characters of what stands before a call's arguments
_FENCE = '```'
_KIMI_NAME = re.compile(r'(?:functions\.)?(.*?)(?::\d+)?', re.DOTALL)
# Bounded: the search must stay linear in a turn of nothing but line ends.
_NEXT_LLAMA = re.compile(r'[;\n][ \t]{0,8}(?=\{\s{0,8}"name")')


@dataclasses.dataclass(frozen=True)
class Syntax:
  """One way to write calls.

  Attributes:
    name: of the way.
    parse: a turn's text -> its calls, thought and rest. Never raises.
    write: (tool, arguments, index in the turn) -> the text of one call.
    example: a call, for templates that do not tell the model how to write one.
    call_id: (tool, index in the turn) -> what a result is tied to, where the model gave
      its call no id.
    opens: texts of which one stands before the first call of a turn.
    bare: a turn that begins with a brace may be a call too.
  """

  name: str
  parse: Callable[[str], tools.Parsed]
  write: Callable[[str, Mapping[str, Any], int], str]
  example: str
  call_id: Callable[[str, int], str] = lambda name, i: f'call_{i}'
  opens: tuple[str, ...] = (tokenizer.CALL,)
  bare: bool = False


def choose(markup: Collection[str], template: str) -> Syntax:
  """The way of a model, by its added tokens and its chat template."""
  if _DEEPSEEK_CALL in markup:
    return DEEPSEEK if f'{_FENCE}json' in template else DEEPSEEK_V31
  if _KIMI_CALL in markup:
    return KIMI
  return LLAMA if PYTHON_TAG in markup else HERMES


def _tagged(
  tags: tools.Tags, around: tuple[str, ...] = ()
) -> Callable[[str], tools.Parsed]:
  def parse(text: str) -> tools.Parsed:
    found = tools.parse(text, tags)
    rest = found.text
    for tag in around:
      rest = rest.replace(tag, '')
    return dataclasses.replace(found, text=rest.strip())

  return parse


def _read_deepseek(text: str, at: int) -> tuple[Any, int, str]:
  header, begin = _until(text, at, _SEPARATOR, _DEEPSEEK_CALL, _DEEPSEEK_END)
  if begin < 0:
    return None, at, f'no {_SEPARATOR}'
  start = tools.skip_space(text, begin)
  name, fenced = header, not text.startswith('{', start)
  if fenced:
    name, start = _until(text, begin, _FENCE, _DEEPSEEK_CALL, _DEEPSEEK_END)
    if start < 0:
      return None, at, 'want a JSON object'
    start += len('json') if text.startswith('json', start) else 0
  value, end, error = tools.read_object(text, start)
  if fenced and not error and text.startswith(_FENCE, end):
    end = tools.skip_space(text, end + len(_FENCE))
  return {'name': name.strip(), 'arguments': value}, at if error else end, error


def _read_kimi(text: str, at: int) -> tuple[Any, int, str]:
  header, begin = _until(text, at, _KIMI_ARGUMENTS, _KIMI_CALL, _KIMI_END)
  if begin < 0:
    return None, at, f'no {_KIMI_ARGUMENTS}'
  value, end, error = tools.read_object(text, begin)
  given = header.strip()
  named = _KIMI_NAME.fullmatch(given)
  assert named is not None
  made = {'name': named[1], 'arguments': value, 'id': given}
  return made, at if error else end, error


def _until(text: str, at: int, tag: str, *others: str) -> tuple[str, int]:
  """What stands before the next `tag`, and the place after it; -1 if it is not near.

  Nor may one of `others` stand before it: then it belongs to another call.
  """
  found = text.find(tag, at, at + _HEADER + len(tag))
  header = text[at:found] if found >= 0 else ''
  if found < 0 or any(other in header for other in others):
    return '', -1
  return header, found + len(tag)


def _parse_llama(text: str) -> tools.Parsed:
  """A turn that is a call, or that has one after the tag; else it is text."""
  thinking, text = tools.thought(text)
  before, tag, after = text.partition(PYTHON_TAG)
  body, rest = (after, before) if tag else (text, '')
  at = tools.skip_space(body, 0)
  if not tag and not body.startswith('{', at):
    return tools.Parsed((), thinking, text.strip())
  # A call has no end tag: what ends with a brace was not cut by a limit.
  closed, calls = body.rstrip().endswith('}'), list[tools.Call]()
  while at < len(body):
    value, end, error, out = tools.scan_object(body, at)
    if not error and not tag and not calls and 'name' not in value:
      return tools.Parsed((), thinking, text.strip())  # JSON that is an answer
    if error:
      following = _NEXT_LLAMA.search(body, at + 1)
      end = following.end() if following else len(body)
      cut = out or not (following or closed)
      error, source = tools.CUT if cut else error, body[at:end]
      calls.append(tools.Call(f'c{len(calls)}', '', {}, error, source=source))
    else:
      renamed = {'arguments' if k == 'parameters' else k: v for k, v in value.items()}
      renamed.pop('type', None)
      calls.append(tools.call_of(len(calls), renamed))
    at = tools.skip_space(body, end)
    at = tools.skip_space(body, at + 1) if body.startswith(';', at) else at
    if not body.startswith('{', at):
      rest += body[at:]
      break
  return tools.Parsed(tuple(calls), thinking, rest.strip())


def _json(value: Any) -> str:
  return json.dumps(value, ensure_ascii=False)


def _write_hermes(name: str, arguments: Mapping[str, Any], i: int) -> str:
  call = _json({'name': name, 'arguments': arguments})
  return f'{tokenizer.CALL}\n{call}\n{tokenizer.CALL_END}'


def _write_llama(name: str, arguments: Mapping[str, Any], i: int) -> str:
  return ('; ' if i else '') + _json({'name': name, 'parameters': arguments})


def _write_deepseek(name: str, arguments: Mapping[str, Any], i: int) -> str:
  body = f'function{_SEPARATOR}{name}\n{_FENCE}json\n{_json(arguments)}\n{_FENCE}'
  return f'{_DEEPSEEK[0]}{_DEEPSEEK_CALL}{body}{_DEEPSEEK_END}{_DEEPSEEK[1]}'


def _write_deepseek_v31(name: str, arguments: Mapping[str, Any], i: int) -> str:
  body = f'{name}{_SEPARATOR}{_json(arguments)}'
  return f'{_DEEPSEEK[0]}{_DEEPSEEK_CALL}{body}{_DEEPSEEK_END}{_DEEPSEEK[1]}'


def _write_kimi(name: str, arguments: Mapping[str, Any], i: int) -> str:
  body = f'{_kimi_id(name, i)}{_KIMI_ARGUMENTS}{_json(arguments)}'
  return f'{_KIMI[0]}{_KIMI_CALL}{body}{_KIMI_END}{_KIMI[1]}'


def _kimi_id(name: str, i: int) -> str:
  return f'functions.{name}:{i}'


HERMES = Syntax(
  'hermes',
  tools.parse,
  _write_hermes,
  f'{tokenizer.CALL}\n{{"name": <name>, "arguments": <object>}}\n{tokenizer.CALL_END}',
)
LLAMA = Syntax(
  'llama',
  _parse_llama,
  _write_llama,
  '{"name": <name>, "parameters": <object>}',
  opens=(PYTHON_TAG,),
  bare=True,
)
_EXAMPLE = ('<name>', {}, 0)
_DEEPSEEK_TAGS = tools.Tags(_DEEPSEEK_CALL, _DEEPSEEK_END, _read_deepseek)
DEEPSEEK = Syntax(
  'deepseek',
  _tagged(_DEEPSEEK_TAGS, _DEEPSEEK),
  _write_deepseek,
  _write_deepseek(*_EXAMPLE),
  opens=(*_DEEPSEEK, _DEEPSEEK_CALL),
)
DEEPSEEK_V31 = dataclasses.replace(
  DEEPSEEK, write=_write_deepseek_v31, example=_write_deepseek_v31(*_EXAMPLE)
)
KIMI = Syntax(
  'kimi',
  _tagged(tools.Tags(_KIMI_CALL, _KIMI_END, _read_kimi, ids=True), _KIMI),
  _write_kimi,
  _write_kimi(*_EXAMPLE),
  _kimi_id,
  opens=(*_KIMI, _KIMI_CALL),
)
