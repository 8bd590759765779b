"""A checkpoint is whole or it does not exist, and restores every bit."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config
from swe17.learner import checkpoint, optimizer, update
from swe17.learner import state as st
from tests import fixtures

OPTIM = dataclasses.replace(fixtures.OPTIM, warmup=3)
TX = optimizer.make(OPTIM, optimizer.schedule(OPTIM))
STEP = jax.jit(functools.partial(update.apply_gradient, tx=TX), donate_argnums=0)
EXTRA = {'below': 3, 'rest': [5, 7], 'step_of': {'0': 0}, 'dropped': {'why': 2}}


@pytest.fixture(scope='module')
def states() -> list[st.State]:
  """States after 0, 1, 2 and 3 steps, warm-up and momentum in them."""
  grad = jax.tree.map(
    lambda x: jnp.asarray(np.sin(np.asarray(x) * 50)), _start().params
  )
  out = [_start()]
  for _ in range(3):
    new, _ = STEP(jax.tree.map(jnp.copy, out[-1]), grad)
    out.append(new)
  return out


def _start() -> st.State:
  return st.init(fixtures.params(), TX)


def manager(folder, keep: int = 2) -> checkpoint.Checkpoints:
  return checkpoint.Checkpoints(str(folder), config.Checkpoint(keep=keep))


def test_state_and_cursors_come_back_bit_for_bit_in_another_process(tmp_path, states):
  writer = manager(tmp_path)
  writer.save(3, states[3], EXTRA)
  writer.close()
  reader = manager(tmp_path)  # as after a restart
  state, extra = reader.restore(_start())
  assert fixtures.same_bits(state, states[3])
  assert extra == EXTRA
  assert int(state.step) == 3


def test_three_steps_and_three_more_equal_six(tmp_path, states):
  grad = jax.tree.map(lambda x: jnp.cos(x * 30), states[0].params)

  def go(state: st.State, steps: int) -> st.State:
    state = jax.tree.map(jnp.copy, state)
    for _ in range(steps):
      state, _ = STEP(state, grad)  # a restored state can be donated
    return state

  saved = manager(tmp_path)
  saved.save(3, go(states[0], 3), {})
  state, _ = saved.restore(_start())
  assert fixtures.same_bits(go(state, 3), go(states[0], 6))


def test_the_newest_is_restored_and_only_so_many_are_kept(tmp_path, states):
  saved = manager(tmp_path, keep=2)
  assert saved.latest() is None
  for i, state in enumerate(states):
    saved.save(i, state, {'i': i})
    assert saved.latest() == i
  kept = sorted(d for d in os.listdir(tmp_path / 'checkpoints') if d.isdigit())
  assert kept == ['2', '3']
  state, extra = saved.restore(_start())
  assert extra == {'i': 3} and fixtures.same_bits(state, states[3])
  state, extra = saved.restore(_start(), 2)
  assert extra == {'i': 2} and fixtures.same_bits(state, states[2])


def test_a_missing_checkpoint_is_an_error_that_names_the_step(tmp_path, states):
  saved = manager(tmp_path)
  with pytest.raises(FileNotFoundError, match='no checkpoint of step None'):
    saved.restore(_start())
  saved.save(1, states[1], {})
  with pytest.raises(FileNotFoundError, match='no checkpoint of step 7'):
    saved.restore(_start(), 7)


def test_a_second_save_of_a_step_says_that_it_committed_nothing(tmp_path, states):
  saved = manager(tmp_path)
  assert saved.save(1, states[1], {'i': 0})
  assert not saved.save(1, states[2], {'i': 1})
  state, extra = saved.restore(_start())
  assert extra == {'i': 0} and fixtures.same_bits(state, states[1])


# A save that failed half-way leaves a thread that finds its event loop closed.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_with_one_kept_every_moment_of_a_save_leaves_one_to_resume_from(
  tmp_path, states, monkeypatch
):
  # Every operation that a save makes on files in turn is where the process dies.
  real = {name: getattr(os, name) for name in ('rename', 'replace', 'mkdir')}
  calls, deaths = [0], 0

  class Killed(OSError):
    pass

  def dying(name, at):
    def call(*args, **kwargs):
      calls[0] += 1
      if calls[0] == at:
        raise Killed
      return real[name](*args, **kwargs)

    return call

  for at in range(1, 12):
    folder = tmp_path / str(at)
    saved = manager(folder, keep=1)
    saved.save(1, states[1], {'i': 1})
    calls[0] = 0
    with monkeypatch.context() as patch:
      for name in real:
        patch.setattr(os, name, dying(name, at))
      try:
        saved.save(2, states[2], {'i': 2})
      except Killed:
        deaths += 1
    state, extra = manager(folder, keep=1).restore(_start())
    assert fixtures.same_bits(state, states[extra['i']])
  assert deaths >= 3
