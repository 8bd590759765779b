"""OpenAI's requests: JSON -> frozen records, each refusal naming its field.

Nothing that comes from outside is taken for granted. What cannot be honoured is refused
where it would change the answer, and fields that nobody here knows are ignored and
logged once. Messages have one form from here on (`messages`): content is text or None,
calls' arguments are the strings that they came as.

https://platform.openai.com/docs/api-reference
"""

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import json
import logging
import math
from typing import Any, NoReturn

from swe17 import types
from swe17.api import errors, messages

_log = logging.getLogger(__name__)
MAX_CHOICES = 128
_MAX_STOPS, _MAX_STOP = 16, 256  # strings, characters of one
_INT64 = 1 << 63
_COMMON = frozenset({
  'model', 'n', 'seed', 'stop', 'stream', 'stream_options', 'temperature', 'top_p',
  'top_k', 'min_p', 'max_tokens', 'logprobs', 'user',
})  # fmt: skip
_CHAT = _COMMON | {
  'messages', 'tools', 'tool_choice', 'parallel_tool_calls', 'max_completion_tokens',
  'top_logprobs', 'metadata', 'store', 'service_tier',
}  # fmt: skip
_COMPLETION = _COMMON | {'prompt'}
# What would change the answer and is not served: field -> the values that ask nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
  'audio': (),
  'best_of': (1,),
  'echo': (False,),
  'frequency_penalty': (0,),
  'function_call': ('none',),
  'functions': ([],),
  'logit_bias': ({},),
  'modalities': (['text'],),
  'parallel_tool_calls': (True,),
  'prediction': (),
  'presence_penalty': (0,),
  'repetition_penalty': (1,),
  'response_format': ({'type': 'text'},),
  'suffix': ('',),
  'web_search_options': (),
}
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Chat:
  """A request of /v1/chat/completions. None: not given."""

  model: str
  messages: tuple[messages.Message, ...]
  tools: tuple[Mapping[str, Any], ...] = ()  # as OpenAI writes them
  calls: bool = False  # the turn may call tools: there are some, and tool_choice lets
  n: int = 1
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  max_tokens: int | None = None
  seed: int | None = None
  stop: tuple[str, ...] = ()
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  min_p: float | None = None
  user: str = ''


@dataclasses.dataclass(frozen=True)
class Completion:
  """A request of /v1/completions: `n` choices of every prompt, text or ids."""

  model: str
  prompts: tuple[str | tuple[int, ...], ...]
  n: int = 1
  stream: bool = False
  include_usage: bool = False
  logprobs: bool = False
  max_tokens: int | None = 16  # OpenAI's default for this route
  seed: int | None = None
  stop: tuple[str, ...] = ()
  temperature: float | None = None
  top_p: float | None = None
  top_k: int | None = None
  min_p: float | None = None
  user: str = ''


def chat(body: bytes, models: Collection[str]) -> Chat:
  """Reads a request of /v1/chat/completions. `errors.Refused` names what is wrong."""
  given = _object(body, _CHAT)
  choice = given.get('tool_choice')
  if choice not in (None, 'none', 'auto'):
    errors.refuse('tool_choice', choice, "'none' or 'auto': no call can be forced")
  tools = () if choice == 'none' else messages.tools(given.get('tools'))
  if given.get('top_logprobs') not in (None, 0):
    errors.refuse(
      'top_logprobs', given['top_logprobs'], "0: only the drawn token's is recorded"
    )
  limit = _integer(given, 'max_completion_tokens', 1, _INT64)
  return Chat(
    messages=messages.read(given.get('messages')),
    tools=tools,
    calls=bool(tools),
    logprobs=_flag(given, 'logprobs'),
    max_tokens=_integer(given, 'max_tokens', 1, _INT64) if limit is None else limit,
    **_common(given, models),
  )


def completion(body: bytes, models: Collection[str]) -> Completion:
  """Reads a request of /v1/completions. `errors.Refused` names what is wrong."""
  given = _object(body, _COMPLETION)
  asked = given.get('logprobs')
  if asked not in (None, 0) or type(asked) is bool:
    errors.refuse('logprobs', asked, "0: only the drawn token's is recorded")
  limit = _integer(given, 'max_tokens', 1, _INT64)
  made = Completion(
    prompts=_prompts(given.get('prompt')),
    logprobs=asked is not None,
    max_tokens=16 if limit is None else limit,
    **_common(given, models),
  )
  if len(made.prompts) * made.n > MAX_CHOICES:
    errors.refuse('n', made.n, f'at most {MAX_CHOICES} choices of all prompts together')
  return made


def sampling(asked: Chat | Completion, default: types.Sampling) -> types.Sampling:
  """How the tokens of a request are drawn."""
  names = ('temperature', 'min_p', 'top_k', 'top_p')
  given = {name: getattr(asked, name) for name in names}
  return dataclasses.replace(
    default, **{name: value for name, value in given.items() if value is not None}
  )


def max_new(asked: Chat | Completion, context: int, limit: int) -> int:
  """Most tokens of a turn: what is asked for, or what fits. Refuses if none does."""
  room = limit - context
  if room < 1:
    raise errors.Refused(
      f"this model's context holds {limit} tokens; the prompt has {context} and leaves "
      'no room for an answer',
      'messages' if isinstance(asked, Chat) else 'prompt',
      code='context_length_exceeded',
    )
  return room if asked.max_tokens is None else min(asked.max_tokens, room)


def _common(given: Mapping[str, Any], models: Collection[str]) -> dict[str, Any]:
  model = given.get('model')
  if not isinstance(model, str):
    errors.refuse('model', model, 'a string')
  if model not in models:
    raise errors.Refused(
      f'model: got {errors.shown(model)}, want one of {", ".join(sorted(models))}',
      'model',
      status=404,
      code='model_not_found',
    )
  options = given.get('stream_options')
  stream = _flag(given, 'stream')
  if options is not None and not isinstance(options, dict):
    errors.refuse('stream_options', options, 'an object')
  if options and not stream:
    errors.refuse('stream_options', options, 'it only where stream is true')
  top_k = _integer(given, 'top_k', -1, _INT64)
  n = _integer(given, 'n', 1, MAX_CHOICES)
  return {
    'model': model,
    'n': 1 if n is None else n,
    'stream': stream,
    'include_usage': bool(options) and _flag(options, 'include_usage'),
    'seed': _integer(given, 'seed', -_INT64, _INT64 - 1),
    'stop': _stops(given.get('stop')),
    'temperature': _number(given, 'temperature', 0, 2),
    'top_p': _number(given, 'top_p', 0, 1),
    'top_k': 0 if top_k == -1 else top_k,  # others write -1 for off
    'min_p': _number(given, 'min_p', 0, 1),
    'user': _text(given, 'user'),
  }


def _object(body: bytes, known: Collection[str]) -> dict[str, Any]:
  try:
    given = json.loads(body.decode('utf-8'), parse_constant=_no_constant)
  except (ValueError, RecursionError) as e:
    raise errors.Refused(f'the body is no JSON: {str(e)[:200]}') from e
  if not isinstance(given, dict):
    raise errors.Refused(f'the body is {errors.shown(given)}, want a JSON object')
  for field, value in given.items():
    if field in _REFUSED and value is not None:
      if not any(value == nothing for nothing in _REFUSED[field]):
        errors.refuse(field, value, 'it left out: this server does not do it')
    elif field not in known and value is not None:
      _ignore(field)
  return given


def _no_constant(name: str) -> NoReturn:
  raise ValueError(f'{name} is not JSON')


def _ignore(field: str) -> None:
  # What is remembered is bounded, whoever makes up names.
  if field in _warned or len(_warned) >= 256:
    return
  _warned.add(field)
  _log.warning('request field %s is not known here: ignored', errors.shown(field))


def _flag(given: Mapping[str, Any], name: str) -> bool:
  value = given.get(name)
  if value is not None and not isinstance(value, bool):
    errors.refuse(name, value, 'true or false')
  return bool(value)


def _integer(given: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
  value = given.get(name)
  if value is None:
    return None
  if type(value) is not int or not low <= value <= high:
    errors.refuse(name, value, f'an integer from {low} to {high}')
  return value


def _number(
  given: Mapping[str, Any], name: str, low: float, high: float
) -> float | None:
  value = given.get(name)
  if value is None:
    return None
  if type(value) not in (int, float) or not low <= value <= high:
    errors.refuse(name, value, f'a number from {low} to {high}')
  assert math.isfinite(value)
  return float(value)


def _text(given: Mapping[str, Any], name: str) -> str:
  value = given.get(name)
  if value is not None and not isinstance(value, str):
    errors.refuse(name, value, 'a string')
  return value or ''


def _stops(value: Any) -> tuple[str, ...]:
  stops = [value] if isinstance(value, str) else value
  if stops is None:
    return ()
  good = isinstance(stops, list) and len(stops) <= _MAX_STOPS
  if not good or not all(isinstance(s, str) and 0 < len(s) <= _MAX_STOP for s in stops):
    errors.refuse(
      'stop',
      value,
      f'a string of 1 to {_MAX_STOP} characters or a list of up to {_MAX_STOPS}',
    )
  return tuple(stops)


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
  given = value if isinstance(value, list) else [value]
  if isinstance(value, list) and _are_ids(value):
    given = [value]
  made: list[str | tuple[int, ...]] = []
  for prompt in given if len(given) <= MAX_CHOICES else ():
    if isinstance(prompt, str) and messages.is_unicode(prompt):
      made.append(prompt)
    elif isinstance(prompt, list) and _are_ids(prompt):
      made.append(tuple(prompt))
  if not made or len(made) < len(given):
    errors.refuse(
      'prompt', value, f'text or token ids, or a list of up to {MAX_CHOICES}'
    )
  return tuple(made)


def _are_ids(values: Sequence[Any]) -> bool:
  ids = (type(value) is int and 0 <= value < 1 << 31 for value in values)
  return len(values) > 0 and all(ids)
