"""What a unit of the family `kernels` is, and how its sources are read.

A unit is one numerical function: slow versions of it as real code has them, each a task
of its own, and a fast one that proves there is something to gain. The files units_*.py
hold them as ordinary functions; what an agent sees is their text under the unit's name.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
import re
from typing import Any

import numpy as np

Inputs = Callable[[np.random.Generator, int], tuple[Any, ...]]
_MODULES = {'np': 'import numpy as np', 'math': 'import math'}
_MODULES |= {'bisect': 'import bisect', 'collections': 'import collections'}


@dataclasses.dataclass(frozen=True)
class Unit:
  """One function to make faster.

  Attributes:
    fast: the gold.
    slow: variant -> what an agent is given.
    inputs: (generator, size) -> positional arguments.
    size: of the inputs that are timed, by variant; '' for all others.
    small: sizes of the inputs that are checked first, one drawn for each check.
    rtol: of floats.
  """

  name: str
  fast: Callable[..., Any]
  slow: Mapping[str, Callable[..., Any]]
  inputs: Inputs
  size: Mapping[str, int]
  small: tuple[int, ...] = (1, 2, 5, 9)
  rtol: float = 1e-9

  def size_of(self, variant: str) -> int:
    return self.size.get(variant, self.size.get('', 0))


@functools.cache
def source(function: Callable[..., Any], name: str) -> str:
  """A function's text with its imports, as a module that defines it as `name`."""
  text = inspect.getsource(function).rstrip('\n')
  text = re.sub(rf'\b{function.__name__}\b', name, text)
  used = [line for word, line in _MODULES.items() if re.search(rf'\b{word}\.', text)]
  return '\n'.join([*used, '', '', text] if used else [text]) + '\n'
