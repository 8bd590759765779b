"""KV cache of a sampler: a pool of pages for every layer.

A page holds S positions. A row (one context) is a list of pages, its block table, so
memory goes by what contexts hold, and contexts share pages. One page as long as the
whole context makes the plain cache: row i of a batch is page i.

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

  Keys have positions last: q k^T is then a plain batched product. (On CPU it takes a
  third of the time of the one that has to turn keys round.)

  Attributes:
    token: int32 [P pages, S], the ids, from which n-gram embeddings read.
    k: per layer [P, C, H, S] keys; with latent attention [P, 1, L + r, S], the latents
      and the rotated part.
    v: per layer [P, C, S, H] values; with latent attention none: the latents serve.
    routes: [P, S, N, K] experts that the token at a position was fed through, in slot
      order; None unless routes are recorded (`model.moe.replay`).
  """

  token: jax.Array
  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  routes: jax.Array | None = None


def init(cfg: config.Model, pages: int, size: int) -> Cache:
  """An empty pool of `pages` pages of `size` positions."""
  latent = cfg.attention == 'mla'
  C, H = cfg.kv_heads, cfg.head_dim
  k_shape, v_shape = (pages, C, H, size), (pages, C, size, H)
  if latent:
    k_shape = (pages, 1, cfg.mla.kv_rank + cfg.rotary_dim, size)
  k = tuple(jnp.zeros(k_shape, cfg.dtype) for _ in range(cfg.layers))
  v = tuple(jnp.zeros(v_shape, cfg.dtype) for _ in range(0 if latent else cfg.layers))
  routes = None
  if cfg.routes is not None:
    layers, active, _ = cfg.routes
    routes = jnp.zeros((pages, size, layers, active), cfg.moe.route_dtype)
  return Cache(jnp.zeros((pages, size), jnp.int32), k, v, routes)


def page_bytes(cfg: config.Model, size: int) -> int:
  """Bytes of one page in all layers."""
  shapes = jax.eval_shape(lambda: init(cfg, 1, size))
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def copy(cache: Cache, from_X: jax.Array, to_X: jax.Array) -> Cache:
  """Copies pages; what goes to a page beyond the pool is dropped. Donate `cache`.

  All are read before one is written.
  """

  def copied(pool: jax.Array) -> jax.Array:
    page = pool.at[from_X].get(mode='clip')
    return pool.at[to_X].set(page, mode='drop')

  return jax.tree.map(copied, cache)
