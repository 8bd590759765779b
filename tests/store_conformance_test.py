"""What every store promises, asked of every store: the same tests for all of them.

gs:// and s3:// are real servers on loopback (tests/servers.py). The fakes are thereby
checked themselves: one that ignores a precondition fails here, not in production.
"""

from collections.abc import Iterator
import concurrent.futures
import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import uuid

import pytest

from swe17.store import faults, kv, retry
from tests import servers

_BIG = (8 << 20) + 1  # bytes: past what clients upload in one request by default
_RACERS = 8
_RACER = """
import sys
from swe17.store import kv
url, name = sys.argv[1:]
store = kv.open(url)
store.write('ready/' + name, b'')
while store.read('go') is None:
  pass
wins = [i for i in range(20) if store.create(f'race/{i:04d}', name.encode() * 500)]
print(*wins)
"""


@pytest.fixture(scope='module')
def gs() -> Iterator[str]:
  with servers.gcs() as (_, url):
    yield url


@pytest.fixture(scope='module')
def s3() -> Iterator[str]:
  with servers.s3() as (_, url):
    yield url


@pytest.fixture(params=['memory', 'file', 'fault', 'retry', 'gs', 's3'])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> kv.Store:
  """An empty store of every kind."""
  kind = request.param
  if kind in ('gs', 's3'):
    return kv.open(f'{request.getfixturevalue(kind)}/some/{uuid.uuid4().hex}')
  if kind == 'file':
    return kv.open(f'file://{tmp_path}/store')
  inner = kv.open('memory://')
  if kind == 'memory':
    return inner
  inner = faults.FaultStore(inner)
  return inner if kind == 'fault' else retry.RetryStore(inner)


def test_what_is_written_is_read(store: kv.Store):
  for data in (b'', b'x', os.urandom(100_000)):
    store.write('a/b.bin', data)
    assert store.read('a/b.bin') == data


def test_absent_key_reads_as_none(store: kv.Store):
  assert store.read('a') is None
  assert store.read('a', 1, 2) is None


def test_folder_is_not_an_object(store: kv.Store):
  store.write('a/b', b'1')
  assert store.read('a') is None


def test_ranges_are_cut_like_slices(store: kv.Store):
  data = bytes(range(10))
  store.write('a', data)
  for start, stop in ((0, 4), (4, 10), (4, None), (None, 3), (3, 3), (8, 20), (12, 20)):
    assert store.read('a', start, stop) == data[start:stop], (start, stop)


def test_range_that_runs_backwards_is_refused(store: kv.Store):
  store.write('a', b'123')
  for start, stop in ((-1, 2), (2, 1)):
    with pytest.raises(ValueError, match='start'):
      store.read('a', start, stop)


def test_create_succeeds_once_and_keeps_the_first(store: kv.Store):
  assert store.create('a/b', b'first') is True
  assert store.create('a/b', b'second') is False
  assert store.read('a/b') == b'first'


def test_create_of_an_empty_object_counts_as_present(store: kv.Store):
  assert store.create('a', b'') is True
  assert store.create('a', b'x') is False
  assert store.read('a') == b''


def test_create_succeeds_again_after_delete(store: kv.Store):
  store.create('a', b'1')
  store.delete('a')
  assert store.read('a') is None
  assert store.create('a', b'2') is True


def test_create_refuses_what_write_wrote(store: kv.Store):
  store.write('a', b'1')
  assert store.create('a', b'2') is False


def test_delete_of_an_absent_key_is_no_error(store: kv.Store):
  store.write('a', b'1')
  store.delete('nothing/here')
  assert store.read('nothing/here') is None
  assert store.list('') == ['a']


def test_list_is_sorted_and_sees_the_last_write(store: kv.Store):
  for key in ('b/2', 'b/10', 'a', 'b/1', 'bb/3', 'c'):
    store.write(key, b'')
  assert store.list('b/') == ['b/1', 'b/10', 'b/2']
  assert store.list('b') == ['b/1', 'b/10', 'b/2', 'bb/3']
  assert store.list('') == sorted(['b/2', 'b/10', 'a', 'b/1', 'bb/3', 'c'])
  store.delete('b/10')
  assert store.list('b/') == ['b/1', 'b/2']
  assert store.list('zzz') == []


@pytest.mark.parametrize(
  'key', ['', '/a', 'a/', 'a//b', '../a', 'a/../b', '.', 'a b', 'é', 'a.__lock', '-a']
)
def test_unsafe_key_is_refused_by_every_operation(store: kv.Store, key: str):
  for call in (
    lambda: store.read(key),
    lambda: store.write(key, b''),
    lambda: store.create(key, b''),
    lambda: store.delete(key),
  ):
    with pytest.raises(ValueError, match='store key'):
      call()


def test_big_object_is_read_whole_and_in_parts(store: kv.Store):
  data = os.urandom(_BIG)
  store.write('big', data)
  found = store.read('big')
  assert found is not None
  assert hashlib.sha256(found).digest() == hashlib.sha256(data).digest()
  assert store.read('big', _BIG - 5, _BIG) == data[-5:]
  assert store.read('big', 4 << 20, 5 << 20) == data[4 << 20 : 5 << 20]


def test_big_object_is_created_once(store: kv.Store):
  data = os.urandom(_BIG)
  assert store.create('big', data) is True
  assert store.create('big', b'another' * (2 << 20)) is False
  assert store.read('big') == data


def test_a_key_is_no_prefix_of_another_objects_key(store: kv.Store):
  store.write('a/1', b'1')
  store.write('a/10', b'10')
  store.delete('a/1')
  assert store.read('a/10') == b'10'
  assert store.list('a/1') == ['a/10']


def test_strange_names_come_back_as_they_went(store: kv.Store):
  keys = sorted(['A+b=c', 'x/y.z/w-1', 'x/_', 'n' * 200])
  for key in keys:
    assert store.create(key, key.encode()) is True
  assert store.list('') == keys
  assert [store.read(key) for key in keys] == [key.encode() for key in keys]


def test_of_eight_racing_threads_one_creates(store: kv.Store):
  gate = threading.Barrier(_RACERS)

  def racer(name: int) -> bool:
    gate.wait()
    return store.create('race', b'%d' % name * 99)

  for _ in range(5):
    with concurrent.futures.ThreadPoolExecutor(_RACERS) as pool:
      wins = list(pool.map(racer, range(_RACERS)))
    assert sum(wins) == 1
    assert store.read('race') == b'%d' % wins.index(True) * 99
    store.delete('race')


@pytest.mark.parametrize('kind', ['file', 'gs', 's3'])
def test_of_eight_racing_processes_one_creates_each_key(
  kind: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
):
  url = f'file://{tmp_path}/store' if kind == 'file' else request.getfixturevalue(kind)
  url = f'{url}/{uuid.uuid4().hex}'
  store = kv.open(url)
  names = 'abcdefgh'
  racers = [
    subprocess.Popen(
      [sys.executable, '-c', _RACER, url, name], stdout=subprocess.PIPE, text=True
    )
    for name in names
  ]
  try:
    while len(store.list('ready/')) < _RACERS:
      assert all(racer.poll() is None for racer in racers)
    store.write('go', b'')
    said = [racer.communicate(timeout=60)[0] for racer in racers]
  finally:
    for racer in racers:
      racer.kill()
      racer.wait()
  wins = [[int(i) for i in text.split()] for text in said]
  assert sorted(i for won in wins for i in won) == list(range(20))
  for name, won in zip(names, wins, strict=True):
    assert all(store.read(f'race/{i:04d}') == name.encode() * 500 for i in won)


@pytest.mark.parametrize('kind', ['gs', 's3'])
def test_two_prefixes_of_a_bucket_are_two_stores(
  kind: str, request: pytest.FixtureRequest
):
  url = f'{request.getfixturevalue(kind)}/{uuid.uuid4().hex}'
  one, other = kv.open(f'{url}/one'), kv.open(f'{url}/one-more/')
  one.write('a', b'1')
  other.write('a', b'2')
  assert (one.read('a'), other.read('a')) == (b'1', b'2')
  assert (one.list(''), other.list('')) == (['a'], ['a'])
  assert kv.open(url).list('') == ['one-more/a', 'one/a']
