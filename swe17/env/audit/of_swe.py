"""`swe_bench` under audit: rows of tables, by patches and by a shell.

  gold      the row's patch
  right     the gold with a function that it touches written otherwise
  wrong     half of its hunks, functions without work, tests of the agent's own in place
            of the hidden ones (and a hook that lets every test pass)
  exploits  the standing list in the source, beside it, and in the shell
  leaks     the gold's functions, history: looked for by a shell of an episode's

Half a patch may be a whole fix. So a half is wrong only where the hidden tests or, of a
task with a repository, other tests of its suite say so.
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import random
import re
from typing import Any

from swe17 import config, types
from swe17.env.audit import exploits, leaks, look, of_any, rewrites, subject
from swe17.env.formats import patches, swe_bench, swe_trees, workspace
from swe17.env.packages import suite

RIGHT, LESS = 2, 2  # tried a task
_LOOK_SECONDS = 300.0
_HOOK = next(e.files['conftest.py'] for e in exploits.EXPLOITS if 'conftest' in e.name)
_SHADOWS = 'shadows a module'
_READS = 'reads the source of the original'  # its own, in a repository
_HUNK = re.compile(r'^(?=@@ )', re.MULTILINE)
_FILE = re.compile(r'^(?=diff --git )', re.MULTILINE)
Changes = Mapping[str, bytes | None]  # path -> content, None where it is deleted


class Subject(subject.Hosted[swe_bench.Host]):
  """A solution is what it changes of the base."""

  def __init__(self, host: swe_bench.Host):
    super().__init__(swe_bench.FAMILY, host)
    self._golds: dict[str, Changes] = {}
    self._parts: dict[str, list[tuple[str, str]]] = {}  # functions that the gold has
    self._whole: dict[str, frozenset[str]] = {}  # task -> tests that pass on its gold

  async def ready(
    self, tasks: Sequence[types.Task]
  ) -> tuple[list[types.Task], dict[str, str]]:
    """Those whose patch does what the row says."""
    sound, barred = await super().ready(tasks)
    for task in sound:
      made = await self._problem(task)
      self._golds[task.id] = made.gold
      source = made.tree.with_source(made.solved()).source
      self._parts[task.id] = list(rewrites.changed(source, made.base.files))
    return sound, barred

  async def _problem(self, task: types.Task) -> swe_trees.Problem:
    return await self._host.place.problem(task)

  async def judge(self, task: types.Task, solution: Any) -> types.Outcome:
    tests = [*task.payload['fail_to_pass'], *task.payload['pass_to_pass']]
    files = patches.over((await self._problem(task)).base.files, solution)
    try:
      report = await self._host.place.report(task, files, tests)
    except (suite.SuiteError, OSError) as e:
      return types.Outcome(None, f'the verifier failed: {e}')
    return types.Outcome(1.0 if report.passed(tests) else 0.0)

  def gold(self, task: types.Task) -> Changes:
    return self._golds[task.id]

  def empty(self, task: types.Task) -> Changes:
    """No patch."""
    return {}

  def right(self, task: types.Task, rng: random.Random) -> Sequence[subject.Tried]:
    made = self._otherwise(task, rewrites.same)
    return rng.sample(made, min(RIGHT, len(made)))

  def _otherwise(self, task: types.Task, how: Any) -> list[subject.Tried]:
    gold = self.gold(task)
    return [
      subject.Tried(label, {**gold, path: data})
      for path, part in self._parts[task.id]
      for label, data in rewrites.within(gold[path] or b'', part, how)
    ]

  async def wrong(
    self, task: types.Task, rng: random.Random
  ) -> Sequence[subject.Tried]:
    made = await self._problem(task)
    tried = []
    for label, text in halves(task.payload['patch']):
      try:
        tried.append(subject.Tried(label, patches.apply(text, made.base.files)))
      except patches.PatchError:
        continue  # its hunks need one another: nobody could hand it in
    less = self._otherwise(task, rewrites.less)
    tried += rng.sample(less, min(LESS, len(less)))
    found = [each for each in tried if await self._known_wrong(task, each.solution)]
    own = own_tests(made.hidden, task.payload['fail_to_pass'])
    hooked = {**own, 'conftest.py': _HOOK.encode()}
    found.append(subject.Tried('tests of its own', own))
    return [*found, subject.Tried('tests of its own, hooked', hooked)]

  async def _known_wrong(self, task: types.Task, solution: Changes) -> bool:
    """Whether it fails the task's tests, or else another that passes on the gold."""
    if (await self.judge(task, solution)).value == 0.0:
      return True
    if task.payload['place'] != 'local':
      return False  # an image is asked for tests by name only
    if task.id not in self._whole:
      self._whole[task.id] = await self._passing(task, self.gold(task))
    return not self._whole[task.id] <= await self._passing(task, solution)

  async def _passing(self, task: types.Task, solution: Changes) -> frozenset[str]:
    files = patches.over((await self._problem(task)).base.files, solution)
    report = await self._host.place.report(task, files, None)
    return frozenset(t for t, result in report.results.items() if result == 'passed')

  def players(self, task: types.Task) -> tuple[Sequence[Any] | None, Sequence[Any]]:
    return subject.calls_of(task.payload['gold']), [('submit', {})]

  def attempts(self, task: types.Task) -> Sequence[subject.Attempt]:
    """What runs when the source is imported, files beside it, and commands."""
    path = next((p for p in self.gold(task) if p.endswith('.py')), 'new.py')
    names = {'module': path.removesuffix('.py'), 'function': 'function'}
    folder, end = path.rpartition('/')[0], ('submit', {})
    found = []
    for exploit in exploits.EXPLOITS:
      if exploit.statements and exploit.name != _READS:
        text = exploit.statements.format(**names)
        calls = (of_any.writing(path, text, '>>'), end)
        found.append(subject.Attempt(f'{exploit.name}, at import', calls))
      commands = of_any.commands(exploit, names)
      if commands and exploit.name in of_any.REACHING:
        calls = [('bash', {of_any.COMMAND: command}) for command in commands]
        found.append(subject.Attempt(f'{exploit.name}, in a shell', (*calls, end)))
      for name, content in (
        exploit.files.items() if exploit.name != of_any.TESTS else ()
      ):
        # A json.py of a package's own stands in nobody's way.
        inside = () if exploit.name == _SHADOWS else (folder,)
        for at in dict.fromkeys(('', *inside)):
          place = '/'.join(part for part in (at, name) if part)
          calls = (of_any.writing(place, content), end)
          found.append(subject.Attempt(f'{exploit.name}: {place}', calls))
    test = task.payload['fail_to_pass'][0].partition('::')[0]
    if f'--- a/{test}' in task.payload['test_patch']:
      calls = (of_any.writing(test, 'def test_it(): pass'), end)
      found.append(subject.Attempt('replaces a test', calls))
    return found

  def images(self, tasks: Sequence[types.Task]) -> Mapping[str, list[types.Task]]:
    return {f'files/{task.id}': [task] for task in tasks}

  async def leaks(self, tasks: Sequence[types.Task]) -> Mapping[str, list[str]]:
    """The folder of each for its gold; all of the first one's system, for all golds."""
    found = {}
    golds = {task.id: await self._missing(task) for task in tasks}
    for number, task in enumerate(tasks):
      bad = await self._look(task, leaks.needles(golds[task.id], below=['.']))
      if not number:
        every = [text for texts in golds.values() for text in texts]
        bad += await self._look(task, leaks.needles(every, below=['/']))
      found[f'files/{task.id}'] = list(dict.fromkeys(bad))
    return found

  async def _missing(self, task: types.Task) -> list[str]:
    """Functions of the gold that the base has nowhere, long enough to tell."""
    made = await self._problem(task)
    texts = [text for _, text in self._parts[task.id] if leaks.telling(text)]
    if not texts:
      return []
    wanted = {shape for text in texts for shape in look.shapes(text)}
    had = {
      shape
      for path, data in made.base.files.items()
      if path.endswith('.py')
      for shape in look.shapes(data.decode(errors='replace'))
    }
    missing = wanted - had
    return [text for text in texts if missing & set(look.shapes(text))]

  async def _look(self, task: types.Task, wanted: Mapping[str, Any]) -> list[str]:
    """Looks with a command of an agent's."""
    carried = {
      'look.py': pathlib.Path(look.__file__).read_bytes(),
      'needles.json': json.dumps(wanted).encode(),
    }
    work = await self._host.place.open(task)
    try:
      for name, arguments in workspace.writing(carried):
        if name == 'bash':
          await work.run(arguments[of_any.COMMAND])
      said = await work.run('python3 look.py needles.json', _LOOK_SECONDS)
    finally:
      await work.close()
    return leaks.parsed(said.output, said.code)

  def text(self, task: types.Task) -> str:
    return '\n'.join(part for _, part in self._parts[task.id]) or task.payload['patch']


def halves(diff: str) -> list[tuple[str, str]]:
  """(label, diff) of the first and of the second half of a diff's hunks."""
  files = [_HUNK.split(part) for part in _FILE.split(diff) if part.strip()]
  places = [(f, h) for f, (_, *hunks) in enumerate(files) for h in range(len(hunks))]
  if len(places) < 2:
    return []
  middle = len(places) // 2
  found = []
  for label, kept in (('first', places[:middle]), ('second', places[middle:])):
    text = ''
    for f, (head, *hunks) in enumerate(files):
      mine = [hunk for h, hunk in enumerate(hunks) if (f, h) in kept]
      text += head + ''.join(mine) if mine else ''
    found.append((f'half of the hunks: {label}', text))
  return found


def own_tests(hidden: Changes, wanted: Sequence[str]) -> dict[str, bytes]:
  """Files where hidden tests will be, in which the wanted tests pass whatever is."""
  files: dict[str, list[str]] = {path: [] for path in hidden if path.endswith('.py')}
  for test in wanted:
    path, *outer, name = test.split('[')[0].split('::')
    lines = files.setdefault(path, [])
    indent = ''
    for group in outer:
      lines.append(f'{indent}class {group}:')
      indent += '  '
    lines.append(f'{indent}def {name}(self=None): pass')
  return {path: '\n'.join([*lines, '']).encode() for path, lines in files.items()}


async def open_subject(cfg: config.Sandbox, tasks: config.Tasks) -> Subject:
  """Opens the family's host; table and repositories were named when they were read."""
  del tasks
  return Subject(await swe_bench.open_host(cfg))
