"""What a role's process is given before it imports JAX."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from launch import process

ROOT = pathlib.Path(__file__).resolve().parent.parent

CODE = """
import json, os, sys
from launch import process
from swe17 import settings

cfg = settings.resolve({'run_dir': sys.argv[3]})
process.prepare_jax(cfg, sys.argv[1], int(sys.argv[2]))
import jax
import jax.numpy as jnp

names = ('default_matmul_precision', 'numpy_rank_promotion', 'threefry_partitionable',
         'compilation_cache_dir')
got = {name: getattr(jax.config, 'jax_' + name) for name in names}
total = float(jax.jit(lambda x: (x @ x).sum())(jnp.ones((8, 8))))
print(json.dumps({**got, 'cores': sorted(os.sched_getaffinity(0)), 'total': total,
                  'flags': os.environ.get('XLA_FLAGS', '')}))
"""


def prepared(role: str, index: int, tmp_path: pathlib.Path, **env: str) -> dict:
  argv = [sys.executable, '-c', CODE, role, str(index), str(tmp_path / 'runs' / 'one')]
  env = {**os.environ, 'XDG_CACHE_HOME': str(tmp_path / 'cache'), **env}
  del env['JAX_COMPILATION_CACHE_DIR']  # that of the tests
  done = subprocess.run(
    argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout)


def test_samplers_of_one_thread_sit_on_cores_of_their_own(tmp_path):
  all_cores = sorted(os.sched_getaffinity(0))
  if len(all_cores) < 2:
    pytest.skip('needs two cores')
  one, two = (prepared('sampler', i, tmp_path, XLA_FLAGS='') for i in (0, 1))
  assert (one['cores'], two['cores']) == (all_cores[:1], all_cores[1:2])
  assert one['flags'] == '--xla_cpu_multi_thread_eigen=false'


def test_sampler_and_learner_compute_under_the_same_settings(tmp_path):
  learner = prepared('learner', 0, tmp_path, XLA_FLAGS='--xla_cpu_use_onednn=false')
  sampler = prepared('sampler', 0, tmp_path, XLA_FLAGS='')
  same = ('numpy_rank_promotion', 'default_matmul_precision', 'threefry_partitionable')
  assert [learner[n] for n in same] == [sampler[n] for n in same]
  assert [learner[n] for n in same] == ['raise', 'highest', True]
  assert learner['cores'] == sorted(os.sched_getaffinity(0))
  assert learner['flags'] == '--xla_cpu_use_onednn=false'  # the user's are kept
  assert learner['total'] == 8.0**3


def test_compiled_programs_go_beside_the_run_where_home_is_not_writable(tmp_path):
  (tmp_path / 'cache').touch()  # a file where the folder should be
  cache = pathlib.Path(prepared('learner', 0, tmp_path)['compilation_cache_dir'])
  assert cache.parent == tmp_path / 'runs' / '.jax_cache'


def test_arrays_lie_in_huge_pages_where_the_kernel_has_them(monkeypatch):
  """The program starts again with them, once, and a user's own word stays."""
  thp = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')
  if not thp.is_file() or '[never]' in thp.read_text():
    pytest.skip('this kernel has no transparent huge pages')
  code = (
    'import pathlib, re, sys; from launch import process\n'
    'process.restart_in_huge_pages()\n'
    'big = bytearray(64 << 20); big[::4096] = b"x" * len(big[::4096])\n'
    'text = pathlib.Path("/proc/self/smaps_rollup").read_text()\n'
    'print(re.search(r"AnonHugePages: *(\\d+)", text)[1], *sys.argv[1:])'
  )

  def kilobytes(tunables: str) -> int:
    env = {**os.environ, 'GLIBC_TUNABLES': tunables}
    argv = [sys.executable, '-c', code, 'a', 'b c']
    out = subprocess.check_output(argv, cwd=ROOT, env=env, text=True)
    number, *words = out.split()
    assert words == ['a', 'b', 'c']
    return int(number)

  assert kilobytes('') > 48 << 10
  assert kilobytes('glibc.malloc.check=0') > 48 << 10
  if '[madvise]' in thp.read_text():
    assert kilobytes('glibc.malloc.hugetlb=0') < 16 << 10
  monkeypatch.setenv('GLIBC_TUNABLES', 'glibc.malloc.hugetlb=0')
  assert process.huge_pages() == {}
