"""The table of task families: all that knows of one by name looks here."""

from collections.abc import Mapping
import difflib

from swe17.env import base
from swe17.env.repair import repair
from swe17.env.retrieval import retrieval

_SEARCH = 'tokenizer_search.json'
FAMILIES: Mapping[str, base.Family] = {
  family.name: family
  for family in (
    base.Family(repair.FAMILY, repair.read, repair.open_host),
    base.Family(retrieval.FAMILY, retrieval.read, retrieval.open_host, _SEARCH),
    base.Family(retrieval.SMALL, retrieval.read, retrieval.open_host, _SEARCH),
  )
}


def get(name: str) -> base.Family:
  """The family `tasks.family` names. ValueError on others, with the nearest."""
  if name not in FAMILIES:
    near = difflib.get_close_matches(name, FAMILIES, 1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ValueError(
      f'tasks.family: got {name!r}, want one of {", ".join(FAMILIES)}{hint}'
    )
  return FAMILIES[name]
