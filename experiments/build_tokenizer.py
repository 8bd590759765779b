"""Builds the agent's tokeniser from the standard library's own functions.

  python -m experiments.build_tokenizer [--out=swe17/agent/data/tokenizer.json]

Trains byte-level BPE on functions of 3 to 15 lines, rendered as the `view` tool shows
them, and gives every piece in `wanted()` (operators, small numbers, indents, results) a
token of its own. Deterministic for one Python version. Prints what the format costs:
tokens of a view, and the share of candidate edits whose `old` can be copied token for
token from the line. About 10 s on one core.
"""

from collections.abc import Iterable
import json
import pathlib

from absl import app, flags
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from swe17.agent import scripted, tokenizer
from swe17.env import faults, library, repair

_OUT = flags.DEFINE_string('out', str(tokenizer.PATH), 'file to write')
_SPACED = (
  *('not in', 'is not', 'in', 'is', 'and', 'or', 'if', 'else', 'for', 'as', 'from'),
  *('<<=', '>>=', '//=', '**=', '<=', '>=', '==', '!=', '+=', '-=', '*=', '/=', '%='),
  *('&=', '|=', '^=', '//', '**', '<<', '>>', '->', ':='),
  *'-+*/%&|^@<>=',
)
_BARE = ('<=', '>=', '==', '!=', '//', '**', '<<', '>>', '->', '()', '):', '[]', "''")
_LEADING = (
  *('return', 'if', 'elif', 'while', 'not', 'def', 'for', 'raise', 'assert', 'with'),
  *('del', 'yield', 'lambda', 'except', 'import', 'from'),
)
_WORDS = ('edited', 'undone', 'submitted', 'line')
_THOUGHTS = ('look', 'done', *scripted.SUSPECT.values())
_PHRASES = (
  'Repair ',
  ': its tests fail.',
  'nothing to undo',
  'old is not in the code',
  'old occurs ',
  ' times in ',
)
_COUNTS = range(9)  # cases a visible test may have


def pattern() -> str:
  """The pre-tokeniser: the first alternative that fits is a piece, left to right."""
  escape = _escape
  return '|'.join(
    [
      r'\n',
      r'\| *(?=[^ ]|$)',  # the gutter after a line number, with the line's indent
      r'(?:passed|failed) [0-9]+| of [0-9]+|line (?=[0-9])',
      '|'.join(map(escape, _PHRASES)),
      ' (?:' + '|'.join(map(escape, _SPACED)) + ') ',
      '(?:' + '|'.join(_LEADING) + ') ',
      '[A-Za-z_][A-Za-z0-9_]*',
      '[0-9]{1,2}',
      ', |: ',
      '|'.join(map(escape, _BARE)),
      ' +',
      '[^A-Za-z0-9_ \n]',
    ]
  )


def wanted() -> list[str]:
  """Pieces that must be one token each, however rare they are in the library."""
  return [
    *(str(n) for n in range(100)),
    *('|' + ' ' * n for n in (0, 4, 8, 12, 16, 20)),
    *(f' {op} ' for op in _SPACED),
    *_BARE,
    *(f'{word} ' for word in _LEADING),
    *('pass', 'None', 'True', 'False', 'self', 'break', 'continue', 'else', 'try'),
    *(', ', ': '),
    *_WORDS,
    *_PHRASES,
    *_THOUGHTS,
    *(f'{word} {n}' for word in ('passed', 'failed') for n in _COUNTS),
    *(f' of {n}' for n in _COUNTS),
  ]


def build(sources: Iterable[str]) -> str:
  """Trains and returns tokenizer.json. The same sources give the same bytes."""
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(pattern()), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  bpe.decoder = decoders.ByteLevel()
  texts = [repair.view(source) for source in sources]
  weight = max(1000, 10 * len(texts))
  texts += [f'\n{piece}' * weight for piece in [*wanted(), 'line 1']]
  trainer = trainers.BpeTrainer(
    vocab_size=tokenizer.VOCABULARY - len(tokenizer.MARKUP),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  bpe.train_from_iterator(texts, trainer)
  return _with_markup(json.loads(bpe.to_str()))


def _escape(text: str) -> str:
  return ''.join('\\' + c if c in '\\^$.|?*+()[]{}/-&' else c for c in text)


def _with_markup(spec: dict) -> str:
  """Puts the markup before the trained vocabulary, in ids and in the file."""
  learned = sorted(spec['model']['vocab'], key=spec['model']['vocab'].get)
  tokens = [*tokenizer.MARKUP, *learned]
  spec['model']['vocab'] = {token: i for i, token in enumerate(tokens)}
  spec['added_tokens'] = [
    {
      'id': i,
      'content': token,
      'single_word': False,
      'lstrip': False,
      'rstrip': False,
      'normalized': False,
      'special': token in tokenizer.SPECIAL,
    }
    for i, token in enumerate(tokenizer.MARKUP)
  ]
  return json.dumps(spec, ensure_ascii=False, indent=1) + '\n'


def copyable(tok: tokenizer.Tokenizer, row: str, old: str) -> bool:
  """Whether the ids of `old` occur side by side among the ids of its row."""
  ids, part = tok.encode(row), tok.encode(json.dumps(old, ensure_ascii=False)[1:-1])
  return any(ids[i : i + len(part)] == part for i in range(len(ids)))


def measure(tok: tokenizer.Tokenizer, sources: list[str]) -> dict[str, float]:
  """Mean tokens of a view and of an edit's two texts; shares that can be copied."""
  raw, wide, length, edits = 0, 0, 0, 0
  views = [len(tok.encode(repair.view(source))) for source in sources]
  for source in sources:
    rows = repair.view(source).split('\n')
    for fault in faults.candidates(source):
      row = rows[fault.line - 1]
      old, new = tokenizer.widen(tok, row, fault.old, fault.new)
      raw += copyable(tok, row, fault.old)
      wide += copyable(tok, row, old)
      length += len(tok.encode(old)) + len(tok.encode(new))
      edits += 1
  return {
    'functions': len(sources),
    'view_tokens': sum(views) / len(views),
    'view_tokens_p90': sorted(views)[int(0.9 * len(views))],
    'candidates': edits / len(sources),
    'old_and_new_tokens': length / edits,
    'copyable_as_found': raw / edits,
    'copyable_widened': wide / edits,
  }


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  sources = sorted(set(library.functions()))
  data = build(sources)
  pathlib.Path(_OUT.value).write_text(data, 'utf-8')
  tok = tokenizer.load(pathlib.Path(_OUT.value))
  lost = [piece for piece in wanted() if len(tok.encode(piece)) != 1]
  if lost:
    raise ValueError(f'pieces without a token of their own: {lost}')
  for name, value in measure(tok, sources[::4]).items():
    print(f'{name} {value:.3f}')


if __name__ == '__main__':
  app.run(main)
