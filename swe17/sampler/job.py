"""A request in flight: what it has drawn so far, and whom that is told to."""

from collections.abc import Callable
import concurrent.futures
import dataclasses
import time

import numpy as np

from swe17 import kept as kept_sets
from swe17 import types
from swe17.sampler import pages

OnPart = Callable[[types.GenerateResult], None]


@dataclasses.dataclass(eq=False)
class Job:
  """A request, its future, and the draws of every dispatch that it took part in.

  The future is never marked as running: that way its owner may cancel it at any time.
  """

  request: types.GenerateRequest
  future: concurrent.futures.Future
  on_part: OnPart | None = None
  token: list[int] = dataclasses.field(default_factory=list)
  parts: list[types.GenerateResult] = dataclasses.field(default_factory=list)
  order: int = 0  # place among all that came
  hit: int | None = None  # fewest tokens of its context that were taken over; None: new
  row: pages.Row | None = None  # what it held when it was preempted
  came: float = dataclasses.field(default_factory=time.monotonic)

  @property
  def gone(self) -> bool:
    """Whether nobody waits for it any longer."""
    return self.future.cancelled()

  @property
  def size(self) -> int:
    """Tokens of the context, drawn ones included."""
    return self.request.token_T.size + len(self.token)

  @property
  def context(self) -> np.ndarray:
    """The context, drawn tokens included, int32."""
    return np.append(self.request.token_T, self.token).astype(np.int32)

  @property
  def left(self) -> int:
    """Tokens that it may still draw."""
    return self.request.max_new - len(self.token)

  @property
  def finish(self) -> str:
    """'stop', 'length', or '' while there is more to draw."""
    if self.token and self.token[-1] in self.request.stop_ids:
      return 'stop'
    return '' if self.left else 'length'

  def drew(
    self,
    token_T: np.ndarray,
    logp_T: np.ndarray,
    entropy_T: np.ndarray,
    kept_TK: np.ndarray,
    bound_T: np.ndarray,
    version: int,
  ) -> None:
    """Takes the draws of one dispatch."""
    self.token += token_T.tolist()
    kept = kept_sets.from_padded(kept_TK)
    size_T = kept.size_T
    # A drawn token outside its set is a bug, never data.
    own = kept.ids == np.repeat(token_T, size_T)
    assert own.sum() == (size_T > 0).sum(), f'a token of {token_T} outside its set'
    part = types.GenerateResult(
      token_T=token_T.astype(np.int32),
      logp_T=logp_T.astype(np.float32),
      entropy_T=entropy_T.astype(np.float32),
      version_T=np.full(token_T.size, version, np.int32),
      kept=kept,
      finish=self.finish,
      topk_bound=int(bound_T.sum()),
    )
    self.parts.append(part)

  def tell(self, routes_RNK: np.ndarray | None = None, routes_start: int = 0) -> None:
    """Hands the last part to who listens; with the last of all, the whole answer."""
    if routes_RNK is not None:
      self.parts[-1] = dataclasses.replace(
        self.parts[-1], routes_RNK=routes_RNK, routes_start=routes_start
      )
    if self.on_part is not None and not self.gone:
      self.on_part(self.parts[-1])
    if self.finish:
      _settle(self.future, types.join(self.parts))

  def fail(self, error: BaseException) -> None:
    """Ends it with an error, unless it has ended."""
    if not self.future.done():
      _settle(self.future, error)

  def drop(self) -> None:
    """Says to those who wait on a cancelled future that it has ended."""
    self.future.set_running_or_notify_cancel()


def _settle(future: concurrent.futures.Future, end: object) -> None:
  """Sets the result or the error; a future that was cancelled just now stays so."""
  try:
    if isinstance(end, BaseException):
      future.set_exception(end)
    else:
      future.set_result(end)
  except concurrent.futures.InvalidStateError:
    if not future.cancelled():
      raise
