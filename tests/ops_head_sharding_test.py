"""Heads split over four devices give what they give on one.

In a process of its own: the number of CPU devices is set before JAX starts.
"""

import os
import subprocess
import sys

import pytest

_SCRIPT = """
import dataclasses
import jax
import numpy as np
from swe17.ops import head, head_sharding
from tests import ops_head_test as t

assert jax.device_count() == 4
B, V = 4, 104  # devices divide both
t.B, t.V = B, V
x, weight = t.example(1), t.weights()
auto = (jax.sharding.AxisType.Auto,) * 2
for replay, sizes, rows in ((True, (2, 2), ('rows',)), (False, (1, 4), ())):
  plan = dataclasses.replace(t.PLAN, mass_share=2)
  want, want_grads = t.both(x, weight, replay=replay, plan=plan)
  mesh = jax.make_mesh(sizes, ('rows', 'tensor'), axis_types=auto)
  split = dataclasses.replace(plan, shard=head_sharding.Shard(mesh, 'tensor', rows))
  got, grads = t.both(x, weight, replay=replay, plan=split)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
  t.close_gradients(grads, want_grads)
  again = t.both(x, weight, replay=replay, plan=split)
  assert t.fixtures.same_bits((got, grads), again)
  assert np.asarray(grads[1]).any() and np.asarray(grads[0]).any()
print('equal')
"""


@pytest.mark.parametrize('devices', [4])
def test_split_over_vocabulary_and_rows_equals_one_device(devices):
  flag = f'--xla_force_host_platform_device_count={devices}'
  settings = {
    'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} {flag}',
    'JAX_PLATFORMS': 'cpu',
    'JAX_DEFAULT_MATMUL_PRECISION': 'highest',
    'JAX_NUMPY_RANK_PROMOTION': 'raise',
  }
  done = subprocess.run(
    [sys.executable, '-c', _SCRIPT],
    env={**os.environ, **settings},
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-4000:]
  assert done.stdout.strip().endswith('equal')
