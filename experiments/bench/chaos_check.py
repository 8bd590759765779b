"""Whether tokens are what they claim: drawn by those weights, from those sets.

A learner's forward pass gives the logits of a context and its answer. Where one version
made everything, they are those that the sampler drew from, to the numeric floor: the
recorded log-probabilities must agree within 1e-4, the sets be the same, and the draw,
done again with the key of the request and the position, give the same token (up to what
lies within rounding of a boundary, which is counted).

A cache that a swap of weights left as it was is a mixture: positions below some cut
were fed to the older version, the rest to the newer one. The cut is known up to where
the swap fell, so every one is tried: with one of them the log-probabilities must agree
as closely. Answers whose episode had tokens of more than two versions have too many
such cuts; of them only the tokens' own sets are checked, and the mean difference to the
claimed version's plain forward pass is given.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import chaos_parts as parts
from swe17 import config, kept, types
from swe17.model import cache as kv
from swe17.model import params as p
from swe17.model import transformer
from swe17.ops import kept_set

FLOOR = 1e-4  # of a log-probability
_ROWS = 32  # cuts tried in one forward pass


@dataclasses.dataclass
class Found:
  """What was checked, in answers unless it says otherwise."""

  checked: int = 0
  plain: int = 0  # one version, one forward pass
  cut: int = 0  # explained by a cache of two versions
  several: int = 0  # more than two versions: sets only
  wrong: int = 0  # by none
  tokens: int = 0  # of `plain` and `cut`
  drawn_again: int = 0  # tokens: the same by the same key
  same_set: int = 0  # tokens
  worst: float = 0.0  # |difference| of log-probs in `plain` and `cut`
  several_mean: float = 0.0  # mean |difference| of `several`
  control_mean: float = 0.0  # the same of `plain`, had another version drawn it


def sets_hold(result: types.GenerateResult) -> bool:
  """Whether each token lies in its own, ascending set, under a fit log-probability."""
  size_T = result.kept.size_T
  if size_T.shape != result.token_T.shape or size_T.min(initial=1) < 1:
    return False
  padded_TK = kept.padded(result.kept, int(size_T.max()))
  own_T = (padded_TK == result.token_T[:, None]).sum(-1)
  alone_T = (size_T > 1) | (result.logp_T == 0)
  return bool((own_T == 1).all() and alone_T.all() and (result.logp_T <= 1e-6).all())


class Checker:
  """Scores answers with any version's weights."""

  def __init__(self, cfg: config.Config, params_of: Callable[[int], p.Params]):
    self._cfg, self._of = cfg, functools.lru_cache(maxsize=8)(params_of)
    self._T, self._n = cfg.agent.max_context, cfg.agent.max_new_tokens
    self._score = jax.jit(functools.partial(_scored, cfg=cfg.model))
    self._draw = jax.jit(functools.partial(_drawn, K=cfg.sampler.top_k))

  def check(
    self, answers: Sequence[parts.Answer], versions_before: Sequence[set[int]]
  ) -> Found:
    """`versions_before`: those that drew tokens of the answer's episode before it."""
    found = Found()
    several: list[float] = []
    control: list[float] = []
    for answer, before in zip(answers, versions_before, strict=True):
      found.checked += 1
      versions = sorted(before | set(answer.result.version_T.tolist()))
      if not sets_hold(answer.result):
        found.wrong += 1
      elif len(versions) > 2:
        found.several += 1
        several.append(float(np.abs(self._plain(answer)).mean()))
      else:
        self._explain(answer, versions, found, control)
    found.several_mean = float(np.mean(several)) if several else 0.0
    found.control_mean = float(np.mean(control)) if control else 0.0
    return found

  def _explain(
    self,
    answer: parts.Answer,
    versions: list[int],
    found: Found,
    control: list[float],
  ) -> None:
    result = answer.result
    newest = int(result.version_T.max())
    own_T = result.version_T == newest
    older = [v for v in versions if v < newest] or [newest - 1]
    for cuts in ([0], *self._cuts(answer, own_T)):
      # The tokens of the older version, drawn first, saw nothing of the newer one.
      logits_CTV = self._logits(answer, max(older[-1], 0), newest, cuts)
      error_CT = np.abs(self._error(answer, logits_CTV))[:, own_T]
      best = int(error_CT.max(-1).argmin())
      if error_CT[best].max() <= FLOOR:
        found.plain += cuts[best] == 0
        found.cut += cuts[best] > 0
        found.worst = max(found.worst, float(error_CT[best].max()))
        self._again(answer, logits_CTV[best], own_T, found)
        if cuts[best] == 0:
          other = newest - 1 if newest else newest + 1
          wrong_CTV = self._logits(answer, other, other, [0])
          control.append(float(np.abs(self._error(answer, wrong_CTV)).mean()))
        return
    found.wrong += 1

  def _cuts(self, answer: parts.Answer, own_T: np.ndarray) -> list[list[int]]:
    """Cuts to try, from where the version changed backwards."""
    last = answer.request.token_T.size + int(np.argmax(own_T)) - 1
    order = list(range(last, 0, -1))
    return [order[i : i + _ROWS] for i in range(0, len(order), _ROWS)]

  def _plain(self, answer: parts.Answer) -> np.ndarray:
    """Differences of log-probs, each token by its own version alone. [T]."""
    error_T = np.zeros(answer.result.token_T.size)
    for version in np.unique(answer.result.version_T):
      own_T = answer.result.version_T == version
      logits_CTV = self._logits(answer, int(version), int(version), [0])
      error_T[own_T] = self._error(answer, logits_CTV)[0, own_T]
    return error_T

  def _logits(
    self, answer: parts.Answer, older: int, newer: int, cuts: list[int]
  ) -> jax.Array:
    """Logits [C, T, V] at the answer's draws, for every cut."""
    ids = np.concatenate([answer.request.token_T, answer.result.token_T])
    token_T = np.zeros(self._T, np.int32)
    token_T[: ids.size] = ids
    rows = 1 if len(cuts) == 1 else _ROWS
    cut_C = np.asarray((cuts + [0] * rows)[:rows], np.int32)
    first = answer.request.token_T.size - 1
    at_T = np.minimum(first + np.arange(self._n), self._T - 1).astype(np.int32)
    logits = self._score(self._of(older), self._of(newer), token_T, cut_C, at_T)
    return logits[: len(cuts), : answer.result.token_T.size]

  def _error(self, answer: parts.Answer, logits_CTV: jax.Array) -> np.ndarray:
    """Log-probs within the recorded sets, minus the recorded ones. [C, T]."""
    result = answer.result
    padded_TK = kept.padded(result.kept, self._cfg.sampler.top_k)
    z_CTV = np.asarray(logits_CTV, np.float64) / answer.request.sampling.temperature
    z_CTK = np.take_along_axis(z_CTV, np.maximum(padded_TK, 0)[None], axis=-1)
    z_CTK = np.where(padded_TK >= 0, z_CTK, -np.inf)
    total_CT = np.logaddexp.reduce(z_CTK, axis=-1)
    own_CT = np.take_along_axis(z_CTV, result.token_T[None, :, None], axis=-1)[..., 0]
    return own_CT - total_CT - result.logp_T

  def _again(
    self,
    answer: parts.Answer,
    logits_TV: jax.Array,
    own_T: np.ndarray,
    found: Found,
  ) -> None:
    """Draws the tokens again, with the keys that the request gave."""
    request, result, n = answer.request, answer.result, answer.result.token_T.size
    padded_TV = jnp.zeros((self._n, logits_TV.shape[1])).at[:n].set(logits_TV)
    position_T = request.token_T.size + np.arange(self._n)
    draw = self._draw(
      np.asarray(request.key, np.uint32), position_T, padded_TV, *_filters(request)
    )
    sets = kept.from_padded(np.asarray(draw.kept_ids_BK)[:n])
    same_T = np.array(
      [np.array_equal(_set(sets, t), _set(result.kept, t)) for t in range(n)]
    )
    token_T = np.asarray(draw.token_B)[:n]
    found.tokens += int(own_T.sum())
    found.drawn_again += int((token_T == result.token_T)[own_T].sum())
    found.same_set += int(same_T[own_T].sum())


def _set(sets: types.KeptSets, t: int) -> np.ndarray:
  return sets.ids[sets.offset_T1[t] : sets.offset_T1[t + 1]]


def _filters(request: types.GenerateRequest) -> tuple[np.generic, ...]:
  s = request.sampling
  return (
    np.float32(s.temperature),
    np.float32(s.top_p),
    np.float32(s.min_p),
    np.int32(s.top_k),
  )


def _scored(
  older: p.Params,
  newer: p.Params,
  token_T: jax.Array,
  cut_C: jax.Array,
  at_T: jax.Array,
  *,
  cfg: config.Model,
) -> jax.Array:
  """Logits [C, t, V] after positions `at_T`: below the cut fed to the older weights."""
  C, T = cut_C.shape[0], token_T.shape[0]
  token_CT = jnp.broadcast_to(token_T, (C, T))
  position_CT = jnp.broadcast_to(jnp.arange(T), (C, T))
  below_CT = position_CT < cut_C[:, None]
  cache = kv.init(cfg, C, T)
  old_CTD, cache, _ = transformer.apply_cached(
    older, token_CT, jnp.where(below_CT, position_CT, T), cache, None, cfg=cfg
  )
  new_CTD, _, _ = transformer.apply_cached(
    newer, token_CT, jnp.where(below_CT, T, position_CT), cache, None, cfg=cfg
  )
  old_CtV = transformer.logits(older, old_CTD[:, at_T])
  new_CtV = transformer.logits(newer, new_CTD[:, at_T])
  return jnp.where(below_CT[:, at_T][..., None], old_CtV, new_CtV)


def _drawn(
  key_2: jax.Array,
  position_T: jax.Array,
  logits_TV: jax.Array,
  temperature: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
  top_k: jax.Array,
  *,
  K: int,
) -> kept_set.Draw:
  """The draws of these positions, as a sampler keys them."""
  fold = jax.vmap(lambda i: jax.random.fold_in(jax.random.wrap_key_data(key_2), i))
  full = functools.partial(jnp.full, logits_TV.shape[0])
  return kept_set.draw(
    fold(position_T),
    logits_TV,
    full(temperature),
    full(top_p),
    full(min_p),
    full(top_k),
    K,
  )
