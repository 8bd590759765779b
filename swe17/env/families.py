"""The table of task families: all that knows of one by name looks here."""

from collections.abc import Mapping
import difflib
from typing import Any

from swe17.env import base, mixture
from swe17.env.formats import harbor, swe_bench, verifiers_env
from swe17.env.kernels import kernel_bench, kernels, kernels_small, small
from swe17.env.packages import packages, rows
from swe17.env.repair import faults, repair, repair_text
from swe17.env.retrieval import questions, retrieval

_SEARCH, _KERNELS = 'tokenizer_search.json', 'tokenizer_kernels.json'
_QUESTIONS = tuple(questions.KINDS)


def _family(of: Any, name: str, **more: Any) -> base.Family:
  return base.Family(name, of.read, of.open_host, **more)


FAMILIES: Mapping[str, base.Family] = {
  family.name: family
  for family in (
    _family(repair, repair.FAMILY, kinds=faults.KINDS),
    _family(repair_text, repair_text.FAMILY, kinds=faults.KINDS),
    _family(packages, packages.FAMILY, kinds=rows.KINDS),
    _family(retrieval, retrieval.FAMILY, kinds=_QUESTIONS, tokenizer=_SEARCH),
    _family(retrieval, retrieval.SMALL, kinds=_QUESTIONS, tokenizer=_SEARCH),
    _family(kernels, kernels.FAMILY, kinds=tuple(kernels.UNITS)),
    _family(
      kernels_small, kernels_small.FAMILY, kinds=tuple(small.WASTES), tokenizer=_KERNELS
    ),
    _family(kernel_bench, kernel_bench.FAMILY),
    _family(swe_bench, swe_bench.FAMILY),
    _family(harbor, harbor.FAMILY),
    _family(verifiers_env, verifiers_env.FAMILY),
  )
}


def get(name: str) -> base.Family:
  """The family `tasks.family` names. ValueError on others, with the nearest.

  'a,b' is a mixture; `module:factory` names a function of somebody else's that gives a
  family.
  """
  if ',' in name:
    return mixture.of([get(part.strip()) for part in name.split(',')])
  if ':' in name:
    return _made(name)
  if name not in FAMILIES:
    near = difflib.get_close_matches(name, FAMILIES, 1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ValueError(
      f'tasks.family: got {name!r}, want one of {", ".join(FAMILIES)}{hint}'
    )
  return FAMILIES[name]


def _made(name: str) -> base.Family:
  module, _, attribute = name.partition(':')
  made = base.named('tasks.family', module, attribute)()
  if not isinstance(made, base.Family):
    raise ValueError(f'tasks.family: {name} gave {made!r:.60}, want a base.Family')
  return made
