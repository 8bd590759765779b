"""Several processes on loopback are one learner (`jax.distributed`, gloo)."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

DEVICES = 4
COUNT = '--xla_force_host_platform_device_count'


def run(folder: pathlib.Path, processes: int) -> list[dict]:
  """What each process prints."""
  with socket.socket() as found:
    found.bind(('localhost', 0))
    address = f'localhost:{found.getsockname()[1]}'
  count = DEVICES // processes
  env = os.environ | {
    'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} {COUNT}={count}',
    'JAX_PLATFORMS': 'cpu',
  }
  started = [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.learner_distributed_main', *arguments],
      env=env,
      cwd=pathlib.Path(__file__).parents[1],
      stdout=subprocess.PIPE,
    )
    for arguments in (
      (str(folder), str(processes), str(i), address) for i in range(processes)
    )
  ]
  try:
    said = [process.communicate(timeout=600)[0] for process in started]
  finally:
    for process in started:
      process.kill()
  assert [process.returncode for process in started] == [0] * processes
  return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.fixture(scope='module')
def alone(tmp_path_factory) -> tuple[pathlib.Path, dict]:
  """One process with the same mesh."""
  folder = tmp_path_factory.mktemp('alone')
  return folder, run(folder, 1)[0]


@pytest.mark.parametrize('processes', [2, 4])
def test_processes_sum_step_publish_and_checkpoint_as_one(alone, processes, tmp_path):
  of, want = alone
  found = run(tmp_path, processes)
  each = DEVICES // processes
  assert [x['devices'] for x in found] == [[each, DEVICES]] * processes
  assert [x['sum'] for x in found] == [6.0] * processes == [want['sum']] * processes
  # Each gives its own rows of the batch, and together they give all.
  assert [x['rows'] for x in found] == [
    list(range(8 // processes * i, 8 // processes * (i + 1))) for i in range(processes)
  ]
  # Process 0 alone holds what is published.
  assert found[0]['published'] == want['published']
  assert [x['published'] for x in found[1:]] == [''] * (processes - 1)
  assert all(x['restored'] and x['reference'] for x in found)
  assert len({x['after'] for x in found}) == 1
  with (
    np.load(of / 'gradient1.npz') as one,
    np.load(tmp_path / f'gradient{processes}.npz') as several,
  ):
    assert set(one) == set(several)
    for name in one:
      apart = np.abs(one[name] - several[name]).max()
      assert apart <= 1e-6 * np.abs(one[name]).max(), name
