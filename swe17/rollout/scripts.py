"""Which program shows a family's episodes for the warm start, and what it practises on.

The only other place, beside env/families.py, that knows families by name.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import random

from swe17 import types
from swe17.agent import (
  episode,
  formats,
  kernels_scripted,
  packages_scripted,
  scripted,
  searcher,
)
from swe17.env.kernels import kernels_small
from swe17.env.packages import packages
from swe17.env.repair import library, repair, repair_text
from swe17.env.retrieval import retrieval

Agent = Callable[[formats.Format, random.Random], episode.Generate]


@dataclasses.dataclass(frozen=True)
class Script:
  """How a family is shown."""

  agent: Agent  # works on training tasks, clumsily
  careful: Agent  # works on them as well as it can
  practising: Agent | None = None  # works on `practice`, whose episodes have no outcome
  practice: Callable[[Sequence[types.Task]], list[types.Task]] | None = None


def _clumsy(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return scripted.Scripted(fmt, rng, scripted.CLUMSY)


def _careful(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return scripted.Scripted(fmt, rng, scripted.CAREFUL)


def _practising(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return scripted.Scripted(fmt, rng, scripted.PRACTICE)


def _practice(heldout: Sequence[types.Task]) -> list[types.Task]:
  return library.practice(heldout)


def _searching(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return searcher.Searcher(fmt, rng, searcher.CLUMSY)


def _searching_well(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return searcher.Searcher(fmt, rng, searcher.CAREFUL)


def _editing(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return kernels_scripted.Editor(fmt, rng, kernels_scripted.CLUMSY)


def _editing_well(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return kernels_scripted.Editor(fmt, rng, kernels_scripted.CAREFUL)


def _mending(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return packages_scripted.Mender(fmt, rng, packages_scripted.CLUMSY)


def _mending_well(fmt: formats.Format, rng: random.Random) -> episode.Generate:
  return packages_scripted.Mender(fmt, rng, packages_scripted.CAREFUL)


SCRIPTS: Mapping[str, Script] = {
  repair.FAMILY: Script(_clumsy, _careful, _practising, _practice),
  repair_text.FAMILY: Script(_clumsy, _careful),
  retrieval.FAMILY: Script(_searching, _searching_well),
  retrieval.SMALL: Script(_searching, _searching_well, None, retrieval.practice),
  packages.FAMILY: Script(_mending, _mending_well),
  kernels_small.FAMILY: Script(_editing, _editing_well),
}


def get(family: str) -> Script:
  """ValueError where a family has no script: its warm start must be switched off."""
  if family not in SCRIPTS:
    raise ValueError(
      f'tasks.family={family} has no scripted agent to imitate: start from a '
      'checkpoint or a model (model.source) with imitation.steps=0'
    )
  return SCRIPTS[family]


def practice(heldout: Sequence[types.Task]) -> list[types.Task]:
  """What there is to practise on, of every family among the held-out tasks."""
  found: list[types.Task] = []
  for family in dict.fromkeys(task.family for task in heldout):
    make = get(family).practice
    found += make([t for t in heldout if t.family == family]) if make else []
  return found
