"""Questions about a tree whose answers follow from its syntax: (kind, subject).

  callers     functions that call X
  second      functions that call one that calls X
  callees     definitions of what X calls
  overrides   methods that override C.m, at any depth
  overridden  the method of the nearest base that C.m overrides
  raisers     functions that raise an exception derived from E
  default     the assignment of the constant that a parameter's default value is
  tests       tests that call X

An answer is whole definitions, or one assignment, as ranges of lines. `ask` gives the
question or says why it is none: what the index is not sure of is not asked.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses

from swe17.env.retrieval import score, symbols

MOST = 8  # definitions of an answer


class NoQuestionError(ValueError):
  """There is no such question about the tree; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class Question:
  """One question and its answer."""

  kind: str
  subject: str
  text: str
  truth: Mapping[str, score.Ranges]
  names: tuple[str, ...]  # identifiers that the text gives away


Answer = list[symbols.Def]


def ask(index: symbols.Index, kind: str, subject: str) -> Question:
  """The question of a kind about a subject as `subjects` lists it."""
  return KINDS[kind](index, subject)


def subjects(index: symbols.Index, kind: str) -> list[str]:
  """Candidates for `ask`, in the order of the tree: most of them are no question."""
  if kind == 'default':
    pairs = [(d, p) for d in index.defs for p, _ in d.defaults]
    found = [f'{d.path}:{d.name}:{parameter}' for d, parameter in pairs]
  elif kind == 'raisers':
    found = [f'{d.path}:{d.name}' for d in index.defs if d.kind == 'class']
  elif kind in ('overrides', 'overridden'):
    found = [f'{d.path}:{d.name}' for d in index.defs if d.kind == 'method']
  else:
    found = [f'{d.path}:{d.name}' for d in index.defs if d.kind != 'class']
  return list(dict.fromkeys(found))


def _find(index: symbols.Index, subject: str) -> symbols.Def:
  path, name = subject.split(':')[:2]
  found = index.by_place.get((path, name), [])
  if len(found) != 1:
    raise NoQuestionError('defined more than once, or not at all')
  return found[0]


def _sure(index: symbols.Index, subject: str) -> symbols.Def:
  definition = _find(index, subject)
  if not index.sure(definition):
    raise NoQuestionError('calls of it cannot be told from others')
  return definition


def _made(
  kind: str,
  subject: str,
  text: str,
  answer: Iterable[symbols.Def],
  names: tuple[str, ...],
) -> Question:
  defs = list(dict.fromkeys(answer))
  if not defs:
    raise NoQuestionError('nothing to find')
  if len(defs) > MOST:
    raise NoQuestionError(f'over {MOST} definitions to find')
  ranges: dict[str, list[tuple[int, int]]] = {}
  for d in defs:
    ranges.setdefault(d.path, []).append((d.first, d.last))
  truth = {path: score.union(found) for path, found in sorted(ranges.items())}
  return Question(kind, subject, text, truth, names)


def _callers(index: symbols.Index, subject: str) -> Question:
  d = _sure(index, subject)
  text = f'Which functions and methods call `{d.leaf}`?'
  return _made('callers', subject, text, index.callers(d), (d.leaf,))


def _second(index: symbols.Index, subject: str) -> Question:
  d = _sure(index, subject)
  first = index.callers(d)
  if not all(index.sure(caller) for caller in first):
    raise NoQuestionError('calls of a caller cannot be told from others')
  found = [c for caller in first for c in index.callers(caller) if c != d]
  text = f'Which functions and methods call one that calls `{d.leaf}`?'
  return _made('second', subject, text, found, (d.leaf,))


def _tests(index: symbols.Index, subject: str) -> Question:
  d = _sure(index, subject)
  if 'test' in d.path:
    raise NoQuestionError('itself part of the tests')
  found = [
    c for c in index.callers(d) if 'test' in c.path and c.leaf.startswith('test')
  ]
  text = f'Which test functions and methods cover `{d.leaf}`, by calling it directly?'
  return _made('tests', subject, text, found, (d.leaf,))


def _callees(index: symbols.Index, subject: str) -> Question:
  d = _find(index, subject)
  found = []
  for use in index.by_owner.get(d, ()):
    if not use.raised and use.name in index.by_leaf:
      called = _resolve(index, d, use)
      if called is None:
        raise NoQuestionError('one of its calls is of a name with several meanings')
      if called.kind != 'class' and called != d:
        found.append(called)
  if len(set(found)) < 2:
    raise NoQuestionError('fewer than 2 calls')
  text = (
    f'Where are the functions and methods of this package defined that `{d.name}` '
    f'({d.path}) calls directly? Classes do not count.'
  )
  return _made('callees', subject, text, found, (d.leaf,))


def _resolve(
  index: symbols.Index, caller: symbols.Def, use: symbols.Use
) -> symbols.Def | None:
  """The definition that a call is of; None if that is not sure."""
  named = index.by_leaf[use.name]
  if len(named) == 1 and index.sure(named[0]):
    return named[0]
  if index.bound[use.name]:
    return None
  if use.receiver == 'self' and caller.kind == 'method':
    holder = caller.name.rpartition('.')[0]
    own = [d for d in named if (d.path, d.name) == (use.path, f'{holder}.{use.name}')]
    # A class below may have its own: only where nobody derives from this one.
    below = index.children.get(caller.holder)
    return own[0] if len(own) == 1 and own[0].plain and not below else None
  if use.receiver:
    return None
  path, name = index.imports.get(use.path, {}).get(use.name, (use.path, use.name))
  own = [d for d in named if (d.path, d.name) == (path, name)]
  return own[0] if len(own) == 1 else None


def _class_of(index: symbols.Index, name: str) -> symbols.Def:
  found = index.by_leaf.get(name, [])
  if len(found) != 1 or found[0].kind != 'class' or index.bound[name]:
    raise NoQuestionError('the class has no name of its own')
  return found[0]


def _method(index: symbols.Index, cls: symbols.Def, leaf: str) -> symbols.Def | None:
  """A class's own method; NoQuestionError where it is defined twice."""
  name = f'{cls.name}.{leaf}'
  found = [
    d for d in index.by_leaf.get(leaf, ()) if (d.path, d.name) == (cls.path, name)
  ]
  if len(found) > 1:
    raise NoQuestionError('defined more than once in one class')
  return found[0] if found else None


def _overrides(index: symbols.Index, subject: str) -> Question:
  d = _find(index, subject)
  cls = _class_of(index, d.holder)
  below = index.descendants(cls.leaf)
  if below is None:
    raise NoQuestionError('a class below has no name of its own')
  found = [m for c in below if (m := _method(index, c, d.leaf))]
  text = (
    f'Which methods override `{cls.leaf}.{d.leaf}`, in classes derived from '
    f'`{cls.leaf}` directly or not?'
  )
  return _made('overrides', subject, text, found, (d.leaf, cls.leaf))


def _overridden(index: symbols.Index, subject: str) -> Question:
  d = _find(index, subject)
  cls = _class_of(index, d.holder)
  above, found, seen = cls, None, {cls.leaf}
  while found is None:
    bases = [b for b in above.bases if b in index.by_leaf]
    if len(bases) != 1 or len(above.bases) != 1:
      raise NoQuestionError('not one base class, or one that is not of the tree')
    above = _class_of(index, bases[0])
    if above.leaf in seen:
      raise NoQuestionError('a base class of the same name')
    seen.add(above.leaf)
    found = _method(index, above, d.leaf)
  text = (
    f'Which method does `{cls.leaf}.{d.leaf}` override: that of the nearest base class '
    'which has it?'
  )
  return _made('overridden', subject, text, [found], (d.leaf, cls.leaf))


def _raisers(index: symbols.Index, subject: str) -> Question:
  cls = _class_of(index, _find(index, subject).leaf)
  below = index.descendants(cls.leaf)
  if not below:
    raise NoQuestionError('no class derived from it, or one with no name of its own')
  names = {c.leaf for c in below}
  owners = {
    u.owner: None
    for name in names
    for u in index.by_name.get(name, ())
    if u.raised and u.owner
  }
  text = (
    'Which functions and methods raise an exception of a class derived from '
    f'`{cls.leaf}`, directly or not? `{cls.leaf}` itself does not count.'
  )
  found = sorted(owners, key=lambda d: (d.path, d.first))
  return _made('raisers', subject, text, found, (cls.leaf,))


def _default(index: symbols.Index, subject: str) -> Question:
  d = _find(index, subject)
  parameter = subject.split(':')[2]
  place = index.constant(d.path, dict(d.defaults)[parameter])
  if place is None:
    raise NoQuestionError('the default is no constant that is assigned once')
  path, first, last = place
  text = (
    f'Where is the constant assigned that is the default value of parameter '
    f'`{parameter}` of `{d.name}` ({d.path})?'
  )
  truth = {path: ((first, last),)}
  return Question('default', subject, text, truth, (d.leaf, parameter))


KINDS: Mapping[str, Callable[[symbols.Index, str], Question]] = {
  'callers': _callers,
  'second': _second,
  'callees': _callees,
  'overrides': _overrides,
  'overridden': _overridden,
  'raisers': _raisers,
  'default': _default,
  'tests': _tests,
}
