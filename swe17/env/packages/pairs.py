"""Release pairs: the source of one release, judged by the tests of the next.

  old source + new tests -> fail-to-pass: what the next release mended
  new source + new tests -> pass, every time: the gold

So the fault is a real one and the gold a real repair. Pairs are looked for in the
packages of the catalogue, newest first, package after package in turns; each one's
verdict is a line of a file, and a search that is started again goes on after the last.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
import logging
import pathlib
import random
import re
from typing import Any

from swe17 import config
from swe17.env import sandbox
from swe17.env.packages import catalogue, faults, rows, sources, suite, verdicts

REPEATS = 5  # of old and new, on the tests that are chosen
SECONDS_A_TEST = 4.0
_SECONDS = 240.0  # of a whole suite
_TRIED, _TAKEN = 24, 8  # pairs of one package
_MOST_FAILING, _PASSING = 40, 25  # tests of a row
_MOST_LINES = 600  # of the source's diff
_SHOWN = 3  # tests that a statement tells of
_PLAIN = re.compile(r'\d+(\.\d+)*')  # no release candidates


@dataclasses.dataclass(frozen=True)
class Pairs:
  """What was found."""

  rows: tuple[rows.Row, ...]
  rejected: dict[str, int]  # reason -> how many


@dataclasses.dataclass(frozen=True)
class Candidate:
  """Two releases of a package, one after the other."""

  package: str
  old: sources.Source
  new: sources.Source

  @property
  def id(self) -> str:
    return f'{self.package}/{rows.RELEASE}/{self.old.version}-{self.new.version}'


def candidates(name: str) -> list[Candidate]:
  """Pairs of consecutive releases of a package, the newest first.

  `sources.SourceError` if the index does not answer.
  """
  now = catalogue.SOURCES[name]
  plain = [r for r in sources.releases(now.distribution) if _PLAIN.fullmatch(r.version)]
  plain.sort(key=lambda release: tuple(map(int, release.version.split('.'))))
  made = [dataclasses.replace(now, version=r.version, sha256=r.sha256) for r in plain]
  return [Candidate(name, a, b) for a, b in itertools.pairwise(made)][::-1]


async def build(
  cfg: config.Sandbox,
  file: pathlib.Path,
  *,
  wanted: int,
  cache: str = '',
  packages: Sequence[str] = (),
  seed: int = 0,
  say: Callable[[str], None] = logging.info,
) -> Pairs:
  """Judges pairs until `wanted` are accepted, or none is left.

  `suite.SuiteError` if the sandbox fails; what was judged before it is in the file.
  """
  backend = sandbox.choose_backend(cfg)
  known = read(file)
  taken: Counter[str] = Counter(row.package for row, _ in known.values() if row)
  turns = [_turn(name, say) for name in packages or catalogue.SOURCES]
  file.parent.mkdir(parents=True, exist_ok=True)
  while turns and sum(taken.values()) < wanted:
    left = []
    for turn in turns:
      candidate = next(turn, None)
      if candidate is None or sum(taken.values()) >= wanted:
        continue
      left.append(turn)
      if candidate.id in known or taken[candidate.package] >= _TAKEN:
        continue
      row, reason = await judge(cfg, backend, candidate, cache, seed)
      known[candidate.id] = row, reason
      taken[candidate.package] += row is not None
      line = {
        'id': candidate.id,
        'reason': reason,
        'row': rows.to_json(row) if row else None,
      }
      with file.open('a', encoding='utf-8') as out:
        out.write(json.dumps(line, ensure_ascii=False) + '\n')
      said = f'{len(row.fail_to_pass)} tests fail' if row else reason
      say(f'{candidate.id}: {said} ({sum(taken.values())} of {wanted})')
    turns = left
  found = [row for row, _ in known.values() if row]
  why = Counter(reason for row, reason in known.values() if not row)
  return Pairs(tuple(sorted(found, key=lambda r: r.id)), dict(why.most_common()))


def _turn(name: str, say: Callable[[str], None]) -> Iterator[Candidate]:
  try:
    found = candidates(name)
  except sources.SourceError as e:
    say(str(e))
    return
  yield from found[:_TRIED]


def read(file: pathlib.Path) -> dict[str, tuple[rows.Row | None, str]]:
  """Verdicts by id: (row or None, reason). A last line that was cut off is left out."""
  found: dict[str, tuple[rows.Row | None, str]] = {}
  if not file.is_file():
    return found
  data = file.read_bytes()
  whole = data[: data.rfind(b'\n') + 1]
  if whole != data:
    file.write_bytes(whole)
  for line in whole.decode().splitlines():
    value = json.loads(line)
    row = rows.from_json(value['row']) if value['row'] else None
    found[value['id']] = row, value['reason']
  return found


async def judge(
  cfg: config.Sandbox, backend: str, pair: Candidate, cache: str, seed: int
) -> tuple[rows.Row | None, str]:
  """(the row, '') or (None, why there is none). `suite.SuiteError`."""
  pair, trees = _trees(pair, cache)
  if trees is None:
    return None, 'another layout, or not to be had'
  old, new = trees
  faulty = new.with_source(old.source)
  size = sum(line[:1] in '+-' for line in faults.diff(faulty, new).splitlines())
  if not size:
    return None, 'the source is the same'
  if size > _MOST_LINES:
    return None, f'over {_MOST_LINES} lines of source'

  async def run(tree: sources.Tree, tests: Sequence[str] | None, **how: Any):
    return await suite.run(
      cfg, backend, tree, tests, SECONDS_A_TEST, seconds=_SECONDS, **how
    )

  before = await run(faulty, None)
  if not before.complete:
    return None, 'the old source does not come to the end of the tests'
  if 'failed' not in before.results.values():
    return None, 'no test of the next release fails'
  after = await run(new, None)
  if not after.complete:
    return None, 'the new source does not come to the end of the tests'
  mended, kept = _sides(before, after)
  if not mended:
    return None, 'no test of the next release fails'
  if len(mended) > _MOST_FAILING:
    return None, f'over {_MOST_FAILING} tests fail'
  rng = random.Random(f'{seed}/{pair.id}')
  passing = sorted(rng.sample(kept, min(_PASSING, len(kept))))
  again = await run(faulty, [*mended, *passing], repeats=REPEATS - 1, explain=True)
  gold = await run(new, [*mended, *passing], repeats=REPEATS - 1)
  steady = not (again.unsteady or gold.unsteady) and gold.passed([*mended, *passing])
  if not steady or any(again.results.get(t) == 'passed' for t in mended):
    return None, 'unsteady'
  if any(again.results.get(t) != 'passed' for t in passing):
    return None, 'unsteady'
  return _row(pair, new, old, mended, passing, again, rng), ''


def _trees(
  pair: Candidate, cache: str
) -> tuple[Candidate, tuple[sources.Tree, sources.Tree] | None]:
  """The trees of a pair, in a layout that both releases have; None if in none."""
  for layout in _layouts(pair.new):
    some = Candidate(
      pair.package, *(dataclasses.replace(s, **layout) for s in (pair.old, pair.new))
    )
    try:
      old, new = (sources.tree(pair.package, s, cache) for s in (some.old, some.new))
    except sources.SourceError:
      continue
    if all(any(sources.within(p, t.tests) for p in t.files) for t in (old, new)):
      return some, (old, new)
  return pair, None


def _layouts(source: sources.Source) -> Iterator[dict[str, Any]]:
  """Where source may lie: as now, or as it did before (or will) below src/."""
  yield {}
  flat = [root.removeprefix('src/') for root in source.roots]
  if tuple(flat) != source.roots:
    yield {'roots': tuple(flat), 'path': ('',)}
    yield {'roots': tuple(f'{root}.py' for root in flat), 'path': ('',)}
    return
  yield {'roots': tuple(f'src/{root}' for root in flat), 'path': ('src',)}
  yield {'roots': tuple(f'{root}.py' for root in flat if not root.endswith('.py'))}


def _sides(before: suite.Report, after: suite.Report) -> tuple[list[str], list[str]]:
  """(tests that were mended, tests that pass in both).

  A test that was not run, or took too long, tells nothing that an agent could read.
  """
  good = [test for test, result in after.results.items() if result == 'passed']
  mended = [t for t in good if before.results.get(t) in ('failed', 'error')]
  kept = [t for t in good if before.results.get(t) == 'passed']
  return sorted(mended), sorted(kept)


def _row(
  pair: Candidate,
  new: sources.Tree,
  old: sources.Tree,
  mended: Sequence[str],
  passing: Sequence[str],
  said: suite.Report,
  rng: random.Random,
) -> rows.Row:
  functions = sorted({rows.base(test) for test in mended})
  rng.shuffle(functions)
  shown = {}
  for function in functions[: min(_SHOWN, (len(functions) + 1) // 2)]:
    test = next(t for t in mended if rows.base(t) == function)
    shown[test] = verdicts.message(said.texts.get(test, 'it fails'), old)
  release: Mapping[str, Any] = {
    'old': dataclasses.asdict(pair.old),
    'new': dataclasses.asdict(pair.new),
  }
  return rows.Row(
    id=pair.id,
    package=pair.package,
    version=pair.old.version,
    kind=rows.RELEASE,
    split='heldout' if pair.package in catalogue.HELDOUT else 'train',
    seed=0,
    sha=new.sha,
    fail_to_pass=tuple(mended),
    pass_to_pass=tuple(passing),
    shown=shown,
    release=json.loads(json.dumps(release)),
  )
