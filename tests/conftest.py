"""JAX's settings for every test: those of production, made before JAX is imported.

Most of the time of these tests is XLA's: it optimises less here than in production,
which takes a fifth of the time. Children that tests start inherit that; those whose
bits are to be production's (learner_mesh_test.py, learner_accumulate_test.py, the runs
of tests/system) set XLA_FLAGS anew. What one of a session's processes compiles, the
others load: both workers and all that tests start share a folder of programs, which is
new for every session.
"""

import atexit
import os
import shutil
import tempfile

os.environ.update(
  {
    'JAX_DEFAULT_MATMUL_PRECISION': 'highest',
    'JAX_NUMPY_RANK_PROMOTION': 'raise',
    'JAX_THREEFRY_PARTITIONABLE': 'true',
  }
)
# Without optimisation the older emitters are the quicker ones, and splitting a program
# among threads only adds work.
QUICK = (
  '--xla_backend_optimization_level=0',
  '--xla_llvm_disable_expensive_passes=true',
  '--xla_cpu_use_fusion_emitters=false',
  '--xla_cpu_parallel_codegen_split_count=1',
)
os.environ['XLA_FLAGS'] = ' '.join([*QUICK, os.environ.get('XLA_FLAGS', '')]).strip()
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  programs = tempfile.mkdtemp(prefix='swe17-programs-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = programs
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
  atexit.register(shutil.rmtree, programs, ignore_errors=True)
