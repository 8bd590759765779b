"""gs://bucket/prefix. Bytes go through tensorstore; creating and listing do not.

  create  one request with ifGenerationMatch=0. fake-gcs-server does not enforce
          tensorstore's precondition, nor google-cloud-storage's above 8 MiB, where
          it uploads in several requests; real GCS enforces all of them. One request
          is also one round trip. The object carries a mark of its creator, by which a
          create whose reply was lost knows its own.
  list    tensorstore answers a listing that is refused (401, 403, 404) with an empty
          one (0.1.86): a bucket without groups, it would seem.

A bucket that is deleted under a run reads as absent keys; all else then fails.

Creating and listing use google-auth's session, which repeats no request by itself.

Without credentials nothing hangs: they are looked for when the store is opened, where
Google's library gives a metadata server 3 s three times (GCE_METADATA_TIMEOUT).
"""

import base64
import json
import os
import threading
from typing import Any
import urllib.parse
import uuid

import google.auth
import google.auth.credentials
import google.auth.exceptions
import google.auth.transport.requests
import google_crc32c
import requests

from swe17.store import cloud, kv, reasons, retry

GOOGLE = 'https://storage.googleapis.com'
_SCOPE = 'https://www.googleapis.com/auth/devstorage.read_write'
_MARK = 'swe17-creator'
_CONNECT = 10.0  # s
_Credentials = google.auth.credentials.Credentials


def open(url: str, bucket: str, prefix: str, deadline: float) -> retry.RetryStore:
  """Opens a bucket; see `kv.open`. StoreError without credentials."""
  address = endpoint()
  account = credentials(url)
  return cloud.opened(
    lambda s: GcsStore(url, bucket, prefix, s, address, account), deadline
  )


def endpoint() -> str:
  """The server's address: Google's, or an emulator's as the environment names it."""
  reads = os.environ.get('TENSORSTORE_GCS_HTTP_URL', '').rstrip('/')
  creates = os.environ.get('STORAGE_EMULATOR_HOST', '').rstrip('/')
  if bool(reads) != bool(creates):
    raise ValueError(
      'gs:// would read from one server and create on another: got '
      f'TENSORSTORE_GCS_HTTP_URL={reads!r} and STORAGE_EMULATOR_HOST={creates!r}; '
      'set both to the emulator, or neither'
    )
  if creates and '://' not in creates:
    return f'http://{creates}'
  return creates or GOOGLE


def credentials(url: str) -> _Credentials:
  """Google's default credentials; anonymous ones for an emulator."""
  if endpoint() != GOOGLE:
    return google.auth.credentials.AnonymousCredentials()
  try:
    return google.auth.default(scopes=[_SCOPE])[0]
  except google.auth.exceptions.GoogleAuthError as e:
    raise kv.StoreError(url, '', f'{reasons.signed_out("gs")} [{e}]') from e


class GcsStore(cloud.CloudStore):
  """One attempt at each operation on a bucket of Google Cloud Storage."""

  page = 1000  # keys of one answer to a listing

  def __init__(
    self,
    url: str,
    bucket: str,
    prefix: str,
    seconds: float,
    address: str,
    account: _Credentials,
  ):
    super().__init__(url, {'driver': 'gcs'}, bucket, prefix, seconds)
    self._address, self._account = address, account
    self._mine = uuid.uuid4().hex
    self._local = threading.local()  # sessions are not for several threads

  def create(self, key: str, data: bytes) -> bool:
    about = {
      'name': self._prefix + kv.check_key(key),
      'metadata': {_MARK: self._mark()},
      'crc32c': _crc32c(data),  # the server refuses other bytes
    }
    boundary = uuid.uuid4().hex
    kinds = ('application/json; charset=UTF-8', 'application/octet-stream')
    heads = [f'--{boundary}\r\nContent-Type: {k}\r\n\r\n'.encode() for k in kinds]
    end = f'\r\n--{boundary}--\r\n'.encode()
    first = heads[0] + json.dumps(about).encode() + b'\r\n'
    body = b''.join([first, heads[1], data, end])
    reply = self._request(
      'create',
      key,
      f'upload/storage/v1/b/{self._bucket}/o',
      {'uploadType': 'multipart', 'ifGenerationMatch': '0', 'fields': 'generation'},
      body,
      {'Content-Type': f'multipart/related; boundary={boundary}'},
    )
    return reply is not None

  def ours(self, key: str, data: bytes) -> bool:
    name = urllib.parse.quote(self._prefix + key, safe='')
    path = f'storage/v1/b/{self._bucket}/o/{name}'
    found = self._request('read', key, path, {'fields': 'metadata,crc32c'})
    assert found is not None
    mark = found.get('metadata', {}).get(_MARK)
    # The mark alone would also fit what this thread had created there before.
    return mark == self._mark() and found.get('crc32c') == _crc32c(data)

  def list(self, prefix: str) -> list[str]:
    query = {'prefix': self._prefix + prefix, 'fields': 'items(name),nextPageToken'}
    query['maxResults'] = str(self.page)
    keys, path = [], f'storage/v1/b/{self._bucket}/o'
    while True:
      found = self._request('list', '', path, query)
      assert found is not None
      keys += [i['name'].removeprefix(self._prefix) for i in found.get('items', [])]
      if not found.get('nextPageToken'):
        return sorted(keys)
      query['pageToken'] = found['nextPageToken']

  def _mark(self) -> str:
    """Names the creator: this store in this process, and the thread that waits."""
    return f'{self._mine}-{threading.get_ident()}'

  def _session(self) -> google.auth.transport.requests.AuthorizedSession:
    if not hasattr(self._local, 'session'):
      made = google.auth.transport.requests.AuthorizedSession(self._account)
      self._local.session = made
    return self._local.session

  def _request(
    self,
    kind: str,
    key: str,
    path: str,
    query: dict[str, str],
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
  ) -> dict[str, Any] | None:
    """Sends one request; its JSON answer, or None where the precondition failed (412).

    All else that is not a success is a StoreError.
    """
    self._check_process()
    limit = self._limit(len(body or b''))
    assert limit is not None
    try:
      reply = self._session().request(
        'GET' if body is None else 'POST',
        f'{self._address}/{path}',
        params=query,
        data=body,
        headers=headers,
        timeout=(min(_CONNECT, limit), limit),  # to connect, and between two packets
      )
      status, text = reply.status_code, reply.text
    except (
      requests.ConnectionError,
      requests.Timeout,
      requests.exceptions.ChunkedEncodingError,
      google.auth.exceptions.TransportError,
    ) as e:
      reason = f'the server was not reached [{e}]'
      raise kv.StoreError(self.url, key, reason, transient=True) from e
    except google.auth.exceptions.GoogleAuthError as e:
      reason = f'{reasons.refused("gs")} [{e}]'
      raise kv.StoreError(self.url, key, reason, transient=e.retryable) from e
    except requests.RequestException as e:
      raise kv.StoreError(self.url, key, f'the request failed [{e}]') from e
    if status == 412:
      return None
    if status == 404 and kind == 'read':
      gone = 'neither created nor there: it was deleted meanwhile'
      raise kv.StoreError(self.url, key, gone, transient=True)
    if status != 200:
      said = f'{status} {reply.reason}: {" ".join(text.split())[:300]}'
      reason, transient = reasons.of_cloud('gs', self._bucket, kind, said, status)
      raise kv.StoreError(self.url, key, reason, transient=transient)
    return _parse(self.url, key, text)


def _parse(url: str, key: str, text: str) -> dict[str, Any]:
  try:
    found = json.loads(text)
  except ValueError as e:
    reason = f'the answer is no JSON [{text[:100]}]'
    raise kv.StoreError(url, key, reason, transient=True) from e
  if not isinstance(found, dict):
    raise kv.StoreError(url, key, f'the answer is no object [{text[:100]}]')
  return found


def _crc32c(data: bytes) -> str:
  checksum = google_crc32c.Checksum(data)
  return base64.b64encode(checksum.digest()).decode()
