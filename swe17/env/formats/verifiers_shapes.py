"""Messages, states and tools in the shapes that `verifiers` environments expect.

Theirs, if the package is loaded (whoever made the environment loads it), else ours,
which look the same from outside: entries by attribute and by key.

Source: verifiers 0.1.14, verifiers/types.py.
"""

from collections.abc import Mapping, Sequence
import inspect
import json
import sys
from typing import Any
import uuid

from swe17.env import base

_KINDS = {'integer': 'int', 'string': 'str'}
_CLASSES = {'system': 'SystemMessage', 'user': 'UserMessage', 'tool': 'ToolMessage'}
_CLASSES |= {'assistant': 'AssistantMessage'}


class Record(dict[str, Any]):
  """A mapping whose entries are attributes too."""

  def __getattr__(self, name: str) -> Any:
    if name in self:
      return self[name]
    raise AttributeError(name)

  def __setattr__(self, name: str, value: Any) -> None:
    self[name] = value


def _theirs(name: str) -> Any:
  return getattr(sys.modules.get('verifiers.types'), name, None)


def get(thing: Any, name: str, default: Any = None) -> Any:
  """An entry of a mapping, or an attribute of an object."""
  if isinstance(thing, Mapping):
    return thing.get(name, default)
  return getattr(thing, name, default)


def message(role: str, content: Any, **more: Any) -> Any:
  """A message; `more` are entries such as tool_calls."""
  made = _theirs(_CLASSES.get(role, ''))
  fields = {'role': role, 'content': content, **more}
  return made(**fields) if made is not None else Record(fields)


def call(name: str, arguments: Mapping[str, Any]) -> Any:
  """A message of the agent's that is one call of a tool."""
  fields = {
    'id': f'call_{uuid.uuid4().hex[:12]}',
    'name': name,
    'arguments': json.dumps(arguments),
  }
  made = _theirs('ToolCall')
  one = made(**fields) if made is not None else Record(fields)
  return message('assistant', '', tool_calls=[one])


def messages(given: Any) -> list[Any]:
  """Messages of a prompt or an answer, whatever form they are in. ValueError: none."""
  if isinstance(given, str):
    return [message('user', given)]
  if not isinstance(given, Sequence):
    raise ValueError(f'messages: got {type(given).__name__}, want text or a list')
  made = []
  for one in given:
    role = get(one, 'role')
    if not isinstance(role, str):
      raise ValueError(f'messages: {one!r:.60} has no role')
    if isinstance(one, Mapping) and not isinstance(one, Record):
      fields = {k: v for k, v in one.items() if v is not None or k == 'content'}
      one = message(fields.pop('role'), fields.pop('content', None), **fields)
    made.append(one)
  return made


def text(given: Any) -> str:
  """What a message says. ValueError where that is no text."""
  content = get(given, 'content')
  if content is None or isinstance(content, str):
    return content or ''
  parts = []
  for part in content:
    if get(part, 'type') != 'text' or not isinstance(get(part, 'text'), str):
      raise ValueError(f'a message holds {get(part, "type")!r}, want text')
    parts.append(get(part, 'text'))
  return '\n'.join(parts)


def told(given: Sequence[Any]) -> str:
  """Messages as one text: an only one as it is, several with who said them."""
  texts = [(get(one, 'role'), text(one)) for one in given]
  if len(texts) == 1 or all(role in ('system', 'user', 'tool') for role, _ in texts):
    return '\n\n'.join(said for _, said in texts if said)
  return '\n\n'.join(f'{role}: {said}' for role, said in texts)


def state(env: Any, row: Mapping[str, Any]) -> Any:
  """What `init_state` makes of a row, without a model behind it."""
  own: dict[str, Any] = json.loads(json.dumps(row))
  if isinstance(own.get('info'), str):
    own['info'] = json.loads(own['info'])
  own['prompt'] = messages(own['prompt'])
  made = _theirs('State')
  # Theirs finds entries of a row in `input`.
  begun: Any = Record(own) if made is None else made()
  begun['input'] = own
  timing = _theirs('RolloutTiming')
  fields = {
    'task': dict(own),
    'client': None,
    'model': '',
    'sampling_args': {},
    'is_completed': False,
    'is_truncated': False,
    'tool_defs': tool_defs(env, own),
    'trajectory': [],
    'trajectory_id': uuid.uuid4().hex,
    'completion': None,
    'reward': None,
    'metrics': None,
    'error': None,
    'final_env_response': None,
    'timing': Record() if timing is None else timing(),
  }
  for name, value in fields.items():
    begun[name] = value
  return begun


def step(prompt: Sequence[Any], said: Any, trajectory_id: str) -> dict[str, Any]:
  """One turn of the agent, as an entry of `trajectory`."""
  return {
    'prompt': list(prompt),
    'completion': [said],
    'response': None,
    'tokens': None,
    'reward': None,
    'advantage': None,
    'is_truncated': False,
    'trajectory_id': trajectory_id,
    'extras': {},
  }


def tool_defs(env: Any, row: Mapping[str, Any]) -> list[Any]:
  """Definitions of the tools of a row, else of the environment."""
  info = row.get('info')
  own = info.get('tool_defs') if isinstance(info, Mapping) else None
  return list(own or getattr(env, 'tool_defs', None) or [])


def tool(given: Any) -> tuple[base.Tool, dict[str, bool]]:
  """(a tool as ours are, parameter -> whether it is left out where it is empty).

  What is neither a whole number nor plain text is asked for as JSON text, since that is
  all that a parameter of ours can be. ValueError if the definition is none.
  """
  given = get(given, 'function', given)  # the older form
  name, schema = get(given, 'name'), get(given, 'parameters') or {}
  if not isinstance(name, str) or not isinstance(schema, Mapping):
    raise ValueError(f'tool_defs: {given!r:.80} has no name or no parameters')
  required = schema.get('required') or ()
  kinds: dict[str, str] = {}
  optional: dict[str, bool] = {}
  notes = []
  for parameter, one in (schema.get('properties') or {}).items():
    kind = one.get('type')
    optional[parameter] = parameter not in required or 'default' in one
    plain = kind in _KINDS and not (optional[parameter] and kind == 'integer')
    kinds[parameter] = _KINDS[kind] if plain else 'str'
    if not plain:
      notes.append(f'{parameter} is JSON')
    if optional[parameter]:
      notes.append(f'{parameter} may be empty')
  said = str(get(given, 'description') or '').strip().partition('\n')[0]
  described = ' '.join(
    [said or f'Call {name}.', *([f'({", ".join(notes)})'] if notes else [])]
  )
  return base.Tool(name, described, kinds, writes=True), optional


def arguments(given: Any, values: Mapping[str, Any]) -> dict[str, Any] | str:
  """The arguments of a call, or what is wrong with them."""
  made, optional = tool(given)
  schema = get(get(given, 'function', given), 'parameters') or {}
  found = {}
  for name, kind in made.parameters.items():
    value = values[name]
    if kind == 'str' and value == '' and optional[name]:
      continue
    if kind == 'str' and schema['properties'][name].get('type') != 'string':
      try:
        value = json.loads(value)
      except json.JSONDecodeError as e:
        return f'{name}: not JSON: {e.msg}'
    found[name] = value
  return found


async def ask(function: Any, **given: Any) -> Any:
  """Calls somebody's function with those of the arguments that it takes."""
  parameters = inspect.signature(function).parameters.values()
  if not any(p.kind is p.VAR_KEYWORD for p in parameters):
    names = {p.name for p in parameters}
    given = {name: value for name, value in given.items() if name in names}
  result = function(**given)
  return await result if inspect.isawaitable(result) else result
