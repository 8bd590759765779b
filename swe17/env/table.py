"""Task tables: files of JSON lines, each a row of one dataclass."""

import json
import pathlib
from typing import TypeVar

Row = TypeVar('Row')


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
