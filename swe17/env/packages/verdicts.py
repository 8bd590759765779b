"""Judges one fault of a package: a row of the table, or the reason why it is none.

For a package, once: its suite passes 5 times of 5, and a traced run tells which tests
run which function. For a fault: the tests that run its functions, no more than take a
moment, must catch it; those that fail must fail 5 times of 5, and of several edits each
alone must be caught. So a verdict takes about a second.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import random
import re
from typing import Any

from swe17 import config
from swe17.env import sandbox
from swe17.env.packages import catalogue, faults, rows, sources, suite

REPEATS = 5
UNFINISHED = 'the suite does not come to its end'  # the machine may be busy
SECONDS_A_TEST = 4.0
_GOLD_SECONDS = 600.0  # of one run of a whole suite
_RUN_SECONDS = 90.0
_SLOW = 0.6  # seconds of a test that is left out
_TESTS, _TESTS_SECONDS = 60, 1.0  # of one verdict
FEWEST = 3  # tests that run a function, below which a fault is not tried
_MOST_FAILING = 40
_PASSING = 25  # pass-to-pass tests of a row
_SHOWN = 3  # failing tests that a statement tells of
_MESSAGE = 300  # characters
_ADDRESS = re.compile(r'0x[0-9a-f]+')
# Where Python lies on the machine that builds, also cut in the middle by pytest.
# Folders below the sandbox's own have names of one run.
_FOLDER = re.compile(rf"{sandbox.WORK}/(?:[^\s'\"/]+/)*")
_PYTHON = re.compile(r'/[\w./+-]*python[\d.]*(?:/[\w./+-]*)?')


@dataclasses.dataclass(frozen=True)
class Suite:
  """What a package's tests do on its own source.

  Attributes:
    sha: of the tree.
    tests: id -> seconds, of those that passed every time.
    runs: 'path:line' of a function -> ids of such tests that run it.
    rejected: id -> why a test is of no use.
  """

  sha: str
  tests: Mapping[str, float]
  runs: Mapping[str, Sequence[str]]
  rejected: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What became of a candidate: a row, or the reason why it is none."""

  package: str
  fault: str  # as `short` names it
  kind: str
  reason: str
  row: rows.Row | None
  cpu_seconds: float


async def examine(
  cfg: config.Sandbox, backend: str, tree: sources.Tree
) -> tuple[Suite, float]:
  """Runs a package's suite `REPEATS` times and once traced: (Suite, CPU seconds).

  `suite.SuiteError` if the sandbox fails; ValueError if the suite does not run.
  """
  gold = await suite.run(
    cfg, backend, tree, None, 2 * SECONDS_A_TEST, seconds=_GOLD_SECONDS, repeats=REPEATS
  )
  if not gold.complete:
    raise ValueError(f'{tree.name}: its suite does not run: {gold.reason}')
  traced = await suite.run(
    cfg, backend, tree, None, 4 * SECONDS_A_TEST, seconds=_GOLD_SECONDS, trace=True
  )
  tests, rejected = {}, {}
  for test, result in gold.results.items():
    if test in gold.unsteady or traced.results.get(test) != result:
      rejected[test] = 'unsteady'
    elif result != 'passed':
      rejected[test] = result
    elif gold.durations[test] > _SLOW:
      rejected[test] = 'slow'
    else:
      tests[test] = gold.durations[test]
  runs: dict[str, list[str]] = {}
  for test in tests:
    for place in traced.touched.get(test, ()):
      runs.setdefault(place, []).append(test)
  cpu = gold.cpu_seconds + traced.cpu_seconds
  return Suite(tree.sha, tests, runs, rejected), cpu


def short(fault: faults.Fault) -> str:
  """A fault's name in a file."""
  return hashlib.sha256(fault.id.encode()).hexdigest()[:10]


async def judge(
  cfg: config.Sandbox,
  backend: str,
  tree: sources.Tree,
  known: Suite,
  fault: faults.Fault,
  seed: int,
) -> Verdict:
  """Examines one candidate. `suite.SuiteError` if the sandbox fails."""
  name = short(fault)
  spent = 0.0

  async def run(source: sources.Tree, tests: Sequence[str], **how: Any) -> suite.Report:
    nonlocal spent
    report = await suite.run(
      cfg, backend, source, tests, SECONDS_A_TEST, seconds=_RUN_SECONDS, **how
    )
    spent += report.cpu_seconds
    return report

  def verdict(reason: str, row: rows.Row | None = None) -> Verdict:
    return Verdict(tree.name, name, fault.kind, reason, row, round(spent, 3))

  rng = random.Random(f'{seed}/{tree.name}/{name}')
  chosen = choose(known, fault.functions, rng)
  if len(chosen) < FEWEST:
    return verdict('too few tests run it')
  faulty = faults.apply(tree, fault)
  first = await run(faulty, chosen)
  reason = _unfit(first, chosen)
  if reason:
    return verdict(reason)
  failing = [test for test in chosen if first.results.get(test) != 'passed']
  again = await run(faulty, failing, repeats=REPEATS - 1, explain=True)
  if not again.complete or again.unsteady or _passing(again, failing):
    return verdict('unsteady')
  for edit in fault.edits if len(fault.edits) > 1 else ():
    half = faults.apply(tree, faults.Fault(fault.kind, (edit,), ()))
    if not _failed(await run(half, failing), failing):
      return verdict('one of its edits is not caught')
  row = _row(tree, fault, name, seed, chosen, failing, again, rng)
  return verdict('', row)


def choose(known: Suite, functions: Sequence[str], rng: random.Random) -> list[str]:
  """Tests that run one of some functions, drawn until they would take too long.

  Of every function there are some; the quick ones first, since most are.
  """
  found: dict[str, None] = {}
  left = _TESTS_SECONDS
  for place in functions:
    tests = sorted(known.runs.get(place, ()))
    rng.shuffle(tests)
    quick = sorted(tests, key=lambda t: known.tests[t] > _SLOW / 4)
    for taken, test in enumerate(quick):
      if taken >= _TESTS // len(functions) or known.tests[test] > left:
        break
      found[test] = None
      left -= known.tests[test]
  return sorted(found)


def _unfit(report: suite.Report, chosen: Sequence[str]) -> str:
  """Why a first run makes no task; ''."""
  if report.forged:
    return 'bends the tests'
  if 'timeout' in report.results.values():
    return 'hangs'
  if not report.complete:
    return UNFINISHED
  if any('::' not in name for name in report.results):
    return 'does not import'
  failing = _failed(report, chosen)
  if not failing:
    return 'not caught'
  return f'over {_MOST_FAILING} tests fail' if len(failing) > _MOST_FAILING else ''


def _failed(report: suite.Report, tests: Sequence[str]) -> list[str]:
  return [test for test in tests if report.results.get(test) != 'passed']


def _passing(report: suite.Report, tests: Sequence[str]) -> list[str]:
  return [test for test in tests if report.results.get(test) == 'passed']


def _row(
  tree: sources.Tree,
  fault: faults.Fault,
  name: str,
  seed: int,
  chosen: Sequence[str],
  failing: Sequence[str],
  said: suite.Report,
  rng: random.Random,
) -> rows.Row:
  passing = [test for test in chosen if test not in failing]
  functions = sorted({rows.base(test) for test in failing})
  rng.shuffle(functions)
  # Half of the functions that fail are told of, so that the rest is hidden.
  told = functions[: min(_SHOWN, (len(functions) + 1) // 2)]
  shown = {}
  for function in told:
    test = next(t for t in failing if rows.base(t) == function)
    shown[test] = message(said.texts.get(test, 'it fails'), tree)
  return rows.Row(
    id=f'{tree.name}/{fault.kind}/{name}',
    package=tree.name,
    version=sources.SOURCES[tree.name].version,
    kind=fault.kind,
    split='heldout' if tree.name in catalogue.HELDOUT else 'train',
    seed=seed,
    sha=tree.sha,
    fail_to_pass=tuple(failing),
    pass_to_pass=tuple(sorted(rng.sample(passing, min(_PASSING, len(passing))))),
    shown=shown,
    edits=fault.edits,
  )


def message(text: str, tree: sources.Tree) -> str:
  """A failure's text without names of source files, and not too long.

  The same every time and on every machine.
  """
  lines = text.splitlines() or ['']
  kept = [line for line in lines if not any(path in line for path in tree.source)]
  text = _PYTHON.sub('<python>', _ADDRESS.sub('0x...', '\n'.join(kept)))
  text = _FOLDER.sub('<folder>/', text)
  return text[:_MESSAGE] or 'it fails'
