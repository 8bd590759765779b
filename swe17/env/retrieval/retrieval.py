"""The families `retrieval` and `retrieval_small`: questions about source trees.

The agent gets a question and a tree it can search (search.py); it answers with files
and ranges of lines, and is scored by score.py. `retrieval` asks about whole packages,
`retrieval_small` about cut-down copies (small_trees.py) for models of short contexts.

The committed tables name package, kind and subject only: trees are read from the
installed packages, answers are computed from their syntax. A row's hash covers tree,
question and answer, so that a row which would mean something else is set aside.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import json
import keyword
import logging
import pathlib
import random
import string
from typing import Any

from swe17 import config, types
from swe17.env import base, table
from swe17.env.retrieval import questions, score, search, small_trees, symbols, trees

FAMILY, SMALL = 'retrieval', 'retrieval_small'
SOLVED_AT = 0.9
_DATA = pathlib.Path(__file__).parent
TABLES = {name: _DATA / f'{name}.jsonl' for name in (FAMILY, SMALL)}
_LIMITS = {FAMILY: search.WHOLE, SMALL: search.SMALL}
_HOW = (
  'Answer with submit: the places as path:first-last, separated by commas, and nothing '
  'else. Several calls of one turn run side by side.'
)


@dataclasses.dataclass(frozen=True)
class Row:
  """One line of a table."""

  id: str  # 'package/kind/n'
  package: str
  kind: str
  subject: str
  seed: int  # of the cut
  split: str
  one_grep: float  # best score of a single grep, when it was built
  sha: str  # `sha` of what it means


@dataclasses.dataclass(frozen=True)
class Asked:
  """A question with the tree that it is about."""

  shelf: search.Shelf
  question: questions.Question


def read_table(path: pathlib.Path) -> list[Row]:
  """All rows of a table file. ValueError names the line that is not a row."""
  return table.read(path, Row)


@functools.cache
def shelf(package: str) -> search.Shelf:
  """An installed package to search. `trees.TreeError` if it is not there."""
  return search.Shelf(trees.load(package), search.WHOLE)


def ask(family: str, package: str, kind: str, subject: str, seed: int) -> Asked:
  """The question of a row. `NoQuestionError` or `TreeError` says why there is none."""
  whole = shelf(package)
  if family == SMALL:
    tree, subject = small_trees.cut(whole.index, subject, seed)
    whole = search.Shelf(tree, _LIMITS[SMALL])
  return Asked(whole, questions.ask(whole.index, kind, subject))


def sha(asked: Asked) -> str:
  """16 hexadecimal digits over tree, question and answer."""
  question = asked.question
  truth = {path: list(map(list, ranges)) for path, ranges in question.truth.items()}
  whole = json.dumps([asked.shelf.tree.sha, question.text, truth])
  return hashlib.sha256(whole.encode()).hexdigest()[:16]


def read(cfg: config.Tasks) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """Regenerates the tasks that `cfg` asks for: (tasks, set-aside id -> reason).

  Set aside is a row whose package is missing or another one than when the table was
  built; the next rows of the split take its place. ValueError if fewer are left than
  asked for.
  """
  path = pathlib.Path(cfg.table) if cfg.table else TABLES[cfg.family]
  kinds = table.kinds(cfg, tuple(questions.KINDS))
  rows = (row for row in read_table(path) if row.kind in kinds)
  return table.choose(cfg, path, rows, lambda row: _task(cfg.family, row))


def _task(family: str, row: Row) -> types.Task | str:
  """The task of a row, or why there is none."""
  try:
    asked = ask(family, row.package, row.kind, row.subject, row.seed)
  except (questions.NoQuestionError, trees.TreeError) as e:
    return str(e)
  if sha(asked) != row.sha:
    return f'another {row.package} than when the table was built'
  return task_of(family, row.id, row.split, row.package, asked)


def task_of(
  family: str, task_id: str, split: str, package: str, asked: Asked
) -> types.Task:
  """A question as a task. A whole package is named, a cut goes along."""
  question = asked.question
  files = dict(asked.shelf.tree.files) if family == SMALL else None
  payload = {
    'package': package,
    'kind': question.kind,
    'files': files,
    'truth': {path: list(map(list, r)) for path, r in question.truth.items()},
    'gold': [['submit', {'answer': score.text(question.truth)}]],
  }
  text = question.text if family == SMALL else f'{question.text}\n{_HOW}'
  # Three cuts of one subject resemble each other: intervals go by subjects.
  unit = asked.question.subject if files is None else f'{package}:{question.names[0]}'
  return types.Task(task_id, family, split, unit, text, payload, SOLVED_AT)


def load(cfg: config.Tasks) -> tuple[types.Task, ...]:
  """`read`, with what was set aside in the log."""
  tasks, set_aside = read(cfg)
  if set_aside:
    some = ', '.join(f'{k}: {v}' for k, v in list(set_aside.items())[:3])
    logging.warning('%d tasks set aside (%s, ...)', len(set_aside), some)
  return tasks


PRACTICE = 'practice'
_SPELT = 0.4  # share of invented names with a part that is no word
_RENAMED = 12  # times that every training task of the table is practised on


def practice(heldout: Sequence[types.Task]) -> list[types.Task]:
  """Training cuts under other names: who has learnt names by heart finds nothing.

  Every definition gets a name that is made of words and letters of other names, and
  every cut has another choice and order of them, so that what is practised is to
  search, and to copy what one reads, whatever it is.
  """
  avoid = {task.payload['package'] for task in heldout}
  rows = [row for row in read_table(TABLES[SMALL]) if row.split == 'train']
  rows = [row for row in rows if row.package not in avoid]
  packages = sorted({row.package for row in rows})
  names = {d.leaf for package in packages for d in shelf(package).index.defs}
  words = sorted({word for name in names for word in name.strip('_').split('_')})
  found = []
  for i, row in enumerate(rows * _RENAMED):
    task = _practice_task(row, f'{PRACTICE}/{i}', words)
    found += [task] if task else []
  return found


def _invented(rng: random.Random, words: Sequence[str], count: int) -> list[str]:
  """Different names that no package has, as long as names are."""
  made: dict[str, None] = {}
  while len(made) < count:
    parts = rng.sample(words, rng.choice((1, 2, 2, 3)))
    if rng.random() < _SPELT:
      parts[rng.randrange(len(parts))] = ''.join(
        rng.choices(string.ascii_lowercase, k=rng.randint(2, 5))
      )
    name = rng.choice(('', '', '_')) + '_'.join(parts)
    usual = keyword.iskeyword(name) or name in symbols.common()
    if name.isidentifier() and not usual and len(name) > 2:
      made[name] = None
  return list(made)


def _practice_task(row: Row, task_id: str, words: Sequence[str]) -> types.Task | None:
  """A cut for a row's subject under other names; None if they spoil the question."""
  index = shelf(row.package).index
  rng = random.Random(task_id)
  try:
    tree, subject = small_trees.cut(index, row.subject, rng.randrange(1 << 30))
  except questions.NoQuestionError:
    return None
  defs = symbols.index(tree).defs
  old = sorted({d.leaf for d in defs if d.kind != 'class'})
  new = _invented(rng, words, len(old))
  exchange = dict(zip(old, new, strict=True))
  path, _, name = subject.partition(':')
  holder, dot, leaf = name.rpartition('.')
  if leaf not in exchange:
    return None
  place = search.Shelf(small_trees.renamed(tree, exchange), search.SMALL)
  try:
    subject = f'{path}:{holder}{dot}{exchange[leaf]}'
    question = questions.ask(place.index, row.kind, subject)
  except questions.NoQuestionError:
    return None
  return task_of(SMALL, task_id, 'train', row.package, Asked(place, question))


def truth(task: types.Task) -> dict[str, score.Ranges]:
  """The answer of a task."""
  found = task.payload['truth']
  return {
    path: score.union((a, b) for a, b in ranges) for path, ranges in found.items()
  }


def unsound(task: types.Task) -> str:
  """Why a task is none: its gold does not score 1, or what is no answer scores; ''."""
  gold = truth(task)
  if score.score(score.parse(score.text(gold)), gold).value != 1.0:
    return 'its gold does not score 1'
  if score.score({}, gold).value != 0.0:
    return 'an empty answer scores'
  return ''


TOOLS = (
  search.GREP,
  search.GLOB,
  search.READ,
  search.LIST,
  base.Tool(
    'submit',
    'Answer with places, path:first-last, separated by commas.',
    {'answer': 'str'},
    writes=True,
  ),
)


class RetrievalEnv:
  """One episode: searches run in threads, so that those of a turn are side by side."""

  tools: tuple[base.Tool, ...] = TOOLS

  def __init__(self, task: types.Task, place: search.Shelf):
    self._task = task
    self._shelf = place
    self._answer: dict[str, score.Ranges] = {}
    self.done = False

  @property
  def tree(self) -> trees.Tree:
    """What is searched."""
    return self._shelf.tree

  async def reset(self) -> str:
    self._answer, self.done = {}, False
    return self._task.prompt

  async def step(self, name: str, arguments: Mapping[str, Any]) -> str:
    if self.done:
      return 'already submitted'
    if name == 'submit':
      return self._submit(arguments['answer'])
    return await asyncio.to_thread(search.look, self._shelf, name, arguments)

  async def verify(self) -> types.Outcome:
    """The mean of both F_beta; 0 for who has not submitted."""
    if not self.done:
      return types.Outcome(0.0, 'not submitted')
    return types.Outcome(score.score(self._answer, truth(self._task)).value)

  def _submit(self, text: str) -> str:
    try:
      self._answer = score.parse(text)
    except ValueError as e:
      return f'not submitted: {e}'
    self.done = True
    return 'submitted'


class Host:
  """Environments of this process. There is nothing to start and nothing to close."""

  def __init__(self) -> None:
    self._cuts: dict[str, search.Shelf] = {}  # by task id: a group searches one

  async def verify(
    self, tasks: Iterable[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """(sound tasks, set-aside id -> reason)."""
    tasks = list(tasks)
    reasons = {task.id: unsound(task) for task in tasks}
    bad = {task_id: reason for task_id, reason in reasons.items() if reason}
    return [task for task in tasks if task.id not in bad], bad

  def env(self, task: types.Task) -> RetrievalEnv:
    files = task.payload['files']
    if files is None:
      return RetrievalEnv(task, shelf(task.payload['package']))
    if task.id not in self._cuts:
      self._cuts[task.id] = search.Shelf(trees.Tree(files), search.SMALL)
    return RetrievalEnv(task, self._cuts[task.id])

  async def close(self) -> None:
    return None


async def open_host(cfg: config.Sandbox) -> Host:
  """Nothing of the agent's runs, so that no sandbox is needed."""
  del cfg
  return Host()
