"""The screen: live on a terminal and gone without a trace, plain lines elsewhere."""

import io
import os
import pathlib
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from rich import console

from swe17.metrics import records, screen

ROOT = pathlib.Path(__file__).parents[1]
SHOW_CURSOR, HIDE_CURSOR = b'\x1b[?25h', b'\x1b[?25l'


def _row(step, **values):
  known = {
    'solve_rate': 0.4375,
    'solve_rate_count': 64,
    'entropy': 0.41,
    'k3': 3.1e-7,
    'token_count': 900,
    'staleness_mean': 1.2,
    'staleness_max': 2,
    'staleness_count': 8,
    'thinking_tokens': 38.4,
    'total_tokens': 122.0,
    'tokens_per_second': 2310.0,
    'step_seconds': 5.0,
  }
  return records.row(step=step, **{**known, **values})


def _plain(tmp_path, total=40):
  out = io.StringIO()
  plain = console.Console(file=out, force_terminal=False, width=80)
  return screen.Screen(str(tmp_path), total, plain), out


def test_plain_output_is_one_line_a_step_with_units(tmp_path):
  shown, out = _plain(tmp_path)
  shown.update('training', 'step 1/40')
  shown.step(_row(10))
  shown.close()
  assert out.getvalue().splitlines() == [
    'phase: training (step 1/40)',
    'step 10/40 | solve 43.8 % of 64 | entropy 0.410 nats | k3 3.1e-07 nats | '
    'staleness 1.2 (max 2) steps | 38 thinking, 122 total tokens/episode | '
    '2310 tokens/s | 2:30 left',
  ]


def test_plain_output_has_one_line_a_phase_and_one_an_event(tmp_path):
  shown, out = _plain(tmp_path)
  for i in range(5):
    shown.update('imitating', f'step {i}/300', i / 300)
  shown.event('sampler-1 died (signal 9) and was started again')
  shown.update('evaluating', '0/100', 0.0)
  shown.close()
  assert out.getvalue().splitlines() == [
    'phase: imitating (step 0/300)',
    'event: sampler-1 died (signal 9) and was started again',
    'phase: evaluating (0/100)',
  ]


def test_missing_values_show_as_missing_and_never_as_zero(tmp_path):
  shown, out = _plain(tmp_path)
  shown.step(records.row(step=1))
  shown.close()
  text = out.getvalue()
  assert 'solve - of -' in text and 'k3 - nats' in text and '- left' in text
  assert '0.0' not in text


def test_plain_lines_are_flushed_at_once(tmp_path):
  class Counting(io.StringIO):
    flushed = 0

    def flush(self):
      self.flushed += 1

  out = Counting()
  shown = screen.Screen(str(tmp_path), 4, console.Console(file=out))
  before = out.flushed
  shown.step(_row(1))
  assert out.flushed > before
  shown.close()


def test_poll_shows_each_new_row_of_the_file_once(tmp_path):
  shown, out = _plain(tmp_path)
  assert shown.poll() == 0
  with records.Writer(str(tmp_path)) as writer:
    writer.write(_row(1))
    writer.write(_row(2))
    assert shown.poll() == 2 and shown.poll() == 0
    writer.write(_row(3))
    assert shown.poll() == 1
  shown.close()
  assert [line.split(' |')[0] for line in out.getvalue().splitlines()] == [
    f'step {step}/40' for step in (1, 2, 3)
  ]


def test_poll_leaves_a_line_that_is_still_being_written(tmp_path):
  shown, _ = _plain(tmp_path)
  with open(tmp_path / 'metrics.jsonl', 'w') as f:
    f.write('{"step": 1}\n{"st')
    f.flush()
    assert shown.poll() == 1
    f.write('ep": 2}\n')
  assert shown.poll() == 1
  shown.close()


def test_poll_after_a_resume_shows_what_is_trained_again_and_nothing_else(tmp_path):
  shown, out = _plain(tmp_path)
  with records.Writer(str(tmp_path)) as writer:
    for step in (1, 2, 3):
      writer.write(_row(step))
  shown.poll()
  with records.Writer(str(tmp_path), resume_step=1) as writer:
    for step in (2, 3, 4):
      writer.write(_row(step, solve_rate=0.5))
  assert shown.poll() == 3
  shown.close()
  seen = [line[:25] for line in out.getvalue().splitlines()]
  assert seen[:3] == [f'step {s}/40 | solve 43.8 % of'[:25] for s in (1, 2, 3)]
  assert seen[3:] == [f'step {s}/40 | solve 50.0 % of'[:25] for s in (2, 3, 4)]


def test_rows_of_a_resumed_run_are_known_and_not_printed_again(tmp_path):
  with records.Writer(str(tmp_path)) as writer:
    for step in (1, 2, 3):
      writer.write(_row(step))
  shown, out = _plain(tmp_path)
  with records.Writer(str(tmp_path), resume_step=2) as writer:
    assert shown.poll() == 0
    writer.write(_row(3, solve_rate=0.5))
  assert shown.poll() == 1
  shown.close()
  (line,) = out.getvalue().splitlines()
  assert line.startswith('step 3/40 | solve 50.0 %')


def test_time_left_of_a_phase_follows_from_the_share_done(tmp_path, monkeypatch):
  now = [100.0]
  monkeypatch.setattr(time, 'monotonic', lambda: now[0])
  shown, _ = _plain(tmp_path)
  shown.update('imitating', '', 0.0)
  assert shown._left() is None
  now[0] += 30
  shown.update('imitating', '', 0.25)
  assert shown._left() == pytest.approx(90)
  shown.update('imitating', '', 0.25, seconds_left=7)
  assert shown._left() == 7
  shown.close()


@pytest.mark.parametrize(
  'seconds, text', [(None, '-'), (0, '0:00'), (59.6, '1:00'), (3671, '1:01:11')]
)
def test_clock(seconds, text):
  assert screen.clock(seconds) == text


def test_sparkline_spans_least_to_most_and_leaves_gaps():
  assert screen.sparkline([0.0, None, 1.0, 0.5]) == '▁ █▅'
  assert screen.sparkline([None, None]) == ''
  assert screen.sparkline([2.0, 2.0]) == '▁▁'


def test_live_screen_shows_every_number_of_the_step(tmp_path):
  out = io.StringIO()
  wide = console.Console(file=out, force_terminal=True, width=110, height=30)
  shown = screen.Screen(str(tmp_path), 40, wide)
  shown.update('training', '[bold] is text, no markup', 0.25)
  shown.event('a sampler died [1/2]')
  for step in range(1, 11):
    shown.step(_row(step, solve_rate=step / 20))
  shown.close()
  text = out.getvalue()
  for part in (
    '[bold] is text, no markup',
    'a sampler died [1/2]',
    '10 of 40',
    '50.0 % (last 5: 40.0 %)',
    '0.410 nats',
    '3.1e-07 nats',
    '1.2 (max 2) steps',
    '38 thinking, 122 total',
    '2,310 tokens/s',
    '2:30 left',
    '▁▂▃▃▄▅▆▆▇█',
  ):
    assert part in text, part


def test_terminal_that_is_not_unicode_gets_ascii_only(tmp_path):
  out = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  shown = screen.Screen(
    str(tmp_path), 40, console.Console(file=out, force_terminal=True, width=90)
  )
  shown.update('training', '', None)
  for step in (1, 2):
    shown.step(_row(step, solve_rate=step / 4))
  shown.close()
  out.flush()
  assert b'solve rate' in out.buffer.getvalue()


_CHILD = """
import signal, sys, time
# A shell that runs the tests in the background has its children ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from swe17.metrics import screen
shown = screen.Screen('.', 40)
shown.update('training', 'step 1/40', 0.1)
print('ready', flush=True)
time.sleep(30)
"""


def test_interrupt_gives_the_cursor_back_even_without_close():
  """Ctrl-C in a child on a real pseudo-terminal that never calls `close`."""
  primary, secondary = pty.openpty()
  child = subprocess.Popen(
    [sys.executable, '-c', _CHILD],
    cwd=ROOT,
    stdin=secondary,
    stdout=secondary,
    stderr=secondary,
    env={**os.environ, 'TERM': 'xterm'},
    start_new_session=True,
  )
  os.close(secondary)
  seen, sent = b'', False
  try:
    while select.select([primary], [], [], 20)[0]:
      try:
        data = os.read(primary, 65536)
      except OSError:  # the child closed its end
        break
      if not data:
        break
      seen += data
      if b'ready' in seen and not sent:
        child.send_signal(signal.SIGINT)
        sent = True
    assert child.wait(20) != 0
  finally:
    if child.poll() is None:
      child.kill()
      child.wait()
    os.close(primary)
  assert HIDE_CURSOR in seen
  assert seen.rindex(SHOW_CURSOR) > seen.rindex(HIDE_CURSOR)
