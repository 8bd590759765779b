"""Trees of source distributions, and the faults that are put into them."""

import ast
import collections
import dataclasses
import itertools
import pathlib

import pytest

from swe17.env.packages import catalogue, fault_sites, faults, sources
from tests import tiny_package as tiny


def test_a_distribution_gives_plain_files_only():
  files = sources.unpack(tiny.distribution())
  assert files == tiny.FILES


def test_a_tree_comes_from_the_cache_and_is_checked_by_its_hash(tmp_path, monkeypatch):
  source = tiny.stored(tmp_path)
  tree = sources.tree('tiny', source, str(tmp_path))
  assert tree.files == tiny.FILES and tree.sha == tiny.tree().sha
  file = next((tmp_path / 'sdist').iterdir())
  file.write_bytes(file.read_bytes()[:-1] + b'!')
  monkeypatch.setattr(sources, 'releases', lambda name: ())
  with pytest.raises(sources.SourceError, match='no source distribution of version'):
    sources.tree('tiny', source, str(tmp_path))


def test_what_the_index_gives_must_have_the_hash(tmp_path, monkeypatch):
  source = tiny.stored(tmp_path / 'other')
  offered = sources.Release('1.0', source.sha256, 'https://index/tiny', '')
  monkeypatch.setattr(sources, 'releases', lambda name: (offered,))
  monkeypatch.setattr(sources, '_get', lambda url, accept: tiny.distribution({}))
  with pytest.raises(sources.SourceError, match='another hash'):
    sources.tree('tiny', source, str(tmp_path))
  monkeypatch.setattr(sources, '_get', lambda url, accept: tiny.distribution())
  assert sources.tree('tiny', source, str(tmp_path)).files == tiny.FILES
  monkeypatch.setattr(sources, 'releases', lambda name: ())
  assert sources.tree('tiny', source, str(tmp_path)).files == tiny.FILES  # kept


def test_a_distribution_that_is_none_or_too_large_is_refused(monkeypatch):
  with pytest.raises(sources.SourceError, match='cannot be read'):
    sources.unpack(b'no archive')
  monkeypatch.setattr(sources, 'MAX_BYTES', 100)
  with pytest.raises(sources.SourceError, match='over 100 bytes'):
    sources.unpack(tiny.distribution())


def test_source_is_what_lies_in_its_roots_and_is_no_test():
  tree = dataclasses.replace(
    tiny.tree(), roots=('src/tiny', 'one.py'), tests=('src/tiny/tests',)
  )
  assert tree.is_source('src/tiny/a.py') and tree.is_source('src/tiny/b/c.py')
  assert tree.is_source('one.py')
  for path in (
    'two.py',
    'src/tiny/a.txt',
    'src/tiny/tests/a.py',
    'src/tiny/test_a.py',
    'src/tiny/a_test.py',
    'src/tiny/tests.py',
    'src/tiny/conftest.py',
    'src/tiny/sitecustomize.py',
    'src/tiny',
    'src/tiny2/a.py',
    '',
  ):
    assert not tree.is_source(path), path


def test_catalogue_is_of_permissive_licences_and_exact_hashes():
  assert len(catalogue.SOURCES) >= 12
  assert set(catalogue.SOURCES) > catalogue.HELDOUT
  for source in catalogue.SOURCES.values():
    assert source.licence in ('MIT', 'BSD-3-Clause', 'Apache-2.0')
    assert len(source.sha256) == 64 and source.roots and source.tests


@pytest.mark.parametrize('name', ['parse', 'toolz'])
def test_a_real_package_has_source_tests_and_faults_of_all_kinds(name):
  source = catalogue.SOURCES[name]
  wanted = f'{source.distribution}-{source.version}-{source.sha256[:16]}.tar.gz'
  if not (sources.folder() / 'sdist' / wanted).is_file():
    pytest.skip('not in the cache')
  tree = sources.fetch(name)
  assert tree.source and all(path.endswith('.py') for path in tree.source)
  kinds = collections.Counter(fault.kind for fault in faults.singles(tree))
  assert set(kinds) == set(fault_sites.KINDS)
  for fault in itertools.islice(faults.candidates(tree, 3), 40):
    assert faults.apply(tree, fault).source != tree.source


def _texts(code: str) -> set[tuple[str, str]]:
  """(kind, module afterwards) of all faults of a module."""
  data = code.encode()
  return {
    (s.kind, (data[: s.start] + s.new + data[s.end :]).decode())
    for s in fault_sites.find(data)
  }


@pytest.mark.parametrize(
  'kind, code, want',
  [
    (
      'operator',
      'def f(a, b):\n  return a + b * 2\n',
      'def f(a, b):\n  return a - b * 2\n',
    ),
    ('operator', 'def f(a):\n  a  +=  1\n', 'def f(a):\n  a  -=  1\n'),
    (
      'operator',
      'def f(a):\n  return (a) is not (None)\n',
      'def f(a):\n  return (a) is (None)\n',
    ),
    ('operator', 'def f(a):\n  x = "é" == a\n', 'def f(a):\n  x = "é" != a\n'),
    ('boundary', 'def f(a):\n  x = a < 3\n', 'def f(a):\n  x = a <= 3\n'),
    ('boundary', 'def f(a):\n  x = a[1:]\n', 'def f(a):\n  x = a[0:]\n'),
    ('arguments', 'def f(a, b):\n  g(a, b)\n', 'def f(a, b):\n  g(b, a)\n'),
    ('branch', 'def f(a):\n  if a:\n    g()\n  h()\n', 'def f(a):\n  pass\n  h()\n'),
    (
      'branch',
      'def f(a):\n  if a:\n    g()\n  else:\n    h()\n',
      'def f(a):\n  if a:\n    pass\n  else:\n    h()\n',
    ),
    ('default', 'def f(a, b=True):\n  g()\n', 'def f(a, b=False):\n  g()\n'),
    (
      'removed',
      'def f(a):\n  """Doc."""\n  b = a\n  return b\n',
      'def f(a):\n  """Doc."""\n  raise NotImplementedError\n',
    ),
    (
      'reverted',
      'def f(a):\n  while a > g:\n    h()\n',
      'def f(a):\n  while not (a > g):\n    h()\n',
    ),
    ('reverted', 'def f(a):\n  if not a:\n    h()\n', 'def f(a):\n  if a:\n    h()\n'),
  ],
)
def test_a_kind_of_fault_changes_what_it_says(kind, code, want):
  assert (kind, want) in _texts(code)


def test_no_fault_is_in_a_docstring_an_f_string_or_outside_of_functions():
  code = 'X = 1 + 2\ndef f(a):\n  """1 + 2 < 3"""\n  return f"{a + 1 < 2}"\n'
  assert {kind for kind, _ in _texts(code)} == {'removed'}
  assert fault_sites.find(b'def f(:') == []


def test_faults_come_in_a_seeded_order_kind_after_kind():
  tree = tiny.tree()
  first, again = (list(faults.candidates(tree, 0)) for _ in range(2))
  assert first == again and first != list(faults.candidates(tree, 1))
  assert len({fault.id for fault in first}) == len(first)
  assert len({fault.kind for fault in first[:6]}) >= 5
  several = [fault for fault in first if fault.kind == faults.SEVERAL]
  assert several and all(len(set(f.functions)) == len(f.edits) > 1 for f in several)
  for fault in first:
    changed = faults.apply(tree, fault)
    assert changed.rest == tree.rest and changed.source != tree.source
    ast.parse(changed.source['src/tiny/core.py'])
    assert faults.diff(tree, changed).startswith('--- a/src/tiny/core.py')


def test_only_functions_that_are_asked_for_get_faults():
  found = list(faults.candidates(tiny.tree(), 0, frozenset({'src/tiny/core.py:13'})))
  assert found and {f for fault in found for f in fault.functions} == {
    'src/tiny/core.py:13'
  }


def test_a_fault_of_another_version_does_not_fit():
  fault = next(faults.candidates(tiny.tree(), 0))
  other = tiny.tree().with_source(tiny.changed(core=b'# new\n' + tiny.CORE))
  with pytest.raises(ValueError, match='another text'):
    faults.apply(other, fault)


def test_the_cache_folder_is_the_setting_or_the_users(monkeypatch, tmp_path):
  assert sources.folder(str(tmp_path)) == tmp_path
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  assert sources.folder() == tmp_path / 'swe17'
  monkeypatch.delenv('XDG_CACHE_HOME')
  assert sources.folder() == pathlib.Path.home() / '.cache' / 'swe17'
