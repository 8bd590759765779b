"""What a request is refused with, in the form that OpenAI's clients raise.

  {"error": {"message", "type", "param", "code"}}

400 is `BadRequestError` there, 404 `NotFoundError`, 429 `RateLimitError` (tried again
after Retry-After), 5xx `InternalServerError` (tried again).
"""

import math
from typing import Any, NoReturn

_TYPES = {404: 'not_found_error', 429: 'rate_limit_error'}


class Refused(Exception):
  """A request that is not served, and why."""

  def __init__(
    self,
    message: str,
    param: str | None = None,
    *,
    status: int = 400,
    code: str | None = None,
    retry_after: float | None = None,
  ):
    """`param` names the field; `retry_after` [s] tells when to ask again."""
    super().__init__(message)
    self.message, self.param, self.status = message, param, status
    self.code, self.retry_after = code, retry_after

  @property
  def headers(self) -> dict[str, str]:
    if self.retry_after is None:
      return {}
    return {'Retry-After': str(max(1, math.ceil(self.retry_after)))}

  @property
  def body(self) -> dict[str, Any]:
    kind = 'server_error' if self.status >= 500 else 'invalid_request_error'
    return {
      'error': {
        'message': self.message,
        'type': _TYPES.get(self.status, kind),
        'param': self.param,
        'code': self.code,
      }
    }


def full(retry_after: float) -> Refused:
  """Nothing more may wait: the caller asks again later."""
  return Refused(
    'all slots are taken and the queue is full: ask again later',
    status=429,
    code='queue_full',
    retry_after=retry_after,
  )


def of_value(error: ValueError) -> Refused:
  """400 for what an engine or a template says of a value: 'field: got .., want ..'."""
  field = str(error).partition(':')[0]
  named = field.replace('_', '').isalnum() and len(field) < 40
  return Refused(str(error), field if named else None)


def refuse(field: str, got: Any, want: str) -> NoReturn:
  """Refuses a request for one of its fields."""
  raise Refused(f'{field}: got {shown(got)}, want {want}', field)


def shown(value: Any) -> str:
  """A value as a message shows it: short, whatever it is."""
  if isinstance(value, str):
    return repr(value[:60])
  if type(value) is int and abs(value) >= 1 << 64:
    return 'a huge number'
  if isinstance(value, bool | int | float | None):
    return repr(value)
  return {dict: 'an object', list: 'a list'}.get(type(value), type(value).__name__)
