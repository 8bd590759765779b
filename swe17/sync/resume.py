"""The base of the next delta, as a learner that starts again reads it back."""

from collections.abc import Mapping
import dataclasses
import logging

import numpy as np

from swe17.store import kv
from swe17.sync import follower, manifest, upload

_log = logging.getLogger(__name__)
_POLLS = 20  # the follower leaves some of them out after faults


@dataclasses.dataclass(frozen=True)
class Last:
  """What was published last: the base of the next delta."""

  manifest: manifest.Manifest
  tensors: Mapping[str, np.ndarray]
  full_at: int  # the newest full snapshot, this version or one before it


def last(store: kv.Store, up: upload.Upload, threads: int) -> Last | None:
  """The newest version with its tensors, verified; None with the reason in the log."""
  try:
    newest = up.latest()
    if newest is None:
      return None
    reader = follower.Follower(store, threads=threads)
    staged = None
    for _ in range(_POLLS):
      staged = reader.poll()
      if staged is not None and staged.version == newest:
        break
    else:
      _log.warning(
        'the base %d could not be read (%s): the next version is full',
        newest,
        dict(reader.faults),
      )
      return None
    at = newest
    while True:
      made = up.read(at)
      if made is None or made.base is None or made.starts:
        break
      at = made.base
  except (kv.StoreError, upload.PublishConflict) as e:
    _log.warning('the base was not read, the next version is full: %s', e)
    return None
  return Last(staged.manifest, staged.tensors, at)
