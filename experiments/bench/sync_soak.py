"""Publish and follow for a long time while every third operation on the store fails.

  python -m experiments.bench.sync_soak              500 versions
  python -m experiments.bench.sync_soak --versions=60

A publisher in this process and three followers in processes of their own share a
folder. Each sees the store through a fault store of its own, which makes every third of
its operations fail in one of the ways that fit it. One follower joins late, one sleeps
at random, one is killed and started again; the publisher starts afresh now and then,
and whenever a conflict or a refusal ends it. About 1 MB of bfloat16 weights moves as at
a learning rate of 1e-6, and some of it not at all.

What each version's weights are is known before they are published, by a sha256 that
shares no code with what is tested. A follower hashes what it holds after each poll; any
version with other bytes than on record counts as wrong. Memory of every process and the
store's objects and bytes are taken at every version; after a warm-up they must be flat.
All threads of a process share one heap, or else each restart of the publisher, whose
threads are new ones, would cut it up further, and memory would say little of what is
held. `fulls` counts versions with a full snapshot, beside a delta or alone,
`bytes_down` what all followers read for the versions that they served.

The last line is JSON; exit code 1 if anything in it is not as it must be:

  {"versions": 500, "faults": .., "wrong_bytes_served": 0, "served": .., ...}
"""

import collections
from collections.abc import Sequence
import json
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags
import numpy as np

from experiments import program
from experiments.bench import sync_soak_parts as parts
from swe17.store import kv
from swe17.sync import manifest, publisher

FLAGS = flags.FlagValues()  # joined to the command line by program.run
_VERSIONS = flags.DEFINE_integer(
  'versions', 500, 'weight versions published', 40, flag_values=FLAGS
)
_SEED = flags.DEFINE_integer(
  'seed', 0, 'of weights, faults, naps and kills', flag_values=FLAGS
)
_EVERY = flags.DEFINE_integer(
  'every', 3, 'one of so many operations fails', 2, flag_values=FLAGS
)
_PAUSE = flags.DEFINE_float(
  'pause', 0.05, 'seconds between two versions', flag_values=FLAGS
)
_ROLE = flags.DEFINE_string(
  'role', 'all', 'all, or what it starts: steady|napping|late', flag_values=FLAGS
)
_FOLDER = flags.DEFINE_string(
  'folder', '', 'where the processes meet; empty: temporary', flag_values=FLAGS
)

_LIMIT = 120.0  # seconds that followers may take to end on the last version


class Soak:
  """The publisher, its record, and the processes that follow."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.record: dict[int, str] = {}
    self.rows: list[dict[str, float]] = []  # memory and disk at each version
    self.fulls, self.kills = 0, 0
    self.ends: collections.Counter[str] = collections.Counter()
    self._rng = random.Random(_SEED.value)
    self._client = parts.Client(
      f'file://{folder}/store', f'p/{_SEED.value}', _EVERY.value, writes=True
    )
    self._running: dict[str, subprocess.Popen] = {}
    self._attempt = 0
    self._publisher = self._fresh()

  @property
  def injected(self) -> collections.Counter[str]:
    return self._client.injected

  def run(self) -> None:
    """Publishes all versions; followers come, are killed and come again meanwhile."""
    n, weights = _VERSIONS.value, parts.Weights(_SEED.value)
    self._start('steady')
    self._start('napping')
    for version in range(n):
      tensors = weights.step()
      self.record[version] = parts.sha(tensors)
      if version == n // 4:
        self._start('late')
      if version % (n // 10) == n // 20:
        self._kill('steady')
        self._start('steady')
      if version % (n // 6) == n // 8:
        self._restart('planned')
      self._publish(version, tensors)
      self._measure()
      if version % 20 == 19 or version == n - 1:
        row = self.rows[-1]
        print(
          f'version {version + 1}/{n}: {row["objects"]:.0f} objects, '
          f'{row["bytes"] / 1e6:.1f} MB, {row["rss"]:.0f} MB resident, '
          f'{self.injected.total()} faults at the publisher, ends {dict(self.ends)}',
          flush=True,
        )
      time.sleep(_PAUSE.value)

  def finish(self) -> list[dict]:
    """Waits until every follower serves the last version, ends them; their lines."""
    until, last = time.monotonic() + _LIMIT, _VERSIONS.value - 1
    try:
      while time.monotonic() < until:
        held = {role: self._lines(role)[-1:] for role in self._running}
        if all(rows and rows[0]['version'] == last for rows in held.values()):
          break
        if any(process.poll() is not None for process in self._running.values()):
          break
        time.sleep(0.2)
      (self.folder / 'stop').touch()
      for process in self._running.values():
        process.wait(timeout=30)
    finally:
      for process in self._running.values():
        process.kill()
    lines = []
    for path in sorted(self.folder.glob('*.jsonl')):
      lines += [{**row, 'process': path.stem} for row in whole_lines(path)]
    return lines

  def ended_on(self) -> dict[str, int | None]:
    """The version that each follower ended on."""
    return {
      role: next((r['version'] for r in self._lines(role)[-1:]), None)
      for role in self._running
    }

  def _publish(self, version: int, tensors: dict[str, np.ndarray]) -> None:
    """As a learner does: calls again after a StoreError, starts afresh otherwise."""
    while True:
      try:
        done = self._publisher.publish(version, tensors, step=version, plan={})
        self.fulls += done.full_bytes is not None
        self._client.store.trim()
        return
      except kv.StoreError:
        self.ends['store'] += 1
      except publisher.PublishConflict:
        if self._restart('conflict') >= version:
          return  # it was its own: published, and the reply was damaged
      except ValueError:
        self._restart('refused')

  def _restart(self, why: str) -> int:
    """A new learner process would do this. Returns the newest version in the store."""
    self.ends[why] += 1
    self._publisher = self._fresh()
    self._publisher.restore(parts.CFG.restore_seconds)
    while True:
      try:
        # Once more by the next key: a listing may leave out what was made just now.
        newest = manifest.latest(self._client.store)
        at = -1 if newest is None else newest
        while manifest.read(self._client.store, at + 1) is not None:
          at += 1
        return at
      except (kv.StoreError, ValueError):
        continue

  def _fresh(self) -> publisher.Publisher:
    self._attempt += 1
    return publisher.Publisher(
      self._client.store, parts.CFG, attempt=f'attempt{self._attempt}'
    )

  def _start(self, role: str) -> None:
    command = [sys.executable, '-m', 'experiments.bench.sync_soak', f'--role={role}']
    command += [f'--folder={self.folder}', f'--seed={_SEED.value}']
    with (self.folder / f'{role}.log').open('a') as log:
      self._running[role] = subprocess.Popen(
        [*command, f'--every={_EVERY.value}'], stderr=log
      )

  def _kill(self, role: str) -> None:
    self._running[role].kill()
    self._running[role].wait()
    self.kills += 1

  def _lines(self, role: str) -> list[dict]:
    return whole_lines(self.folder / f'{role}-{self._running[role].pid}.jsonl')

  def _measure(self) -> None:
    files = [p for p in (self.folder / 'store').rglob('*') if p.is_file()]
    sizes = []
    for path in files:
      try:
        sizes.append(path.stat().st_size)
      except FileNotFoundError:  # a follower's temporary file
        continue
    row = {'objects': len(sizes), 'bytes': sum(sizes), 'rss': parts.memory()}
    self.rows.append({k: float(v) for k, v in row.items()})


def whole_lines(path: pathlib.Path) -> list[dict]:
  """The JSON lines of a file; none if it is not there, and not one that was cut."""
  if not path.exists():
    return []
  rows = path.read_text().splitlines(keepends=True)
  return [json.loads(row) for row in rows if row.endswith('\n')]


def early_late(values: Sequence[float], peak: bool) -> tuple[float, float]:
  """A quantity from a quarter to a half of the time, and in the last quarter of it.

  peak: the largest value counts; otherwise the median.
  """
  q, take = len(values) // 4, max if peak else statistics.median
  return take(values[q : 2 * q]), take(values[-q:])


def report(soak: Soak, lines: list[dict], seconds: float) -> dict:
  """What it came to, with every broken promise named under `broken`."""
  broken, n = [], _VERSIONS.value
  served = [row for row in lines if 'sha' in row]
  wrong = sum(row['sha'] != soak.record[row['version']] for row in served)
  ends = {row['process']: row for row in lines}  # the last line of each
  wrong += sum(row['torn'] for row in ends.values())
  injected = soak.injected + collections.Counter()
  for row in ends.values():
    injected.update(row['injected'])
  flat: dict[str, tuple[float, float]] = {}
  for name in ('objects', 'bytes'):
    early, late = early_late([row[name] for row in soak.rows], peak=True)
    flat[name] = early, late
    if late > 1.3 * early:
      broken.append(f'{name} in the store grew from {early:.0f} to {late:.0f}')
  memories = {'publisher': [row['rss'] for row in soak.rows]}
  for role in ('napping', 'late'):
    memories[role] = [r['rss'] for r in lines if r['process'].startswith(role)]
  for name, values in memories.items():
    if len(values) < 8:
      broken.append(f'{name} served {len(values)} versions only')
      continue
    early, late = early_late(values, peak=False)
    flat[f'rss_{name}'] = early, late
    if late > 1.05 * early + 4.0:
      broken.append(f'memory of {name} grew from {early:.1f} to {late:.1f} MB')
  for role, version in soak.ended_on().items():
    if version != n - 1:
      broken.append(f'{role} ended on version {version}, want {n - 1}')
  if wrong:
    broken.append(f'{wrong} times other bytes than the published ones were served')
  return {
    'versions': n,
    'faults': injected.total(),
    'wrong_bytes_served': wrong,
    'served': len(served),
    'fulls': soak.fulls,
    'bytes_down': sum(row['bytes'] for row in served),
    'publisher_ends': dict(soak.ends),
    'follower_kills': soak.kills,
    'follower_faults': _summed([row['faults'] for row in ends.values()]),
    'injected': dict(injected),
    'early_late': {k: [round(v, 1) for v in pair] for k, pair in flat.items()},
    'seconds': round(seconds, 1),
    'broken': broken,
  }


def _summed(rows: list[dict[str, int]]) -> dict[str, int]:
  total: collections.Counter[str] = collections.Counter()
  for row in rows:
    total.update(row)
  return dict(total)


def main(argv: Sequence[str]) -> None:
  del argv
  parts.share_one_heap()
  if _ROLE.value != 'all':
    parts.follow(_ROLE.value, pathlib.Path(_FOLDER.value), _SEED.value, _EVERY.value)
    return
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(_FOLDER.value or temporary)
    began, soak = time.monotonic(), Soak(folder)
    try:
      soak.run()
    finally:
      lines = soak.finish()
    found = report(soak, lines, time.monotonic() - began)
  print(json.dumps(found), flush=True)
  if found['broken']:
    sys.exit(1)


if __name__ == '__main__':
  program.run(main, FLAGS)
