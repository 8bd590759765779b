"""Chat templates: the same text as `transformers` renders, and nothing but text."""

import datetime
import json

import jinja2
import pytest
import tokenizers
import transformers
from transformers.utils import chat_template_utils

from swe17.agent import template
from swe17.env import base
from swe17.env.repair import repair
from tests import chat_templates

TOOLS = (*repair.TOOLS[:2], base.Tool('n', 'Count.', {'n': 'int'}, writes=False))
DAY = datetime.datetime(2026, 2, 3)


def call(name: str, arguments: object, i: int = 0) -> dict:
  function = {'name': name, 'arguments': arguments}
  return {'id': f'functions.{name}:{i}', 'type': 'function', 'function': function}


def said(role: str, content: str | None, *calls: dict, **rest: str) -> dict:
  return {'role': role, 'content': content, **rest} | (
    {'tool_calls': list(calls)} if calls else {}
  )


def result(text: str, name: str = 'view', i: int = 0) -> dict:
  return said('tool', text, name=name, tool_call_id=f'functions.{name}:{i}')


U, S = said('user', 'Mend é <|im_end|>.'), said('system', ' Be brief. ')
EDIT = {'at': '«1»', 'new': '"\n</tool_call>'}
CONVERSATIONS = [
  [U], [S, U], [U, said('assistant', 'Done.')], [S, U, said('assistant', 'Done.'), U],
  [U, said('assistant', None, call('view', {}))],
  [U, said('assistant', None, call('edit', EDIT))],
  [U, said('assistant', None, call('edit', {'n': 3, 'x': None, 'y': [1, {'a': 2.5}]}))],
  [U, said('assistant', None, call('view', {})), result('def f():\n  pass')],
  [S, U, said('assistant', None, call('view', {})), result(''), said('assistant', 'x')],
  [U, said('assistant', None, call('view', {}), call('n', {'n': 1}, 1)),
   result('a'), result('b', 'n', 1)],
  [U, said('assistant', '<think>\nhm\n</think>\n\nyes'), U],
  [U, said('assistant', None, call('view', {})), result('a'),
   said('assistant', None, call('edit', EDIT)), result('edited', 'edit'), U],
]  # fmt: skip


def with_strings(messages: list[dict]) -> list[dict]:
  """The same conversation as OpenAI's API has it: arguments are JSON strings."""
  copied = json.loads(json.dumps(messages))
  for message in copied:
    for each in message.get('tool_calls', []):
      each['function']['arguments'] = json.dumps(
        each['function']['arguments'], ensure_ascii=False
      )
  return copied


def theirs(source, messages, tools, generate):
  rendered, _ = chat_template_utils.render_jinja_template(
    [messages],
    tools=[template.schema(tool) for tool in tools] or None,
    chat_template=source,
    add_generation_prompt=generate,
    bos_token='<bos>',
    eos_token='<eos>',
    date_string='03 Feb 2026',
  )
  return rendered[0]


@pytest.mark.parametrize('family', chat_templates.SOURCES)
@pytest.mark.parametrize('tools', [(), TOOLS], ids=['none', 'tools'])
@pytest.mark.parametrize('i', range(len(CONVERSATIONS)))
def test_both_forms_of_arguments_render_as_transformers_does(family, tools, i):
  """The family's own form is what transformers is given: a string, or a mapping."""
  source = chat_templates.SOURCES[family]
  ours = template.Template(source, bos='<bos>', eos='<eos>', day=DAY)
  messages = CONVERSATIONS[i]
  native = with_strings(messages) if family in ('deepseek', 'bare') else messages
  for generate in (False, True):
    try:
      want = theirs(source, native, tools, generate)
    except (jinja2.TemplateError, TypeError):
      for form in (messages, with_strings(messages)):
        with pytest.raises(ValueError, match='chat template'):
          ours.render(form, tools, generate=generate)
      continue
    assert ours.render(messages, tools, generate=generate) == want
    assert ours.render(with_strings(messages), tools, generate=generate) == want


def test_most_conversations_are_taken():
  """The control of the test above: what no template takes would prove nothing."""
  taken = 0
  for family, source in chat_templates.SOURCES.items():
    ours = template.Template(source, day=DAY)
    for messages in CONVERSATIONS:
      try:
        taken += bool(ours.render(messages, TOOLS))
      except ValueError:
        assert family in ('llama', 'smol', 'deepseek', 'bare')
  assert taken > 60


@pytest.mark.parametrize('arguments', ['[]', 'null', '{"a": ', '', 'x', '"{}"'])
def test_arguments_that_hold_no_object_stay_as_they_are(arguments):
  assert template.mapping_of(arguments) == arguments
  ours = chat_templates.chat('kimi')
  text = ours.render([U, said('assistant', None, call('view', arguments))])
  assert f'<|tool_call_argument_begin|>{arguments}<|tool_call_end|>' in text


@pytest.mark.parametrize(
  'source',
  [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{% for i in range(10 ** 9) %}{% endfor %}",
    "{{ raise_exception('no') }}",
    "{{ messages[7].content }}",
    "{{ 'a' + 1 }}",
    "{{ nothing.at.all }}",
  ],
)  # fmt: skip
def test_a_template_reaches_nothing_and_what_it_raises_is_a_value_error(source):
  made = template.Template(source)
  with pytest.raises(ValueError, match='chat template'):
    made.render([U])


def test_what_is_no_template_is_refused():
  with pytest.raises(ValueError, match='chat template'):
    template.Template('{% for %}')


def test_extensions_that_transformers_gives():
  source = (
    '{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}'
    '{% break %}{% endfor %}{{ strftime_now("%Y-%m-%d") }}{{ {"é": "<"} | tojson }}'
  )
  made = template.Template(source, day=DAY)
  assert made.render([said('user', 'a'), U]) == 'a2026-02-03{"é": "<"}'


def test_ids_are_those_of_transformers_where_nothing_is_injected():
  """The tokenizers library encodes the rendered text whole; ours piece by piece."""
  for family in ('qwen', 'llama', 'deepseek', 'kimi'):
    spec = json.dumps(chat_templates.spec(family))
    reference = transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizers.Tokenizer.from_str(spec)
    )
    fmt = chat_templates.fmt(family)
    text = chat_templates.chat(family).render(
      [said('user', 'Mend it.\n\n  x')], TOOLS, generate=True
    )
    want = reference.encode(text, add_special_tokens=False)
    assert fmt.prompt('Mend it.\n\n  x', TOOLS) == want
