"""Copies of packages on this machine: found wherever they lie, and hidden."""

from collections.abc import Iterator
import pathlib
import sys
import sysconfig

import pytest

from swe17 import config
from swe17.env import copies, sandbox, shell


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Iterator[pathlib.Path]:
  """A Python's library and a tool that brings packages, in place of this machine's."""
  for name in (
    'lib/python3.11/json/__init__.py',
    'lib/python3.11/site-packages/wanted/__init__.py',
    'lib/tool/third_party/wanted/__init__.py',
    'lib/tool/third_party/other/__init__.py',
    'lib/tool/vendored/wanted.py',
    'lib/tool/json/__init__.py',
  ):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('copied = True\n')
  monkeypatch.setattr(sys, 'base_prefix', str(tmp_path))
  monkeypatch.setattr(copies, '_SYSTEM', str(tmp_path / 'lib'))
  copies._everything.cache_clear()
  yield tmp_path
  copies._everything.cache_clear()


def test_every_copy_is_found_and_the_library_spared(machine):
  found = {path.relative_to(machine).as_posix() for path in copies.find(['wanted'])}
  assert found == {
    'lib/python3.11/site-packages/wanted',
    'lib/tool/third_party/wanted',
    'lib/tool/vendored/wanted.py',
  }
  assert copies.find(['json', 'nowhere']) == []


async def test_a_hidden_copy_is_empty_in_a_sandbox():
  reason = sandbox._why_not_bubblewrap()
  if reason:
    pytest.skip(f'the kernel forbids what bubblewrap needs: {reason}')
  folder = pathlib.Path(sys.base_prefix, 'lib')
  library = next(folder.glob('python3.*')) / 'email'  # any that is shown, and a module
  options = copies.covering([library, library.parent / 'heapq.py'])
  runner = shell.Shell(config.Sandbox(), 'bubblewrap', 5.0, options=options)
  command = f'ls {library}; cat {library.parent}/heapq.py'
  said = (await runner.run(shell.pack({}), command)).output
  assert said.count('\n') == 1 and 'Permission denied' in said


def test_python_code_of_the_system_is_found_and_commands_and_libraries_are_not():
  own = pathlib.Path(sysconfig.get_path('stdlib'))
  places = copies.programs()
  for place in places:
    assert place.is_dir() and place.name not in ('bin', 'sbin', 'lib')
    assert place != own and place not in own.parents
    assert not any(place.glob('libc.so*')), place
  assert not any(a in b.parents for a in places for b in places)
