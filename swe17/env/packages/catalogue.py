"""The packages whose source distributions become trees: exact versions, by their hash.

Pure Python, permissive licences, suites that pass offline in seconds with pytest alone.
"""

from collections.abc import Mapping
import dataclasses

_CONFIG = ('pyproject.toml', 'setup.cfg', 'tox.ini', 'pytest.ini')


@dataclasses.dataclass(frozen=True)
class Source:
  """Where a tree comes from and what is what in it. Paths are files or folders.

  Attributes:
    distribution: its name for pip.
    sha256: of the source distribution, a .tar.gz.
    licence: SPDX.
    roots: what is source; tests within them are not.
    tests: what pytest is given.
    path: what goes on Python's path; '' is the top.
    data: further paths that the suite reads.
    dependencies: names of other trees of the catalogue that it imports.
  """

  distribution: str
  version: str
  sha256: str
  licence: str
  roots: tuple[str, ...]
  tests: tuple[str, ...] = ('tests',)
  path: tuple[str, ...] = ('',)
  data: tuple[str, ...] = ()
  dependencies: tuple[str, ...] = ()

  @property
  def kept(self) -> tuple[str, ...]:
    """All paths that a tree is made of."""
    return (*self.roots, *self.tests, *self.data, *_CONFIG, 'conftest.py')


# Packages that are never trained on.
HELDOUT = frozenset({'addict', 'isodate', 'simpleeval', 'tinydb', 'voluptuous'})

SOURCES: Mapping[str, Source] = {
  'addict': Source(
    'addict',
    '2.4.0',
    'b3b2210e0e067a281f5646c8c5db92e99b7231ea8b0eb5f74dbdf9e259d4e494',
    'MIT',
    ('addict',),
    tests=('test_addict.py',),
  ),
  'boltons': Source(
    'boltons',
    '26.2.0',
    'd39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c',
    'BSD-3-Clause',
    ('boltons',),
  ),
  'cachetools': Source(
    'cachetools',
    '8.0.2',
    '30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0',
    'MIT',
    ('src/cachetools',),
    path=('src',),
  ),
  'inflection': Source(
    'inflection',
    '0.5.1',
    '1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417',
    'MIT',
    ('inflection',),
    tests=('test_inflection.py',),
  ),
  'isodate': Source(
    'isodate',
    '0.7.2',
    '4cd1aa0f43ca76f4a6c6c0292a85f40b35ec2e43e315b59f06e6d32171a953e6',
    'BSD-3-Clause',
    ('src/isodate',),
    path=('src',),
  ),
  'jsonpointer': Source(
    'jsonpointer',
    '3.12',
    '7a3dcc11b64053eaa9c549e85e413f8d40a075215f793a331bed9182a14251ae',
    'BSD-3-Clause',
    ('jsonpointer.py',),
    tests=('tests.py',),
    data=('bin',),
  ),
  'lark': Source(
    'lark',
    '1.3.1',
    'b426a7a6d6d53189d318f2b6236ab5d6429eaf09259f1ca33eb716eed10d2905',
    'MIT',
    ('lark',),
    # Not test_parser: it takes most of a minute.
    tests=(
      'tests/test_cache.py',
      'tests/test_grammar.py',
      'tests/test_lexer.py',
      'tests/test_pattern_matching.py',
      'tests/test_python_grammar.py',
      'tests/test_reconstructor.py',
      'tests/test_tools.py',
      'tests/test_tree_forest_transformer.py',
      'tests/test_tree_templates.py',
      'tests/test_trees.py',
    ),
    data=('examples', 'docs', 'tests'),
  ),
  'mistune': Source(
    'mistune',
    '3.4.0',
    '2eaf7952af928ca8d33b779762effc1da517b62c6ad85ec8ca957e3b07b9782a',
    'BSD-3-Clause',
    ('src/mistune',),
    path=('src',),
  ),
  'parse': Source(
    'parse',
    '1.22.4',
    '706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5',
    'MIT',
    ('parse',),
  ),
  'schema': Source(
    'schema',
    '0.7.8',
    'e86cc08edd6fe6e2522648f4e47e3a31920a76e82cce8937535422e310862ab5',
    'MIT',
    ('schema',),
    tests=('test_schema.py',),
    data=('LICENSE-MIT',),
  ),
  'simpleeval': Source(
    'simpleeval',
    '1.0.8',
    'b417f869c11f2de034eb919820a825f35d12ce99f63a43971947ce73679eb9ba',
    'MIT',
    ('simpleeval.py',),
  ),
  'sqlparse': Source(
    'sqlparse',
    '0.6.1',
    'ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7',
    'BSD-3-Clause',
    ('sqlparse',),
  ),
  'tabulate': Source(
    'tabulate',
    '0.10.0',
    'e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d',
    'MIT',
    ('tabulate',),
    tests=('test',),
  ),
  'tinydb': Source(
    'tinydb',
    '4.9.0',
    '6928b1fa785186bda7952a0ba05aaeedc883ede565ca9c7d608de44e5e75de70',
    'MIT',
    ('tinydb',),
  ),
  'tomlkit': Source(
    'tomlkit',
    '0.15.2',
    '83e32755ba1d20d9340bd069ee97e9f6232ba2346b63ffcba425de01f7e327a6',
    'MIT',
    ('tomlkit',),
  ),
  'toolz': Source(
    'toolz',
    '1.2.0',
    '9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490',
    'BSD-3-Clause',
    ('toolz', 'tlz'),
    tests=('toolz/tests', 'toolz/sandbox/tests', 'toolz/curried/tests'),
  ),
  'voluptuous': Source(
    'voluptuous',
    '0.16.0',
    '006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05',
    'BSD-3-Clause',
    ('voluptuous',),
    tests=('voluptuous/tests',),
  ),
  'webcolors': Source(
    'webcolors',
    '25.10.0',
    '62abae86504f66d0f6364c2a8520de4a0c47b80c03fc3a5f1815fedbef7c19bf',
    'BSD-3-Clause',
    ('src/webcolors',),
    path=('src',),
  ),
  'xmltodict': Source(
    'xmltodict',
    '1.0.4',
    '6d94c9f834dd9e44514162799d344d815a3a4faec913717a9ecbfa5be1bb8e61',
    'MIT',
    ('xmltodict.py',),
  ),
}
