"""Builds the tokeniser of the small models that make functions faster.

  python -m experiments.build_kernels_tokenizer

Trains byte-level BPE on training tasks of `kernels_small` and on the standard library's
own functions; every name, mark, feedback and frame of a call is a token of its own
(agent/tokenizer.py says why). About 15 s on one core.
"""

from absl import app, flags

from experiments import build_tokenizer, program
from swe17 import config, types
from swe17.agent import tokenizer
from swe17.env.kernels import kernels_small, small
from swe17.env.repair import library

FLAGS = flags.FlagValues()  # joined to the command line by program.run
PATH = tokenizer.PATH.parent / 'tokenizer_kernels.json'
_OUT = flags.DEFINE_string('out', str(PATH), 'file to write', flag_values=FLAGS)
_NAMES = (
  *small.FUNCTIONS,
  *small.LISTS,
  *small.QUERIES,
  *small.ARRAYS,
  *small.LOCALS,
  *('sum', 'max', 'min', 'sorted', 'list', 'tuple', 'set', 'len', 'zip', 'Counter'),
  *('copy', 'tolist', 'append', 'sort', 'count', 'x', 'y', 'i'),
)
_NUMPY = ('sum', 'max', 'min', *small.MAPS)
_PHRASES = (
  *('Make it faster.\n', 'edited', 'undone', 'nothing changed', 'no place '),
  *('wrong', 'run', 'parse', 'barred', 'return ', 'def '),
)
_SPACED = ('for', 'in', 'if', '@', '=', '+', '*', '%', '-')
_BARE = ('()', '):', '[i]', '[:', '.')
_PLACES = range(1, 10)
_TENTHS = range(100)  # of a speedup
MARKUP = (
  *tokenizer.SPECIAL,
  *(
    f'{tokenizer.CALL}{{"name": "{name}", "arguments": {{}}}}{tokenizer.CALL_END}'
    for name in ('undo', 'test')
  ),
  f'{tokenizer.CALL}{{"name": "edit", "arguments": {{"at": "',
  '", "new": "',
  f'"}}}}{tokenizer.CALL_END}',
)


def pattern() -> str:
  """The pre-tokeniser: the first alternative that fits is a piece, left to right."""
  escaped = build_tokenizer.escape
  return '|'.join(
    [
      r'\n *',
      '«[0-9]+»|»',
      r'correct [0-9]\.[0-9]',
      '|'.join(map(escaped, _PHRASES)),
      ' (?:' + '|'.join(map(escaped, _SPACED)) + ') ',
      '(?:np|math)\\.[a-z]+',
      '[A-Za-z_][A-Za-z0-9_]*',
      '[0-9]{1,2}',
      ', |: ',
      '|'.join(map(escaped, _BARE)),
      ' +',
      '[^A-Za-z0-9_ \n]',
    ]
  )


def wanted() -> list[str]:
  """Pieces that must be one token each."""
  return [
    *(str(n) for n in range(10)),
    *('\n', '\n    ', '»'),
    *(f'«{n}»' for n in _PLACES),
    *(f'correct {n // 10}.{n % 10}' for n in _TENTHS),
    *_PHRASES,
    *(f' {word} ' for word in _SPACED),
    *(f'np.{name}' for name in _NUMPY),
    *(f'math.{name}' for name in small.MAPS),
    *_NAMES,
    *(', ', ': '),
    *_BARE,
  ]


def texts(tasks: list[types.Task]) -> list[str]:
  """What a model reads in tasks."""
  return [task.prompt for task in tasks]


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  tasks, _ = kernels_small.read(config.Tasks(family=kernels_small.FAMILY))
  train = texts([task for task in tasks if task.split == 'train'])
  # The library's functions fill the vocabulary: what other code would need.
  data = build_tokenizer.train(
    [*train, *sorted(set(library.functions()))], pattern(), wanted(), MARKUP
  )
  tok = build_tokenizer.write(_OUT.value, data, wanted())
  held = texts([task for task in tasks if task.split == 'heldout'])
  for name, said in (('train', train), ('heldout', held)):
    build_tokenizer.say(tok, name, said)


if __name__ == '__main__':
  program.run(main, FLAGS)
