"""TensorBoard scalars of a run: one event a row, on the learner's step.

Written in the caller's thread, straight to the event file: tensorboardX's queued
writer would block its caller for ever once its own thread had died of a full disk.
"""

from collections.abc import Mapping
import importlib
import os
import time
from typing import Any


class Board:
  """One event file. After a resume, TensorBoard hides older events from `purge` on."""

  def __init__(self, folder: str, purge: int | None):
    # Imported here: it costs half a second, and samplers write events only.
    writer = importlib.import_module('tensorboardX.event_file_writer')
    self._event = importlib.import_module('tensorboardX.proto.event_pb2')
    self._summary = importlib.import_module('tensorboardX.proto.summary_pb2')
    os.makedirs(folder, exist_ok=True)
    # Two writers of one second would else share a name, and the later one truncate.
    suffix = f'.{os.getpid()}.{time.time_ns()}'
    self._file = writer.EventsWriter(os.path.join(folder, 'events'), suffix)
    if purge is not None:
      start = self._event.SessionLog(status=self._event.SessionLog.START)
      self._put(step=purge, session_log=start)

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes tag -> value at `step`."""
    value = self._summary.Summary.Value
    values = [value(tag=tag, simple_value=x) for tag, x in scalars.items()]
    self._put(step=step, summary=self._summary.Summary(value=values))

  def close(self) -> None:
    self._file.close()

  def _put(self, **fields: Any) -> None:
    self._file.write_event(self._event.Event(wall_time=time.time(), **fields))
    self._file.flush()
