"""gs:// and s3:// over lines and servers that fail: what is retried, and what is said.

Between the store and a real server stands a proxy that spoils chosen requests
(servers.gate). Every test is run against both kinds unless it says otherwise.
"""

from collections.abc import Iterator
import json
import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import pytest

from launch import emulator
from swe17.store import kv
from tests import servers


@pytest.fixture(scope='module')
def running() -> Iterator[dict[str, emulator.Server]]:
  with emulator.gcs() as gs, emulator.s3() as s3:
    yield {'gs': gs, 's3': s3}


@pytest.fixture(params=['gs', 's3'])
def line(
  request: pytest.FixtureRequest, running: dict[str, emulator.Server]
) -> Iterator[servers.Line]:
  with servers.line(running[request.param]) as made:
    yield made


CALLS = {
  'read': lambda store: store.read('a'),
  'write': lambda store: store.write('a', b'1'),
  'create': lambda store: store.create('b', b'1'),
  'list': lambda store: store.list(''),
  'delete': lambda store: store.delete('a'),
}


@pytest.mark.parametrize('fault', ['429', '503', '500', 'drop_before', 'drop_after'])
@pytest.mark.parametrize('call', CALLS)
def test_transient_fault_is_outlasted(line: servers.Line, call: str, fault: str):
  line.direct.write('a', b'1')
  store = line.open()
  line.faults = [fault] * 2
  want = {'read': b'1', 'create': True, 'list': ['a']}.get(call)
  assert CALLS[call](store) == want
  assert line.faults == []


@pytest.mark.parametrize('call', CALLS)
def test_no_permission_names_the_operation_at_once(line: servers.Line, call: str):
  store = line.open()
  line.always = '403'
  with pytest.raises(kv.StoreError, match=f'no permission to {call}') as e:
    CALLS[call](store)
  assert not e.value.transient
  assert len(line.seen) == 1


def test_refused_credentials_say_how_to_sign_in(line: servers.Line):
  store = line.open()
  line.always = '401'
  want = (
    'GOOGLE_APPLICATION_CREDENTIALS'
    if line.server.scheme == 'gs'
    else 'AWS_ACCESS_KEY_ID'
  )
  for call in CALLS.values():
    with pytest.raises(kv.StoreError, match=want):
      call(store)


def test_a_listing_that_is_refused_is_not_an_empty_one(line: servers.Line):
  line.direct.write('a', b'1')
  store = line.open()
  for status in ('401', '403', '404'):
    line.always = status
    with pytest.raises(kv.StoreError):
      store.list('')


def test_full_disk_of_the_server_is_said_at_once(line: servers.Line):
  store = line.open()
  line.always = '507'
  for call in ('write', 'create'):
    line.seen.clear()
    with pytest.raises(kv.StoreError, match='disk is full'):
      CALLS[call](store)
    assert len(line.seen) == 1


@pytest.mark.parametrize('call', CALLS)
def test_server_that_stays_away_is_given_up_at_the_deadline(
  line: servers.Line, call: str
):
  store = line.open(deadline=0.3)
  line.always = '503'
  started = time.monotonic()
  with pytest.raises(kv.StoreError, match='gave up after') as e:
    CALLS[call](store)
  assert e.value.transient
  assert time.monotonic() - started < kv.DEADLINE
  assert len(line.seen) > 2


def test_server_that_never_answers_is_given_up(line: servers.Line):
  store = line.open(deadline=0.2)
  line.always = 'hang'
  for call in ('write', 'create', 'list', 'delete'):
    started = time.monotonic()
    with pytest.raises(kv.StoreError):
      CALLS[call](store)
    assert time.monotonic() - started < kv.DEADLINE
  with pytest.raises(kv.StoreError):
    store.read('a', 0, 10)


def test_create_whose_reply_was_lost_is_our_own(line: servers.Line):
  store = line.open()
  line.faults = ['drop_after'] * 4
  assert store.create('a', b'mine') is True
  assert line.direct.read('a') == b'mine'


def test_create_repeated_below_us_is_our_own(line: servers.Line):
  """A re-used connection that breaks: libcurl sends the request again by itself."""
  for i in range(6):
    store = line.open()
    assert store.list('') == [f'{j}' for j in range(i)]
    line.faults = ['', 'drop_after'] if line.server.scheme == 's3' else ['drop_after']
    assert store.create(f'{i}', b'mine') is True


def test_create_lost_to_another_is_never_reported_as_won(line: servers.Line):
  store = line.open()

  def other(method: str, path: str) -> None:
    if method in ('POST', 'PUT'):
      line.direct.create('a', b'theirs')  # just ahead of us

  line.before, line.always = other, ''
  line.faults = ['drop_before', 'drop_before']
  assert store.create('a', b'mine') is False
  assert line.direct.read('a') == b'theirs'


def test_equal_bytes_of_another_creator_are_not_ours_on_gs(
  running: dict[str, emulator.Server],
):
  with servers.line(running['gs']) as line:
    store = line.open()
    line.before = lambda method, path: line.direct.create('a', b'same') and None
    line.faults = ['drop_before']
    assert store.create('a', b'same') is False


def test_create_without_any_answer_stays_unknown(line: servers.Line):
  store = line.open(deadline=0.3)
  line.always = 'drop_after'
  with pytest.raises(kv.StoreError) as e:
    store.create('a', b'mine')
  assert e.value.transient


@pytest.mark.parametrize('span', [(None, None), (1000, 900_000)])
def test_object_replaced_halfway_through_a_read_is_never_mixed(
  line: servers.Line, span: tuple[int | None, int | None]
):
  """CASES 4.4: the reply breaks off after half of it, and the object is replaced."""
  old, new = b'o' * 1_000_000, b'n' * 1_000_000
  line.direct.write('a', old)
  store = line.open()

  def replace(method: str, path: str) -> None:
    if len(line.seen) == 2:
      line.direct.write('a', new)

  line.before, line.faults = replace, ['cut', 'cut']
  found = store.read('a', *span)
  assert found == new[slice(*span)]
  assert len(line.seen) >= 3


def test_missing_bucket_is_named_when_it_is_opened(running: dict[str, emulator.Server]):
  for kind, make in (('gs', 'gcloud storage buckets create'), ('s3', 'aws s3 mb')):
    with servers.environ(running[kind].env):
      text = f'there is no bucket nowhere: make it with `{make}'
      with pytest.raises(kv.StoreError, match=text):
        kv.open(f'{kind}://nowhere/prefix')


def test_bucket_that_goes_missing_is_no_lost_race(running: dict[str, emulator.Server]):
  for kind in ('gs', 's3'):
    server = running[kind]
    with servers.environ(server.env):
      store = kv.open(server.url(f'brief-{kind}'), deadline=0.5)
    path = 'storage/v1/b/' if kind == 'gs' else ''
    gone = f'{server.address}/{path}brief-{kind}'
    urllib.request.urlopen(urllib.request.Request(gone, method='DELETE')).close()
    with pytest.raises(kv.StoreError, match='bucket'):
      store.create('a', b'1')


def test_barred_bucket_is_refused_when_it_is_opened(line: servers.Line):
  line.always = '403'
  with pytest.raises(kv.StoreError, match='no permission to list'):
    line.open()


def test_server_out_of_reach_is_said_within_the_deadline(line: servers.Line):
  line.address = 'http://127.0.0.1:9'
  started = time.monotonic()
  with pytest.raises(kv.StoreError, match='not reached'):
    line.open(deadline=1.0)
  assert time.monotonic() - started < 10


def test_endpoint_is_the_one_of_the_environment_at_opening(line: servers.Line):
  through = line.open()
  line.direct.write('a', b'1')
  assert line.seen == []
  assert through.read('a') == b'1'
  assert through.create('b', b'2') is True
  assert through.list('') == ['a', 'b']
  assert len(line.seen) >= 3


def test_long_listing_is_read_page_by_page(running: dict[str, emulator.Server]):
  line = servers.Line(running['gs'])
  keys = [f'k/{i:03d}' for i in range(25)]
  for key in keys:
    line.direct.write(key, b'')
  line.direct._inner.page = 10
  assert line.direct.list('k/') == keys


def test_hash_that_the_server_keeps_is_of_what_was_created(
  running: dict[str, emulator.Server],
):
  line, data = servers.Line(running['gs']), b'123456789'
  line.direct.create('a', data)
  line.direct.write('b', data)
  about = []
  for key in 'ab':
    name = f'{line.url.rpartition("/")[2]}%2F{key}'
    url = f'{line.server.address}/storage/v1/b/{servers.BUCKET}/o/{name}'
    with urllib.request.urlopen(url) as reply:
      about.append(json.load(reply))
  # The check value of CRC-32C, 0xe3069283, in base64.
  assert [a['crc32c'] for a in about] == ['4waSgw=='] * 2
  assert [int(a['size']) for a in about] == [9, 9]


def test_half_an_emulator_is_refused(running: dict[str, emulator.Server]):
  env = dict(running['gs'].env)
  del env['TENSORSTORE_GCS_HTTP_URL']
  with servers.environ(env), pytest.raises(ValueError, match='set both'):
    kv.open('gs://swe17')


_OPEN = """
import sys
from swe17.store import kv
try:
  kv.open(sys.argv[1], deadline=2)
except kv.StoreError as e:
  print(e.reason)
"""


@pytest.mark.parametrize(
  'url,want',
  [('gs://swe17/x', 'GOOGLE_APPLICATION_CREDENTIALS'), ('s3://swe17/x', 'not reached')],
)
def test_without_credentials_nothing_hangs(url: str, want: str, tmp_path: pathlib.Path):
  env = {k: v for k, v in os.environ.items() if not k.startswith(('AWS_', 'GOOGLE_'))}
  env |= {'HOME': str(tmp_path), 'CLOUDSDK_CONFIG': str(tmp_path)}
  env |= {'GCE_METADATA_ROOT': '127.0.0.1:1', 'GCE_METADATA_IP': '127.0.0.1:1'}
  if url.startswith('s3'):  # nobody outside shall be asked
    env |= {'AWS_ENDPOINT_URL': 'http://127.0.0.1:9'}
    env |= {'AWS_EC2_METADATA_DISABLED': 'true'}
  started = time.monotonic()
  done = subprocess.run(
    [sys.executable, '-c', _OPEN, url],
    env=env,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert want in done.stdout, done
  assert time.monotonic() - started < 30


@pytest.mark.parametrize(
  'url', ['gs://', 'gs:///a', 'gs://A/b', 'gs://ab', 's3://buc ket', 'gs://buck/a b']
)
def test_url_of_no_bucket_is_refused(url: str):
  with pytest.raises(ValueError, match='store'):
    kv.open(url)
