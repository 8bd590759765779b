"""What a role is doing now, in a small file that the supervisor reads."""

import json
import os
import time


class Status:
  """Writes `<run_dir>/status/<role>.json`, whole or not at all, at most 5 a second."""

  def __init__(self, run_dir: str, role: str):
    self._path = os.path.join(run_dir, 'status', f'{role}.json')
    os.makedirs(os.path.dirname(self._path), exist_ok=True)
    self._phase, self._written = '', 0.0

  def set(self, phase: str, detail: str = '', fraction: float | None = None) -> None:
    """Says what the role does; a change of phase and the end are always written."""
    now = time.monotonic()
    often = fraction is not None and fraction < 1.0
    if phase == self._phase and often and now - self._written < 0.2:
      return
    self._phase, self._written = phase, now
    text = {'phase': phase, 'detail': detail, 'fraction': fraction, 'time': time.time()}
    with open(self._path + '.new', 'w') as f:
      json.dump(text, f)
    os.replace(self._path + '.new', self._path)
