"""What an episode asks of a chat format, and ours: all by id, nothing encoded twice.

  prompt -> [turn as served -> results]*

A context only grows: by the ids a sampler drew, and by ids that are made here. `Own` is
the format of our small models (chat.py), `templated.Templated` that of a model that
comes with a tokeniser and a chat template.
"""

from collections.abc import Sequence
import functools
import json
import pathlib
from typing import Any, Protocol

from swe17 import source_file
from swe17.agent import (
  chat,
  gguf_metadata,
  gguf_tokenizer,
  hf_tokenizer,
  history,
  syntax,
  template,
  templated,
  tokenizer,
  tools,
)
from swe17.env import base

_ENDS = ('eos', 'eot', 'eom')  # as GGUF names what may end a turn


class Format(Protocol):
  """How a model's contexts are laid out, and what it means by its tokens."""

  @property
  def vocab_size(self) -> int:
    """Rows of the embedding."""
    ...

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """What a sampler stops at; the drawn one is part of the turn."""
    ...

  @property
  def strips(self) -> bool:
    """Whether thoughts are inside turns, so that `without_thought` can drop them."""
    ...

  @property
  def rewrites(self) -> str:
    """What the model's own template changes in earlier turns; '' if nothing."""
    ...

  def prompt(self, text: str, tools: Sequence[base.Tool]) -> list[int]:
    """Ids of a first user message and the tools, up to where the first turn begins."""
    ...

  def results(
    self, turn: Sequence[int], calls: Sequence[tools.Call], texts: Sequence[str]
  ) -> list[int]:
    """Ids between a turn, as it was drawn, and the next: its end and its results.

    `texts` are in the order of `calls`. If the turn was cut before its end token, that
    token is the first of the ids.
    """
    ...

  @property
  def marks(self) -> history.Marks:
    """What a reader of an unfinished turn must know."""
    ...

  def conversation(
    self,
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool] = (),
  ) -> list[int]:
    """Ids of whole messages in OpenAI's form, up to where the next turn begins.

    What a message or a tool says is text, whatever markup it seems to hold. ValueError
    with what the model's template says if it does not take them.
    """
    ...

  def after(
    self,
    turn: Sequence[int],
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool] = (),
  ) -> list[int]:
    """Ids between a turn, as it was drawn, and the next, for the messages between.

    As `results`, of results and anything else that a client may say. A result is tied
    to its call by the id that `message` gave the call. ValueError as `conversation`,
    and without messages.
    """
    ...

  def text(self, turn: Sequence[int]) -> str:
    """A turn's text without its end token."""
    ...

  def message(
    self, turn: Sequence[int], *, calls: bool = True, salt: str = ''
  ) -> template.Message:
    """The assistant's message of a turn, in OpenAI's form.

    Args:
      turn: as it was drawn.
      calls: whether calls are taken out of the text; one that does not parse stays in
        it.
      salt: makes the ids of calls in equal turns differ.
    """
    ...

  def spoken(
    self, text: str, *, calls: bool = True, salt: str = ''
  ) -> template.Message:
    """As `message`, of a turn's text."""
    ...

  def raw(self, text: str) -> list[int]:
    """Ids of a text in which markup counts."""
    ...

  def to_bytes(self, ids: Sequence[int]) -> bytes:
    """The exact bytes that `ids` stand for. ValueError on an id out of range."""
    ...

  def parse(self, turn: Sequence[int]) -> tools.Parsed:
    """What a turn says. Never raises on what a model may draw."""
    ...

  def read(self, text: str) -> tools.Parsed:
    """What the text of an assistant's message says, as `messages` has it."""
    ...

  def thinking(self, turn: Sequence[int]) -> int:
    """How many of a turn's tokens are its thought."""
    ...

  def without_thought(self, turn: Sequence[int]) -> list[int]:
    """The turn's ids but those of the thought that opens it; none is made anew."""
    ...

  def messages(self, ids: Sequence[int]) -> list[tuple[str, str]]:
    """Splits a context into (role, text), role 'user', 'assistant' or 'tool'."""
    ...

  def call(self, name: str, **arguments: int | str) -> list[int]:
    """Ids of one call, for agents that are programs."""
    ...

  def thought(self, text: str) -> list[int]:
    """Ids of a thought that opens a turn, for agents that are programs."""
    ...


class Own:
  """The format of chat.py over our tokeniser."""

  def __init__(self, tok: tokenizer.Tokenizer):
    self.tok = tok
    self.vocab_size = tok.vocab_size
    self.stop_ids = chat.stop_ids(tok)
    self.strips, self.rewrites = True, ''
    self.marks = history.Marks(syntax.HERMES.opens)

  def prompt(self, text: str, tools: Sequence[base.Tool]) -> list[int]:
    """Our models know their tools by heart: these are not told."""
    return chat.open_prompt(self.tok, text)

  def results(
    self, turn: Sequence[int], calls: Sequence[tools.Call], texts: Sequence[str]
  ) -> list[int]:
    return chat.close_turn(self.tok, turn) + chat.tool_results(self.tok, texts)

  def conversation(
    self,
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool] = (),
  ) -> list[int]:
    return chat.written(self.tok, history.mapped(messages))

  def after(
    self,
    turn: Sequence[int],
    messages: Sequence[template.Message],
    tools: Sequence[history.Tool] = (),
  ) -> list[int]:
    if not messages:
      raise ValueError('messages: got none after a turn, want what follows it')
    named = [(call.name, call.id) for call in self.parse(turn).calls if not call.error]
    made = history.mapped(messages)
    follow = history.following(made, named, syntax.HERMES)
    return chat.close_turn(self.tok, turn) + chat.written(self.tok, follow)

  def text(self, turn: Sequence[int]) -> str:
    ended = len(turn) > 0 and turn[-1] == self.tok.end
    return self.tok.decode(turn[:-1] if ended else turn)

  def message(
    self, turn: Sequence[int], *, calls: bool = True, salt: str = ''
  ) -> template.Message:
    return self.spoken(self.text(turn), calls=calls, salt=salt)

  def spoken(
    self, text: str, *, calls: bool = True, salt: str = ''
  ) -> template.Message:
    return history.spoken(text, tools.parse, calls=calls, salt=salt)

  def raw(self, text: str) -> list[int]:
    return self.tok.encode_markup(text)

  def to_bytes(self, ids: Sequence[int]) -> bytes:
    return self.tok.to_bytes(ids)

  def parse(self, turn: Sequence[int]) -> tools.Parsed:
    return self.read(self.text(turn))

  def read(self, text: str) -> tools.Parsed:
    return tools.parse(text)

  def thinking(self, turn: Sequence[int]) -> int:
    """Tokens between a <think> and its </think>, or to the end of the turn."""
    count, inside = 0, False
    for token in turn:
      if token == self.tok.think_end or token == self.tok.end:
        inside = False
      count += inside
      if token == self.tok.think:
        inside = True
    return count

  def without_thought(self, turn: Sequence[int]) -> list[int]:
    if not turn or turn[0] != self.tok.think:
      return list(turn)
    ends = (self.tok.think_end, self.tok.end)
    end = next((i for i, token in enumerate(turn) if token in ends), len(turn))
    return list(turn[end + (turn[end : end + 1] == [self.tok.think_end]) :])

  def messages(self, ids: Sequence[int]) -> list[tuple[str, str]]:
    return chat.messages(self.tok, ids)

  def call(self, name: str, **arguments: int | str) -> list[int]:
    return chat.call(self.tok, name, **arguments)

  def thought(self, text: str) -> list[int]:
    return [self.tok.think, *self.tok.encode(text), self.tok.think_end]


@functools.cache
def load(source: str = '') -> Format:
  """The format of the model at `model.source`; '': ours.

  FileNotFoundError or ValueError says what its files lack or hold that is not
  supported.
  """
  if not source:
    return Own(tokenizer.load())
  path = source_file.resolve(source)
  try:
    return _of_gguf(path) if path.is_file() else _of_folder(path)
  except ValueError as e:
    raise ValueError(f'{path}: {e}') from e


def _of_gguf(path: pathlib.Path) -> templated.Templated:
  metadata = gguf_metadata.read(path)
  spec = gguf_tokenizer.spec(metadata)
  tokens = metadata['tokenizer.ggml.tokens']

  def named(which: str) -> str:
    i = metadata.get(f'tokenizer.ggml.{which}_token_id')
    return '' if i is None else tokens[i]

  chat_template = metadata.get('tokenizer.chat_template', '')
  ends = [metadata.get(f'tokenizer.ggml.{end}_token_id') for end in _ENDS]
  special = (named('bos'), named('eos'))
  return _templated(spec, len(tokens), chat_template, special, ends)


def _of_folder(path: pathlib.Path) -> templated.Templated:
  if not (path / 'tokenizer.json').is_file():
    raise FileNotFoundError(
      f'{path} has no tokenizer.json; tiktoken.model and tokenizer.model are not read: '
      'convert them with `transformers`'
    )
  spec, rows = _json(path / 'tokenizer.json'), _json(path / 'config.json')['vocab_size']
  settings = path / 'tokenizer_config.json'
  given = _json(settings) if settings.is_file() else {}
  jinja = path / 'chat_template.jinja'
  chat_template = given.get('chat_template', '')
  if isinstance(chat_template, list):  # several, by name
    chat_template = {t['name']: t['template'] for t in chat_template}.get('default', '')
  if jinja.is_file():
    chat_template = jinja.read_text('utf-8')

  def named(which: str) -> str:
    token = given.get(f'{which}_token') or ''
    return token if isinstance(token, str) else token['content']

  settings = path / 'generation_config.json'
  ends = _json(settings).get('eos_token_id') if settings.is_file() else None
  ends = ends if isinstance(ends, list) else [ends]
  return _templated(spec, rows, chat_template, (named('bos'), named('eos')), ends)


def _templated(
  spec: dict[str, Any],
  rows: int,
  chat_template: str,
  special: tuple[str, str],
  ends: Sequence[int | None],
) -> templated.Templated:
  """`special` are (begin, end) of a text; `ends`, ids that a turn may end with too."""
  if not chat_template:
    raise ValueError('the model has no chat template: take one tuned for conversation')
  tok = hf_tokenizer.Tokenizer(spec, rows)
  made = template.Template(chat_template, bos=special[0], eos=special[1])
  way = syntax.choose(tok.markup, chat_template)
  added = [i for i in ends if i is not None and i in tok.markup.values()]
  return templated.Templated(tok, made, way, ends=added)


def _json(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    raise FileNotFoundError(f'{path.parent} has no {path.name}')
  return json.loads(path.read_text('utf-8'))
