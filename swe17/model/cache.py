"""KV cache of a sampler: arrays of each layer, one row a slot.

Layers are a tuple, not a stack, so that a jitted step that is given the cache to donate
writes single positions in place instead of copying a stacked array.
"""

from flax import struct
import jax
import jax.numpy as jnp

from swe17 import config


@struct.dataclass
class Cache:
  """What was fed, as every layer needs it.

  Attributes:
    token: int32 [B, S], the ids, from which n-gram embeddings read.
    k: per layer [B slots, C, S positions, H] keys; with latent attention [B, 1, S,
      L + r], the latents and the rotated part.
    v: per layer [B, C, S, H] values; with latent attention none: the latents serve.
    routes: [B, S, N, K] experts that the token at a position was fed through, in slot
      order; None unless routes are recorded (`model.moe.replay`).
  """

  token: jax.Array
  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  routes: jax.Array | None = None


def init(cfg: config.Model, slots: int, length: int) -> Cache:
  """An empty cache of `slots` rows and `length` positions."""
  latent = cfg.attention == 'mla'
  shape = (slots, cfg.kv_heads, length, cfg.head_dim)
  if latent:
    shape = (slots, 1, length, cfg.mla.kv_rank + cfg.rotary_dim)
  k = tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.layers))
  v = tuple(jnp.zeros(shape, cfg.dtype) for _ in range(0 if latent else cfg.layers))
  routes = None
  if cfg.routes is not None:
    layers, active, _ = cfg.routes
    routes = jnp.zeros((slots, length, layers, active), cfg.moe.route_dtype)
  return Cache(jnp.zeros((slots, length), jnp.int32), k, v, routes)
