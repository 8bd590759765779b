"""Prefill and decode as pure functions over rows of KV pages.

Decoding runs several steps in one dispatch for all rows; a row that is idle or finished
writes nothing (its position lies beyond its pages). Prefilling takes pieces of
contexts, several of one context if they are in order. A token's key is its session's
key with the token's position folded in, so what is drawn does not depend on which other
sequences share the batch.
"""

from collections.abc import Callable
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
    table_BJ: int32, the pages of each, enough for all that it may draw now.
    token_B: int32, the last token of the context, not yet in the cache.
    position_B: int32, its position.
    left_B: int32, tokens still to draw; 0 = idle.
    stop_BX: int32, the ids that end a turn, -1 = none.
    key_B2: uint32, the session's key.
    temperature_B, top_p_B, min_p_B: float32.
    top_k_B: int32 in [1, K].
  """

  table_BJ: jax.Array
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
  params: p.Params | p.Unstacked,
  cache: kv.Cache,
  token_BT: jax.Array,
  position_BT: jax.Array,
  table_BJ: jax.Array,
  *,
  cfg: config.Model,
) -> kv.Cache:
  """Writes pieces of contexts into their pages. Donate `cache`.

  Padding has a position beyond the pages and writes nothing.
  """
  _, cache, _ = transformer.apply_cached(
    params, token_BT, position_BT, cache, table_BJ, cfg=cfg
  )
  return cache


def decode(
  params: p.Params | p.Unstacked,
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
    cache: the pages.
    slots: see `Slots`.
    cfg: the model's shape.
    K: width of recorded sets; 0 = no filter, no sets.
    steps: decode steps in this dispatch.

  Returns:
    The cache, the slots after it, and the draws with a leading [steps] axis. Entry i
    of a slot is real while the slot was still busy before step i.
  """
  beyond = slots.table_BJ.shape[1] * cache.token.shape[1]

  def step(carry: tuple[kv.Cache, Slots], _: None):
    cache, s = carry
    busy_B = s.left_B > 0
    position_B = jnp.where(busy_B, s.position_B, beyond)
    hidden_B1D, cache, _routes = transformer.apply_cached(
      params, s.token_B[:, None], position_B[:, None], cache, s.table_BJ, cfg=cfg
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


@dataclasses.dataclass(frozen=True)
class Programs:
  """Compiled for one model and some static sizes; a call may compile for its shape."""

  prefill: Callable[..., kv.Cache]
  decode: Callable[..., tuple[kv.Cache, Slots, kept_set.Draw]]
  copy: Callable[..., kv.Cache]
  routes: Callable[..., jax.Array]


def jitted(cfg: config.Model, K: int, steps: int) -> Programs:
  """The programs of an engine; those that write the cache are given it to keep."""
  return Programs(
    jax.jit(functools.partial(prefill, cfg=cfg), donate_argnums=1),
    jax.jit(functools.partial(decode, cfg=cfg, K=K, steps=steps), donate_argnums=1),
    jax.jit(kv.copy, donate_argnums=0),
    jax.jit(lambda routes_PSNK, page_X: routes_PSNK[page_X]),
  )
