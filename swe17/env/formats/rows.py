"""Rows of SWE-bench tables: read from a file, checked field by field.

The fields are those of `swebench.types.SWEbenchInstance` (swebench 5.0.2): the two
lists of tests are lists, or lists written as JSON strings. Later tables add `image`,
`eval_script`, `log_parser`, `eval_type`; of these only `image` is used, since results
come from structured records here, never from a log.

A row that contradicts itself, or lacks what grading needs, is set aside with a reason.
"""

from collections.abc import Mapping
import dataclasses
import difflib
import importlib
import json
import pathlib
import re
from typing import Any

_TEXTS = ('instance_id', 'repo', 'base_commit', 'patch', 'test_patch')
_TEXTS += ('problem_statement',)
_LISTS = ('FAIL_TO_PASS', 'PASS_TO_PASS')
_OPTIONAL = ('hints_text', 'created_at', 'version', 'environment_setup_commit')
_OPTIONAL += ('image', 'eval_script', 'log_parser', 'eval_type', 'difficulty', 'split')
_OPTIONAL += ('image_assets', 'datasets')
KNOWN = (*_TEXTS, *_LISTS, *_OPTIONAL)
_COMMIT = re.compile(r'[0-9a-f]{7,64}')
_REPO = re.compile(r'[\w.-]+/[\w.-]+')
_ID = re.compile(r'[\w.-]+')


@dataclasses.dataclass(frozen=True)
class Instance:
  """One row that can be graded."""

  id: str
  repo: str  # owner/name
  commit: str
  statement: str
  patch: str  # the gold fix
  test_patch: str
  fail_to_pass: tuple[str, ...]
  pass_to_pass: tuple[str, ...]
  image: str  # '' where the table names none
  split: str  # '' where the table names none


def read(path: pathlib.Path) -> tuple[list[Instance], dict[str, str]]:
  """Instances of a .jsonl, .json or .parquet file, and set-aside id -> reason.

  ValueError if the file itself cannot be read, or two rows share an id.
  """
  if not path.is_file():
    raise ValueError(f'tasks.table: no file {str(path)!r}')
  good: list[Instance] = []
  aside: dict[str, str] = {}
  seen: set[str] = set()
  for number, row in enumerate(_raw(path), 1):
    name = row.get('instance_id') if isinstance(row, Mapping) else None
    name = name if isinstance(name, str) and name else f'row {number}'
    if name in seen:
      raise ValueError(f'{path}: two rows have instance_id {name!r}')
    seen.add(name)
    made = parse(row)
    if isinstance(made, str):
      aside[name] = made
    else:
      good.append(made)
  return good, aside


def _raw(path: pathlib.Path) -> list[Any]:
  if path.suffix == '.parquet':
    try:
      parquet = importlib.import_module('pyarrow.parquet')
    except ImportError as e:
      raise ValueError(
        f'{path}: reading parquet needs pyarrow (pip install pyarrow); or write the '
        'table as .jsonl'
      ) from e
    return parquet.read_table(path).to_pylist()
  text = path.read_text(encoding='utf-8')
  try:
    if path.suffix == '.json':
      rows = json.loads(text)
      if not isinstance(rows, list):
        raise ValueError(f'{path}: got {type(rows).__name__}, want a list of rows')
      return rows
    if path.suffix == '.jsonl':
      # Not splitlines: a string may hold U+2028, which is no line's end in JSON.
      return [json.loads(line) for line in text.split('\n') if line.strip()]
  except json.JSONDecodeError as e:
    raise ValueError(f'{path}: not JSON: {e}') from e
  raise ValueError(f'{path}: got {path.suffix!r}, want .jsonl, .json or .parquet')


def parse(row: Any) -> Instance | str:
  """The row as an instance, or why it is set aside."""
  if not isinstance(row, Mapping):
    return f'a row is {type(row).__name__}, want an object'
  missing = [name for name in (*_TEXTS, *_LISTS) if row.get(name) is None]
  if missing:
    return _missing(missing[0], row)
  for name in _TEXTS:
    if not isinstance(row[name], str):
      return f'{name}: got {type(row[name]).__name__}, want text'
    if not row[name].strip():
      return f'{name} is empty'
  lists = {name: _names(row[name]) for name in _LISTS}
  for name, found in lists.items():
    if isinstance(found, str):
      return f'{name}: {found}'
  fail, keep = (tuple(lists[name]) for name in _LISTS)
  made = Instance(
    id=row['instance_id'],
    repo=row['repo'],
    commit=row['base_commit'],
    statement=row['problem_statement'],
    patch=row['patch'],
    test_patch=row['test_patch'],
    fail_to_pass=fail,
    pass_to_pass=keep,
    image=row.get('image') or '',
    split=row.get('split') or '',
  )
  return _contradiction(made) or made


def _missing(name: str, row: Mapping[str, Any]) -> str:
  """What is missing, with the field that was meant where one looks like it."""
  unknown = [key for key in row if key not in KNOWN]
  near = difflib.get_close_matches(name, unknown, 1, 0.7)
  near = near or [key for key in unknown if key.lower() == name.lower()]
  return f'no {name}' + (f'; is {near[0]!r} meant?' if near else '')


def _names(value: Any) -> list[str] | str:
  """A list of names, also where it is written as a JSON string; else what is wrong."""
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except json.JSONDecodeError:
      return 'text that is not a JSON list'
  if not isinstance(value, list):
    return f'got {type(value).__name__}, want a list'
  if not all(isinstance(name, str) and name for name in value):
    return 'holds something that is no name'
  if len(set(value)) < len(value):
    return 'names a test twice'
  return value


def _contradiction(made: Instance) -> str:
  if not _ID.fullmatch(made.id):
    return f'instance_id: got {made.id!r}, want letters, digits, -, _ and .'
  if not _REPO.fullmatch(made.repo) or '..' in made.repo:
    return f'repo: got {made.repo!r}, want owner/name'
  if not _COMMIT.fullmatch(made.commit):
    return f'base_commit: got {made.commit!r}, want a hash'
  if not made.fail_to_pass:
    return 'FAIL_TO_PASS is empty: nothing grades it'
  both = set(made.fail_to_pass) & set(made.pass_to_pass)
  if both:
    return f'{min(both)} is in FAIL_TO_PASS and in PASS_TO_PASS'
  for name, diff in (('patch', made.patch), ('test_patch', made.test_patch)):
    if not re.search(r'^(diff --git |--- )', diff, re.MULTILINE):
      return f'{name} does not look like a diff'
  return ''


def not_pytest(made: Instance) -> str:
  """Why pytest cannot be asked for its tests by name; '' if it can."""
  for name in (*made.fail_to_pass, *made.pass_to_pass):
    file, colons, _ = name.partition('::')
    if not colons or not file.endswith('.py') or file.startswith('/'):
      return f'{name!r} is no pytest id'
    if name.count('[') > name.count(']'):
      return f'{name!r} is cut short'
  return ''
