"""JAX's settings for every test: those of production, made before JAX is imported."""

import os

os.environ.update(
  {
    'JAX_DEFAULT_MATMUL_PRECISION': 'highest',
    'JAX_NUMPY_RANK_PROMOTION': 'raise',
    'JAX_THREEFRY_PARTITIONABLE': 'true',
  }
)
