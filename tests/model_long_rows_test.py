"""Attention to long rows: split over devices, and by the kernels of other backends."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
from jax import ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from swe17.model import attention, attention_kernels, sharding
from tests import fixtures
from tests import model_long_rows_main as program


@pytest.fixture(scope='module')
def split() -> dict[str, float]:
  """What the program prints, in a process with 8 devices."""
  flag = '--xla_force_host_platform_device_count=8'
  env = os.environ | {
    'XLA_FLAGS': f'{os.environ["XLA_FLAGS"]} {flag}',
    'JAX_PLATFORMS': 'cpu',
  }
  done = subprocess.run(
    [sys.executable, '-m', 'tests.model_long_rows_main'],
    env=env,
    cwd=pathlib.Path(__file__).parents[1],
    stdout=subprocess.PIPE,
    timeout=600,
    check=True,
  )
  return json.loads(done.stdout)


@pytest.mark.parametrize('case', program.CASES)
def test_a_ring_over_split_rows_equals_one_device_in_value_and_gradient(split, case):
  assert split[case] <= 2e-5


def test_memory_of_the_ring_is_linear_in_the_row(split):
  assert split['memory at 2 T'] <= 2.1  # 4 if scores of a whole shard were held


def test_a_row_of_131072_tokens_lowers_on_a_context_of_8(split):
  assert split['long rows'] > 0


def test_a_row_that_the_context_does_not_divide_is_refused_by_name(split):
  assert 'batch.row_length divisible by it' in split['refused']


def test_splash_in_interpret_mode_equals_the_chunked_form():
  q, k, v, w, segment = program.inputs(2, 256, 4, 2, 64, 64)
  splash = functools.partial(attention_kernels.splash, interpret=True)
  got = program.value_and_gradient(lambda *a: splash(*a[:4]), 0)(q, k, v, w, segment)
  want = program.value_and_gradient(attention.packed, 64)(q, k, v, w, segment)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize('chunk, shared', [(16, False), (24, True), (100, False)])
def test_what_cudnn_is_asked_equals_the_chunked_form(chunk, shared):
  """Masks, chunks and narrow values, computed by XLA in cuDNN's place."""
  args = program.inputs(2, 64, 4, 2, 8, 6)
  asked = functools.partial(attention_kernels.cudnn, chunk=chunk, implementation='xla')
  of = program.value_and_gradient(lambda *a: asked(*a[:4], *a[5:]), 0, shared)
  got, want = of(*args), program.value_and_gradient(attention.packed, 16, shared)(*args)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_what_is_kept_for_cudnn_is_linear_in_the_row(capsys):
  def kept(T: int) -> int:
    shapes = [jax.ShapeDtypeStruct((1, T, 2, 4), jnp.float32) for _ in range(3)]
    segment = jnp.zeros((1, T), jnp.int32)
    # Chunks grow with the row: a mask that was kept would make it quadratic.
    asked = functools.partial(
      attention_kernels.cudnn, chunk=T // 4, implementation='xla'
    )
    ad_checkpoint.print_saved_residuals(lambda *qkv: asked(*qkv, segment), *shapes)
    said = set(re.findall(r'^\w+\[([\d,]*)\](.*)$', capsys.readouterr().out, re.M))
    return sum(math.prod(int(d) for d in dims.split(',') if d) for dims, _ in said)

  assert 0 < kept(128) <= 2.1 * kept(64)


@pytest.mark.parametrize('kernel, wants', [('cudnn', 'gpu'), ('splash', 'tpu')])
def test_a_kernel_of_another_backend_is_refused_by_name(kernel, wants):
  cfg = dataclasses.replace(fixtures.MODEL, attention_kernel=kernel)
  q, k, v, _, segment = program.inputs(1, 128, 2, 2, 8, 8)
  with pytest.raises(
    ValueError, match=f"attention_kernel='{kernel}' on cpu: want {wants}"
  ):
    attention_kernels.attend(q, k, v, segment, cfg)


def test_what_a_kernel_cannot_do_is_refused_by_name():
  q, k, v, _, segment = program.inputs(1, 96, 2, 2, 8, 8)
  with pytest.raises(ValueError, match='want a multiple of 128'):
    attention_kernels.splash(q, k, v, segment)
  with pytest.raises(ValueError, match='got float32, want'):
    attention_kernels.cudnn(q, k, v, segment, chunk=32)
  with pytest.raises(ValueError, match='want at most those of a key'):
    attention_kernels.cudnn(
      k, k, q.repeat(2, -1), segment, chunk=32, implementation='xla'
    )


def test_on_a_mesh_each_shard_of_rows_has_a_kernel_of_its_own():
  args = program.inputs(2, 64, 4, 2, 8, 6)
  asked = functools.partial(attention_kernels.cudnn, chunk=32, implementation='xla')
  with jax.set_mesh(sharding.mesh({}, jax.devices()[:1])):
    got = attention_kernels._each_shard(asked, (*args[:3], args[4]))
  np.testing.assert_allclose(got, attention.packed(*args[:3], args[4], 16), atol=2e-5)
