"""One choice as it is drawn: parts in, what became certain out, the message in the end.

A stop string is looked for token by token, so that the turn ends with the token that
completed it: later tokens of its part are dropped. The text ends before the string.
"""

import codecs
from collections.abc import Mapping
import dataclasses
from typing import Any

import numpy as np

from swe17 import kept as kept_sets
from swe17 import types
from swe17.agent import formats
from swe17.api import request, text

_LEAST = -9999.0  # of a log-prob in JSON, which has no infinity


@dataclasses.dataclass(frozen=True)
class Delta:
  """What a client may be told now.

  `logprobs` are (text, bytes, log-prob) of the drawn tokens, but the one that is the
  end; those of tokens whose text waits are told before it.
  """

  thought: str = ''
  content: str = ''
  logprobs: tuple[tuple[str, bytes, float], ...] = ()

  def __bool__(self) -> bool:
    return bool(self.thought or self.content or self.logprobs)


class Turn:
  """Reads the parts of one choice. `finish` is '' until it has ended."""

  def __init__(
    self, fmt: formats.Format, asked: request.Chat | request.Completion, salt: str
  ):
    self.finish = ''
    self._fmt, self._asked, self._salt = fmt, asked, salt
    self._calls = isinstance(asked, request.Chat) and asked.calls
    self._parts: list[types.GenerateResult] = []
    self._text: list[str] = []
    self._characters = codecs.getincrementaldecoder('utf-8')('replace')
    self._stops = text.Stops(asked.stop) if asked.stop else None
    self._splitter = text.Splitter(fmt.marks, self._calls)
    self._message: dict[str, Any] | None = None

  def take(self, part: types.GenerateResult) -> Delta:
    """Reads a part. When it is the last, `message` and `result` are there."""
    ids = part.token_T.tolist()
    ends = part.finish == 'stop' and ids[-1:] and ids[-1] in self._fmt.stop_ids
    certain, n = self._decode(ids[:-1] if ends else ids, last=bool(part.finish))
    said = n
    if self._stops is not None and self._stops.found:
      part = _first(part, n)
    elif ends:
      n += 1
    self._parts.append(part)
    self._text.append(certain)
    logprobs = self._logprobs(part, said)
    if not part.finish:
      return self._delta(certain, logprobs)
    self.finish = part.finish
    whole = ''.join(self._text)
    if isinstance(self._asked, request.Completion):
      self._message = {'role': 'assistant', 'content': whole}
      return Delta(content=certain, logprobs=logprobs)
    self._message = self._fmt.spoken(whole, calls=self._calls, salt=self._salt)
    told = self._delta(certain, logprobs)
    rest = self._splitter.end(self._message)
    return Delta(told.thought + rest[0], told.content + rest[1], logprobs)

  @property
  def message(self) -> Mapping[str, Any]:
    assert self._message is not None, 'the turn has not ended'
    return self._message

  @property
  def finish_reason(self) -> str:
    return 'tool_calls' if self.message.get('tool_calls') else self.finish

  @property
  def result(self) -> types.GenerateResult:
    """All that was drawn for it."""
    return types.join(self._parts)

  def _delta(
    self, certain: str, logprobs: tuple[tuple[str, bytes, float], ...]
  ) -> Delta:
    if isinstance(self._asked, request.Completion):
      return Delta(content=certain, logprobs=logprobs)
    thought, content = self._splitter.add(certain)
    return Delta(thought, content, logprobs)

  def _decode(self, ids: list[int], last: bool) -> tuple[str, int]:
    """(text that is certain now, tokens read); fewer than all at a stop string."""
    if self._stops is None:
      data = self._fmt.to_bytes(ids)
      return self._characters.decode(data, last), len(ids)
    said = ''
    for n, token in enumerate(ids, 1):
      said += self._stops.add(self._characters.decode(self._fmt.to_bytes([token])))
      if self._stops.found:
        return said, n
    if last:
      said += self._stops.add(self._characters.decode(b'', True))
      said += self._stops.end()
    return said, len(ids)

  def _logprobs(
    self, part: types.GenerateResult, n: int
  ) -> tuple[tuple[str, bytes, float], ...]:
    if not self._asked.logprobs:
      return ()
    made = []
    for token, logp in zip(part.token_T[:n].tolist(), part.logp_T[:n], strict=True):
      data = self._fmt.to_bytes([token])
      made.append((data.decode('utf-8', 'replace'), data, max(float(logp), _LEAST)))
    return tuple(made)


def _first(part: types.GenerateResult, n: int) -> types.GenerateResult:
  """The first `n` tokens of a part, as an answer that a stop string ended."""
  whole = n == part.token_T.size
  return dataclasses.replace(
    part,
    token_T=part.token_T[:n],
    logp_T=part.logp_T[:n],
    entropy_T=part.entropy_T[:n],
    version_T=part.version_T[:n],
    kept=kept_sets.cut(part.kept, 0, n),
    finish='stop',
    # How many of the first tokens top_k decided is not told apart.
    topk_bound=min(part.topk_bound, n),
    routes_RNK=_routes(part, n) if not whole else part.routes_RNK,
  )


def _routes(part: types.GenerateResult, n: int) -> np.ndarray | None:
  """Routes without those of the inputs that drew the tokens after the first `n`."""
  if part.routes_RNK is None:
    return None
  return part.routes_RNK[: part.routes_RNK.shape[0] - (part.token_T.size - n)]
