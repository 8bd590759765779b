"""Servers on loopback: they start, keep what they should, and leave nobody behind."""

import pathlib
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from launch import emulator
from swe17.store import kv
from tests import servers


def test_objects_in_a_folder_outlive_the_server(tmp_path: pathlib.Path):
  for turn in range(2):
    with servers.gcs(tmp_path) as (_, url):
      store = kv.open(f'{url}/run')
      assert store.create('a/b', b'1') is (turn == 0)
      assert store.read('a/b') == b'1'


def test_objects_in_memory_do_not():
  for _ in range(2):
    with servers.gcs() as (_, url):
      assert kv.open(url).create('a', b'1') is True


def test_bucket_may_be_asked_for_again():
  with emulator.gcs() as server:
    assert server.url('swe17') == server.url('swe17') == 'gs://swe17'


def test_two_servers_are_two_worlds():
  with servers.gcs() as (first, url):
    store = kv.open(url)
    with servers.gcs() as (second, _):
      kv.open(url).write('a', b'2')
      assert first['STORAGE_EMULATOR_HOST'] != second['STORAGE_EMULATOR_HOST']
      assert store.read('a') is None  # it stays with the server it was opened on


def test_port_may_be_chosen_and_a_taken_one_is_refused():
  with emulator.gcs() as server:
    port = int(server.address.rpartition(':')[2])
    with pytest.raises(RuntimeError, match='is taken'):
      emulator.gcs(port=port)
  with emulator.gcs(port=port) as server:
    assert server.address.endswith(f':{port}')


def test_server_ends_with_the_process_that_started_it():
  script = (
    'import time; from launch import emulator\n'
    'print(emulator.gcs().address, flush=True)\n'
    'time.sleep(60)\n'
  )
  starter = subprocess.Popen(
    [sys.executable, '-c', script], stdout=subprocess.PIPE, text=True
  )
  assert starter.stdout is not None
  address = starter.stdout.readline().strip()
  urllib.request.urlopen(f'{address}/storage/v1/b').close()
  starter.kill()  # it has no chance to clean up
  starter.wait()
  until = time.monotonic() + 20
  while time.monotonic() < until:
    try:
      urllib.request.urlopen(f'{address}/storage/v1/b', timeout=5).close()
    except (urllib.error.URLError, ConnectionError):
      return
    time.sleep(0.05)
  pytest.fail('the server is still there')
