"""OpenAI's response objects, of whole answers and of chunks.

https://platform.openai.com/docs/api-reference/chat/object
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from swe17.api import turn


@dataclasses.dataclass(frozen=True)
class Head:
  """What all objects of one request begin with."""

  id: str
  created: int  # seconds since 1970
  model: str
  fingerprint: str = ''  # the version of the weights, told once it is known

  def object(self, kind: str, **rest: Any) -> dict[str, Any]:
    made = {'id': self.id, 'object': kind, 'created': self.created}
    return {
      **made,
      'model': self.model,
      'system_fingerprint': self.fingerprint or None,
      **rest,
    }


def usage(prompt: int, completion: int) -> dict[str, int]:
  return {
    'prompt_tokens': prompt,
    'completion_tokens': completion,
    'total_tokens': prompt + completion,
  }


def chat(
  head: Head, choices: Sequence[dict[str, Any]], used: Mapping[str, int]
) -> dict[str, Any]:
  return head.object('chat.completion', choices=list(choices), usage=dict(used))


def chat_choice(
  index: int, done: turn.Turn, logprobs: Sequence[tuple[str, bytes, float]] | None
) -> dict[str, Any]:
  return {
    'index': index,
    'message': {**done.message, 'refusal': None},
    'logprobs': chat_logprobs(logprobs),
    'finish_reason': done.finish_reason,
  }


def chat_logprobs(
  logprobs: Sequence[tuple[str, bytes, float]] | None,
) -> dict[str, Any] | None:
  """None where they were not asked for."""
  if logprobs is None:
    return None
  content = [
    {'token': token, 'logprob': logp, 'bytes': list(data), 'top_logprobs': []}
    for token, data, logp in logprobs
  ]
  return {'content': content, 'refusal': None}


def chat_chunk(
  head: Head,
  index: int,
  delta: Mapping[str, Any],
  *,
  logprobs: Sequence[tuple[str, bytes, float]] | None = None,
  finish: str | None = None,
) -> dict[str, Any]:
  choice = {
    'index': index,
    'delta': dict(delta),
    'logprobs': chat_logprobs(logprobs),
    'finish_reason': finish,
  }
  return head.object('chat.completion.chunk', choices=[choice])


def tool_call_deltas(message: Mapping[str, Any]) -> list[dict[str, Any]]:
  """Calls as chunks have them: whole, each with its place."""
  calls = message.get('tool_calls') or ()
  return [{'index': i, **call} for i, call in enumerate(calls)]


def completion(
  head: Head, choices: Sequence[dict[str, Any]], used: Mapping[str, int] | None
) -> dict[str, Any]:
  """A whole answer, or a chunk where `used` is None."""
  made = head.object('text_completion', choices=list(choices))
  return made if used is None else {**made, 'usage': dict(used)}


def completion_choice(
  index: int,
  text: str,
  *,
  logprobs: Sequence[tuple[str, bytes, float]] | None = None,
  start: int = 0,
  finish: str | None = None,
) -> dict[str, Any]:
  """`start`: characters of the choice before this chunk."""
  return {
    'index': index,
    'text': text,
    'logprobs': _completion_logprobs(logprobs, start),
    'finish_reason': finish,
  }


def _completion_logprobs(
  logprobs: Sequence[tuple[str, bytes, float]] | None, start: int
) -> dict[str, Any] | None:
  if logprobs is None:
    return None
  offsets = [start]
  for token, _, _ in logprobs:
    offsets.append(offsets[-1] + len(token))
  return {
    'tokens': [token for token, _, _ in logprobs],
    'token_logprobs': [logp for _, _, logp in logprobs],
    'top_logprobs': [],
    'text_offset': offsets[:-1],
  }


def models(names: Sequence[str], created: int) -> dict[str, Any]:
  return {'object': 'list', 'data': [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
  return {'id': name, 'object': 'model', 'created': created, 'owned_by': 'swe17'}
