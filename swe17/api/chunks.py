"""What becomes certain of a choice, as the chunks of its stream.

A call is told whole, once the turn has ended: in the middle of it nobody can use it.
"""

from typing import Any

from swe17.api import response, turn


class Chat:
  """Chunks of the choices of a chat."""

  kind = 'chat.completion.chunk'

  def __init__(self) -> None:
    self._begun: set[int] = set()

  def of(
    self, head: response.Head, i: int, done: turn.Turn, delta: turn.Delta
  ) -> list[dict[str, Any]]:
    """Chunks of choice `i`; the last ones where its turn has ended."""
    made: list[dict[str, Any]] = []
    say: dict[str, Any] = {}
    if i not in self._begun:
      self._begun.add(i)
      made.append(response.chat_chunk(head, i, {'role': 'assistant', 'content': ''}))
    if delta.thought:
      say['reasoning_content'] = delta.thought
    if delta.content:
      say['content'] = delta.content
    if delta:
      logprobs = delta.logprobs or None
      made.append(response.chat_chunk(head, i, say, logprobs=logprobs))
    if done.finish:
      for call in response.tool_call_deltas(done.message):
        made.append(response.chat_chunk(head, i, {'tool_calls': [call]}))
      made.append(response.chat_chunk(head, i, {}, finish=done.finish_reason))
    return made


class Completion:
  """Chunks of the choices of a completion."""

  kind = 'text_completion'

  def __init__(self) -> None:
    self._told: dict[int, int] = {}

  def of(
    self, head: response.Head, i: int, done: turn.Turn, delta: turn.Delta
  ) -> list[dict[str, Any]]:
    """Chunks of choice `i`; the last one where its turn has ended."""
    if not delta and not done.finish:
      return []
    told = self._told.get(i, 0)
    self._told[i] = told + len(delta.content)
    choice = response.completion_choice(
      i,
      delta.content,
      logprobs=delta.logprobs or None,
      start=told,
      finish=done.finish_reason if done.finish else None,
    )
    return [response.completion(head, [choice], None)]
