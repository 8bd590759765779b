"""Greedy decoding over the KV cache, without a sampler: what checks compare."""

from collections.abc import Sequence
import functools

import jax
import jax.numpy as jnp
import numpy as np

from swe17 import config
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.model import transformer


@functools.partial(jax.jit, static_argnames='cfg', donate_argnames='cache')
def _step(
  params: p.Params,
  token_B: jax.Array,
  at: jax.Array,
  cache: kv.Cache,
  *,
  cfg: config.Model,
) -> tuple[jax.Array, kv.Cache]:
  B = token_B.shape[0]
  position_B1 = jnp.full((B, 1), at, jnp.int32)
  hidden_B1D, cache, _ = transformer.apply_cached(
    params, token_B[:, None], position_B1, cache, None, cfg=cfg
  )
  logits_BV = transformer.logits(params, hidden_B1D)[:, 0]
  return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), cache


def decode(
  params: p.Params, prompts: Sequence[Sequence[int]], tokens: int, cfg: config.Model
) -> np.ndarray:
  """The `tokens` most probable ids after each prompt, int32 [B, tokens].

  Rows run in step from their first token on; each is fed its prompt, then itself.
  """
  sizes = [len(prompt) for prompt in prompts]
  length = max(sizes) + tokens
  ids_BT = np.zeros((len(prompts), length), np.int32)
  for row, prompt in zip(ids_BT, prompts, strict=True):
    row[: len(prompt)] = prompt
  cache = kv.init(cfg, len(prompts), length)
  for t in range(length - 1):
    next_B, cache = _step(params, ids_BT[:, t], np.int32(t), cache, cfg=cfg)
    own_B = np.array(sizes) <= t + 1
    ids_BT[:, t + 1] = np.where(own_B, np.asarray(next_B), ids_BT[:, t + 1])
  each = zip(ids_BT, sizes, strict=True)
  return np.stack([row[size : size + tokens] for row, size in each])
