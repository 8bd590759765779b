"""The plan: what samplers and rollouts must know, riding along in each manifest.

  step            int         learner's optimiser step of these weights
  consumed_below  int         group starts below this one are used up
  consumed_rest   [int]       and these above it
  done            bool        the learner has taken its last step
  sampling        object      temperature, min_p, top_k, top_p of rollouts
  max_staleness   int         age bound of a group [optimiser steps]
  penalty_phase   str         length penalty: none | unconstrained | budget
  tasks           [object]    the task mix: family, its kinds (empty: all), weight > 0

A learner makes it whole with `make`. A reader refuses a manifest in which a key it
knows has another type: `check` runs over every manifest that is written or parsed.
Keys it does not know are a later learner's and pass.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

from swe17 import types

PHASES = ('none', 'unconstrained', 'budget')


def make(
  *,
  step: int,
  consumed_below: int,
  consumed_rest: Sequence[int],
  done: bool,
  sampling: types.Sampling,
  max_staleness: int,
  penalty_phase: str,
  tasks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  """A whole plan. ValueError naming the key that is not what the table says."""
  values: dict[str, Any] = {
    'step': step,
    'consumed_below': consumed_below,
    'consumed_rest': list(consumed_rest),
    'done': done,
    'sampling': dataclasses.asdict(sampling),
    'max_staleness': max_staleness,
    'penalty_phase': penalty_phase,
    'tasks': [dict(row) for row in tasks],
  }
  check(values)
  return values


def task(family: str, kinds: str, weight: float = 1.0) -> dict[str, Any]:
  """One row of the task mix. kinds: comma-separated as in the settings; '' is all."""
  named = [kind.strip() for kind in kinds.split(',') if kind.strip()]
  return {'family': family, 'kinds': named, 'weight': weight}


def check(values: Mapping[str, Any]) -> None:
  """Raises ValueError, naming the key, unless each known key has its type."""
  for key, (sound, want) in _KEYS.items():
    if key in values and not sound(values[key]):
      raise ValueError(f'plan.{key}: got {values[key]!r}, want {want}')


def sampling(values: Mapping[str, Any]) -> types.Sampling:
  """The sampling settings of a plan. ValueError if it has none."""
  if 'sampling' not in values:
    raise ValueError(f'plan: got no sampling among {sorted(values)}')
  return types.Sampling(**values['sampling'])


def _count(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value: Any) -> bool:
  known = isinstance(value, int | float) and not isinstance(value, bool)
  return known and math.isfinite(value)


def _counts(value: Any) -> bool:
  return isinstance(value, list | tuple) and all(_count(entry) for entry in value)


def _sampling(value: Any) -> bool:
  names = {field.name for field in dataclasses.fields(types.Sampling)}
  if not isinstance(value, Mapping) or set(value) != names:
    return False
  return all(_number(value[name]) and value[name] >= 0 for name in names)


def _tasks(value: Any) -> bool:
  return isinstance(value, list | tuple) and bool(value) and all(map(_task, value))


def _task(row: Any) -> bool:
  if not isinstance(row, Mapping) or set(row) != {'family', 'kinds', 'weight'}:
    return False
  kinds, named = row['kinds'], isinstance(row['family'], str) and bool(row['family'])
  plain = isinstance(kinds, list | tuple) and all(isinstance(k, str) for k in kinds)
  return named and plain and _number(row['weight']) and row['weight'] > 0


_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
  'step': (_count, 'an integer from 0'),
  'consumed_below': (_count, 'an integer from 0'),
  'consumed_rest': (_counts, 'integers from 0'),
  'done': (lambda value: isinstance(value, bool), 'true or false'),
  'sampling': (_sampling, 'temperature, min_p, top_k and top_p, each at least 0'),
  'max_staleness': (_count, 'an integer from 0'),
  'penalty_phase': (lambda value: value in PHASES, f'one of {PHASES}'),
  'tasks': (_tasks, 'rows of family, kinds and a weight above 0'),
}
