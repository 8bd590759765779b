"""The check of a store before a run: what passes, what fails, and the exit code."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from launch import emulator, preflight
from swe17.store import bucket, faults, kv
from tests import servers


def verdicts(text: str) -> dict[str, str]:
  found = re.findall(r'^(PASS|WARN|FAIL)  (.{14}) ', text, re.MULTILINE)
  return {name.strip(): verdict for verdict, name in found}


@pytest.mark.parametrize('kind', ['file', 'gs', 's3'])
def test_sound_store_passes_every_check_and_is_left_clean(
  kind: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
  def check(url: str) -> None:
    store = kv.open(url)
    store.write('weights/mine', b'1')
    assert preflight.main([f'--store={url}', '--mib=1']) == 0
    assert store.list('') == ['weights/mine']

  if kind == 'file':
    check(f'file://{tmp_path}/store')
  elif kind == 'gs':
    with servers.gcs() as (_, url):
      check(f'{url}/run')
  else:
    with servers.s3() as (_, url):
      check(f'{url}/run')
  said = capsys.readouterr().out
  found = verdicts(said)
  assert set(found.values()) == {'PASS'}
  assert len(found) >= 14
  assert re.search(r'1 MiB: up [\d.]+ MB/s, down [\d.]+ MB/s', said)
  assert re.search(r'median [\d.]+ ms', said)
  assert 'a run can use this store' in said


def test_missing_bucket_fails_and_says_how_to_make_it(
  capsys: pytest.CaptureFixture[str],
):
  with servers.gcs():
    assert preflight.main(['--store=gs://nowhere/run']) == 1
  said = capsys.readouterr().out
  assert 'FAIL  open' in said and 'gcloud storage buckets create gs://nowhere' in said


def test_read_only_folder_fails_where_it_writes(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
  # Root may write wherever the file system lets it: here is one that does not.
  folder = pathlib.Path('/sys/kernel')
  if os.geteuid() != 0:
    folder = tmp_path
    folder.chmod(0o555)
  assert preflight.main([f'--store=file://{folder}']) == 1
  said = capsys.readouterr().out
  found = verdicts(said)
  assert found['create'] == found['overwrite'] == found['race of 8'] == 'FAIL'
  assert re.search('no permission|read-only', said)


@pytest.mark.parametrize('url', ['x', 'gs://', 'http://a/b', 'memory://', 'gs://U/x'])
def test_bad_url_is_exit_code_2(url: str, capsys: pytest.CaptureFixture[str]):
  assert preflight.main([f'--store={url}']) == 2
  said = capsys.readouterr()
  assert url in said.err and not said.out


def test_bad_numbers_are_exit_code_2(tmp_path: pathlib.Path):
  for flag in ('--mib=0', '--deadline=-1'):
    assert preflight.main([f'--store=file://{tmp_path}', flag]) == 2


class Careless(faults.FaultStore):
  """A store that ignores the precondition, as some servers do."""

  def create(self, key: str, data: bytes) -> bool:
    self.write(key, data)
    return True


def test_store_that_ignores_the_precondition_fails():
  flight = preflight.Preflight(Careless(kv.open('memory://')), 1 << 20)
  assert flight.second_create().verdict == 'FAIL'
  assert flight.race().verdict == 'FAIL'
  assert '8 of 8' in flight.race().text


@pytest.mark.parametrize(
  'check,kind,index',
  [
    ('read', 'flip', 1),
    ('ranged_read', 'truncate', 3),
    ('listing', 'stale', 3),
    ('overwrite', 'stale', 2),
    ('throughput', 'truncate', 0),
  ],
)
def test_each_fault_fails_its_check(check: str, kind: str, index: int):
  rule = faults.at({index: faults.Fault(kind)})
  flight = preflight.Preflight(faults.FaultStore(kv.open('memory://'), rule), 1 << 20)
  assert getattr(flight, check)().verdict == 'FAIL'
  sound = preflight.Preflight(faults.FaultStore(kv.open('memory://')), 1 << 20)
  assert getattr(sound, check)().verdict == 'PASS'


def test_no_permission_names_what_may_not_be_done(capsys: pytest.CaptureFixture[str]):
  def rule(method: str, path: str) -> str:
    return '403' if method == 'DELETE' else ''

  with emulator.gcs() as server, servers.gate(server.address, rule) as address:
    server.url('swe17')
    with servers.environ(emulator.gcs_env(address)):
      assert preflight.main(['--store=gs://swe17', '--mib=1']) == 1
  said = capsys.readouterr().out
  found = verdicts(said)
  assert {name for name, v in found.items() if v == 'FAIL'} == {'delete', 'clean-up'}
  assert 'no permission to delete: the account needs storage.objects.delete' in said


def test_bucket_that_keeps_old_versions_is_a_warning(
  capsys: pytest.CaptureFixture[str],
):
  import urllib.request

  with servers.gcs() as (env, url):
    change = urllib.request.Request(
      f'{env["STORAGE_EMULATOR_HOST"]}/storage/v1/b/swe17',
      b'{"versioning": {"enabled": true}}',
      {'Content-Type': 'application/json'},
      method='PATCH',
    )
    urllib.request.urlopen(change).close()
    assert preflight.main([f'--store={url}', '--mib=1']) == 0
  assert verdicts(capsys.readouterr().out)['versioning'] == 'WARN'


DELETE = {'type': 'Delete'}


@pytest.mark.parametrize(
  'rule,want',
  [
    ({'action': DELETE, 'condition': {'age': 1}}, True),
    ({'action': DELETE, 'condition': {'age': 90}}, False),
    ({'action': DELETE, 'condition': {}}, True),
    ({'action': DELETE, 'condition': {'createdBefore': '2020-01-01'}}, False),
    ({'action': DELETE, 'condition': {'age': 1, 'isLive': False}}, None),
    ({'action': DELETE, 'condition': {'numNewerVersions': 1}}, None),
    ({'action': DELETE, 'condition': {'age': 1, 'matchesPrefix': ['logs/']}}, None),
    ({'action': DELETE, 'condition': {'age': 1, 'matchesPrefix': ['run/gr']}}, True),
    ({'action': DELETE, 'condition': {'age': 1, 'matchesPrefix': ['r']}}, True),
    ({'action': DELETE, 'condition': {'age': 1, 'matchesSuffix': ['.tmp']}}, None),
    ({'action': DELETE, 'condition': {'age': 1, 'matchesSuffix': ['.bin']}}, True),
    ({'action': {'type': 'AbortIncompleteMultipartUpload'}, 'condition': {}}, None),
    ({'action': {'type': 'SetStorageClass'}, 'condition': {'age': 9}}, False),
  ],
)
def test_lifecycle_rule_is_judged_by_what_it_does_to_a_run(rule, want):
  found = [deadly for deadly, _ in bucket.threats([rule], 'run/')]
  assert found == ([] if want is None else [want])


def test_rule_for_others_keys_in_the_root_of_a_bucket_is_none_of_ours():
  rule = {'action': DELETE, 'condition': {'age': 1, 'matchesPrefix': ['logs/']}}
  assert bucket.threats([rule], '') == []
  rule['condition']['matchesPrefix'] = ['logs/', 'weights/data/']
  assert len(bucket.threats([rule], '')) == 1


def test_help_teaches():
  done = subprocess.run(
    [sys.executable, '-m', 'launch.preflight', '--help'],
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 0
  for word in ('gs://', 'Exit code', 'FAIL', '--deadline', 'AWS_ACCESS_KEY_ID'):
    assert word in done.stdout


def test_clock_of_the_server_is_read_off_its_answers():
  with servers.gcs() as (_, url):
    ahead = bucket.skew(url)
  assert ahead is not None and abs(ahead) < 5
