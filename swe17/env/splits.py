"""Splits functions into training and held-out so that no near-copy is on both sides.

Functions whose sources look alike once names are gone (`_siftup` and `_siftup_max`)
form a cluster, and a cluster goes to one side as a whole.
"""

from collections.abc import Mapping, Sequence
import difflib
import hashlib
import keyword

from swe17.env import sites

ALIKE = 0.8  # token-sequence ratio from which two sources are near-copies


def clusters(sources: Mapping[str, str]) -> list[list[str]]:
  """Names grouped by likeness (transitively), in a fixed order."""
  names = sorted(sources)
  shapes = {name: _shape(sources[name]) for name in names}
  root = {name: name for name in names}

  def find(name: str) -> str:
    while root[name] != name:
      name = root[name]
    return name

  matcher = difflib.SequenceMatcher(autojunk=False)
  for i, b in enumerate(names):
    matcher.set_seq2(shapes[b])
    for a in names[:i]:
      matcher.set_seq1(shapes[a])
      if matcher.real_quick_ratio() < ALIKE or matcher.quick_ratio() < ALIKE:
        continue
      if matcher.ratio() >= ALIKE:
        root[find(b)] = find(a)
  groups: dict[str, list[str]] = {}
  for name in names:
    groups.setdefault(find(name), []).append(name)
  return list(groups.values())


def alike(sources: Sequence[str], others: Sequence[str]) -> set[str]:
  """Those of `sources` that are near-copies of one of `others`."""
  shapes = [_shape(other) for other in others]
  matcher = difflib.SequenceMatcher(autojunk=False)

  def near(shape: list[str]) -> bool:
    matcher.set_seq1(shape)
    quick = matcher.real_quick_ratio() >= ALIKE and matcher.quick_ratio() >= ALIKE
    return quick and matcher.ratio() >= ALIKE

  found = set()
  for source in sources:
    matcher.set_seq2(_shape(source))
    if any(near(shape) for shape in shapes):
      found.add(source)
  return found


def assign(groups: list[list[str]], heldout: float, seed: int) -> dict[str, str]:
  """Name -> 'train' or 'heldout', by a hash of the cluster, `heldout` of all names."""
  order = sorted(
    groups, key=lambda g: hashlib.sha256(f'{seed}/{g[0]}'.encode()).digest()
  )
  wanted = heldout * sum(map(len, groups))
  split: dict[str, str] = {}
  taken = 0
  for group in order:
    side = 'heldout' if taken + len(group) <= wanted else 'train'
    taken += len(group) if side == 'heldout' else 0
    split.update({name: side for name in group})
  return split


def _shape(source: str) -> list[str]:
  """Tokens, with variables as `name`; what is called keeps its name."""
  shape = []
  for line in sites.tokens_by_line(source).values():
    texts = [token.string for token in line]
    for text, following in zip(texts, [*texts[1:], ''], strict=True):
      variable = text.isidentifier() and not keyword.iskeyword(text)
      shape.append('name' if variable and following != '(' else text)
  return shape
