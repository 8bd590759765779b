"""The sync bench: whole and small, over the emulator and slow lines; its verdict."""

import json

import numpy as np
import pytest

from experiments.bench import sync
from swe17.store import kv


def test_the_quick_bench_runs_to_its_line_of_json(capsys):
  code = sync.main(['--quick'])
  out = capsys.readouterr().out
  found = json.loads(out.splitlines()[-1])
  assert found['tokens_lost'] == 0
  assert found['store_reads'] == {'1': 2, '2': 2, '4': 2}  # a manifest and an object
  assert found['pause_share'] > 0 and found['seconds_delta'] > 0.1
  assert found['seconds_full'] > 0.1
  # How long a pause is, a small machine under test cannot promise.
  assert code == (1 if found['pause_share'] >= 0.02 else 0)
  for version, kind in ((0, 'full'), (1, 'delta'), (2, 'full')):
    assert f'version {version} {kind}' in out
  assert out.count('; 0 by others than the controller') == 3


def test_the_model_has_the_size_it_is_said_to_have():
  shapes = sync.Size().shapes
  assert sum(int(np.prod(shape)) for shape in shapes.values()) == 134_515_008


def test_a_step_changes_as_many_weights_as_was_measured_elsewhere():
  learner = sync.Learner(sync.QUICK, kv.open('memory://'))
  learner.publish(learner.step())
  done = learner.publish(learner.step())
  # 2.3 % for a uniform update of up to 1e-6 on N(0, .02).
  assert not done.full and done.changed_share == pytest.approx(0.023, rel=0.05)


GOOD = {'pause_share': 0.01, 'tokens_lost': 0, 'store_reads': {'1': 4, '4': 4}}


@pytest.mark.parametrize(
  ('change', 'want'),
  [
    ({}, []),
    ({'pause_share': 0.02}, ['the pause is 2.00% of the interval, want < 2 %']),
    ({'tokens_lost': 1}, ['1 tokens were lost']),
    ({'store_reads': {'1': 4, '4': 5}}, ['reads of the store are not flat']),
  ],
)
def test_the_verdict_names_what_is_wrong(change, want):
  said = sync.verdict({**GOOD, **change})
  assert len(said) == len(want)
  assert all(text.startswith(start) for text, start in zip(said, want, strict=True))


def test_bad_flags_are_refused(capsys):
  for argv in (['--versions=2'], ['--interval=0'], ['--fanout=0'], ['--what']):
    assert sync.main(argv) == 2
    assert 'error: ' in capsys.readouterr().err
