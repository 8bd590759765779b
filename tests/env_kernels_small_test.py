"""Small kernels: each edit of a gold helps and keeps results, each decoy's does not."""

import numpy as np
import pytest

from swe17 import config, types
from swe17.agent import kernels_scripted
from swe17.env.kernels import kernels_small, small, values


def ran(function: small.Function, pieces, seed: int = 0):
  """(what a version returns, its arguments afterwards), as the bench compares them."""
  scope: dict = {}
  exec(small.source(pieces), scope)
  arguments = small.inputs(np.random.default_rng(seed), True)
  result = scope[function.name](*arguments)
  return values.decode(values.encode([result, list(arguments)]))


def test_a_seed_makes_the_same_function_every_time():
  assert small.make(5) == small.make(5)
  assert len({small.view(small.make(seed).pieces) for seed in range(60)}) == 60


def test_golds_keep_what_a_function_returns_and_leaves():
  for seed in range(80):
    function = small.make(seed)
    gold = small.edited(function, function.gold)
    assert (
      values.differs(ran(function, function.pieces), ran(function, gold), 1e-9) == ''
    )
    assert len(function.gold) == len(function.wasteful) in small.WASTEFUL


def test_whoever_edits_decoys_as_if_they_were_waste_breaks_or_gains_nothing():
  broken = kept = 0
  for seed in range(60):
    function = small.make(seed)
    view = small.view(function.pieces)
    for place in range(1, len(function.pieces) // 2 + 1):
      if place in function.gold:
        continue
      for text in kernels_scripted.options(view, str(place)):
        pieces = small.edited(function, {place: text})
        try:
          got = ran(function, pieces)
        except (TypeError, AttributeError, NameError, LookupError, ValueError):
          broken += 1
          continue
        except values.Unserialisable:
          broken += 1
          continue
        if values.differs(ran(function, function.pieces), got, 1e-9):
          broken += 1
        else:
          kept += 1
  assert broken > 2 * kept > 0


def test_the_view_shows_every_place_between_marks():
  function = small.make(3)
  view = small.view(function.pieces)
  for place in range(1, len(function.pieces) // 2 + 1):
    assert f'«{place}»{function.pieces[2 * place - 1]}»' in view
  assert view.count('«') == len(function.pieces) // 2


def test_the_table_names_functions_of_this_version_and_splits_by_unit():
  rows = kernels_small.read_table(kernels_small.TABLE)
  assert len(rows) > 300 and len({row.id for row in rows}) == len(rows)
  sides: dict[str, set[str]] = {}
  for row in rows:
    sides.setdefault(row.unit, set()).add(row.split)
  assert all(len(split) == 1 for split in sides.values())
  assert 0.1 < sum(row.split == 'heldout' for row in rows) / len(rows) < 0.4
  for row in rows[::20]:
    function = small.make(row.seed)
    assert kernels_small.sha(function) == row.sha
    assert kernels_small.unit(function) == row.unit


def test_settings_choose_tasks_and_what_there_is_too_little_of_is_refused():
  cfg = config.Tasks(family=kernels_small.FAMILY, train=6, heldout=3, attempts=2)
  tasks, aside = kernels_small.read(cfg)
  assert [t.split for t in tasks] == ['train'] * 6 + ['heldout'] * 3 and aside == {}
  assert all(t.payload['attempts'] == 2 for t in tasks)
  few = config.Tasks(family=kernels_small.FAMILY, kinds='dot,member,again', train=1)
  assert {'dot', 'member', 'again'}.issuperset(
    kernels_small.read(few)[0][0].unit.split('+')
  )
  with pytest.raises(ValueError, match=r'tasks.train: .* want 9999'):
    kernels_small.read(config.Tasks(family=kernels_small.FAMILY, train=9999))
  with pytest.raises(ValueError, match='want some of reduce'):
    kernels_small.read(config.Tasks(family=kernels_small.FAMILY, kinds='reduced'))


def test_a_row_that_means_another_function_is_set_aside(tmp_path):
  lines = kernels_small.TABLE.read_text().splitlines()
  sides = [next(x for x in lines if f'"{s}"' in x) for s in ('train', 'heldout')]
  stale = lines[0].replace('"sha": "', '"sha": "0').replace('"id": "', '"id": "old/')
  path = tmp_path / 'table.jsonl'
  path.write_text('\n'.join([*sides, stale]) + '\n')
  cfg = config.Tasks(family=kernels_small.FAMILY, table=str(path))
  tasks, aside = kernels_small.read(cfg)
  assert len(tasks) == 2 and len(aside) == 1
  assert isinstance(tasks[0], types.Task)
