"""Which rows of a task table become tasks."""

import dataclasses
import pathlib

import pytest

from swe17 import config, types
from swe17.env import table

PATH = pathlib.Path('some.jsonl')


@dataclasses.dataclass(frozen=True)
class Row:
  id: str
  split: str


ROWS = [Row(f't{i}', 'train') for i in range(5)]
ROWS += [Row('h0', 'heldout'), Row('h1', 'heldout')]


def make(row: Row) -> types.Task | str | None:
  if row.id == 't1':
    return 'old'
  if row.id == 't2':
    return None
  return types.Task(row.id, 'f', row.split, 'u', '', {})


def test_the_next_rows_take_the_place_of_those_that_are_no_tasks():
  tasks, aside = table.choose(config.Tasks(train=2, heldout=1), PATH, ROWS, make)
  assert [task.id for task in tasks] == ['t0', 't3', 'h0']
  assert aside == {'t1': 'old'}  # and what was not asked for is not set aside
  tasks, _ = table.choose(config.Tasks(), PATH, ROWS, make)
  assert [task.id for task in tasks] == ['t0', 't3', 't4', 'h0', 'h1']


def test_too_few_tasks_are_an_error_with_a_reason():
  with pytest.raises(ValueError, match=r'has 3 tasks here, want 4; 1 rows .* \(old\)'):
    table.choose(config.Tasks(train=4), PATH, ROWS, make)
  with pytest.raises(ValueError, match=r'has 0 tasks here, want 1; .*has no more'):
    table.choose(config.Tasks(), PATH, ROWS[:1], make)


def test_kinds_are_all_or_those_named():
  known = ('x', 'y', 'z')
  assert table.kinds(config.Tasks(), known) == {'x', 'y', 'z'}
  assert table.kinds(config.Tasks(kinds='z, x'), known) == {'x', 'z'}
  with pytest.raises(ValueError, match="got 'w', want some of x, y, z"):
    table.kinds(config.Tasks(kinds='x,w'), known)
