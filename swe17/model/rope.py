"""Rotary position embedding and its extensions to longer contexts.

A pair of dimensions i of a head turns by position * f_i, f_i = theta^(-2i / dims)
(Su et al., arXiv:2104.09864), pairs in the half-split layout: (i, i + dims / 2).

  linear   f_i / factor                        (positions are interpolated)
  llama3   f_i / factor for long waves, f_i for short ones, a blend between
           (Llama 3.1: waves longer than original / low, shorter than original / high)
  yarn     the same by a ramp over i, between the dimensions that turn `high` and `low`
           times over the original context (arXiv:2309.00071, section 3.2)
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from swe17 import config_model


def frequencies(cfg: config_model.Rope, dims: int) -> np.ndarray:
  """f_i of `dims` rotating dimensions, float32 [dims / 2], radians a position."""
  half = dims // 2
  freq_h = cfg.theta ** (-np.arange(half, dtype=np.float64) / half)
  if cfg.scaling == 'linear':
    freq_h = freq_h / cfg.factor
  elif cfg.scaling == 'llama3':
    turns_h = cfg.original * freq_h / (2 * math.pi)  # over the original context
    keep_h = np.clip((turns_h - cfg.low) / (cfg.high - cfg.low), 0, 1)
    freq_h = keep_h * freq_h + (1 - keep_h) * freq_h / cfg.factor
  elif cfg.scaling == 'yarn':
    first, last = _dimension(cfg, dims, cfg.high), _dimension(cfg, dims, cfg.low)
    if cfg.truncate:
      first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    span = max(last - first, 1e-3)
    ramp_h = np.clip((np.arange(half) - first) / span, 0, 1)
    freq_h = (1 - ramp_h) * freq_h + ramp_h * freq_h / cfg.factor
  return freq_h.astype(np.float32)


def _dimension(cfg: config_model.Rope, dims: int, turns: float) -> float:
  """The pair that turns `turns` times over the original context."""
  span = math.log(cfg.original / (turns * 2 * math.pi))
  return dims * span / (2 * math.log(cfg.theta))


def rotate(
  x_BTQH: jax.Array, position_BT: jax.Array, cfg: config_model.Rope, dims: int
) -> jax.Array:
  """Turns the first `dims` of H; what does not turn compares contents at any distance.

  position_BT: int32. Angles are float32 whatever the dtype of `x_BTQH`.
  """
  half = dims // 2
  freq_h = jnp.asarray(frequencies(cfg, dims))
  position_BT11 = position_BT[:, :, None, None].astype(jnp.float32)
  angle_BT1h = position_BT11 * freq_h[None, None, None, :]
  sin = (cfg.amplitude * jnp.sin(angle_BT1h)).astype(x_BTQH.dtype)
  cos = (cfg.amplitude * jnp.cos(angle_BT1h)).astype(x_BTQH.dtype)
  a, b, still = x_BTQH[..., :half], x_BTQH[..., half:dims], x_BTQH[..., dims:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, still], axis=-1)
