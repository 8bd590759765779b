"""What an agent's files are graded as: a clean copy, their source, hidden tests last.

  files at base_commit  +  the agent's modules where they are source  +  test_patch

So nothing that an agent does to tests, their settings, or files where hidden tests will
be, is there when they run; and since it is the base that test_patch is applied to, it
applies to every episode if it does to one.
"""

from collections.abc import Mapping
import dataclasses
import functools

from swe17 import types
from swe17.env.formats import patches, repositories
from swe17.env.packages import sources

_NO_SOURCE = frozenset(('setup.py', 'docs', 'doc'))  # at the top
_PATHS = ('src', 'lib')  # folders at the top that Python is to look in


@dataclasses.dataclass(frozen=True)
class Problem:
  """A task with its files."""

  base: repositories.Snapshot
  hidden: Mapping[str, bytes | None]  # what test_patch makes of the base
  gold: Mapping[str, bytes | None]  # what patch makes of it
  tree: sources.Tree  # the base, split into source and the rest

  def graded(self, files: Mapping[str, bytes]) -> sources.Tree:
    """The tree that an agent's files are graded as."""
    tree = self.tree.with_source(files)
    return dataclasses.replace(tree, files=patches.over(tree.files, self.hidden))

  def names(self) -> set[str]:
    """Top-level packages and modules, by which copies of them are found."""
    found = set()
    for path in self.tree.source:
      for place in self.tree.path:
        inside = path[len(place) + 1 :] if place else path
        if not place or path.startswith(f'{place}/'):
          found.add(inside.partition('/')[0].removesuffix('.py'))
    return found - set(self.tree.path)

  def solved(self) -> dict[str, bytes]:
    """The base with the gold patch: files that an agent could hand in."""
    return patches.over(self.base.files, self.gold)


def problem(task: types.Task, base: repositories.Snapshot) -> Problem:
  """The task on these files. ValueError: one of its patches does not apply to them."""
  made = {}
  for name in ('test_patch', 'patch'):
    try:
      made[name] = patches.apply(task.payload[name], base.files)
    except patches.PatchError as e:
      raise ValueError(f'{name} does not apply: {e}') from e
  hidden = made['test_patch']
  return Problem(base, hidden, made['patch'], tree_of(task.id, base.files, hidden))


@functools.lru_cache(maxsize=16)
def _local(id: str, repository: str, commit: str, patch: str, hidden: str) -> Problem:
  payload = {'patch': patch, 'test_patch': hidden}
  task = types.Task(id, '', '', '', '', payload)
  return problem(task, repositories.snapshot(repository, commit))


def local(task: types.Task) -> Problem:
  """The task on the files of its repository. ValueError: they are not to be had."""
  payload = task.payload
  names = ('repository', 'commit', 'patch', 'test_patch')
  return _local(task.id, *(payload[name] for name in names))


def tree_of(
  name: str, files: Mapping[str, bytes], hidden: Mapping[str, bytes | None]
) -> sources.Tree:
  """Files as a tree: which are source, which are tests, what can be imported.

  What hidden tests touch is no source, whatever it is called.
  """
  modules = [path for path in files if path.endswith('.py')]
  tests = set(hidden)
  for path in modules:
    *folders, file = path.split('/')
    for depth, folder in enumerate(folders, 1):
      # A package may be called `test`; one with modules test_* is not meant by that.
      if folder == 'tests' or (folder == 'test' and file.startswith('test_')):
        tests.add('/'.join(folders[:depth]))
        break
  roots = {path.partition('/')[0] for path in modules} - _NO_SOURCE
  places = ('', *(top for top in _PATHS if top in roots))
  return sources.Tree(name, files, tuple(sorted(roots)), tuple(sorted(tests)), places)
