"""The table of families under audit."""

from collections.abc import Awaitable, Callable, Mapping

from swe17 import config
from swe17.env.audit import of_kernels, of_packages, of_repair, of_retrieval, subject
from swe17.env.kernels import kernels, kernels_small
from swe17.env.packages import packages
from swe17.env.repair import repair
from swe17.env.retrieval import retrieval

Open = Callable[[config.Sandbox], Awaitable[subject.Subject]]


async def _retrieval(cfg: config.Sandbox) -> subject.Subject:
  return await of_retrieval.open_subject(cfg, retrieval.FAMILY)


async def _retrieval_small(cfg: config.Sandbox) -> subject.Subject:
  return await of_retrieval.open_subject(cfg, retrieval.SMALL)


async def _kernels(cfg: config.Sandbox) -> subject.Subject:
  return await of_kernels.open_subject(cfg, kernels.FAMILY)


async def _kernels_small(cfg: config.Sandbox) -> subject.Subject:
  return await of_kernels.open_subject(cfg, kernels_small.FAMILY)


SUBJECTS: Mapping[str, Open] = {
  repair.FAMILY: of_repair.open_subject,
  packages.FAMILY: of_packages.open_subject,
  retrieval.FAMILY: _retrieval,
  retrieval.SMALL: _retrieval_small,
  kernels.FAMILY: _kernels,
  kernels_small.FAMILY: _kernels_small,
}
