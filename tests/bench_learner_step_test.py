"""The recorded batch's bench: what is recorded, counted and given to torch."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.bench import learner_step_ours as ours
from experiments.bench import learner_step_recorded as recorded
from swe17 import config
from swe17.learner import batching
from tests import fixtures


def groups(count: int = 2) -> list:
  return [fixtures.group(i, (1.0, 0.0, 0.0)) for i in range(count)]


def test_recorded_groups_come_back_as_they_were():
  made = groups(3)
  data = recorded.pack(made)
  got = recorded.unpack(data)
  assert [g.id for g in got] == [g.id for g in made]
  assert recorded.pack(got) == data
  with pytest.raises(ValueError, match=f'got {len(data) - 1} bytes, want {len(data)}'):
    recorded.unpack(data[:-1])


def test_groups_without_signal_are_no_batch(tmp_path, monkeypatch):
  dull = fixtures.group(0, (1.0, 1.0))
  file = tmp_path / 'groups.bin'
  file.write_bytes(recorded.pack([dull, *groups(3)[1:]]))
  monkeypatch.setattr(recorded, 'RECORDED', file)
  cfg = dataclasses.replace(config.Config(), batch=config.Batch(groups=2))
  assert [g.start for g in recorded.recorded('', cfg)] == [1, 2]
  more = dataclasses.replace(cfg, batch=config.Batch(groups=3))
  with pytest.raises(ValueError, match='got 2 groups with signal of 3, want'):
    recorded.recorded('', more)


def test_flops_count_a_shared_prompt_once_and_pairs_that_are_seen():
  rng = np.random.default_rng(0)
  prompt = rng.integers(0, fixtures.VOCAB, 20).astype(np.int32)
  made = []
  for i, drawn in enumerate((4, 7)):
    s = fixtures.segment(rng, (20, drawn))
    s = dataclasses.replace(s, token_T=np.append(prompt, s.token_T[20:]))
    made.append(batching.Item(s, 1.0, str(i)))
  cfg = config.Batch(row_length=64, micro_rows=1)
  batch = batching.fill(made, micro=1, cfg=cfg, K=4, denominator=1.0)
  model = fixtures.MODEL
  need = ours.flops(model, batch)
  # A prefix of 19, and tails of 4 and 7 that see it.
  layer = 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 96
  assert need['trunk'] == 6 * (19 + 4 + 7) * model.layers * layer
  pairs = 19 * 20 / 2 + 4 * 5 / 2 + 4 * 19 + 7 * 8 / 2 + 7 * 19
  assert need['attention'] == 12 * pairs * 4 * 16 * model.layers
  sizes = np.concatenate([i.segment.kept.size_T[20:] for i in made])
  assert need['head'] == 6 * sizes[sizes > 1].sum() * 64


def test_both_sides_are_given_the_same_rows(tmp_path):
  cfg = config.Config(sampler=config.Sampler(top_k=8))
  cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, source=__file__))
  recorded._write(tmp_path, cfg, groups(), recorded.Options())
  options = json.loads((tmp_path / 'options.json').read_text())
  batch = ours.fill(cfg, tmp_path)
  assert options['denominator'] == batch.denominator > 0
  with np.load(tmp_path / 'rows.npz') as arrays:
    rows = [{k.split('/')[1]: arrays[k] for k in arrays if k.startswith(f'{i}/')}
            for i in range(6)]  # fmt: skip
  assert sum(row['mask'].sum() for row in rows) == batch.mask_MBT.sum()
  found = np.asarray(batch.segment_MBT).reshape(-1), batch.token_MBT.reshape(-1)
  flat = {k: np.asarray(getattr(batch, f'{k}_MBT')).reshape(-1) for k in (
    'mask', 'mu_logp', 'adv', 'temperature')}  # fmt: skip
  for row in rows:
    token = row['token'][:-1]
    starts = range(len(found[1]))
    at = next(i for i in starts if np.array_equal(found[1][i:][: token.size], token))
    for name, values in flat.items():
      np.testing.assert_array_equal(values[at : at + len(token)], row[name])
