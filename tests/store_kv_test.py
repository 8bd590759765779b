"""The store: what every driver promises, races for one key, and errors in words."""

import concurrent.futures
import os
import pathlib
import subprocess
import sys
import threading

import pytest

from swe17.store import faults, kv

_RACER = """
import sys
from swe17.store import kv
url, name = sys.argv[1:]
store = kv.open(url)
store.write('ready/' + name, b'')
while store.read('go') is None:
  pass
wins = [i for i in range(150) if store.create(f'race/{i:04d}', name.encode() * 500)]
print(*wins)
"""


@pytest.fixture(params=['file', 'memory', 'fault'])
def store(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> kv.Store:
  """Every kind of store: all of them must pass the same conformance tests."""
  if request.param == 'file':
    return kv.open(f'file://{tmp_path}/store')
  inner = kv.open('memory://')
  return inner if request.param == 'memory' else faults.FaultStore(inner)


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


def test_of_racing_threads_one_creates_each_key(store: kv.Store):
  gate = threading.Barrier(6)

  def racer(name: int) -> list[int]:
    gate.wait()
    return [i for i in range(60) if store.create(f'race/{i}', b'%d' % name * 99)]

  with concurrent.futures.ThreadPoolExecutor(6) as pool:
    wins = list(pool.map(racer, range(6)))
  assert sorted(i for won in wins for i in won) == list(range(60))
  for name, won in enumerate(wins):
    assert all(store.read(f'race/{i}') == b'%d' % name * 99 for i in won)


def test_of_two_racing_processes_one_creates_each_key(tmp_path: pathlib.Path):
  url = f'file://{tmp_path}/store'
  store = kv.open(url)
  racers = [
    subprocess.Popen(
      [sys.executable, '-c', _RACER, url, name], stdout=subprocess.PIPE, text=True
    )
    for name in 'ab'
  ]
  try:
    while len(store.list('ready/')) < 2:
      assert all(racer.poll() is None for racer in racers)
    store.write('go', b'')
    wins = [
      [int(i) for i in racer.communicate(timeout=60)[0].split()] for racer in racers
    ]
  finally:
    for racer in racers:
      racer.kill()
  assert sorted(wins[0] + wins[1]) == list(range(150))
  for name, won in zip(b'ab', wins, strict=True):
    assert all(store.read(f'race/{i:04d}') == bytes([name]) * 500 for i in won)


def test_half_an_object_left_by_a_killed_writer_is_never_seen(tmp_path: pathlib.Path):
  script = (
    'import os, sys\n'
    'from swe17.store import kv\n'
    'store = kv.open(sys.argv[1])\n'
    'os.fsync = lambda handle: os._exit(9)\n'  # dies with the bytes in the file
    'store.create("a", b"half of an object, longer than the next")\n'
  )
  url = f'file://{tmp_path}'
  done = subprocess.run([sys.executable, '-c', script, url], check=False, timeout=60)
  assert done.returncode == 9
  assert len(list(tmp_path.iterdir())) == 1
  # The name that tensorstore's own writer would have left, and would re-use uncut.
  (tmp_path / 'a.__lock').write_bytes(b'half of an object, longer than the next')
  store = kv.open(url)
  assert store.list('') == []
  assert store.read('a') is None
  assert store.create('a', b'whole') is True
  assert store.read('a') == b'whole'
  store.write('a', b'new')
  assert store.read('a') == b'new'


def test_no_temporary_file_is_left_behind(tmp_path: pathlib.Path):
  store = kv.open(f'file://{tmp_path}')
  store.write('a', b'1')
  store.write('a', b'2')
  store.create('a', b'3')
  store.create('b', b'3')
  with pytest.raises(kv.StoreError):
    store.write('a/b', b'1')
  assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'b']


def test_folder_in_the_place_of_an_object_is_an_error(tmp_path: pathlib.Path):
  store = kv.open(f'file://{tmp_path}')
  store.write('a/b', b'1')
  for call in (store.write, store.create):
    with pytest.raises(kv.StoreError, match='a folder is where the object should be'):
      call('a', b'2')


def test_file_store_is_shared_by_url_and_memory_store_is_not(tmp_path: pathlib.Path):
  kv.open(f'file://{tmp_path}/s').write('a', b'1')
  assert kv.open(f'file://{tmp_path}/s/').read('a') == b'1'
  kv.open('memory://').write('a', b'1')
  assert kv.open('memory://').read('a') is None


@pytest.mark.parametrize('url', ['', '/tmp/x', 'file://x', 'http://x', 'memory://a'])
def test_unknown_url_is_refused(url: str):
  with pytest.raises(ValueError, match='want file:///'):
    kv.open(url)


def test_folder_that_cannot_be_made_says_why(tmp_path: pathlib.Path):
  (tmp_path / 'taken').write_bytes(b'')
  with pytest.raises(kv.StoreError, match='a file is where a folder should be'):
    kv.open(f'file://{tmp_path}/taken/store')


def test_error_names_url_key_and_reason(tmp_path: pathlib.Path):
  store = kv.open(f'file://{tmp_path}')
  store.write('a', b'')
  with pytest.raises(kv.StoreError) as e:
    store.write('a/b', b'')
  assert e.value.key == 'a/b'
  assert str(e.value).startswith(f'store file://{tmp_path}: a/b: a file is where a')


def test_write_that_does_not_fit_says_so_and_leaves_the_old(tmp_path: pathlib.Path):
  script = (
    'import resource, signal, sys; from swe17.store import kv\n'
    'store = kv.open(sys.argv[1]); store.write("a", b"old")\n'
    'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
    'resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n'
    'try: store.write("a", b"x" * 5000)\n'
    'except kv.StoreError as e: print(e.reason.split(" [")[0])\n'
    'print(store.read("a").decode(), store.list(""))\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', script, f'file://{tmp_path}'],
    check=False,
    capture_output=True,
    text=True,
    timeout=60,
  )
  want = "the object exceeds the file size limit\nold ['a']\n"
  assert done.stdout == want, done.stderr


@pytest.mark.parametrize(
  'code,reason', [(28, 'the disk is full'), (13, 'no permission'), (30, 'read-only')]
)
def test_system_errors_are_put_in_words(code: int, reason: str):
  text = f"RESOURCE_EXHAUSTED: Failed to write [os_error_code='{code}']"
  assert reason in kv._reason(text)
  assert text in kv._reason(text)


def test_store_used_after_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch):
  store = kv.open('memory://')
  monkeypatch.setattr(os, 'getpid', lambda: -1)
  with pytest.raises(RuntimeError, match='after a fork'):
    store.read('a')
