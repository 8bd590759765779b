"""JAX's settings for every test: those of production, made before JAX is imported.

Most of the time of these tests is XLA's. What one of a session's processes compiles,
the others load: both workers and all that tests start share a folder of programs, which
is new for every session.
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
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  programs = tempfile.mkdtemp(prefix='swe17-programs-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = programs
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
  atexit.register(shutil.rmtree, programs, ignore_errors=True)
