"""KV cache of a sampler: one pair of arrays a layer, one row a slot.

Layers are a tuple, not a stack, so that a jitted step that is given the cache to donate
writes single positions in place instead of copying a stacked array.
"""

from flax import struct
import jax
import jax.numpy as jnp

from swe17 import config


@struct.dataclass
class Cache:
  """`k[i]`, `v[i]`: float32 [B slots, C, S positions, H] of layer i; `token`: int32
  [B, S], the ids that were fed, from which n-gram embeddings read."""

  token: jax.Array
  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]


def init(cfg: config.Model, slots: int, length: int) -> Cache:
  """An empty cache of `slots` rows and `length` positions."""
  shape = (slots, cfg.kv_heads, length, cfg.head_dim)
  k = tuple(jnp.zeros(shape) for _ in range(cfg.layers))
  v = tuple(jnp.zeros(shape) for _ in range(cfg.layers))
  return Cache(jnp.zeros((slots, length), jnp.int32), k, v)
