"""The learner on a mesh: born split, stepped alike, checkpointed for any other mesh."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from swe17.learner import mesh, optimizer
from swe17.learner import state as st
from swe17.model import params as p
from tests import fixtures
from tests import learner_mesh_main as program


def run(folder: pathlib.Path, flags: str, *checks: str) -> dict:
  """What the program prints, in a process with 8 devices."""
  env = os.environ | {
    'XLA_FLAGS': f'{flags} --xla_force_host_platform_device_count=8',
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run(
    [sys.executable, '-m', 'tests.learner_mesh_main', str(folder), *checks],
    env=env,
    cwd=pathlib.Path(__file__).parents[1],
    stdout=subprocess.PIPE,
    timeout=900,
    check=True,
  )
  return json.loads(done.stdout)


@pytest.fixture(scope='module')
def found(tmp_path_factory) -> dict:
  """Steps as production compiles them: their sums are what is compared."""
  folder = tmp_path_factory.mktemp('mesh')
  quick = run(folder, os.environ['XLA_FLAGS'], 'born', 'restored')
  return quick | run(folder, '', 'exact', 'steps')


@pytest.mark.parametrize('name', program.MESHES)
def test_a_step_on_a_mesh_is_that_of_one_device_up_to_rounding(found, name):
  gradient, params = found['steps'][name]
  assert gradient <= 1e-6
  assert params <= 1e-3


def test_replicas_with_the_exact_sum_give_the_bits_of_one_device(found):
  assert found['exact']


def test_parameters_and_optimiser_are_born_split_with_the_values_of_one_device(found):
  born = found['born']
  assert born['published alike'] and born['apart'] <= 1e-6
  assert born['largest share'] <= 0.25


def test_a_checkpoint_of_a_mesh_comes_back_on_another_and_on_one_device(found):
  assert found['restored'] == [True] * 4


def test_on_one_device_the_program_is_the_one_without_a_mesh():
  cfg = program.settings(program.DENSE, {})
  on = mesh.open(cfg, program.VOCAB)
  assert on.mesh is None and on.replicas is None
  batch = program.mesh_main.batch(cfg, program.VOCAB, 1)
  assert mesh.put(on, batch) is batch
  assert mesh.part(on, batch, 0) is batch
  key = jax.random.key(0)
  params = mesh.init(on, key)
  assert fixtures.same_bits(params, p.init(p.abstract(cfg.model, program.VOCAB), key))
  tx = optimizer.make(cfg.optim, optimizer.schedule(cfg.optim))
  assert fixtures.same_bits(mesh.state(on, params, tx), st.init(params, tx))
  with mesh.scope(on):
    assert jax.sharding.get_abstract_mesh().empty

  def step(state: st.State, by: np.ndarray) -> tuple[st.State, np.ndarray]:
    return jax.tree.map(lambda x: x + 1, state), by

  state = st.init(params, tx)
  lowered = mesh.jit(on, step, state).lower(state, np.float32(1))
  assert (
    lowered.as_text()
    == jax.jit(step, donate_argnums=0).lower(state, np.float32(1)).as_text()
  )


@pytest.mark.parametrize(
  'sizes, optim, says',
  [
    ({'fsdp': 2}, {}, 'product is that number'),
    ({'replica': 2, 'fsdp': 2}, {'exact_sum': True}, 'got other axes beside'),
    ({'fsdp': 3}, {}, r'batch\.micro_rows: got 8, want a multiple'),
    ({'context': 5}, {}, r'batch\.row_length: got 32, want a multiple'),
    ({'tensor': 5}, {}, 'the vocabulary: got 96, want a multiple'),
  ],
)
def test_a_mesh_that_does_not_fit_is_refused_by_name(sizes, optim, says):
  cfg = program.settings(program.DENSE, sizes, **optim)
  with pytest.raises(ValueError, match=says):
    mesh.open(cfg, program.VOCAB, jax.devices()[:1])


def test_experts_that_the_mesh_does_not_divide_are_refused_by_name():
  cfg = program.settings(program.MOE, {'expert': 8})
  with pytest.raises(ValueError, match=r'model\.moe\.experts: got 4, want a multiple'):
    mesh.open(cfg, program.VOCAB, jax.devices()[:1])


class Device:
  """Stands in for a device of a process."""

  def __init__(self, process: int):
    self.process_index = process


class Split:
  """Stands in for a sharding: (process, rows, positions) of each device."""

  def __init__(self, *held: tuple[int, slice, slice]):
    self._held = held

  def devices_indices_map(self, shape: tuple[int, ...]) -> dict:
    return {Device(process): index for process, *index in self._held}


def test_a_process_gives_the_block_of_rows_and_positions_that_it_holds():
  top, bottom, left, right = slice(0, 4), slice(4, 8), slice(0, 16), slice(16, None)
  split = Split((0, top, left), (1, top, right), (0, bottom, left), (1, bottom, right))
  assert mesh._block(split, (8, 32), 0) == (slice(0, 8), slice(0, 16))
  assert mesh._block(split, (8, 32), 1) == (slice(0, 8), slice(16, 32))
  copies = Split((0, top, left), (0, top, left), (1, top, left))
  assert mesh._block(copies, (8, 32), 1) == (slice(0, 4), slice(0, 16))


def test_devices_of_a_process_that_hold_no_block_are_refused():
  rows = [slice(i, i + 2) for i in (0, 2, 4, 6)]
  split = Split(*((i % 2, row, slice(None)) for i, row in enumerate(rows)))
  with pytest.raises(ValueError, match='give every process neighbouring devices'):
    mesh._block(split, (8, 32), 0)
