"""A learner process on scripted groups, as `--role=learner` runs it.

`python -m tests.learner_team_main loop CONFIG.json INDEX ADDRESS RESUME` runs the loop;
`... wait PROCESSES INDEX ADDRESS` joins the others, says so, and waits for an order.
"""

import json
import pathlib
import sys
import threading

from launch import process
from swe17 import config, settings


def loop(path: str, index: str, address: str, resume: str) -> int:
  """Trains with the settings at `path`; the exit code."""
  cfg = settings.from_json(json.loads(pathlib.Path(path).read_text()))
  process.prepare_jax(cfg, 'learner', int(index))
  from swe17.learner import loop as learner

  return learner.run(cfg, resume == 'resume', int(index), address)


def wait(processes: str, index: str, address: str) -> int:
  """Waits for an order that never comes."""
  cfg = config.Config(mesh=config.Mesh(fsdp=int(processes), processes=int(processes)))
  process.prepare_jax(cfg, 'learner', int(index))
  from swe17.learner import team

  ours = team.join(cfg.mesh, int(index), address, threading.Event())
  print('joined', flush=True)
  ours.take(1 - int(index))
  return 0


if __name__ == '__main__':
  process.leave({'loop': loop, 'wait': wait}[sys.argv[1]](*sys.argv[2:]))
