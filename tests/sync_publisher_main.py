"""A learner that only publishes: two of these race on one store in the tests.

  python tests/sync_publisher_main.py <store> <file to wait for> <versions> <name>

Exit code 0 when all versions are out, 2 with one sentence if another learner is there.
"""

import pathlib
import sys
import time

import numpy as np

from swe17 import config
from swe17.store import kv
from swe17.sync import publisher

CFG = config.Sync(full_every=4, block_bytes=64, keep_fulls=2)


def weights(version: int, name: str) -> dict[str, np.ndarray]:
  """Weights of a version that tell whose they are."""
  rng = np.random.default_rng(ord(name))
  values = rng.integers(0, 2**16, 500, np.uint16)
  values[:: 50 + version] += version
  return {'w': values}


def main(url: str, go: str, versions: str, name: str) -> int:
  """Publishes `versions` versions as fast as it can."""
  made = publisher.Publisher(kv.open(url), CFG, attempt=name)
  gate = pathlib.Path(go)
  (gate.parent / f'ready-{name}').touch()
  while not gate.exists():
    time.sleep(0.001)
  try:
    for version in range(int(versions)):
      made.publish(version, weights(version, name), step=version, plan={})
  except publisher.PublishConflict as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  return 0


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
