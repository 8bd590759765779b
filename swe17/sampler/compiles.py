"""Counts what XLA compiles on a thread: an engine's must be none once it serves.

A program that is loaded from the persistent cache counts too: it also stalls a request.
"""

import collections
import functools
import threading

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'


def count(thread: int) -> int:
  """Programs that a thread (`threading.get_ident()`) compiled since the first call."""
  return _watch()[thread]


@functools.cache
def _watch() -> collections.Counter[int]:
  """Listens from now on, once for the whole process."""
  seen: collections.Counter[int] = collections.Counter()

  def heard(event: str, duration_secs: float, **_: object) -> None:
    del duration_secs
    if event == _EVENT:
      seen[threading.get_ident()] += 1  # told on the thread that compiles

  jax.monitoring.register_event_duration_secs_listener(heard)
  return seen
