"""The table of families under audit."""

from collections.abc import Awaitable, Callable, Mapping
import functools

from swe17 import config
from swe17.env import families
from swe17.env.audit import (
  of_any,
  of_harbor,
  of_kernels,
  of_packages,
  of_repair,
  of_retrieval,
  of_swe,
  of_verifiers,
  subject,
)
from swe17.env.formats import harbor, swe_bench, verifiers_env
from swe17.env.kernels import kernel_bench, kernels, kernels_small
from swe17.env.packages import packages
from swe17.env.repair import repair, repair_text
from swe17.env.retrieval import retrieval

Open = Callable[[config.Sandbox, config.Tasks], Awaitable[subject.Subject]]
_kernels, _retrieval = of_kernels.open_subject, of_retrieval.open_subject

SUBJECTS: Mapping[str, Open] = {
  repair.FAMILY: of_repair.open_subject,
  repair_text.FAMILY: of_repair.open_text,
  packages.FAMILY: of_packages.open_subject,
  retrieval.FAMILY: functools.partial(_retrieval, family=retrieval.FAMILY),
  retrieval.SMALL: functools.partial(_retrieval, family=retrieval.SMALL),
  kernels.FAMILY: functools.partial(_kernels, family=kernels.FAMILY),
  kernels_small.FAMILY: functools.partial(_kernels, family=kernels_small.FAMILY),
  kernel_bench.FAMILY: of_kernels.open_bench,
  swe_bench.FAMILY: of_swe.open_subject,
  harbor.FAMILY: of_harbor.open_subject,
  verifiers_env.FAMILY: of_verifiers.open_subject,
}


def get(name: str) -> Open:
  """How the subject of a family is opened; 'module:factory' is somebody else's family.

  ValueError on others, with the nearest, and on mixtures: each has its own report.
  """
  if ',' in name:
    raise ValueError(f'--family: got {name!r}, want one family: each is proved alone')
  family = families.get(name)
  return SUBJECTS.get(family.name) or functools.partial(
    of_any.open_subject, family=name
  )
