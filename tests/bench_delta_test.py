"""The delta bench: its bound, its blocks, its two sources of weights, its last line."""

import contextlib
import dataclasses
import io
import json
import pathlib

import ml_dtypes
import numpy as np
import pytest

from experiments.bench import delta, delta_weights
from swe17 import config
from swe17.store import kv
from swe17.sync import codec, publisher

_BF16 = np.dtype(ml_dtypes.bfloat16)
_TINY = config.Config(
  model=config.Model(
    layers=1, width=32, ffn=32, heads=2, kv_heads=2, head_dim=16, ngram=1
  ),
  optim=config.Optim(ns_steps=1),
  batch=config.Batch(row_length=448, micro_rows=1),
)


def test_bound_is_that_of_positions_plus_that_of_distances():
  tally = delta.Tally()
  tally.moved[[0, 1, 2, 7]] = 900, 50, 25, 25

  def entropy(*counts: int) -> float:
    share = np.array(counts) / sum(counts)
    return float(-(share * np.log2(share)).sum())

  bits = 1000 * entropy(900, 100) + 100 * entropy(50, 25, 25)
  assert tally.bound == pytest.approx(bits / 8)
  assert tally.density == pytest.approx(0.1)


def test_blocks_do_not_depend_on_how_many_follow():
  size = 100_000
  few = list(delta_weights.synthetic(size, size))
  more = list(delta_weights.synthetic(size + 7, size))
  for a, b in zip(few[0], more[0], strict=True):
    assert np.array_equal(a, b)
  assert [master.size for master, _ in more] == [size, 7]
  master, direction = more[0]
  assert np.std(master) == pytest.approx(0.02, rel=0.01)
  assert -1 <= direction.min() < -0.99 < 0.99 < direction.max() < 1
  assert abs(float(direction.mean())) < 0.01


def test_codec_that_gives_other_bytes_stops_the_bench(monkeypatch: pytest.MonkeyPatch):
  base = codec.raw(np.ones(64, _BF16))
  block = codec.raw((np.ones(64) * 1.01).astype(_BF16))
  delta.measure(block, base, delta.Tally(), 0)
  monkeypatch.setattr(delta.ulp, 'decode', lambda frame, base, out, dtype: None)
  with pytest.raises(RuntimeError, match='ulp: decoding'):
    delta.measure(block, base, delta.Tally(), 0)


def _run(*argv: str) -> tuple[int, list[str]]:
  out = io.StringIO()
  with contextlib.redirect_stdout(out):
    code = delta.main(argv)
  return code, out.getvalue().splitlines()


def test_real_steps_and_a_stored_run_are_measured_alike(tmp_path: pathlib.Path):
  versions = list(delta_weights.learned(_TINY, 3))
  want = delta.measure_versions(iter(versions))
  assert want
  assert all(0 < tally.stored['ulp'] < tally.full for tally in want)
  pub = publisher.Publisher(
    kv.open(f'file://{tmp_path}/store'),
    dataclasses.replace(config.Sync(), full_every=2),
    attempt='a',
  )
  for version, tensors in enumerate(versions):
    pub.publish(version, tensors, step=version, plan={})
  code, lines = _run(f'--run={tmp_path}', '--params=3e5')
  assert code in (0, 1)  # rates are the machine's
  last = json.loads(lines[-1])
  assert [row['density'] for row in last['real']] == [
    round(tally.density, 4) for tally in want
  ]
  assert [row['share_of_full'] for row in last['real']] == [
    round(tally.stored['ulp'] / tally.full, 5) for tally in want
  ]
  assert last['ulp_vs_xor'] < 0.55
  assert last['ulp_ctx_share_of_full'] < last['share_of_full']
  assert 1 <= last['ulp_vs_bound'] < 1.15
  assert last['share_of_full'] < 0.015
  assert last['density'] == pytest.approx(0.023, rel=0.05)
  assert {'encode_vs_xor', 'apply_gb_per_s_core', 'params'} <= last.keys()


def test_what_is_missed_is_said():
  good = {
    'ulp_vs_xor': 0.45,
    'ulp_vs_bound': 1.02,
    'encode_vs_xor': 1.5,
    'apply_gb_per_s_core': 4.0,
    'share_of_full': 0.013,
  }
  assert delta.verdict(good) == []
  for name, bad in (
    ('ulp_vs_xor', 0.56),
    ('ulp_vs_bound', 1.16),
    ('encode_vs_xor', 0.99),
    ('apply_gb_per_s_core', 0.9),
    ('share_of_full', 0.016),
  ):
    (sentence,) = delta.verdict({**good, name: bad})
    assert sentence.startswith(f'{name}: got {bad}')


def test_run_that_is_not_there_is_refused_in_words(
  tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
):
  assert delta.main([f'--run={tmp_path}/none']) == 2
  assert 'want a folder that holds store/' in capsys.readouterr().err
  assert delta.main(['--params=0']) == 2
