"""Sums whose bits depend on micro-batch ids alone: the tree, its cuts, its replicas."""

import dataclasses
import functools
import json
import os
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swe17 import config
from swe17.learner import accumulate, batching, buffer, update
from swe17.learner import state as st
from swe17.store import groups as group_store
from swe17.store import kv
from tests import fixtures
from tests import learner_accumulate_main as program

# Sizes far apart: any other order of addition gives other bits.
RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(16, 64)) * 10.0 ** RNG.integers(-3, 4, size=(16, 64)))
X[:, 0] = -0.0


def add(a, b):
  return jax.tree.map(jnp.add, a, b)


def one(x_MI, i):
  return {'x': x_MI[i], 'count': jnp.float32(1)}


@functools.partial(jax.jit, static_argnames='M')
def tree(x_MI, micro, M):
  return accumulate.in_tree(functools.partial(one, x_MI), micro, M, add=add)


@jax.jit
def ordered(x_MI, micro):
  return accumulate.in_order(functools.partial(one, x_MI), micro, add=add)


def tree32(rows: list[np.ndarray], size: int) -> np.ndarray:
  """The fixed tree over `size` leaves, missing ones zero, in float32."""
  rows = rows + [np.zeros_like(X[0])] * (size - len(rows))
  if size == 1:
    return rows[0] + np.float32(0)
  return tree32(rows[: size // 2], size // 2) + tree32(rows[size // 2 :], size // 2)


@pytest.mark.parametrize('M, size', [(1, 1), (3, 4), (8, 8)])
def test_the_tree_adds_neighbours_whatever_is_missing_at_the_end(M, size):
  for micro in range(M + 1):
    got = tree(X, jnp.int32(micro), M)
    want = tree32(list(X[:micro]), size)
    assert np.asarray(got['x']).tobytes() == want.tobytes()
    assert int(got['count']) == micro


def test_a_larger_bound_gives_the_same_bits():
  for micro in (1, 3, 8):
    assert fixtures.same_bits(tree(X, micro, 8), tree(X, micro, 16))


def test_in_order_is_left_to_right_and_not_the_tree():
  total = np.zeros_like(X[0])
  for row in X[:7]:
    total = total + row
  got = np.asarray(ordered(X, 7)['x'])
  assert got.tobytes() == total.tobytes()
  assert not np.array_equal(got, tree(X, 7, 8)['x'])


@pytest.mark.parametrize(
  'M, R, each', [(8, 1, 8), (7, 1, 8), (8, 4, 2), (7, 8, 1), (9, 4, 4), (1, 4, 1)]
)
def test_replicas_hold_aligned_powers_of_two(M, R, each):
  assert accumulate.share(M, R) == each


@pytest.mark.parametrize('R', [0, 3, 6])
def test_a_number_of_replicas_that_cuts_no_tree_is_refused(R):
  with pytest.raises(ValueError, match='want a power of two'):
    accumulate.share(8, R)


def test_replicas_without_the_exact_sum_are_refused():
  mesh = jax.make_mesh((1,), ('replica',), (jax.sharding.AxisType.Auto,))
  with pytest.raises(ValueError, match='exact_sum'):
    update.accumulate(program.LOSS_FN, fixtures.params(), program.batch(), mesh=mesh)


def cut(rows: int) -> st.Batch:
  """The program's rows in micro-batches of `rows`."""
  whole = program.batch(8)
  arrays = {
    k: v.reshape(8 // rows, rows, *v.shape[2:])
    for k, v in vars(whole).items()
    if np.ndim(v)
  }
  return dataclasses.replace(whole, **arrays, micro=np.int32(-(-7 // rows)))


def test_other_cuts_agree_to_a_millionth_of_the_largest_gradient():
  params = fixtures.params(cfg=program.MODEL)
  fn = jax.jit(functools.partial(update.accumulate, program.LOSS_FN, exact=True))
  want = fn(params, cut(1))
  got = fn(params, cut(4))
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
  for a, b in zip(fixtures.leaves(got[2]), fixtures.leaves(want[2]), strict=True):
    assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


def test_groups_that_arrive_in_any_order_make_the_same_batch():
  made = []
  for order in range(3):
    store = kv.open('memory://')
    groups = [fixtures.group(i, width=3) for i in range(4)]
    random.Random(order).shuffle(groups)
    arriving = buffer.Buffer(
      store, max_staleness=3, vocab=fixtures.VOCAB, truncates=True, top_k=4
    )
    for group in groups:
      group_store.append(store, group)
      arriving.poll(0)
    taken = arriving.take(4, step=0, step_of={0: 0})
    assembled = batching.assemble(taken.groups, config.Loss())
    cfg = dataclasses.replace(program.BATCH, row_length=48)
    made.append(
      batching.fill(assembled.items, micro=8, cfg=cfg, K=4, denominator=100.0)
    )
    assert made[0].mask_MBT.any()
  assert all(fixtures.same_bits(made[0], other) for other in made[1:])


def start(devices: int, *replicas: int) -> subprocess.Popen:
  """The program in a fresh process."""
  env = os.environ | {
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    'JAX_PLATFORMS': 'cpu',
  }
  command = [sys.executable, '-m', 'tests.learner_accumulate_main']
  root = pathlib.Path(__file__).parents[1]
  return subprocess.Popen(
    [*command, *map(str, replicas)], env=env, cwd=root, stdout=subprocess.PIPE
  )


def test_any_number_of_replicas_and_two_fresh_processes_give_the_same_hashes():
  # 0 replicas: without a mesh, on one device, in a process of its own.
  processes = [start(8, 1, 2, 4, 8), start(1, 0)]
  hashes = {}
  for process in processes:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    hashes |= json.loads(out)
  assert set(hashes) == {'0', '1', '2', '4', '8'}
  for replicas, got in hashes.items():
    assert got == hashes['0'], replicas
