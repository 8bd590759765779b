"""A small repository with a history, and a row in the shape of SWE-bench tables."""

import json
import pathlib
import subprocess
from typing import Any

SOURCE = """def clamp(value, low, high):
  if value < low:
    return low
  if value > high:
    return low
  return value


def middle(values):
  return sorted(values)[len(values) // 2]
"""
_WRONG = '  if value > high:\n    return '
FIXED = SOURCE.replace(f'{_WRONG}low', f'{_WRONG}high')
TESTS = """from numbers_of import clamp, middle


def test_low():
  assert clamp(-1, 0, 9) == 0


def test_middle():
  assert middle([3, 1, 2]) == 2
"""
HIDDEN = (
  TESTS
  + """

def test_high():
  assert clamp(10, 0, 9) == 9
"""
)
FILE, TEST = 'src/numbers_of/__init__.py', 'tests/test_clamp.py'
FIELDS = pathlib.Path(__file__).parent / 'data/swebench_5.0.2_fields.json'


def git(folder: pathlib.Path, *words: str) -> str:
  identity = ['-c', 'user.name=n', '-c', 'user.email=n@example.org']
  done = subprocess.run(
    ['git', '-C', str(folder), *identity, *words],
    check=True,
    capture_output=True,
    text=True,
  )
  return done.stdout


def repository(folder: pathlib.Path) -> str:
  """Makes a clone whose next commit is the fix; the commit before it."""
  for name, text in (
    (FILE, SOURCE),
    (TEST, TESTS),
    ('README', 'numbers\n'),
    ('run.sh', '#!/bin/sh\n'),
    ('.gitattributes', 'tests export-ignore\n'),
  ):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
  (folder / 'run.sh').chmod(0o755)
  (folder / 'link').symlink_to('README')
  git(folder, 'init', '-q', '-b', 'main')
  git(folder, 'add', '-A')
  git(folder, 'commit', '-q', '-m', 'base')
  commit = git(folder, 'rev-parse', 'HEAD').strip()
  (folder / FILE).write_text(FIXED)
  git(folder, 'commit', '-q', '-a', '-m', 'the fix that nobody may find')
  return commit


def diff(name: str, old: str, new: str, scratch: pathlib.Path) -> str:
  """A diff as git writes it."""
  scratch.mkdir(parents=True, exist_ok=True)
  (scratch / 'old').write_text(old)
  (scratch / 'new').write_text(new)
  done = subprocess.run(
    ['git', 'diff', '--no-index', '--', 'old', 'new'],
    check=False,
    capture_output=True,
    text=True,
    cwd=scratch,
  )
  hunks = done.stdout[done.stdout.index('@@') :]
  return f'diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n{hunks}'


def row(commit: str, scratch: pathlib.Path, **changes: Any) -> dict[str, Any]:
  """A row with all fields that the real schema has."""
  made = {
    'repo': 'someone/numbers',
    'instance_id': 'someone__numbers-1',
    'base_commit': commit,
    'patch': diff(FILE, SOURCE, FIXED, scratch),
    'test_patch': diff(TEST, TESTS, HIDDEN, scratch),
    'problem_statement': 'clamp() gives the lower bound for values above the upper.',
    'hints_text': '',
    'created_at': '2026-11-01T00:00:00Z',
    'version': '1.0',
    'FAIL_TO_PASS': json.dumps([f'{TEST}::test_high']),
    'PASS_TO_PASS': json.dumps([f'{TEST}::test_low', f'{TEST}::test_middle']),
    'environment_setup_commit': commit,
  }
  return {**made, **changes}
