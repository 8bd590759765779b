"""A model's chat template: Jinja, sandboxed, with what `transformers` gives it.

Templates are programs that come with a model's files: they run in jinja2's immutable
sandbox, and what they raise is a ValueError here.

https://huggingface.co/docs/transformers/chat_templating_writing
"""

from collections.abc import Mapping, Sequence
import datetime
import json
import re
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, parser, sandbox

from swe17.env import base

_KINDS = {'int': 'integer', 'str': 'string'}

_RAISED = (jinja2.TemplateError, TypeError, LookupError, AttributeError, ValueError)
_RAISED += (ArithmeticError, RecursionError)


class _Verbatim(str):
  """A call's arguments that hold no object: no JSON is made of them."""


Message = dict[str, Any]  # 'role', 'content', 'tool_calls', .. as OpenAI names them


class _Generation(ext.Extension):
  """`{% generation %}` marks what an assistant says; it changes no text."""

  def __init__(self, environment: jinja2.Environment):
    super().__init__(environment)
    self.tags = {'generation'}

  def parse(self, parser: parser.Parser) -> list[nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


class Template:
  """A compiled template.

  Attributes:
    takes_tools: it describes tools by itself.
    takes_results: it knows messages of the role `tool`.
  """

  def __init__(
    self,
    source: str,
    *,
    bos: str = '',
    eos: str = '',
    day: datetime.datetime | None = None,
  ):
    """`day` is what `strftime_now` tells; None: today. ValueError if it is no Jinja."""
    env = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    env.filters['tojson'] = _tojson
    day = day or datetime.datetime.now()
    self._given = {
      'bos_token': bos,
      'eos_token': eos,
      'raise_exception': _raise,
      'strftime_now': day.strftime,
    }
    try:
      self._compiled = env.from_string(source)
      self.takes_tools = 'tools' in meta.find_undeclared_variables(env.parse(source))
    except jinja2.TemplateError as e:
      raise ValueError(f'chat template: {e}') from e
    self.takes_results = bool(re.search(r"""['"]tool['"]""", source))
    self._strings = False
    self._strings = self._wants_strings()

  def render(
    self,
    messages: Sequence[Message],
    tools: Sequence[base.Tool | Mapping[str, Any]] = (),
    *,
    generate: bool = False,
    **given: Any,
  ) -> str:
    """The text of a conversation; `generate` opens the assistant's next message.

    A call's arguments may be a JSON string, as OpenAI's API has them, or a mapping: the
    template sees a mapping, or the string where it holds no object. Tools may be in the
    form of OpenAI's API too.

    ValueError with what the template says of a conversation that it does not take.
    """
    try:
      return self._compiled.render(
        **self._given,
        **given,
        messages=[self._one_form(message) for message in messages],
        tools=[schema(t) if isinstance(t, base.Tool) else t for t in tools] or None,
        add_generation_prompt=generate,
      )
    # Whatever the operations of somebody else's program raise on our values.
    except _RAISED as e:
      raise ValueError(f'chat template: {type(e).__name__}: {e}') from e

  def _wants_strings(self) -> bool:
    """Whether a call's arguments must be JSON strings: some templates join them."""
    function = {'name': 'act', 'arguments': {'at': 'text'}}
    call = {'id': 'call_0', 'type': 'function', 'function': function}
    turn = {'role': 'assistant', 'content': None, 'tool_calls': [call]}
    messages = [{'role': 'user', 'content': 'text'}, turn]
    works = []
    for self._strings in (False, True):
      try:
        works.append('text' in self.render(messages).rpartition('act')[2])
      except ValueError:
        works.append(False)
    return works == [False, True]

  def _one_form(self, message: Message) -> Message:
    calls = message.get('tool_calls')
    if not calls:
      return message
    made = []
    for call in calls:
      function = call['function']
      arguments = mapping_of(function['arguments'])
      if self._strings and not isinstance(arguments, str):
        arguments = _tojson(arguments)
      if isinstance(arguments, str):
        arguments = _Verbatim(arguments)
      made.append({**call, 'function': {**function, 'arguments': arguments}})
    return {**message, 'tool_calls': made}


def schema(tool: base.Tool) -> dict[str, Any]:
  """A tool as OpenAI's API describes it."""
  properties = {name: {'type': _KINDS[kind]} for name, kind in tool.parameters.items()}
  parameters = {
    'type': 'object',
    'properties': properties,
    'required': list(tool.parameters),
  }
  function = {
    'name': tool.name,
    'description': tool.description,
    'parameters': parameters,
  }
  return {'type': 'function', 'function': function}


def mapping_of(arguments: str | Mapping[str, Any]) -> Any:
  """The object that a JSON string holds; what holds none, as it is."""
  if not isinstance(arguments, str):
    return arguments
  try:
    found = json.loads(arguments)
  except (ValueError, RecursionError):
    return arguments
  return found if isinstance(found, dict) else arguments


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Not jinja2's own, which writes for HTML.
  if isinstance(value, _Verbatim):
    return value
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _raise(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)
