"""A mixture of experts: dropless, sorted by expert, combined by gather.

  y = sum_k g_k expert_{e_k}(x)   [+ shared(x)]

The sum over the K slots runs in the order of the slots, recorded ones included
(ops/routing.py). Where the experts are: model/experts.py, or on the `expert` axis of
the mesh that is set: model/expert_parallel.py.
"""

import jax
import jax.numpy as jnp

from swe17 import config_model
from swe17.model import expert_parallel, experts, layers, sharding
from swe17.model import params as p
from swe17.ops import routing


def mix(
  x_BTD: jax.Array,
  moe: p.Moe,
  cfg: config_model.Moe,
  recorded_BTK: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """One layer's experts applied to every token: (y [B, T, D], int32 ids [B, T, K]).

  The ids are what the router chooses by itself: what was used, except where routes are
  replayed.

  Args:
    x_BTD: tokens.
    moe: one layer's leaves (N sliced away).
    cfg: router and quantisation.
    recorded_BTK: routes that the sampler recorded; -1 where it recorded none.
  """
  B, T, D = x_BTD.shape
  recorded_XK = None
  if recorded_BTK is not None:
    recorded_XK = recorded_BTK.reshape(B * T, -1)
  routes = route(x_BTD.reshape(B * T, D), moe, cfg, recorded_XK)
  ids_BTK = routes.ids_TK.reshape(B, T, -1)
  where = expert_parallel.spread if sharding.current().get('expert', 1) > 1 else here
  out_BTKD = where(x_BTD, ids_BTK, moe, cfg)
  weight_BTK = routes.weight_TK.reshape(ids_BTK.shape).astype(x_BTD.dtype)
  y_BTD = jnp.einsum('BTK,BTKD->BTD', weight_BTK, out_BTKD)
  if moe.shared is not None:
    shared = moe.shared
    w = shared.wg_NDF, shared.wu_NDF, shared.wd_NFD
    y_BTD += layers.mlp(x_BTD, *w, shared.lora)
  return y_BTD, routes.top_TK.reshape(ids_BTK.shape)


def here(
  x_BTD: jax.Array, ids_BTK: jax.Array, moe: p.Moe, cfg: config_model.Moe
) -> jax.Array:
  """Each token through each of its K experts, all of them here, [B, T, K, D]."""
  B, T, K = ids_BTK.shape
  out_XKD = experts.here(x_BTD.reshape(B * T, -1), ids_BTK.reshape(B * T, K), moe, cfg)
  return out_XKD.reshape(B, T, K, -1)


def route(
  x_XD: jax.Array,
  moe: p.Moe,
  cfg: config_model.Moe,
  recorded_XK: jax.Array | None,
) -> routing.Routes:
  """Where each row goes and with what weight, float32 whatever `x_XD` is."""
  logit_XE = x_XD.astype(jnp.float32) @ moe.router_NDE.astype(jnp.float32)
  if moe.bias_NE is None:
    return routing.softmax(
      logit_XE, cfg.active, renormalise=cfg.renormalise, recorded_TK=recorded_XK
    )
  return routing.sigmoid(
    logit_XE,
    moe.bias_NE.astype(jnp.float32),
    cfg.active,
    groups=cfg.groups,
    best=cfg.best_groups,
    renormalise=cfg.renormalise,
    scale=cfg.scale,
    recorded_TK=recorded_XK,
  )
