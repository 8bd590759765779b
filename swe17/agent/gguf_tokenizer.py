"""The tokeniser in a GGUF file's metadata, in the form of a tokenizer.json.

GGUF keeps a byte-level BPE as a list of tokens, a list of merges, the kind of every
token, and the *name* of how text is cut before merging (`tokenizer.ggml.pre`): the
pattern itself is known by that name only. A name that is not in `_CUTS` is refused,
since another pattern gives other ids for the same text.
"""

from collections.abc import Mapping
from typing import Any

# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
_CL100K = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
_BYTES = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
_GPT2 = {**_BYTES, 'use_regex': True}
_DIGITS = {'type': 'Digits', 'individual_digits': True}


def _regex(pattern: str) -> dict[str, Any]:
  cut = {'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}
  return {'type': 'Split', **cut}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
  return {'type': 'Sequence', 'pretokenizers': list(steps)}


_CUTS = {
  'gpt-2': _GPT2,
  'smollm': _sequence(_DIGITS, _GPT2),
  'llama-bpe': _sequence(_regex(_CL100K), {**_BYTES, 'use_regex': False}),
  'qwen2': _sequence(
    _regex(_CL100K.replace(r'\p{N}{1,3}', r'\p{N}')), {**_BYTES, 'use_regex': False}
  ),
}
_WHOLE_WORDS = {'llama-bpe'}  # a word that is a token is not merged from its bytes
_NFC = {'qwen2'}

_NORMAL, _CONTROL, _USER = 1, 3, 4  # kinds of tokens; others stand for no text


def spec(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """The contents of the tokenizer.json that the metadata describe.

  ValueError names what is missing or not supported.
  """
  kind, cut = _get(metadata, 'model'), _get(metadata, 'pre')
  if kind != 'gpt2':
    raise ValueError(f'tokenizer.ggml.model: got {kind!r}, want gpt2: byte-level BPE')
  if cut not in _CUTS:
    raise ValueError(f'tokenizer.ggml.pre: got {cut!r}, want one of {", ".join(_CUTS)}')
  tokens, kinds = _get(metadata, 'tokens'), _get(metadata, 'token_type')
  merges = [tuple(line.split(' ')) for line in _get(metadata, 'merges')]
  if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
    raise ValueError(
      f'tokenizer.ggml.tokens: got {len(tokens)}, {len(set(tokens))} different, '
      f'and {len(kinds)} kinds'
    )
  if wrong := [merge for merge in merges if len(merge) != 2]:
    raise ValueError(f'tokenizer.ggml.merges: got {wrong[0]}, want two tokens')
  added = [
    added_token(i, token, special=kind == _CONTROL)
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind in (_CONTROL, _USER)
  ]
  vocab = {
    token: i
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    if kind in (_NORMAL, _CONTROL, _USER)
  }
  return {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': added,
    'normalizer': {'type': 'NFC'} if cut in _NFC else None,
    'pre_tokenizer': _CUTS[cut],
    'post_processor': None,
    'decoder': _GPT2,
    'model': {
      'type': 'BPE',
      'dropout': None,
      'unk_token': None,
      'continuing_subword_prefix': None,
      'end_of_word_suffix': None,
      'fuse_unk': False,
      'byte_fallback': False,
      'ignore_merges': cut in _WHOLE_WORDS,
      'vocab': vocab,
      'merges': merges,
    },
  }


def added_token(i: int, content: str, *, special: bool) -> dict[str, Any]:
  """An entry of `added_tokens`."""
  flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
  return {'id': i, 'content': content, **flags, 'special': special}


def _get(metadata: Mapping[str, Any], name: str) -> Any:
  key = f'tokenizer.ggml.{name}'
  if key not in metadata:
    raise ValueError(f'the metadata lack {key!r}')
  return metadata[key]
