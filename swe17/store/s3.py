"""s3://bucket/prefix, with conditional creates by tensorstore's compare-and-set.

A create whose reply was lost may have been repeated below us (store/driver.py), so what
says "exists" is looked at every time: bytes equal to ours are ours. tensorstore also
says "exists" where the bucket is missing; the look finds nothing there, and says so.

AWS_ENDPOINT_URL names another server than Amazon's (`AWS_ENDPOINT_URL_S3` wins over
it), AWS_REGION its region.
"""

import os
from typing import Any

from swe17.store import cloud, retry


def open(url: str, bucket: str, prefix: str, deadline: float) -> retry.RetryStore:
  """Opens a bucket; see `kv.open`."""
  spec = _spec()
  return cloud.opened(lambda s: S3Store(url, spec, bucket, prefix, s), deadline)


def endpoint() -> str:
  """The address of a server other than Amazon's, or ''."""
  env = os.environ
  return env.get('AWS_ENDPOINT_URL_S3') or env.get('AWS_ENDPOINT_URL') or ''


class S3Store(cloud.CloudStore):
  """One attempt at each operation on an S3 bucket."""

  def create(self, key: str, data: bytes) -> bool:
    return super().create(key, data) or self.ours(key, data)


def _spec() -> dict[str, Any]:
  spec: dict[str, Any] = {'driver': 's3'}
  if address := endpoint():
    spec['endpoint'] = address.rstrip('/')
  region = os.environ.get('AWS_REGION') or os.environ.get('AWS_DEFAULT_REGION')
  if region or address:
    spec['aws_region'] = region or 'us-east-1'
  if os.environ.get('AWS_ACCESS_KEY_ID'):
    # Not the whole chain of places, of which some take seconds to answer "no".
    spec['context'] = {'aws_credentials': {'type': 'environment'}}
  return spec
