"""The soak, short: everything in it runs, it counts what it should, and it can fail."""

import collections
import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from experiments import program
from experiments.bench import sync_soak
from experiments.bench import sync_soak_parts as parts
from swe17.store import kv

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_a_short_soak_serves_no_wrong_byte_through_hundreds_of_faults():
  command = [sys.executable, '-m', 'experiments.bench.sync_soak', '--versions=40']
  done = subprocess.run(
    command, check=False, cwd=ROOT, text=True, capture_output=True, timeout=300
  )
  found = json.loads(done.stdout.splitlines()[-1])
  # Memory and disk need a longer run than this to be judged.
  broken = [text for text in found['broken'] if 'grew' not in text]
  assert broken == [], done.stderr[-2000:]
  assert found['versions'] == 40 and found['wrong_bytes_served'] == 0
  assert found['faults'] > 300 and found['served'] > 30
  assert set(found['injected']) == {k for ks in parts._KINDS.values() for k in ks}
  assert found['publisher_ends']['planned'] == 6 and found['follower_kills'] >= 9


@pytest.fixture
def soak() -> types.SimpleNamespace:
  program.parse(['sync_soak', '--versions=40'], sync_soak.FLAGS)
  rows = [{'objects': 10.0, 'bytes': 1e6, 'rss': 80.0} for _ in range(40)]
  return types.SimpleNamespace(
    record={v: f'sha{v}' for v in range(500)},
    rows=rows,
    fulls=4,
    kills=0,
    ends=collections.Counter(),
    injected=collections.Counter(flip=3),
    ended_on=lambda: {'napping': sync_soak._VERSIONS.value - 1},
  )


def lines(**changes) -> list[dict]:
  return [
    {
      'process': f'{role}-1',
      'version': version,
      'sha': f'sha{version}',
      'bytes': 10,
      'rss': 60.0,
      'torn': 0,
      'injected': {'flip': version},
      'faults': {'sha256': 1},
      **(changes if version == 17 else {}),
    }
    for role in ('napping', 'late')
    for version in range(20)
  ]


def test_a_sound_soak_breaks_nothing(soak):
  found = sync_soak.report(soak, lines(), 1.0)
  assert found['broken'] == [] and found['wrong_bytes_served'] == 0
  assert found['faults'] == 3 + 2 * 19
  assert found['served'] == 40 and found['bytes_down'] == 400


def test_other_bytes_growth_and_stragglers_are_named(soak):
  wrong = sync_soak.report(soak, lines(sha='another'), 1.0)
  assert wrong['wrong_bytes_served'] == 2 and 'other bytes' in wrong['broken'][0]
  for i in range(30, 40):
    soak.rows[i] = {'objects': 14.0, 'bytes': 1e6, 'rss': 95.0}
  soak.ended_on = lambda: {'late': 3}
  said = ' '.join(sync_soak.report(soak, lines(), 1.0)['broken'])
  assert 'objects in the store grew from 10 to 14' in said
  assert 'memory of publisher grew from 80.0 to 95.0' in said
  assert 'late ended on version 3' in said
  assert 'bytes in the store' not in said


def test_the_record_shares_no_code_with_what_is_tested():
  a = {'w': np.arange(6, dtype=np.float32).reshape(2, 3)}
  assert parts.sha(a) == parts.sha({'w': a['w'].copy()})
  others = [
    {'v': a['w']},
    {'w': a['w'].reshape(3, 2)},
    {'w': a['w'].astype(np.float64)},
    {'w': a['w'] + 1},
    {},
  ]
  assert len({parts.sha(x) for x in [a, *others]}) == 6
  steps = parts.Weights(0)
  first, second = steps.step(), steps.step()
  changed = sum(int((first[n] != second[n]).sum()) for n in first)
  total = sum(x.size for x in first.values())
  assert 0.005 < changed / total < 0.05  # as at a learning rate of 1e-6


def test_a_trimmed_store_is_bounded_and_goes_on_failing():
  client = parts.Client('memory://', 's', 2, writes=True)
  for version in range(3 * parts._REMEMBERED):
    for kind in ('write', 'read'):
      try:
        if kind == 'write':
          client.store.write(f'weights/data/{version}', b'abc')
        else:
          client.store.read(f'weights/data/{version}')
      except kv.StoreError:
        continue
    client.store.trim()
  history = client.store._history.before
  assert len(history) <= parts._REMEMBERED and client.store.log == []
  assert f'weights/data/{3 * parts._REMEMBERED - 1}' in history
  assert client.injected.total() == 3 * parts._REMEMBERED


def test_memory_is_that_of_this_process():
  assert 10 < parts.memory() < 10_000
  assert os.path.exists('/proc/self/statm')
