"""What an engine refuses at its door: a request that it could never serve.

A request comes from outside as bytes, so nothing about its fields is taken for granted:
one bad value past this point would end the engine for everybody.
"""

import math

import numpy as np

from swe17 import config, types

STOPS = 8  # ids that may end a turn
_UINT32 = (1 << 32) - 1
_INT31 = (1 << 31) - 1


def request(
  asked: types.GenerateRequest, cfg: config.Sampler, *, length: int, vocab: int
) -> None:
  """ValueError, naming the field, unless the request can be served.

  Args:
    asked: the request.
    cfg: which filters this sampler was started with.
    length: positions of the KV cache.
    vocab: ids below it are tokens.
  """
  if type(asked.session) is not str:
    raise ValueError(f'session: got {asked.session!r}, want a string')
  _tokens(asked.token_T, vocab)
  n = asked.token_T.size
  _integer('max_new', asked.max_new, 1, length)
  if n + asked.max_new > length:
    raise ValueError(
      f'max_new: got {asked.max_new} after {n} context tokens, want no more than '
      f'{length} in all'
    )
  if len(asked.stop_ids) > STOPS:
    raise ValueError(f'stop_ids: got {len(asked.stop_ids)}, want at most {STOPS}')
  for stop in asked.stop_ids:
    _integer('stop_ids', stop, 0, vocab - 1)
  if len(asked.key) != 2:
    raise ValueError(f'key: got {len(asked.key)} numbers, want 2')
  for part in asked.key:
    _integer('key', part, 0, _UINT32)
  _integer('min_version', asked.min_version, 0, _INT31)
  _integer('routes_from', asked.routes_from, 0, n)
  _sampling(asked.sampling, cfg)


def _tokens(token_T: np.ndarray, vocab: int) -> None:
  if token_T.ndim != 1 or token_T.size == 0:
    raise ValueError(f'token: got shape {token_T.shape}, want [T] with T > 0')
  if token_T.dtype.kind not in 'iu':
    raise ValueError(f'token: got dtype {token_T.dtype}, want integers')
  if token_T.min() < 0 or token_T.max() >= vocab:
    raise ValueError(
      f'token: got ids from {token_T.min()} to {token_T.max()}, want 0 to {vocab - 1}'
    )


def _sampling(s: types.Sampling, cfg: config.Sampler) -> None:
  for name in ('temperature', 'min_p', 'top_p'):
    value = getattr(s, name)
    if type(value) not in (int, float) or not math.isfinite(value):
      raise ValueError(f'{name}: got {value!r}, want a finite number')
  if s.temperature < 0:
    raise ValueError(f'temperature: got {s.temperature}, want >= 0')
  if not 0 < s.top_p <= 1:
    raise ValueError(f'top_p: got {s.top_p}, want in (0, 1]')
  if not 0 <= s.min_p < 1:
    raise ValueError(f'min_p: got {s.min_p}, want in [0, 1)')
  if type(s.top_k) is not int or not 0 <= s.top_k <= cfg.top_k:
    raise ValueError(
      f'top_k: got {s.top_k!r}, want an integer from 0 to sampler.top_k={cfg.top_k}'
    )
  if s.truncates and not cfg.sampling.truncates:
    raise ValueError(
      'top_p, top_k, min_p: this sampler draws from the whole vocabulary and records '
      'no sets; leave them off'
    )
  if cfg.sampling.truncates and not s.truncates and s.temperature > 0:
    raise ValueError(
      'top_p, top_k, min_p: got none, and this sampler records kept sets; set one'
    )


def _integer(name: str, value: object, low: int, high: int) -> None:
  if type(value) is not int or not low <= value <= high:
    raise ValueError(f'{name}: got {value!r}, want an integer from {low} to {high}')
