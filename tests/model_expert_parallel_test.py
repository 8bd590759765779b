"""Experts over 8 virtual devices give what experts in one place give, or stop."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from swe17 import config_model
from swe17.model import expert_parallel

TOLERANCE = 2e-6  # relative to the largest entry: sums over F and B are cut otherwise


@pytest.fixture(scope='module')
def found() -> dict:
  """What `model_expert_parallel_main` prints, from a process with 8 devices."""
  flag = '--xla_force_host_platform_device_count=8'
  env = os.environ | {
    'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} {flag}',
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run(
    [sys.executable, '-m', 'tests.model_expert_parallel_main'],
    env=env,
    cwd=pathlib.Path(__file__).parents[1],
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )
  assert done.stdout, done.stderr[-2000:]
  return json.loads(done.stdout)


@pytest.mark.parametrize('way', ['blocks', 'ragged'])
def test_spread_experts_equal_local_ones_in_values_and_gradients(found, way):
  cases = {case: off for case, off in found['apart'].items() if way in case}
  assert len(cases) == 6
  for case, (values, gradients) in cases.items():
    assert values <= TOLERANCE and gradients <= TOLERANCE, case


def test_both_ways_of_exchange_give_the_same_numbers(found):
  apart = found['apart']
  for case, off in apart.items():
    assert apart[case.replace('blocks', 'ragged')] == off


@pytest.mark.parametrize('way', ['blocks', 'ragged'])
def test_more_rows_than_have_room_stop_the_program_and_name_the_setting(found, way):
  said = found['overflow'][way]['said']
  assert 'ValueError' in said and 'model.moe.capacity' in said
  # Of 8 x 12 x 3 rows on 8 devices, all of two neighbours' go to the first of them.
  counts = {'blocks': '36 rows', 'ragged': '72 rows'}
  assert f'{counts[way]} go to one shard of experts' in said


@pytest.mark.parametrize('platform', ['tpu', 'cuda'])
def test_the_ragged_exchange_lowers_for_accelerators_there_and_back(found, platform):
  assert found['lowered'][platform] == 4  # there, back, and both again backwards


def test_the_ragged_exchange_is_chosen_where_the_backend_has_it(monkeypatch):
  auto = config_model.Moe(experts=8)
  for backend, way in (('cpu', 'blocks'), ('tpu', 'ragged'), ('gpu', 'ragged')):
    monkeypatch.setattr(expert_parallel.jax, 'default_backend', lambda b=backend: b)
    assert expert_parallel.way(auto) == way
    for chosen in ('blocks', 'ragged'):
      assert expert_parallel.way(config_model.Moe(exchange=chosen)) == chosen
