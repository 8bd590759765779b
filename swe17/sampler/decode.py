"""Prefill and decode as pure functions over a fixed set of slots.

A slot is a row of the KV cache. Decoding runs several steps in one dispatch for all
slots; a slot that is idle or finished writes nothing (its position lies beyond the
cache). A token's key is its session's key with the token's position folded in, so what
is drawn does not depend on which other sequences share the batch.
"""

import dataclasses
import functools

from flax import struct
import jax
import jax.numpy as jnp

from swe17 import config
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.model import transformer
from swe17.ops import kept_set


@struct.dataclass
class Slots:
  """What each of B slots is about to do.

  Attributes:
    token_B: int32, the last token of the context, not yet in the cache.
    position_B: int32, its position.
    left_B: int32, tokens still to draw; 0 = idle.
    stop_BX: int32, the ids that end a turn, -1 = none.
    key_B2: uint32, the session's key.
    temperature_B, top_p_B, min_p_B: float32.
    top_k_B: int32 in [1, K].
  """

  token_B: jax.Array
  position_B: jax.Array
  left_B: jax.Array
  stop_BX: jax.Array
  key_B2: jax.Array
  temperature_B: jax.Array
  top_p_B: jax.Array
  min_p_B: jax.Array
  top_k_B: jax.Array


def prefill(
  params: p.Params,
  cache: kv.Cache,
  token_BT: jax.Array,
  position_BT: jax.Array,
  row_B: jax.Array,
  *,
  cfg: config.Model,
) -> kv.Cache:
  """Writes a chunk of context into cache rows. Donate `cache`.

  Padding has a position beyond the cache and writes nothing.
  """
  _, cache, _ = transformer.apply_cached(
    params, token_BT, position_BT, cache, row_B, cfg=cfg
  )
  return cache


def decode(
  params: p.Params,
  cache: kv.Cache,
  slots: Slots,
  *,
  cfg: config.Model,
  K: int,
  steps: int,
) -> tuple[kv.Cache, Slots, kept_set.Draw]:
  """Draws up to `steps` tokens for every busy slot. Donate `cache`.

  Args:
    params: values to compute with.
    cache: one row a slot.
    slots: see `Slots`.
    cfg: the model's shape.
    K: width of recorded sets; 0 = no filter, no sets.
    steps: decode steps in this dispatch.

  Returns:
    The cache, the slots after it, and the draws with a leading [steps] axis. Entry i
    of a slot is real while the slot was still busy before step i.
  """
  S = cache.k[0].shape[2]

  def step(carry: tuple[kv.Cache, Slots], _: None):
    cache, s = carry
    busy_B = s.left_B > 0
    position_B = jnp.where(busy_B, s.position_B, S)
    hidden_B1D, cache, _routes = transformer.apply_cached(
      params, s.token_B[:, None], position_B[:, None], cache, None, cfg=cfg
    )
    logits_BV = transformer.logits(params, hidden_B1D)[:, 0]
    fold = jax.vmap(lambda k, i: jax.random.fold_in(jax.random.wrap_key_data(k), i))
    draw = kept_set.draw(
      fold(s.key_B2, s.position_B + 1),
      logits_BV,
      s.temperature_B,
      s.top_p_B,
      s.min_p_B,
      s.top_k_B,
      K,
    )
    stopped_B = jnp.any(draw.token_B[:, None] == s.stop_BX, axis=-1)
    left_B = jnp.where(busy_B & ~stopped_B, s.left_B - 1, 0)
    s = dataclasses.replace(
      s,
      token_B=jnp.where(busy_B, draw.token_B, s.token_B),
      position_B=jnp.where(busy_B, s.position_B + 1, s.position_B),
      left_B=left_B,
    )
    return (cache, s), draw

  (cache, slots), draws = jax.lax.scan(step, (cache, slots), None, length=steps)
  return cache, slots, draws


@functools.partial(jax.jit, static_argnames='size')
def routes(
  routes_BSNK: jax.Array, slot: jax.Array, start: jax.Array, *, size: int
) -> jax.Array:
  """`size` rows of a slot's routes [size, N, K], from `start` (or as late as fits)."""
  _, _, N, K = routes_BSNK.shape
  return jax.lax.dynamic_slice(routes_BSNK, (slot, start, 0, 0), (1, size, N, K))[0]


def jitted(cfg: config.Model, K: int, steps: int):
  """(prefill, decode), compiled for this model and these static sizes."""
  return (
    jax.jit(functools.partial(prefill, cfg=cfg), donate_argnums=1),
    jax.jit(functools.partial(decode, cfg=cfg, K=K, steps=steps), donate_argnums=1),
  )
