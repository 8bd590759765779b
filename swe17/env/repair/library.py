"""Short functions of the standard library, to read and to practise editing on.

They come without tests: nothing here says whether an edit is right. What a small model
learns from them is to read code and to write edits that apply.
"""

import ast
from collections.abc import Iterator, Sequence
import pathlib
import sysconfig

from swe17 import types
from swe17.env import splits
from swe17.env.repair import faults, repair

PRACTICE = 'practice'
_MAX_LINES, _MAX_CHARS = 15, 1200
_SKIPPED = ('test', 'idlelib', 'lib2to3', 'site-packages', 'turtledemo', 'pydoc_data')
_PRACTICE_CHARS = 380  # of a function to practise on: a short view, many edits
_CANDIDATES = 3  # edits it must offer


def functions() -> Iterator[str]:
  """Canonical sources, without docstring and decorators; no methods; in path order."""
  root = pathlib.Path(sysconfig.get_paths()['stdlib'])
  for path in sorted([*root.glob('*.py'), *root.glob('[a-z]*/*.py')]):
    if path.relative_to(root).parts[0] in _SKIPPED:
      continue
    for node in ast.walk(ast.parse(path.read_bytes())):
      if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        node.body = node.body[1:]
      if isinstance(node, ast.FunctionDef) and node.body:
        node.decorator_list = []
        source = ast.unparse(node)
        short = 2 <= source.count('\n') < _MAX_LINES and len(source) < _MAX_CHARS
        if short and 'self' not in source and source.isascii():
          yield source


def practice(heldout: Sequence[types.Task]) -> list[types.Task]:
  """Tasks without tests, on functions that resemble no held-out one.

  Left out is what has a held-out function's name or is a near-copy of one
  (`splits.alike`), so that practice says nothing of what evaluation asks.
  """
  names = {task.payload['function'] for task in heldout}
  avoid = {task.payload['original'] for task in heldout}
  found = []
  for source in sorted(set(functions())):
    name = source[len('def ') : source.index('(')]
    if len(source) >= _PRACTICE_CHARS or name in names:
      continue
    if len(faults.candidates(source)) >= _CANDIDATES:
      found.append((name, source))
  near = splits.alike([source for _, source in found], sorted(avoid))
  return [_task(i, *pair) for i, pair in enumerate(found) if pair[1] not in near]


def _task(index: int, name: str, source: str) -> types.Task:
  none: dict[str, list[str]] = {
    key: [] for key in ('visible', 'hidden', 'expected_visible', 'expected_hidden')
  }
  return types.Task(
    id=f'{PRACTICE}/{index}',
    family=repair.FAMILY,
    split='train',
    unit=name,
    prompt=f'Practise on {name}.',
    payload={'source': source, **none},
  )
