"""metrics.jsonl keeps its promises: declared keys, steps by one, no NaN, resume."""

import json
import logging
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from swe17.metrics import records


def _steps(run_dir) -> list[int]:
  return [row['step'] for row in records.read(str(run_dir))]


def _write(run_dir, steps, **kwargs) -> None:
  with records.Writer(str(run_dir), **kwargs) as writer:
    for step in steps:
      writer.write({'step': step, 'loss': step / 10})


def _events(run_dir) -> list[event_pb2.Event]:
  """TensorBoard events of all files, oldest file first, by the record framing."""
  events = []
  folder = run_dir / 'tensorboard'
  for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
    data, at = path.read_bytes(), 0
    while at < len(data):
      size = int.from_bytes(data[at : at + 8], 'little')
      events.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
      at += 12 + size + 4
  return events


def test_metrics_are_declared_once_and_counts_are_declared_columns():
  assert len(set(records.NAMES)) == len(records.NAMES)
  for m in records.METRICS:
    assert m.doc and m.group
    assert not m.count or m.count in records.NAMES


def test_row_has_every_key_and_null_is_not_zero():
  row = records.row(step=3, loss=0.0)
  assert tuple(row) == records.NAMES
  assert row['loss'] == 0.0 and row['grad_norm'] is None


@pytest.mark.parametrize('value', [float('nan'), float('inf'), np.float32('-inf')])
def test_value_that_is_not_finite_is_refused_by_name(value):
  with pytest.raises(ValueError, match='metric grad_norm: got'):
    records.row(step=1, grad_norm=value)


@pytest.mark.parametrize('value', [True, np.bool_(False), '1', [1.0], np.ones(1)])
def test_value_that_is_no_number_is_refused_by_name(value):
  with pytest.raises(ValueError, match='metric loss: got'):
    records.row(step=1, loss=value)


def test_numpy_numbers_become_json_numbers():
  row = records.row(step=np.int64(2), loss=np.float32(0.5), lr=np.array(0.25))
  assert json.loads(json.dumps(row))['step'] == 2
  assert row['loss'] == 0.5 and row['lr'] == 0.25


def test_misspelt_metric_names_the_nearest():
  with pytest.raises(ValueError, match=r"'grad_nrm'.*did you mean 'grad_norm'"):
    records.row(step=1, grad_nrm=1.0)


@pytest.mark.parametrize('count', [None, 0])
def test_mean_without_its_count_is_refused(count):
  with pytest.raises(ValueError, match='solve_rate is a mean over solve_rate_count'):
    records.row(step=1, solve_rate=0.5, solve_rate_count=count)
  assert records.row(step=1, solve_rate=0.5, solve_rate_count=8)['solve_rate'] == 0.5


def test_mean_of_nothing_is_none():
  assert records.mean([]) is None
  assert records.mean([1, 2]) == 1.5


def test_file_has_one_json_row_a_step_with_every_key(tmp_path):
  _write(tmp_path, [1, 2, 3])
  raw = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert [tuple(json.loads(line)) for line in raw] == [records.NAMES] * 3
  assert _steps(tmp_path) == [1, 2, 3]


def test_row_is_on_disk_as_soon_as_it_is_written(tmp_path):
  writer = records.Writer(str(tmp_path))
  writer.write({'step': 1})
  assert _steps(tmp_path) == [1]
  writer.close()


@pytest.mark.parametrize('steps', [[1, 1], [1, 3], [2], [1, 0]])
def test_repeated_or_skipped_step_is_refused(tmp_path, steps):
  with pytest.raises(ValueError, match='got step='):
    _write(tmp_path, steps)


def test_new_run_in_a_used_folder_is_refused(tmp_path):
  _write(tmp_path, [1, 2])
  with pytest.raises(ValueError, match='already holds steps up to 2'):
    records.Writer(str(tmp_path))
  assert _steps(tmp_path) == [1, 2]


def test_resume_cuts_later_rows_so_that_steps_never_repeat(tmp_path):
  _write(tmp_path, [1, 2, 3, 4, 5])
  _write(tmp_path, [4, 5, 6], resume_step=3)
  assert _steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_resume_fills_lost_rows_with_nulls(tmp_path):
  _write(tmp_path, [1, 2])
  _write(tmp_path, [5], resume_step=4)
  rows = records.read(str(tmp_path))
  assert [row['step'] for row in rows] == [1, 2, 3, 4, 5]
  assert [row['loss'] for row in rows] == [0.1, 0.2, None, None, 0.5]


def test_resume_goes_on_at_the_next_step_only(tmp_path):
  _write(tmp_path, [1, 2, 3])
  with (
    records.Writer(str(tmp_path), resume_step=2) as writer,
    pytest.raises(ValueError, match='got step=2, want step=3'),
  ):
    writer.write({'step': 2})


def test_resume_after_a_torn_line_leaves_a_sound_file(tmp_path):
  _write(tmp_path, [1, 2])
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"step": 3, "lo')
  _write(tmp_path, [3], resume_step=2)
  assert _steps(tmp_path) == [1, 2, 3]


def test_torn_last_line_is_dropped_and_said(tmp_path, caplog):
  _write(tmp_path, [1, 2])
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write('{"step": 3, "lo')
  with caplog.at_level(logging.WARNING):
    assert _steps(tmp_path) == [1, 2]
  assert 'torn last line' in caplog.text


@pytest.mark.parametrize('bad', ['{"step": 2, "lo', '{"loss": NaN, "step": 2}', '[2]'])
def test_damage_in_the_middle_is_an_error_naming_the_line(tmp_path, bad):
  _write(tmp_path, [1])
  with open(tmp_path / 'metrics.jsonl', 'a') as f:
    f.write(bad + '\n{"step": 3}\n')
  with pytest.raises(ValueError, match='line 2'):
    records.read(str(tmp_path))


def test_gap_in_a_file_is_an_error(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n{"step": 3}\n')
  with pytest.raises(ValueError, match='got step=3, want 2'):
    records.read(str(tmp_path))


def test_read_of_a_run_without_rows_is_empty(tmp_path):
  assert records.read(str(tmp_path)) == []


def test_tensorboard_scalars_stand_at_the_learner_step(tmp_path):
  _write(tmp_path, [1, 2])
  seen = {
    (event.step, value.tag): value.simple_value
    for event in _events(tmp_path)
    for value in event.summary.value
  }
  assert seen == {
    (1, 'optimiser/loss'): pytest.approx(0.1),
    (2, 'optimiser/loss'): pytest.approx(0.2),
  }


def test_tensorboard_is_told_to_hide_steps_that_a_resume_repeats(tmp_path):
  _write(tmp_path, [1, 2, 3])
  _write(tmp_path, [3], resume_step=2)
  start = [e.step for e in _events(tmp_path) if e.HasField('session_log')]
  assert start == [3]
  assert len(list((tmp_path / 'tensorboard').iterdir())) == 2


def test_events_are_one_line_each_and_carry_a_time(tmp_path):
  path = str(tmp_path / 'logs' / 'events.jsonl')
  with records.EventLog(path) as log:
    log.write('restart', process='sampler-1', code=-9)
    log.write('note', text='two\nlines')
  events = records.read_events(path)
  assert [e['kind'] for e in events] == ['restart', 'note']
  assert events[0]['code'] == -9 and events[0]['time'] > 1e9


def test_event_that_is_not_json_is_refused_and_leaves_no_trace(tmp_path):
  path = str(tmp_path / 'events.jsonl')
  with records.EventLog(path) as log:
    for value in (float('nan'), object()):
      with pytest.raises(ValueError, match="event 'bad'"):
        log.write('bad', value=value)
    log.write('good')
  assert [e['kind'] for e in records.read_events(path)] == ['good']


def test_event_after_a_torn_one_is_not_swallowed(tmp_path, caplog):
  path = tmp_path / 'events.jsonl'
  path.write_text('{"time": 1, "kind": "a"}\n{"time": 2, "ki')
  with records.EventLog(str(path)) as log:
    log.write('b')
  with caplog.at_level(logging.WARNING):
    assert [e['kind'] for e in records.read_events(str(path))] == ['a', 'b']
  assert 'dropped 1 torn lines' in caplog.text


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='needs /dev/full')
def test_full_disk_is_an_error_that_names_the_file():
  with records.EventLog('/dev/full') as log, pytest.raises(OSError) as caught:
    log.write('note')
  assert 'No space left' in str(caught.value) and '/dev/full' in str(caught.value)


def test_writing_events_loads_neither_jax_nor_tensorboard(tmp_path):
  code = (
    'import sys\nfrom swe17.metrics import alarms, records, screen\n'
    f'records.EventLog({str(tmp_path / "e.jsonl")!r}).write("note")\n'
    'print([m for m in ("jax", "tensorboardX", "matplotlib") if m in sys.modules])'
  )
  run = [sys.executable, '-c', code]
  root = pathlib.Path(__file__).parents[1]
  out = subprocess.run(run, check=True, capture_output=True, text=True, cwd=root)
  assert out.stdout.strip() == '[]'
