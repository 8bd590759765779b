"""The agent's byte-level BPE: ids, text, and the two ways to encode.

Markup is the frame of the chat format. `SPECIAL` tokens delimit messages, thoughts and
calls; `SKELETON` tokens are the fixed JSON around a call's arguments, so that a call of
a tool without arguments is one token and an edit is a few. Only `encode_markup` makes
them; `encode` writes the same characters as plain pieces, so that what a task or a tool
says can never open a message or a call.

A piece (what the pre-tokeniser cuts) never depends on what stands to its left: a name
carries no space, an operator carries both of its own (`a < b` is `a`, ` < `, `b`), an
anchor is one id. What an edit names and writes therefore has the ids it has in the
view, which is what lets a small model point at code instead of spelling it.

The file is the `tokenizer.json` format of the tokenizers library. It is made by
`python -m experiments.build_tokenizer`.
"""

from collections.abc import Iterable
import functools
import json
import pathlib

import tokenizers

VOCABULARY = 1024
PAD, END = '<|pad|>', '<|end|>'
USER, ASSISTANT, TOOL = '<|user|>', '<|assistant|>', '<|tool|>'
THINK, THINK_END = '<think>', '</think>'
CALL, CALL_END = '<tool_call>', '</tool_call>'
SPECIAL = (PAD, END, USER, ASSISTANT, TOOL, THINK, THINK_END, CALL, CALL_END)
_BARE = ('view', 'test', 'undo', 'submit')
SKELETON = (
  *(f'{CALL}{{"name": "{name}", "arguments": {{}}}}{CALL_END}' for name in _BARE),
  f'{CALL}{{"name": "edit", "arguments": {{"at": "',
  '", "new": "',
  f'"}}}}{CALL_END}',
)
MARKUP = SPECIAL + SKELETON
PATH = pathlib.Path(__file__).parent / 'data' / 'tokenizer.json'


class Tokenizer:
  """Encodes and decodes with one tokenizer.json; ids 0-8 are `SPECIAL`, in order."""

  def __init__(self, data: str):
    spec = json.loads(data)
    plain = {**spec, 'added_tokens': []}
    self._markup = tokenizers.Tokenizer.from_str(data)
    self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
    self._bytes = _byte_table(spec)
    self.vocab_size = len(self._bytes)
    ids = [self._markup.token_to_id(token) for token in SPECIAL]
    if ids != list(range(len(SPECIAL))):
      raise ValueError(f'tokenizer: got ids {ids} for {SPECIAL}, want 0, 1, 2, ...')
    self.pad, self.end, self.user, self.assistant, self.tool = range(5)
    self.think, self.think_end, self.call, self.call_end = range(5, 9)

  def encode(self, text: str) -> list[int]:
    """Ids of text that is not ours: never a special id, whatever it says."""
    return self._plain.encode(text, add_special_tokens=False).ids

  def encode_markup(self, text: str) -> list[int]:
    """Ids of text of our own making, in which markup counts as markup."""
    return self._markup.encode(text, add_special_tokens=False).ids

  def to_bytes(self, ids: Iterable[int]) -> bytes:
    """The exact bytes that `ids` stand for. ValueError on an id out of range."""
    ids = list(ids)
    if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
      raise ValueError(f'token ids: got {ids}, want 0 to {self.vocab_size - 1}')
    return b''.join(self._bytes[i] for i in ids)

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`, markup included; bytes that are not UTF-8 become U+FFFD."""
    return self.to_bytes(ids).decode('utf-8', 'replace')

  def pieces(self, text: str) -> list[tuple[int, int]]:
    """Where the pre-tokeniser cuts `text`: (start, end) in characters."""
    cut = self._plain.pre_tokenizer
    assert cut is not None
    return [span for _, span in cut.pre_tokenize_str(text)]


@functools.cache
def load(path: pathlib.Path | None = None) -> Tokenizer:
  """The tokeniser at `path`; without it, the committed one. ValueError if not ours."""
  tok = Tokenizer((path or PATH).read_text('utf-8'))
  if tok.vocab_size != VOCABULARY:
    raise ValueError(f'{path or PATH}: got {tok.vocab_size} ids, want {VOCABULARY}')
  return tok


def _byte_table(spec: dict) -> list[bytes]:
  """Bytes of every id: markup stands for itself, the rest spell bytes as letters."""
  letters = byte_letters()
  vocab = spec['model']['vocab']
  if sorted(vocab.values()) != list(range(len(vocab))):
    raise ValueError(f'tokenizer: the {len(vocab)} ids are not 0 to {len(vocab) - 1}')
  added = {token['content'] for token in spec['added_tokens']}
  table = [b''] * len(vocab)
  for token, i in vocab.items():
    if token in added:
      table[i] = token.encode()
    else:
      table[i] = bytes(letters[c] for c in token)
  return table


def byte_letters() -> dict[str, int]:
  """GPT-2's letters for bytes: printable ones are themselves, the rest from U+0100."""
  own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  rest = [b for b in range(256) if b not in set(own)]
  return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(rest)}
