"""The report: one offline file, honest about what is missing, on any partial run."""

import base64
from html import parser
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from swe17.metrics import figures, pictures, records, report

ROOT = pathlib.Path(__file__).parents[1]
VOID = {'meta', 'img', 'br', 'link'}


def synthetic_run(folder: pathlib.Path, steps: int = 40) -> pathlib.Path:
  """A run folder of made-up rows, evaluations, events and episodes."""
  rng = np.random.default_rng(0)
  with records.Writer(str(folder)) as writer:
    for step in range(1, steps + 1):
      writer.write(_values(step, step / steps, rng))
  config = {
    'seed': {'value': 3, 'origin': 'flag'},
    'steps': {'value': 40, 'origin': 'file'},
    'sampler.top_p': {'value': 0.97, 'origin': 'default'},
    'rollout.max_staleness': {'value': 3, 'origin': 'default'},
  }
  (folder / 'config.json').write_text(json.dumps(config))
  run = {'command': 'python -m x --a="<b>"', 'seconds': 372, 'started': 1000}
  (folder / 'run.json').write_text(json.dumps(run))
  (folder / 'evals').mkdir()
  for version, rate in ((0, 0.3), (20, 0.5), (40, 0.65)):
    _eval(folder, version, rate)
  events = [
    {'time': 1065, 'kind': 'restart', 'process': 'sampler-1', 'code': -9},
    {'time': 1100, 'kind': 'alarm', 'step': 7, 'text': 'k3 is <0.06> nats'},
  ]
  (folder / 'events.jsonl').write_text(''.join(json.dumps(e) + '\n' for e in events))
  (folder / 'episodes').mkdir()
  (folder / 'episodes' / 'step 7 #1.md').write_text('# bisect/3 & co, solved\n\n...\n')
  return folder


def _values(step, part, rng):
  noise = rng.normal()
  return {
    'step': step,
    'version': step,
    'time': 9.0 * step,
    'episodes': 64,
    'groups_trained': 6,
    'groups_no_signal': 2,
    'token_count': 3000,
    'signal_count': 900,
    'solve_rate': np.clip(0.3 + 0.35 * part + 0.05 * noise, 0, 1),
    'solve_rate_count': 64,
    'invalid_share': 0.0,
    'malformed_share': 0.05 * (1 - part),
    'submitted_share': 0.7 + 0.2 * part,
    'cut_share': 0.25 - 0.15 * part,
    'entropy': 0.42 - 0.06 * part + 0.01 * noise,
    'kept_entropy': 0.33 - 0.05 * part + 0.01 * noise,
    'kept_mass': 0.985 + 0.002 * noise if step % 3 else None,
    'kept_mass_count': 90,
    'k3': 6e-4 * np.exp(0.3 * noise),
    'k3_signal': 2e-3 * np.exp(0.3 * noise),
    'ratio_mean': 1.0 + 0.002 * noise,
    'staleness_mean': 1.2 + 0.2 * noise,
    'staleness_max': 2 + (noise > 1),
    'staleness_count': 8,
    'thinking_tokens': 30 + 12 * part + noise,
    'sampled_tokens': 80 + 20 * part + 2 * noise,
    'total_tokens': 260 + 30 * part + 4 * noise,
    'turns': 5 + part,
    'calls_per_turn': 1.1 + 0.1 * part,
    'tests': 1.2 + 1.5 * part + 0.1 * noise,
    'tokens_per_second': 2300 + 80 * noise,
    'learner_tokens_per_second': 5200 + 90 * noise,
    'step_seconds': 9 + 0.3 * noise,
    'wait_seconds': 3 + 0.3 * noise,
    'publish_seconds': 0.4,
    'checkpoint_seconds': 0.8 if step % 5 == 0 else 0.0,
    'grad_norm': 0.3 * np.exp(0.4 * noise),
    'delta_share': 0.4 - 0.05 * part,
    'delta_changed_share': 0.6 - 0.1 * part,
  }


def _eval(folder, version, rate):
  rng = np.random.default_rng(version)
  units = {f'f{i}': (rng.binomial(4, rate, 3) / 4).tolist() for i in range(20)}
  value = {
    'version': version,
    'split': 'heldout',
    'pass_at_1': rate,
    'low': rate - 0.08,
    'high': rate + 0.08,
    'n_tasks': 60,
    'n_functions': 20,
    'samples': 4,
    'tokens': 260.5,
    'turns': 5.2,
    'units': units,
    'tasks': {f'{u}/{i}': x for u, xs in units.items() for i, x in enumerate(xs)},
    'task_units': {f'{u}/{i}': u for u, xs in units.items() for i in range(len(xs))},
  }
  (folder / 'evals' / f'v{version:03d}.json').write_text(json.dumps(value))


class _Page(parser.HTMLParser):
  """Collects text and links; fails on tags that do not nest."""

  def __init__(self, html):
    super().__init__()
    self.open, self.links, self.images, self.text = [], [], [], ''
    self.feed(html)
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    named = dict(attrs)
    self.links += [named[k] for k in ('href', 'src') if k in named]
    self.images += [named['src']] if tag == 'img' else []
    if tag not in VOID:
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += '' if self.open[-1:] == ['style'] else data


@pytest.fixture(scope='module')
def page(tmp_path_factory):
  folder = synthetic_run(tmp_path_factory.mktemp('run'))
  path = pathlib.Path(report.write(str(folder)))
  assert path == folder / 'report.html'
  return _Page(path.read_text('utf-8'))


def test_report_opens_offline(page):
  outside = [x for x in page.links if not x.startswith(('data:', 'episodes/'))]
  assert outside == []


def test_every_picture_is_embedded_and_is_an_svg(page):
  assert len(page.images) == len(pictures.PICTURES)
  for source in page.images:
    kind, data = source.split(',', 1)
    assert kind == 'data:image/svg+xml;base64'
    assert b'<svg' in base64.b64decode(data)


def test_headline_has_both_rates_the_paired_difference_and_how_it_was_made(page):
  for part in ('30.0 %', '65.0 %', '95 % interval 57.0 to 73.0', 'which excludes 0'):
    assert part in page.text
  assert re.search(r'\+\d\d\.\d points', page.text)
  assert '6.2' in page.text and '40 of 40' in page.text


def test_what_a_run_wrote_is_text_and_never_markup(page):
  assert 'python -m x --a="<b>"' in page.text
  assert 'k3 is <0.06> nats' in page.text


def test_events_carry_their_time_since_the_start(page):
  assert '1:05' in page.text and 'process=sampler-1' in page.text


def test_episodes_are_linked_relative_to_the_report(page):
  assert 'episodes/step%207%20%231.md' in page.links
  assert 'bisect/3 & co, solved' in page.text


def test_claims_are_computed_from_the_rows(page):
  assert re.search(r'training tasks: 3\d\S* % \(first 5 steps\) to 6\d', page.text)


def test_empty_folder_says_not_recorded_and_never_zero(tmp_path):
  page = _Page(pathlib.Path(report.write(str(tmp_path))).read_text())
  assert page.images == []
  assert page.text.count(report.NOT_RECORDED) >= len(pictures.PICTURES) + 8
  head = page.text.split('Curves')[0]
  assert not re.search(r'\b0(\.0)?\b', head)


def test_run_with_one_evaluation_has_no_after(tmp_path):
  (tmp_path / 'evals').mkdir()
  _eval(tmp_path, 0, 0.3)
  head = _Page(report.render(str(tmp_path))).text.split('Curves')[0]
  assert '30.0 %' in head
  assert re.search(r'after\s+not recorded', head)
  assert re.search(r'Paired difference\s+not recorded', head)


def test_evaluations_that_do_not_pair_say_why(tmp_path):
  (tmp_path / 'evals').mkdir()
  _eval(tmp_path, 0, 0.3)
  _eval(tmp_path, 5, 0.5)
  path = tmp_path / 'evals' / 'v005.json'
  value = json.loads(path.read_text())
  value['tasks'] = {k: v for k, v in value['tasks'].items() if k.startswith('f3/')}
  path.write_text(json.dumps(value))
  text = _Page(report.render(str(tmp_path))).text
  assert 'do not pair' in text and 'got 1 units' in text


def test_evaluations_pair_on_the_tasks_that_both_have(tmp_path):
  (tmp_path / 'evals').mkdir()
  _eval(tmp_path, 0, 0.3)
  _eval(tmp_path, 5, 0.5)
  text = _Page(report.render(str(tmp_path))).text
  assert 'without an outcome on one side' not in text
  paths = [tmp_path / 'evals' / f'v00{v}.json' for v in (0, 5)]
  before, after = (json.loads(path.read_text()) for path in paths)
  del before['tasks']['f3/1'], after['tasks']['f4/0'], after['tasks']['f5/2']
  for path, value in zip(paths, (before, after), strict=True):
    path.write_text(json.dumps(value))
  common = before['tasks'].keys() & after['tasks'].keys()
  gain = sum(after['tasks'][k] - before['tasks'][k] for k in common) / len(common)
  text = _Page(report.render(str(tmp_path))).text
  assert f'{100 * gain:+.1f} points' in text
  assert '3 tasks are without an outcome on one side' in text


@pytest.mark.parametrize(
  'name, content',
  [
    ('config.json', '{"seed": '),
    ('metrics.jsonl', '{"step": 1}\n{"step": 4}\n'),
    ('evals/v000.json', '{"version": 0}'),
    ('evals/v000.json', '[NaN]'),
  ],
)
def test_damaged_file_is_named_and_the_rest_is_shown(tmp_path, name, content):
  synthetic_run(tmp_path, steps=3)
  (tmp_path / name).write_text(content)
  text = _Page(report.render(str(tmp_path))).text
  assert name in text.split('Held-out solve rate before')[0]
  assert 'sampler-1' in text


def test_missing_folder_is_one_clear_error(tmp_path):
  with pytest.raises(ValueError, match='run_dir'):
    report.write(str(tmp_path / 'absent'))


def test_null_leaves_a_gap_and_is_not_drawn_as_zero():
  rows = [records.row(step=s, loss=v) for s, v in ((1, 2.0), (2, None), (3, 4.0))]
  values = figures.column(rows, pictures.Line('loss', 'loss', 10))
  assert values[0] == 20 and np.isnan(values[1]) and values[2] == 40
  smooth = figures.smooth(values, 1.0)
  # Weights halve a step, and the gap counts as a step: (20 / 4 + 40) / (1 / 4 + 1).
  assert np.isnan(smooth[1]) and smooth[2] == pytest.approx(36)


def test_average_of_a_constant_is_that_constant():
  assert figures.smooth(np.full(9, 3.5), 2.0) == pytest.approx(np.full(9, 3.5))


def test_log_picture_says_how_many_values_it_cannot_draw():
  (picture,) = (p for p in pictures.PICTURES if p.name == 'k3')
  rows = [
    records.row(step=s, k3=v, token_count=9)
    for s, v in ((1, 1e-4), (2, 0.0), (3, -1e-9))
  ]
  assert '2 steps of all sampled tokens' in figures.undrawn(picture, rows)
  assert figures.draw(picture, rows, {}) is not None


def test_pictures_draw_declared_columns_only():
  for picture in pictures.PICTURES:
    whole = (picture.parts_of,) if picture.parts_of else ()
    for line in (*picture.lines, *whole):
      assert line.column in records.NAMES


def test_same_rows_give_the_same_bytes():
  rows = [records.row(step=s, solve_rate=s / 9, solve_rate_count=8) for s in (1, 2, 3)]
  once, again = (figures.draw(pictures.PICTURES[0], rows, {}) for _ in range(2))
  assert once is not None and once == again


def test_command_rebuilds_the_report_and_refuses_a_wrong_folder(tmp_path):
  run = [sys.executable, '-m', 'experiments.report']
  good = subprocess.run(
    [*run, f'--run_dir={tmp_path}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert good.returncode == 0, good.stderr
  assert good.stdout.strip() == str(tmp_path / 'report.html')
  bad = subprocess.run(
    [*run, f'--run_dir={tmp_path}/no'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert bad.returncode == 2
  assert bad.stderr.strip().startswith('report: run_dir: got')


def _scored(folder, version, rate, outcome):
  _eval(folder, version, rate)
  path = folder / 'evals' / f'v{version:03d}.json'
  value = json.loads(path.read_text())
  outcomes = {task: outcome for task in value['tasks']}
  more = {
    'outcome': outcome,
    'outcome_low': outcome - 0.05,
    'outcome_high': outcome + 0.05,
    'outcomes': outcomes,
    'calls_per_turn': 1.0 + version,
  }
  path.write_text(json.dumps({**value, **more}))
  return path


def test_scores_that_are_no_zero_or_one_are_shown_beside_calls_of_a_turn(tmp_path):
  (tmp_path / 'evals').mkdir()
  _scored(tmp_path, 0, 0.1, 0.25)
  path = _scored(tmp_path, 2, 0.4, 0.625)
  text = _Page(report.render(str(tmp_path))).text
  assert '0.250 [0.200 to 0.300] at version 0, then 0.625' in text
  assert '+0.375, 95 % interval +0.375 to +0.375' in text
  assert re.search(r'held-out calls a turn\s*1 at version 0, then 3 at version 2', text)
  value = json.loads(path.read_text())
  del value['outcomes']
  path.write_text(json.dumps(value))
  assert 'do not pair' in _Page(report.render(str(tmp_path))).text


def test_scores_of_zero_and_one_say_nothing_more_than_the_solve_rate(tmp_path):
  (tmp_path / 'evals').mkdir()
  _scored(tmp_path, 0, 0.25, 0.25)
  assert 'mean score' not in _Page(report.render(str(tmp_path))).text
