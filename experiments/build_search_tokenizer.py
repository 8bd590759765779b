"""Builds the tokeniser of the small models that search, from the training tasks.

  python -m experiments.build_search_tokenizer

Trains byte-level BPE on questions of `retrieval_small` and on what grep says about the
names in them; held-out packages are not read. Files, line numbers and the frames of
calls are a token each (agent/tokenizer.py says why). About 10 s on one core.
"""

from absl import app, flags

from experiments import build_tokenizer, program
from swe17 import config, types
from swe17.agent import tokenizer
from swe17.env.retrieval import retrieval, search, small_trees, trees

FLAGS = flags.FlagValues()  # joined to the command line by program.run
PATH = tokenizer.PATH.parent / 'tokenizer_search.json'
_OUT = flags.DEFINE_string('out', str(PATH), 'file to write', flag_values=FLAGS)
_FILES = [f'{letter}.py' for letter in small_trees.FILES]
_SAID = (
  *('Which functions and methods call one that calls `', '`?', 'nothing found'),
  *('submitted', 'not submitted: ', '... ', ' more', 'def ', 'class ', 'return '),
  *('self.', ' = ', ' == ', ' in ', ' for ', ' if ', '()', '):', '([', '.', '('),
)


def _frame(name: str, argument: str) -> str:
  arguments = f'"arguments": {{"{argument}": "'
  return f'{tokenizer.CALL}{{"name": "{name}", {arguments}'


MARKUP = (
  *tokenizer.SPECIAL,
  _frame('grep', 'pattern'),
  _frame('glob', 'pattern'),
  _frame('read', 'path'),
  _frame('list', 'path'),
  _frame('submit', 'answer'),
  *('", "path": "', '", "first": ', ', "last": '),
  *(f'}}}}{tokenizer.CALL_END}', f'"}}}}{tokenizer.CALL_END}'),
)


def pattern() -> str:
  """The pre-tokeniser: the first alternative that fits is a piece, left to right."""
  return '|'.join(
    [
      r'\n *',
      r'[a-h]\.py:?',
      '-[0-9]{1,2}(?![0-9])',
      '|'.join(map(build_tokenizer.escape, _SAID)),
      '[A-Za-z_][A-Za-z0-9_]*',
      '[0-9]{1,2}',
      ', |: ',
      ' +',
      '[^A-Za-z0-9_ \n]',
    ]
  )


def wanted() -> list[str]:
  """Pieces that must be one token each."""
  numbers = range(small_trees.MAX_LINES + 1)
  return [
    *(str(n) for n in numbers),
    *(f'-{n}' for n in numbers),
    *_FILES,
    *(f'{file}:' for file in _FILES),
    *_SAID,
    *(', ', ': ', '\n', '\n    '),
  ]


def texts(tasks: list[types.Task]) -> list[str]:
  """What a model reads in tasks: the question, and grep's word on every name in it."""
  found = []
  for task in tasks:
    shelf = search.Shelf(trees.Tree(task.payload['files']), search.SMALL)
    names = {d.leaf for d in shelf.index.defs if d.kind != 'class'}
    found += [task.prompt, *(search.grep(shelf, name, '') for name in sorted(names))]
  return found


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'got arguments {argv[1:]}, want flags only')
  tasks = retrieval.load(config.Tasks(family=retrieval.SMALL))
  train = [task for task in tasks if task.split == 'train']
  read = texts(train)
  data = build_tokenizer.train(read, pattern(), wanted(), MARKUP)
  tok = build_tokenizer.write(_OUT.value, data, wanted())
  held = texts([task for task in tasks if task.split == 'heldout'])
  for name, said in (('train', read), ('heldout', held)):
    build_tokenizer.say(tok, name, said)


if __name__ == '__main__':
  program.run(main, FLAGS)
