"""A made-up package with a suite, as a tree and as a source distribution."""

import hashlib
import io
import pathlib
import tarfile

from swe17.env.packages import catalogue, sources

CORE = b'''"""Arithmetic, badly needed."""


def clamp(x, low=0, high=10):
  """Keeps x between two bounds."""
  if x < low:
    return low
  if x > high:
    return high
  return x


def mean(values):
  total = 0
  for value in values:
    total = total + value
  return total / len(values)


class Counter:
  def __init__(self, start=1):
    self.count = start

  def up(self, by=1):
    self.count += by
    return self.count
'''
TESTS = b"""import unittest

import pytest

import tiny


@pytest.mark.parametrize('x, want', [(-1, 0), (0, 0), (5, 5), (10, 10), (99, 10)])
def test_clamp(x, want):
  assert tiny.clamp(x) == want


def test_clamp_bounds():
  assert tiny.clamp(5, 6, 7) == 6
  assert tiny.clamp(8, high=7, low=6) == 7


def test_mean():
  assert tiny.mean([1, 2, 6]) == 3


def test_mean_of_one():
  assert tiny.mean([4]) in (4, 4.0)


class CounterTest(unittest.TestCase):
  def test_up(self):
    counter = tiny.Counter()
    self.assertEqual(counter.up(), 2)
    self.assertEqual([counter.up(3)], [5])

  def test_start(self):
    for start in (1, 2):
      with self.subTest(start=start):
        self.assertEqual(tiny.Counter(start).up(), start + 1)

  @unittest.skip('later')
  def test_down(self):
    raise AssertionError
"""
FILES = {
  'src/tiny/__init__.py': b'from tiny.core import Counter, clamp, mean\n',
  'src/tiny/core.py': CORE,
  'tests/test_tiny.py': TESTS,
  'pyproject.toml': b'[tool.pytest.ini_options]\naddopts = "--strict-markers"\n',
}
FILE = 'tests/test_tiny.py'
CLAMP = [f'{FILE}::test_clamp[{x}-{y}]' for x, y in (['-1', '0'], ['5', '5'])]
MEAN = f'{FILE}::test_mean'
UP = f'{FILE}::CounterTest::test_up'
FAULT = (b'if x < low:', b'if not (x < low):')  # in CORE


def tree() -> sources.Tree:
  return sources.Tree('tiny', FILES, ('src/tiny',), ('tests',), ('src',))


def changed(**modules: bytes) -> dict[str, bytes]:
  """The package's source with some modules exchanged."""
  return {
    **tree().source,
    **{f'src/tiny/{name}.py': data for name, data in modules.items()},
  }


def faulty(before: bytes = b'') -> dict[str, bytes]:
  """Source with a fault in clamp, and code that runs when it is imported."""
  return changed(core=before + b'\n' + CORE.replace(*FAULT))


def distribution(files: dict[str, bytes] = FILES) -> bytes:
  """A .tar.gz; also with what must not come out of it."""
  made = io.BytesIO()
  with tarfile.open(fileobj=made, mode='w:gz') as tar:
    for name, data in {
      **files,
      'tiny.egg-info/PKG-INFO': b'',
      'src/a.pyc': b'',
    }.items():
      member = tarfile.TarInfo(f'tiny-1.0/{name}')
      member.size = len(data)
      tar.addfile(member, io.BytesIO(data))
    link = tarfile.TarInfo('tiny-1.0/src/tiny/link.py')
    link.type, link.linkname = tarfile.SYMTYPE, '/etc/passwd'
    tar.addfile(link)
    out = tarfile.TarInfo('tiny-1.0/../../out.py')
    tar.addfile(out)
  return made.getvalue()


def stored(cache: pathlib.Path, data: bytes | None = None) -> catalogue.Source:
  """Puts a distribution into a cache; how the catalogue would tell of it."""
  data = distribution() if data is None else data
  sha = hashlib.sha256(data).hexdigest()
  source = catalogue.Source(
    'tiny', '1.0', sha, 'MIT', ('src/tiny',), ('tests',), ('src',)
  )
  folder = cache / 'sdist'
  folder.mkdir(parents=True, exist_ok=True)
  (folder / f'tiny-1.0-{sha[:16]}.tar.gz').write_bytes(data)
  return source
