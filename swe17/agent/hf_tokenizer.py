"""The tokeniser of somebody else's model: a byte-level BPE with its added tokens.

As in tokenizer.py there are two ways to encode. Added tokens (`<|im_start|>`,
`<tool_call>`, special or not) are what a chat template is made of: `encode_markup` cuts
text at them, as the tokenizers library does, and `encode` knows none of them, so that
what a task or a tool says never opens a message or a call. Added tokens of nothing but
white space are plain text and known to both.
"""

from collections.abc import Iterable, Mapping
import json
import re
from typing import Any

import tokenizers

from swe17.agent import tokenizer


class Tokenizer:
  """Encodes and decodes with the contents of one tokenizer.json.

  Attributes:
    vocab_size: rows of the model's embedding; ids beyond the tokeniser's stand for
      nothing.
    markup: id of every added token.
  """

  def __init__(self, spec: Mapping[str, Any], rows: int = 0):
    """Takes the contents of a file. ValueError names what is not supported."""
    model, added = spec['model'], spec['added_tokens']
    if model.get('type') != 'BPE' or model.get('byte_fallback'):
      kind = model.get('type')
      raise ValueError(f'tokenizer.json: got {kind}, want BPE over bytes (GPT-2 style)')
    own = [token for token in added if _is_markup(token['content'])]
    for token in own:
      if any(token.get(flag) for flag in ('lstrip', 'rstrip', 'single_word')):
        raise ValueError(f'added token {token["content"]!r} takes text beside it')
    self.markup: dict[str, int] = {token['content']: token['id'] for token in own}
    vocab = {t: i for t, i in model['vocab'].items() if t not in self.markup}
    rest = [token for token in added if token['content'] not in self.markup]
    # The library numbers an added token anew unless the vocabulary has it.
    vocab |= {token['content']: token['id'] for token in rest}
    plain = {
      **spec,
      'added_tokens': rest,
      'model': {**model, 'vocab': vocab, 'unk_token': None},
      'post_processor': None,
    }
    self._plain = tokenizers.Tokenizer.from_str(json.dumps(plain))
    self._bytes = _byte_table(vocab, rest, self.markup)
    self.vocab_size = max(rows, max(self._bytes) + 1)
    if rows and self.vocab_size > rows:
      raise ValueError(
        f'tokenizer.json has ids to {max(self._bytes)}, the model {rows}'
      )
    # Of two that begin at one place the longer counts.
    names = sorted(self.markup, key=len, reverse=True)
    either = '|'.join(map(re.escape, names)) or r'(?!)'
    self._cut = re.compile(f'({either})')
    self._opens = re.compile(f'(?={either})(.)', re.DOTALL)

  def encode(self, text: str) -> list[int]:
    """Ids of text that is not ours: never an added token, whatever it says."""
    return self._plain.encode(text, add_special_tokens=False).ids if text else []

  def encode_markup(self, text: str, mark: str = '') -> list[int]:
    """Ids of text in which added tokens count; `mark` is taken out of it first.

    What `guard` has put a mark into is plain text.
    """
    ids: list[int] = []
    for i, part in enumerate(self._cut.split(text)):
      if i % 2:
        ids.append(self.markup[part])
      else:
        ids += self.encode(part.replace(mark, '') if mark else part)
    return ids

  def guard(self, text: str, mark: str) -> str:
    """`text` with `mark` inside everything that reads like an added token."""
    return self._opens.sub(lambda found: found[1] + mark, text)

  def first_markup(self, text: str) -> str:
    """The first added token in `text`, or ''."""
    found = self._cut.search(text)
    return found[1] if found else ''

  def to_bytes(self, ids: Iterable[int]) -> bytes:
    """The exact bytes that `ids` stand for. ValueError on an id out of range."""
    ids = list(ids)
    if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
      raise ValueError(f'token ids: got {ids}, want 0 to {self.vocab_size - 1}')
    return b''.join(self._bytes.get(i, b'') for i in ids)

  def decode(self, ids: Iterable[int]) -> str:
    """Text of `ids`, markup included; bytes that are not UTF-8 become U+FFFD."""
    return self.to_bytes(ids).decode('utf-8', 'replace')


def marks(*texts: str) -> tuple[str, str]:
  """Two characters that none of `texts` contains."""
  used = set().union(*texts)
  free = (c for c in map(chr, range(0xF0000, 0x110000)) if c not in used)
  return next(free), next(free)


def _is_markup(content: str) -> bool:
  return len(content) > 1 and not content.isspace()


def _byte_table(
  vocab: Mapping[str, int], rest: Iterable[Mapping[str, Any]], markup: Mapping[str, int]
) -> dict[int, bytes]:
  """Bytes of every id. ValueError if a token is not spelled in GPT-2's letters."""
  letters = tokenizer.byte_letters()
  table = {i: token.encode() for token, i in markup.items()}
  added = {token['id']: token['content'] for token in rest}
  table |= {i: content.encode() for i, content in added.items()}
  for token, i in vocab.items():
    if i in table:
      if i in added:
        continue
      raise ValueError(f'tokenizer.json: id {i} stands twice')
    try:
      table[i] = bytes(letters[c] for c in token)
    except KeyError as e:
      raise ValueError(f'tokenizer.json: {token!r} does not spell bytes') from e
  return table
