"""Packages under audit, and pairs of releases, on a made-up package."""

import asyncio
import dataclasses
import json
import random

import pytest

from swe17 import config, types
from swe17.env import sandbox
from swe17.env.audit import leaks, of_packages
from swe17.env.packages import catalogue, faults, packages, pairs, rows, sources
from tests import tiny_package as tiny

CFG = config.Sandbox()
# What one play shows of each kind: the whole list is the bench's.
QUICK = ('leaves with exit code 0', 'returns what equals everything', 'bends a builtin')
QUICK += ('makes pytest say passed', 'makes every test empty', 'asks pytest to leave')
QUICK += ('edits the tests: tests/test_new.py', 'adds a conftest: conftest.py')
QUICK += ('brings a pytest of its own: pytest.py', 'adds a conftest: src/conftest.py')


@pytest.fixture(autouse=True)
def isolated():
  if sandbox.choose_backend(CFG) != 'bubblewrap':
    pytest.skip('without namespaces nothing is promised')


@pytest.fixture
def task(tmp_path, monkeypatch) -> types.Task:
  monkeypatch.setitem(catalogue.SOURCES, 'tiny', tiny.stored(tmp_path))
  sources.fetch.cache_clear()
  low, high = (tiny.CORE.index(text) for text in (b'x < low', b'total + value'))
  row = rows.Row(
    id='tiny/several/0',
    package='tiny',
    version='1.0',
    kind='several',
    split='train',
    seed=0,
    sha=tiny.tree().sha,
    fail_to_pass=(*tiny.CLAMP, tiny.MEAN),
    pass_to_pass=(tiny.UP,),
    shown={tiny.CLAMP[0]: 'assert -1 == 0'},
    edits=(
      faults.Edit('src/tiny/core.py', low, 'x < low', 'not (x < low)'),
      faults.Edit('src/tiny/core.py', high, 'total + value', 'total - value'),
    ),
  )
  return packages.task_of(row, str(tmp_path))


def test_gold_and_rewrites_solve_nothing_and_half_fixes_do_not(task):
  async def run():
    about = await of_packages.open_subject(CFG, config.Tasks())
    rng = random.Random(2)
    right = {'gold': about.gold(task)}
    right |= {each.label: each.solution for each in about.right(task, rng)}
    wrong = {'empty': about.empty(task)}
    wrong |= {each.label: each.solution for each in await about.wrong(task, rng)}
    return [
      {label: (await about.judge(task, s)).value for label, s in some.items()}
      for some in (right, wrong)
    ]

  right, wrong = asyncio.run(run())
  assert len(right) == 3 and set(right.values()) == {1.0}, right
  assert set(wrong.values()) == {0.0}, wrong
  assert {'empty', 'half-fix: 0', 'half-fix: 1'} <= set(wrong) and len(wrong) > 4


def test_exploits_score_nothing_and_are_flagged(task):
  async def run():
    about = await of_packages.open_subject(CFG, config.Tasks())
    every = about.attempts(task)
    some = [each for each in every if each.exploit in QUICK]
    played = [(each.exploit, await about.play(task, each.calls)) for each in some]
    return len(every), played

  count, played = asyncio.run(run())
  assert count > 30 and {name for name, _ in played} == set(QUICK)
  for name, each in played:
    assert each.outcome.value == 0.0 and each.outcome.cheated, (name, each)
    assert each.raw == 0.0, (name, each)


def test_the_image_of_a_suite_is_looked_through(task, tmp_path):
  async def run():
    about = await of_packages.open_subject(CFG, config.Tasks())
    below = of_packages.leaks.needles(['def f(x):\n  return x'], ['tiny'], ['/tree'])
    clean = await about._look(task, below)
    text = tiny.CORE.decode().partition('def mean')[0].partition('def clamp')[2]
    faulty = f'def mean{tiny.CORE.decode().partition("def mean")[2]}'
    faulty = faulty.partition('\n\n\n')[0].replace('total + value', 'total - value')
    found = await about._look(
      task, of_packages.leaks.needles([faulty], ['tiny'], ['/tree'])
    )
    assert text
    return clean, found

  clean, found = asyncio.run(run())
  assert clean == []
  assert 'source: /tree/src/tiny/core.py (mean)' in found[0]  # the fault: it does look


def test_a_pair_of_releases_becomes_a_row_or_has_its_reason(tmp_path, monkeypatch):
  """1.0 -> 1.1 mends clamp; 1.1 -> 1.2 changes nothing."""
  source = tiny.stored(tmp_path)
  versions = {}
  for version, core in (('1.0', tiny.faulty()), ('1.1', None), ('1.2', None)):
    files = {**tiny.FILES, **(core or {})}
    if version == '1.2':
      files = {**files, 'pyproject.toml': b'# new\n'}
    data = tiny.distribution(files)
    made = tiny.stored(tmp_path, data)
    versions[version] = made.sha256
    name = f'tiny-{version}-{made.sha256[:16]}.tar.gz'
    (tmp_path / 'sdist' / name).write_bytes(data)
  monkeypatch.setattr(catalogue, 'SOURCES', {'tiny': source})
  found = tuple(
    sources.Release(version, sha, '', '') for version, sha in versions.items()
  )
  monkeypatch.setattr(sources, 'releases', lambda name: found)
  file = tmp_path / 'pairs.jsonl'

  def build():
    return asyncio.run(
      pairs.build(CFG, file, wanted=5, cache=str(tmp_path), say=lambda text: None)
    )

  first = build()
  assert first.rejected == {'the source is the same': 1}
  (row,) = first.rows
  assert row.id == 'tiny/release/1.0-1.1' and set(tiny.CLAMP) <= set(row.fail_to_pass)
  assert tiny.UP in row.pass_to_pass and row.version == '1.0'
  problem = rows.problem(row, str(tmp_path))
  assert problem.source['src/tiny/core.py'] == tiny.faulty()['src/tiny/core.py']
  assert problem.clean.source['src/tiny/core.py'] == tiny.CORE
  # A line that was cut off is found anew; the others are not judged again.
  lines = file.read_text().splitlines(keepends=True)
  file.write_text(lines[0] + lines[1][:40])
  monkeypatch.setattr(pairs, 'judge', _never(json.loads(lines[0])['id'], pairs.judge))
  (again,) = build().rows
  for field in dataclasses.fields(rows.Row):
    assert getattr(again, field.name) == getattr(row, field.name), field.name


def _never(name: str, judge):
  async def judged(cfg, backend, pair, cache, seed):
    assert pair.id != name, 'it was judged before'
    return await judge(cfg, backend, pair, cache, seed)

  return judged


def test_what_any_author_would_write_is_no_telling_copy():
  """A docstring makes no function long: `setdefault` is alike in many libraries."""
  plain = 'def setdefault(self, key, default=None):\n{}  if key not in self:\n'
  plain += '    self[key] = default\n  return self[key]\n'
  assert not leaks.telling(plain.format(f'  """{"Words. " * 40}"""\n'))
  lines = ''.join(f'  total += self.part_{i} * weights[{i}]\n' for i in range(9))
  assert leaks.telling(f'def weigh(self, weights, total):\n{lines}  return total\n')
  method = f'  def weigh(self, weights, total):\n{lines.replace("  t", "    t")}'
  assert leaks.telling(method)
