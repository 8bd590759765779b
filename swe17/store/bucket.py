"""What a run must know of a bucket beyond its objects: rules, versions, its clock.

Looked up with google-cloud-storage, of which tensorstore has no counterpart. Needs
storage.buckets.get, which an account that may only handle objects does not have.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import email.utils
import os
import time
from typing import Any
import urllib.error
import urllib.request

from swe17.store import kv, reasons

_SECONDS = 10.0
_SHORT = 30  # days: a rule that deletes sooner than this meets a run in progress
# Conditions under which a rule spares objects that have not been replaced or deleted.
_NONCURRENT = (
  'daysSinceNoncurrentTime',
  'noncurrentTimeBefore',
  'numNewerVersions',
)


# What a run's keys begin and end with; those of groups end with a digit.
_NAMES = ('weights/', 'groups/', 'imitation/', 'samplers/')
_ENDS = ('json', 'bin')


@dataclasses.dataclass(frozen=True)
class Facts:
  """The settings of a Google bucket that concern a run."""

  location: str
  rules: tuple[Mapping[str, Any], ...]  # lifecycle, as in the JSON API
  versioning: bool
  soft_delete: int  # s for which deleted objects are kept, and billed
  retention: int  # s before which an object may not be deleted or replaced


def facts(url: str) -> Facts:
  """Looks a gs:// bucket up. StoreError if it can't be looked up."""
  import google.api_core.exceptions
  import google.auth.exceptions
  from google.cloud import storage
  import requests

  from swe17.store import gcs

  name = kv.bucket_of(url)[1]
  client = storage.Client(
    # A bucket's name is enough; the library asks for a project all the same.
    project=os.environ.get('GOOGLE_CLOUD_PROJECT') or 'any',
    credentials=gcs.credentials(url),
    client_options={'api_endpoint': gcs.endpoint()},
  )
  try:
    found = client.get_bucket(name, timeout=_SECONDS, retry=None)
  except google.api_core.exceptions.GoogleAPICallError as e:
    status = e.code or 500
    reason, transient = reasons.of_cloud('gs', name, 'look up', str(e), status)
    raise kv.StoreError(url, '', reason, transient=transient) from e
  except (requests.RequestException, google.auth.exceptions.GoogleAuthError) as e:
    raise kv.StoreError(url, '', f'the server was not reached [{e}]') from e
  soft = found.soft_delete_policy.retention_duration_seconds
  return Facts(
    location=found.location or '',
    rules=tuple(dict(rule) for rule in found.lifecycle_rules),
    versioning=bool(found.versioning_enabled),
    soft_delete=soft or 0,
    retention=found.retention_period or 0,
  )


def threats(rules: Sequence[Mapping[str, Any]], prefix: str) -> list[tuple[bool, str]]:
  """(deadly, in words) of each lifecycle rule that may take a run's objects away.

  Deadly: it deletes live objects under `prefix` within a month, or at once.
  """
  found = []
  for rule in rules:
    action = rule.get('action', {})
    when = rule.get('condition', {})
    if not _meets(when, prefix):
      continue
    if action.get('type') == 'SetStorageClass':
      kind = action.get('storageClass')
      found.append((False, f'moves objects to {kind}: reads cost more ({_say(when)})'))
    elif action.get('type') == 'Delete':
      days = when.get('age')
      deadly = 'createdBefore' not in when and (days is None or days < _SHORT)
      found.append((deadly, f'deletes weights and groups ({_say(when)})'))
  return found


def _meets(when: Mapping[str, Any], prefix: str) -> bool:
  """Whether a rule's condition can hold for live objects under `prefix`."""
  if when.get('isLive') is False or any(when.get(name) for name in _NONCURRENT):
    return False
  keys = [prefix + name for name in _NAMES]
  starts, ends = when.get('matchesPrefix', ['']), when.get('matchesSuffix', [''])
  return any(k.startswith(p) or p.startswith(k) for k in keys for p in starts) and any(
    e == '' or e[-1].isdigit() or e.endswith(_ENDS) for e in ends
  )


def _say(when: Mapping[str, Any]) -> str:
  if list(when) == ['age']:
    return f'after {when["age"]} days'
  return ', '.join(f'{name}={value}' for name, value in when.items()) or 'always'


def skew(url: str) -> float | None:
  """Seconds by which this machine's clock is ahead of the server's; to about one.

  None if the server does not say its time. StoreError if it does not answer.
  """
  scheme, name, _ = kv.bucket_of(url)
  if scheme == 'gs':
    from swe17.store import gcs

    address = gcs.endpoint()
  else:
    from swe17.store import s3

    address = s3.endpoint() or f'https://{name}.s3.amazonaws.com'
  before = time.time()
  try:
    with urllib.request.urlopen(address, timeout=_SECONDS) as reply:
      date = reply.headers.get('Date')
  except urllib.error.HTTPError as e:
    date = e.headers.get('Date')  # an error has the time as well
  except OSError as e:
    raise kv.StoreError(url, '', f'the server was not reached [{e}]') from e
  if date is None:
    return None
  ours = (before + time.time()) / 2
  # The header is cut to whole seconds: half of one on average.
  return ours - email.utils.parsedate_to_datetime(date).timestamp() - 0.5
