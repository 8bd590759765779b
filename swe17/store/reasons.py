"""What a store's error means: a sentence that says what to do, and whether to retry.

*Transient*: the same request may well succeed in a moment (429, 5xx, a connection that
was refused, reset or timed out). All else is for a person to mend, and is said at once.
"""

import re

# errno of a file system.
OS = {
  1: 'no permission',
  2: 'the folder is missing',
  13: 'no permission',
  17: 'a file is where a folder should be',
  20: 'a file is where a folder should be',
  21: 'a folder is where the object should be',
  27: 'the object exceeds the file size limit',
  28: 'the disk is full',
  30: 'the file system is read-only',
  95: 'the file system has no hard links',
  122: 'the disk quota is used up',
}

_OS_CODE = re.compile(r"os_error_code='(\d+)'")
_HTTP_CODE = re.compile(r"http_response_code='(\d+)'")
_CURL_CODE = re.compile(r"curl_code='(\d+)'")
# Of curl's codes, those that no second try will mend: bad addresses, certificates.
_CURL_FINAL = frozenset({1, 3, 51, 53, 54, 58, 59, 60, 64, 66, 77, 82, 83})
_BUSY = (408, 409, 425, 429)
_NOT_MENDED = (501, 505, 507)  # 5xx that stay
# Throttling and lost uploads that carry another status, by the server's own word.
_BUSY_WORDS = ('ateLimitExceeded', 'RequestTimeout', 'SlowDown', 'backendError')
_UNANSWERED = ('UNAVAILABLE', 'ABORTED', 'DEADLINE_EXCEEDED', 'INTERNAL', 'UNKNOWN')

# What each operation needs: (Google's permission, Amazon's).
_NEEDS = {
  'read': ('storage.objects.get', 's3:GetObject'),
  'write': ('storage.objects.create and .delete', 's3:PutObject'),
  'create': ('storage.objects.create', 's3:PutObject'),
  'list': ('storage.objects.list', 's3:ListBucket'),
  'delete': ('storage.objects.delete', 's3:DeleteObject'),
  'look up': ('storage.buckets.get', 's3:GetBucketLocation'),
}
_MAKE = {
  'gs': 'gcloud storage buckets create gs://{} --uniform-bucket-level-access',
  's3': 'aws s3 mb s3://{}',
}
_SIGN_IN = {
  'gs': 'set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run '
  '`gcloud auth application-default login`',
  's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE',
}


def of_system(text: str) -> str:
  """A plain reason for tensorstore's text of a system error, which follows in []."""
  code = _OS_CODE.search(text)
  plain = OS.get(int(code.group(1))) if code else None
  return f'{plain} [{text}]' if plain else text


def of_cloud(
  scheme: str, bucket: str, kind: str, text: str, status: int | None = None
) -> tuple[str, bool]:
  """(reason, transient) of an answer of gs:// or s3:// to an operation of `kind`.

  `status` is the HTTP status; without it, it is looked for in tensorstore's `text`.
  """
  text = text.replace('All 0 retry attempts failed: ', '')  # the retries are ours
  found = _HTTP_CODE.search(text)
  if status is None and found:
    status = int(found.group(1))
  if status is None:
    return _unanswered(text)
  busy = any(word in text for word in _BUSY_WORDS)
  if busy or status in _BUSY or (status >= 500 and status not in _NOT_MENDED):
    return f'{_transient(status)} [{text}]', True
  plain = _permanent(scheme, bucket, kind, status, text)
  return f'{plain} [{text}]', False


def signed_out(scheme: str) -> str:
  """What to say when there are no credentials."""
  return f'no credentials were found: {_SIGN_IN[scheme]}'


def refused(scheme: str) -> str:
  """What to say when the credentials do not do."""
  return f'the credentials were refused: {_SIGN_IN[scheme]}'


def _unanswered(text: str) -> tuple[str, bool]:
  """An error without a status: no answer, or a request that could not be made."""
  curl = _CURL_CODE.search(text)
  if curl:
    final = int(curl.group(1)) in _CURL_FINAL
    return f'the server was not reached [{text}]', not final
  return text, text.startswith(_UNANSWERED)


def _transient(status: int) -> str:
  if status == 429:
    return 'too many requests for this key or bucket (429)'
  return f'the server is not ready ({status})'


def _permanent(scheme: str, bucket: str, kind: str, status: int, text: str) -> str:
  url = f'{scheme}://{bucket}'
  if status == 404:
    make = _MAKE[scheme].format(bucket)
    return f'there is no bucket {bucket}: make it with `{make}`, or mend the URL'
  if status == 401 or 'InvalidAccessKeyId' in text or 'SignatureDoesNotMatch' in text:
    return refused(scheme)
  if status == 403:
    need = _NEEDS[kind][scheme == 's3']
    return f'no permission to {kind}: the account needs {need} on {url}'
  if status == 507:
    return "the server's disk is full: free some space, or lower sync.keep_fulls"
  return f'the server refused to {kind} ({status})'
