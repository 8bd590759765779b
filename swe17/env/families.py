"""The table of task families: all that knows of one by name looks here."""

from collections.abc import Mapping
import difflib

from swe17.env import base, mixture
from swe17.env.repair import faults, repair, repair_text
from swe17.env.retrieval import questions, retrieval

_SEARCH, _QUESTIONS = 'tokenizer_search.json', tuple(questions.KINDS)
FAMILIES: Mapping[str, base.Family] = {
  family.name: family
  for family in (
    base.Family(repair.FAMILY, repair.read, repair.open_host, faults.KINDS),
    base.Family(
      repair_text.FAMILY, repair_text.read, repair_text.open_host, faults.KINDS
    ),
    base.Family(
      retrieval.FAMILY, retrieval.read, retrieval.open_host, _QUESTIONS, _SEARCH
    ),
    base.Family(
      retrieval.SMALL, retrieval.read, retrieval.open_host, _QUESTIONS, _SEARCH
    ),
  )
}


def get(name: str) -> base.Family:
  """The family `tasks.family` names; 'a,b' is a mixture. ValueError on others."""
  if ',' in name:
    return mixture.of([get(part.strip()) for part in name.split(',')])
  if name not in FAMILIES:
    near = difflib.get_close_matches(name, FAMILIES, 1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ValueError(
      f'tasks.family: got {name!r}, want one of {", ".join(FAMILIES)}{hint}'
    )
  return FAMILIES[name]
