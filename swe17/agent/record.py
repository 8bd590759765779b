"""What an episode records of its tokens, and what a sampler's answer must carry."""

from collections.abc import Callable
import json
from typing import Any

import numpy as np

from swe17 import types
from swe17.agent import formats, tools
from swe17.env import base

_ROUNDING = 1e-6  # a log-probability may exceed 0 by rounding, not by more


class SamplerError(ValueError):
  """An answer that does not carry what every token must: never to be trained on."""


def check_result(
  result: types.GenerateResult, request: types.GenerateRequest, vocab_size: int
) -> None:
  """SamplerError, naming the problem, unless every token carries what it must.

  Written as 'keep if inside': a NaN is inside nothing.
  """
  n = len(result.token_T)
  fields = {
    'log-probs': result.logp_T,
    'entropies': result.entropy_T,
    'versions': result.version_T,
    'kept sets': result.kept.size_T,
  }
  for name, array in fields.items():
    if array.shape != (n,):
      raise SamplerError(f'sampler: got {array.size} {name} for {n} tokens')
  if not 1 <= n <= request.max_new:
    raise SamplerError(f'sampler: got {n} tokens, want 1 to {request.max_new}')
  stops = np.isin(result.token_T, request.stop_ids)
  stopped = {'stop': True, 'length': False}.get(result.finish)
  if stopped is None or stops[:-1].any() or stops[-1] != stopped:
    raise SamplerError(
      f'sampler: finish {result.finish!r} with stop tokens at {np.flatnonzero(stops)}'
    )
  logp_T, size_T = result.logp_T, result.kept.size_T
  inside = {
    'token id': (result.token_T >= 0) & (result.token_T < vocab_size),
    'log-prob': (logp_T <= _ROUNDING) & np.isfinite(logp_T),
    'entropy': (result.entropy_T >= -_ROUNDING) & np.isfinite(result.entropy_T),
    'version': result.version_T >= request.min_version,
    'kept set size': size_T >= int(request.sampling.truncates),
  }
  for name, ok in inside.items():
    if not ok.all():
      raise SamplerError(f'sampler: bad {name} at token {int(np.argmin(ok))}')
  owner = np.repeat(np.arange(n), size_T)
  if result.kept.ids.shape != owner.shape:
    raise SamplerError('sampler: kept sets and their sizes disagree')
  own = np.bincount(owner[result.kept.ids == result.token_T[owner]], minlength=n)
  if not (own == (size_T > 0)).all():
    raise SamplerError('sampler: a token lies outside its kept set')
  _check_routes(result, request)


def _check_routes(result: types.GenerateResult, request: types.GenerateRequest) -> None:
  """Rows may go back behind what is held, never leave a gap, and end at the last fed.

  What was fed is all of the context and every drawn token but the last.
  """
  if result.routes_RNK is None:
    return
  start, rows = result.routes_start, result.routes_RNK.shape[0]
  fed = request.token_T.size + result.token_T.size - 1
  if not 0 <= start <= request.routes_from or start + rows != fed:
    raise SamplerError(
      f'sampler: got {rows} routes from token {start}, want those up to token {fed} '
      f'from {request.routes_from} or before'
    )


def episode(
  task: types.Task, group_id: str, member: int, outcome: types.Outcome, **known: Any
) -> types.Episode:
  """An attempt at a task and how it ended; `known`: the fields that were recorded.

  Without an outcome it is invalid: outside statistics and loss.
  """
  return types.Episode(
    id=f'{group_id}.{member}',
    task_id=task.id,
    unit=task.unit,
    group_id=group_id,
    member=member,
    status='invalid' if outcome.value is None else 'valid',
    outcome=outcome,
    solved_at=task.solved_at,
    **known,
  )


class Tokens:
  """The tokens of one segment as they come; whole at any await."""

  def __init__(self) -> None:
    self.token: list[int] = []
    self._mask: list[bool] = []
    self._drawn: list[tuple[float, float, float, int, int]] = []
    self._kept_size: list[int] = []
    self._kept_ids: list[np.ndarray] = []
    self._routes: list[np.ndarray] = []  # [R, N, K] each, one after another

  @property
  def routed(self) -> int:
    """Tokens whose routes are recorded: what `GenerateRequest.routes_from` says."""
    return sum(len(rows) for rows in self._routes)

  def given(self, ids: list[int]) -> None:
    """Appends what the sampler did not draw."""
    self.token += ids
    self._mask += [False] * len(ids)
    self._drawn += [(0.0, 0.0, 0.0, 0, 0)] * len(ids)
    self._kept_size += [0] * len(ids)

  def served(self, result: types.GenerateResult) -> None:
    """Appends a turn that another segment trains: here it is context."""
    self.given(result.token_T.tolist())
    self._replace_routes(result)

  def sampled(
    self, result: types.GenerateResult, turn: int, temperature: float
  ) -> None:
    """Appends a turn exactly as it was served."""
    ids = result.token_T.tolist()
    self.token += ids
    self._mask += [True] * len(ids)
    self._drawn += zip(
      result.logp_T.tolist(),
      result.entropy_T.tolist(),
      [temperature] * len(ids),
      result.version_T.tolist(),
      [turn] * len(ids),
      strict=True,
    )
    self._kept_size += result.kept.size_T.tolist()
    self._kept_ids.append(result.kept.ids)
    self._replace_routes(result)

  def _replace_routes(self, result: types.GenerateResult) -> None:
    """Rows from `start` on are these: a cache that was made anew has new ones."""
    if result.routes_RNK is None:
      return
    if result.routes_start < self.routed:
      self._routes = [np.concatenate(self._routes)[: result.routes_start]]
    self._routes.append(result.routes_RNK)

  def segment(self) -> types.Segment:
    """The segment as it stands."""
    rows = list(zip(*self._drawn, strict=True)) or [()] * 5
    logp, entropy, temperature, version, turn = rows
    return types.Segment(
      token_T=np.asarray(self.token, np.int32),
      mask_T=np.asarray(self._mask, bool),
      mu_logp_T=np.asarray(logp, np.float32),
      entropy_T=np.asarray(entropy, np.float32),
      temperature_T=np.asarray(temperature, np.float32),
      version_T=np.asarray(version, np.int32),
      turn_T=np.asarray(turn, np.int32),
      kept=types.KeptSets(
        np.concatenate([[0], np.cumsum(self._kept_size)]).astype(np.int32),
        np.concatenate([np.zeros(0, np.int32), *self._kept_ids]).astype(np.int32),
      ),
      routes_RNK=np.concatenate(self._routes) if self._routes else None,
    )


class Record:
  """What an episode has recorded so far; whole at any await, so it survives a fault."""

  def __init__(self, fmt: formats.Format, clock: Callable[[], float]):
    self.fmt = fmt
    self._clock = clock
    self._closed: list[types.Segment] = []
    self._open = Tokens()
    self.turns = self.calls = self.malformed = self.tests = self.thinking = 0
    self.drawn = 0  # tokens sampled, in all segments
    self.topk_bound = 0
    self.tool_seconds = 0.0
    self.duplicates = 0
    self._read: set[str] = set()  # calls since the last one that wrote
    self.cut = False
    self.scores: list[float] = []  # of the turns; empty where turns have none

  @property
  def token(self) -> list[int]:
    """The context of the present segment."""
    return self._open.token

  @property
  def routed(self) -> int:
    """Tokens whose routes are recorded: what `GenerateRequest.routes_from` says."""
    return self._open.routed

  def open_segment(self, ids: list[int]) -> int:
    """Goes on in another context, of which nothing is trained anew. Its number."""
    self._closed.append(self._open.segment())
    self._open = Tokens()
    self.given(ids)
    return len(self._closed)

  def given(self, ids: list[int]) -> None:
    """Appends what the sampler did not draw."""
    self._open.given(ids)

  def served(self, result: types.GenerateResult) -> None:
    """Appends a turn that another segment trains and counts."""
    self._open.served(result)

  def sampled(
    self, result: types.GenerateResult, turn: int, temperature: float
  ) -> None:
    """Appends a turn exactly as it was served, and counts it."""
    self._open.sampled(result, turn, temperature)
    self.turns += 1
    self.drawn += len(result.token_T)
    self.thinking += self.fmt.thinking(result.token_T.tolist())
    self.topk_bound += result.topk_bound

  async def run(
    self, calls: list[tools.Call], env: base.Env, *, most: int, seconds: float
  ) -> list[tools.Result]:
    """Executes a turn's calls, `most` at most, and counts what ran."""
    start = self._clock()
    results = await tools.execute(calls, env, max_calls=most, call_seconds=seconds)
    self.tool_seconds += self._clock() - start
    ran = [call for call, done in zip(calls, results, strict=True) if done.ran]
    self.calls += len(ran)
    self.tests += sum(call.name == 'test' for call in ran)
    self._count_duplicates(ran, {tool.name for tool in env.tools if tool.writes})
    return results

  async def score(self, env: base.Env) -> None:
    """Notes what the last turn earned, once, where every turn is scored."""
    if len(self.scores) == self.turns:
      return
    value = await base.turn_score(env)
    if value is not None:
      self.scores += [0.0] * (self.turns - len(self.scores) - 1) + [value]

  def _count_duplicates(self, ran: list[tools.Call], writes: set[str]) -> None:
    """A read that was asked before tells nothing new until something is written."""
    for call in ran:
      if call.name in writes:
        self._read.clear()
        continue
      key = json.dumps([call.name, call.arguments], sort_keys=True)
      self.duplicates += key in self._read
      self._read.add(key)

  def segments(self) -> tuple[types.Segment, ...]:
    return *self._closed, self.segment()

  def segment(self) -> types.Segment:
    """The present segment as it stands."""
    return self._open.segment()
