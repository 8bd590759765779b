"""URLs, files and errors of the store. What all kinds promise: conformance test."""

import os
import pathlib
import subprocess
import sys

import pytest

from swe17 import config
from swe17.store import kv, reasons


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


@pytest.mark.parametrize(
  'url,good',
  [
    ('file:///a/b', True),
    ('gs://bucket', True),
    ('gs://my-bucket.x/run/1', True),
    ('s3://bucket/run', True),
    ('gs://', False),
    ('gs://B/x', False),
    ('s3:bucket', False),
    ('memory://', False),
    ('file://x', False),
  ],
)
def test_settings_take_the_urls_that_a_run_can_use(url: str, good: bool):
  if good:
    assert config.Config(store=url).store == url
    assert url.startswith('file') or kv.bucket_of(url)
  else:
    with pytest.raises(ValueError, match='store: got'):
      config.Config(store=url)


def test_url_of_a_bucket_is_taken_apart():
  assert kv.bucket_of('gs://my-bucket/a/b/') == ('gs', 'my-bucket', 'a/b')
  assert kv.bucket_of('s3://bucket') == ('s3', 'bucket', '')
  with pytest.raises(ValueError, match='store key'):
    kv.bucket_of('gs://bucket/a//b')


def test_a_file_store_brings_no_cloud_library():
  script = (
    'import sys; from swe17.store import kv; kv.open(sys.argv[1])\n'
    'print([m for m in ("google.auth", "google.cloud.storage", "requests")'
    ' if m in sys.modules])'
  )
  done = subprocess.run(
    [sys.executable, '-c', script, 'file:///tmp'],
    check=True,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.stdout == '[]\n'


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
  assert reason in reasons.of_system(text)
  assert text in reasons.of_system(text)


def test_store_used_after_a_fork_is_refused(monkeypatch: pytest.MonkeyPatch):
  store = kv.open('memory://')
  monkeypatch.setattr(os, 'getpid', lambda: -1)
  with pytest.raises(RuntimeError, match='after a fork'):
    store.read('a')
