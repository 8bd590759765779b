"""One episode behind the proxy: its tree, its limits, and what comes of them.

The harness runs the agent and its tools; all that is known here is what the agent asked
and was told. So it is the caller who says what the episode was worth, and `fault` says
whether the agent's end may be ours: a sampler's or the clock's, not its own.
"""

from collections.abc import Callable
import dataclasses
import time
from typing import Any, NoReturn

from swe17 import config, types
from swe17.agent import formats, record, tree
from swe17.api import errors


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one episode may ask for. 0 tokens: as many as fit."""

  turns: int
  tokens: int  # sampled, in all turns
  new_tokens: int  # of one turn
  context: int  # of one context and its turn
  at_once: int  # answers under way
  turn_seconds: float
  seconds: float

  @classmethod
  def of(cls, agent: config.Agent, rollout: config.Rollout) -> 'Limits':
    return cls(
      turns=agent.max_turns,
      tokens=agent.max_tokens,
      new_tokens=agent.max_new_tokens,
      context=agent.max_context,
      at_once=rollout.requests_at_once,
      turn_seconds=rollout.turn_seconds,
      seconds=agent.episode_seconds,
    )


@dataclasses.dataclass(frozen=True)
class Served:
  """What an agent was served in all, as `types.Episode` has it."""

  segments: tuple[types.Segment, ...]
  turns: int
  calls: int  # that it was told; whether they ran is the harness's to know
  sampled_tokens: int
  thinking_tokens: int
  topk_bound: int
  replaced: int  # answers that the agent gave up: in no segment
  cut: bool  # ended at a limit, or its last turn did
  seconds: float
  fault: str  # why the agent may have ended through no act of its own; '' if not

  def episode(
    self,
    task: types.Task,
    group_id: str,
    member: int,
    outcome: types.Outcome,
    **known: Any,
  ) -> types.Episode:
    """The episode, with what the harness knows: calls, tests, submitted, ...

    After a fault, an outcome that no submit stands behind is none.
    """
    if self.fault and not known.get('submitted'):
      outcome = types.Outcome(None, self.fault)
    fields: dict[str, Any] = {
      'calls': self.calls,
      'malformed': 0,
      'tests': 0,
      'submitted': False,
      'tool_seconds': 0.0,
      'seconds': self.seconds,
      'cut': self.cut and not known.get('submitted'),
    }
    return record.episode(
      task,
      group_id,
      member,
      outcome,
      segments=self.segments,
      turns=self.turns,
      sampled_tokens=self.sampled_tokens,
      thinking_tokens=self.thinking_tokens,
      topk_bound=self.topk_bound,
      **{**fields, **known},
    )


class Recorded:
  """An open episode. Use it from one event loop."""

  def __init__(
    self,
    fmt: formats.Format,
    limits: Limits,
    sampling: types.Sampling,
    *,
    group_id: str,
    member: int,
    min_version: int = 0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self.limits, self.sampling = limits, sampling
    self.group_id, self.member = group_id, member
    self.min_version = min_version
    self.tree = tree.Tree(fmt)
    self.closed = False
    self.error: ValueError | None = None  # a bug, or samplers that give no samples
    self._open: set[tree.Draw] = set()
    self._fmt, self._clock, self._start = fmt, clock, clock()
    self._fault, self._cut = '', False
    self._calls = self._tokens = 0

  @property
  def name(self) -> str:
    """Begins the names of its sessions."""
    return f'{self.group_id}.{self.member}'

  @property
  def sessions(self) -> list[str]:
    return [f'{self.name}.{i}' for i in range(self.tree.sessions)]

  @property
  def seconds_left(self) -> float:
    return self.limits.seconds - (self._clock() - self._start)

  def admit(self, n: int) -> None:
    """Refuses a request for `n` answers that goes beyond what the episode may ask."""
    limits = self.limits
    if self.seconds_left <= 0:
      self.late()
    if len(self.tree.turns) + len(self._open) + n > limits.turns:
      self._limit('turn_limit_exceeded', f'an episode has {limits.turns} turns')
    if limits.tokens and self._tokens >= limits.tokens:
      text = f'an episode has {limits.tokens} sampled tokens'
      self._limit('token_limit_exceeded', text)
    if len(self._open) + n > limits.at_once:
      raise errors.Refused(
        f'{n} answers asked for while {len(self._open)} are under way: this episode '
        f'may have {limits.at_once} at once',
        'n',
        status=400 if n > limits.at_once else 429,
        code='too_many_requests',
        retry_after=None if n > limits.at_once else 1.0,
      )

  def room(self, context: int) -> int:
    """Tokens that a turn may draw after `context`, at most; refuses if there is none.

    The context has to leave room for one.
    """
    limits = self.limits
    if context >= limits.context:
      self._cut = True
      raise errors.Refused(
        f"This model's maximum context length is {limits.context} tokens. However, "
        f'your messages resulted in {context} tokens. Please reduce the length of the '
        'messages.',
        'messages',
        code='context_length_exceeded',
      )
    room = min(limits.new_tokens, limits.context - context)
    return min(room, limits.tokens - self._tokens) if limits.tokens else room

  def ask(self, place: tree.Place, n: int) -> list[tree.Draw]:
    """Begins `n` answers; `drop` ends them."""
    draws = self.tree.ask(place, n)
    self._open.update(draws)
    return draws

  def drop(self, draws: list[tree.Draw]) -> None:
    """They are no longer under way; those that were not served are not recorded."""
    self._open.difference_update(draws)
    for draw in draws:
      self.tree.drop(draw)

  def late(self) -> NoReturn:
    """The episode's time is over: nobody can tell whose fault that is."""
    self._fault = f'episode took over {self.limits.seconds:g} s'
    self._limit('episode_time_exceeded', f'an episode has {self.limits.seconds:g} s')

  def failed(self, reason: str) -> None:
    """An answer could not be given. It counts until one is."""
    self._fault = reason

  def served(
    self,
    draw: tree.Draw,
    result: types.GenerateResult,
    message: dict[str, Any],
    temperature: float,
  ) -> None:
    """Records what the agent was given."""
    self.tree.serve(draw, result, message, temperature)
    self._open.discard(draw)
    self._tokens += result.token_T.size
    self._calls += len(message.get('tool_calls') or ())
    self._fault = '' if self.seconds_left > 0 else self._fault
    self._cut = result.finish == 'length'

  def close(self) -> Served:
    """All that was served. ValueError where the episode met a bug."""
    self.closed = True
    if self.error is not None:
      raise self.error
    log = record.Record(self._fmt, self._clock)
    self.tree.record(log)
    return Served(
      segments=log.segments() if log.turns else (),
      turns=log.turns,
      calls=self._calls,
      sampled_tokens=log.drawn,
      thinking_tokens=log.thinking,
      topk_bound=log.topk_bound,
      replaced=self.tree.replaced,
      cut=self._cut,
      seconds=self._clock() - self._start,
      fault=self._fault,
    )

  def _limit(self, code: str, text: str) -> NoReturn:
    self._cut = True
    raise errors.Refused(f'limit reached: {text}', code=code)


def check_part(
  part: types.GenerateResult, left: types.GenerateRequest, vocab_size: int
) -> None:
  """`record.SamplerError` unless a part carries what every token must."""
  finish = part.finish or 'length'
  record.check_result(dataclasses.replace(part, finish=finish), left, vocab_size)
