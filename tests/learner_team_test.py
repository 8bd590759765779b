"""The learner's loop in two processes: one decides, all end together."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from launch import local
from launch import process as launched
from swe17 import config, settings
from swe17.learner import team
from swe17.metrics import records
from swe17.store import groups as group_store
from tests import fixtures
from tests import learner_loop_test as scripted

ROOT = pathlib.Path(__file__).parents[1]
DEADLINE = 400.0  # s; only a hang takes that long
STEPS = 2
ALONE = config.Mesh(replica=2)
TWO = config.Mesh(replica=2, processes=2)


def start(name: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
  return subprocess.Popen(
    [sys.executable, '-m', 'tests.learner_team_main', name, *arguments],
    cwd=ROOT,
    env=os.environ | {'JAX_PLATFORMS': 'cpu', **env},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def address() -> str:
  (found,) = launched.coordinator_env(config.Config(mesh=TWO)).values()
  return found


def learners(cfg: config.Config, resume: bool) -> list[subprocess.Popen[str]]:
  """Starts the learner's processes."""
  path = pathlib.Path(cfg.run_dir, 'config.json')
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(settings.to_json(cfg, settings.origins({}, {}))))
  arguments = [address(), 'resume' if resume else 'begin']
  env = {'JAX_COMPILATION_CACHE_DIR': str(path.parent.parent / 'programs')}
  return [
    start('loop', str(path), str(i), *arguments, **env)
    for i in range(cfg.mesh.processes)
  ]


def end(started: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
  """Exit codes, and all that was printed."""
  try:
    said = [one.communicate(timeout=DEADLINE)[0] for one in started]
  finally:
    for one in started:
      one.kill()
  return [one.returncode for one in started], said


def wait_until(condition, started: list[subprocess.Popen[str]]) -> None:
  until = time.monotonic() + DEADLINE
  while not condition():
    if time.monotonic() > until or any(one.poll() is not None for one in started):
      for one in started:
        one.kill()
      pytest.fail('\n'.join(end(started)[1]))
    time.sleep(0.05)


def settings_of(folder: pathlib.Path, mesh: config.Mesh) -> config.Config:
  cfg = scripted.settings(folder, steps=STEPS, mesh=mesh)
  optim = dataclasses.replace(cfg.optim, exact_sum=True, ns_steps=1)
  return dataclasses.replace(cfg, optim=optim)


def test_two_processes_stopped_and_gone_on_with_as_one_are_one_bit_by_bit(tmp_path):
  """Warm start and a step on two processes, SIGTERM to the second, then on one."""
  alone = settings_of(tmp_path / 'alone', ALONE)
  scripted.stock(alone, [scripted.a_group(i) for i in range(2 * STEPS)])
  codes, said = end(learners(alone, False))
  assert codes == [0], said

  cfg = settings_of(tmp_path / 'two', TWO)
  store = scripted.stock(cfg, [scripted.a_group(i) for i in range(2)])
  started = learners(cfg, False)
  wait_until(lambda: len(records.read(cfg.run_dir)) == 1, started)
  started[1].send_signal(signal.SIGTERM)  # not the one that decides
  began = time.monotonic()
  codes, said = end(started)
  assert codes == [1, 1], said
  # 5 s on a quiet machine. Who waits in vain for another ends with other codes.
  assert time.monotonic() - began < 150
  assert int(scripted.saved(cfg)[0].step) == 1
  # Process 1 writes its shards and its log, and nothing else.
  assert not list(pathlib.Path(cfg.run_dir, 'status').glob('learner-*'))

  for i in range(2, 2 * STEPS):
    group_store.append(store, scripted.a_group(i))
  codes, said = end(learners(dataclasses.replace(cfg, mesh=ALONE), True))
  assert codes == [0], said
  (state, extra), (want, _) = scripted.saved(cfg), scripted.saved(alone)
  assert (int(state.step), extra['below']) == (STEPS, 2 * STEPS)
  assert fixtures.same_bits(state, want)
  versions = [
    scripted.manifests(store),
    scripted.manifests(scripted.kv.open(alone.store)),
  ]
  mine, theirs = ({m.step: m.digest for m in found} for found in versions)
  assert mine == theirs and set(mine) == set(range(STEPS + 1))
  rows, others = records.read(cfg.run_dir), records.read(alone.run_dir)
  for key in ('step', 'trained_tokens', 'groups_trained', 'grad_norm', 'loss'):
    assert [row[key] for row in rows] == [row[key] for row in others], key


@pytest.mark.parametrize('killed', [0, 1])
def test_when_one_process_is_killed_the_other_ends_at_once_and_says_why(killed):
  at = address()
  started = [start('wait', '2', str(i), at) for i in range(2)]
  for one in started:
    while (line := one.stdout.readline().strip()) != 'joined':
      assert line or one.poll() is None, end(started)
  started[killed].kill()
  codes, said = end(started)
  assert codes[killed] == -signal.SIGKILL
  # JAX itself may notice first that process 0 is gone, and aborts.
  assert codes[1 - killed] in ([team.LOST] if killed else [team.LOST, -signal.SIGABRT])
  if codes[1 - killed] == team.LOST:
    why = f'learner process {killed} is gone: learner process {1 - killed} ends too'
    assert why in said[1 - killed]


def test_the_supervisor_knows_the_exit_code_of_who_ends_because_of_another():
  assert local.LOST == team.LOST


@pytest.mark.parametrize('dtype', ['bool', 'int16', 'int32', 'float32', 'bfloat16'])
def test_arrays_arrive_as_they_were_sent(dtype):
  one, other = team.connection.Pipe()
  flat = np.arange(24) % 2 if dtype == 'bool' else np.arange(24)
  array = flat.astype(team.jnp.dtype(dtype)).reshape(2, 3, 4)
  sent = {
    'all': array,
    'part': array[:, 1:, ::2],
    'one': array[0, 0, 1],
    'no': array[:0],
  }
  team.send(one, team.Message('name', {'step': 3}, sent))
  got = team.receive(other)
  assert (got.name, got.values) == ('name', {'step': 3})
  for key, x in sent.items():
    assert got.arrays[key].dtype == x.dtype and got.arrays[key].shape == x.shape
    assert got.arrays[key].tobytes() == x.tobytes(), key
