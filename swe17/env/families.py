"""The table of task families: all that knows of one by name looks here."""

from collections.abc import Mapping
import difflib
import importlib

from swe17.env import base
from swe17.env.formats import harbor, swe_bench, verifiers_env
from swe17.env.kernels import kernel_bench, kernels, kernels_small
from swe17.env.packages import packages
from swe17.env.repair import repair
from swe17.env.retrieval import retrieval

_SEARCH = 'tokenizer_search.json'
_KERNELS = 'tokenizer_kernels.json'
FAMILIES: Mapping[str, base.Family] = {
  family.name: family
  for family in (
    base.Family(repair.FAMILY, repair.read, repair.open_host),
    base.Family(packages.FAMILY, packages.read, packages.open_host),
    base.Family(retrieval.FAMILY, retrieval.read, retrieval.open_host, _SEARCH),
    base.Family(retrieval.SMALL, retrieval.read, retrieval.open_host, _SEARCH),
    base.Family(kernel_bench.FAMILY, kernel_bench.read, kernel_bench.open_host),
    base.Family(kernels.FAMILY, kernels.read, kernels.open_host),
    base.Family(
      kernels_small.FAMILY, kernels_small.read, kernels_small.open_host, _KERNELS
    ),
    base.Family(harbor.FAMILY, harbor.read, harbor.open_host),
    base.Family(verifiers_env.FAMILY, verifiers_env.read, verifiers_env.open_host),
    base.Family(swe_bench.FAMILY, swe_bench.read, swe_bench.open_host),
  )
}


def get(name: str) -> base.Family:
  """The family `tasks.family` names. ValueError on others, with the nearest.

  `module:factory` names a function of somebody else's that gives a family.
  """
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
  try:
    factory = getattr(importlib.import_module(module), attribute, None)
  except ImportError as e:
    raise ValueError(f'tasks.family: {module} cannot be imported: {e}') from e
  if not callable(factory):
    raise ValueError(f'tasks.family: {module} has no function {attribute!r}')
  made = factory()
  if not isinstance(made, base.Family):
    raise ValueError(f'tasks.family: {name} gave {made!r:.60}, want a base.Family')
  return made
