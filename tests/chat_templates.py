"""Small chat templates with the habits of the families, and a tokeniser for each.

What matters of a family is kept: who describes tools, how calls and results stand,
what ends a message, what is dropped or refused.
"""

import functools

from swe17.agent import (
  formats,
  gguf_tokenizer,
  hf_tokenizer,
  syntax,
  template,
  templated,
  tokenizer,
)

_HEAD = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{%- endif %}
"""
_CALLS = """\
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
"""
_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}{%- endif %}
"""
_OPEN = """\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

QWEN = (
  _HEAD
  + """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
"""
  + _CALLS
  + """\
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
"""
  + _RESULTS
  + """\
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
"""
  + _OPEN
)

# Drops the thoughts of all but the last assistant message.
STRIPS = QWEN.replace(
  "{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}",
  """\
{%- set said = message.content or '' %}
{%- if not loop.last and '</think>' in said %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if said %}{{- '\\n' + said }}{%- endif %}""",
)

SMOL = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}{% endif %}\
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + date_string + '\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
{%- if tools and loop.index0 < 2 %}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}
{%- endfor %}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{{- '<|eot_id|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable %}
{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Joins a call's arguments as a string, takes no content beside calls, and opens no
# message after results.
DEEPSEEK = """\
{%- set ns = namespace(tool=false, first=true) %}{{- bos_token }}
{%- for tool in tools or [] %}{{- tool.function.name + '\\n' }}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.tool = false %}
{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.content is none %}
{%- set ns.first = true %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' }}
{{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message.role == 'assistant' %}
{%- set said = message.content.split('</think>')[-1] %}
{{- '<｜Assistant｜>' + said + '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}{%- set ns.tool = true %}
{%- if ns.first %}{%- set ns.first = false %}{{- '<｜tool▁outputs▁begin｜>' }}
{%- endif %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' }}{%- endif %}
"""

# Every result stands alone, and nothing follows the last.
BARE = DEEPSEEK.replace("'<｜tool▁outputs▁begin｜>'", "''").replace(
  "'<｜tool▁outputs▁end｜>'", "''"
)

KIMI = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson }}
{{- '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + (message.content or '') }}
{%- if message.tool_calls %}{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}
{{- '<|im_end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|im_system|>' + message.name + '<|im_middle|>## Return of ' }}
{{- message.tool_call_id + '\\n' + message.content + '<|im_end|>' }}
{%- else %}
{{- '<|im_user|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""

_IM = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
_TAGS = ('<tool_call>', '</tool_call>', '<think>', '</think>', '<tool_response>')
_TAGS += ('</tool_response>',)
ADDED = {
  'qwen': _IM + _TAGS,
  'strips': _IM + _TAGS,
  'smol': _IM,
  'llama': (
    '<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>',
    '<|eom_id|>', '<|python_tag|>',
  ),
  'deepseek': (
    '<｜begin▁of▁sentence｜>', '<｜end▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>',
    '<｜tool▁calls▁begin｜>', '<｜tool▁calls▁end｜>', '<｜tool▁call▁begin｜>',
    '<｜tool▁call▁end｜>', '<｜tool▁sep｜>', '<｜tool▁outputs▁begin｜>',
    '<｜tool▁outputs▁end｜>', '<｜tool▁output▁begin｜>', '<｜tool▁output▁end｜>',
    '<think>', '</think>',
  ),
  'kimi': (
    '[BOS]', '<|im_end|>', '<|im_user|>', '<|im_assistant|>', '<|im_system|>',
    '<|im_middle|>', '<|tool_calls_section_begin|>', '<|tool_calls_section_end|>',
    '<|tool_call_begin|>', '<|tool_call_argument_begin|>', '<|tool_call_end|>',
  ),
}  # fmt: skip
ADDED['bare'] = ADDED['deepseek']
SOURCES = {
  'qwen': QWEN, 'strips': STRIPS, 'smol': SMOL, 'llama': LLAMA, 'deepseek': DEEPSEEK,
  'kimi': KIMI, 'bare': BARE,
}  # fmt: skip
PRE = {'qwen': 'qwen2', 'strips': 'qwen2', 'smol': 'smollm'}


def spec(name: str) -> dict:
  """A tokeniser of bytes, a few merges, and the added tokens of a family."""
  added = ADDED[name]
  letters = list(tokenizer.byte_letters())
  merges = ['Ġ t', 'h e', 'Ġt he', 'i n', 'r e', '< |', '| >', 't o', 'o l', 'to ol']
  tokens = [*added, *letters, *(merge.replace(' ', '') for merge in merges)]
  return gguf_tokenizer.spec({
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': PRE.get(name, 'llama-bpe'),
    'tokenizer.ggml.tokens': tokens,
    'tokenizer.ggml.token_type': [3] * len(added) + [1] * (len(tokens) - len(added)),
    'tokenizer.ggml.merges': merges,
  })  # fmt: skip


@functools.cache
def chat(name: str) -> template.Template:
  added = ADDED[name]
  return template.Template(SOURCES[name], bos=added[0], eos=added[1])


@functools.cache
def fmt(name: str) -> formats.Format:
  """The format of a family."""
  tok = hf_tokenizer.Tokenizer(spec(name))
  way = syntax.choose(tok.markup, SOURCES[name])
  return templated.Templated(tok, chat(name), way)
