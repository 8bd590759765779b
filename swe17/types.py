"""What flows through the system, as plain records, and the legend of array names.

task -> episode -> group -> batch -> gradient -> version -> delta -> sampler

Arrays end in their dimensions. One letter an axis:

  B rows        T time          S key time      D model        F feed-forward
  N layers      H head dim      Q query heads   C key/value heads
  V vocabulary  K kept ids      E experts       R replicas

RL words: `mu_logp` is the behaviour's (the sampler's) log-probability, `logp` the
learner's, `adv` the advantage, `ratio` is exp(logp - mu_logp), `mask` is True where
a token was sampled and is trained, `version` is the weight version that drew it.

This file imports numpy only: every process, with or without JAX, speaks in it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Task:
  """One problem with a verifier. `unit` is what splits and intervals go by."""

  id: str  # unique in its set, e.g. 'bisect.bisect_left/3'
  family: str  # e.g. 'repair_functions'
  split: str  # 'train' or 'heldout'
  unit: str  # the function (or package) it comes from
  prompt: str  # the first user message
  payload: Mapping[str, Any]  # the family's own data, JSON-able
  solved_at: float = 1.0  # solved = outcome >= solved_at


CHEATING = 'cheating: '  # how the reason of an outcome begins that was lost by it


@dataclasses.dataclass(frozen=True)
class Outcome:
  """A verifier's raw score, or its absence with a reason. Absent never becomes 0."""

  value: float | None
  reason: str = ''

  @property
  def cheated(self) -> bool:
    """Whether it is 0 because the agent tried to cheat."""
    return self.reason.startswith(CHEATING)


@dataclasses.dataclass(frozen=True)
class KeptSets:
  """The sets that tokens were drawn from, in CSR form.

  Token t's set is `ids[offset_T1[t]:offset_T1[t + 1]]`, ascending. Size 0 says that
  no set was recorded (the token was not sampled, or no filter was on).
  """

  offset_T1: np.ndarray  # int32 [T + 1], offset_T1[0] == 0
  ids: np.ndarray  # int32 [offset_T1[-1]]

  @property
  def size_T(self) -> np.ndarray:
    return np.diff(self.offset_T1)


@dataclasses.dataclass(frozen=True)
class Segment:
  """The tokens of an episode between two compactions, as the sampler saw them.

  Every array `_T` is aligned to `token_T`: entry t speaks of the draw of token t, and
  is 0 where `mask_T` is False (prompt, tool results, template glue).

  Row t of `routes_RNK` speaks of token t as an *input*: the experts it was fed through
  when the cache entry was made that the last draws attended to. Tokens from R on were
  never fed (the last drawn one, and what follows it): they have none.
  """

  token_T: np.ndarray  # int32 [T]
  mask_T: np.ndarray  # bool [T], True where the sampler drew the token
  mu_logp_T: np.ndarray  # float32 [T], log-probability within the kept set
  entropy_T: np.ndarray  # float32 [T], nats, whole vocabulary, sampler's temperature
  temperature_T: np.ndarray  # float32 [T]
  version_T: np.ndarray  # int32 [T], weight version that drew the token
  turn_T: np.ndarray  # int32 [T], index of the assistant turn
  kept: KeptSets
  # uint8 or uint16 [R, N layers with experts, K slots in order]; None: not recorded.
  routes_RNK: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Episode:
  """One member of a group: an agent's whole attempt at a task.

  status: 'valid' (in the statistics and the loss), 'masked' (valid outcome, outside
  the loss), 'invalid' (infrastructure or missing data: outside both; `outcome.value`
  is None).
  """

  id: str  # '<group id>.<member>'
  task_id: str
  unit: str
  group_id: str
  member: int
  status: str
  outcome: Outcome
  solved_at: float
  segments: tuple[Segment, ...]
  turns: int  # assistant messages
  calls: int  # tool calls that ran
  malformed: int  # tool calls that did not
  tests: int  # calls of the test tool
  submitted: bool  # ended by its own submit
  sampled_tokens: int
  thinking_tokens: int  # sampled tokens inside <think> ... </think>
  tool_seconds: float
  seconds: float
  cut: bool = False  # ended at a length or turn limit
  topk_bound: int = 0  # sampled tokens whose set top_k decided
  duplicate_calls: int = 0  # reads equal to an earlier one, nothing written between
  # The verifier's raw score of every turn (as `Segment.turn_T` counts them), of
  # families that score each turn; None: scored once, at the end.
  turn_scores: tuple[float, ...] | None = None

  @property
  def solved(self) -> bool:
    return self.outcome.value is not None and self.outcome.value >= self.solved_at


@dataclasses.dataclass(frozen=True)
class Group:
  """The episodes of one attempt at one task."""

  id: str  # '<start index>-<attempt id>', unique in the run
  start: int  # order in which groups started; the learner's order of use
  task_id: str
  unit: str
  episodes: tuple[Episode, ...]
  loop_lag: float | None = None  # longest stall of the rollout's loop meanwhile [s]


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How tokens are drawn. Order: temperature, min-p, top-k, top-p."""

  temperature: float = 1.0
  min_p: float = 0.0  # keep p >= min_p * p_max
  top_k: int = 0  # 0: off
  top_p: float = 1.0

  @property
  def truncates(self) -> bool:
    """Whether a set is recorded: any filter that can drop a token is on."""
    return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclasses.dataclass(frozen=True)
class GenerateRequest:
  """One turn asked of a sampler. Token in, token out."""

  session: str  # an episode's segment: its KV cache is kept between turns
  token_T: np.ndarray  # int32, the whole context so far
  max_new: int
  stop_ids: tuple[int, ...]  # the drawn stop token is part of the result
  sampling: Sampling
  key: tuple[int, int]  # two uint32; the position in the context is folded in
  min_version: int = 0  # do not start before these weights are served
  routes_from: int = 0  # rows of routes that the caller holds of this context


@dataclasses.dataclass(frozen=True)
class GenerateResult:
  """What a sampler returns: every drawn token with all that it must carry."""

  token_T: np.ndarray  # int32 [n]
  logp_T: np.ndarray  # float32 [n]
  entropy_T: np.ndarray  # float32 [n]
  version_T: np.ndarray  # int32 [n]
  kept: KeptSets  # n sets; sizes 0 where no filter was on
  finish: str  # 'stop', 'length', or '' for a part that others follow
  topk_bound: int = 0  # tokens whose set would be larger without top_k
  # Routes of the inputs from `routes_start` to the last one fed, which is the one
  # before the last drawn. Rows before it stand as they were given.
  routes_RNK: np.ndarray | None = None  # as `Segment.routes_RNK`; None: not recorded
  routes_start: int = 0


def join(parts: Sequence[GenerateResult]) -> GenerateResult:
  """One answer of its parts, in order; `finish` and routes are those of the last.

  ValueError if there are none.
  """
  if not parts:
    raise ValueError('an answer: got no parts, want at least one')
  sizes = [np.zeros(1, np.int64), *(part.kept.size_T for part in parts)]
  kept = KeptSets(
    np.cumsum(np.concatenate(sizes)).astype(np.int32),
    np.concatenate([part.kept.ids for part in parts]),
  )
  return dataclasses.replace(
    parts[-1],
    token_T=np.concatenate([part.token_T for part in parts]),
    logp_T=np.concatenate([part.logp_T for part in parts]),
    entropy_T=np.concatenate([part.entropy_T for part in parts]),
    version_T=np.concatenate([part.version_T for part in parts]),
    kept=kept,
    topk_bound=sum(part.topk_bound for part in parts),
  )
