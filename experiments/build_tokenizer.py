"""Builds the agent's tokeniser from the standard library's own functions.

  python -m experiments.build_tokenizer [--out=swe17/agent/data/tokenizer.json]

Trains byte-level BPE on functions of 3 to 15 lines, rendered as the `view` tool shows
them, and gives every piece in `wanted()` (operators, small numbers, anchors, results) a
token of its own. Deterministic for one Python version. Prints what the format costs:
tokens of a view. About 10 s on one core.
"""

from collections.abc import Iterable
import json
import pathlib

from absl import app, flags
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from experiments import program
from swe17.agent import scripted, tokenizer
from swe17.env.repair import anchors, library

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_OUT = flags.DEFINE_string(
  'out', str(tokenizer.PATH), 'file to write', flag_values=FLAGS
)
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
_WORDS = ('edited', 'undone', 'submitted')
_INDENTS = (4, 8, 12, 16, 20)
_ANCHORS = range(1, 50)
_THOUGHTS = ('look', 'done', *scripted.SUSPECT.values())
_PHRASES = (
  'Repair ',
  ': its tests fail.',
  'nothing to undo',
  'nothing changed',
  'no anchor ',
)
_COUNTS = range(9)  # cases a visible test may have


def pattern() -> str:
  """The pre-tokeniser: the first alternative that fits is a piece, left to right."""
  return '|'.join(
    [
      r'\n *',  # a line's end with the next one's indent
      '«n?[0-9]+»',
      r'(?:passed|failed) [0-9]+| of [0-9]+',
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
    *('\n' + ' ' * n for n in _INDENTS),
    *(f'«{n}»' for n in _ANCHORS),
    *(f'«n{n}»' for n in _ANCHORS),
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
  texts = [_view(source) for source in sources]
  return train(texts, pattern(), wanted(), tokenizer.MARKUP)


def train(texts: list[str], cut: str, whole: list[str], markup: tuple[str, ...]) -> str:
  """tokenizer.json of pieces that `cut` makes; `whole` and `markup` are one id each."""
  bpe = tokenizers.Tokenizer(models.BPE())
  bpe.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(cut), 'isolated'),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  bpe.decoder = decoders.ByteLevel()
  weight = max(1000, 10 * len(texts))
  trainer = trainers.BpeTrainer(
    vocab_size=tokenizer.VOCABULARY - len(markup),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  bpe.train_from_iterator([*texts, *whole * weight], trainer)
  return _with_markup(json.loads(bpe.to_str()), markup)


def write(out: str, data: str, whole: list[str]) -> tokenizer.Tokenizer:
  """Writes a tokenizer.json and loads it. ValueError if a piece of `whole` is cut."""
  path = pathlib.Path(out)
  path.write_text(data, 'utf-8')
  tok = tokenizer.load(path)
  lost = [piece for piece in whole if len(tok.encode(piece)) != 1]
  if lost:
    raise ValueError(f'pieces without a token of their own: {lost}')
  return tok


def say(tok: tokenizer.Tokenizer, split: str, texts: list[str]) -> None:
  """Prints what texts take, as a line of JSON."""
  sizes = [len(tok.encode(text)) for text in texts]
  mean, most = sum(sizes) / len(sizes), max(sizes)
  said = {'split': split, 'texts': len(texts), 'tokens': mean, 'longest': most}
  print(json.dumps(said))


def escape(text: str) -> str:
  return ''.join('\\' + c if c in '\\^$.|?*+()[]{}/-&' else c for c in text)


def _with_markup(spec: dict, markup: tuple[str, ...]) -> str:
  """Puts the markup before the trained vocabulary, in ids and in the file."""
  learned = sorted(spec['model']['vocab'], key=spec['model']['vocab'].get)
  tokens = [*markup, *learned]
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
    for i, token in enumerate(markup)
  ]
  return json.dumps(spec, ensure_ascii=False, indent=1) + '\n'


def _view(source: str) -> str:
  pieces = anchors.split(source)
  return anchors.view(pieces, anchors.names(pieces))


def measure(tok: tokenizer.Tokenizer, sources: list[str]) -> dict[str, float]:
  """Tokens of a view."""
  views = sorted(len(tok.encode(_view(source))) for source in sources)
  return {
    'functions': len(sources),
    'view_tokens': sum(views) / len(views),
    'view_tokens_p90': views[int(0.9 * len(views))],
  }


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  sources = sorted(set(library.functions()))
  tok = write(_OUT.value, build(sources), wanted())
  for name, value in measure(tok, sources[::4]).items():
    print(f'{name} {value:.3f}')


if __name__ == '__main__':
  program.run(main, FLAGS)
