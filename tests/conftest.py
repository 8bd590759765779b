"""What holds for every test: JAX's settings, made before JAX is imported, and order.

Settings are production's, but for how much XLA optimises. Compiling is most of the time
of these tests, and takes a fifth of it like this. Children that tests start inherit
that; those whose numbers are to be production's (learner_mesh_test.py,
learner_accumulate_test.py, the runs of tests/system, the notebooks) go without. What
one of a session's processes compiles, the others load: both workers and all that tests
start share a folder of programs, which is new for every session.
"""

import atexit
import os
import pathlib
import shutil
import tempfile

import pytest

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
  '--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true'
  ' --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1'
)
given = os.environ.get('XLA_FLAGS', '')  # has the last word
if QUICK not in given:  # a worker has it from the process that started it
  os.environ['XLA_FLAGS'] = f'{QUICK} {given}'.strip()
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  programs = tempfile.mkdtemp(prefix='swe17-programs-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = programs
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
  atexit.register(shutil.rmtree, programs, ignore_errors=True)

# Whole files go to the workers in this order: the longest last leaves one idle.
LONGEST = (
  'system/local_run_test.py',
  'learner_mesh_test.py',
  'learner_distributed_test.py',
  'learner_team_test.py',
  'learner_accumulate_test.py',
  'notebooks_test.py',
)


def pytest_addoption(parser: pytest.Parser) -> None:
  parser.addoption(
    '--exploits',
    choices=('some', 'all'),
    default='some',
    help='how much of the standing list audits in tests play; all takes minutes',
  )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Begins with the files that take longest; the order within a file stays."""
  here = pathlib.Path(__file__).parent
  place = {here / name: i for i, name in enumerate(LONGEST)}
  items.sort(key=lambda item: place.get(item.path, len(place)))
