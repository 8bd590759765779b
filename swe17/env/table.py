"""Task tables, files of JSON lines with a row of one dataclass each, and their use."""

from collections.abc import Callable, Collection, Iterable
import json
import pathlib
from typing import Protocol, TypeVar

from swe17 import config, types


class Named(Protocol):
  """What every row has."""

  @property
  def id(self) -> str: ...

  @property
  def split(self) -> str: ...


Row = TypeVar('Row')
NamedRow = TypeVar('NamedRow', bound=Named)


def read(path: pathlib.Path, row: type[Row]) -> list[Row]:
  """All rows of a file. ValueError names the line that is not a row."""
  if not path.is_file():
    raise ValueError(f'tasks.table: no file {str(path)!r}')
  rows = []
  for number, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1):
    try:
      rows.append(row(**json.loads(line)))
    except (json.JSONDecodeError, TypeError) as e:
      raise ValueError(f'{path}, line {number}: not a row of the table: {e}') from e
  return rows


def kinds(cfg: config.Tasks, known: Collection[str]) -> frozenset[str]:
  """The kinds that `cfg` asks for, '' = all. ValueError on one that is not known."""
  asked = [kind.strip() for kind in cfg.kinds.split(',')] if cfg.kinds else known
  for kind in asked:
    if kind not in known:
      raise ValueError(f'tasks.kinds: got {kind!r}, want some of {", ".join(known)}')
  return frozenset(asked)


def choose(
  cfg: config.Tasks,
  path: pathlib.Path,
  rows: Iterable[NamedRow],
  make: Callable[[NamedRow], types.Task | str | None],
) -> tuple[tuple[types.Task, ...], dict[str, str]]:
  """Tasks of the first rows of either split: (tasks, set-aside id -> reason).

  Args:
    cfg: how many are wanted.
    path: where the rows are from, for the error.
    rows: in the table's order.
    make: a row's task, why it has none here, or None if it is not asked for. The next
      rows of the split take the place of those.

  Raises:
    ValueError: fewer are left than asked for.
  """
  rows = list(rows)
  chosen: list[types.Task] = []
  set_aside: dict[str, str] = {}
  for split, asked in (('train', cfg.train), ('heldout', cfg.heldout)):
    found: list[types.Task] = []
    for row in (r for r in rows if r.split == split):
      if asked and len(found) == asked:
        break
      task = make(row)
      if isinstance(task, str):
        set_aside[row.id] = task
      elif task is not None:
        found.append(task)
    if len(found) < max(asked, 1):
      why = next(iter(set_aside.values()), 'the table has no more')
      raise ValueError(
        f'tasks.{split}: {path} has {len(found)} tasks here, want {max(asked, 1)}; '
        f'{len(set_aside)} rows were set aside ({why})'
      )
    chosen += found
  return tuple(chosen), set_aside
