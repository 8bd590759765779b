"""Runs of the main job in small, and what must hold of each: for the tests beside."""

from collections.abc import Callable
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from swe17 import config
from swe17.env.repair import faults, repair
from swe17.metrics import records
from swe17.store import kv
from swe17.sync import follower, manifest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DEADLINE = 240.0  # s; only a hang takes that long
STEPS, MORE = 6, 6
SETTINGS = {
  'steps': STEPS,
  'agent.max_context': 320,
  'agent.max_turns': 10,
  'agent.on_malformed': 'answer',
  'batch.groups': 3,
  'batch.micro_rows': 4,
  'batch.row_length': 320,
  'checkpoint.every': 2,
  'imitation.episodes': 160,
  'imitation.lr': 0.01,
  'imitation.steps': 90,
  'model.ffn': 128,
  'model.head_dim': 32,
  'model.heads': 2,
  'model.kv_heads': 1,
  'model.layers': 2,
  'model.width': 64,
  'rollout.eval_samples': 1,
  'rollout.group_size': 8,
  'sampler.slots': 8,
  'sandbox.workers': 1,
}


def easy_table(path: pathlib.Path) -> None:
  """Writes the rows of one training function and two held-out ones, easiest first."""
  tasks, _ = repair.read(config.Tasks())
  cost: dict[tuple[str, str], list[int]] = {}
  for task in tasks:
    edits = len(faults.candidates(task.payload['source']))
    cost.setdefault((task.split, task.unit), []).append(edits)
  # A dropped line cannot be put back by one edit of it.
  for task in tasks:
    if task.payload['kind'] == 'dropped_line':
      cost[task.split, task.unit].append(1000)
  easy = sorted(cost, key=lambda unit: (max(cost[unit]), unit))
  chosen = [u for u in easy if u[0] == 'train'][:1]
  chosen += [u for u in easy if u[0] == 'heldout'][:2]
  ids = {task.id for task in tasks if (task.split, task.unit) in chosen}
  rows = [row for row in repair.read_table(repair.TABLE) if row.id in ids]
  path.write_text(''.join(json.dumps(dataclasses.asdict(row)) + '\n' for row in rows))


def compiled_as_in_production() -> dict[str, str]:
  """The environment without what makes XLA optimise less in tests."""
  return {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}


class Run:
  """A run folder and the supervisor that works on it."""

  def __init__(self, folder: pathlib.Path):
    self.folder = folder
    self.process: subprocess.Popen[str] | None = None

  def start(self, *flags: str, quick: bool = False) -> 'Run':
    """Starts the main job; `quick`: XLA optimises as little as in other tests."""
    argv = [sys.executable, '-m', 'experiments.swe17', f'--run_dir={self.folder}']
    self.process = subprocess.Popen(
      [*argv, *flags],
      cwd=ROOT,
      env=dict(os.environ) if quick else compiled_as_in_production(),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,
    )
    return self

  def wait_for(self, what: str, ready: Callable[[], bool]) -> None:
    assert self.process is not None
    until = time.monotonic() + DEADLINE
    while not ready():
      code = self.process.poll()
      if code is not None:
        pytest.fail(f'ended with {code} before {what}:\n{self.end()[1]}')
      if time.monotonic() > until:
        self.process.kill()
        pytest.fail(f'no {what} in {DEADLINE:g} s:\n{self.end()[1]}')
      time.sleep(0.05)

  def end(self) -> tuple[int, str]:
    """Waits for the exit code and all that was printed."""
    assert self.process is not None
    try:
      text, _ = self.process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
      self.process.kill()
      text, _ = self.process.communicate()
    return self.process.returncode, text

  def kill(self, *words: str) -> int:
    """SIGKILL to the one process with `words` in its command line; its process id."""
    (pid,) = self.processes(*words)
    os.kill(pid, signal.SIGKILL)
    return pid

  def processes(self, *words: str) -> list[int]:
    """Processes whose command line names this run folder and `words`."""
    found = []
    for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
      try:
        argv = path.read_bytes().decode(errors='replace').split('\0')
      except (FileNotFoundError, ProcessLookupError):
        continue
      if f'--run_dir={self.folder}' in argv and all(word in argv for word in words):
        found.append(int(path.parent.name))
    return found

  def descendants(self) -> set[int]:
    """The supervisor's children, theirs, and so on: graders and sandboxes too."""
    assert self.process is not None
    parents = {}
    for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
      try:
        fields = path.read_text().rpartition(')')[2].split()
      except (FileNotFoundError, ProcessLookupError):
        continue
      parents[int(path.parent.name)] = int(fields[1])
    found: set[int] = set()
    new = {self.process.pid}
    while new:
      found |= new
      new = {pid for pid, parent in parents.items() if parent in found} - found
    return found

  def rows(self) -> list[dict]:
    return records.read(str(self.folder))

  def step(self) -> int:
    rows = self.rows()
    return rows[-1]['step'] if rows else 0

  def events(self, kind: str, name: str = 'events') -> list[dict]:
    found = records.read_events(str(self.folder / f'{name}.jsonl'))
    return [event for event in found if event['kind'] == kind]

  def copy(self, folder: pathlib.Path) -> 'Run':
    shutil.copytree(self.folder, folder)
    return Run(folder)


def check_rows(run: Run, last: int) -> None:
  """Steps 1 to `last`, none twice, none left out, every key in each row."""
  rows = run.rows()
  assert [row['step'] for row in rows] == list(range(1, last + 1))
  lines = (run.folder / records.FILE).read_text().splitlines()
  assert all(list(json.loads(line)) == list(records.NAMES) for line in lines)
  versions = [row['version'] for row in rows]
  assert versions == sorted(set(versions))
  for row in rows:
    assert row['groups_trained'] >= 1
    assert row['trained_tokens'] > 0
    assert row['loss'] is not None


def check_groups(run: Run) -> None:
  """What the rows say was used up is what the cursor says: nothing counted twice."""
  plan = follower.read_plan(kv.open(f'file://{run.folder}/store')).plan
  rows = run.rows()
  used = sum(
    row['groups_trained'] + row['groups_no_signal'] + row['groups_dropped']
    for row in rows
  )
  assert plan['done']
  assert used == plan['consumed_below'] + len(plan['consumed_rest'])


def check_digests(run: Run) -> int:
  """Every version that a sampler held is, byte for byte, the learner's. How many."""
  store = kv.open(f'file://{run.folder}/store')
  published = {e['version']: e['digest'] for e in run.events('version')}
  held = [e for i in (0, 1) for e in run.events('weights', f'sampler-{i}')]
  for event in held:
    version = event['version']
    if version not in published:  # killed after it published, before it said so
      published[version] = manifest.read(store, version).digest
    assert event['digest'] == event['published'] == published[version]
  return len(held)


def change(run: Run, **values: object) -> None:
  """Edits the settings that the run is gone on with."""
  path = run.folder / 'config.json'
  document = json.loads(path.read_text())
  for name, value in values.items():
    document[name]['value'] = value
  path.write_text(json.dumps(document))
