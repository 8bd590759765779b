"""Looks through a file system for what an agent must not find. Runs in the sandbox.

  python look.py needles.json      prints a JSON list of findings, [] if there is none

Needles: {"defs": {name: [shapes]}, "codes": {name: [digits]}, "distributions": [names],
"below": [folders], "files": [further files], "skipped": [folders]}. A shape names a
function whatever its decorators, docstring, annotations and layout; `codes` tell
compiled ones.

This file imports the standard library only, so that it can be carried anywhere.
"""

import ast
from collections.abc import Iterator, Mapping
import hashlib
import json
import marshal
import os
import re
import sys
import textwrap
import types
from typing import Any

_SKIPPED = ('/proc', '/sys', '/dev')
_HISTORY = ('.git', '.hg', '.svn', '.bzr')
_ARCHIVES = ('.whl', '.egg', '.zip', '.tar', '.gz', '.tgz', '.bz2', '.xz')
_LEFTOVER = re.compile(
  r'\.(patch|diff|orig|rej|bak|swp)$|(^|[._-])(gold|solution_patch)'
)
_BYTES = 4 << 20  # of a file that is read
_DEF = re.compile(rb'\bdef\s+(\w+)')


def shape(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
  """16 hexadecimal digits that name what a function does, as its syntax tells it."""
  copy = ast.parse(ast.unparse(node)).body[0]  # the tree itself stays as it is
  for part in ast.walk(copy):
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
      part.decorator_list, part.returns = [], None
      if ast.get_docstring(part) is not None and len(part.body) > 1:
        part.body = part.body[1:]
    elif isinstance(part, ast.arg):
      part.annotation = None
  return hashlib.sha256(ast.dump(copy).encode()).hexdigest()[:16]


def shapes(text: str, wanted: Any = None) -> Iterator[tuple[str, str]]:
  """(name, shape) of the functions of a file, those with `wanted` names or all; none of
  one that does not parse."""
  try:
    tree = ast.parse(textwrap.dedent(text))  # a method may stand alone
  except (SyntaxError, ValueError, RecursionError):
    return
  for node in ast.walk(tree):
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if function and (wanted is None or node.name in wanted):
      yield node.name, shape(node)


def codes(text: str) -> Iterator[tuple[str, str]]:
  """(name, digits) of every function of a text as it would be compiled."""
  try:
    waiting = [compile(textwrap.dedent(text), 'x', 'exec', dont_inherit=True)]
  except (SyntaxError, ValueError, RecursionError):
    return
  yield from _codes(waiting)


def _codes(waiting: list[Any]) -> Iterator[tuple[str, str]]:
  while waiting:
    code = waiting.pop()
    if isinstance(code, types.CodeType):
      waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
      if code.co_name.startswith('<'):
        continue  # a module, a comprehension: alike by chance
      facts = (code.co_argcount, code.co_varnames, sorted({*code.co_names}))
      yield code.co_name, hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def through(needles: Mapping[str, Any]) -> list[str]:
  """All findings, 'kind: path' each, in the order of the walk."""
  found: list[str] = []
  skipped = {*_SKIPPED, *needles.get('skipped', ())}
  for path in needles.get('files') or []:
    found += _of_file(path, os.path.basename(path), needles)
  for below in needles.get('below') or ['/']:
    for folder, folders, files in os.walk(below):
      folders[:] = [
        name for name in sorted(folders) if os.path.join(folder, name) not in skipped
      ]
      for name in folders:
        found += _of_folder(os.path.join(folder, name), name, needles)
      for name in sorted(files):
        found += _of_file(os.path.join(folder, name), name, needles)
  return found


def _of_folder(path: str, name: str, needles: Mapping[str, Any]) -> Iterator[str]:
  if name in _HISTORY:
    yield f'history: {path}'
  stem, _, kind = name.lower().rpartition('.')
  known = stem.partition('-')[0].replace('_', '-') in _names(needles)
  if kind in ('dist-info', 'egg-info') and known:
    yield f'installed: {path}'


def _of_file(path: str, name: str, needles: Mapping[str, Any]) -> Iterator[str]:
  lower = name.lower()
  if lower.endswith(_ARCHIVES):
    stem = re.split(r'-\d', lower)[0].replace('_', '-')
    if stem in _names(needles):
      yield f'archive: {path}'
  if _LEFTOVER.search(lower) and not path.startswith(('/usr/', '/lib')):
    yield f'left over: {path}'
  if not lower.endswith(('.py', '.pyc', '.txt', '.md', '.json')):
    return
  data = _read(path)
  if lower.endswith('.pyc'):
    for function in _compiled(data, needles['codes']):
      yield f'bytecode: {path} ({function})'
    return
  wanted = needles['defs']
  if any(each.decode('ascii', 'replace') in wanted for each in _DEF.findall(data)):
    for function, its in shapes(data.decode('utf-8', 'replace'), wanted):
      if its in wanted.get(function, ()):
        yield f'source: {path} ({function})'


def _names(needles: Mapping[str, Any]) -> set[str]:
  return {name.lower().replace('_', '-') for name in needles['distributions']}


def _read(path: str) -> bytes:
  try:
    if os.path.islink(path) or not os.path.isfile(path):
      return b''
    with open(path, 'rb') as file:
      return file.read(_BYTES)
  except OSError:
    return b''  # it cannot be read by who looks, nor by an agent


def _compiled(data: bytes, wanted: Mapping[str, Any]) -> Iterator[str]:
  """Names of wanted functions that a compiled file holds, told by their variables."""
  try:
    waiting = [marshal.loads(data[16:])]
  except (ValueError, EOFError, TypeError):
    return  # of another Python
  for name, its in _codes(waiting):
    if its in wanted.get(name, ()):
      yield name


if __name__ == '__main__':
  with open(sys.argv[1], encoding='utf-8') as given:
    print(json.dumps(through(json.load(given))))
