"""`repair_packages` under audit: whole source trees, judged by their suites."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import pathlib
import random
from typing import Any

from swe17 import config, types
from swe17.env import sandbox
from swe17.env.audit import cheating, exploits, leaks, look, rewrites, subject
from swe17.env.packages import faults, packages, rows, sources, suite

MUTANTS, RIGHT, LESS = 3, 2, 2  # tried a task
_WHOLE_SECONDS = 120.0  # of a whole suite
_LOOK_SECONDS = 170.0
_SHADOWS = 'shadows a module'
_LOOK = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent
sys.path.insert(0, str(here))
import look

def test_nothing_is_to_be_found():
  found = look.through(json.loads((here / 'needles.json').read_text()))
  own = [f for f in found if '/look_tests/' not in f]
  assert own == [], 'FOUND' + json.dumps(own[:12])
"""


class Subject(subject.Hosted[packages.Host]):
  """The family. A solution is the files of a source."""

  def __init__(self, cfg: config.Sandbox, host: packages.Host, backend: str):
    super().__init__(packages.FAMILY, host)
    self._cfg, self._backend = cfg, backend
    self._whole: dict[str, frozenset[str]] = {}  # package -> tests that pass on it

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """All of them: gold and fault of each are judged anyway."""
    return list(tasks), {}

  async def judge(self, task: types.Task, solution: Any) -> types.Outcome:
    """The outcome of a source. The builder has run gold and nothing 5 times each."""
    problem = packages.problem_of(task)
    try:
      report = await self._host.runner.run(problem.given(solution), problem.row.tests)
    except suite.SuiteError as e:
      return types.Outcome(None, f'the verifier failed: {e}')
    return types.Outcome(1.0 if report.passed(problem.row.tests) else 0.0)

  def gold(self, task: types.Task) -> dict[str, bytes]:
    return dict(packages.problem_of(task).clean.source)

  def empty(self, task: types.Task) -> dict[str, bytes]:
    return dict(packages.problem_of(task).source)

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    """The gold with the function that was at fault written otherwise."""
    problem = packages.problem_of(task)
    made = [
      subject.Tried(label, {**problem.clean.source, path: data})
      for path, part in self._changed(problem)
      for label, data in rewrites.within(
        problem.clean.source[path], part, rewrites.same
      )
    ]
    return rng.sample(made, min(RIGHT, len(made)))

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    """Half-fixes, functions without work, and mutants of the functions at fault.

    Of an injected fault with several edits every single one left in is a half-fix. A
    mutant is known to be wrong only if some test of the whole suite fails on it.
    """
    problem = packages.problem_of(task)
    clean, row = problem.clean, problem.row
    made: list[subject.Tried] = []
    for number, edit in enumerate(row.edits if len(row.edits) > 1 else ()):
      left = faults.apply(clean, faults.Fault(row.kind, (edit,), ()))
      made.append(subject.Tried(f'half-fix: {number}', dict(left.source)))
    parts = self._changed(problem)
    empty = [
      subject.Tried(f'{label}: {path}', {**clean.source, path: data})
      for path, part in parts
      for label, data in rewrites.within(clean.source[path], part, rewrites.less)
    ]
    mutants = [
      subject.Tried(f'mutant: {number}', dict(faults.apply(clean, fault).source))
      for number, fault in enumerate(_faults_in(clean, parts))
      if fault.edits != row.edits and faults.parses(clean, fault)
    ]
    tried = rng.sample(empty, min(LESS, len(empty)))
    tried += rng.sample(mutants, min(MUTANTS, len(mutants)))
    made += [each for each in tried if await self._known_wrong(task, each.solution)]
    return made

  async def _known_wrong(self, task: types.Task, solution: Any) -> bool:
    """Whether a source fails the task's tests, or else another of the suite."""
    if (await self.judge(task, solution)).value == 0.0:
      return True
    problem = packages.problem_of(task)
    clean = problem.clean
    if clean.sha not in self._whole:
      self._whole[clean.sha] = frozenset(await self._passing(clean))
    passing = await self._passing(problem.given(solution))
    return not self._whole[clean.sha] <= passing

  async def _passing(self, tree: sources.Tree) -> set[str]:
    report = await suite.run(
      self._cfg,
      self._backend,
      tree,
      None,
      packages.SECONDS_A_TEST,
      seconds=_WHOLE_SECONDS,
    )
    return {test for test, result in report.results.items() if result == 'passed'}

  def _changed(self, problem: rows.Problem) -> list[tuple[str, str]]:
    return list(rewrites.changed(problem.clean.source, problem.source))

  def players(
    self, task: types.Task
  ) -> tuple[Sequence[cheating.Call] | None, Sequence[cheating.Call]]:
    return subject.calls_of(task.payload['gold']), [('submit', {})]

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    """What runs when the source is imported, and files beside it."""
    problem = packages.problem_of(task)
    changed = [path for path, _ in self._changed(problem)]
    path = (changed or sorted(problem.source))[0]
    text = problem.source.get(path, b'').decode(errors='replace')
    names = {'module': task.payload['package'], 'function': 'function'}
    end = ('submit', {})
    found = []
    for exploit in exploits.EXPLOITS:
      if exploit.statements:
        made = f'{text}\n\n{exploit.statements.format(**names)}\n'
        calls = (('create', {'path': path, 'text': made}), end)
        found.append(subject.Attempt(exploit.name, calls))
      folder = path.rpartition('/')[0]
      for name, content in exploit.files.items():
        # A json.py of the package's own stands in nobody's way.
        inside = () if exploit.name == _SHADOWS else (folder,)
        for at in dict.fromkeys(('', problem.clean.path[0], *inside)):
          place = '/'.join(part for part in (at, name) if part)
          calls = (('create', {'path': place, 'text': content}), end)
          found.append(subject.Attempt(f'{exploit.name}: {place}', calls))
    return found

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    found: dict[str, list[types.Task]] = {}
    for task in tasks:
      found.setdefault(f'suite/{task.payload["row"]["sha"]}', []).append(task)
    return found

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    """Every tree's own folders for each of its golds; the system's once, for all."""
    found: dict[str, list[str]] = {}
    images = self.images(tasks)
    names = sorted({sources.SOURCES[t.payload['package']].distribution for t in tasks})
    whole = leaks.needles([text for task in tasks for text in self._golds(task)], names)
    whole |= {'below': ['/'], 'skipped': ['/tree']}  # whose tree differs by the task
    for number, (image, some) in enumerate(images.items()):
      mine = leaks.needles([], names, ['/tree', '/work', '/parts', '/tmp'])
      bad = [] if number else await self._look(some[0], whole)
      for task in some:  # each has a fault, and hidden tests, of its own
        golds = leaks.needles(self._golds(task))
        bad += await self._look(
          task, {**mine, 'defs': golds['defs'], 'codes': golds['codes']}
        )
      found[image] = list(dict.fromkeys(bad))
    return found

  def _golds(self, task: types.Task) -> list[str]:
    """Functions of the gold that the faulty source has nowhere, long enough to tell."""
    problem = packages.problem_of(task)
    had = {
      shape
      for data in problem.source.values()
      for shape in look.shapes(data.decode(errors='replace'))
    }
    return [
      text
      for _, text in self._changed(problem)
      if leaks.telling(text) and not had & set(look.shapes(text))
    ]

  async def _look(self, task: types.Task, wanted: Mapping[str, Any]) -> list[str]:
    """Looks, from within a test of the tree as the agent has it."""
    problem = packages.problem_of(task)
    carried = {
      'look_tests/test_look.py': _LOOK.encode(),
      'look_tests/look.py': pathlib.Path(look.__file__).read_bytes(),
      'look_tests/needles.json': json.dumps(wanted).encode(),
    }
    # Its own settings may name the files that tests are in.
    rest = {p: data for p, data in problem.rest.items() if '/' in p or _plain(p)}
    tree = dataclasses.replace(
      problem.clean,
      files={**problem.source, **rest, **carried},
      tests=('look_tests',),
    )
    report = await suite.run(
      self._cfg, self._backend, tree, None, _LOOK_SECONDS, seconds=_LOOK_SECONDS + 30
    )
    results = set(report.results.values())
    if results == {'passed'} and report.complete:
      return []
    said = ' '.join(report.texts.values())
    at = said.find('FOUND')
    if at < 0:
      raise OSError(f'the leak scan of {task.id} failed: {report.reason} {said[:300]}')
    return [said[at + 5 : at + 800]]

  def text(self, task: types.Task) -> str:
    problem = packages.problem_of(task)
    return '\n'.join(text for _, text in self._changed(problem)) or task.id


def _plain(name: str) -> bool:
  """Whether a file at the top says nothing to pytest."""
  return not name.endswith(('.toml', '.cfg', '.ini')) and name != 'conftest.py'


def _faults_in(
  tree: sources.Tree, parts: Sequence[tuple[str, str]]
) -> Iterator[faults.Fault]:
  """Faults of one edit within some functions."""
  spans = []
  for path, part in parts:
    at = tree.source[path].find(part.encode())
    spans.append((path, at, at + len(part.encode())))
  for fault in faults.singles(tree):
    edit = fault.edits[0]
    if any(p == edit.path and a <= edit.start < b for p, a, b in spans):
      yield fault


async def open_subject(cfg: config.Sandbox, tasks: config.Tasks) -> Subject:
  """Opens the family's host."""
  del tasks  # they hold their own place
  host = await packages.open_host(cfg)
  return Subject(cfg, host, sandbox.choose_backend(cfg))
