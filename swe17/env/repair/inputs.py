"""Seeded generators of arguments, small enough to name a function's domain in a line.

A generator is a function of a `random.Random`. Everything it makes is a Python literal:
`repr` of it is a case, evaluated again inside the grader.
"""

from collections.abc import Callable
import dataclasses
import random
from typing import Any

Generator = Callable[[random.Random], Any]


@dataclasses.dataclass(frozen=True)
class Entry:
  """One function of the catalogue and where its arguments come from."""

  module: str
  function: str
  arguments: Generator  # makes the tuple of positional arguments

  @property
  def name(self) -> str:
    return f'{self.module}.{self.function}'


def entry(name: str, *arguments: Generator) -> Entry:
  """`name` is dotted; one generator per positional argument."""
  module, _, function = name.rpartition('.')
  return Entry(module, function, tuples(*arguments))


def ints(low: int, high: int) -> Generator:
  """An integer of [low, high]."""
  return lambda rng: rng.randint(low, high)


def floats(low: float, high: float, digits: int = 2) -> Generator:
  """A float of [low, high], rounded."""
  return lambda rng: round(rng.uniform(low, high), digits)


def pick(*values: Any) -> Generator:
  """One of the values."""
  return lambda rng: rng.choice(values)


def either(*generators: Generator) -> Generator:
  """A value of one of the generators."""
  return lambda rng: rng.choice(generators)(rng)


def text(alphabet: str, low: int, high: int) -> Generator:
  """A string of low .. high characters."""
  return lambda rng: ''.join(rng.choices(alphabet, k=rng.randint(low, high)))


def raw(alphabet: bytes, low: int, high: int) -> Generator:
  """Bytes, low .. high of them."""
  return lambda rng: bytes(rng.choices(alphabet, k=rng.randint(low, high)))


def parts(pieces: str, low: int, high: int, glue: str = '') -> Generator:
  """low .. high of the space-separated pieces, joined; `~` in a piece is a space."""
  words = [piece.replace('~', ' ') for piece in pieces.split(' ') if piece]
  return lambda rng: glue.join(rng.choices(words, k=rng.randint(low, high)))


def joined(*generators: Generator) -> Generator:
  """Strings, one of each generator, one after the other."""
  return lambda rng: ''.join(g(rng) for g in generators)


def encoded(generator: Generator) -> Generator:
  """A string as bytes."""
  return lambda rng: generator(rng).encode()


def tuples(*generators: Generator) -> Generator:
  """A tuple, one value of each generator."""
  return lambda rng: tuple(g(rng) for g in generators)


def lists(generator: Generator, low: int, high: int) -> Generator:
  """A list of low .. high values."""
  return lambda rng: [generator(rng) for _ in range(rng.randint(low, high))]


def ordered(generator: Generator, low: int, high: int) -> Generator:
  """A sorted list, which is a heap too."""
  return lambda rng: sorted(generator(rng) for _ in range(rng.randint(low, high)))


def dicts(keys: Generator, values: Generator, low: int, high: int) -> Generator:
  """A dict of at most `high` items (equal keys merge)."""
  return lambda rng: {keys(rng): values(rng) for _ in range(rng.randint(low, high))}


def then(generator: Generator, change: Callable[[Any], Any]) -> Generator:
  """A value of the generator, changed."""
  return lambda rng: change(generator(rng))
