"""The report of a run: one HTML file that opens offline, from the files of its folder.

Reads `config.json` ({dotted name: {"value", "origin", "doc"}}), `run.json` ({"command",
"seconds", "started"}, optional), `metrics.jsonl`, `events.jsonl`, `evals/*.json` and
`episodes/*.md`. Whatever is missing is said to be missing, never shown as 0; a file
that does not read is named at the top. Pictures are embedded.
"""

import base64
from collections.abc import Mapping, Sequence
import importlib.resources
import json
import os
from typing import Any
import urllib.parse

import jinja2

from swe17.metrics import figures, lines, pictures, records, statistics

NOT_RECORDED = 'not recorded'
_EVENTS = 300  # the newest are shown
_EPISODES = 200


def write(run_dir: str) -> str:
  """Writes `report.html` into the run folder and returns its path.

  Works on a run that is not finished. ValueError where there is no such folder;
  OSError, naming the file, where it cannot be written.
  """
  if not os.path.isdir(run_dir):
    raise ValueError(f'run_dir: got {run_dir!r}, want the folder of a run')
  path = os.path.join(run_dir, 'report.html')
  lines.replace(path, render(run_dir).encode())
  return path


def render(run_dir: str) -> str:
  """The report as HTML."""
  problems: list[str] = []
  rows = _rows(run_dir, problems)
  config = _object(run_dir, 'config.json', problems)
  run = _object(run_dir, 'run.json', problems)
  events = records.read_events(os.path.join(run_dir, 'events.jsonl'))
  evals = _evals(run_dir, problems)
  settings = {
    name: leaf['value']
    for name, leaf in config.items()
    if isinstance(leaf, dict) and 'value' in leaf
  }
  environment = jinja2.Environment(
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
  )
  source = importlib.resources.files('swe17.metrics').joinpath('report.html.j2')
  return environment.from_string(source.read_text('utf-8')).render(
    name=os.path.basename(os.path.abspath(run_dir)),
    problems=problems,
    headline=_headline(evals),
    facts=[*_facts(rows, settings, run, events), *_scores(evals)],
    pictures=_pictures(rows, settings, evals),
    half_life=figures.half_life(rows),
    evals=[_eval_row(e) for e in evals],
    config=_config(config),
    kinds=_kinds(events),
    events=_events(events, run),
    events_total=len(events),
    episodes=_episodes(run_dir),
    metrics=_metrics(rows),
    missing=NOT_RECORDED,
  )


def _rows(run_dir: str, problems: list[str]) -> list[dict[str, Any]]:
  try:
    return records.read(run_dir)
  except ValueError as e:
    problems.append(str(e))
    return []


def _object(run_dir: str, name: str, problems: list[str]) -> dict[str, Any]:
  """A JSON object of the folder; {} where it is missing, and named if it is damaged."""
  path = os.path.join(run_dir, name)
  if not os.path.exists(path):
    return {}
  with open(path, 'rb') as f:
    value = lines.parse(f.read())
  if value is None:
    problems.append(f'{name} is no JSON object and was left out')
    return {}
  return value


_NEEDED = {
  'version': int,
  'split': str,
  'pass_at_1': (int, float),
  'low': (int, float),
  'high': (int, float),
}


def _evals(run_dir: str, problems: list[str]) -> list[dict[str, Any]]:
  """Evaluations by version, those of one version by file name."""
  folder = os.path.join(run_dir, 'evals')
  found = []
  for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
    if not name.endswith('.json'):
      continue
    value = _object(run_dir, f'evals/{name}', problems)
    if value and all(isinstance(value.get(k), t) for k, t in _NEEDED.items()):
      found.append({'file': name, **value})
    elif value:
      problems.append(f'evals/{name} lacks one of {", ".join(_NEEDED)}: left out')
  return sorted(found, key=lambda e: (e['version'], e['file']))


def _headline(evals: Sequence[Mapping[str, Any]]) -> dict[str, str]:
  """Held-out solve rate of the first and the last version evaluated, and their gap."""
  held = [e for e in evals if e['split'] == 'heldout']
  out = dict.fromkeys(('before', 'after', 'gain'), NOT_RECORDED)
  out.update(before_note='', after_note='', gain_note='')
  if not held:
    return out
  before, after = held[0], held[-1]
  sides = [('before', before)]
  if after['version'] != before['version']:
    sides.append(('after', after))
  for side, e in sides:
    out[side] = f'{100 * e["pass_at_1"]:.1f} %'
    out[side + '_note'] = (
      f'95 % interval {100 * e["low"]:.1f} to {100 * e["high"]:.1f}; version '
      f'{e["version"]}, {_or(e.get("n_tasks"))} tasks of '
      f'{_or(e.get("n_functions"))} functions'
    )
  if len(sides) == 2:
    out.update(_gain(before, after))
  return out


def _gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
  try:
    pairs, alone = statistics.pairs(before, after)
    gain, low, high = statistics.paired_interval(*pairs, seed=0)
  except (ValueError, TypeError, KeyError, AttributeError) as e:
    return {'gain_note': f'the two evaluations do not pair: {e}'}
  without = f'; {alone} tasks are without an outcome on one side' if alone else ''
  verdict = 'excludes 0' if low > 0 or high < 0 else 'includes 0'
  return {
    'gain': f'{100 * gain:+.1f} points',
    'gain_note': (
      f'95 % interval {100 * low:+.1f} to {100 * high:+.1f}, which {verdict}; '
      f'paired by task, bootstrap over functions{without}'
    ),
  }


def _facts(
  rows: Sequence[Mapping[str, Any]],
  settings: Mapping[str, Any],
  run: Mapping[str, Any],
  events: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str]]:
  steps = NOT_RECORDED
  if rows:
    steps = f'{rows[-1]["step"]} of {_or(settings.get("steps"))}'
  seconds, where = run.get('seconds'), ''
  if seconds is None:
    times = [row['time'] for row in rows if row['time'] is not None]
    seconds, where = (times[-1] if times else None), ', at the last row'
  alarms = sum(event['kind'] == 'alarm' for event in events)
  return [
    ('learner steps', steps),
    ('minutes', NOT_RECORDED if seconds is None else f'{seconds / 60:.1f}{where}'),
    ('seed', _or(settings.get('seed'))),
    ('alarms', str(alarms) if events else NOT_RECORDED),
    ('command', _or(run.get('command'))),
  ]


def _scores(evals: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
  """Mean scores and calls a turn, where a score says more than solved or not."""
  held = [e for e in evals if e['split'] == 'heldout' and 'outcome' in e]
  if all(e['outcome'] == e['pass_at_1'] for e in held):
    return []
  scores, calls = [], []
  for e in (held[0], held[-1])[: len(held)]:
    ends = f'{e["outcome_low"]:.3f} to {e["outcome_high"]:.3f}'
    scores.append(f'{e["outcome"]:.3f} [{ends}] at version {e["version"]}')
    calls.append(f'{_number(e.get("calls_per_turn"))} at version {e["version"]}')
  out = [
    ('held-out mean score', ', then '.join(scores)),
    ('held-out calls a turn', ', then '.join(calls)),
  ]
  if len(held) > 1:
    out.append(('held-out mean score, difference', _score_gain(held[0], held[-1])))
  return out


def _score_gain(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
  try:
    gain, low, high = statistics.score_gain(before, after, seed=0)
  except (ValueError, TypeError, KeyError, AttributeError) as e:
    return f'the two evaluations do not pair: {e}'
  return f'{gain:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}, paired by task'


def _pictures(
  rows: Sequence[Mapping[str, Any]],
  settings: Mapping[str, Any],
  evals: Sequence[Mapping[str, Any]],
) -> list[dict[str, str]]:
  out = []
  for picture in pictures.PICTURES:
    points = _points(rows, evals) if picture.name == 'solve_rate' else []
    svg = figures.draw(picture, rows, settings, points)
    data = '' if svg is None else base64.b64encode(svg).decode()
    out.append(
      {
        'title': picture.title,
        'claim': figures.claim(picture, rows),
        'note': picture.note,
        'undrawn': figures.undrawn(picture, rows),
        'source': f'data:image/svg+xml;base64,{data}' if data else '',
      }
    )
  return out


def _points(
  rows: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float, float, float]]:
  """Held-out evaluations as (step, mean, low, high) [%], where their step is known."""
  step = {0: 0}
  for row in rows:
    if row['version'] is not None:
      step.setdefault(row['version'], row['step'])
  return [
    (step[e['version']], *(100 * e[k] for k in ('pass_at_1', 'low', 'high')))
    for e in evals
    if e['split'] == 'heldout' and e['version'] in step
  ]


def _eval_row(e: Mapping[str, Any]) -> list[str]:
  rates = [f'{100 * e[k]:.1f}' for k in ('pass_at_1', 'low', 'high')]
  counts = [_or(e.get(k)) for k in ('n_tasks', 'n_functions', 'samples')]
  means = [_number(e.get(k)) for k in ('tokens', 'turns', 'seconds')]
  return [e['file'], str(e['version']), e['split'], *rates, *counts, *means]


def _config(config: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
  """(name, value, origin, meaning), the settings somebody chose first."""
  leaves = []
  for name, leaf in config.items():
    leaf = leaf if isinstance(leaf, dict) else {'value': leaf}
    value = json.dumps(leaf['value']) if 'value' in leaf else NOT_RECORDED
    origin = str(leaf.get('origin', NOT_RECORDED))
    leaves.append((name, value, origin, str(leaf.get('doc', ''))))
  return sorted(leaves, key=lambda leaf: (leaf[2] == 'default', leaf[0]))


def _kinds(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
  kinds = [str(event['kind']) for event in events]
  return [(kind, kinds.count(kind)) for kind in sorted(set(kinds))]


def _events(
  events: Sequence[Mapping[str, Any]], run: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
  """(minutes and seconds since the start, kind, the rest) of the newest events."""
  timed = [e['time'] for e in events if isinstance(e.get('time'), (int, float))]
  start = run.get('started') or (min(timed) if timed else 0)
  out = []
  for event in events[-_EVENTS:]:
    at = NOT_RECORDED
    if isinstance(event.get('time'), (int, float)):
      minutes, seconds = divmod(max(0, int(event['time'] - start)), 60)
      at = f'{minutes}:{seconds:02d}'
    text = event.get('text')
    rest = [
      f'{k}={v if isinstance(v, str) else json.dumps(v)}'
      for k, v in event.items()
      if k not in ('time', 'kind', 'text')
    ]
    said = [str(text)] if text is not None else []
    out.append((at, str(event['kind']), '  '.join([*said, *rest])))
  return out


def _episodes(run_dir: str) -> list[tuple[str, str, str]]:
  """(relative link, file name, first line) of the episodes written out to read."""
  folder = os.path.join(run_dir, 'episodes')
  names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
  out = []
  for name in [n for n in names if n.endswith('.md')][:_EPISODES]:
    with open(os.path.join(folder, name), encoding='utf-8', errors='replace') as f:
      first = f.readline().strip().lstrip('# ')
    out.append(('episodes/' + urllib.parse.quote(name), name, first[:160]))
  return out


def _metrics(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
  """(group, name, unit, first, last, meaning) of every declared column."""
  out: list[tuple[str, ...]] = []
  for m in records.METRICS:
    known = [row[m.name] for row in rows if row[m.name] is not None]
    first, last = (_number(known[i]) if known else NOT_RECORDED for i in (0, -1))
    out.append((m.group, m.name, m.unit, first, last, m.doc))
  return out


def _number(value: Any) -> str:
  if isinstance(value, float) and not value.is_integer():
    return f'{value:.4g}'
  return _or(int(value) if isinstance(value, float) else value)


def _or(value: Any) -> str:
  return NOT_RECORDED if value is None else str(value)
